"""The memory of inference: a forecast for each way to run a model, and the largest batch."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from amp_lab.core.errors import TraceError, first_line
from amp_lab.core.precision import Precision
from amp_lab.tracing.answered import answered
from amp_lab.tracing.decisions import Decisions, ValuesNeeded
from amp_lab.tracing.fake_device import ModelRun, autocast_on
from amp_lab.tracing.inference_result import InferenceForecast, InferenceTable
from amp_lab.tracing.kv_cache import (
    Arguments,
    CachedTensor,
    cached_tensors,
    forecast_cache,
    token_count,
    with_tokens,
)
from amp_lab.tracing.memory import BatchedInputs, MemoryByBatch, errors_with, memory_and_limit
from amp_lab.tracing.real_run import ModelCall, Passes
from amp_lab.tracing.storage_ledger import StorageLedger, StorageTrace
from amp_lab.tracing.structures import map_tensors, named_tensors
from amp_lab.tracing.training_step import one_line_errors, steps_on, traced_on_either

_LOW = (Precision.FP16, Precision.BF16)


@dataclass(frozen=True)
class QuantizedWeights:
    """A format of the weights of linear layers, which are multiplied in 16 bits."""

    name: str
    bits: int
    group: int | None  # values that share a scale; None: those of a row
    scale_bytes: int  # of a group, its zero point included

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a weight (rows, columns) with its scales."""
        groups = 1
        if self.group is not None:
            groups = -(-columns // self.group)  # rounded up
        values = rows * columns * self.bits // 8
        scales = rows * groups * self.scale_bytes
        return values + scales


QUANTIZED_WEIGHTS = (
    QuantizedWeights("int8", bits=8, group=None, scale_bytes=5),
    QuantizedWeights("int4", bits=4, group=128, scale_bytes=4),
)
"""As torchao 0.18 stores them in a bf16 model: ``Int8WeightOnlyConfig(version=2)`` with a scale in
fp32 and a zero point in int8, and ``Int4WeightOnlyConfig()`` with both in bf16."""


def forecast_inference(
    model: nn.Module,
    *inputs: Any,
    device_type: str = "cuda",
    precision: Precision | str,
    autocast: bool = False,
    **kwargs: Any,
) -> InferenceForecast:
    """Forecast the memory of a forward pass of `model` on a device that need not be there.

    The pass is ``model(*inputs, **kwargs)`` under `torch.inference_mode`. Weights and
    floating-point inputs are cast to the precision before it, or, with `autocast`, are left as they
    are and cast by autocast, which keeps no copy of a weight there. (Under `torch.no_grad` it keeps
    all of them until its block ends: see `kept_under_no_grad`.) The model runs in the mode that it
    is in: call ``model.eval()`` first. `inputs` and `kwargs` are tensors, or structures of them, on
    any device.
    Not counted: the workspaces of cuBLAS and cuDNN, what the driver takes, and fragmentation.

    `cache` is the KV cache of a language model, if its output holds one; else it is None.

    Raises `TraceError` for a model without a fake copy, an input that it does not take, an op whose
    result depends on values, and an unknown precision; `DeviceError` for an unknown device type.
    """

    def trace(call: ModelCall, decisions: Decisions | None) -> InferenceForecast:
        with _steps(call.model, device_type, [precision], ways=[autocast]) as (step,):
            args = step.run.fake(call.args)
            kwargs = step.run.fake(call.kwargs)
            return _forecast_with_cache(step, (args, kwargs), decisions)

    call = ModelCall(model, inputs, kwargs, passes=Passes.FORWARD)
    return answered(trace, call, "forecast")


def inference_table(
    model: nn.Module,
    inputs: BatchedInputs,
    *,
    memory_bytes: int | str | None = None,
    reserve: float = 0.0,
    precisions: Iterable[Precision | str] = (Precision.FP32, Precision.BF16),
    device_type: str = "cuda",
    tokens: int | None = None,
) -> InferenceTable:
    """Forecasts side by side: fp32, each low precision by autocast and cast, and int8 and int4.

    With `memory_bytes` the largest batch is asked for, with a share of it held in `reserve`. With
    `tokens` the KV cache of so many in each sequence is forecast, if the model returns one. What a
    model refuses, such as cast weights, is named. Raises as `forecast_inference`.
    """
    total, limit = memory_and_limit(memory_bytes, reserve)
    precisions = list(precisions)  # an iterator could be read only once

    def trace(call: ModelCall, decisions: Decisions | None) -> _ByWay:
        with _steps(call.model, device_type, precisions, ways=[True, False]) as steps:
            return _each_way(steps, inputs, limit, tokens, decisions)

    call = ModelCall(model, inputs.args, inputs.kwargs, passes=Passes.FORWARD)
    by_way = answered(trace, call, "forecast")
    return InferenceTable(
        tuple(by_way.forecasts),
        total,
        by_way.largest,
        reserve,
        by_way.failed,
        no_largest=by_way.no_largest,
        tokens=tokens,
        places=_places(model),
    )


def _places(model: nn.Module) -> int | None:
    """For how many tokens the model has places, if a config says so; a fake table takes more."""
    config = getattr(model, "config", None)
    places = getattr(config, "max_position_embeddings", None)
    if not isinstance(places, int):
        return None
    return places


@dataclass
class _ByWay:
    """The forecasts of the ways to run a model."""

    forecasts: list[InferenceForecast] = field(default_factory=list)
    largest: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    no_largest: dict[str, str] = field(default_factory=dict)  # why there is no largest batch


def _each_way(
    steps: "list[InferenceStep]",
    inputs: BatchedInputs,
    limit: int | None,
    tokens: int | None,
    decisions: Decisions | None,
) -> _ByWay:
    """Forecast each way; what a model refuses in low precision is named."""
    by_way = _ByWay()
    linear = _linear_weights(steps[0].run.model)
    for step in steps:
        batch = inputs.of(inputs.batch, step.traced_on)
        try:
            forecast = _forecast_with_cache(step, batch, decisions, tokens)
        except ValuesNeeded:
            raise
        except TraceError as error:
            if step.precision is Precision.FP32:  # the model or its inputs are wrong
                raise
            by_way.failed[step.way] = str(error)
            continue
        saved: dict[str, int] = {}  # bytes, by format of quantized weights
        if step.is_cast and step.precision is steps[-1].precision:
            saved = _saved_bytes(linear, step.precision)
        by_way.forecasts.append(forecast)
        for name, nbytes in saved.items():
            by_way.forecasts.append(forecast.with_smaller_weights(name, nbytes))
        if limit is not None:
            _note_largest(by_way, step, inputs, limit, {step.way: 0, **saved})
    if not by_way.forecasts:
        raise TraceError(next(iter(by_way.failed.values())))
    return by_way


def _forecast_with_cache(
    step: "InferenceStep",
    given: Arguments,
    decisions: Decisions | None,
    tokens: int | None = None,
) -> InferenceForecast:
    """The forecast for `given`, with all that takes further passes.

    These are the peak under `torch.no_grad`, and how the KV cache in the output grows.
    """
    traced = step.trace(*given, decisions)
    forecast = traced.forecast()
    if step.by_autocast:
        no_grad = step.trace(*given, decisions, under=torch.no_grad).forecast()
        kept = no_grad.peak - forecast.peak
        forecast = dataclasses.replace(forecast, kept_under_no_grad=kept)

    def traced_with(count: int) -> tuple[CachedTensor, ...]:
        # Without the decisions, which may be others for more tokens.
        with errors_with(step.run.model, f"{count:,} tokens"):
            return step.trace(*with_tokens(given, count)).cached

    cache = forecast_cache(
        traced.cached,
        traced_with,
        sequences=BatchedInputs(*given).batch,
        tokens=token_count(given),
        asked=tokens,
    )
    return dataclasses.replace(forecast, cache=cache)


def _note_largest(
    by_way: _ByWay, step: "InferenceStep", inputs: BatchedInputs, limit: int, saved: dict[str, int]
) -> None:
    """Note the largest batch of each way, whose weights take `saved` bytes less; or why not."""
    try:
        by_batch = MemoryByBatch(step, inputs, limit)
    except TraceError as error:  # the decisions of a model may be others for another batch, too
        by_way.no_largest |= dict.fromkeys(saved, first_line(error))
        return
    for way, nbytes in saved.items():
        by_way.largest[way] = by_batch.largest_within(limit + nbytes)


def _linear_weights(model: nn.Module) -> list[torch.Size]:
    """The shapes of the weights of linear layers, without those that another layer shares.

    A weight that is computed at each use, as a parametrization's is, is no parameter of its own.
    """
    owners: Counter[int] = Counter()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] += 1
    shapes = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and owners[id(module.weight)] == 1:
            shapes.append(module.weight.shape)
    return shapes


def _saved_bytes(linear: list[torch.Size], precision: Precision) -> dict[str, int]:
    """How much smaller the weights of these layers are than in 16 bits, by format.

    Empty without such layers.
    """
    if not linear:
        return {}
    saved = {}
    for weights in QUANTIZED_WEIGHTS:
        nbytes = 0
        for rows, columns in linear:
            nbytes += rows * columns * precision.dtype.itemsize
            nbytes -= weights.bytes_of(rows, columns)
        saved[weights.name] = nbytes
    return saved


@contextmanager
def _steps(
    model: nn.Module, device_type: str, precisions: Iterable[Precision | str], ways: list[bool]
) -> Iterator[list["InferenceStep"]]:
    """The block in which a forward pass can be traced, one for each precision and way."""
    with steps_on(model, device_type, precisions) as (run, asked):
        steps = []
        for precision in asked:
            ways_of_precision = ways if precision in _LOW else [False]
            for by_autocast in ways_of_precision:
                steps.append(InferenceStep(run, device_type, precision, by_autocast))
        yield steps


@dataclass(frozen=True)
class InferenceStep:
    """A forward pass, all but its inputs."""

    run: ModelRun  # its inputs are not used
    device_type: str
    precision: Precision
    by_autocast: bool

    @property
    def traced_on(self) -> str:
        """The type of device on which the inputs have to be."""
        return self.device_type

    @property
    def is_cast(self) -> bool:
        """Whether weights and inputs are cast to a low precision before the pass."""
        return self.precision in _LOW and not self.by_autocast

    @property
    def way(self) -> str:
        """What it is called in a table."""
        if self.precision not in _LOW:
            return str(self.precision)
        if self.by_autocast:
            return f"{self.precision} autocast"
        return f"{self.precision} cast"

    def trace(
        self,
        inputs: tuple,
        kwargs: dict[str, Any],
        decisions: Decisions | None = None,
        *,
        under: Callable = torch.inference_mode,
    ) -> "TracedInference":
        """Run the pass once on fake inputs, and note every storage's coming and going.

        `decisions` are those of a real run on such inputs, if values decide its course.
        """

        def trace() -> TracedInference:
            with self.run.told(decisions) as replay:
                traced = self._trace(inputs, kwargs, under)
                replay.require_done()
            return dataclasses.replace(traced, decisions=replay.remark)

        return traced_on_either(trace)

    def _trace(self, inputs: tuple, kwargs: dict[str, Any], under: Callable) -> "TracedInference":
        model = self.run.model
        parameters = self.run.parameters
        buffers = self.run.buffers
        if not self.by_autocast:  # to fp32 too: a checkpoint may come in 16 bits
            parameters = self._cast(parameters)
            buffers = self._cast(buffers)
            inputs, kwargs = self._cast((inputs, kwargs))
        named = named_tensors((inputs, kwargs), opened=True)
        shapes = tuple(tuple(tensor.shape) for _, tensor in named)
        input_tensors: list[torch.Tensor] = []

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            input_tensors.append(tensor)
            return tensor

        inputs, kwargs = map_tensors(noted, (inputs, kwargs))
        with one_line_errors(model, shapes, self.device_type), under():
            ledger = StorageLedger(self.device_type)
            ledger.own("weights", parameters.values())
            ledger.own("buffers", buffers.values())
            ledger.own("inputs", input_tensors)
            fakes_in_place = _reparametrize_module(model, parameters | buffers)
            with ledger.naming_modules(model), ledger, fakes_in_place:
                with autocast_on(self.device_type, self._autocast_dtype, enabled=self.by_autocast):
                    output = model(*inputs, **kwargs)
                ledger.mark("forward")
            cached = cached_tensors(output)
            del output
        return TracedInference(self, shapes, ledger.trace(), cached)

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        if not self.by_autocast:
            return None
        return self.precision.dtype

    def _cast(self, structure: Any) -> Any:
        """The structure with each floating-point tensor in the precision; a tied one stays one."""
        casts: dict[int, torch.Tensor] = {}

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            if id(tensor) not in casts:
                casts[id(tensor)] = tensor.detach().to(self.precision.dtype)
            return casts[id(tensor)]

        return map_tensors(cast, structure)


@dataclass(frozen=True)
class TracedInference:
    """What a forward pass allocated, when it ran on inputs of these shapes."""

    step: InferenceStep
    input_shapes: tuple[tuple[int, ...], ...]
    storages: StorageTrace
    cached: tuple[CachedTensor, ...] = ()  # what in the output is a KV cache, or may be one
    decisions: str = ""  # what to say if it took decisions of a run on the CPU

    def forecast(self) -> InferenceForecast:
        """The forecast for this pass."""
        in_use = self.storages.in_use()
        peak_at = int(np.argmax(in_use)) + 1
        at_peak = self.storages.by_kind(peak_at)
        largest = self.storages.largest(peak_at, int(in_use.max()))
        return InferenceForecast(
            model=type(self.step.run.model).__name__,
            input_shapes=self.input_shapes,
            device_type=self.step.device_type,
            way=self.step.way,
            weights=at_peak["weights"],
            buffers=at_peak["buffers"],
            inputs=at_peak["inputs"],
            weight_casts=at_peak["cast_cache"],
            temporaries=at_peak["temporaries"],
            decisions=self.decisions,
            largest_at_peak=str(largest or ""),
        )

"""Forecast the memory of inference for each way to run a model, and the largest batch.

A way is a precision and how the model gets there: "fp32", "bf16 autocast", "bf16 cast", "int8".
"""

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
from amp_lab.core.tensors import map_tensors, named_tensors
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
from amp_lab.tracing.memory import (
    BatchedInputs,
    MemoryByBatch,
    errors_naming_inputs,
    memory_and_limit,
)
from amp_lab.tracing.real_run import ModelCall, Passes
from amp_lab.tracing.storage_ledger import StorageLedger, StorageTrace
from amp_lab.tracing.training_step import one_line_errors, steps_on, traced_on_either

_LOW_PRECISIONS = (Precision.FP16, Precision.BF16)


@dataclass(frozen=True)
class QuantizedWeights:
    """A format for the weights of linear layers; matmuls still run in 16 bits."""

    name: str
    bits: int
    group: int | None  # how many values share a scale; None: all values of a row
    scale_bytes: int  # bytes of the scale and the zero point together, of each group

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a weight (rows, columns), including its scales and zero points."""
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
    floating-point inputs are cast to `precision` before the pass. With `autocast` they are left as
    they are, and autocast casts them; it keeps no cast copy of a weight. (Under `torch.no_grad` it
    keeps all copies until its block ends: see `kept_under_no_grad`.) Call ``model.eval()`` first,
    since the mode of the model is not changed. `inputs` and `kwargs` are tensors, or structures of
    them, on any device.

    Not counted: the workspaces of cuBLAS and cuDNN, the memory of the driver, and fragmentation.

    The field `cache` of the forecast is the KV cache in the model's output; None if it has none.

    Raises `TraceError` for a model without a fake copy, an input that it does not take, an op whose
    result depends on values, and an unknown precision; `DeviceError` for an unknown device type.
    """

    def trace(call: ModelCall, decisions: Decisions | None) -> InferenceForecast:
        with _steps(call.model, device_type, [precision], autocast_or_not=[autocast]) as (step,):
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
    """Forecast the inference of a model in each way, side by side.

    A low precision among `precisions` has two ways, autocast and cast; any other has one. If the
    last precision is a low one, int8 and int4 follow from its cast.

    With `memory_bytes`, such as "24GiB", also find the largest batch that fits; `reserve` is the
    share of the memory, from 0 to 1, to leave free. With `tokens`, also forecast the KV cache for
    that many tokens in each sequence, if the model returns one. A way in low precision that the
    model refuses, such as cast weights, is in `failed`.
    Raises the same errors as `forecast_inference`.
    """
    total, limit = memory_and_limit(memory_bytes, reserve)
    precisions = list(precisions)  # `trace` may run twice, and an iterator can be read only once

    def trace(call: ModelCall, decisions: Decisions | None) -> _ResultsByWay:
        with _steps(call.model, device_type, precisions, autocast_or_not=[True, False]) as steps:
            return _forecast_each_way(steps, inputs, limit, tokens, decisions)

    call = ModelCall(model, inputs.args, inputs.kwargs, passes=Passes.FORWARD)
    by_way = answered(trace, call, "forecast")
    return InferenceTable(
        tuple(by_way.forecasts),
        memory_bytes=total,
        largest=by_way.largest,
        reserve=reserve,
        failed=by_way.failed,
        no_largest=by_way.no_largest,
        tokens=tokens,
        places=_max_positions(model),
    )


def _max_positions(model: nn.Module) -> int | None:
    """The most tokens that the model's config allows; None if it does not say.

    The trace cannot tell, since a fake table of positions takes any index.
    """
    config = getattr(model, "config", None)
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int):
        return None
    return count


@dataclass
class _ResultsByWay:
    """What `inference_table` has found so far. The keys of dicts are ways, such as "bf16 cast"."""

    forecasts: list[InferenceForecast] = field(default_factory=list)
    largest: dict[str, int] = field(default_factory=dict)  # largest batch
    failed: dict[str, str] = field(default_factory=dict)  # error of the forecast
    no_largest: dict[str, str] = field(default_factory=dict)  # why there is no largest batch


def _forecast_each_way(
    steps: "list[InferenceStep]",
    inputs: BatchedInputs,
    limit: int | None,
    tokens: int | None,
    decisions: Decisions | None,
) -> _ResultsByWay:
    """Forecast each way; errors in low precision are collected, those in fp32 are raised.

    `limit` is the memory in bytes for the largest batch; None: none is asked for. `tokens` is how
    many tokens in each sequence to forecast the KV cache for, or None. If every way fails, the
    first error is raised.
    """
    by_way = _ResultsByWay()
    weight_shapes = _linear_weight_shapes(steps[0].run.model)
    for step in steps:
        arguments = inputs.for_batch(inputs.batch, step.traced_on)
        try:
            forecast = _forecast_with_cache(step, arguments, decisions, tokens)
        except ValuesNeeded:  # `answered` repeats the trace with the decisions of a real run
            raise
        except TraceError as error:
            if step.precision is Precision.FP32:  # so the model or its inputs are at fault
                raise
            by_way.failed[step.way] = str(error)
            continue
        saved: dict[str, int] = {}  # bytes, by format of quantized weights
        # The forecasts for int8 and int4 follow from the last cast one: only weights are smaller.
        if step.is_cast and step.precision is steps[-1].precision:
            saved = _saved_by_quantization(weight_shapes, step.precision)
        by_way.forecasts.append(forecast)
        for name, nbytes in saved.items():
            by_way.forecasts.append(forecast.with_smaller_weights(name, nbytes))
        if limit is not None:  # the user gave the memory of the device
            _add_largest_batch(by_way, step, inputs, limit, {step.way: 0, **saved})
    if not by_way.forecasts:
        first_error = next(iter(by_way.failed.values()))
        raise TraceError(first_error)
    return by_way


def _forecast_with_cache(
    step: "InferenceStep",
    arguments: Arguments,
    decisions: Decisions | None,
    tokens: int | None = None,
) -> InferenceForecast:
    """Forecast a pass on `arguments`, including what needs further passes.

    These are the peak under `torch.no_grad`, if autocast is on, and the growth of the KV cache with
    the tokens. With `tokens`, the cache is also forecast for that many in each sequence.
    """
    traced = step.trace(*arguments, decisions)
    forecast = traced.forecast()
    if step.by_autocast:
        no_grad = step.trace(*arguments, decisions, under=torch.no_grad).forecast()
        extra_bytes = no_grad.peak - forecast.peak
        forecast = dataclasses.replace(forecast, kept_under_no_grad=extra_bytes)

    def trace_with_tokens(count: int) -> tuple[CachedTensor, ...]:
        # Without the decisions, which may differ for another number of tokens.
        with errors_naming_inputs(step.run.model, f"{count:,} tokens"):
            return step.trace(*with_tokens(arguments, count)).cached

    cache = forecast_cache(
        traced.cached,
        trace_with_tokens,
        sequences=BatchedInputs(*arguments).batch,
        tokens=token_count(arguments),
        tokens_asked=tokens,
    )
    return dataclasses.replace(forecast, cache=cache)


def _add_largest_batch(
    by_way: _ResultsByWay,
    step: "InferenceStep",
    inputs: BatchedInputs,
    limit: int,
    saved: dict[str, int],
) -> None:
    """Add to `by_way` the largest batch of each way in `saved`, or why it cannot be determined.

    `saved` has the way of `step` with 0, and the ways that differ from it only in the weights, with
    the bytes by which these are smaller. `limit` is the memory in bytes.
    """
    try:
        by_batch = MemoryByBatch(step, inputs, limit)
    except TraceError as error:  # the decisions of a model may differ for another batch
        for way in saved:
            by_way.no_largest[way] = first_line(error)
        return
    # Weights that are smaller by `nbytes` leave as many more bytes for a larger batch.
    for way, nbytes in saved.items():
        by_way.largest[way] = by_batch.largest_within(limit + nbytes)


def _linear_weight_shapes(model: nn.Module) -> list[torch.Size]:
    """The shapes of the weights of linear layers that torchao would quantize.

    Left out are weights that another module shares, and weights that are no parameters, such as
    those that a parametrization computes at each use.
    """
    owner_counts: Counter[int] = Counter()  # how many modules have a parameter, by its `id`
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owner_counts[id(parameter)] += 1
    shapes = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and owner_counts[id(module.weight)] == 1:
            shapes.append(module.weight.shape)
    return shapes


def _saved_by_quantization(shapes: list[torch.Size], precision: Precision) -> dict[str, int]:
    """How many bytes each quantized format saves for weights of these shapes, by format.

    `precision` is the low one in which the weights are otherwise. Empty if there are no shapes.
    """
    if not shapes:
        return {}
    saved = {}
    for weights in QUANTIZED_WEIGHTS:
        nbytes = 0
        for rows, columns in shapes:
            nbytes += rows * columns * precision.dtype.itemsize
            nbytes -= weights.bytes_of(rows, columns)
        saved[weights.name] = nbytes
    return saved


@contextmanager
def _steps(
    model: nn.Module,
    device_type: str,
    precisions: Iterable[Precision | str],
    autocast_or_not: list[bool],
) -> Iterator[list["InferenceStep"]]:
    """The block in which passes can be traced; yields a list with one step for each way.

    `autocast_or_not` says how to get to each low precision: by autocast (True), by a cast (False),
    or in turn by each of the two. In other precisions there is one step, without autocast.
    """
    with steps_on(model, device_type, precisions) as (run, known_precisions):
        steps = []
        for precision in known_precisions:
            choices = autocast_or_not if precision in _LOW_PRECISIONS else [False]
            for by_autocast in choices:
                steps.append(InferenceStep(run, device_type, precision, by_autocast))
        yield steps


@dataclass(frozen=True)
class InferenceStep:
    """A forward pass without its inputs; made by `_steps`."""

    run: ModelRun  # the model on its fake device; the inputs in it are not used
    device_type: str
    precision: Precision
    by_autocast: bool  # whether autocast casts to the precision; else weights and inputs are cast

    @property
    def traced_on(self) -> str:
        """The type of device that the inputs have to be on."""
        return self.device_type

    @property
    def is_cast(self) -> bool:
        """Whether weights and inputs are cast to a low precision before the pass."""
        return self.precision in _LOW_PRECISIONS and not self.by_autocast

    @property
    def way(self) -> str:
        """The name of the way in a table: "fp32", "bf16 autocast" or "bf16 cast"."""
        if self.precision not in _LOW_PRECISIONS:
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
        """Run the pass once on fake inputs, and record when each storage is allocated and freed.

        `decisions` are those of a real run on such inputs, if the pass depends on values. `under`
        returns the context manager in which the pass runs, such as `torch.no_grad`.
        """

        def trace_once() -> TracedInference:
            with self.run.told(decisions) as replay:
                traced = self._trace(inputs, kwargs, under)
                replay.require_done()
            return dataclasses.replace(traced, decisions=replay.remark)

        return traced_on_either(trace_once)  # a second time on the CPU, if the ops mix devices

    def _trace(self, inputs: tuple, kwargs: dict[str, Any], under: Callable) -> "TracedInference":
        """Run the pass inside a ledger of storages, with casts and autocast as the way says."""
        model = self.run.model
        parameters = self.run.parameters
        buffers = self.run.buffers
        if not self.by_autocast:  # in fp32 too, since the weights may have been loaded in 16 bits
            parameters = self._cast(parameters)
            buffers = self._cast(buffers)
            inputs, kwargs = self._cast((inputs, kwargs))
        named = named_tensors((inputs, kwargs), open_objects=True)
        shapes = tuple(tuple(tensor.shape) for _, tensor in named)
        input_tensors: list[torch.Tensor] = []

        def note_input(tensor: torch.Tensor) -> torch.Tensor:
            input_tensors.append(tensor)
            return tensor

        inputs, kwargs = map_tensors(note_input, (inputs, kwargs))
        with one_line_errors(model, shapes, self.device_type), under():
            ledger = StorageLedger(self.device_type)
            ledger.set_kind("weights", parameters.values())
            ledger.set_kind("buffers", buffers.values())
            ledger.set_kind("inputs", input_tensors)
            fakes_in_place = _reparametrize_module(model, parameters | buffers)
            with ledger.naming_modules(model), ledger, fakes_in_place:
                with autocast_on(self.device_type, self._autocast_dtype, enabled=self.by_autocast):
                    output = model(*inputs, **kwargs)
                ledger.mark("forward")
            cached = cached_tensors(output)  # sizes only: the tensors themselves are freed next
            del output
        return TracedInference(self, shapes, ledger.trace(), cached)

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        """The dtype that autocast casts to; None if it is off."""
        if not self.by_autocast:
            return None
        return self.precision.dtype

    def _cast(self, structure: Any) -> Any:
        """The structure with floating-point tensors cast; one that occurs twice is cast once."""
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
    """What a forward pass on inputs of these shapes allocated."""

    step: InferenceStep
    input_shapes: tuple[tuple[int, ...], ...]
    storages: StorageTrace
    cached: tuple[CachedTensor, ...] = ()  # tensors in the output that may be a KV cache
    decisions: str = ""  # remark on decisions that were taken from a run on the CPU

    def forecast(self) -> InferenceForecast:
        """The forecast for this pass."""
        in_use = self.storages.in_use()  # (events,) bytes
        events = int(np.argmax(in_use)) + 1  # how many there are up to the peak
        at_peak = self.storages.by_kind(events)
        largest = self.storages.largest(events, int(in_use.max()))  # None if it is small
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

"""Forecast the memory of inference for each way to run a model, and the largest batch.

A way is a precision, with autocast or cast weights: "fp32", "bf16 autocast", "bf16 weights" or
"int8".
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from amp_lab.core.errors import TraceError, first_line
from amp_lab.core.precision import Precision
from amp_lab.core.tensors import map_tensors
from amp_lab.model_call import ModelCall
from amp_lab.tracing.answered import answered
from amp_lab.tracing.decisions import Decisions, Replay
from amp_lab.tracing.fake_device import autocast_on
from amp_lab.tracing.inference_result import InferenceForecast, InferenceTable
from amp_lab.tracing.kv_cache import (
    CachedTensor,
    cached_tensors,
    forecast_cache,
    token_count,
    with_tokens,
)
from amp_lab.tracing.memory_arguments import memory_and_limit
from amp_lab.tracing.memory_by_batch import (
    Forecasts,
    MemoryByBatch,
    errors_naming_inputs,
)
from amp_lab.tracing.real_run import Passes
from amp_lab.tracing.steps import TraceableStep, TracedStep, steps_on
from amp_lab.tracing.storage_ledger import StorageLedger

_LOW_PRECISIONS = (Precision.FP16, Precision.BF16)


@dataclass(frozen=True)
class QuantizedWeights:
    """A format for the weights of linear layers; matmuls still run in 16 bits."""

    name: str
    bits: int
    group: int | None  # how many values of a row share a scale; None: all values of a row
    scale_bytes: int  # bytes of the scale and the zero point of a group, together

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a weight (rows, columns), including its scales and zero points.

        A weight whose rows cannot be divided into groups stays in 16 bits.
        """
        groups_per_row = 1
        if self.group is not None:
            if columns % self.group:
                return rows * columns * 2
            groups_per_row = columns // self.group
        value_bytes = rows * columns * self.bits // 8
        return value_bytes + rows * groups_per_row * self.scale_bytes


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
    """Forecast the memory of a forward pass on any device, even one that this machine lacks.

    The pass is ``model(*inputs, **kwargs)`` under `torch.inference_mode`. Call ``model.eval()``
    first, because the forecast does not change the mode of the model. The forecast does not include
    workspaces of cuBLAS and cuDNN, memory of the driver, and fragmentation.

    Args:
        model: The model. It is neither changed nor moved.
        *inputs: The positional arguments of the call: tensors, or structures of tensors, on any
            device.
        device_type: "cuda" (also for ROCm), "xpu", "mps" or "cpu".
        precision: A `Precision`: "fp32", "tf32", "fp16" or "bf16".
        autocast: Whether the pass runs under autocast if `precision` has 16 bits. By default,
            weights and floating-point inputs are cast before the pass.
        **kwargs: The keyword arguments of the call.

    Returns:
        An `InferenceForecast` in bytes. Print it to see a table, or read `peak`. `cache` describes
        the KV cache in the output; it is None without a cache. `kept_under_no_grad` is the extra
        peak memory under `torch.no_grad`, where autocast keeps copies of weights until the autocast
        block ends.

    Raises:
        TraceError: If the model cannot be traced, if it refuses the inputs, if it depends on values
            that a run on the CPU does not have, or if the precision is unknown.
        DeviceError: If the device type does not exist.

    Source:
        The forward pass runs on fake tensors. A storage is counted from its allocation until it
        is freed.

    Example:
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).eval()
        forecast = forecast_inference(model, torch.empty(64, 512), precision="bf16")
        print(f"peak {forecast.peak / 2**20:.3g} MiB, weights {forecast.weights / 2**20:.3g} MiB")
    """

    def trace(call: ModelCall, decisions: Decisions | None) -> InferenceForecast:
        with _steps(call.model, device_type, [precision], autocast_or_not=[autocast]) as (step,):
            return _forecast_with_cache(step, call.map_inputs(step.run.fake), decisions)

    return answered(trace, ModelCall(model, inputs, kwargs), "forecast", Passes.FORWARD)


def inference_table(
    call: ModelCall,
    *,
    memory_bytes: int | str | None = None,
    reserve: float = 0.0,
    precisions: Iterable[Precision | str] = (Precision.FP32, Precision.BF16),
    device_type: str = "cuda",
    tokens: int | None = None,
) -> InferenceTable:
    """Forecast the inference of a model in each way, side by side.

    A low precision among `precisions` has two ways, autocast and cast; any other precision has one.
    If the last precision is a low precision, int8 and int4 are computed from its cast way.

    With `memory_bytes`, such as "24GiB", also find the largest batch that fits; `reserve` is the
    share of the memory, from 0 to 1, to leave free. With `tokens`, also forecast the KV cache for
    that many tokens in each sequence, if the model returns one. A way in low precision that the
    model refuses, such as cast weights, is in `failed`.
    Raises the same errors as `forecast_inference`.
    """
    total, limit = memory_and_limit(memory_bytes, reserve)
    precisions = list(precisions)  # `trace` may run twice, and an iterator can be read only once

    def trace(call: ModelCall, decisions: Decisions | None) -> Forecasts:
        with _steps(call.model, device_type, precisions, autocast_or_not=[True, False]) as steps:
            return _forecast_each_way(steps, call, limit, tokens, decisions)

    results = answered(trace, call, "forecast", Passes.FORWARD)
    return InferenceTable(
        **results.fields(),
        memory_bytes=total,
        reserve=reserve,
        tokens=tokens,
        places=_max_positions(call.model),
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


def _forecast_each_way(
    steps: "list[InferenceStep]",
    call: ModelCall,
    limit: int | None,
    tokens: int | None,
    decisions: Decisions | None,
) -> Forecasts:
    """Forecast each way: those of `steps`, and int8 and int4 for the last of them.

    `limit` is the memory in bytes for the largest batch; None: none is asked for. `tokens` is how
    many tokens in each sequence to forecast the KV cache for, or None. Raises the error of the way
    in fp32, or the first one if all fail.
    """
    weight_shapes = _quantizable_weight_shapes(call.model)
    last_precision = steps[-1].precision
    results = Forecasts()
    for step in steps:
        with results.storing_error(step):
            user_call = call.without_values(call.batch, step.traced_on)
            forecast = _forecast_with_cache(step, user_call, decisions, tokens)
            results.forecasts.append(forecast)
            saved_bytes = {}  # by quantized format
            if step.is_cast and step.precision is last_precision:
                saved_bytes = _saved_by_quantization(weight_shapes, step.precision)
            # Only the weights are smaller, so these forecasts need no trace.
            for way, nbytes in saved_bytes.items():
                results.forecasts.append(forecast.with_smaller_weights(way, nbytes))
            if limit is not None:
                saved_by_way = {step.column: 0} | saved_bytes  # the step itself, then int8 and int4
                _add_largest_batches(results, step, call, limit, saved_by_way)
    results.require_any()
    return results


def _add_largest_batches(
    results: Forecasts,
    step: "InferenceStep",
    call: ModelCall,
    limit: int,
    saved_bytes: dict[str, int],
) -> None:
    """Add the largest batch within `limit` bytes to `results`, or the reason why there is none.

    `saved_bytes` has the ways that differ from `step` only in their weights, the way of `step`
    included, with the bytes by which the weights are smaller.
    """
    try:
        by_batch = MemoryByBatch(step, call, limit)
    except TraceError as error:  # the decisions of a model may differ for another batch
        results.no_largest |= dict.fromkeys(saved_bytes, first_line(error))
        return
    # Weights that are smaller by `nbytes` leave as many more bytes for a larger batch.
    for way, nbytes in saved_bytes.items():
        results.largest[way] = by_batch.largest_within(limit + nbytes)


def _forecast_with_cache(
    step: "InferenceStep",
    call: ModelCall,
    decisions: Decisions | None,
    tokens: int | None = None,
) -> InferenceForecast:
    """Forecast a pass, including what needs further passes.

    Further passes measure the peak under `torch.no_grad`, if autocast is on, and the growth of the
    KV cache with the tokens. With `tokens`, the cache is also forecast for that many in each
    sequence. `call` has fake inputs.
    """
    traced = step.trace(call, decisions)
    forecast = traced.forecast()
    if step.by_autocast:
        under_no_grad = dataclasses.replace(step, grad_mode=torch.no_grad)
        peak_under_no_grad = under_no_grad.trace(call, decisions).forecast().peak
        extra_bytes = peak_under_no_grad - forecast.peak
        forecast = dataclasses.replace(forecast, kept_under_no_grad=extra_bytes)

    def trace_with_tokens(count: int) -> tuple[CachedTensor, ...]:
        """The tensors in the output of a pass with `count` tokens that may be of a cache."""
        # Without the decisions, which may differ for another number of tokens.
        with errors_naming_inputs(call.model, f"{count:,} tokens"):
            return step.trace(with_tokens(call, count)).cached

    cache = forecast_cache(
        traced.cached,
        trace_with_tokens,
        sequences=call.batch,
        tokens=token_count(call),
        tokens_asked=tokens,
    )
    return dataclasses.replace(forecast, cache=cache)


def _quantizable_weight_shapes(model: nn.Module) -> list[torch.Size]:
    """The shapes of the weights of linear layers that torchao would quantize.

    Left out are weights that another module shares, those that are quantized already, and weights
    that are no parameters, such as those that a parametrization computes at each use.
    """
    owner_counts: Counter[int] = Counter()  # how many modules have a parameter, by its `id`
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owner_counts[id(parameter)] += 1
    shapes = []
    for module in model.modules():
        if not isinstance(module, nn.Linear) or is_wrapper(module.weight):
            continue
        if owner_counts[id(module.weight)] == 1:
            shapes.append(module.weight.shape)
    return shapes


def _saved_by_quantization(shapes: list[torch.Size], precision: Precision) -> dict[str, int]:
    """How many bytes int8 and int4 save for weights of these shapes; empty without shapes.

    `precision` is the low one in which the weights are otherwise.
    """
    if not shapes:
        return {}
    saved_bytes = {}
    for quantized in QUANTIZED_WEIGHTS:
        nbytes = 0
        for rows, columns in shapes:
            nbytes += rows * columns * precision.dtype.itemsize
            nbytes -= quantized.bytes_of(rows, columns)
        saved_bytes[quantized.name] = nbytes
    return saved_bytes


@contextmanager
def _steps(
    model: nn.Module,
    device_type: str,
    precisions: Iterable[Precision | str],
    autocast_or_not: list[bool],
) -> Iterator[list["InferenceStep"]]:
    """The block in which passes can be traced; yields a list with one step for each way.

    Each low precision has a step for each value in `autocast_or_not`: True for one under autocast,
    False for one with cast weights. Any other precision has one step, without autocast.
    """
    with steps_on(model, device_type, precisions) as (run, known_precisions):
        steps = []
        for precision in known_precisions:
            choices = autocast_or_not if precision in _LOW_PRECISIONS else [False]
            for by_autocast in choices:
                steps.append(InferenceStep(run, device_type, precision, by_autocast))
        yield steps


@dataclass(frozen=True)
class InferenceStep(TraceableStep):
    """A forward pass without its inputs, in one way; made by `_steps`."""

    by_autocast: bool  # whether autocast casts to the precision; else weights and inputs are cast
    grad_mode: Callable = torch.inference_mode  # or torch.no_grad: the block that the pass runs in

    @property
    def is_cast(self) -> bool:
        """Whether weights and inputs are cast to a low precision before the pass."""
        return self.precision in _LOW_PRECISIONS and not self.by_autocast

    @property
    def column(self) -> str:
        """The name of the way in a table: "fp32", "bf16 autocast" or "bf16 weights"."""
        if self.precision not in _LOW_PRECISIONS:
            return str(self.precision)
        if self.by_autocast:
            return f"{self.precision} autocast"
        return f"{self.precision} weights"

    def _trace(self, call: ModelCall, replay: Replay) -> "TracedInference":
        """Run the pass, cast or under autocast, and record the storages that it allocates."""
        cast = functools.cache(self._cast)  # a tensor that occurs twice is cast once
        parameters = map_tensors(cast, self.run.parameters)
        buffers = map_tensors(cast, self.run.buffers)
        # `ModelCall.tensors` leaves out those of a KV cache, so the inputs are noted here.
        inputs: list[torch.Tensor] = []

        def cast_input(tensor: torch.Tensor) -> torch.Tensor:
            cast_tensor = cast(tensor)
            inputs.append(cast_tensor)
            return cast_tensor

        call = call.map_inputs(cast_input)
        autocast_dtype = self.precision.dtype if self.by_autocast else None
        with self.grad_mode():
            ledger = StorageLedger(
                self.device_type,
                weights=parameters.values(),
                buffers=buffers.values(),
                inputs=inputs,
            )
            with_cast_weights = _reparametrize_module(call.model, parameters | buffers)
            with ledger.naming_modules(call.model), ledger, with_cast_weights:
                with autocast_on(self.device_type, autocast_dtype, enabled=self.by_autocast):
                    output = call.output()
                ledger.mark("forward")
            cached = cached_tensors(output)  # sizes only: the tensors themselves are freed next
            del output
        return TracedInference(self, ledger.trace(), cached=cached)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A floating-point tensor in the precision of the pass; under autocast as it is.

        It is cast to fp32 too, since the weights may have been loaded in 16 bits.
        """
        if self.by_autocast or not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(self.precision.dtype)


@dataclass(frozen=True)
class TracedInference(TracedStep):
    """The allocations of a forward pass, and the tensors in its output that may be a KV cache."""

    cached: tuple[CachedTensor, ...] = ()  # as `cached_tensors` returns them

    def forecast(self) -> InferenceForecast:
        """The forecast for this pass."""
        in_use = self.storages.in_use()  # (events,): bytes after each allocation or free
        events_to_peak = int(np.argmax(in_use)) + 1  # how many: the event at the peak is the last
        at_peak = self.storages.by_kind(events_to_peak)
        return InferenceForecast(
            model=type(self.step.run.model).__name__,
            input_shapes=self.input_shapes,
            device_type=self.step.device_type,
            way=self.step.column,
            weights=at_peak["weights"],
            buffers=at_peak["buffers"],
            inputs=at_peak["inputs"],
            weight_casts=at_peak["cast_cache"],
            temporaries=at_peak["temporaries"],
            decisions=self.decisions,
            caveat=self.storages.caveat,
            largest_at_peak=self.storages.largest(events_to_peak, int(in_use.max())),
        )

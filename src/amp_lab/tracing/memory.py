"""The memory of a training step: a forecast, several side by side, and the largest batch."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from amp_lab.core.errors import TraceError, first_line
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.model_call import ModelCall
from amp_lab.tracing.answered import answered
from amp_lab.tracing.decisions import Decisions, NoValues, ValuesNeeded
from amp_lab.tracing.memory_advice import ways_out
from amp_lab.tracing.memory_arguments import (
    Dtypes,
    Shapes,
    inputs_of_shapes,
    memory_and_limit,
    parse_bytes,
)
from amp_lab.tracing.memory_by_batch import Forecasts, MemoryByBatch
from amp_lab.tracing.memory_result import MemoryForecast, MemoryTable
from amp_lab.tracing.real_run import Passes
from amp_lab.tracing.training_step import LossFunction, TrainingStep, training_steps

_FORECAST_EACH_BATCH = remedy(
    "memory.each_batch",
    "largest_batch gets a model that takes branches that depend on values",
    "forecast each batch separately, with forecast_memory and inputs that have values",
)


def forecast_memory(
    model: nn.Module,
    *inputs: Any,
    device_type: str = "cuda",
    precision: Precision | str,
    optimizer: str = "adam",
    loss_fn: LossFunction | None = None,
    fsdp_ranks: int = 1,
    **kwargs: Any,
) -> MemoryForecast:
    """Forecast the memory of one training step on any device, even one that this machine lacks.

    The step is ``loss_fn(model(*inputs, **kwargs)).backward(); optimizer.step()``, under autocast
    for fp16 and bf16. The forecast is for the second step and later steps: the optimizer already
    has state, and the gradients of the step before are freed. If a branch of the model depends on
    values, copies of the model and its inputs run once on the CPU in fp32. The caveats of the
    forecast then mention this run.

    The forecast does not include workspaces of cuBLAS and cuDNN, memory of the driver, and losses
    of the allocator by rounding and fragmentation. With torch 2.11 the peak can be too high if the
    model uses an `autograd.Function`.

    Args:
        model: The model. It is neither changed nor moved.
        *inputs: The positional arguments of the call, with the batch size that you train with:
            tensors, or structures of tensors, on any device, also ``meta``.
        device_type: "cuda" (also for ROCm), "xpu", "mps" or "cpu".
        precision: A `Precision`: "fp32", "tf32", "fp16" or "bf16".
        optimizer: A key of `OPTIMIZERS` in `amp_lab.core.optimizers`, such as "adam" or "sgd".
        loss_fn: A function that computes a scalar loss from the output. Give a loss if it needs
            much memory, as for a language model. Without a loss, each floating-point output gets a
            gradient of the same size.
        fsdp_ranks: The number of FSDP2 ranks. The forecast is for each rank, with the blocks of
            `amp-lab train`.
        **kwargs: The keyword arguments of the call.

    Returns:
        A `MemoryForecast` in bytes. Print it to see a table, or read `peak`.

    Raises:
        TraceError: If the model cannot be traced, if it refuses the inputs, if it depends on values
            that the run on the CPU does not have, or if the precision or optimizer is unknown.
        DeviceError: If the device type does not exist.

    Source:
        The step runs on fake tensors. A storage is counted from its allocation until it is
        freed.

    Example:
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))
        forecast = forecast_memory(model, torch.empty(64, 512), precision="bf16")
        print(forecast)
        print(f"{forecast.peak / 2**20:.3g} MiB, reached in {forecast.peak_phase}")
    """

    def trace(call: ModelCall, decisions: Decisions | None) -> MemoryForecast:
        steps = training_steps(call.model, device_type, [precision], optimizer, fsdp_ranks)
        with steps as (step,):
            return step.trace(call.map_inputs(step.run.fake), decisions).forecast()

    return answered(trace, ModelCall(model, inputs, kwargs, loss_fn), "forecast", Passes.BACKWARD)


def largest_batch(
    model: nn.Module,
    input_shape: Shapes,
    *,
    memory_bytes: int | str,
    precision: Precision | str,
    device_type: str = "cuda",
    optimizer: str = "adam",
    loss_fn: LossFunction | None = None,
    input_dtype: Dtypes = torch.float32,
) -> int:
    """Find the largest batch whose training step fits into the memory.

    Args:
        model: The model. It is neither changed nor moved.
        input_shape: The shape of one sample, such as ``(3, 224, 224)``, or the same with a batch
            dimension of 1, ``(1, 3, 224, 224)``. A first size other than 1 is not a batch
            dimension. For a model with several inputs, give a sequence of shapes.
        memory_bytes: The memory in bytes, or with a unit: ``"24GiB"``, ``"80GB"``.
        precision: A `Precision`: "fp32", "tf32", "fp16" or "bf16".
        device_type: As in `forecast_memory`.
        optimizer: As in `forecast_memory`.
        loss_fn: As in `forecast_memory`.
        input_dtype: The dtype of all inputs, or a sequence with one dtype for each input.

    Returns:
        The number of samples; 0 if not even one sample fits.

    Raises:
        TraceError: If `forecast_memory` raises this error, if `memory_bytes` or a shape is invalid,
            if the memory is not a constant plus a multiple of the batch size, or if the model
            depends on values.
        DeviceError: If the device type does not exist.

    Source:
        Traces with two batch sizes give the size of each storage as a constant plus a multiple of
        the batch size. A third trace, with the largest batch, has to agree.

    Example:
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))
        print(largest_batch(model, (512,), memory_bytes="1GiB", precision="bf16"))
    """
    limit = parse_bytes(memory_bytes)
    inputs = inputs_of_shapes(input_shape, input_dtype, batched=False)
    with training_steps(model, device_type, [precision], optimizer) as (step,):
        try:
            return MemoryByBatch(step, ModelCall(model, inputs, loss_fn=loss_fn), limit).largest
        except ValuesNeeded as error:
            raise _values_needed(model) from error


def compare_memory(
    model: nn.Module,
    input_shape: Shapes,
    *,
    input_dtype: Dtypes = torch.float32,
    loss_fn: LossFunction | None = None,
    **options: Any,
) -> MemoryTable:
    """Forecast a step in several precisions, side by side, with the largest batch that fits.

    The forecasts are for `input_shape`, whose first size is the batch. For a model with several
    inputs, give a sequence of shapes, as for `largest_batch`. `options` are the options of
    `memory_table`, for example ``memory_bytes="24GiB"``, ``precisions=["fp32", "bf16"]`` and
    ``device_type="cuda"``.
    """
    inputs = inputs_of_shapes(input_shape, input_dtype, batched=True)
    try:
        return memory_table(ModelCall(model, inputs, loss_fn=loss_fn), **options)
    except NoValues as error:
        raise _values_needed(model) from error


def _values_needed(model: nn.Module) -> TraceError:
    """The error for a model whose branches depend on values, where the user gave only shapes."""
    name = type(model).__name__
    why = "the model takes branches that depend on values, which shapes do not have"
    return TraceError(f"{name}: {why}: {_FORECAST_EACH_BATCH.text}")


def memory_table(
    call: ModelCall,
    *,
    memory_bytes: int | str | None = None,
    reserve: float = 0.0,
    precisions: Iterable[Precision | str] = (Precision.FP32, Precision.FP16, Precision.BF16),
    device_type: str = "cuda",
    **options: Any,
) -> MemoryTable:
    """`compare_memory` for inputs of any structure.

    `options` are the `optimizer` and `fsdp_ranks` of `forecast_memory`. The largest batch is
    computed only if `memory_bytes` is given; `reserve` is the share of this memory, from 0 to 1, to
    leave free. If the memory of the step is not a constant plus a multiple of the batch, the table
    has the forecast for the batch of `call`, and no largest batch. All else is as in
    `forecast_memory`.
    """
    total, limit = memory_and_limit(memory_bytes, reserve)
    precisions = list(precisions)  # `trace` may run twice, and an iterator can be read only once

    def trace(call: ModelCall, decisions: Decisions | None) -> Forecasts:
        with training_steps(call.model, device_type, precisions, **options) as steps:
            return _forecast_each_precision(steps, call, limit, decisions)

    results = answered(trace, call, "forecast", Passes.BACKWARD)
    table = MemoryTable(
        **results.fields(),
        memory_bytes=total,
        reserve=reserve,
        curves=_curves(results, call.batch),
        fixed_shapes=call.fixed_shapes,
    )
    advice = ways_out(table, results.by_batch, call.batch)
    return dataclasses.replace(table, ways_out=tuple(advice))


def _forecast_each_precision(
    steps: list[TrainingStep],
    call: ModelCall,
    limit: int | None,
    decisions: Decisions | None,
) -> Forecasts:
    """Forecast each step for every batch, or, where that fails, for the batch of `call` alone.

    `limit` is the memory in bytes for the largest batch; None: none is asked for. `decisions` are
    those of a run on the CPU. Raises the error of the step in fp32, or the first one if all fail.
    """
    results = Forecasts()
    for step in steps:
        with results.storing_error(step):
            _add_forecast(results, step, call, limit, decisions)
    results.require_any()
    return results


def _add_forecast(
    results: Forecasts,
    step: TrainingStep,
    call: ModelCall,
    limit: int | None,
    decisions: Decisions | None,
) -> None:
    """Add the forecast of a step to `results`, and its largest batch if there is a limit."""
    try:
        by_batch = MemoryByBatch(step, call, limit, earlier=results.by_batch.values())
    # The model may raise anything for a batch that the user did not give.
    except Exception as error:
        user_call = call.without_values(call.batch, step.traced_on)
        results.forecasts.append(step.trace(user_call, decisions).forecast())
        results.no_largest[step.column] = first_line(error)
        return
    results.forecasts.append(by_batch.forecast(call.batch))
    results.by_batch[step.column] = by_batch
    if limit is not None:
        results.largest[step.column] = by_batch.largest


def _curves(
    results: Forecasts, user_batch: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The curves of the figure: for each precision some batches, and the peak in bytes at each."""
    # A quarter beyond the largest batch, so that the figure shows where the curves cross the limit.
    beyond_largest = [5 * batch // 4 for batch in results.largest.values()]
    end = max([2 * user_batch, 16, *beyond_largest])
    sixteenths = [end * i // 16 for i in range(1, 17)]
    batches = sorted({1, *sixteenths})
    curves = {}
    for precision, by_batch in results.by_batch.items():
        peaks = tuple(by_batch.forecast(batch).peak for batch in batches)
        curves[precision] = (tuple(batches), peaks)
    return curves

"""The memory of a training step: a forecast, several side by side, and the largest batch."""

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from amp_lab.errors import TraceError, first_line
from amp_lab.precision import Precision
from amp_lab.tracing.largest_batch import (
    BatchedInputs,
    Dtypes,
    MemoryByBatch,
    Shapes,
    inputs_of_shapes,
    trace_of,
)
from amp_lab.tracing.memory_result import MemoryForecast, MemoryTable
from amp_lab.tracing.training_step import LossFunction, TrainingStep

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def forecast_memory(
    model: nn.Module,
    *inputs: Any,
    device_type: str = "cuda",
    precision: Precision | str,
    optimizer: str = "adam",
    loss_fn: LossFunction | None = None,
    **kwargs: Any,
) -> MemoryForecast:
    """Forecast the memory of one training step of `model` on a device that need not be there.

    The step is ``loss_fn(model(*inputs, **kwargs)).backward(); optimizer.step()``, under autocast
    for fp16 and bf16, from the second time on: the optimizer has its state, and no gradient is left
    from before. It runs on fake tensors, and each storage counts from its making to its end. With
    torch 2.11 the peak can be too high next to an `autograd.Function`.

    `inputs` and `kwargs` are tensors, or structures of them, on any device, also ``meta``. Without
    `loss_fn` every floating-point output gets a gradient of its own size; give one, from the output
    to one number, if the loss is large, as a language model's is. `optimizer` is a key of
    `OPTIMIZERS`. Not counted: the workspaces of cuBLAS and cuDNN, the memory that the driver takes,
    and what the allocator loses by rounding and fragmentation.

    Raises `TraceError` for a model without a fake copy, an input that it does not take, an op whose
    result depends on values, and an unknown precision or optimizer; `DeviceError` for an unknown
    device type.
    """
    step = TrainingStep(model, device_type, precision, optimizer, loss_fn)
    with step.opened() as run:
        return step.trace(run, run.fake(inputs), run.fake(kwargs)).forecast()


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
    """The largest batch whose training step fits into `memory_bytes`; 0 if not even one fits.

    `input_shape` has a batch dimension of 1 first, as in ``(1, 3, 224, 224)``, or none, as in
    ``(3, 224, 224)``: a first dimension other than 1 is no batch. A model with several inputs gets
    a sequence of such shapes, and one `input_dtype` for all or for each. For the step and the
    other arguments see `forecast_memory`.

    Two forecasts give the size of every storage as a constant plus a multiple of the batch, and
    with that the peak of every batch; a third, at the solution, must agree. Raises what
    `forecast_memory` raises, and `TraceError` if the memory is no size, or sizes do not grow so.
    """
    limit = parse_bytes(memory_bytes)
    inputs = inputs_of_shapes(input_shape, input_dtype, batched=False)
    step = TrainingStep(model, device_type, precision, optimizer, loss_fn)
    with step.opened() as run:
        return MemoryByBatch(step, run, inputs, limit).largest


def compare_memory(
    model: nn.Module,
    input_shape: Shapes,
    *,
    memory_bytes: int | str | None = None,
    precisions: Iterable[Precision | str] = (Precision.FP32, Precision.FP16, Precision.BF16),
    device_type: str = "cuda",
    optimizer: str = "adam",
    loss_fn: LossFunction | None = None,
    input_dtype: Dtypes = torch.float32,
) -> MemoryTable:
    """Forecasts in several precisions side by side, with the largest batch that fits into memory.

    The forecasts are for `input_shape` as it is, whose first size is the batch. tf32 needs what
    fp32 does. The rest is as for `largest_batch`, which is asked only if there is a `memory_bytes`,
    and left out where the memory is no constant plus a multiple of the batch.
    """
    return memory_table(
        model,
        inputs_of_shapes(input_shape, input_dtype, batched=True),
        memory_bytes=memory_bytes,
        precisions=precisions,
        device_type=device_type,
        optimizer=optimizer,
        loss_fn=loss_fn,
    )


def memory_table(
    model: nn.Module,
    inputs: BatchedInputs,
    *,
    memory_bytes: int | str | None = None,
    reserve: float = 0.0,
    precisions: Iterable[Precision | str] = (Precision.FP32, Precision.FP16, Precision.BF16),
    device_type: str = "cuda",
    optimizer: str = "adam",
    loss_fn: LossFunction | None = None,
) -> MemoryTable:
    """The same for inputs of any structure, with a share of the memory held in reserve.

    Where the memory is no constant plus a multiple of the batch, the forecast is that of the batch
    which was given, and there is no largest batch.
    """
    total = None if memory_bytes is None else parse_bytes(memory_bytes)
    limit = None if total is None else int(total * (1 - reserve))
    steps = [TrainingStep(model, device_type, p, optimizer, loss_fn) for p in precisions]
    if not steps:
        raise TraceError("precisions is empty; give at least one")
    solved: dict[str, MemoryByBatch] = {}
    forecasts, reason = [], ""
    with steps[0].opened() as run:  # all have the same model, so that one fake copy serves them
        for step in steps:
            try:
                by = MemoryByBatch(step, run, inputs, limit, tuple(solved.values()))
            except Exception as error:  # whatever the model raises at a batch that was not given
                # If what was given fails too, that is the error to tell.
                forecasts.append(trace_of(step, run, inputs, inputs.batch).forecast())
                reason = first_line(error)
            else:
                solved[str(step.precision)] = by
                forecasts.append(by.at(inputs.batch))
    largest = {} if limit is None else {p: by.largest for p, by in solved.items()}
    # A quarter beyond the largest batch, so that the figure shows where the curves cross the limit.
    end = max([2 * inputs.batch, 16, *(5 * n // 4 for n in largest.values())])
    batches = tuple(sorted({max(1, end * i // 16) for i in range(17)}))
    return MemoryTable(
        tuple(forecasts),
        total,
        largest,
        {p: (batches, tuple(by.at(n).peak for n in batches)) for p, by in solved.items()},
        reserve=reserve,
        not_extrapolated=reason,
        held=inputs.held,
    )


def parse_bytes(text: str | int) -> int:
    """The number of bytes in ``"24GiB"`` (24 x 2^30), ``"24 GB"`` (24 x 10^9) or ``"512"``.

    Raises `TraceError` for anything else, for a bare ``"24G"`` (it does not say which of the two it
    means), and for less than one byte.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", str(text).strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    count = Fraction(match[1]) * unit if match and unit else None  # exact, unlike 1.1 * 10**9
    if count is None or (unit == 1 and count.denominator > 1):
        raise TraceError(f"memory {text!r}: give bytes, as 24GiB (24 x 2^30) or 24GB (24 x 10^9)")
    if count < 1:
        raise TraceError(f"memory {text!r}: give at least one byte")
    return int(count)

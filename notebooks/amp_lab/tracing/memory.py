"""Forecast the memory of a training step in each precision."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from amp_lab.errors import TraceError
from amp_lab.precision import Precision
from amp_lab.tracing.largest_batch import Dtypes, MemoryByBatch, Shapes, checked_inputs, parse_bytes
from amp_lab.tracing.memory_result import MemoryForecast, MemoryTable
from amp_lab.tracing.training_step import LossFunction, TrainingStep


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
    for fp16 and bf16, as it is from the second time on: the optimizer has its state, and no
    gradient is left from the step before. It runs on fake tensors, which have no memory. Each
    storage counts from its making to its end, so that views, in-place ops and activation
    checkpointing (without ``use_reentrant``) count for what they are. The peak is the most that is
    in use at one time; with torch 2.11 it can be too high next to an `autograd.Function`.

    `inputs` and `kwargs` are tensors, or structures of them, on any device, also ``meta``; only
    shape and dtype matter. Without `loss_fn` every floating-point output gets a gradient of its own
    size, as from a loss that keeps nothing for itself; give one, from the output of the model to
    one number, if the loss is large, as that of a language model is. `optimizer` is a key of
    `OPTIMIZERS`.

    Attention on ``cuda`` is taken to run fused (flash or memory-efficient) wherever torch does that
    on a recent GPU. Not counted: the workspaces of cuBLAS and cuDNN, the memory that the driver
    takes, and what the allocator loses by rounding and fragmentation.

    Raises `TraceError` for a model with parameters in low precision already or without a fake copy,
    an input that it does not take, an op whose result depends on values, and an unknown precision
    or optimizer; `DeviceError` for an unknown device type.
    """
    step = TrainingStep(model, device_type, precision, optimizer, loss_fn)
    with step.opened() as run:
        return step.trace(run, run.fake(inputs), run.fake(kwargs)).forecast()


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
    fp32 does. The rest is as for `largest_batch`, which is asked only if there is a `memory_bytes`.
    """
    limit = None if memory_bytes is None else parse_bytes(memory_bytes)
    batch, items = checked_inputs(input_shape, input_dtype, batched=True)
    steps = [TrainingStep(model, device_type, p, optimizer, loss_fn) for p in precisions]
    if not steps:
        raise TraceError("precisions is empty; give at least one")
    solved: dict[str, MemoryByBatch] = {}
    with steps[0].opened() as run:  # all have the same model, so that one fake copy serves them
        for step in steps:
            known = tuple(solved.values())
            solved[str(step.precision)] = MemoryByBatch(step, run, items, limit, known)
    largest = {} if limit is None else {p: by.largest for p, by in solved.items()}
    # A quarter beyond the largest batch, so that the figure shows where the curves cross the limit.
    end = max([2 * batch, 16, *(5 * n // 4 for n in largest.values())])
    batches = tuple(sorted({max(1, end * i // 16) for i in range(17)}))
    return MemoryTable(
        tuple(by.at(batch) for by in solved.values()),
        limit,
        largest,
        {p: (batches, tuple(by.at(n).peak for n in batches)) for p, by in solved.items()},
    )

"""The memory of a training step: a forecast, several side by side, and the largest batch."""

import dataclasses
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from amp_lab.core.errors import AmpLabError, TraceError, first_line, with_type
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.model_call import ModelCall
from amp_lab.tracing.answered import answered
from amp_lab.tracing.decisions import Decisions, NoValues, ValuesNeeded
from amp_lab.tracing.memory_advice import ways_out
from amp_lab.tracing.memory_result import MemoryForecast, MemoryTable
from amp_lab.tracing.real_run import Passes
from amp_lab.tracing.steps import TraceableStep
from amp_lab.tracing.training_step import LossFunction, TrainingStep, training_steps

_FORECAST_EACH_BATCH = remedy(
    "memory.each_batch",
    "the largest batch of a model whose course depends on values",
    "forecast each batch by itself, with forecast_memory and inputs that have values",
)

Shapes = Sequence[int] | Sequence[Sequence[int]]
Dtypes = torch.dtype | Sequence[torch.dtype]
StepT = TypeVar("StepT", bound=TraceableStep)


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
    """Forecast the memory of one training step on a device that need not be in this machine.

    The step is ``loss_fn(model(*inputs, **kwargs)).backward(); optimizer.step()``, under autocast
    for fp16 and bf16. The forecast is for the second step and later steps: the optimizer already
    has its state, and no gradient is left from the step before. If a branch of the model depends on
    values, copies of the model and its inputs run once on the CPU in fp32. A caveat of the forecast
    then says so.

    The forecast does not include workspaces of cuBLAS and cuDNN, memory of the driver, and what the
    allocator loses by rounding and fragmentation. With torch 2.11 the peak can be too high if the
    model uses an `autograd.Function`.

    Args:
        model: The model. It is neither changed nor moved.
        *inputs: The positional arguments of the call, with the batch size that you train with:
            tensors, or structures of tensors, on any device, also ``meta``.
        device_type: "cuda" (also for ROCm), "xpu", "mps" or "cpu".
        precision: A `Precision`: "fp32", "tf32", "fp16" or "bf16".
        optimizer: A key of `OPTIMIZERS` in `amp_lab.core.optimizers`, such as "adam" or "sgd".
        loss_fn: A function that computes a loss of one number from the output. Give it if the loss
            needs much memory, as the loss of a language model does. Without it, each floating-point
            output gets a gradient of its own size.
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
        The step runs on fake tensors. Each storage counts from its allocation until it is freed.

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
        The number of samples; 0 if not even one fits.

    Raises:
        TraceError: If `forecast_memory` would raise it, if `memory_bytes` or the shapes cannot be
            read, if the memory is not a constant plus a multiple of the batch size, or if the model
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

    The forecasts are for `input_shape` as it is, whose first size is the batch; a model with
    several inputs is given as to `largest_batch`. `options` are those of `memory_table`, among them
    ``memory_bytes="24GiB"``, ``precisions=["fp32", "bf16"]`` and ``device_type="cuda"``.
    """
    inputs = inputs_of_shapes(input_shape, input_dtype, batched=True)
    try:
        return memory_table(ModelCall(model, inputs, loss_fn=loss_fn), **options)
    except NoValues as error:
        raise _values_needed(model) from error


def _values_needed(model: nn.Module) -> TraceError:
    """The error for a model whose course depends on values, where only shapes were given."""
    name = type(model).__name__
    why = "its course depends on values, and shapes have none"
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
    """`compare_memory` for inputs of any structure, with a share of the memory kept free.

    `options` are the optimizer and fsdp_ranks of `forecast_memory`. The largest batch is computed
    only if `memory_bytes` is given. tf32 needs as much as fp32. Where the memory is not a constant
    plus a multiple of the batch, the table has the forecast of the batch of `call`, and no largest
    batch. The rest is as for `forecast_memory`.
    """
    total, limit = memory_and_limit(memory_bytes, reserve)
    precisions = list(precisions)  # an iterator could be read only once

    def trace(call: ModelCall, decisions: Decisions | None) -> Forecasts:
        with training_steps(call.model, device_type, precisions, **options) as steps:
            return _forecast_each_precision(steps, call, limit, decisions)

    found = answered(trace, call, "forecast", Passes.BACKWARD)
    table = MemoryTable(
        **found.fields(),
        memory_bytes=total,
        reserve=reserve,
        curves=_curves(found, call.batch),
        fixed_shapes=call.fixed_shapes,
    )

    def with_optimizer(precision: str, optimizer: str) -> MemoryForecast | None:
        if precision not in found.by_batch:
            return None
        return found.by_batch[precision].forecast(call.batch, optimizer=optimizer)

    return dataclasses.replace(table, ways_out=tuple(ways_out(table, with_optimizer)))


def memory_and_limit(
    memory_bytes: int | str | None, reserve: float
) -> tuple[int, int] | tuple[None, None]:
    """All bytes of a memory, and how many are left without `reserve`, a share of it from 0 to 1.

    Both are None if `memory_bytes` is.
    """
    if memory_bytes is None:
        return None, None
    total = parse_bytes(memory_bytes)
    return total, int(total * (1 - reserve))


@dataclasses.dataclass
class Forecasts:
    """The forecasts of several steps, and what is known besides, by the column of the step."""

    forecasts: list[Any] = dataclasses.field(default_factory=list)  # for the batch that was given
    errors: dict[str, TraceError] = dataclasses.field(default_factory=dict)  # of those without one
    largest: dict[str, int] = dataclasses.field(default_factory=dict)  # batch that fits
    no_largest: dict[str, str] = dataclasses.field(default_factory=dict)  # why there is none
    by_batch: dict[str, "MemoryByBatch"] = dataclasses.field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The values of a `ForecastTable`, by the names of its fields."""
        return {
            "forecasts": tuple(self.forecasts),
            "largest": self.largest,
            "failed": {column: str(error) for column, error in self.errors.items()},
            "no_largest": self.no_largest,
        }


def forecast_each(steps: Iterable[StepT], add: Callable[[Forecasts, StepT], None]) -> Forecasts:
    """Call `add` for each step, which adds a forecast; collect the errors of those that fail.

    Raises the first error if all steps fail, or the one in fp32, which is one of the model or its
    inputs. If a step needs values, `answered` repeats all of them with those of a real run.
    """
    found = Forecasts()
    for step in steps:
        try:
            add(found, step)
        except ValuesNeeded:
            raise
        except TraceError as error:
            if step.precision is Precision.FP32:
                raise
            found.errors[step.column] = error
    if not found.forecasts:
        first_error = next(iter(found.errors.values()))
        raise first_error
    return found


def _forecast_each_precision(
    steps: list[TrainingStep],
    call: ModelCall,
    limit: int | None,
    decisions: Decisions | None,
) -> Forecasts:
    """Forecast each step for every batch, or, where that fails, for the batch of `call` alone.

    `limit` is the memory in bytes for the largest batch, or None; `decisions` are those of a real
    run. Raises what `forecast_each` raises.
    """

    def add(found: Forecasts, step: TrainingStep) -> None:
        try:
            by_batch = MemoryByBatch(step, call, limit, found.by_batch.values())
        except Exception as error:  # a batch that was not given may make the model raise anything
            given = call.without_values(call.batch, step.traced_on)
            found.forecasts.append(step.trace(given, decisions).forecast())
            found.no_largest[step.column] = first_line(error)
            return
        found.forecasts.append(by_batch.forecast(call.batch))
        found.by_batch[step.column] = by_batch
        if limit is not None:
            found.largest[step.column] = by_batch.largest

    return forecast_each(steps, add)


def _curves(
    found: Forecasts, given_batch: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each precision some batches, in order, and the peak in bytes at each."""
    # A quarter beyond the largest batch, so that the figure shows where the curves cross the limit.
    beyond_largest = [5 * batch // 4 for batch in found.largest.values()]
    end = max([2 * given_batch, 16, *beyond_largest])
    # From 1 to `end` in sixteenths, each batch once if `end` is small.
    batches = tuple(sorted({max(1, end * i // 16) for i in range(17)}))
    curves = {}
    for precision, by_batch in found.by_batch.items():
        peaks = tuple(by_batch.forecast(batch).peak for batch in batches)
        curves[precision] = (batches, peaks)
    return curves


_UNITS = {"": 1, "b": 1}  # bytes of each unit: kb, kib, mb, mib, …
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(text: str | int) -> int:
    """The number of bytes in ``"24GiB"`` (24 x 2^30), ``"24 GB"`` (24 x 10^9) or ``"25769803776"``.

    Raises `TraceError` for anything else, for a bare ``"24G"`` (it does not say which of the two it
    means), less than one byte or more than 2^62, and less than 1 MiB in a text without a unit.
    """
    if isinstance(text, str) and text.strip().isdecimal() and int(text) < 2**20:
        raise TraceError(f"memory {text!r} would be {text} bytes: give a unit, as {text}GiB")
    count = _count_of_bytes(str(text))
    if count is None:
        raise TraceError(f"memory {text!r}: give bytes, as 24GiB (24 x 2^30) or 24GB (24 x 10^9)")
    if not 1 <= count <= 2**62:
        raise TraceError(f"memory {text!r}: give from one byte to 2^62")
    return int(count)


def _count_of_bytes(text: str) -> Fraction | None:
    """The bytes that a text such as "1.5 GB" says; None for other texts, and for "1.5 b"."""
    # Such as ``24gib``, ``1.5 gb`` or ``.5gib``: the number, and the unit or nothing.
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    if match is None:
        return None
    unit = _UNITS.get(match[2])
    if unit is None:
        return None
    number = Fraction(match[1])  # exact, unlike 1.1 * 10**9
    if unit == 1 and number.denominator > 1:
        return None
    return number * unit


def inputs_of_shapes(input_shape: Shapes, input_dtype: Dtypes, *, batched: bool) -> tuple:
    """Inputs of these shapes and dtypes, on ``meta``.

    If `batched`, the first size of each shape is the batch. Else every shape gets a batch of 1 in
    front, unless all have 1 there. Raises `TraceError` for inputs that do not go together.
    """
    shapes = _checked_shapes(input_shape)
    if isinstance(input_dtype, torch.dtype):
        dtypes = [input_dtype] * len(shapes)
    else:
        dtypes = list(input_dtype)
    if len(dtypes) != len(shapes):
        counts = f"{len(dtypes)} input dtypes for {len(shapes)} inputs"
        raise TraceError(f"{counts}: give one for all, or one for each")
    batches = {shape[0] for shape in shapes}
    if batched and len(batches) > 1:
        text = ", ".join(map(str, shapes))
        raise TraceError(
            f"inputs of shapes {text}: the first size is the batch; give the same for all"
        )
    if not batched and batches != {1}:
        shapes = [(1, *shape) for shape in shapes]
    inputs = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        inputs.append(torch.empty(shape, dtype=dtype, device="meta"))
    return tuple(inputs)


def _checked_shapes(input_shape: Any) -> list[tuple[int, ...]]:
    """One shape or several as a list; raises `TraceError` for a size that is not 1 or more."""
    if input_shape and all(isinstance(shape, Sequence) for shape in input_shape):
        shapes = [tuple(shape) for shape in input_shape]
    else:
        shapes = [tuple(input_shape)]
    for sizes in shapes:
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise TraceError(f"input shape {sizes}: give sizes of 1 or more")
    return shapes


@contextmanager
def errors_naming_inputs(model: nn.Module, inputs: str) -> Iterator[None]:
    """The block in which a model gets inputs that the user did not give, as ``a batch of 7``.

    Errors of the model become a `TraceError` that names these inputs, and so does a `TraceError`.
    Other errors of this package stay as they are.
    """
    try:
        yield
    except ValuesNeeded:  # a TraceError that `answered` waits for
        raise
    except TraceError as error:
        raise TraceError(f"{error} (tried with {inputs})") from error
    except AmpLabError:
        raise
    except Exception as error:
        message = f"{type(model).__name__}: {with_type(error)}"
        raise TraceError(f"{message} (tried with {inputs})") from error


class MemoryByBatch:
    """The memory of a step as a function of the batch, from two traces; a third has to agree.

    `largest` is the largest batch within `limit` bytes, and 0 if none fits or there is no limit.
    `earlier` is the same step in other precisions: if the trace of one batch equals that of one of
    them, its function is taken, and no other batch is traced. Raises `TraceError` if the memory is
    not linear in the batch.
    """

    # Batches to trace: not 1, with which some ops and layers do something else.
    _FIRST, _SECOND, _THIRD = 2, 3, 7

    def __init__(
        self,
        step: TraceableStep,
        call: ModelCall,
        limit: int | None,
        earlier: Iterable["MemoryByBatch"] = (),
    ):
        self._step = step
        self._call = call
        self._second_storages = self._trace(self._SECOND).storages
        for other in earlier:  # bf16 mostly needs just what fp16 does
            if self._second_storages.equals(other._second_storages):
                self._first_trace = dataclasses.replace(other._first_trace, step=step)
                self._slope = other._slope
                self.largest = other.largest
                return
        self._first_trace = self._trace(self._FIRST)
        storages = self._first_trace.storages
        # Another log would mean that another batch allocates at other times, or other things.
        self._require_linear(np.array_equal(storages.log, self._second_storages.log))
        # Bytes of each storage per item of the batch, since the two batches differ by one.
        self._slope = self._second_storages.sizes - storages.sizes
        self.largest = 0
        if limit is not None:
            self.largest = self.largest_within(limit)
        third = self._THIRD
        if self.largest > self._SECOND:  # check the batch that the user will run
            third = self.largest
        self._require_linear(self.forecast(third) == self._trace(third).forecast())

    def _trace(self, batch: int) -> Any:
        """The trace of the step for a batch, a `TracedStep`."""
        with errors_naming_inputs(self._call.model, f"a batch of {batch}"):
            return self._step.trace(self._call.without_values(batch, self._step.traced_on))

    def _require_linear(self, is_linear: bool) -> None:
        """Raise `TraceError` unless what was compared shows that the memory is linear."""
        if not is_linear:
            raise TraceError(
                f"{type(self._step.run.model).__name__}: its memory is not a constant plus a "
                "multiple of the batch; forecast the batches one by one"
            )

    def forecast(self, batch: int, optimizer: str | None = None) -> Any:
        """A `MemoryForecast`, with `optimizer` if given, or an `InferenceForecast`, for a batch."""
        traced = self._first_trace
        if optimizer is not None:
            step = dataclasses.replace(traced.step, optimizer=optimizer)
            traced = dataclasses.replace(traced, step=step)
        sizes = traced.storages.sizes + self._slope * (batch - self._FIRST)  # linear in batch
        storages = dataclasses.replace(traced.storages, sizes=sizes)
        input_shapes = self._call.without_values(batch, "meta").shapes
        resized = dataclasses.replace(traced, input_shapes=input_shapes, storages=storages)
        return resized.forecast()

    def largest_within(self, limit: int) -> int:
        """The largest batch whose peak is at most `limit` bytes; 0 if none is."""
        too_large = 1  # once the loop has ended
        while self.forecast(too_large).peak <= limit:
            too_large *= 2
        # The peak never falls as the batch grows, so batches are in the order of their peaks, and
        # bisection finds the first one from 1 on that is too large.
        return bisect_right(range(too_large), limit, lo=1, key=lambda n: self.forecast(n).peak) - 1

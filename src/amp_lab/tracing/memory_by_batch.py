"""The growth of a step's memory with the batch, and the largest batch that fits.

Both training (`memory`) and inference (`inference_memory`) use this module.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from torch import nn

from amp_lab.core.errors import AmpLabError, TraceError, with_type
from amp_lab.core.precision import Precision
from amp_lab.model_call import ModelCall
from amp_lab.tracing.decisions import ValuesNeeded
from amp_lab.tracing.steps import TraceableStep

StepT = TypeVar("StepT", bound=TraceableStep)


class MemoryByBatch:
    """The memory of a step as a function of the batch, from two traces; a third has to agree.

    `largest` is the largest batch within `limit` bytes, and 0 if none fits or there is no limit.
    `earlier` is the same step in other precisions: if the trace of one batch equals a trace in
    another precision, the function for that precision is used, and no other batch is traced. Raises
    `TraceError` if the memory is not linear in the batch.
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
        """The largest batch with a peak of at most `limit` bytes; 0 if no batch fits."""
        too_large = 1  # once the loop has ended
        while self.forecast(too_large).peak <= limit:
            too_large *= 2
        # The peak never falls as the batch grows, so batches are in the order of their peaks, and
        # bisection finds the first one from 1 on that is too large.
        return bisect_right(range(too_large), limit, lo=1, key=lambda n: self.forecast(n).peak) - 1


@contextmanager
def errors_naming_inputs(model: nn.Module, inputs: str) -> Iterator[None]:
    """The block in which a model gets inputs that the user did not give, as ``a batch of 7``.

    Errors of the model, and a `TraceError`, become a `TraceError` that names these inputs. Other
    errors of this package stay as they are.
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


@dataclasses.dataclass
class Forecasts:
    """The forecasts of several steps, with further facts, by the column of the step."""

    forecasts: list[Any] = dataclasses.field(default_factory=list)  # for the batch that was given
    errors: dict[str, TraceError] = dataclasses.field(default_factory=dict)  # of those without one
    largest: dict[str, int] = dataclasses.field(default_factory=dict)  # batch that fits
    no_largest: dict[str, str] = dataclasses.field(default_factory=dict)  # why there is none
    by_batch: dict[str, MemoryByBatch] = dataclasses.field(default_factory=dict)

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

    If all steps fail, the function raises the first error. If the step in fp32 fails, it raises
    that error, because the model or its inputs are the cause. If a step needs values, `answered`
    repeats all steps with the values of a real run.
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

"""The growth of a step's memory with the batch, and the largest batch that fits.

Both training (`memory`) and inference (`inference_memory`) use this module.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from amp_lab.core.errors import AmpLabError, TraceError, with_type
from amp_lab.core.precision import Precision
from amp_lab.model_call import ModelCall
from amp_lab.tracing.decisions import ValuesNeeded
from amp_lab.tracing.steps import TraceableStep


class MemoryByBatch:
    """The memory of a step as a function of the batch.

    Two traces give the size of each storage as a constant plus a multiple of the batch; a third
    trace has to agree.
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
        """Trace the step for some batches, and find the largest batch.

        Args:
            step: A training step or a forward pass.
            call: The model and its inputs, which are resized to each batch.
            limit: The bytes that the step may take; None: no largest batch is asked for.
            earlier: The same step in other precisions. If one of them needs the same memory, its
                traces are used, and only one batch is traced.

        Raises:
            TraceError: If the memory is not a constant plus a multiple of the batch.
        """
        self._step = step
        self._call = call
        self._second_storages = self._trace(self._SECOND).storages
        for other in earlier:  # bf16 mostly needs just what fp16 does
            if self._second_storages.equals(other._second_storages):
                self._first_trace = dataclasses.replace(other._first_trace, step=step)
                self._bytes_per_item = other._bytes_per_item
                self.largest = other.largest
                return
        self._first_trace = self._trace(self._FIRST)
        storages = self._first_trace.storages
        # Another log would mean that another batch allocates at other times, or other things.
        self._require_linear(np.array_equal(storages.log, self._second_storages.log))
        # For each storage, since the two batches differ by one.
        self._bytes_per_item = self._second_storages.sizes - storages.sizes
        self.largest = 0  # the largest batch within `limit`; 0 if none fits or there is no limit
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
        """Raise `TraceError` unless `is_linear`, the result of a comparison of two traces."""
        if not is_linear:
            raise TraceError(
                f"{type(self._step.run.model).__name__}: its memory does not grow linearly with "
                "the batch. Forecast each batch separately"
            )

    def forecast(self, batch: int, optimizer: str | None = None) -> Any:
        """The forecast for a batch: a `MemoryForecast` or, for a forward pass, `InferenceForecast`.

        With `optimizer`, it is for a training step with this optimizer instead of the traced one.
        """
        traced = self._first_trace
        if optimizer is not None:
            step = dataclasses.replace(traced.step, optimizer=optimizer)
            traced = dataclasses.replace(traced, step=step)
        sizes = traced.storages.sizes + self._bytes_per_item * (batch - self._FIRST)
        storages = dataclasses.replace(traced.storages, sizes=sizes)
        input_shapes = self._call.without_values(batch, "meta").shapes
        resized = dataclasses.replace(traced, input_shapes=input_shapes, storages=storages)
        return resized.forecast()

    def largest_within(self, limit: int) -> int:
        """The largest batch with a peak of at most `limit` bytes; 0 if no batch fits."""
        fits = 0
        too_large = 1
        while self.forecast(too_large).peak <= limit:
            fits = too_large
            too_large *= 2
        # The peak never falls as the batch grows, so the largest batch is between the two.
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.forecast(middle).peak <= limit:
                fits = middle
            else:
                too_large = middle
        return fits


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
    """The forecasts of several steps of one model, such as a step in each precision.

    The keys of the dicts are columns of the table of forecasts, such as "bf16".
    """

    forecasts: list[Any] = dataclasses.field(default_factory=list)  # for the batch of the user
    errors: dict[str, TraceError] = dataclasses.field(default_factory=dict)  # why no forecast
    largest: dict[str, int] = dataclasses.field(default_factory=dict)  # batch that fits
    no_largest: dict[str, str] = dataclasses.field(default_factory=dict)  # why no largest batch
    by_batch: dict[str, MemoryByBatch] = dataclasses.field(default_factory=dict)

    @contextmanager
    def storing_error(self, step: TraceableStep) -> Iterator[None]:
        """The block that forecasts a step; stores its `TraceError`, so the next step can follow.

        An error in fp32 leaves the block, because the model or its inputs are the cause. So does
        `ValuesNeeded`: `answered` then repeats all steps with the values of a real run.
        """
        try:
            yield
        except ValuesNeeded:
            raise
        except TraceError as error:
            if step.precision is Precision.FP32:
                raise
            self.errors[step.column] = error

    def require_any(self) -> None:
        """Raise the error of the first step if no step has a forecast."""
        if not self.forecasts:
            first_error = next(iter(self.errors.values()))
            raise first_error

    def fields(self) -> dict[str, Any]:
        """The values of a `ForecastTable`, by the names of its fields."""
        return {
            "forecasts": tuple(self.forecasts),
            "largest": self.largest,
            "failed": {column: str(error) for column, error in self.errors.items()},
            "no_largest": self.no_largest,
        }

"""The memory of a training step as a function of the batch, and the largest batch that fits."""

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from amp_lab.errors import TraceError
from amp_lab.tracing.fake_device import FakeRun
from amp_lab.tracing.memory_result import MemoryForecast
from amp_lab.tracing.ops_seen import tensors_in
from amp_lab.tracing.training_step import TracedStep, TrainingStep

Shapes = Sequence[int] | Sequence[Sequence[int]]
Dtypes = torch.dtype | Sequence[torch.dtype]


@dataclasses.dataclass(frozen=True)
class BatchedInputs:
    """The inputs of a model for any batch; values are of no importance.

    The batch is the first size of the first tensor, and every tensor whose first size is the same
    grows with it. Others are held as they are, such as positions that all items share.
    """

    args: tuple
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def batch(self) -> int:
        """The batch that was given; 1 if there is no tensor with a size."""
        return next((t.shape[0] for t in tensors_in((self.args, self.kwargs)) if t.ndim), 1)

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that do not grow with the batch."""
        shapes = [tuple(tensor.shape) for tensor in tensors_in((self.args, self.kwargs))]
        return tuple(shape for shape in shapes if shape[:1] != (self.batch,))

    def of(self, batch: int, device: torch.device | str) -> tuple[tuple, dict[str, Any]]:
        """`args` and `kwargs` for a batch."""

        def sized(tensor: torch.Tensor) -> torch.Tensor:
            shape = self._sized(tensor, batch)
            made = torch.empty(shape, dtype=tensor.dtype, device=device)
            return made.requires_grad_(tensor.requires_grad)

        return tree_map_only(torch.Tensor, sized, (self.args, self.kwargs))

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor for a batch."""
        return tuple(self._sized(tensor, batch) for tensor in tensors_in((self.args, self.kwargs)))

    def _sized(self, tensor: torch.Tensor, batch: int) -> tuple[int, ...]:
        grows = tuple(tensor.shape[:1]) == (self.batch,)
        return (batch, *tensor.shape[1:]) if grows else tuple(tensor.shape)


def inputs_of_shapes(input_shape: Shapes, input_dtype: Dtypes, *, batched: bool) -> BatchedInputs:
    """Inputs of these shapes and dtypes.

    With `batched`, the first size of each is the batch, else only if it is 1. Raises `TraceError`
    for inputs that do not go together.
    """
    shapes = _checked_shapes(input_shape)
    one = isinstance(input_dtype, torch.dtype)
    dtypes = [input_dtype] * len(shapes) if one else list(input_dtype)
    if len(dtypes) != len(shapes):
        counts = f"{len(dtypes)} input dtypes for {len(shapes)} inputs"
        raise TraceError(f"{counts}: give one for all, or one for each")
    batches = {shape[0] for shape in shapes}
    if batched and len(batches) > 1:
        given = "inputs of shapes " + ", ".join(map(str, shapes))
        raise TraceError(f"{given}: the first size is the batch; give the same for all")
    if not batched and batches != {1}:
        shapes = [(1, *shape) for shape in shapes]
    return BatchedInputs(
        tuple(
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    )


def _checked_shapes(given: Shapes) -> list[tuple[int, ...]]:
    several = bool(given) and all(isinstance(shape, Sequence) for shape in given)
    sequences: Sequence[Any] = given if several else (given,)
    shapes = [tuple(shape) for shape in sequences]
    for sizes in shapes:
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise TraceError(f"input shape {sizes}: give sizes of 1 or more")
    return shapes


def trace_of(step: TrainingStep, run: FakeRun, inputs: BatchedInputs, batch: int) -> TracedStep:
    """The step for a batch, with a `run` that is open."""
    return step.trace(run, *inputs.of(batch, step.device_type))


class MemoryByBatch:
    """The memory of a step as a function of the batch, from two traces; a third has agreed.

    `largest` is the largest batch within `limit` bytes, and 0 if none fits or there is no limit.
    One trace is enough if it equals that of a step in `known`, the same in another precision.
    """

    _FIRST, _SECOND, _THIRD = 2, 3, 7  # not 1, where some ops and layers do something else

    def __init__(
        self,
        step: TrainingStep,
        run: FakeRun,
        inputs: "BatchedInputs",
        limit: int | None,
        known: Iterable["MemoryByBatch"] = (),
    ):
        self._step, self._run, self._inputs = step, run, inputs
        self._second = self._trace(self._SECOND).storages
        for other in known:  # bf16 mostly needs just what fp16 does
            if self._second.equals(other._second):
                self._first = dataclasses.replace(other._first, step=step)
                self._slope, self.largest = other._slope, other.largest
                return
        self._first = self._trace(self._FIRST)
        storages = self._first.storages
        # Another log would mean that another batch allocates at other times, or other things.
        self._require(np.array_equal(storages.log, self._second.log))
        self._slope = self._second.sizes - storages.sizes  # bytes per item of the batch
        self.largest = 0 if limit is None else self._solve(limit)
        third = self.largest if self.largest > self._SECOND else self._THIRD
        self._require(self.at(third) == self._trace(third).forecast())

    def _trace(self, batch: int) -> TracedStep:
        try:
            return trace_of(self._step, self._run, self._inputs, batch)
        except TraceError as error:
            raise TraceError(f"{error} (tried with a batch of {batch})") from error

    def _require(self, agrees: bool) -> None:
        if not agrees:
            raise TraceError(
                f"{type(self._step.model).__name__}: its memory is not a constant plus a multiple "
                "of the batch; forecast the batches one by one"
            )

    def at(self, batch: int) -> MemoryForecast:
        """The forecast for a batch."""
        storages = self._first.storages
        sizes = storages.sizes + self._slope * (batch - self._FIRST)
        return dataclasses.replace(
            self._first,
            input_shapes=self._inputs.shapes(batch),
            storages=dataclasses.replace(storages, sizes=sizes),
        ).forecast()

    def _solve(self, limit: int) -> int:
        too_large = 1
        while self.at(too_large).peak <= limit:
            too_large *= 2
        # The peak never falls as the batch grows, so the batches are in the order of their peaks.
        return bisect_right(range(too_large), limit, lo=1, key=lambda n: self.at(n).peak) - 1

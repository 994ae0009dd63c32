"""What values decide in a model: noted in a real run, and told to a run on fake tensors.

A branch on ``x.sum() > 0``, the number of rows of ``x.nonzero()``: a fake tensor has no values to
decide by. A run on the CPU notes each such decision in order, and a trace takes them in that order.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from amp_lab.errors import TraceError
from amp_lab.report import plural
from amp_lab.tracing.ops_seen import tensors_in
from amp_lab.tracing.records import LOSS, place_of
from amp_lab.tracing.running_module import RunningModule

# torch marks the ops whose result, or the size of it, depends on values.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX = torch.ops.aten.index.Tensor
# Ops that torch does not mark. The rule of the first for fake tensors warns before it refuses, and
# what the second keeps for backward is as large as the longest target.
_NMS = "torchvision::nms"
_CTC_LOSS = torch.ops.aten._ctc_loss.Tensor


class ValuesNeeded(TraceError):
    """The course of a model depends on values, which fake tensors do not have."""

    def __init__(self, message: str, op: OpOverload):
        super().__init__(message)
        self.op = op


class MemoryNeeded(TraceError):
    """A model reads the memory of a tensor, as NumPy does; fake ones have none."""


class NotAnswered(TraceError):
    """No real run has the values that a trace asks for."""


class NoValues(NotAnswered):
    """The model or an input is on ``meta``."""


class OtherCourse(NotAnswered):
    """A trace asks for other decisions than the real run took."""


@dataclass(frozen=True)
class Decision:
    """What an op returned in a real run, if its result, or the size of it, depends on values."""

    module: str  # qualified name of the one whose code ran, or LOSS
    op: OpOverload
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it got
    result: Any  # a number, or tensors on meta


@dataclass(frozen=True)
class Decisions:
    """All decisions of a real run, in their order."""

    made: tuple[Decision, ...] = ()
    untagged: frozenset[OpOverload] = frozenset()
    """Ops that torch does not mark, and that are noted too: fake tensors asked for their values."""

    @property
    def remark(self) -> str:
        """What to say of a trace that took them; empty if there are none."""
        if not self.made:
            return ""
        count = plural(len(self.made), "decision")
        were = "was" if len(self.made) == 1 else "were"
        return (
            f"{count} (branches, sizes) that depend on values {were} taken from a run on the CPU "
            "in fp32 and may differ for other inputs."
        )


def is_unmarked(op: OpOverload) -> bool:
    """Whether the size of its result depends on values, though torch does not mark it."""
    return op is _CTC_LOSS or op._schema.name == _NMS


@functools.cache
def _is_tagged(op: OpOverload) -> bool:
    return is_unmarked(op) or bool(_TAGS.intersection(op.tags))


def depends_on_values(op: OpOverload, args: tuple, untagged: frozenset[OpOverload]) -> bool:
    """Whether the result of an op, or the size of it, depends on values."""
    if op is not _INDEX:
        return _is_tagged(op) or op in untagged
    masks = [index for index in args[1] if index is not None]
    return any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)


def noted(running: RunningModule, op: OpOverload, given: tuple, result: Any) -> Decision:
    """The record of an op that returned `result` for `given`, its args and kwargs."""

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    kept = tree_map_only(torch.Tensor, without_values, result)
    return Decision(_place(running), op, _shapes(given), kept)


def _place(running: RunningModule) -> str:
    return LOSS if running.is_none else running.name


def _shapes(given: tuple) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(given))


class Replay:
    """Tells a trace the decisions of a real run, in their order."""

    def __init__(self, decisions: Decisions):
        self._decisions = decisions
        self._told = 0
        self.running = RunningModule()

    def restart(self) -> None:
        """Tell the decisions from the first on, as for a second step."""
        self._told = 0

    def answers(self, op: OpOverload, args: tuple) -> bool:
        """Whether the result of an op has to come from the real run."""
        return depends_on_values(op, args, self._decisions.untagged)

    def answer(self, op: OpOverload, args: tuple, kwargs: dict, fake: Callable[..., Any]) -> Any:
        """The next result; `fake` makes a tensor of a size, stride, dtype and device.

        Raises `OtherCourse` if the real run called another op next, in another module, or with
        tensors of other shapes.
        """
        given = (args, kwargs)
        wanted = _place(self.running), op, _shapes(given)
        left = self._decisions.made[self._told :]
        if not left or (left[0].module, left[0].op, left[0].shapes) != wanted:
            raise self._other_course(wanted[0], op)
        self._told += 1
        tensors = tensors_in(given)
        floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]

        def made(tensor: torch.Tensor) -> torch.Tensor:
            # Values that an op picks are in the dtype of what they are picked from.
            dtype = floats[0] if tensor.is_floating_point() and floats else tensor.dtype
            return fake(tensor.size(), tensor.stride(), dtype, tensors[0].device)

        return tree_map_only(torch.Tensor, made, left[0].result)

    def require_done(self) -> None:
        """Raise `OtherCourse` if the real run took decisions that the trace did not ask for."""
        left = self._decisions.made[self._told :]
        if left:
            raise self._other_course(left[0].module, left[0].op)

    @staticmethod
    def _other_course(module: str, op: OpOverload) -> OtherCourse:
        name = op._schema.name.rpartition("::")[2]
        place = "the loss or the backward pass" if module == LOSS else place_of(module)
        return OtherCourse(f"the run on the CPU took another course at op {name} in {place}")

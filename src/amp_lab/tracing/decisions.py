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

from amp_lab.core.errors import TraceError
from amp_lab.core.report import plural
from amp_lab.tracing.finite_checks import found_in_finite_values
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
    in_finite: bool | int | float | None = None  # what a check for inf or NaN is if all are finite

    @property
    def says_finite(self) -> bool:
        """Whether it is a check for inf or NaN that found none."""
        return self.in_finite is not None and self.result == self.in_finite


@dataclass(frozen=True)
class Decisions:
    """All decisions of a real run, in their order."""

    made: tuple[Decision, ...] = ()
    untagged: frozenset[OpOverload] = frozenset()
    """Ops that torch does not mark, and that are noted too: fake tensors asked for their values."""
    is_finite: bool = False
    """Whether all that the model and the loss gave is finite."""


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
    in_finite = found_in_finite_values(op, given[0])
    return Decision(_module_of(running), op, _shapes(given), kept, in_finite)


def _module_of(running: RunningModule) -> str:
    if running.is_none:
        return LOSS
    return running.name


def _shapes(given: tuple) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(given))


class Replay:
    """Tells a trace the decisions of a real run, in their order.

    Checks for inf and NaN are another matter: a model may make some in one dtype alone. Those that
    only the real run made are passed over if they found none, and those that only the trace makes
    find none, provided that the real run gave finite values.
    """

    def __init__(self, decisions: Decisions):
        self._decisions = decisions
        self._next = 0  # of the decisions
        self._taken = 0
        self._assumed = 0
        self.running = RunningModule()

    @property
    def remark(self) -> str:
        """What to say of a trace that took decisions; empty if it took none."""
        sentences = []
        if self._taken:
            decisions = plural(self._taken, "decision")
            sentences.append(
                f"{decisions} (branches, sizes) that depend on values {_were(self._taken)} taken "
                "from a run on the CPU in fp32 and may differ for other inputs."
            )
        if self._assumed:
            checks = plural(self._assumed, "check")
            sentences.append(
                f"{checks} for inf or NaN {_were(self._assumed)} answered with none, since a run "
                "on the CPU in fp32, which does not make them, gives finite outputs."
            )
        return " ".join(sentences)

    def restart(self) -> None:
        """Tell the decisions from the first on, as for a second step."""
        self._next = 0
        self._taken = 0
        self._assumed = 0

    def answers(self, op: OpOverload, args: tuple) -> bool:
        """Whether the result of an op has to come from the real run."""
        return depends_on_values(op, args, self._decisions.untagged)

    def answer(self, op: OpOverload, args: tuple, kwargs: dict, fake: Callable[..., Any]) -> Any:
        """The next result; `fake` makes a tensor of a size, stride, dtype and device.

        Raises `OtherCourse` if the real run called another op next, in another module, or with
        tensors of other shapes.
        """
        given = (args, kwargs)
        in_finite = found_in_finite_values(op, args)
        module = _module_of(self.running)
        number = self._number_of(module, op, _shapes(given), in_finite is not None)
        if number is None:
            if in_finite is None:
                raise self._other_course(module, op)
            self._require_finite(module)
            self._assumed += 1
            return in_finite
        self._next = number + 1
        self._taken += 1
        tensors = tensors_in(given)
        float_dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]

        def fake_result(tensor: torch.Tensor) -> torch.Tensor:
            dtype = tensor.dtype
            if dtype.is_floating_point and float_dtypes:
                # Values that an op picks are in the dtype of what they are picked from.
                dtype = float_dtypes[0]
            return fake(tensor.size(), tensor.stride(), dtype, tensors[0].device)

        return tree_map_only(torch.Tensor, fake_result, self._decisions.made[number].result)

    def require_done(self) -> None:
        """Raise `OtherCourse` if the real run took decisions that the trace did not ask for."""
        for decision in self._decisions.made[self._next :]:
            if not decision.says_finite:
                raise self._other_course(decision.module, decision.op)

    def _number_of(
        self, module: str, op: OpOverload, shapes: tuple[tuple[int, ...], ...], is_check: bool
    ) -> int | None:
        """Which decision comes next, if it is that of this op; else None."""
        wanted = (module, op, shapes, is_check)
        for number, decision in enumerate(self._decisions.made[self._next :], start=self._next):
            noted_as_check = decision.in_finite is not None
            if (decision.module, decision.op, decision.shapes, noted_as_check) == wanted:
                return number
            if not decision.says_finite:
                return None
        return None

    def _require_finite(self, module: str) -> None:
        if not self._decisions.is_finite:
            raise OtherCourse(
                f"the check for inf or NaN in {_place_of(module)} is not made by the run on the "
                "CPU, whose outputs are not finite"
            )

    @staticmethod
    def _other_course(module: str, op: OpOverload) -> OtherCourse:
        name = op._schema.name.rpartition("::")[2]
        where = f"op {name} in {_place_of(module)}"
        return OtherCourse(f"the run on the CPU took another course at {where}")


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _place_of(module: str) -> str:
    if module == LOSS:
        return "the loss or the backward pass"
    return place_of(module)

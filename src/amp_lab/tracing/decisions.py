"""Record decisions that depend on values in a real run, and replay them on fake tensors.

A *decision* is the result of an op, if the result or its size depends on values. Examples are the
bool in ``if x.sum() > 0``, or the rows of ``x.nonzero()``. A fake tensor has no values to compute
it. So a *real run* on the CPU records the results of these ops, and a trace on fake tensors uses
them in the same order.
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
from amp_lab.core.tensors import tensors_in
from amp_lab.tracing.finite_checks import result_if_finite
from amp_lab.tracing.ops_seen import op_name
from amp_lab.tracing.records import LOSS, place_of
from amp_lab.tracing.running_module import RunningModule

# The tags with which torch marks ops whose result, or the size of it, depends on values.
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX = torch.ops.aten.index.Tensor
# Ops that torch does not mark. The fake rule of nms warns before it raises. The size of what
# _ctc_loss saves for backward depends on the longest target, so on the values of the lengths.
_NMS = "torchvision::nms"
_CTC_LOSS = torch.ops.aten._ctc_loss.Tensor


class ValuesNeeded(TraceError):
    """An op of the model depends on values, which fake tensors do not have."""

    def __init__(self, message: str, op: OpOverload):
        super().__init__(message)
        self.op = op


class MemoryNeeded(TraceError):
    """A model reads the memory of a tensor, as NumPy does. Fake tensors have none."""


class NotAnswered(TraceError):
    """The real run does not have the values for a trace. The message has the reason."""


class NoValues(NotAnswered):
    """There can be no real run, since the model or an input is on ``meta``."""


class OtherCourse(NotAnswered):
    """The trace needs other decisions than the real run recorded."""


@dataclass(frozen=True)
class Decision:
    """The result of an op in a real run, if the result or its size depends on values."""

    module: str  # qualified name of the module that called the op, or LOSS
    op: OpOverload
    shapes: tuple[tuple[int, ...], ...]  # of the op's input tensors
    result: Any  # a number, or tensors on meta
    if_finite: bool | int | float | None = None
    """For a check for inf or NaN, the result if all values are finite; None for other ops."""

    @property
    def says_finite(self) -> bool:
        """Whether this is a check for inf or NaN that found none."""
        return self.if_finite is not None and self.result == self.if_finite


@dataclass(frozen=True)
class Decisions:
    """All decisions of a real run, in order."""

    sequence: tuple[Decision, ...] = ()
    unmarked: frozenset[OpOverload] = frozenset()
    """Ops that are recorded although torch does not mark them: an earlier trace failed at them."""
    is_finite: bool = False
    """Whether all outputs of the model and the loss are finite."""


def is_unmarked(op: OpOverload) -> bool:
    """Whether an op depends on values, although torch does not mark the op."""
    return op is _CTC_LOSS or op._schema.name == _NMS


@functools.cache
def _has_value_dependence(op: OpOverload) -> bool:
    """Whether an op depends on values according to torch's tags or to `is_unmarked`."""
    return is_unmarked(op) or bool(_VALUE_TAGS.intersection(op.tags))


def depends_on_values(op: OpOverload, args: tuple, unmarked: frozenset[OpOverload]) -> bool:
    """Whether the result of an op, or the size of it, depends on values.

    `unmarked` are further ops that depend on values, as in `Decisions`.
    """
    if op is not _INDEX:
        return _has_value_dependence(op) or op in unmarked
    # The size of x[indices] depends on values if an index is a mask: on how many are true.
    indices = [index for index in args[1] if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def record_decision(running: RunningModule, op: OpOverload, inputs: tuple, result: Any) -> Decision:
    """The `Decision` of an op that returned `result` for `inputs`, the op's (args, kwargs).

    `running` has the name of the module that called the op. The tensors of `result` are recorded on
    ``meta``, with their shapes, strides and dtypes.
    """

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    result_on_meta = tree_map_only(torch.Tensor, on_meta, result)
    args, _ = inputs
    if_finite = result_if_finite(op, args)
    return Decision(running.name_or_loss, op, _shapes_of(inputs), result_on_meta, if_finite)


def _shapes_of(inputs: tuple) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors in (args, kwargs), in order."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(inputs))


class Replay:
    """Gives a trace the decisions of a real run, in order, in place of ops that depend on values.

    Checks for inf or NaN may differ between the two, since a model may make some only in fp16.
    A check that only the real run made is skipped if it found none. A check that only the trace
    makes is answered with "none found", if the outputs of the real run were finite.
    """

    def __init__(self, decisions: Decisions):
        self._decisions = decisions
        self.running = RunningModule()
        self.restart()

    def restart(self) -> None:
        """Begin with the first decision again, as for a second training step."""
        self._position = 0  # index of the next decision in the real run's sequence
        self._taken_count = 0  # how many decisions of the real run the trace has taken
        self._assumed_count = 0  # how many checks for inf or NaN only the trace has made

    @property
    def remark(self) -> str:
        """A remark on the replayed decisions and the checks answered with "none found", or ""."""
        sentences = []
        if self._taken_count:
            decisions = plural(self._taken_count, "decision")
            were = _were(self._taken_count)
            sentences.append(
                f"{decisions} (branches, sizes) that depend on values {were} taken from a run on "
                "the CPU in fp32. Other inputs may lead to other decisions."
            )
        if self._assumed_count:
            checks = plural(self._assumed_count, "check")
            were = _were(self._assumed_count)
            sentences.append(
                f"{checks} for inf or NaN {were} assumed to find none, because the outputs of the "
                "run on the CPU in fp32 are finite."
            )
        return " ".join(sentences)

    def answers(self, op: OpOverload, args: tuple) -> bool:
        """Whether an op depends on values, so you have to call `answer` instead of the op."""
        return depends_on_values(op, args, self._decisions.unmarked)

    def answer(self, op: OpOverload, args: tuple, kwargs: dict, fake: Callable[..., Any]) -> Any:
        """Return the result that an op had in the real run, with fake tensors.

        For a check for inf or NaN that the real run did not make, return the result for finite
        values. `fake` creates a tensor with a size, stride, dtype and device. Raises `OtherCourse`
        if the next decision of the real run is from another op, from another module, or for other
        shapes. For a check for inf or NaN, it raises only if the outputs of the real run also
        contained an inf or a NaN.
        """
        inputs = (args, kwargs)
        module = self.running.name_or_loss
        if_finite = result_if_finite(op, args)  # None if this is no check for inf or NaN
        is_check = if_finite is not None
        position = self._find_position(module, op, _shapes_of(inputs), is_check)
        if position is not None:
            self._position = position + 1
            self._taken_count += 1
            result = self._decisions.sequence[position].result
            return _with_fake_tensors(result, tensors_in(inputs), fake)
        if not is_check:
            raise _other_course(module, op)
        if not self._decisions.is_finite:
            raise OtherCourse(
                f"the trace checks for inf or NaN in {_decision_place(module)}, but the run on "
                "the CPU has no such check, and its outputs are not finite"
            )
        self._assumed_count += 1
        return if_finite

    def require_done(self) -> None:
        """Raise `OtherCourse` if the trace did not use all decisions of the real run.

        Unused checks for inf or NaN are allowed if they found none.
        """
        for decision in self._decisions.sequence[self._position :]:
            if not decision.says_finite:
                raise _other_course(decision.module, decision.op)

    def _find_position(
        self, module: str, op: OpOverload, shapes: tuple[tuple[int, ...], ...], is_check: bool
    ) -> int | None:
        """The position in the sequence of the next decision, if it is this one; else None.

        The decision is described by its module, its op, the shapes of the op's inputs, and whether
        it is a check for inf or NaN. Such checks that found none are skipped.
        """
        expected = (module, op, shapes, is_check)
        for position in range(self._position, len(self._decisions.sequence)):
            decision = self._decisions.sequence[position]
            was_check = decision.if_finite is not None
            if (decision.module, decision.op, decision.shapes, was_check) == expected:
                return position
            if not decision.says_finite:
                return None
        return None


def _with_fake_tensors(
    result: Any, inputs: list[torch.Tensor], fake: Callable[..., torch.Tensor]
) -> Any:
    """The result of a decision with its ``meta`` tensors replaced by fake ones.

    `inputs` are the tensors that the op has in the trace, at least one: the fake tensors are on the
    device of the first. `fake` is as in `Replay.answer`.
    """
    float_dtypes = [tensor.dtype for tensor in inputs if tensor.is_floating_point()]

    def fake_like(tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype
        if dtype.is_floating_point and float_dtypes:
            # The real run was in fp32. Ops such as nonzero or index pick values of an input, so
            # here they have the dtype of that input.
            dtype = float_dtypes[0]
        return fake(tensor.size(), tensor.stride(), dtype, inputs[0].device)

    return tree_map_only(torch.Tensor, fake_like, result)


def _other_course(module: str, op: OpOverload) -> OtherCourse:
    """The error for an op at which the trace and the real run differ."""
    where = f"op {op_name(op)} in {_decision_place(module)}"
    return OtherCourse(f"the run on the CPU took another branch at {where}")


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _decision_place(module: str) -> str:
    """Where a decision was taken, for an error message; ops outside all modules have LOSS."""
    if module == LOSS:
        return "the loss or the backward pass"
    return place_of(module)

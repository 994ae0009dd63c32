"""Trace a model whose course depends on values: with the decisions of a real run, or refuse it."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn
from torch._ops import OpOverload

from amp_lab.core.errors import TraceError
from amp_lab.core.remedies import remedy
from amp_lab.tracing.decisions import (
    Decisions,
    MemoryNeeded,
    NotAnswered,
    NoValues,
    OtherCourse,
    ValuesNeeded,
)
from amp_lab.tracing.fake_device import FOR_REAL, attribute_set, remedy_for
from amp_lab.tracing.real_run import ModelCall, decisions_of

_VALUES = remedy(
    "trace.values",
    "the course of a model on meta, or of inputs there, depends on values",
    "build the model and its inputs on the CPU, where they have values",
)
_EVAL = remedy(
    "trace.eval",
    "the course of a model depends on values in training mode alone",
    "put the model into evaluation mode, model.eval(), which is --eval",
)
_WITHOUT_LOSS = remedy(
    "trace.without_loss",
    "only the loss asks for values",
    "leave out the loss, loss_fn, which is --loss",
)
_Result = TypeVar("_Result")
Trace = Callable[[ModelCall, Decisions | None], _Result]


def answered(
    trace: Trace[_Result], call: ModelCall, verb: str, for_real: Callable[[], object] | None = None
) -> _Result:
    """What `trace` returns; with the decisions of a run on the CPU if it asks for values.

    `verb` is what the trace does to a model, in a sentence. `for_real` runs the model for real on
    the CPU. Raises `TraceError` for what the run on the CPU cannot answer, and for a model that
    reads the memory of a tensor, with a remedy that was tried here.
    """
    try:
        return _with_decisions(trace, call, verb, for_real)
    except MemoryNeeded as error:
        advice = _remedy(_attempts(trace, call, for_real), error, call.model, verb)
        raise TraceError(f"{error}, which fake tensors do not have: {advice}") from error


def _with_decisions(
    trace: Trace[_Result], call: ModelCall, verb: str, for_real: Callable[[], object] | None
) -> _Result:
    try:
        return trace(call, None)
    except ValuesNeeded as error:
        refused = error
    untagged: frozenset[OpOverload] = frozenset()
    while refused.op not in untagged:
        untagged |= {refused.op}
        try:
            decisions = decisions_of(call, untagged)
            with _masks_are_read():
                return trace(call, decisions)
        except ValuesNeeded as error:  # from another op that torch does not mark either
            refused = error
        except NotAnswered as error:
            run_for_real = for_real if isinstance(error, OtherCourse) else None
            advice = _remedy(_attempts(trace, call, run_for_real), refused, call.model, verb)
            if isinstance(error, NoValues):
                advice = f"{_VALUES.text}; or {advice}"
            raise type(error)(f"{refused}, and {error}: {advice}") from error
    advice = _remedy(_attempts(trace, call, for_real), refused, call.model, verb)
    raise TraceError(f"{refused}, which fake tensors have not: {advice}") from refused


@contextmanager
def _masks_are_read() -> Iterator[None]:
    """The block in which transformers reads the values of a fake mask, as it does of a real one.

    A mask of ones is left out there. Of fake tensors its `is_tracing` says that they have no
    values, so that the trace would not ask what the real run was asked.
    """
    owner = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(owner, "is_fake_tensor"):
        yield
        return
    with attribute_set(owner, "is_fake_tensor", lambda tensor: False):
        yield


Attempt = tuple[str, Callable[[], object]]  # a remedy, and what does what it says


def _attempts(
    trace: Trace[_Result], call: ModelCall, for_real: Callable[[], object] | None
) -> Iterator[Attempt]:
    """The remedies that may help, the one that changes least first."""
    if call.model.training:

        def in_evaluation_mode() -> object:
            with _evaluation_mode(call.model):
                return trace(call, None)

        yield _EVAL.text, in_evaluation_mode
    if call.loss_fn is not None:
        without_loss = dataclasses.replace(call, loss_fn=None)
        yield _WITHOUT_LOSS.text, lambda: trace(without_loss, None)
    if for_real is not None:
        yield FOR_REAL.text, for_real


def _remedy(attempts: Iterator[Attempt], refused: TraceError, model: nn.Module, verb: str) -> str:
    """The first remedy that works; if none does, a part that can be traced by itself."""
    for text, attempt in attempts:
        try:
            attempt()
        except Exception:  # the user's model may raise anything: this one does not work
            continue
        return text
    assert isinstance(refused.__cause__, Exception)
    return remedy_for(refused.__cause__, model, verb)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training

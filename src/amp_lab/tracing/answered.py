"""Trace a model whose branches depend on values, with the decisions of a real run on the CPU.

`decisions` explains what a decision is. If this is impossible, a `TraceError` is raised, whose
message has a remedy that has been tried on this model.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

from torch._ops import OpOverload

from amp_lab.core.errors import TraceError
from amp_lab.core.remedies import remedy
from amp_lab.model_call import ModelCall
from amp_lab.tracing.decisions import (
    Decisions,
    MemoryNeeded,
    NotAnswered,
    NoValues,
    OtherCourse,
    ValuesNeeded,
)
from amp_lab.tracing.fake_device import FOR_REAL, remedy_for
from amp_lab.tracing.real_run import Passes, decisions_of

_BUILD_ON_CPU = remedy(
    "trace.values",
    "a model takes branches that depend on values, but the model or its inputs are on meta",
    "build the model and its inputs on the CPU, where they have values",
)
_EVAL = remedy(
    "trace.eval",
    "a model takes branches that depend on values only in training mode",
    "put the model into evaluation mode: model.eval(), or --eval",
)
_WITHOUT_LOSS = remedy(
    "trace.without_loss",
    "only the loss depends on values",
    "leave out the loss: loss_fn, or --loss",
)
_Result = TypeVar("_Result")
# Traces a call of a model, with the decisions of a real run, or without any; returns its result.
Trace = Callable[[ModelCall, Decisions | None], _Result]


def answered(
    trace: Trace[_Result],
    call: ModelCall,
    verb: str,
    passes: Passes = Passes.OWN_BACKWARD,
    for_real: Callable[[], object] | None = None,
) -> _Result:
    """Return the result of `trace`; if it needs values, run the model on the CPU to get them.

    `trace` takes the call and the decisions of a run on the CPU, or None for a trace without them.
    `verb` is the word in messages for what the trace does, such as "forecast"; `passes` are the
    passes that the trace follows. `for_real`, if given, runs the model on the CPU instead of the
    trace: one more remedy to try, after the other remedies.

    Raises `TraceError` if the run on the CPU does not have the values, or if the model reads the
    memory of a tensor. The message names the first remedy that works on this model.
    """
    try:
        return _with_decisions(trace, call, verb, passes, for_real)
    except MemoryNeeded as error:
        # A recorded run cannot help: what a model reads from memory is not recorded.
        advice = _working_remedy(trace, call, verb, for_real, error)
        raise TraceError(f"{error}, and fake tensors have no memory: {advice}") from error


def _with_decisions(
    trace: Trace[_Result],
    call: ModelCall,
    verb: str,
    passes: Passes,
    for_real: Callable[[], object] | None,
) -> _Result:
    """Trace the model without decisions; if it needs values, with those of a run on the CPU.

    If that run does not have the values either, the `TraceError` that is raised names a remedy.
    """
    try:
        return trace(call, None)
    except ValuesNeeded as error:
        values_needed = error  # its `op` is the one that stopped the trace
    # The run on the CPU records the ops that torch marks as depending on values, and those that
    # stopped a trace although torch does not mark them.
    unmarked: frozenset[OpOverload] = frozenset()
    # If an op stops a trace although it was recorded, the values of a run do not help.
    while values_needed.op not in unmarked:
        unmarked |= {values_needed.op}
        try:
            decisions = decisions_of(call, passes, unmarked)
            return trace(call, decisions)
        except ValuesNeeded as error:
            values_needed = error  # run again if it is another op
        except NotAnswered as error:
            if not isinstance(error, OtherCourse):
                for_real = None  # the run on the CPU failed, so another one would fail too
            advice = _working_remedy(trace, call, verb, for_real, values_needed)
            if isinstance(error, NoValues):
                advice = f"{_BUILD_ON_CPU.text}; or {advice}"
            raise type(error)(f"{values_needed}, but {error}: {advice}") from error
    advice = _working_remedy(trace, call, verb, for_real, values_needed)
    raise TraceError(
        f"{values_needed}, but fake tensors have no values: {advice}"
    ) from values_needed


def _working_remedy(
    trace: Trace[_Result],
    call: ModelCall,
    verb: str,
    for_real: Callable[[], object] | None,
    trace_error: TraceError,
) -> str:
    """The text of the first remedy that works; else the advice to trace a part of the model.

    A remedy works if the trace with it raises nothing, also without decisions of a run on the CPU.
    `trace_error` is the error for which a remedy is sought; its cause is the error of an op. The
    other arguments are those of `answered`.
    """
    # Each remedy with a function that tries it. The remedy that changes least comes first.
    attempts: dict[str, Callable[[], object]] = {}
    if call.model.training:
        attempts[_EVAL.text] = functools.partial(_trace_in_evaluation_mode, trace, call)
    if call.loss_fn is not None:
        without_loss = dataclasses.replace(call, loss_fn=None)
        attempts[_WITHOUT_LOSS.text] = functools.partial(trace, without_loss, None)
    if for_real is not None:
        attempts[FOR_REAL.text] = for_real
    for text, attempt in attempts.items():
        with contextlib.suppress(Exception):  # the user's model may raise anything
            attempt()
            return text
    # The traceback of the op's error has the modules in which it was raised.
    op_error = trace_error.__cause__
    assert isinstance(op_error, Exception)
    return remedy_for(op_error, call.model, verb)


def _trace_in_evaluation_mode(trace: Trace[_Result], call: ModelCall) -> _Result:
    """The trace with all modules in evaluation mode; each then gets its old mode back."""
    modes_before = [(module, module.training) for module in call.model.modules()]
    call.model.eval()
    try:
        return trace(call, None)
    finally:
        for module, training in modes_before:
            module.training = training

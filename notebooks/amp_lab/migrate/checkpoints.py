"""A checkpoint that training goes on from, without the state of its loss scaler."""

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, Found
from amp_lab.remedies import remedy

_NOT_SAVED = remedy(
    "migrate.not_saved",
    "a checkpoint that training goes on from lacks the scaler",
    "the checkpoint holds the optimizer, but not {scaler}: save {scaler}.state_dict() too, or the "
    "scale restarts",
)
_NOT_LOADED = remedy(
    "migrate.not_loaded",
    "training goes on from a checkpoint without the scaler's state",
    "training goes on without the state of {scaler}: load it, and save {scaler}.state_dict() too, "
    "or the scale restarts",
)


def saved_without(code: CodeReader) -> Found:
    """Where an optimizer is saved without its scaler, or else loaded, to go on with training."""
    scalers = code.scalers_used()
    if not scalers or any(_is_kept(code, name) or _leaves(code, name) for name in scalers):
        return
    calls, name = code.tree.calls, scalers[0]
    loads = [call for call in calls if _loads_optimizer(code, call)]
    saves = [call for call in calls if _saves_optimizer(code, call)]
    for call in saves if loads else ():
        yield call, _NOT_SAVED.said(scaler=name)
    if loads and not saves:
        yield loads[0], _NOT_LOADED.said(scaler=name)


def _is_kept(code: CodeReader, name: str) -> bool:
    """Whether the state of a scaler is saved or loaded, if only in a file of its own."""
    uses = (use for state in _STATES for use in code.tree.uses_ending[state])
    return any(use.parts[-2:-1] == (name,) for use in uses)


def _leaves(code: CodeReader, name: str) -> bool:
    """Whether a scaler gets to where its state may be saved or loaded by another name."""
    for use in code.tree.uses_ending[name]:
        if code.stays(use.node, name):
            continue
        call = code.tree.parents[code.tree.parents[use.node]]
        called = nodes.name_called(call) if isinstance(call, cst.Call) else ""
        function = code.functions.get(called)
        if function is None or "state_dict" in code.tree.code(function):
            return True
    return False


_STATES = ("state_dict", "load_state_dict")


def _moves(code: CodeReader, call: cst.CSTNode, at: cst.Call, method: str) -> bool:
    """Whether it is a call of a method of an optimizer that a scaler of this file steps."""
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
        return False
    owner, scope = code.key(call.func.value), code.tree.calls[at]
    if call.func.attr.value != method or not code.is_optimizer(owner):
        return False
    keys = [key for made in code.made.values() for key in made]
    if any("." in key or scope.find(key) for key in keys):
        return True
    # the scaler is another function's, and so may the optimizer be
    return scope.find(owner.partition(".")[0]) in code.stepped.get(owner, ())


def _loads_optimizer(code: CodeReader, call: cst.Call) -> bool:
    """Whether it gives an optimizer a state that was saved, and not one that was just asked for."""
    given = call.args[0].value if call.args else None
    is_own = isinstance(given, cst.Call) and nodes.name_called(given) == "state_dict"
    return _moves(code, call, call, "load_state_dict") and not is_own


def _saves_optimizer(code: CodeReader, call: cst.Call) -> bool:
    scope = code.tree.calls[call]
    if not call.args or code.origin(call.func, scope) != "torch.save":
        return False
    saved = scope.value_of(call.args[0].value)
    return any(_moves(code, part, call, "state_dict") for part in nodes.below(saved))

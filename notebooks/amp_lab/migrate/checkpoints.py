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
_NEVER_LOADED = remedy(
    "migrate.never_loaded",
    "a scaler's state is saved, and not loaded where the optimizer's is",
    "{scaler}.state_dict() is saved and never loaded, so the scale restarts: call "
    "{scaler}.load_state_dict(...) where {optimizer}'s state is loaded",
)
_NEVER_SAVED = remedy(
    "migrate.never_saved",
    "a scaler's state is loaded, and not saved where the optimizer's is",
    "{scaler} loads a state that is never saved: save {scaler}.state_dict() with the optimizer's",
)


def saved_without(code: CodeReader) -> Found:
    """Where an optimizer is saved without its scaler, or else loaded, to go on with training."""
    scalers = code.scalers_used()
    if not scalers or any(_leaves(code, name) for name in scalers):
        return
    loads = [call for call in code.tree.calls if _loads_optimizer(code, call)]
    saves = [call for call in code.tree.calls if _saves_optimizer(code, call)]
    moved = {name: _moved(code, name) for name in scalers}
    if any(moved.values()):
        yield from _moved_one_way(code, moved, loads, saves)
        return
    name = scalers[0]
    for call in saves if loads else ():
        yield call, _NOT_SAVED.said(scaler=name)
    if loads and not saves:
        yield loads[0], _NOT_LOADED.said(scaler=name)


def _moved_one_way(
    code: CodeReader, moved: dict[str, set[str]], loads: list[cst.Call], saves: list[cst.Call]
) -> Found:
    """Where a scaler's state is saved and not loaded, or the reverse, beside the optimizer's."""
    for name, methods in moved.items():
        if methods == {"state_dict"} and loads:
            func = loads[0].func
            assert isinstance(func, cst.Attribute)  # it is a call of a method
            yield loads[0], _NEVER_LOADED.said(scaler=name, optimizer=code.key(func.value))
        if methods == {"load_state_dict"} and saves:
            yield saves[0], _NEVER_SAVED.said(scaler=name)


def _moved(code: CodeReader, name: str) -> set[str]:
    """By which methods the state of a scaler is saved or loaded, if only in a file of its own."""
    found = set()
    for method in ("state_dict", "load_state_dict"):
        uses = code.tree.uses_ending[method]
        if any(use.parts[-2:-1] == (name,) for use in uses):
            found.add(method)
    return found


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
    if not call.args or not _saves(code, call):
        return False
    saved = code.tree.calls[call].value_of(call.args[0].value)
    return any(_moves(code, part, call, "state_dict") for part in nodes.below(saved))


def _saves(code: CodeReader, call: cst.Call) -> bool:
    """Whether it is ``torch.save``, or a function of this file that calls it."""
    if code.origin(call.func, code.tree.calls[call]) == "torch.save":
        return True
    function = code.functions.get(nodes.name_called(call))
    return function is not None and "torch.save" in code.tree.code(function)

"""A checkpoint that training goes on from, without the state of its loss scaler."""

import itertools

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, Found
from amp_lab.migrate.scopes import Scope

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
    methods = {name: _methods_called(code, name) for name in scalers}
    if any(methods.values()):
        yield from _moved_one_way(code, methods, loads, saves)
        return
    if not loads:
        return
    name = scalers[0]
    for call in saves:
        yield call, _NOT_SAVED.said(scaler=name)
    if not saves:
        yield loads[0], _NOT_LOADED.said(scaler=name)


def _moved_one_way(
    code: CodeReader, methods: dict[str, set[str]], loads: list[cst.Call], saves: list[cst.Call]
) -> Found:
    """Where a scaler's state is saved and not loaded, or the reverse, beside the optimizer's."""
    for name, called in methods.items():
        if called == {"state_dict"} and loads:
            func = loads[0].func
            assert isinstance(func, cst.Attribute)  # it is a call of a method
            optimizer = code.key(func.value)
            yield loads[0], _NEVER_LOADED.said(scaler=name, optimizer=optimizer)
        if called == {"load_state_dict"} and saves:
            yield saves[0], _NEVER_SAVED.said(scaler=name)


def _methods_called(code: CodeReader, name: str) -> set[str]:
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
        argument = code.tree.parents[use.node]
        call = code.tree.parents[argument]
        if not isinstance(call, cst.Call):
            return True
        function = code.functions.get(nodes.name_called(call))
        if function is None or "state_dict" in code.tree.code(function):
            return True
    return False


def _loads_optimizer(code: CodeReader, call: cst.Call) -> bool:
    """Whether it gives an optimizer a state that was saved, and not one that was just asked for."""
    if not _is_call_of_optimizer(code, call, "load_state_dict", code.tree.calls[call]):
        return False
    if not call.args:
        return True
    state = call.args[0].value
    is_asked_for = isinstance(state, cst.Call) and nodes.name_called(state) == "state_dict"
    return not is_asked_for


def _saves_optimizer(code: CodeReader, call: cst.Call) -> bool:
    """Whether it saves the state of an optimizer, alone or with other things."""
    if not call.args or not _saves(code, call):
        return False
    scope = code.tree.calls[call]
    saved = scope.value_of(call.args[0].value)
    parts = nodes.below(saved)
    return any(_is_call_of_optimizer(code, part, "state_dict", scope) for part in parts)


def _is_call_of_optimizer(code: CodeReader, call: cst.CSTNode, method: str, scope: Scope) -> bool:
    """Whether it is a call of a method of an optimizer that a scaler of this file steps."""
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
        return False
    if call.func.attr.value != method:
        return False
    optimizer = code.key(call.func.value)
    if not code.is_optimizer(optimizer):
        return False
    if _sees_scaler(code, scope):
        return True
    # the scaler is another function's, and so may the optimizer be
    home = scope.find(optimizer.partition(".")[0])
    return home in code.stepped.get(optimizer, ())


def _sees_scaler(code: CodeReader, scope: Scope) -> bool:
    """Whether a scaler that is made in this file can be named in a scope."""
    keys = itertools.chain.from_iterable(code.made.values())
    return any("." in key or scope.find(key) for key in keys)


def _saves(code: CodeReader, call: cst.Call) -> bool:
    """Whether it is ``torch.save``, or a function of this file that calls it."""
    if code.origin(call.func, code.tree.calls[call]) == "torch.save":
        return True
    function = code.functions.get(nodes.name_called(call))
    return function is not None and "torch.save" in code.tree.code(function)

"""Mistakes with checkpoints: training resumes without the state of the loss scaler."""

import itertools

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.events import first_part
from amp_lab.migrate.tree.returned_tuples import name_in_tuple, stays_in_tuple
from amp_lab.migrate.tree.rewriter import Rewriter
from amp_lab.migrate.tree.scopes import Scope

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
_NOT_SAVED = remedy(
    "migrate.not_saved",
    "training resumes from a checkpoint that was saved without the scaler",
    "the checkpoint contains the optimizer, but not {scaler}: save {scaler}.state_dict() too, or "
    "the scale restarts",
    failure="AMP0046",
)
_NOT_LOADED = remedy(
    "migrate.not_loaded",
    "training resumes from a checkpoint, but does not load the scaler's state",
    "training resumes without the state of {scaler}: load this state, and save "
    "{scaler}.state_dict() too, or the scale restarts",
    failure="AMP0046",
)
_NEVER_LOADED = remedy(
    "migrate.never_loaded",
    "a scaler's state is saved, but not loaded with the optimizer's",
    "{scaler}.state_dict() is saved but never loaded, so the scale starts again: call "
    "{scaler}.load_state_dict(...) where {optimizer}'s state is loaded",
    failure="AMP0046",
)
_NEVER_SAVED = remedy(
    "migrate.never_saved",
    "a scaler's state is loaded, but not saved with the optimizer's",
    "{scaler} loads a state that is never saved: save {scaler}.state_dict() with the optimizer's",
    failure="AMP0046",
)


def run(file: Rewriter) -> None:
    """Report checkpoints that lack the state of the scaler."""
    file.report("mistake", saved_without_scaler(file.code))


def saved_without_scaler(code: CodeReader) -> Mistakes:
    """Yield the calls that save or load an optimizer without its scaler.

    Yields nothing if other code may save a scaler.
    """
    scalers = code.scalers_used()
    if not scalers or any(_may_be_saved_elsewhere(code, name) for name in scalers):
        return
    loads = [call for call in code.tree.calls if _loads_optimizer(code, call)]
    saves = [call for call in code.tree.calls if _saves_optimizer(code, call)]
    methods = {name: _state_methods_called(code, name) for name in scalers}
    if any(methods.values()):  # a scaler is saved or loaded, and maybe only one of the two
        yield from _missing_counterparts(code, methods, loads, saves)
        return
    if not loads:
        return
    name = scalers[0]  # none is saved or loaded: the first stands for all in the message
    for call in saves:
        yield call, _NOT_SAVED.sentence(scaler=name)
    if not saves:
        yield loads[0], _NOT_LOADED.sentence(scaler=name)


def _missing_counterparts(
    code: CodeReader, methods: dict[str, set[str]], loads: list[cst.Call], saves: list[cst.Call]
) -> Mistakes:
    """Yield a load of an optimizer where a scaler is only saved, or a save where it is only loaded.

    Parameters
    ----------
    methods : dict
        For each scaler, the methods of it that the file uses: ``state_dict``, ``load_state_dict``.
    loads, saves : list
        The calls that load and save the optimizer.
    """
    for name, methods_used in methods.items():
        if methods_used == {"state_dict"} and loads:
            optimizer = code.key(loads[0].func).removesuffix(".load_state_dict")
            yield loads[0], _NEVER_LOADED.sentence(scaler=name, optimizer=optimizer)
        if methods_used == {"load_state_dict"} and saves:
            yield saves[0], _NEVER_SAVED.sentence(scaler=name)


def _state_methods_called(code: CodeReader, name: str) -> set[str]:
    """The methods that the file uses of a scaler, out of ``state_dict`` and ``load_state_dict``."""
    methods = ("state_dict", "load_state_dict")
    return {method for method in methods if code.tree.has_attribute(name, method)}


def _may_be_saved_elsewhere(code: CodeReader, name: str) -> bool:
    """Whether a scaler gets another name or is passed on, so that its state may be saved there.

    A function of this file without ``state_dict`` does not save it.
    """
    for use in code.tree.uses_by_last_part[name]:
        if code.keeps_name(use.node, name) or stays_in_tuple(code, use.node, name):
            continue
        # For f(scaler): the use is in an argument, and that is in the call.
        argument = code.tree.parents[use.node]
        call = code.tree.parents[argument]
        function = code.called_function(call)  # None also if the parent is no call
        if function is None or "state_dict" in code.tree.code(function):
            return True
    return False


def _loads_optimizer(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call is ``optimizer.load_state_dict(state)``, unless `state` is a fresh copy.

    ``a.load_state_dict(b.state_dict())`` copies a state, and loads no checkpoint.
    """
    if not _is_call_of_optimizer(code, call, "load_state_dict", code.tree.calls[call]):
        return False
    if not call.args:  # no state, so no copy of one
        return True
    state = call.args[0].value
    is_copy = isinstance(state, cst.Call) and nodes.called_name(state) == "state_dict"
    return not is_copy


def _saves_optimizer(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call saves the state of an optimizer, alone or in a dict with other things."""
    if not call.args or not _saves_to_file(code, call):
        return False
    scope = code.tree.calls[call]
    saved = scope.value_of(call.args[0].value)
    parts = nodes.walk(saved)
    return any(_is_call_of_optimizer(code, part, "state_dict", scope) for part in parts)


def _is_call_of_optimizer(code: CodeReader, node: cst.CSTNode, method: str, scope: Scope) -> bool:
    """Whether a node is ``optimizer.method(…)``, for an optimizer that a scaler may step.

    A scaler may step it if the scope sees a scaler, or if a scaler steps this variable elsewhere.
    """
    receiver = nodes.receiver_of(node, method)
    if receiver is None:
        return False
    # In state[1].load_state_dict(…): the name of the element in the function that returned `state`.
    # Its scaler may be another element, which has no name in this scope.
    name_in_function = name_in_tuple(code, receiver, scope)
    if name_in_function is not None:
        return code.is_optimizer(name_in_function)
    optimizer = code.key(receiver)
    if not code.is_optimizer(optimizer):
        return False
    if _knows_a_scaler(code, scope):
        return True
    # Two variables with one name are the same variable if the same scope binds them.
    variable_scope = scope.find_scope(first_part(optimizer))
    return variable_scope in code.optimizer_scopes.get(optimizer, ())


def _knows_a_scaler(code: CodeReader, scope: Scope) -> bool:
    """Whether a scope sees a scaler that is made in this file; attributes are seen everywhere."""
    # Whole names, such as "scaler" or "self.scaler".
    keys = itertools.chain.from_iterable(code.scaler_keys.values())
    return any("." in key or scope.find_scope(key) for key in keys)


def _saves_to_file(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call is ``torch.save(…)``, or of a function of this file that contains it."""
    if code.origin(call.func, code.tree.calls[call]) == "torch.save":
        return True
    function = code.called_function(call)
    return function is not None and "torch.save" in code.tree.code(function)

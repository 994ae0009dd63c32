"""A loss scaler that is made anew in each epoch, so that it forgets the scale that it had found."""

from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import SCALERS, CodeReader, Event, Found, last_part, of_kind
from amp_lab.migrate.python_tree import Tree, answered_once
from amp_lab.remedies import remedy

_MADE_EACH_EPOCH = remedy(
    "migrate.made_each_epoch",
    "a scaler is made anew in each epoch",
    "{scaler} is made anew in each epoch, so its scale starts over: make it once, before the loop "
    "over epochs",
)


def made_each_epoch(code: CodeReader) -> Found:
    """A scaler made in a loop over epochs, or in a function that such a loop calls.

    Nothing is said where its state is loaded, its first scale comes from elsewhere, or the
    optimizer that it steps is made anew as well, as for each fold of a cross-validation.
    """
    for event in of_kind("call", code.events):
        key = _name_of_scaler(code, event)
        if key is None or _has_a_state(code, event, key):
            continue
        steps = event.unit.by_scaler["scaler step", key]
        if not steps or not event.unit.by_scaler["scaled", key]:
            continue
        about = code, event, steps[0].optimizer
        if [*_loops_around(*about), *_loops_of_calls(*about)]:
            yield event.node, _MADE_EACH_EPOCH.said(scaler=key)


def _name_of_scaler(code: CodeReader, event: Event) -> str | None:
    """The name that is given the scaler which a call makes; None if it makes none."""
    if code.origin(event.node.func, event.unit.scope) not in SCALERS:
        return None
    targets = [target for target, _ in nodes.assignments(code.tree.parents[event.node])]
    return code.key(targets[0]) if len(targets) == 1 else None


def _has_a_state(code: CodeReader, event: Event, key: str) -> bool:
    """Whether a scaler goes on from an earlier one, or is off."""
    name = last_part(key)
    if name in code.disabled:
        return True
    loads = code.tree.uses_ending["load_state_dict"]
    if any(use.parts[-2:-1] == (name,) for use in loads):
        return True
    first_scale = nodes.arguments(event.node.args).get("init_scale")
    return first_scale is not None and any(
        isinstance(part, cst.Name | cst.Call) for part in nodes.below(first_scale)
    )


def _loops_around(code: CodeReader, event: Event, optimizer: str) -> Iterator[cst.CSTNode]:
    """The loops over epochs around an event, which runs in each turn with the same optimizer."""
    arms = [node for node, _ in event.place.arms]
    for loop in _over_epochs(code, event, optimizer):
        if not any(code.tree.is_in(node, loop) for node in arms):
            yield loop


def _loops_of_calls(code: CodeReader, event: Event, optimizer: str) -> Iterator[cst.CSTNode]:
    """The same around the calls of a function, where the event is in all that it does."""
    function, place = event.unit.scope.node, event.place
    if place.loops or place.arms or not isinstance(function, cst.FunctionDef):
        return
    name = function.name.value
    if optimizer in _assigned_in(code.tree, function) or code.functions[name] is not function:
        return
    parameters = [param.name.value for param in function.params.params]
    for call in code.calls_of[name]:
        if any(arg.star for arg in call.node.args):  # which may hold another optimizer each time
            continue
        names = parameters[1:] if isinstance(call.node.func, cst.Attribute) else parameters
        given = nodes.arguments(call.node.args, names).get(optimizer)
        yield from _over_epochs(code, call, optimizer if given is None else code.key(given))


def _over_epochs(code: CodeReader, event: Event, optimizer: str) -> Iterator[cst.CSTNode]:
    """The loops over epochs around an event in which an optimizer is not made anew."""
    for loop in event.place.loops:
        if _is_over_epochs(loop) and optimizer not in _assigned_in(code.tree, loop):
            yield loop


def _is_over_epochs(loop: cst.CSTNode) -> bool:
    if not isinstance(loop, cst.For):
        return False
    names = (part.value for part in nodes.below(loop.target) if isinstance(part, cst.Name))
    return any("epoch" in name.lower() for name in names)


@answered_once
def _assigned_in(tree: Tree, node: cst.CSTNode) -> set[str]:
    """The names and attributes that are assigned somewhere in a node."""
    found: set[str] = set()
    for part in nodes.below(node):
        for target, _ in nodes.assignments(part):
            names = target.elements if isinstance(target, cst.Tuple | cst.List) else ()
            for one in (target, *(element.value for element in names)):
                found.add(".".join(nodes.dotted(one) or ()))
    return found

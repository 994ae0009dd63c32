"""A loss scaler that is made anew in each epoch, so that it forgets the scale that it had found."""

import itertools
from collections.abc import Iterator

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import SCALERS, CodeReader, Found
from amp_lab.migrate.events import Event, last_part, of_kind
from amp_lab.migrate.python_tree import Tree, answered_once

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
        scaler = _name_of_scaler(code, event)
        if scaler is None or _has_a_state(code, event, scaler):
            continue
        steps = event.unit.by_scaler["scaler step", scaler]
        if not steps or not event.unit.by_scaler["scaled", scaler]:
            continue
        if _is_in_each_epoch(code, event, steps[0].optimizer):
            yield event.node, _MADE_EACH_EPOCH.said(scaler=scaler)


def _is_in_each_epoch(code: CodeReader, event: Event, optimizer: str) -> bool:
    """Whether an event runs in each epoch of training with one optimizer."""
    loops = itertools.chain(
        _loops_around(code, event, optimizer), _loops_of_calls(code, event, optimizer)
    )
    return next(loops, None) is not None


def _name_of_scaler(code: CodeReader, event: Event) -> str | None:
    """The name that is given the scaler which a call makes; None if it makes none."""
    if code.origin(event.node.func, event.unit.scope) not in SCALERS:
        return None
    assignment = code.tree.parents[event.node]
    targets = [target for target, _ in nodes.assignments(assignment)]
    if len(targets) != 1:
        return None
    return code.key(targets[0])


def _has_a_state(code: CodeReader, event: Event, scaler: str) -> bool:
    """Whether a scaler goes on from an earlier one, or is off."""
    name = last_part(scaler)
    if name in code.disabled:
        return True
    loads = code.tree.uses_ending["load_state_dict"]
    if any(use.parts[-2:-1] == (name,) for use in loads):
        return True
    first_scale = nodes.arguments(event.node.args).get("init_scale")
    if first_scale is None:
        return False
    return any(isinstance(part, cst.Name | cst.Call) for part in nodes.below(first_scale))


def _loops_around(code: CodeReader, event: Event, optimizer: str) -> Iterator[cst.CSTNode]:
    """The loops over epochs around an event, which runs in each turn with the same optimizer."""
    statements = [node for node, _ in event.place.arms]
    for loop in _over_epochs(code, event, optimizer):
        if not any(code.tree.is_in(statement, loop) for statement in statements):
            yield loop


def _loops_of_calls(code: CodeReader, event: Event, optimizer: str) -> Iterator[cst.CSTNode]:
    """The same around the calls of a function, where the event is in all that it does."""
    function = event.unit.scope.node
    if event.place.loops or event.place.arms or not isinstance(function, cst.FunctionDef):
        return
    name = function.name.value
    if optimizer in _assigned_in(code.tree, function) or code.functions[name] is not function:
        return
    for call in code.calls_of[name]:
        if any(arg.star for arg in call.node.args):  # which may hold another optimizer each time
            continue
        argument = _argument_of(call.node, function, optimizer)
        optimizer_there = optimizer if argument is None else code.key(argument)
        yield from _over_epochs(code, call, optimizer_there)


def _argument_of(
    call: cst.Call, function: cst.FunctionDef, parameter: str
) -> cst.BaseExpression | None:
    """What a call of a function or method gives to one of its parameters, if anything."""
    names = [param.name.value for param in function.params.params]
    if isinstance(call.func, cst.Attribute):
        names = names[1:]  # without self
    return nodes.arguments(call.args, names).get(parameter)


def _over_epochs(code: CodeReader, event: Event, optimizer: str) -> Iterator[cst.CSTNode]:
    """The loops over epochs around an event in which an optimizer is not made anew."""
    for loop in event.place.loops:
        if _is_over_epochs(loop) and optimizer not in _assigned_in(code.tree, loop):
            yield loop


def _is_over_epochs(loop: cst.CSTNode) -> bool:
    if not isinstance(loop, cst.For):
        return False
    for part in nodes.below(loop.target):
        if isinstance(part, cst.Name) and "epoch" in part.value.lower():
            return True
    return False


@answered_once
def _assigned_in(tree: Tree, node: cst.CSTNode) -> set[str]:
    """The names and attributes that are assigned somewhere in a node."""
    found: set[str] = set()
    for part in nodes.below(node):
        for target, _ in nodes.assignments(part):
            found.add(_dotted_name(target))
            if isinstance(target, cst.Tuple | cst.List):
                found.update(_dotted_name(element.value) for element in target.elements)
    return found


def _dotted_name(node: cst.CSTNode) -> str:
    """The dotted name that an expression is; empty if it is none."""
    parts = nodes.dotted(node) or ()
    return ".".join(parts)

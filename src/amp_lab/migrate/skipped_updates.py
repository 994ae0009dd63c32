"""Paths through a step that unscale gradients, and then leave out the update of the scaler.

``GradScaler`` notes for each optimizer that its gradients are unscaled, or that it has stepped, and
forgets both in ``update`` alone (``torch/amp/grad_scaler.py``). So the next step raises where a
path skips the update, as one that drops a batch with bad gradients often does.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, Found
from amp_lab.migrate.events import Event, Exit, last_part

_PATH_WITHOUT_UPDATE = remedy(
    "migrate.path_without_update",
    "unscale_ or step of a scaler has run, and a path to the next batch skips its update",
    "{scaler}.{done}({optimizer}) has run, and no {scaler}.update() follows on the path of line "
    '{line}, so the next {after} raises "{error}": call {scaler}.update() on that path too',
)
_ERRORS = {  # by what ran on the path, and what runs next: the texts of torch
    ("unscale_", "unscale_"): (
        "unscale_() has already been called on this optimizer since the last update()"
    ),
    ("step", "unscale_"): "unscale_() is being called after step()",
    ("step", "step"): "step() has already been called since the last update()",
}
_COUNTS_BATCHES = re.compile(r"(?i)%|accum|micro|sync|boundary")
_ASKS_FOR_FAULTS = re.compile(
    r"(?i)finite|overflow|norm|skip|valid|spike|explo|(?<![a-z])(?:nan|inf|ok|bad)(?![a-z])"
    r"|is_?nan|is_?inf|found_?inf"
)
_DROPS = re.compile(r"zero_grad|\.grad\s*=")
_STARTS_OVER = re.compile(r"GradScaler|_per_optimizer_states")


@dataclass(frozen=True)
class _Path:
    """A way from an event to the next batch without an update."""

    node: cst.CSTNode  # on whose line it can be seen
    is_stepped: bool  # whether the scaler steps the optimizer on it


def path_without_update(code: CodeReader) -> Found:
    """``unscale_`` or ``step``, and then a branch to the next batch that has no ``update``."""
    for event in code.events:
        if not _counts(code, event):
            continue
        path = next(_paths(code, event), None)
        if path is None or code.escapes(last_part(event.of)):
            continue
        after = "unscale_" if event.kind == "unscale" else "step"
        done = "step" if path.is_stepped else after
        yield (
            event.node,
            _PATH_WITHOUT_UPDATE.said(
                scaler=event.of,
                optimizer=event.optimizer,
                line=code.tree.line(path.node),
                done=done,
                after=after,
                error=_ERRORS[done, after],
            ),
        )


def is_dropped(code: CodeReader, event: Event, test: cst.If, number: int) -> bool:
    """Whether a branch gives up the gradients of a batch, where others sum them for a later step.

    The branch is the one with that number: 0 for the body, 1 for what runs otherwise.
    """
    condition = code.tree.code(test.test)
    if _COUNTS_BATCHES.search(condition):
        return False
    if _ASKS_FOR_FAULTS.search(condition):
        return True
    branch = test.body if number == 0 else test.orelse
    if branch is not None and _DROPS.search(code.tree.code(branch)):
        return True
    calls = event.unit.by_loop["call", "", event.place.loops]
    return any(_zeroes(call, event) for call in calls)


def _zeroes(call: Event, event: Event) -> bool:
    """Whether a call sets the gradients to zero in each turn in which an event runs."""
    if nodes.name_called(call.node) != "zero_grad" or call.place.loops != event.place.loops:
        return False
    return set(call.place.arms) <= set(event.place.arms)


def _counts(code: CodeReader, event: Event) -> bool:
    """Whether an event is a scaler's first before its update, and runs for each of many batches."""
    if event.kind not in ("unscale", "scaler step") or last_part(event.of) in code.disabled:
        return False
    unit = event.unit
    loops = event.place.loops
    if not loops and not isinstance(unit.scope.node, cst.FunctionDef):
        return False
    unscaled = unit.by_loop["unscale", event.of, loops]
    if event.kind == "scaler step" and any(_is_same(unscale, event) for unscale in unscaled):
        return False
    scaled = unit.by_loop["scaled", event.of, loops]
    return any(e.place.loops == loops for e in scaled)


def _is_same(first: Event, second: Event) -> bool:
    return (first.of, first.optimizer) == (second.of, second.optimizer)


def _paths(code: CodeReader, event: Event) -> Iterator[_Path]:
    updates = event.unit.by_loop["update", event.of, event.place.loops]
    for leaving in event.unit.exits_of[event.place.loops]:
        if _is_next_batch(code, event, leaving) and _skips(code, event, leaving, updates):
            steps = _steps_between(event, leaving)
            is_stepped = any(not step.place.excludes(leaving.place) for step in steps)
            yield _Path(leaving.node, is_stepped)
    yield from _other_branches(code, event, updates)


def _is_next_batch(code: CodeReader, event: Event, leaving: Exit) -> bool:
    """Whether the next batch comes after an exit that is behind an event."""
    if leaving.order <= event.order or not code.both_run(event, leaving):
        return False
    if isinstance(leaving.node, cst.Continue):
        return True
    return not event.place.loops and _is_called_in_loop(code, event)


def _is_called_in_loop(code: CodeReader, event: Event) -> bool:
    """Whether the function of an event runs for each batch, and updates its scaler by itself."""
    function = event.unit.scope.node
    if not isinstance(function, cst.FunctionDef):
        return False
    name = function.name.value
    if code.functions[name] is not function:
        return False
    is_alone = code.updated_in[last_part(event.of)] == {event.unit}
    return is_alone and any(call.place.loops for call in code.calls_of[name])


def _skips(code: CodeReader, event: Event, leaving: Exit, updates: list[Event]) -> bool:
    """Whether a branch that leaves has no update, while the path past it has one."""
    before = [update for update in updates if event.order < update.order < leaving.order]
    if any(not update.place.excludes(leaving.place) for update in before):
        return False
    if not any(u.order > leaving.order and u.place.loops == event.place.loops for u in updates):
        return False
    own = [arm for arm in leaving.place.arms if arm not in event.place.arms]
    if not own:
        return False
    if _STARTS_OVER.search(code.tree.code(own[-1][0])):
        return False
    tests = [(node, number) for node, number in own if isinstance(node, cst.If)]
    if not tests or event.kind == "scaler step" or _steps_between(event, leaving):
        return True
    if any(_COUNTS_BATCHES.search(code.tree.code(node.test)) for node, _ in tests):
        return False
    return any(is_dropped(code, event, node, number) for node, number in tests)


def _steps_between(event: Event, leaving: Exit) -> list[Event]:
    between = (s for s in _steps(event) if event.order <= s.order < leaving.order)
    return list(between)


def _steps(event: Event) -> list[Event]:
    """The steps of the optimizer of an event by its scaler, in its loop."""
    steps = event.unit.by_loop["scaler step", event.of, event.place.loops]
    return [step for step in steps if step.optimizer == event.optimizer]


def _other_branches(code: CodeReader, event: Event, updates: list[Event]) -> Iterator[_Path]:
    """The other branch of a condition on which the only update depends."""
    if len(updates) != 1 or not event.place.loops:
        return
    (update,) = updates
    if update.order < event.order or update.place.loops != event.place.loops:
        return
    depth = len(event.place.arms)
    if update.place.arms[:depth] != event.place.arms:
        return
    own = update.place.arms[depth:]
    is_stepped = any(set(s.place.arms) <= set(event.place.arms) for s in _steps(event))
    for node, number in own:
        if not isinstance(node, cst.If) or _STARTS_OVER.search(code.tree.code(node)):
            return
        other = 1 - number
        if _ends_the_loop(node, other):
            continue
        if is_stepped or is_dropped(code, event, node, other):
            yield _Path(node, is_stepped)


def _ends_the_loop(node: cst.If, number: int) -> bool:
    """Whether a branch ends with what does not lead to the next batch."""
    branch = node.body if number == 0 else getattr(node.orelse, "body", None)
    if not isinstance(branch, cst.BaseSuite):
        return False
    return isinstance(nodes.last_statement(branch), cst.Return | cst.Raise | cst.Break)


RULES = (path_without_update,)

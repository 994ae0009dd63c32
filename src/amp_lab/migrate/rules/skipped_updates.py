"""Paths through a training step that unscale gradients, and then skip the update of the scaler.

``GradScaler`` records for each optimizer that its gradients are unscaled, or that it has stepped,
and resets both only in ``update`` (``torch/amp/grad_scaler.py``). So the next step raises if a path
skips the update. A path that drops a batch with bad gradients often does this.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.events import Arm, Event, Exit, last_part
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
_NEVER_UPDATED = remedy(
    "migrate.never_updated",
    "a scaler steps, and its scale is never updated",
    "{scaler} is never updated, so the next step raises an error: call {scaler}.update() after "
    "the step",
    failure="AMP0012",
)
_PATH_WITHOUT_UPDATE = remedy(
    "migrate.path_without_update",
    "unscale_ or step of a scaler has run, and a path to the next batch skips its update",
    "{scaler}.{done}({optimizer}) has run, and no {scaler}.update() follows on the path of line "
    '{line}, so the next {after} raises "{error}": call {scaler}.update() on that path too',
    failure="AMP0012",
)
# What torch raises, by (the last method on the path, the first method of the next step).
_ERRORS = {
    ("unscale_", "unscale_"): (
        "unscale_() has already been called on this optimizer since the last update()"
    ),
    ("step", "unscale_"): "unscale_() is being called after step()",
    ("step", "step"): "step() has already been called since the last update()",
}
# if (i + 1) % accumulation_steps == 0
_COUNTS_BATCHES = re.compile(r"(?i)%|accum|micro|sync|boundary")
# torch.isfinite(norm), skip_batch, loss_is_nan; not "banana", nor "info"
_ASKS_FOR_FAULTS = re.compile(
    r"(?i)finite|overflow|norm|skip|valid|spike|explo|(?<![a-z])(?:nan|inf|ok|bad)(?![a-z])"
    r"|is_?nan|is_?inf|found_?inf"
)
# optimizer.zero_grad(), p.grad = None
_DROPS_GRADIENTS = re.compile(r"zero_grad|\.grad\s*=")
# Code that makes the scaler anew, or clears its notes, needs no update.
_MAKES_SCALER_NEW = re.compile(r"GradScaler|_per_optimizer_states")


def run(file: Rewriter) -> None:
    """Report scalers without an update, or with a path around it."""
    file.report("mistake", _never_updated(file.code))
    file.report("mistake", path_without_update(file.code))


@dataclass(frozen=True)
class _Path:
    """A path from an event to the next batch without an update."""

    node: cst.CSTNode  # the exit, or the `if` around the update: its line is in the message
    is_stepped: bool  # whether scaler.step(optimizer) runs on the path


def _never_updated(code: CodeReader) -> Mistakes:
    """Yield the last step of each scaler that scales and steps, and has no update."""
    for name in code.scalers_used():
        steps = code.by_scaler["scaler step", name]
        if not steps or code.by_scaler["update", name] or code.scaler_escapes(name):
            continue
        # An update inside a lambda is no event.
        if not code.tree.has_attribute(name, "update"):
            yield steps[-1].node, _NEVER_UPDATED.sentence(scaler=steps[-1].owner)


def path_without_update(code: CodeReader) -> Mistakes:
    """Yield each ``unscale_`` or ``step`` from which a path to the next batch has no ``update``.

    A scaler is left out if code outside of this file may get and update it.
    """
    for event in code.events:
        if not _starts_each_batch(code, event):
            continue
        path = next(_paths(code, event), None)
        if path is None or code.scaler_escapes(last_part(event.owner)):
            continue
        # The first method that a batch calls after its backward, and the last one on the path.
        first_method = "unscale_" if event.kind == "unscale" else "step"
        last_method = "step" if path.is_stepped else first_method
        advice = _PATH_WITHOUT_UPDATE.sentence(
            scaler=event.owner,
            optimizer=event.optimizer,
            line=code.tree.line(path.node),
            done=last_method,
            after=first_method,
            error=_ERRORS[last_method, first_method],
        )
        yield event.node, advice


def is_dropped(code: CodeReader, event: Event, node: cst.If, number: int) -> bool:
    """Whether the branch `number` of an `if` drops the gradients of a batch (or else sums them).

    Parameters
    ----------
    event : Event
        The ``unscale_`` or ``step`` of the batch.
    number : int
        0 for the body of the `if`, 1 for its else, also where that is not written.
    """
    condition = code.tree.code(node.test)
    if _COUNTS_BATCHES.search(condition):
        return False
    if _ASKS_FOR_FAULTS.search(condition):
        return True
    branch = node.body if number == 0 else node.orelse
    if branch is not None and _DROPS_GRADIENTS.search(code.tree.code(branch)):
        return True
    calls = event.unit.by_loop["call", "", event.place.loops]  # a plain call has no owner
    return any(_zeroes_each_time(call, event) for call in calls)


def _zeroes_each_time(call: Event, event: Event) -> bool:
    """Whether a call is ``zero_grad()``, and runs wherever an event of the same loop does."""
    if nodes.called_name(call.node) != "zero_grad" or call.place.loops != event.place.loops:
        return False
    return set(call.place.arms) <= set(event.place.arms)


def _starts_each_batch(code: CodeReader, event: Event) -> bool:
    """Whether an event is the first call on its scaler in a training step that runs repeatedly.

    Such a step scales its loss in the same loop. Only then does the next batch fail if the update
    is skipped.
    """
    is_disabled = last_part(event.owner) in code.disabled_scalers
    if event.kind not in ("unscale", "scaler step") or is_disabled:
        return False
    unit = event.unit
    loops = event.place.loops
    if not loops and not isinstance(unit.scope.node, cst.FunctionDef):
        return False  # it runs once
    unscaled = unit.by_loop["unscale", event.owner, loops]
    is_unscaled = any(unscale.optimizer == event.optimizer for unscale in unscaled)
    if event.kind == "scaler step" and is_unscaled:
        return False  # the unscale_ is the first call
    return unit.scales_in_loop_of(event)


def _paths(code: CodeReader, event: Event) -> Iterator[_Path]:
    """Yield the paths from an event to the next batch without an update of its scaler."""
    updates = event.unit.by_loop["update", event.owner, event.place.loops]
    for exit_ in event.unit.exits_by_loop[event.place.loops]:
        if _leads_to_next_batch(code, event, exit_) and _skips_update(code, event, exit_, updates):
            steps = _steps_between(event, exit_)
            is_stepped = any(not step.place.excludes(exit_.place) for step in steps)
            yield _Path(exit_.node, is_stepped)
    yield from _paths_around_update(code, event, updates)


def _leads_to_next_batch(code: CodeReader, event: Event, exit_: Exit) -> bool:
    """Whether an exit comes after an event, and the next batch after the exit."""
    if exit_.order <= event.order or not code.both_run(event, exit_):
        return False
    if isinstance(exit_.node, cst.Continue):
        return True
    return not event.place.loops and _is_called_in_loop(code, event)


def _is_called_in_loop(code: CodeReader, event: Event) -> bool:
    """Whether a loop calls the function of an event, the only one that updates the scaler."""
    updates = code.by_scaler["update", last_part(event.owner)]
    updates_alone = all(update.unit is event.unit for update in updates)
    return updates_alone and any(call.place.loops for call in code.calls_of(event.unit))


def _skips_update(code: CodeReader, event: Event, exit_: Exit, updates: list[Event]) -> bool:
    """Whether an exit skips the update by mistake, while the path past the exit has one.

    It is no mistake if the branch of the exit makes a new scaler, or only accumulates batches.
    """
    before = [update for update in updates if event.order < update.order < exit_.order]
    if any(not update.place.excludes(exit_.place) for update in before):
        return False
    if not any(u.order > exit_.order and u.place.loops == event.place.loops for u in updates):
        return False  # the path past the exit has none either
    # The branches that lead to the exit, but not to the event.
    arms = [arm for arm in exit_.place.arms if arm not in event.place.arms]
    if not arms:
        return False
    innermost_branch, _ = arms[-1]
    if _MAKES_SCALER_NEW.search(code.tree.code(innermost_branch)):
        return False
    if event.kind == "scaler step" or _steps_between(event, exit_):
        return True
    return _drops_batch(code, event, arms)


def _drops_batch(code: CodeReader, event: Event, arms: list[Arm]) -> bool:
    """Whether the branches `arms` after an ``unscale_`` drop its batch.

    If they accumulate batches instead, it is right that they skip the update.
    """
    conditions = [(node, number) for node, number in arms if isinstance(node, cst.If)]
    if not conditions:
        return True  # branches of a `try` or `match` alone, which do not accumulate
    if any(_COUNTS_BATCHES.search(code.tree.code(node.test)) for node, _ in conditions):
        return False
    return any(is_dropped(code, event, node, number) for node, number in conditions)


def _steps_between(event: Event, exit_: Exit) -> list[Event]:
    """The `_steps` from an event on, itself included, and before an exit."""
    return [step for step in _steps(event) if event.order <= step.order < exit_.order]


def _steps(event: Event) -> list[Event]:
    """The events of ``scaler.step(optimizer)`` with the scaler, optimizer and loop of an event."""
    steps = event.unit.by_loop["scaler step", event.owner, event.place.loops]
    return [step for step in steps if step.optimizer == event.optimizer]


def _paths_around_update(code: CodeReader, event: Event, updates: list[Event]) -> Iterator[_Path]:
    """Yield a path for each `if` around the only update whose other branch goes on to a next batch.

    `updates` are those of the event's scaler in the same loop. Yields nothing if there is none, or
    several, or if the event does not lead to the only one.
    """
    if len(updates) != 1 or not event.place.loops:
        return
    (update,) = updates
    if update.order < event.order or update.place.loops != event.place.loops:
        return
    arms = event.place.arms
    depth = len(arms)
    if update.place.arms[:depth] != arms:  # the update is not in all branches of the event
        return
    is_stepped = any(set(step.place.arms) <= set(arms) for step in _steps(event))
    for node, number in update.place.arms[depth:]:
        if not isinstance(node, cst.If) or _MAKES_SCALER_NEW.search(code.tree.code(node)):
            return
        other_number = 1 - number  # 0 is the body, 1 the else
        if leaves_loop(node, other_number):
            continue
        if is_stepped or is_dropped(code, event, node, other_number):
            yield _Path(node, is_stepped)


def leaves_loop(node: cst.If, number: int) -> bool:
    """Whether the branch `number` of an `if` ends with return, raise or break.

    0 is the body; 1 the else, or the body of an ``elif``. False for an else that is not written.
    """
    branch = node.body if number == 0 else getattr(node.orelse, "body", None)
    if not isinstance(branch, cst.BaseSuite):
        return False
    return isinstance(nodes.last_statement(branch), cst.Return | cst.Raise | cst.Break)

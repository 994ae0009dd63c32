"""Mistakes of loops that accumulate gradients, and of several optimizers or scalers.

As in `mistakes`, each rule yields the nodes that are wrong and what to do, and says nothing where
code that is not seen may make it right.
"""

from itertools import combinations

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, Found
from amp_lab.migrate.events import Event, last_part, of_kind
from amp_lab.migrate.skipped_updates import is_dropped

_UNSCALED_EACH_BATCH = remedy(
    "migrate.unscaled_each_batch",
    "unscale_ runs for each of several batches that one step sums",
    "{scaler}.unscale_ runs for each batch, and must run once per step: call it before clipping "
    "and {scaler}.step({optimizer})",
)
_UNSCALED_BY_ANOTHER = remedy(
    "migrate.unscaled_by_another",
    "one scaler unscales, and another one steps",
    "{scaler} unscales, and {other}.step({optimizer}) unscales again: use only {other}, and scale "
    "the loss with it too",
)


def unscaled_in_each_batch(code: CodeReader) -> Found:
    """``unscale_`` for each micro-batch, where only some of them step: the second one raises."""
    for unscale in of_kind("unscale", code.events):
        if not _is_repeated_before_step(code, unscale):
            continue
        scaler = unscale.of
        if not code.escapes(last_part(scaler)):
            advice = _UNSCALED_EACH_BATCH.said(scaler=scaler, optimizer=unscale.optimizer)
            yield unscale.node, advice


def _is_repeated_before_step(code: CodeReader, unscale: Event) -> bool:
    """Whether an unscale runs for several batches whose gradients one step sums."""
    updates = unscale.unit.by_scaler["update", unscale.of]
    if not _are_less_often(updates, unscale) or not _is_scaled_beside(unscale):
        return False
    steps = unscale.unit.by_scaler["scaler step", unscale.of]
    own_steps = [step for step in steps if step.optimizer == unscale.optimizer]
    if not _are_less_often(own_steps, unscale):
        return False
    reached = [update for update in updates if not update.place.excludes(unscale.place)]
    if any(first.place.excludes(second.place) for first, second in combinations(reached, 2)):
        return False  # there is an update in either branch
    # `skipped_updates` speaks of those that are dropped
    return not any(_is_dropped_without(code, update, unscale) for update in reached)


def _is_scaled_beside(unscale: Event) -> bool:
    """Whether a loss is scaled by the same scaler in the same loop."""
    scaled = unscale.unit.by_scaler["scaled", unscale.of]
    return any(event.place.loops == unscale.place.loops for event in scaled)


def _are_less_often(events: list[Event], unscale: Event) -> bool:
    """Whether such events come in only some turns of the loop of an unscale, all that it leads to.

    Those of another branch do not count.
    """
    if not unscale.place.loops:
        return False
    has_any = False
    for event in events:
        if event.place.excludes(unscale.place):
            continue
        if not _is_less_often(event, unscale):
            return False
        has_any = True
    return has_any


def _is_less_often(event: Event, unscale: Event) -> bool:
    """Whether an event comes after an unscale, in some turns of its loop or after the loop."""
    if event.order < unscale.order:
        return False
    loops = unscale.place.loops
    if event.place.loops != loops:
        is_after_loop = event.place.loops == loops[:-1]  # the loop over micro-batches
        return is_after_loop and not _is_over_optimizers(loops[-1], unscale.optimizer)
    arms = unscale.place.arms
    if event.place.arms[: len(arms)] != arms:
        return False
    return any(_goes_on(node, number) for node, number in event.place.arms[len(arms) :])


def _is_over_optimizers(loop: cst.CSTNode, optimizer: str) -> bool:
    """Whether a loop takes one optimizer after the other."""
    target = getattr(loop, "target", None)
    if target is None:
        return False
    return any(
        isinstance(part, cst.Name) and part.value == optimizer for part in nodes.below(target)
    )


def _is_dropped_without(code: CodeReader, update: Event, unscale: Event) -> bool:
    """Whether batches that skip an update are given up, not summed."""
    for node, number in update.place.arms:
        if not isinstance(node, cst.If) or (node, number) in unscale.place.arms:
            continue
        other_arm = 1 - number
        if is_dropped(code, unscale, node, other_arm):
            return True
    return False


def _goes_on(node: cst.CSTNode, number: int) -> bool:
    """Whether the loop goes on where a condition does not lead to this arm of it."""
    if not isinstance(node, cst.If):
        return False
    other_arm = node.body if number == 1 else getattr(node.orelse, "body", None)
    if not isinstance(other_arm, cst.BaseSuite):
        return True
    return not isinstance(nodes.last_statement(other_arm), cst.Return | cst.Raise | cst.Break)


def unscaled_by_another(code: CodeReader) -> Found:
    """``scaler_a.unscale_(o)`` with ``scaler_b.step(o)``, which unscales once more."""
    for unscale in of_kind("unscale", code.events):
        step = _step_by_another(unscale)
        if step is None:
            continue
        if code.is_one(unscale.of) and code.is_one(step.of):
            advice = _UNSCALED_BY_ANOTHER.said(
                scaler=unscale.of, other=step.of, optimizer=unscale.optimizer
            )
            yield unscale.node, advice


def _step_by_another(unscale: Event) -> Event | None:
    """The first step of an optimizer after its unscale, if none is by the same scaler."""
    first = None
    for step in unscale.unit.steps_of[unscale.optimizer]:
        if step.place.excludes(unscale.place):
            continue
        if step.of == unscale.of:
            return None
        if first is None and step.order > unscale.order:
            first = step
    return first


RULES = (unscaled_in_each_batch, unscaled_by_another)

"""Mistakes of loops that accumulate gradients, and of several optimizers or scalers.

As in `mistakes`, each rule yields the nodes that are wrong and what to do, and says nothing where
code that is not seen may make it right.
"""

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, Event, Found, last_part, of_kind
from amp_lab.migrate.skipped_updates import is_dropped
from amp_lab.remedies import remedy

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
        updates = unscale.unit.by_scaler["update", unscale.of]
        if not _are_less_often(updates, unscale) or not _is_scaled_beside(unscale):
            continue
        steps = unscale.unit.by_scaler["scaler step", unscale.of]
        is_rare = _are_less_often([e for e in steps if e.optimizer == unscale.optimizer], unscale)
        after = [update for update in updates if not update.place.excludes(unscale.place)]
        is_either = any(a.place.excludes(b.place) for a in after for b in after)
        if any(_is_dropped_without(code, update, unscale) for update in after):
            continue  # see `skipped_updates`
        if is_rare and not is_either and not code.escapes(last_part(unscale.of)):
            names = {"scaler": unscale.of, "optimizer": unscale.optimizer}
            yield unscale.node, _UNSCALED_EACH_BATCH.said(**names)


def _is_scaled_beside(unscale: Event) -> bool:
    """Whether a loss is scaled by the same scaler in the same loop."""
    scaled = unscale.unit.by_scaler["scaled", unscale.of]
    return any(e.place.loops == unscale.place.loops for e in scaled)


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
    loops, arms = unscale.place.loops, unscale.place.arms
    if event.order < unscale.order:
        return False
    if event.place.loops != loops:  # after the loop over micro-batches
        target = getattr(loops[-1], "target", None)
        is_own = target is not None and unscale.optimizer in _names(target)
        return event.place.loops == loops[:-1] and not is_own
    own = event.place.arms[len(arms) :]
    return event.place.arms[: len(arms)] == arms and any(_goes_on(*arm) for arm in own)


def _is_dropped_without(code: CodeReader, update: Event, unscale: Event) -> bool:
    """Whether batches that skip an update are given up, not summed."""
    own = [arm for arm in update.place.arms if arm not in unscale.place.arms]
    tests = [(node, number) for node, number in own if isinstance(node, cst.If)]
    return any(is_dropped(code, unscale, node, 1 - number) for node, number in tests)


def _goes_on(node: cst.CSTNode, number: int) -> bool:
    """Whether the loop goes on where a condition does not lead to this arm of it."""
    if not isinstance(node, cst.If):
        return False
    other = node.body if number == 1 else getattr(node.orelse, "body", None)
    last = nodes.last_statement(other) if isinstance(other, cst.BaseSuite) else None
    return not isinstance(last, cst.Return | cst.Raise | cst.Break)


def _names(node: cst.CSTNode) -> set[str]:
    return {part.value for part in nodes.below(node) if isinstance(part, cst.Name)}


def unscaled_by_another(code: CodeReader) -> Found:
    """``scaler_a.unscale_(o)`` with ``scaler_b.step(o)``, which unscales once more."""
    for unscale in of_kind("unscale", code.events):
        own = unscale.unit.steps_of[unscale.optimizer]  # steps of the same optimizer
        steps = (e for e in own if not e.place.excludes(unscale.place))
        if any(e.of == unscale.of for e in steps):
            continue
        later = [e for e in own if e.order > unscale.order]
        later = [e for e in later if not e.place.excludes(unscale.place)]
        if later and code.is_one(unscale.of) and code.is_one(later[0].of):
            names = {"scaler": unscale.of, "other": later[0].of}
            yield unscale.node, _UNSCALED_BY_ANOTHER.said(optimizer=unscale.optimizer, **names)


RULES = (unscaled_in_each_batch, unscaled_by_another)

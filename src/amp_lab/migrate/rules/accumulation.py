"""Mistakes of loops that accumulate gradients, and of several optimizers or scalers.

Each rule yields the nodes that are wrong, with the advice. A rule yields nothing for a node if code
that the rule cannot read may make the node right.
"""

from itertools import combinations

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.rules.skipped_updates import is_dropped, leaves_loop
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.events import Event, last_part
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
_UNSCALED_EACH_BATCH = remedy(
    "migrate.unscaled_each_batch",
    "unscale_ runs for each of several batches that one step sums",
    "{scaler}.unscale_ runs for each batch, but must run once per step: call it once, before "
    "clipping and {scaler}.step({optimizer})",
    failure="AMP0010",
)
_UNSCALED_BY_ANOTHER = remedy(
    "migrate.unscaled_by_another",
    "one scaler unscales the gradients, and another scaler steps",
    "{scaler} unscales, and {other}.step({optimizer}) unscales again: use only {other}, and scale "
    "the loss with {other} too",
    failure="AMP0010",
)


def run(file: Rewriter) -> None:
    """Report ``unscale_`` for each batch, or by a scaler that does not step the optimizer."""
    file.report("mistake", unscaled_in_each_batch(file.code))
    file.report("mistake", unscaled_by_another(file.code))


def unscaled_in_each_batch(code: CodeReader) -> Mistakes:
    """Yield each ``unscale_`` that runs for every micro-batch, if the scaler steps less often.

    torch raises at the second ``unscale_`` if no ``update`` runs between the two.
    """
    for unscale in code.by_kind["unscale"]:
        if not _is_repeated_before_step(code, unscale):
            continue
        scaler = unscale.owner
        if not code.scaler_escapes(last_part(scaler)):
            advice = _UNSCALED_EACH_BATCH.sentence(scaler=scaler, optimizer=unscale.optimizer)
            yield unscale.node, advice


def _is_repeated_before_step(code: CodeReader, unscale: Event) -> bool:
    """Whether ``unscale_`` runs for several batches, and one step uses their summed gradients."""
    updates = unscale.unit.by_loop["update", unscale.owner, ()]  # (): in the whole function
    if not _are_less_frequent(updates, unscale) or not unscale.unit.scales_in_loop_of(unscale):
        return False
    steps = unscale.unit.by_loop["scaler step", unscale.owner, ()]
    own_steps = [step for step in steps if step.optimizer == unscale.optimizer]
    if not _are_less_frequent(own_steps, unscale):
        return False
    reachable = [update for update in updates if not update.place.excludes(unscale.place)]
    if any(first.place.excludes(second.place) for first, second in combinations(reachable, 2)):
        return False  # each of two branches has an update, so every batch may have one
    # `skipped_updates` reports the batches that are dropped
    return not any(_drops_without_update(code, update, unscale) for update in reachable)


def _are_less_frequent(events: list[Event], unscale: Event) -> bool:
    """Whether those of `events` that an unscale can lead to all run less often than the unscale.

    False also if the unscale can lead to none of them, or is in no loop.
    """
    if not unscale.place.loops:
        return False
    has_any = False
    for event in events:
        if event.place.excludes(unscale.place):
            continue
        if not _is_less_frequent(event, unscale):
            return False  # at once: a long file has many events
        has_any = True
    return has_any


def _is_less_frequent(event: Event, unscale: Event) -> bool:
    """Whether an event runs after an unscale in only some turns of its loop, or after the loop."""
    if event.order < unscale.order:
        return False
    loops = unscale.place.loops
    if event.place.loops != loops:
        is_after_loop = event.place.loops == loops[:-1]  # loops[-1] is over micro-batches
        # `for optimizer in …` unscales each optimizer once, so it repeats nothing
        return is_after_loop and not _is_over_optimizers(loops[-1], unscale.optimizer)
    arms = unscale.place.arms
    if event.place.arms[: len(arms)] != arms:
        return False  # the event is not in all branches in which the unscale is
    for node, number in event.place.arms[len(arms) :]:
        other_number = 1 - number  # of an `if`, 0 is the body and 1 the else
        if isinstance(node, cst.If) and not leaves_loop(node, other_number):
            return True  # without the event, the loop goes on to the next batch
    return False


def _is_over_optimizers(loop: cst.CSTNode, optimizer: str) -> bool:
    """Whether a loop is ``for optimizer in …``, over several optimizers."""
    if not isinstance(loop, cst.For):
        return False
    return (optimizer,) in nodes.bound_names(loop.target)


def _drops_without_update(code: CodeReader, update: Event, unscale: Event) -> bool:
    """Whether an `if` around an update drops the batches of its other branch, unsummed.

    An `if` that has the unscale in the same branch as the update does not count.
    """
    for node, number in update.place.arms:
        if not isinstance(node, cst.If) or (node, number) in unscale.place.arms:
            continue
        other_number = 1 - number  # of an `if`, 0 is the body and 1 the else
        if is_dropped(code, unscale, node, other_number):
            return True
    return False


def unscaled_by_another(code: CodeReader) -> Mistakes:
    """Yield each ``scaler_a.unscale_(o)`` before ``scaler_b.step(o)``, which unscales again."""
    for unscale in code.by_kind["unscale"]:
        step = _step_by_another(unscale)
        if step is None:
            continue
        if code.holds_only_new_scalers(unscale.owner) and code.holds_only_new_scalers(step.owner):
            advice = _UNSCALED_BY_ANOTHER.sentence(
                scaler=unscale.owner, other=step.owner, optimizer=unscale.optimizer
            )
            yield unscale.node, advice


def _step_by_another(unscale: Event) -> Event | None:
    """The first ``scaler_b.step(o)`` after ``scaler_a.unscale_(o)``.

    None if there is none, or if ``scaler_a`` steps the optimizer itself, before or after.
    Steps in branches that exclude the unscale are passed over.
    """
    first = None
    for step in unscale.unit.steps_by_optimizer[unscale.optimizer]:
        if step.place.excludes(unscale.place):
            continue
        if step.owner == unscale.owner:
            return None
        if first is None and step.order > unscale.order:
            first = step
    return first

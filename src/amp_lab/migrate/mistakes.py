"""Mistakes with autocast and a loss scaler that the source of a file proves.

A mistake is told only if no path through the function makes it right: where a helper may do what
seems to be missing, or conditions may exclude each other, nothing is said. Each rule yields the
nodes that are wrong, and what to do; `_RULES` lists them. What is harmless but slow is a note.
"""

import re

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate import (
    accumulation,
    checkpoints,
    lifetime,
    nodes,
    skipped_updates,
    whole_programs,
)
from amp_lab.migrate.code_reader import CodeReader, Found
from amp_lab.migrate.events import Event, of_kind
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.rewriter import Rewriter

# A scaler may be passed to a function. Without a backward there is nothing to do wrong.
TRIGGERS = ("autocast backward", "GradScaler backward", "torch .scale( backward")
# Methods of nn.Module and of Lightning's modules, of which none unscales gradients.
_OF_A_MODULE = {"parameters", "named_parameters", "modules", "named_modules", "children"}
_OF_A_MODULE |= {"named_children", "buffers", "state_dict", "train", "eval", "zero_grad", "log"}
_OF_A_MODULE |= {"log_dict"}
_OF_SCALER = re.compile(r"(?i)scaler|amp|fp16|half|mixed|precision")
_ASKS_FOR_FINITE = re.compile(r"(?i)finite|is_?nan|is_?inf|found_?inf|overflow")
_UNSCALES = re.compile(r"unscale|get_scale|_scale\b|\.grad\b(?!\s+is\b)|\binf\b")

_CLIPPED_SCALED = remedy(
    "migrate.clipped_scaled",
    "gradients are clipped while they are scaled",
    "scaled gradients are clipped: call {scaler}.unscale_({optimizer}) before",
)
_CLIPPED_IN_BOTH = remedy(
    "migrate.clipped_in_both",
    "gradients are clipped after two branches, in one of which they are scaled",
    "scaled gradients are clipped: call {scaler}.unscale_({optimizer}) in the branch that scales "
    "the loss, after its backward",
)
_STEPPED_TWICE = remedy(
    "migrate.stepped_twice",
    "an optimizer steps after its scaler has stepped it",
    "{scaler}.step({optimizer}) includes it: delete {optimizer}.step()",
)
_STEPPED_IN_BOTH = remedy(
    "migrate.stepped_in_both",
    "an optimizer steps after two branches, in one of which its scaler has stepped it",
    "{scaler}.step({optimizer}) includes it, but only in its own branch: move {optimizer}.step() "
    "into the branch without the scaler",
)
_STEPPED_PAST = remedy(
    "migrate.stepped_past",
    "an optimizer steps with scaled gradients, past its scaler",
    "{optimizer}.step() bypasses the scaler, which would skip inf and NaN gradients{rest}: "
    "write {scaler}.step({optimizer})",
)
_STEPPED_PAST_IN_BOTH = remedy(
    "migrate.stepped_past_in_both",
    "an optimizer steps after two branches, in one of which the loss is scaled",
    "{optimizer}.step() bypasses the scaler, which would skip inf and NaN gradients{rest}: write "
    "{scaler}.step({optimizer}) in the branch that scales the loss, and move {optimizer}.step() "
    "into the other one",
)
_BACKWARD_INSIDE = remedy(
    "migrate.backward_inside",
    "backward runs inside the autocast block",
    "backward runs inside autocast: end the block after the loss",
)
_LOOP_IN_ONE_BLOCK = remedy(
    "migrate.loop_in_one_block",
    "one autocast block is around a loop of training steps",
    "all steps run in this autocast block, which keeps the casts of the weights from the first: "
    "open a block for each forward pass, inside the loop",
)
_NEVER_UPDATED = remedy(
    "migrate.never_updated",
    "a scaler steps, and its scale is never updated",
    "{scaler} is never updated, so its next step raises: call {scaler}.update() after the step",
)

_STEPPED_IN_PASSES = remedy(
    "migrate.stepped_in_passes",
    "an optimizer of two passes, such as SAM, steps on the gradients of a scaled loss",
    "{scaler} cannot skip {optimizer}.{step}(){rest}, so one overflow makes the weights NaN: train "
    "in bfloat16 without a scaler; or, before each of the two steps, call "
    "{scaler}.unscale_({optimizer}) and {scaler}.update(), and if a gradient is not finite, put "
    "the weights of before the batch back and go on to the next",
)
_PASSES = {"first_step", "second_step", "ascent_step", "descent_step"}


class Rule(Rewriter):
    """The mistakes in one file."""

    def run(self) -> None:
        """Ask each rule, if the file has anything of mixed precision."""
        names = ("autocast", "GradScaler", "scale")
        has_any = any(use.parts[-1] in names for use in self.tree.uses)
        if not has_any or "backward" not in self.tree.text:
            return
        # reading costs as much as parsing, so it comes after that question
        code = CodeReader(self.tree)
        for rule in _RULES:
            kind = "note" if rule in _NOTES else "mistake"
            for node, message in rule(code):
                if not _is_expected_to_fail(self.tree, node):
                    self.say(node, kind, message)


def _is_expected_to_fail(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether a test wants to see it fail: ``with pytest.raises(…)``."""
    return any(_expects_error(parent) for parent, _ in tree.ancestors(node))


def _expects_error(block: cst.CSTNode) -> bool:
    if not isinstance(block, cst.With):
        return False
    for item in block.items:
        if isinstance(item.item, cst.Call) and "raises" in nodes.name_called(item.item).lower():
            return True
    return False


# Clipping.


def _clipped_scaled(code: CodeReader) -> Found:
    for clip in of_kind("clip", code.events):
        scaled = code.scaled_before(clip)
        if scaled is None or _may_be_unscaled(code, scaled, clip):
            continue
        step = _next_step(scaled, clip)
        if step is None:
            continue
        if not code.both_run(clip, step) and not code.both_run(scaled, step):
            continue
        is_for_both = _has_plain_branch(code, scaled, clip)
        advice = _CLIPPED_IN_BOTH if is_for_both else _CLIPPED_SCALED
        yield clip.node, advice.said(scaler=scaled.of, optimizer=step.optimizer)


def _next_step(scaled: Event, clip: Event) -> Event | None:
    """The first step after a clip by the scaler that scaled the loss."""
    for step in clip.unit.after("scaler step", clip.order):
        if step.of == scaled.of and not step.place.excludes(clip.place):
            return step
    return None


def _may_be_unscaled(code: CodeReader, scaled: Event, clip: Event) -> bool:
    """Whether the gradients may not be scaled any more, or be those of another network."""
    arguments = set(nodes.below(clip.node))  # what is called among them finds parameters
    for event in clip.unit.events[scaled.order + 1 : clip.order]:
        if event.kind in ("scaler step", "unscale"):
            return True
        if event.kind != "call" or event.node in arguments:
            continue
        if _may_unscale(code, event.node, scaled.of):
            return True
    for plain in clip.unit.by_kind["backward"]:
        is_elsewhere = plain.place.excludes(clip.place) or plain.place.excludes(scaled.place)
        if not is_elsewhere:
            return True
    text = code.text_between(scaled, clip)
    if _is_passed_on(scaled.of, text) or _UNSCALES.search(text):
        return True
    words = re.findall(r"\w+", text)
    return not code.scale_names.isdisjoint(words)  # divided by hand


def _is_passed_on(scaler: str, text: str) -> bool:
    """Whether a scaler by itself is an argument of something."""
    return re.search(rf"[(,=]\s*{re.escape(scaler)}\s*[,)]", text) is not None


def _may_unscale(code: CodeReader, call: cst.Call, scaler: str) -> bool:
    """Whether a call may lead to `scaler.unscale_`, though it is not given the scaler."""
    parts = nodes.dotted(call.func) or ()
    function = code.functions.get(parts[-1]) if parts else None
    if function is not None:
        return "unscale" in code.tree.code(function)
    if nodes.is_given(call, "self"):
        return scaler.startswith("self.")
    if len(parts) != 2:
        return False
    owner, method = parts
    if owner != scaler.partition(".")[0] or method in _OF_A_MODULE:
        return False
    if owner == "self" and parts not in code.tree.assigned:
        return code.may_inherit(call)
    return not code.is_of_torch(parts)


def _has_plain_branch(code: CodeReader, scaled: Event, event: Event) -> bool:
    """Whether a loss that is not scaled may lead to an event, by another branch than a scaled one.

    The branches are those of one `if`, or of two with opposite conditions.
    """
    first = _order_of_step_before(scaled)
    for plain in event.unit.between("backward", first, event.order):
        if set(plain.place.arms) <= set(event.place.arms):
            continue  # it is in no branch of its own
        if plain.place.loops != scaled.place.loops or plain.place.excludes(event.place):
            continue
        if not code.both_run(plain, scaled):
            return True
    return False


def _order_of_step_before(scaled: Event) -> int:
    """The order of the last step by a scaler on the way to a backward; 0 if there is none."""
    for step in scaled.unit.between("scaler step", 0, scaled.order):
        if not step.place.excludes(scaled.place):
            return step.order
    return 0


# Steps of the optimizer itself.


def _stepped_beside(code: CodeReader) -> Found:
    for step in of_kind("step", code.events):
        if not _is_step(code, step):
            continue
        scaled = code.scaled_before(step)
        if scaled is None:
            continue
        message = _wrong_with_step(code, scaled, step)
        if message is not None:
            yield step.node, message


def _is_step(code: CodeReader, event: Event) -> bool:
    if event.kind != "step" or "sched" in event.of.lower():
        return False
    return code.is_optimizer(event.of)


def _wrong_with_step(code: CodeReader, scaled: Event, step: Event) -> str | None:
    """What is wrong with a plain step after a scaled backward; None if nothing surely is."""
    between = step.unit.events[scaled.order + 1 : step.order]
    last_of_kind = {event.kind: event for event in between if event.optimizer == step.of}
    by_scaler = last_of_kind.get("scaler step")
    if by_scaler is not None:
        if not _steps_twice(code, by_scaler, step):
            return None
        is_needed = _steps_alone_elsewhere(code, scaled, by_scaler, step)
        advice = _STEPPED_IN_BOTH if is_needed else _STEPPED_TWICE
        return advice.said(scaler=by_scaler.of, optimizer=step.of)
    is_unscaled = "unscale" in last_of_kind
    if not _steps_past(code, scaled, step, is_unscaled):
        return None
    rest = "" if is_unscaled else ", and unscale them"
    has_plain_branch = _has_plain_branch(code, scaled, step)
    advice = _STEPPED_PAST_IN_BOTH if has_plain_branch else _STEPPED_PAST
    return advice.said(scaler=scaled.of, optimizer=step.of, rest=rest)


def _steps_twice(code: CodeReader, by_scaler: Event, step: Event) -> bool:
    calls = of_kind("call", step.unit.events[by_scaler.order : step.order])
    if any("zero_grad" in code.tree.code(call.node.func) for call in calls):
        return False  # and gradients anew, by something that is not seen
    if step.place.loops != by_scaler.place.loops:
        return False  # other batches may lie between
    return code.both_run(by_scaler, step)


def _steps_alone_elsewhere(code: CodeReader, scaled: Event, by_scaler: Event, step: Event) -> bool:
    """Whether a step is the only one of a run that takes another branch than that of its scaler."""
    own_arms = [arm for arm in by_scaler.place.arms if arm not in step.place.arms]
    if not own_arms:
        return False
    if _has_plain_branch(code, by_scaler, step):
        return True
    conditions = [node for node, _ in own_arms if isinstance(node, cst.If)]
    if any(_OF_SCALER.search(code.tree.code(condition.test)) for condition in conditions):
        return True
    # what the other branch calls may run a backward of its own
    is_scaled_there = any(arm in scaled.place.arms for arm in own_arms)
    has_else = any(condition.orelse is not None for condition in conditions)
    return is_scaled_there and has_else


def _steps_past(code: CodeReader, scaled: Event, step: Event, is_unscaled: bool) -> bool:
    """Whether scaled gradients are surely stepped with, and by the optimizer alone."""
    steps_by_scaler = step.unit.steps_of[step.of]
    if not steps_by_scaler and step.unit.by_kind["scaler step"]:
        return False  # it may be the optimizer of another network
    for by_scaler in steps_by_scaler:
        if by_scaler.place.excludes(step.place) and not by_scaler.place.excludes(scaled.place):
            return False  # a choice of the two, and what it depends on may turn scaling off
    if is_unscaled and not set(step.place.arms) <= set(scaled.place.arms):
        return False  # only where a condition holds, such as that all gradients are finite
    text = code.text_between(scaled, step)
    return not _is_by_hand(scaled.of, text)


def _is_by_hand(scaler: str, text: str) -> bool:
    """Whether gradients may be unscaled without ``unscale_``, or by what is given the scaler."""
    return _is_passed_on(scaler, text) or re.search(r"get_scale|\.grad\b", text) is not None


def _stepped_in_passes(code: CodeReader) -> Found:
    reported = set()
    for event in of_kind("call", code.events):
        func = event.node.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in _PASSES:
            continue
        optimizer = code.key(func.value)
        scaled = code.scaled_before(event)
        if scaled is None or (event.unit, optimizer) in reported:
            continue
        text = code.text_between(scaled, event)
        is_unscaled = "unscale" in text
        if is_unscaled and _ASKS_FOR_FINITE.search(text):
            continue
        if _is_by_hand(scaled.of, text) or _calls_what_unscales(code, scaled, event):
            continue
        reported.add((event.unit, optimizer))
        rest = "" if is_unscaled else ", nor unscale its gradients"
        advice = _STEPPED_IN_PASSES.said(
            scaler=scaled.of, optimizer=optimizer, step=func.attr.value, rest=rest
        )
        yield event.node, advice


def _calls_what_unscales(code: CodeReader, scaled: Event, step: Event) -> bool:
    """Whether a call between a backward and a pass may unscale the gradients or check them."""
    between = of_kind("call", step.unit.events[scaled.order + 1 : step.order])
    return any(_may_unscale(code, event.node, scaled.of) for event in between)


# Where autocast ends.


def _backward_in_autocast(code: CodeReader) -> Found:
    around_steps = _blocks_around_steps(code)
    for event in code.events:
        if event.kind not in ("scaled", "backward"):
            continue
        if event.place.autocast not in (None, *around_steps):
            yield event.node, _BACKWARD_INSIDE.text


def _loop_in_one_block(code: CodeReader) -> Found:
    for call in _blocks_around_steps(code):
        yield call, _LOOP_IN_ONE_BLOCK.text


def _blocks_around_steps(code: CodeReader) -> list[cst.Call]:
    """The calls of autocast around a loop with a backward pass and a step of an optimizer."""
    with_backward: set[cst.Call] = set()
    with_step: set[cst.Call] = set()
    for event in code.events:
        call = event.place.autocast
        if call is None or not event.place.repeats_in_autocast:
            continue
        if event.kind in ("scaled", "backward"):
            with_backward.add(call)
        elif event.kind == "scaler step" or _is_step(code, event):
            with_step.add(call)
    around = with_backward & with_step
    return [call for call in around if not _is_without_cache(code.autocast_of(call))]


def _is_without_cache(call: cst.Call) -> bool:
    return nodes.is_false(nodes.arguments(call.args).get("cache_enabled"))


# Updates.


def _never_updated(code: CodeReader) -> Found:
    for name in code.made.keys() - code.disabled:
        last_of_kind = code.last_of[name]
        step = last_of_kind.get("scaler step")
        if step is None or "scaled" not in last_of_kind or "update" in last_of_kind:
            continue
        if code.escapes(name):
            continue
        # Not every update is an event: a lambda runs later.
        uses = code.tree.uses_ending["update"]
        if not any(use.parts[-2:] == (name, "update") for use in uses):
            yield step.node, _NEVER_UPDATED.said(scaler=step.of)


_NOTES = (_backward_in_autocast,)
_RULES = (
    _clipped_scaled,
    _stepped_beside,
    _never_updated,
    checkpoints.saved_without,
    *_NOTES,
    _stepped_in_passes,
    _loop_in_one_block,
    lifetime.made_each_epoch,
    *accumulation.RULES,
    *skipped_updates.RULES,
    *whole_programs.RULES,
)

"""Mistakes with autocast and a loss scaler that the source of a file proves.

A mistake is told only if no path through the function makes it right: where a helper may do what
seems to be missing, or conditions may exclude each other, nothing is said. Each rule yields the
nodes that are wrong, and what to do; `_RULES` lists them. What is harmless but slow is a note.
"""

import re

import libcst as cst

from amp_lab.migrate import (
    accumulation,
    checkpoints,
    lifetime,
    nodes,
    skipped_updates,
    whole_programs,
)
from amp_lab.migrate.code_reader import CodeReader, Event, Found, of_kind
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.rewriter import Rewriter
from amp_lab.remedies import remedy

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
        about = ("autocast", "GradScaler", "scale")
        has_any = any(use.parts[-1] in about for use in self.tree.uses)
        if not has_any or "backward" not in self.tree.text:
            return
        # reading costs as much as parsing, so it comes after that question
        code = CodeReader(self.tree)
        for rule in _RULES:
            for node, message in rule(code):
                if not _is_expected_to_fail(self.tree, node):
                    self.say(node, "note" if rule in _NOTES else "mistake", message)


def _is_expected_to_fail(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether a test wants to see it fail: ``with pytest.raises(…)``."""
    blocks = (above for above, _ in tree.ancestors(node) if isinstance(above, cst.With))
    calls = (i.item for block in blocks for i in block.items if isinstance(i.item, cst.Call))
    return any("raises" in nodes.name_called(call).lower() for call in calls)


def _clipped_scaled(code: CodeReader) -> Found:
    for clip in of_kind("clip", code.events):
        scaled = code.scaled_before(clip)
        if scaled is None or _may_be_unscaled(code, scaled, clip):
            continue
        later = clip.unit.after("scaler step", clip.order)
        steps = (e for e in later if e.of == scaled.of and not e.place.excludes(clip.place))
        step = next(steps, None)
        if step is not None and (code.both_run(clip, step) or code.both_run(scaled, step)):
            names = {"scaler": scaled.of, "optimizer": step.optimizer}
            in_both = _has_plain_branch(code, scaled, clip)
            advice = _CLIPPED_IN_BOTH if in_both else _CLIPPED_SCALED
            yield clip.node, advice.said(**names)


def _may_be_unscaled(code: CodeReader, scaled: Event, clip: Event) -> bool:
    """Whether the gradients may not be scaled any more, or be those of another network."""
    own = set(nodes.below(clip.node))  # what is called in its arguments finds parameters
    for event in clip.unit.events[scaled.order + 1 : clip.order]:
        if event.kind in ("scaler step", "unscale"):
            return True
        is_other = event.kind == "call" and event.node not in own
        if is_other and _may_unscale(code, event.node, scaled.of):
            return True
    plain = [event.place for event in clip.unit.by_kind["backward"]]
    if not all(at.excludes(clip.place) or at.excludes(scaled.place) for at in plain):
        return True
    text = code.text_between(scaled, clip)
    if _is_passed_on(scaled.of, text) or _UNSCALES.search(text):
        return True
    return bool(code.scale_names & set(re.findall(r"\w+", text)))  # divided by hand


def _is_passed_on(scaler: str, text: str) -> bool:
    return bool(re.search(rf"[(,=]\s*{re.escape(scaler)}\s*[,)]", text))


def _may_unscale(code: CodeReader, call: cst.Call, scaler: str) -> bool:
    """Whether a call may lead to `scaler.unscale_`, though it is not given the scaler."""
    parts = nodes.dotted(call.func) or ()
    function = code.functions.get(parts[-1]) if parts else None
    if function is not None:
        return "unscale" in code.tree.code(function)
    if nodes.is_given(call, "self"):
        return scaler.startswith("self.")
    if len(parts) != 2 or parts[0] != scaler.partition(".")[0] or parts[1] in _OF_A_MODULE:
        return False
    if parts[0] == "self" and parts not in code.tree.assigned:
        return code.may_inherit(call)
    return not code.is_of_torch(parts)


def _has_plain_branch(code: CodeReader, scaled: Event, event: Event) -> bool:
    """Whether a loss that is not scaled may lead to an event, by another branch than a scaled one.

    The branches are those of one `if`, or of two with opposite conditions.
    """
    steps = event.unit.between("scaler step", 0, scaled.order)
    before = next((s.order for s in steps if not s.place.excludes(scaled.place)), 0)
    for plain in event.unit.between("backward", before, event.order):
        is_branch = not set(plain.place.arms) <= set(event.place.arms)
        is_near = plain.place.loops == scaled.place.loops
        may_lead = not plain.place.excludes(event.place)
        if is_branch and is_near and may_lead and not code.both_run(plain, scaled):
            return True
    return False


def _stepped_beside(code: CodeReader) -> Found:
    for step in of_kind("step", code.events):
        scaled = code.scaled_before(step) if _is_step(code, step) else None
        message = _wrong_with_step(code, scaled, step) if scaled is not None else None
        if message is not None:
            yield step.node, message


def _wrong_with_step(code: CodeReader, scaled: Event, step: Event) -> str | None:
    between = step.unit.events[scaled.order + 1 : step.order]
    done = {e.kind: e for e in between if e.optimizer == step.of}  # the last of each kind
    by_scaler = done.get("scaler step")
    if by_scaler is not None:
        if not _steps_twice(code, by_scaler, step):
            return None
        is_needed = _steps_alone_elsewhere(code, scaled, by_scaler, step)
        advice = _STEPPED_IN_BOTH if is_needed else _STEPPED_TWICE
        return advice.said(scaler=by_scaler.of, optimizer=step.of)
    if not _steps_past(code, scaled, step, "unscale" in done):
        return None
    rest = "" if "unscale" in done else ", and unscale them"
    advice = _STEPPED_PAST_IN_BOTH if _has_plain_branch(code, scaled, step) else _STEPPED_PAST
    return advice.said(scaler=scaled.of, optimizer=step.of, rest=rest)


def _steps_twice(code: CodeReader, by_scaler: Event, step: Event) -> bool:
    calls = of_kind("call", step.unit.events[by_scaler.order : step.order])
    if any("zero_grad" in code.tree.code(call.node.func) for call in calls):
        return False  # and gradients anew, by something that is not seen
    # else other batches may lie between
    return step.place.loops == by_scaler.place.loops and code.both_run(by_scaler, step)


def _steps_alone_elsewhere(code: CodeReader, scaled: Event, by_scaler: Event, step: Event) -> bool:
    """Whether a step is the only one of a run that takes another branch than that of its scaler."""
    own = [arm for arm in by_scaler.place.arms if arm not in step.place.arms]
    if not own:
        return False
    if _has_plain_branch(code, by_scaler, step):
        return True
    tests = [code.tree.code(node.test) for node, _ in own if isinstance(node, cst.If)]
    if any(map(_OF_SCALER.search, tests)):
        return True
    # what the other branch calls may run a backward of its own
    is_scaled_there = any(arm in scaled.place.arms for arm in own)
    has_other = any(isinstance(node, cst.If) and node.orelse is not None for node, _ in own)
    return is_scaled_there and has_other


def _steps_past(code: CodeReader, scaled: Event, step: Event, is_unscaled: bool) -> bool:
    """Whether scaled gradients are surely stepped with, and by the optimizer alone."""
    by_scaler = step.unit.by_kind["scaler step"]
    same = step.unit.steps_of[step.of]
    if by_scaler and not same:
        return False  # it may be the optimizer of another network
    if any(e.place.excludes(step.place) and not e.place.excludes(scaled.place) for e in same):
        return False  # a choice between the two, and what it depends on may turn scaling off
    if is_unscaled and not set(step.place.arms) <= set(scaled.place.arms):
        return False  # only where a condition holds, such as that all gradients are finite
    text = code.text_between(scaled, step)
    return not _is_passed_on(scaled.of, text) and not re.search(r"get_scale|\.grad\b", text)


def _stepped_in_passes(code: CodeReader) -> Found:
    told = set()
    for event in of_kind("call", code.events):
        func = event.node.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in _PASSES:
            continue
        optimizer, scaled = code.key(func.value), code.scaled_before(event)
        if scaled is None or (event.unit, optimizer) in told:
            continue
        text = code.text_between(scaled, event)
        is_unscaled = "unscale" in text
        is_checked = bool(_ASKS_FOR_FINITE.search(text))
        if (is_unscaled and is_checked) or _may_be_by_hand(code, scaled, event):
            continue
        told.add((event.unit, optimizer))
        yield (
            event.node,
            _STEPPED_IN_PASSES.said(
                scaler=scaled.of,
                optimizer=optimizer,
                step=func.attr.value,
                rest="" if is_unscaled else ", nor unscale its gradients",
            ),
        )


def _may_be_by_hand(code: CodeReader, scaled: Event, step: Event) -> bool:
    """Whether something between a backward and a pass may unscale the gradients or check them."""
    text = code.text_between(scaled, step)
    if _is_passed_on(scaled.of, text) or re.search(r"get_scale|\.grad\b", text):
        return True
    between = of_kind("call", step.unit.events[scaled.order + 1 : step.order])
    return any(_may_unscale(code, event.node, scaled.of) for event in between)


def _backward_in_autocast(code: CodeReader) -> Found:
    spanning = _blocks_around_steps(code)
    for event in code.events:
        is_backward = event.kind in ("scaled", "backward")
        if is_backward and event.place.autocast not in (None, *spanning):
            yield event.node, _BACKWARD_INSIDE.text


def _loop_in_one_block(code: CodeReader) -> Found:
    for call in _blocks_around_steps(code):
        yield call, _LOOP_IN_ONE_BLOCK.text


def _blocks_around_steps(code: CodeReader) -> list[cst.Call]:
    """The calls of autocast around a loop with a backward pass and a step of an optimizer."""
    inside: dict[str, set[cst.Call]] = {"backward": set(), "step": set()}
    for event in code.events:
        call = event.place.autocast
        if call is None or not event.place.repeats_in_autocast:
            continue
        if event.kind in ("scaled", "backward"):
            inside["backward"].add(call)
        elif event.kind == "scaler step" or _is_step(code, event):
            inside["step"].add(call)
    around = inside["backward"] & inside["step"]
    return [call for call in around if not nodes.is_false(_cache_of(code.autocast_of(call)))]


def _cache_of(call: cst.Call) -> cst.BaseExpression | None:
    return nodes.arguments(call.args).get("cache_enabled")


def _is_step(code: CodeReader, event: Event) -> bool:
    return event.kind == "step" and code.is_optimizer(event.of) and "sched" not in event.of.lower()


def _never_updated(code: CodeReader) -> Found:
    for name in code.made.keys() - code.disabled:
        own = code.last_of[name]
        step = own.get("scaler step")
        if step is None or "scaled" not in own or "update" in own or code.escapes(name):
            continue
        # Not every update is an event: a lambda runs later.
        updates = code.tree.uses_ending["update"]
        if not any(use.parts[-2:] == (name, "update") for use in updates):
            yield step.node, _NEVER_UPDATED.said(scaler=step.of)


_NOTES = (_backward_in_autocast,)
_RULES = (_clipped_scaled, _stepped_beside, _never_updated, checkpoints.saved_without, *_NOTES)
_RULES += (
    _stepped_in_passes,
    _loop_in_one_block,
    lifetime.made_each_epoch,
    *accumulation.RULES,
    *skipped_updates.RULES,
    *whole_programs.RULES,
)

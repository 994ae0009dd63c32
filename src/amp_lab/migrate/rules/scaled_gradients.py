"""Mistakes with gradients that are still scaled: they are clipped, or an optimizer steps with them.

A mistake is reported only if no path through the function makes the code right. It is not reported
if a helper may contain the missing call, or if conditions may exclude each other.
"""

import re
from collections import defaultdict

import libcst as cst

from amp_lab.core.remedies import remedy
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import MISTAKE_TRIGGERS, CodeReader, Mistakes
from amp_lab.migrate.tree.events import Event
from amp_lab.migrate.tree.python_tree import Tree, cached_in_tree
from amp_lab.migrate.tree.rewriter import Rewriter

PART = "mistakes"
TRIGGERS = MISTAKE_TRIGGERS
# Methods of nn.Module and of Lightning's modules: none of them unscales gradients.
_MODULE_METHODS = re.compile(
    "(?:named_)?(?:parameters|modules|children)|buffers|state_dict|train|eval|zero_grad"
    "|log(?:_dict)?"
)
_ABOUT_SCALING = re.compile(r"(?i)scaler|amp|fp16|half|mixed|precision")
_ASKS_FOR_FINITE = re.compile(r"(?i)finite|is_?nan|is_?inf|found_?inf|overflow")
# p.grad.div_(s), get_scale(), scaler._scale; not "p.grad is None"
_MAY_UNSCALE = re.compile(r"unscale|get_scale|_scale\b|\.grad\b(?!\s+is\b)|\binf\b")

_CLIPPED_SCALED = remedy(
    "migrate.clipped_scaled",
    "gradients are clipped while they are scaled",
    "scaled gradients are clipped: call {scaler}.unscale_({optimizer}) before clipping",
    failure="AMP0015",
)
_CLIPPED_IN_BOTH = remedy(
    "migrate.clipped_in_both",
    "gradients are clipped after two branches, in one of which they are scaled",
    "scaled gradients are clipped: call {scaler}.unscale_({optimizer}) in the branch that scales "
    "the loss, after its backward",
    failure="AMP0015",
)
_STEPPED_TWICE = remedy(
    "migrate.stepped_twice",
    "an optimizer steps after its scaler has stepped it",
    "{scaler}.step({optimizer}) already steps the optimizer: delete {optimizer}.step()",
    failure="AMP0131",
)
_STEPPED_IN_BOTH = remedy(
    "migrate.stepped_in_both",
    "optimizer.step() follows an if/else, and one branch already calls scaler.step(optimizer)",
    "{scaler}.step({optimizer}) already steps the optimizer in its branch: move "
    "{optimizer}.step() into the branch without the scaler",
    failure="AMP0131",
)
_STEPPED_PAST = remedy(
    "migrate.stepped_past",
    "optimizer.step() is called directly, with scaled gradients",
    "{optimizer}.step() bypasses the scaler, which would skip inf and NaN gradients{rest}: "
    "write {scaler}.step({optimizer})",
    failure="AMP0131",
)
_STEPPED_PAST_IN_BOTH = remedy(
    "migrate.stepped_past_in_both",
    "an optimizer steps after two branches, in one of which the loss is scaled",
    "{optimizer}.step() bypasses the scaler, which would skip inf and NaN gradients{rest}: write "
    "{scaler}.step({optimizer}) in the branch that scales the loss, and move {optimizer}.step() "
    "into the other one",
    failure="AMP0131",
)

_STEPPED_IN_PASSES = remedy(
    "migrate.stepped_in_passes",
    "an optimizer of two passes, such as SAM, steps on the gradients of a scaled loss",
    "{scaler} cannot skip {optimizer}.{step}(){rest}, so one overflow makes the weights NaN: train "
    "in bfloat16 without a scaler; or, before each of the two steps, call "
    "{scaler}.unscale_({optimizer}) and {scaler}.update(), and if a gradient is inf or NaN, "
    "restore the weights from before the batch and continue with the next batch",
    failure="AMP0013",
)
_TWO_PASS_METHODS = {"first_step", "second_step", "ascent_step", "descent_step"}


def run(file: Rewriter) -> None:
    """Report clipping and steps with gradients that are still scaled."""
    file.report("mistake", _clipped_scaled(file.code))
    file.report("mistake", _stepped_beside(file.code))
    file.report("mistake", _stepped_in_passes(file.code))


# Clipping.


def _clipped_scaled(code: CodeReader) -> Mistakes:
    """Yield each clip of gradients that are still scaled."""
    for clip in code.by_kind["clip"]:
        scaled = code.scaled_before(clip)
        if scaled is None or _may_be_unscaled(code, scaled, clip):
            continue
        step = _next_step(scaled, clip)
        if step is None:
            continue
        if not code.both_run(clip, step) and not code.both_run(scaled, step):
            continue  # their conditions may exclude each other
        has_plain_branch = _has_plain_branch(code, scaled, clip)
        advice = _CLIPPED_IN_BOTH if has_plain_branch else _CLIPPED_SCALED
        yield clip.node, advice.sentence(scaler=scaled.owner, optimizer=step.optimizer)


def _next_step(scaled: Event, clip: Event) -> Event | None:
    """The first step that a clip can lead to, by the scaler of `scaled`; None if there is none."""
    for step in clip.unit.after("scaler step", clip):
        if step.owner == scaled.owner:
            return step
    return None


def _may_be_unscaled(code: CodeReader, scaled: Event, clip: Event) -> bool:
    """Whether a clip may get gradients that are unscaled, or were never scaled.

    A call or an expression after the backward `scaled` may unscale them, or they may come from a
    plain backward.
    """
    calls_in_clip = set(nodes.walk(clip.node))  # such as model.parameters(), an argument
    for event in clip.unit.events[scaled.order + 1 : clip.order]:
        if event.kind in ("scaler step", "unscale"):
            return True
        if event.kind != "call" or event.node in calls_in_clip:
            continue
        if _may_unscale(code, event.node, scaled.owner):
            return True
    for plain in clip.unit.by_kind["backward"]:  # its gradients, not scaled, may be clipped
        is_elsewhere = plain.place.excludes(clip.place) or plain.place.excludes(scaled.place)
        if not is_elsewhere:
            return True
    text = _text_between(code, scaled, clip)
    if _is_passed_on(scaled.owner, text) or _MAY_UNSCALE.search(text):
        return True
    words = re.findall(r"\w+", text)
    return not _scale_names(code.tree).isdisjoint(words)  # divided by hand


@cached_in_tree
def _scale_names(tree: Tree) -> set[str]:
    """``get_scale``, and the names of values that are computed from its result."""
    words_in_values: defaultdict[str, set[str]] = defaultdict(set)
    for parts, values in tree.assigned_values.items():
        for value in values:
            code = tree.code(value)
            words_in_values[parts[-1]].update(re.findall(r"[A-Za-z_]\w*", code))
    names = {"get_scale"}
    size = 0
    while len(names) > size:  # until no more name is computed from one of them
        size = len(names)
        names |= {name for name, words in words_in_values.items() if words & names}
    return names


def _text_between(code: CodeReader, first: Event, second: Event) -> str:
    """The source from the end of one call to the end of another, without comments."""
    _, start = code.tree.span(first.node)
    _, end = code.tree.span(second.node)
    return re.sub(r"#.*", "", code.tree.text[start:end])


def _is_passed_on(scaler: str, text: str) -> bool:
    """Whether a text has a scaler as an argument: ``f(scaler)`` or ``f(x, s=scaler)``."""
    return re.search(rf"[(,=]\s*{re.escape(scaler)}\s*[,)]", text) is not None


def _may_unscale(code: CodeReader, call: cst.Call, scaler: str) -> bool:
    """Whether a call may run `scaler.unscale_`, though the scaler is not one of its arguments."""
    parts = nodes.name_parts(call.func) or ()
    function = code.called_function(call)
    if function is not None:
        return "unscale" in code.tree.code(function)
    if nodes.is_argument(call, "self"):
        return scaler.startswith("self.")
    if len(parts) != 2:
        return False
    # Only a method of the object that has the scaler, as self has self.scaler, can reach it.
    owner, method = parts
    if owner != scaler.partition(".")[0] or _MODULE_METHODS.fullmatch(method):
        return False
    if owner == "self" and parts not in code.tree.assigned_values:
        return code.may_inherit(call)  # self.method(), which this file does not define
    return not _is_made_by_torch(code, parts)  # self.loss(), with self.loss = torch.nn.MSELoss()


def _is_made_by_torch(code: CodeReader, parts: tuple[str, ...]) -> bool:
    """Whether each value of a name is made by torch, such as a loss function."""
    values = code.tree.assigned_values.get(parts, [])
    origins = [code.called_origin(value) or "" for value in values]
    return bool(origins) and all(origin.startswith("torch.") for origin in origins)


def _has_plain_branch(code: CodeReader, scaled: Event, event: Event) -> bool:
    """Whether a plain ``loss.backward()`` in another branch than `scaled` may lead to an event.

    The branches are those of one `if`, or of two with opposite conditions.
    """
    # A backward before the last step has no part in these gradients.
    step_before = next(scaled.unit.before("scaler step", scaled), None)
    first = 0 if step_before is None else step_before.order
    for plain in event.unit.before("backward", event, first):
        runs_always = set(plain.place.arms) <= set(event.place.arms)  # wherever the event does
        if runs_always or plain.place.loops != scaled.place.loops:
            continue
        if not code.both_run(plain, scaled):  # no run reaches both: they are in two branches
            return True
    return False


# Steps of the optimizer itself.


def _stepped_beside(code: CodeReader) -> Mistakes:
    """Yield each ``optimizer.step()`` beside a scaler, which steps it too or should do so."""
    for step in code.by_kind["step"]:
        if not code.is_optimizer_step(step):
            continue
        scaled = code.scaled_before(step)
        if scaled is None:
            continue
        message = _advice_on_step(code, scaled, step)
        if message is not None:
            yield step.node, message


def _advice_on_step(code: CodeReader, scaled: Event, step: Event) -> str | None:
    """What to do about a plain step after a scaled backward; None if it may be right."""
    between = step.unit.events[scaled.order + 1 : step.order]
    # The calls of a scaler on this optimizer: unscale_ and step.
    last_of_kind = {event.kind: event for event in between if event.optimizer == step.owner}
    scaler_step = last_of_kind.get("scaler step")
    if scaler_step is not None:
        if not _steps_twice(code, scaler_step, step):
            return None
        is_needed = _is_needed_elsewhere(code, scaled, scaler_step, step)
        advice = _STEPPED_IN_BOTH if is_needed else _STEPPED_TWICE
        return advice.sentence(scaler=scaler_step.owner, optimizer=step.owner)
    is_unscaled = "unscale" in last_of_kind
    if not _steps_past_scaler(code, scaled, step, is_unscaled):
        return None
    rest = "" if is_unscaled else ", and unscale them"  # of what the scaler would do
    has_plain_branch = _has_plain_branch(code, scaled, step)
    advice = _STEPPED_PAST_IN_BOTH if has_plain_branch else _STEPPED_PAST
    return advice.sentence(scaler=scaled.owner, optimizer=step.owner, rest=rest)


def _steps_twice(code: CodeReader, scaler_step: Event, step: Event) -> bool:
    """Whether a plain step surely works on the gradients that its scaler has stepped with."""
    calls = step.unit.between("call", scaler_step.order, step.order)
    if any("zero_grad" in code.tree.code(call.node.func) for call in calls):
        return False  # new gradients may come in between
    if step.place.loops != scaler_step.place.loops:
        return False  # there may be other batches in between
    return code.both_run(scaler_step, step)


def _is_needed_elsewhere(code: CodeReader, scaled: Event, scaler_step: Event, step: Event) -> bool:
    """Whether a plain step is the only one in runs that skip the branch of its scaler's step."""
    own_arms = [arm for arm in scaler_step.place.arms if arm not in step.place.arms]
    if not own_arms:
        return False
    if _has_plain_branch(code, scaler_step, step):
        return True
    conditions = [node for node, _ in own_arms if isinstance(node, cst.If)]
    if any(_ABOUT_SCALING.search(code.tree.code(condition.test)) for condition in conditions):
        return True
    # The other branch has no backward that is seen here, but it may call one.
    is_scaled_there = any(arm in scaled.place.arms for arm in own_arms)
    has_else = any(condition.orelse is not None for condition in conditions)
    return is_scaled_there and has_else


def _steps_past_scaler(code: CodeReader, scaled: Event, step: Event, is_unscaled: bool) -> bool:
    """Whether a plain step surely gets scaled gradients, and no scaler steps instead."""
    steps_by_scaler = step.unit.steps_by_optimizer[step.owner]
    if not steps_by_scaler and step.unit.by_kind["scaler step"]:
        return False  # it may be the optimizer of another network
    for scaler_step in steps_by_scaler:
        if scaler_step.place.excludes(step.place) and not scaler_step.place.excludes(scaled.place):
            return False  # `if use_amp: scaler.step(o) else: o.step()`: scaling may be off too
    if is_unscaled and not set(step.place.arms) <= set(scaled.place.arms):
        return False  # the step has a condition, such as that all gradients are finite
    text = _text_between(code, scaled, step)
    return not _may_unscale_by_hand(scaled.owner, text)


def _may_unscale_by_hand(scaler: str, text: str) -> bool:
    """Whether a text may unscale gradients by ``p.grad``, or by a function that gets the scaler."""
    return _is_passed_on(scaler, text) or re.search(r"get_scale|\.grad\b", text) is not None


def _stepped_in_passes(code: CodeReader) -> Mistakes:
    """Yield calls such as ``optimizer.first_step()`` of SAM that get scaled gradients.

    For each optimizer in each function, only the first call is reported.
    """
    reported = set()
    for event in code.by_kind["call"]:
        func = event.node.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in _TWO_PASS_METHODS:
            continue
        optimizer = code.key(func.value)
        scaled = code.scaled_before(event)  # the backward of a scaled loss
        if scaled is None or (event.unit, optimizer) in reported:
            continue
        text = _text_between(code, scaled, event)
        is_unscaled = "unscale" in text
        if is_unscaled and _ASKS_FOR_FINITE.search(text):
            continue  # the code may skip an overflow by hand
        if _may_unscale_by_hand(scaled.owner, text) or _may_unscale_between(code, scaled, event):
            continue
        reported.add((event.unit, optimizer))
        rest = "" if is_unscaled else ", nor unscale its gradients"
        advice = _STEPPED_IN_PASSES.sentence(
            scaler=scaled.owner, optimizer=optimizer, step=func.attr.value, rest=rest
        )
        yield event.node, advice


def _may_unscale_between(code: CodeReader, scaled: Event, step: Event) -> bool:
    """Whether a call between a backward and a step may unscale the gradients."""
    between = step.unit.between("call", scaled.order, step.order)
    return any(_may_unscale(code, event.node, scaled.owner) for event in between)

"""Mistakes with autocast and a loss scaler that the source of a file proves.

A mistake is told only if no path through the function makes it right: where a helper may do what
seems to be missing, or conditions may exclude each other, nothing is said. Each rule yields the
nodes that are wrong, and what to do; `_RULES` lists them.
"""

import re
from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, Event, last_part, of_kind
from amp_lab.migrate.rewriter import Rewriter

TRIGGERS = ("autocast", "GradScaler", "torch .scale(")  # a scaler may be passed to a function
_UNSCALES = re.compile(r"unscale|get_scale|_scale\b|\.grad\b|\binf\b")
_KEEPS = cst.Attribute | cst.AssignTarget | cst.Comparison | cst.ComparisonTarget | cst.If
_KEEPS |= cst.UnaryOperation | cst.BooleanOperation
Found = Iterator[tuple[cst.CSTNode, str]]


class Rule(Rewriter):
    """The mistakes in one file."""

    def run(self) -> None:
        """Ask each rule, if the file has anything of mixed precision."""
        about = ("autocast", "GradScaler", "scale")
        if not any(use.parts[-1] in about for use in self.tree.uses):
            return
        # reading costs as much as parsing, so it comes after that question
        code = CodeReader(self.tree)
        for rule in _RULES:
            for node, message in rule(code):
                self.say(node, "mistake", message)


def _clipped_scaled(code: CodeReader) -> Found:
    for clip in of_kind("clip", code.events):
        scaled = code.scaled_before(clip)
        if scaled is None or _may_be_unscaled(code, scaled, clip):
            continue
        later = of_kind("scaler step", clip.unit.events[clip.order :])
        steps = [e for e in later if e.of == scaled.of and not e.place.excludes(clip.place)]
        if steps and (code.both_run(clip, steps[0]) or code.both_run(scaled, steps[0])):
            what = f"call {scaled.of}.unscale_({steps[0].optimizer}) before"
            yield clip.node, f"scaled gradients are clipped: {what}"


def _may_be_unscaled(code: CodeReader, scaled: Event, clip: Event) -> bool:
    """Whether the gradients may not be scaled any more, or be those of another network."""
    for event in clip.unit.events[scaled.order + 1 : clip.order]:
        if event.kind in ("scaler step", "unscale"):
            return True
        if event.kind == "call" and _may_unscale(code, event.node, scaled.of):
            return True
    plain = [event.place for event in of_kind("backward", clip.unit.events)]
    if not all(at.excludes(clip.place) or at.excludes(scaled.place) for at in plain):
        return True
    text = code.text_between(scaled, clip)
    # divided by hand, here or by what is given the scaler
    is_divided = "get_scale" in code.tree.code(clip.unit.scope.node)
    return any((is_divided, _is_passed_on(scaled.of, text), _UNSCALES.search(text)))


def _is_passed_on(scaler: str, text: str) -> bool:
    return bool(re.search(rf"[(,=]\s*{re.escape(scaler)}\s*[,)]", text))


def _may_unscale(code: CodeReader, call: cst.Call, scaler: str) -> bool:
    """Whether a call may lead to `scaler.unscale_`, though it is not given the scaler."""
    parts = nodes.dotted(call.func) or ()
    function = code.functions.get(parts[-1]) if parts else None
    if function is not None:
        return "unscale" in code.tree.code(function)
    if _is_given(call, "self"):
        return scaler.startswith("self.")
    return len(parts) == 2 and parts[0] == scaler.partition(".")[0]


def _is_given(call: cst.Call, name: str) -> bool:
    """Whether a name by itself is an argument of a call."""
    return any(nodes.dotted(arg.value) == (name,) for arg in call.args)


def _stepped_beside(code: CodeReader) -> Found:
    for step in of_kind("step", code.events):
        is_step = code.is_optimizer(step.of) and "sched" not in step.of.lower()
        scaled = code.scaled_before(step) if is_step else None
        message = _wrong_with_step(code, scaled, step) if scaled is not None else None
        if message is not None:
            yield step.node, message


def _wrong_with_step(code: CodeReader, scaled: Event, step: Event) -> str | None:
    between = step.unit.events[scaled.order + 1 : step.order]
    done = {e.kind: e for e in between if e.optimizer == step.of}  # the last of each kind
    by_scaler = done.get("scaler step")
    if by_scaler is not None:
        is_twice = _steps_twice(code, by_scaler, step)
        advice = f"{by_scaler.of}.step({step.of}) has stepped it: delete {step.of}.step()"
        return advice if is_twice else None
    if not _steps_past(code, scaled, step, "unscale" in done):
        return None
    rest = "" if "unscale" in done else ", and unscale them"
    return (
        f"{step.of} steps past its scaler, which would skip gradients that are not finite"
        f"{rest}: write {scaled.of}.step({step.of})"
    )


def _steps_twice(code: CodeReader, by_scaler: Event, step: Event) -> bool:
    calls = of_kind("call", step.unit.events[by_scaler.order : step.order])
    if any("zero_grad" in code.tree.code(call.node.func) for call in calls):
        return False  # and gradients anew, by something that is not seen
    # else other batches may lie between
    return step.place.loops == by_scaler.place.loops and code.both_run(by_scaler, step)


def _steps_past(code: CodeReader, scaled: Event, step: Event, is_unscaled: bool) -> bool:
    """Whether scaled gradients are surely stepped with, and by the optimizer alone."""
    by_scaler = of_kind("scaler step", step.unit.events)
    same = [e for e in by_scaler if e.optimizer == step.of]
    if by_scaler and not same:
        return False  # it may be the optimizer of another network
    if any(e.place.excludes(step.place) and not e.place.excludes(scaled.place) for e in same):
        return False  # a choice between the two, and what it depends on may turn scaling off
    if is_unscaled and not set(step.place.arms) <= set(scaled.place.arms):
        return False  # only where a condition holds, such as that all gradients are finite
    text = code.text_between(scaled, step)
    return not _is_passed_on(scaled.of, text) and not re.search(r"get_scale|\.grad\b", text)


def _backward_in_autocast(code: CodeReader) -> Found:
    for event in code.events:
        if event.kind in ("scaled", "backward") and event.place.autocast:
            yield event.node, "backward runs inside autocast: end the block after the loss"


def _never_updated(code: CodeReader) -> Found:
    for name in code.made.keys() - code.disabled:
        own = {e.kind: e for e in code.events if last_part(e.of) == name}  # the last of each kind
        step = own.get("scaler step")
        if step is None or "scaled" not in own or "update" in own or _escapes(code, name):
            continue
        # Not every update is an event: a lambda runs later.
        if not any(use.parts[-2:] == (name, "update") for use in code.tree.uses):
            fixed = f"its scale stays what it was: call {step.of}.update() after the step"
            yield step.node, f"{step.of} is never updated, so {fixed}"


# Checkpoints.


def _saved_without(code: CodeReader) -> Found:
    scaled = {last_part(e.of) for e in code.events if e.kind == "scaled"}
    names = [name for name in code.made if name in scaled - code.disabled]
    state = rf"\b({'|'.join(names)})\s*\.\s*state_dict"  # it may be in a file of its own
    if not names or re.search(state, code.tree.text) or any(_escapes(code, name) for name in names):
        return
    for call in code.tree.calls:
        saved = _dict_saved(code, call)
        if saved is not None and _lacks_scaler(code, call, saved, names):
            yield (
                call,
                f"the checkpoint holds the optimizer, but not {names[0]}: save "
                f"{names[0]}.state_dict() too, or the scale starts anew",
            )


def _lacks_scaler(code: CodeReader, call: cst.Call, saved: cst.CSTNode, names: list[str]) -> bool:
    """Whether what is saved holds an optimizer that a scaler steps, and not the scaler."""
    text, scope = code.tree.code(saved), code.tree.calls[call]
    if any(name in text for name in names):
        return False
    owners = re.findall(r"([\w.]+)\.state_dict\(\)", text)  # what else is saved needs no scaler
    keys = [key for name in names for key in code.made[name]]
    if not any("." in key or scope.find(key) for key in keys):
        # the scaler is another function's, and so may the optimizer be
        owners = [owner for owner in owners if scope.find(owner) in code.stepped[owner]]
    return any(map(code.is_optimizer, owners))  # without an optimizer it is for inference


def _dict_saved(code: CodeReader, call: cst.Call) -> cst.CSTNode | None:
    """The dict, written out, that ``torch.save`` is given, or that a name was given once."""
    if not call.args or not _saves(code, call):
        return None
    node = call.args[0].value
    if isinstance(node, cst.Name):
        binding = code.tree.calls[call].only(node.value)
        # a key may be added later
        changed = re.search(rf"\b{node.value}\s*(\[|\.|\|=)", code.tree.text)
        if binding is None or changed or _is_handed_on(code, node.value):
            return None
        node = binding.value
    return node if _is_whole_dict(node) else None


def _saves(code: CodeReader, call: cst.Call) -> bool:
    return code.origin(call.func, code.tree.calls[call]) == "torch.save"


def _is_whole_dict(node: cst.CSTNode | None) -> bool:
    """Whether all keys of a dict can be read off its source."""
    if nodes.is_call_of(node, "dict"):
        return bool(node.args) and all(arg.keyword for arg in node.args)
    is_dict = isinstance(node, cst.Dict)
    return is_dict and all(isinstance(element, cst.DictElement) for element in node.elements)


# What leaves the file.


def _escapes(code: CodeReader, name: str) -> bool:
    """Whether code that is not seen here may get hold of a scaler."""
    is_attribute = any(key.startswith("self.") for key in code.made[name])
    if is_attribute and any(_hands_on_self(code, call) for call in code.tree.calls):
        return True
    uses = (use.node for use in code.tree.uses if use.parts[-1] == name)
    return not all(_stays(code, node, name) for node in uses)


def _hands_on_self(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call gives the object away, or is of a method from a class of another file."""
    parts = nodes.dotted(call.func) or ()
    # what gets the object may update its scaler
    if _is_given(call, "self") and parts != ("super",):
        return True
    if len(parts) != 2 or parts[0] != "self":
        return False
    return parts[1] not in code.functions and parts not in code.tree.assigned


def _stays(code: CodeReader, node: cst.CSTNode, name: str) -> bool:
    """Whether a use of a scaler leaves it in this file, and by its name."""
    parent = code.tree.parents[node]
    given = [last_part(code.key(target)) for target, _ in nodes.assignments(parent)]
    return isinstance(parent, _KEEPS) or (given != [] and {*given} == {name})


def _is_handed_on(code: CodeReader, name: str) -> bool:
    """Whether a call other than ``torch.save`` is given a dict, which it may add to."""
    return not all(_saves(code, call) for call in code.tree.calls if _is_given(call, name))


_RULES = (_clipped_scaled, _stepped_beside, _backward_in_autocast, _never_updated, _saved_without)

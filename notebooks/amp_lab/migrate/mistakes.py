"""Mistakes with autocast and a loss scaler that the source of a file proves.

A mistake is told only if no path through the function makes it right: where a helper may do what
seems to be missing, or conditions may exclude each other, nothing is said. Each rule yields the
nodes that are wrong, and what to do; `_RULES` lists them.
"""

import itertools
import re
from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate.call_flow import calls_of, escapes, is_handed_on, is_made_in, passed
from amp_lab.migrate.code_reader import CodeReader, Event, Unit, last_part
from amp_lab.migrate.nodes import dotted
from amp_lab.migrate.python_tree import Scope
from amp_lab.migrate.rewriter import Rewriter

TRIGGERS = ("autocast", "GradScaler", "torch .scale(")  # a scaler may be passed to a function
_UNSCALES = re.compile(r"unscale|get_scale|_scale\b|\.grad\b|\binf\b")
_STARTS_ANEW = re.compile(r"(?i)load_state_dict|reset|init|deepcopy|build|create|make|fresh")
_TRAINED = re.compile(r"(?i)model|net|optim|opt\b|train|agent|load_state_dict|deepcopy")
_TRAINS_ON = re.compile(r"(?i)\b(\w*epoch(?!s)\w*|ep|iteration|step|batch)\b")
_TRAINS_ANEW = re.compile(
    r"(?i)seed|trial|fold|run|repeat|config|precision|mode|scale|lr|rate|size|dtype|case"
)
Found = Iterator[tuple[cst.CSTNode, str]]


class Rule(Rewriter):
    """The mistakes in one file."""

    def run(self) -> None:
        """Ask each rule about each unit, if the file has anything of mixed precision."""
        about = ("autocast", "GradScaler", "scale")
        if not any(use.parts[-1] in about for use in self.tree.uses):
            return
        # reading costs as much as parsing, so it comes after that question
        code = CodeReader(self.tree)
        found = [rule(code, unit) for rule in _RULES for unit in code.units]
        found += [rule(code) for rule in _FILE_RULES]
        for node, message in itertools.chain(*found):
            self.say(node, "mistake", message)


# A scaler that is made anew.


def _made_in_loop(code: CodeReader, unit: Unit) -> Found:
    for made in unit.all("make"):
        if _is_made_each_turn(code, made) and _forgets(code, unit, made):
            yield (
                made.node,
                f"{made.of} is made anew in each turn of the loop, and forgets the scale it "
                "has found: make it once, before the loop",
            )


def _is_made_each_turn(code: CodeReader, made: Event) -> bool:
    if not made.place.loops or last_part(made.of) in code.disabled:
        return False
    # Under a condition in the loop, it may be made in the first turn alone.
    return not any(code.tree.is_in(arm, made.place.loops[-1]) for arm, _ in made.place.arms)


def _forgets(code: CodeReader, unit: Unit, made: Event) -> bool:
    """Whether the loop around trains on with what was made before it, by a scaler made in it."""
    loop = made.place.loops[-1]
    calls = [event.node for event in unit.all("call") if loop in event.place.loops]
    if _tries_anew(code, loop, made) or any(_starts_anew(code, call) for call in calls):
        return False
    steps = [e for e in unit.all("scaler step") if loop in e.place.loops and e.of == made.of]
    # a helper may step
    optimizers = [e.optimizer for e in steps] or _passed_along(code, calls, made.of, loop)
    return not all(is_made_in(code, unit.scope, key, loop) for key in optimizers)


def _tries_anew(code: CodeReader, loop: cst.CSTNode, made: Event) -> bool:
    """Whether each turn is a training of its own: over seeds, or with other arguments each time."""
    target = code.tree.code(loop.target) if isinstance(loop, cst.For) else ""
    return bool(_words(target) & _words(code.tree.code(made.node)) or _TRAINS_ANEW.search(target))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _starts_anew(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call may put model or optimizer back to their start; a meter's is none."""
    if not _STARTS_ANEW.search(code.tree.code(call.func)):
        return False
    parts = dotted(call.func)
    is_of_something = parts is not None and len(parts) > 1 and parts[0] not in ("self", "torch")
    return not is_of_something or bool(_TRAINED.search(".".join(parts)))


def _passed_along(
    code: CodeReader, calls: list[cst.Call], scaler: str, loop: cst.CSTNode
) -> list[str]:
    """The optimizers in calls that take the scaler too, in a loop over epochs or batches."""
    if not isinstance(loop, cst.For) or not _TRAINS_ON.search(code.tree.code(loop.target)):
        return []
    found = []
    for call in calls:
        keys = [code.key(arg.value) for arg in call.args]
        if scaler in keys:
            found += [key for key in keys if code.is_named_optimizer(key)]
    return found


def _made_in_each_call(code: CodeReader, unit: Unit) -> Found:
    """A scaler made in a function that a loop over epochs calls; the optimizer stays."""
    for made in unit.all("make") if isinstance(unit.node, cst.FunctionDef) else ():
        loop = _loop_that_calls(code, unit, made) if _is_own(code, unit, made) else None
        if loop is not None:
            yield (
                made.node,
                f"{made.of} is made anew in each call of {unit.node.name.value}(), in the "
                f"loop of line {code.tree.line(loop)}, and forgets the scale it has found: "
                "make it once, before that loop",
            )


def _is_own(code: CodeReader, unit: Unit, made: Event) -> bool:
    """Whether a scaler is the function's own, with a scale that nothing else sets or takes on."""
    bindings = unit.scope.bindings.get(made.of, ())
    if not bindings or any(isinstance(binding.node, cst.Param) for binding in bindings):
        return False
    if made.place.loops or made.of in code.disabled:
        return False
    if "init_scale" in code.tree.code(made.node) or escapes(code, made.of):
        return False
    keeps = r"load_state_dict|\breturn\b.*\b" + made.of
    return not re.search(keeps, code.tree.code(unit.node))


def _loop_that_calls(code: CodeReader, unit: Unit, made: Event) -> cst.For | None:
    """The first loop that calls the function to train on with an optimizer from outside it."""
    optimizers = [e.optimizer for e in unit.all("scaler step") if e.of == made.of]
    for call in calls_of(code, unit):
        loop = _loop_around(code, call)
        found = [passed(code, unit, call, optimizer) for optimizer in optimizers]
        # an optimizer that is not known may be new each time
        if loop is None or None in found or not found:
            continue
        if not any(is_made_in(code, scope, key, loop) for scope, key in found):
            return loop
    return None


def _loop_around(code: CodeReader, call: cst.Call) -> cst.For | None:
    """The loop over epochs or batches that a call stands in, if that trains on."""
    kinds = cst.FunctionDef | cst.Lambda | cst.While | cst.For
    loop = next((p for p, _ in code.tree.ancestors(call) if isinstance(p, kinds)), None)
    if not isinstance(loop, cst.For):
        return None
    target = code.tree.code(loop.target)
    if not _TRAINS_ON.search(target) or _TRAINS_ANEW.search(target):
        return None
    calls = (call for call in code.tree.calls if code.tree.is_in(call, loop))
    return None if any(_starts_anew(code, call) for call in calls) else loop


# Gradients that are still scaled.


def _clipped_scaled(code: CodeReader, unit: Unit) -> Found:
    for clip in unit.all("clip"):
        scaled = code.scaled_before(unit, clip)
        step = _step_after(unit, clip, scaled) if scaled is not None else None
        if step is None or not (code.both_run(clip, step) or code.both_run(scaled, step)):
            continue
        if not _may_be_unscaled(code, unit, scaled, clip):
            what = f"call {scaled.of}.unscale_({step.optimizer}) before"
            yield clip.node, f"scaled gradients are clipped: {what}"


def _step_after(unit: Unit, clip: Event, scaled: Event) -> Event | None:
    """The first step of the scaler that may follow."""
    later = (e for e in unit.events[clip.order :] if e.kind == "scaler step")
    return next((e for e in later if e.of == scaled.of and not e.place.excludes(clip.place)), None)


def _may_be_unscaled(code: CodeReader, unit: Unit, scaled: Event, clip: Event) -> bool:
    """Whether the gradients may not be scaled any more, or be those of another network."""
    for event in unit.events[scaled.order + 1 : clip.order]:
        if event.kind in ("scaler step", "unscale"):
            return True
        if event.kind == "call" and _may_unscale(code, event.node, scaled.of):
            return True
    for plain in unit.all("backward"):
        if not plain.place.excludes(clip.place) and not plain.place.excludes(scaled.place):
            return True
    text = code.text_between(scaled, clip)
    if "get_scale" in code.tree.code(unit.node) or _is_passed_on(scaled.of, text):
        return True  # divided by hand, here or by what is given the scaler
    return bool(_UNSCALES.search(text))


def _is_passed_on(scaler: str, text: str) -> bool:
    return bool(re.search(rf"[(,=]\s*{re.escape(scaler)}\s*[,)]", text))


def _may_unscale(code: CodeReader, call: cst.Call, scaler: str) -> bool:
    """Whether a call may lead to `scaler.unscale_`, though it is not given the scaler."""
    parts = dotted(call.func)
    function = code.functions.get(parts[-1]) if parts else None
    if function is not None:
        return "unscale" in code.tree.code(function)
    if any(dotted(arg.value) == ("self",) for arg in call.args):
        return scaler.startswith("self.")
    return parts is not None and len(parts) == 2 and parts[0] == scaler.partition(".")[0]


# Steps and backward passes.


def _stepped_beside(code: CodeReader, unit: Unit) -> Found:
    for step in unit.all("step"):
        is_step = code.is_optimizer(step.of) and "sched" not in step.of.lower()
        scaled = code.scaled_before(unit, step) if is_step else None
        message = _wrong_with_step(code, unit, scaled, step) if scaled is not None else None
        if message is not None:
            yield step.node, message


def _wrong_with_step(code: CodeReader, unit: Unit, scaled: Event, step: Event) -> str | None:
    between = unit.events[scaled.order + 1 : step.order]
    done = {e.kind: e for e in between if e.optimizer == step.of}  # the last of each kind
    by_scaler = done.get("scaler step")
    if by_scaler is not None:
        is_twice = _steps_twice(code, by_scaler, step, between)
        advice = f"{by_scaler.of}.step({step.of}) has stepped it: delete {step.of}.step()"
        return advice if is_twice else None
    if not _steps_past(code, unit, scaled, step, "unscale" in done):
        return None
    rest = "" if "unscale" in done else ", and unscale them"
    return (
        f"{step.of} steps past its scaler, which would skip gradients that are not finite"
        f"{rest}: write {scaled.of}.step({step.of})"
    )


def _steps_twice(code: CodeReader, by_scaler: Event, step: Event, between: list[Event]) -> bool:
    calls = (e.node.func for e in between if e.kind == "call" and e.order > by_scaler.order)
    if any("zero_grad" in code.tree.code(func) for func in calls):
        return False  # and gradients anew, by something that is not seen
    # else other batches may lie between
    return step.place.loops == by_scaler.place.loops and code.both_run(by_scaler, step)


def _steps_past(
    code: CodeReader, unit: Unit, scaled: Event, step: Event, is_unscaled: bool
) -> bool:
    """Whether scaled gradients are surely stepped with, and by the optimizer alone."""
    by_scaler = unit.all("scaler step")
    same = [e for e in by_scaler if e.optimizer == step.of]
    if by_scaler and not same:
        return False  # it may be the optimizer of another network
    if any(e.place.excludes(step.place) and not e.place.excludes(scaled.place) for e in same):
        return False  # a choice between the two, and what it depends on may turn scaling off
    if is_unscaled and not set(step.place.arms) <= set(scaled.place.arms):
        return False  # only where a condition holds, such as that all gradients are finite
    text = code.text_between(scaled, step)
    return not _is_passed_on(scaled.of, text) and not re.search(r"get_scale|\.grad\b", text)


def _backward_in_autocast(code: CodeReader, unit: Unit) -> Found:
    for event in unit.events:
        if event.kind in ("scaled", "backward") and event.place.autocast:
            yield event.node, "backward runs inside autocast: end the block after the loss"


def _never_updated(code: CodeReader) -> Found:
    updated = {use.parts[-2] for use in code.tree.uses if use.parts[1:][-1:] == ("update",)}
    updated |= {last_part(e.of) for e in code.events if e.kind == "update"}
    for name in code.made.keys() - updated - code.disabled:
        if not escapes(code, name) and (step := _step_of_scaled(code, name)):
            fixed = f"its scale stays what it was: call {step.of}.update() after the step"
            yield step.node, f"{step.of} is never updated, so {fixed}"


def _step_of_scaled(code: CodeReader, name: str) -> Event | None:
    """The last step of a scaler in the first function that scales with it too."""
    for unit in code.units:
        steps = [e for e in unit.all("scaler step") if last_part(e.of) == name]
        if steps and any(last_part(e.of) == name for e in unit.all("scaled")):
            return steps[-1]
    return None


# Checkpoints.


def _saved_without(code: CodeReader) -> Found:
    scaled = {last_part(e.of) for e in code.events if e.kind == "scaled"}
    names = [name for name in code.made if name in scaled - code.disabled]
    if not names or any(_is_saved(code, name) for name in names):
        return
    stepped = set(_stepped_outside(code, names))
    for call in code.tree.calls:
        saved = _dict_saved(code, call)
        if saved is not None and _lacks_scaler(code, call, saved, names, stepped):
            yield (
                call,
                f"the checkpoint holds the optimizer, but not {names[0]}: save "
                f"{names[0]}.state_dict() too, or the scale starts anew",
            )


def _is_saved(code: CodeReader, name: str) -> bool:
    """Whether a scaler's state is taken somewhere, or may be by code that is not seen."""
    state = rf"\b{name}\s*\.\s*state_dict"
    return bool(re.search(state, code.tree.text)) or escapes(code, name)


def _stepped_outside(code: CodeReader, names: list[str]) -> Iterator[tuple[Scope, str] | None]:
    """The optimizers outside the functions that step them with one of these scalers."""
    for unit in code.units:
        for event in unit.all("scaler step") if isinstance(unit.node, cst.FunctionDef) else ():
            for call in calls_of(code, unit) if last_part(event.of) in names else ():
                yield passed(code, unit, call, event.optimizer)


def _lacks_scaler(
    code: CodeReader, call: cst.Call, saved: cst.CSTNode, names: list[str], stepped: set
) -> bool:
    """Whether what is saved holds the optimizer of a scaler, and not the scaler."""
    text, scope = code.tree.code(saved), code.tree.scope_of[call]
    if any(name in text for name in names):
        return False
    owners = re.findall(r"([\w.]+)\.state_dict\(\)", text)  # what else is saved needs no scaler
    made = [event for name in names for event in code.made[name]]
    is_seen = any("." in event.of or scope.find(event.of) for event in made)
    if not is_seen and not any((scope.find(o), o) in stepped for o in owners):
        return False  # the scaler is another function's, and so is the optimizer
    return any(map(code.is_optimizer, owners))  # without an optimizer it is for inference


def _dict_saved(code: CodeReader, call: cst.Call) -> cst.CSTNode | None:
    """The dict, written out, that ``torch.save`` is given, or that a name was given once."""
    scope = code.tree.scope_of[call]
    if not call.args or code.origin(call.func, scope) != "torch.save":
        return None
    node = call.args[0].value
    if isinstance(node, cst.Name):
        binding = scope.only(node.value)
        # a key may be added later
        changed = re.search(rf"\b{node.value}\s*(\[|\.|\|=)", code.tree.text)
        if binding is None or changed or is_handed_on(code, node.value):
            return None
        node = binding.value
    return node if _is_whole_dict(node) else None


def _is_whole_dict(node: cst.CSTNode | None) -> bool:
    """Whether all keys of a dict can be read off its source."""
    if isinstance(node, cst.Call) and dotted(node.func) == ("dict",):
        return bool(node.args) and all(arg.keyword for arg in node.args)
    if not isinstance(node, cst.Dict):
        return False
    return not any(isinstance(element, cst.StarredDictElement) for element in node.elements)


_RULES = (
    _made_in_loop,
    _made_in_each_call,
    _clipped_scaled,
    _stepped_beside,
    _backward_in_autocast,
)
_FILE_RULES = (_never_updated, _saved_without)

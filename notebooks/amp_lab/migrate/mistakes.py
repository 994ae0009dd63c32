"""Mistakes with autocast and a loss scaler that the source of a file proves.

The statements of each function are read in their order, with the branches and loops around them. A
mistake is told only if no path through the function makes it right: where a helper may do what
seems to be missing, or conditions may exclude each other, nothing is said.
"""

import dataclasses
import re
from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate.python_tree import (
    Finding,
    Scope,
    Tree,
    assignments,
    below,
    children,
    dotted,
    is_false,
    leaves,
)
from amp_lab.migrate.torch_amp import OLD, OLD_MODULES

SCALERS = {name for name, (new, _) in OLD.items() if new == "GradScaler"}
SCALERS |= {"torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler"}
AUTOCASTS = {name for name, (new, _) in OLD.items() if new == "autocast"}
AUTOCASTS |= {"torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"}
CLIPS = {
    f"torch.nn.utils.{module}{name}"
    for module in ("", "clip_grad.")
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
}
_OPTIMIZER = re.compile(r"(?:^|_)(?:optimizer|optim|opt)(?:_|[A-Z0-9]|$)")
_ABOUT_AMP = re.compile(r"(?i)amp|scale|fp16|half|mixed|precision|float16|bf16|dtype|enabled")
_UNSCALES = re.compile(r"unscale|get_scale|_scale\b|\.grad\b")
_STARTS_ANEW = re.compile(r"(?i)load_state_dict|reset|init|deepcopy|build|create|make|fresh")
_TRAINED = re.compile(r"(?i)model|net|optim|opt\b|train|agent|load_state_dict|deepcopy")
_TRAINS_ON = re.compile(r"(?i)\b(\w*epoch(?!s)\w*|ep|iteration|step|batch)\b")
_TRAINS_ANEW = re.compile(
    r"(?i)seed|trial|fold|run|repeat|config|precision|mode|scale|lr|rate|size|dtype|case"
)
_NAMED_LOSS = re.compile(r"(?i)loss|err|cost|objective")
_NO_LOSS = {"self", "cls", "engine", "model_engine", "accelerator", "fabric", "manager", "trainer"}
_NO_LOSS |= {"model", "net", "module", "ctx", "layer"}
_OF_MODULES = {"parameters", "named_parameters", "modules", "children", "forward", "train", "eval"}
_OF_MODULES |= {"to", "cuda", "state_dict", "load_state_dict", "zero_grad", "register_buffer"}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a statement stands: the branches taken to it, the loops and the autocast around it."""

    arms: tuple[tuple[cst.CSTNode, int], ...] = ()
    loops: tuple[cst.CSTNode, ...] = ()
    autocast: bool = False

    def excludes(self, other: "_Place") -> bool:
        """Whether no path runs through both."""
        return any(a is b and i != j for a, i in self.arms for b, j in other.arms)


@dataclasses.dataclass(eq=False)
class _Event:
    kind: str  # make, scaled, backward, unscale, clip, scaler step, step, update, call
    node: cst.CSTNode
    place: _Place
    order: int
    of: str = ""  # the scaler, or the optimizer of a plain step
    optimizer: str = ""


@dataclasses.dataclass(eq=False)
class _Unit:
    """The module, or a function, and what happens in it."""

    node: cst.CSTNode
    scope: Scope
    events: list[_Event] = dataclasses.field(default_factory=list)
    scaled_names: dict[str, str] = dataclasses.field(default_factory=dict)

    def all(self, kind: str) -> list[_Event]:
        return [event for event in self.events if event.kind == kind]


def _star_of_amp(found: tuple[cst.Import | cst.ImportFrom, Scope]) -> str | None:
    """The module of mixed precision that a star import is of."""
    node, _ = found
    is_star = isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar)
    module = ".".join(dotted(node.module)) if is_star and not node.relative else ""
    return module if module in (*OLD_MODULES, "torch.amp") else None


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def find(tree: Tree) -> list[Finding]:
    """The mistakes in a file, by their lines."""
    if not any(use.parts[-1] in ("autocast", "GradScaler", "scale") for use in tree.uses):
        return []
    return list(dict.fromkeys(_Finder(tree).run()))


class _Finder:
    def __init__(self, tree: Tree):
        self.tree = tree
        self.units: list[_Unit] = []
        scopes = {id(scope.node): scope for scope in tree.scopes}
        self.scopes = scopes
        self.star = next(filter(None, map(_star_of_amp, tree.imports)), None)
        self.disabled: set[str] = set()
        self.made: dict[str, list[_Event]] = {}  # by the last part of the name
        self.names = {  # of scalers, by their last part
            _last(self._key(target))
            for call in tree.calls
            if self._origin(call.func, tree.scope_of[call]) in SCALERS
            for above, _ in tree.ancestors(call)
            for target, value in assignments(above)
            if any(part is call for part in below(value))
        }
        self._read(tree.module, _Place())
        self.events = [event for unit in self.units for event in unit.events]
        self.stepped = {e.optimizer for e in self.events if e.kind in ("scaler step", "unscale")}
        self.functions = {
            unit.node.name.value: unit.node
            for unit in self.units
            if isinstance(unit.node, cst.FunctionDef)
        }

    def run(self) -> Iterator[Finding]:
        for unit in self.units:
            for node, message in [
                *self._made_in_loop(unit),
                *self._made_in_each_call(unit),
                *self._clipped_scaled(unit),
                *self._stepped_beside(unit),
                *self._backward_in_autocast(unit),
            ]:
                yield Finding(self.tree.line(node), "mistake", message)
        for node, message in [*self._never_updated(), *self._saved_without()]:
            yield Finding(self.tree.line(node), "mistake", message)

    def _origin(self, node: cst.CSTNode, scope: Scope | None) -> str | None:
        """The dotted name that an expression stands for, also after ``amp = torch.cuda.amp``."""
        parts = dotted(node)
        if parts is None or scope is None:
            return None
        bound = scope.find(parts[0])
        if bound is None and parts[0] not in ("torch", "apex"):
            return ".".join((self.star, *parts)) if self.star else None
        bindings = bound.bindings[parts[0]] if bound is not None else []
        if len(bindings) == 1 and dotted(bindings[0].value) and bindings[0].value is not node:
            whole = self.tree.origin(bindings[0].value, bound)
            if whole is not None:
                return ".".join((whole, *parts[1:]))
        return self.tree.origin(node, scope)

    # Reading.

    def _read(self, node: cst.Module | cst.FunctionDef, place: _Place) -> None:
        unit = _Unit(node, self.scopes[id(node)])
        self.units.append(unit)
        self._read_block(node if isinstance(node, cst.Module) else node.body, place, unit)

    def _read_block(self, block: cst.CSTNode, place: _Place, unit: _Unit) -> None:
        for statement in block.body:
            self._read_statement(statement, place, unit)
            if isinstance(statement, cst.If):  # what follows is not reached through such a branch
                if leaves(statement.body):
                    place = dataclasses.replace(place, arms=(*place.arms, (statement, 1)))
                elif isinstance(statement.orelse, cst.Else) and leaves(statement.orelse.body):
                    place = dataclasses.replace(place, arms=(*place.arms, (statement, 0)))

    def _read_statement(self, node: cst.CSTNode, place: _Place, unit: _Unit) -> None:
        def arm(number: int) -> _Place:
            return dataclasses.replace(place, arms=(*place.arms, (node, number)))

        if isinstance(node, cst.FunctionDef):
            self._read(node, _Place(autocast=any(map(self._turns_on, self._decorators(node)))))
        elif isinstance(node, cst.ClassDef):
            self._read_block(node.body, place, unit)
        elif isinstance(node, cst.If):
            self._read_expression(node.test, place, unit)
            self._read_block(node.body, arm(0), unit)
            if isinstance(node.orelse, cst.If):
                self._read_statement(node.orelse, arm(1), unit)
            elif node.orelse is not None:
                self._read_block(node.orelse.body, arm(1), unit)
        elif isinstance(node, cst.For | cst.While):
            self._read_expression(
                node.iter if isinstance(node, cst.For) else node.test, place, unit
            )
            inside = dataclasses.replace(place, loops=(*place.loops, node))
            self._read_block(node.body, inside, unit)
            if node.orelse is not None:
                self._read_block(node.orelse.body, place, unit)
        elif isinstance(node, cst.With):
            for item in node.items:
                self._read_expression(item.item, place, unit)
                if call := self._autocast_of(item.item, unit.scope):
                    place = dataclasses.replace(place, autocast=self._is_on(call))
            self._read_block(node.body, place, unit)
        elif isinstance(node, cst.Try | cst.TryStar):
            self._read_block(node.body, arm(0), unit)
            for number, handler in enumerate(node.handlers, 1):
                self._read_block(handler.body, arm(number), unit)
            for rest in (node.orelse, node.finalbody):
                if rest is not None:
                    self._read_block(rest.body, place, unit)
        elif isinstance(node, cst.Match):
            for number, case in enumerate(node.cases):
                self._read_block(case.body, arm(number), unit)
        else:
            self._read_expression(node, place, unit)

    def _decorators(self, node: cst.FunctionDef) -> list[cst.BaseExpression]:
        return [decorator.decorator for decorator in node.decorators]

    def _turns_on(self, node: cst.BaseExpression) -> bool:
        return self._is_autocast(node, self.tree.scope_of.get(node)) and self._is_on(node)

    def _autocast_of(self, node: cst.BaseExpression, scope: Scope | None) -> cst.Call | None:
        """The call of autocast that an expression is, or that a name was given once."""
        if isinstance(node, cst.Name) and scope is not None:
            bound = scope.find(node.value)
            bindings = bound.bindings[node.value] if bound else []
            node = bindings[0].value if len(bindings) == 1 else None
        return node if node is not None and self._is_autocast(node, scope) else None

    def _is_autocast(self, node: cst.BaseExpression, scope: Scope | None) -> bool:
        return isinstance(node, cst.Call) and self._origin(node.func, scope) in AUTOCASTS

    def _is_on(self, call: cst.Call) -> bool:
        """Whether the call does not say that it is off."""
        old = self._origin(call.func, self.tree.scope_of[call]) in OLD
        place = 0 if old else 2
        given = [
            a.value for a in call.args if a.keyword is not None and a.keyword.value == "enabled"
        ]
        if len(call.args) > place and call.args[place].keyword is None:
            given.append(call.args[place].value)
        return not any(map(is_false, given))

    def _read_expression(self, node: cst.CSTNode, place: _Place, unit: _Unit) -> None:
        if isinstance(node, cst.Lambda):
            return
        for target, value in assignments(node):
            self._read_assignment(node, target, value, place, unit)
        for child in children(node):
            self._read_expression(child, place, unit)
        if isinstance(node, cst.Call):
            self._read_call(node, place, unit)

    def _read_assignment(self, node, target, value, place: _Place, unit: _Unit) -> None:
        parts = dotted(target)
        arms = (value.body, value.orelse) if isinstance(value, cst.IfExp) else (value,)
        calls = [arm for arm in arms if isinstance(arm, cst.Call)]
        if parts is None or not calls:
            return
        key, func = ".".join(parts), calls[0].func
        made = [call for call in calls if self._origin(call.func, unit.scope) in SCALERS]
        if made:
            if any(map(self._is_off, made)):
                self.disabled.add(_last(key))
            self._add(unit, "make", node, place, key)
            self.made.setdefault(_last(key), []).append(unit.events[-1])
        elif isinstance(func, cst.Attribute) and func.attr.value == "scale":
            scaler = self._key(func.value)
            if self._is_scaler(scaler):
                unit.scaled_names[key] = scaler

    def _is_off(self, call: cst.Call) -> bool:
        """Whether a scaler is made with ``enabled=False``."""
        is_old = self._origin(call.func, self.tree.scope_of[call]) in OLD
        at = 4 if is_old else 5
        given = [
            arg.value
            for i, arg in enumerate(call.args)
            if (arg.keyword.value == "enabled" if arg.keyword is not None else i == at)
        ]
        return any(map(is_false, given))

    def _add(self, unit: _Unit, kind: str, node, place: _Place, of="", optimizer="") -> None:
        unit.events.append(_Event(kind, node, place, len(unit.events), of, optimizer))

    def _key(self, node: cst.CSTNode) -> str:
        parts = dotted(node)
        return ".".join(parts) if parts else self.tree.code(node).strip()

    def _read_call(self, call: cst.Call, place: _Place, unit: _Unit) -> None:
        func = call.func
        if self._origin(func, unit.scope) in CLIPS:
            self._add(unit, "clip", call, place)
            return
        if self._origin(func, unit.scope) == "torch.autograd.backward":
            self._add(unit, "backward", call, place)
            return
        if not isinstance(func, cst.Attribute):
            self._add(unit, "call", call, place)
            return
        receiver, name = func.value, func.attr.value
        first = self._key(call.args[0].value) if call.args else ""
        if name == "backward":
            scaler = self._scaler_of(receiver, unit)
            if scaler is not None:
                self._add(unit, "scaled", call, place, scaler)
            elif self._is_loss(receiver, call):
                self._add(unit, "backward", call, place)
        elif name == "unscale_":
            self._add(unit, "unscale", call, place, self._key(receiver), first)
        elif name == "step" and call.args and self._is_scaler(self._key(receiver)):
            self._add(unit, "scaler step", call, place, self._key(receiver), first)
        elif name == "step":
            self._add(unit, "step", call, place, self._key(receiver))
        elif name == "update":
            self._add(unit, "update", call, place, self._key(receiver))
        else:
            self._add(unit, "call", call, place)

    def _is_scaler(self, key: str) -> bool:
        return "scal" in key.lower() or _last(key) in self.names

    def _scaler_of(self, receiver: cst.BaseExpression, unit: _Unit) -> str | None:
        """The scaler that a loss was scaled by, if it was."""
        func = receiver.func if isinstance(receiver, cst.Call) else None
        if isinstance(func, cst.Attribute) and func.attr.value == "scale":
            key = self._key(func.value)
            return key if self._is_scaler(key) else None
        parts = dotted(receiver)
        return unit.scaled_names.get(".".join(parts)) if parts else None

    @staticmethod
    def _is_loss(receiver: cst.BaseExpression, call: cst.Call) -> bool:
        parts = dotted(receiver)
        is_given = any(arg.keyword is None for arg in call.args)
        if is_given and not _NAMED_LOSS.search((parts or ("",))[-1]):
            return False  # engine.backward(loss), flow.backward(x)
        if parts is None:
            if isinstance(receiver, cst.Call):  # super().backward, a.get_model().backward
                return dotted(receiver.func) != ("super",)
            return True
        if parts[-1][:1].isupper():  # MyFunction.backward(ctx, gradient)
            return False
        if len(parts) == 1:
            return parts[0] not in _NO_LOSS
        return "loss" in parts[-1].lower()

    # Asking.

    def _is_optimizer(self, key: str) -> bool:
        if key in self.stepped:
            return True
        return bool(_OPTIMIZER.search(_last(key))) and "sched" not in key.lower()

    def _text_between(self, first: _Event, second: _Event) -> str:
        """The source from the end of one call to the end of another, without comments."""
        text = self.tree.text[self.tree.span(first.node)[1] : self.tree.span(second.node)[1]]
        return re.sub(r"#.*", "", text)

    def _tests(self, arms) -> list[tuple[str, int]]:
        return [
            (self.tree.code(node.test) if isinstance(node, cst.If) else "", number)
            for node, number in arms
        ]

    def _both_run(self, first: _Event, second: _Event) -> bool:
        """Whether a run that reaches the first can surely reach the second as well."""
        if first.place.excludes(second.place):
            return False
        of_first = self._tests(a for a in first.place.arms if a not in second.place.arms)
        of_second = self._tests(a for a in second.place.arms if a not in first.place.arms)
        words = set(re.findall(r"\w+", " ".join(test for test, _ in of_first)))
        for test, number in of_second:
            if (test, number) in of_first:
                continue
            if _ABOUT_AMP.search(test) or words & set(re.findall(r"[A-Za-z_]\w*", test)) - {
                "not",
                "self",
                "args",
                "None",
                "is",
            }:
                return False
        return True

    def _scaled_before(self, unit: _Unit, event: _Event) -> _Event | None:
        """The last scaled backward before an event that is on a way to it, in its loops."""
        for other in reversed(unit.events[: event.order]):
            if other.kind != "scaled" or other.place.excludes(event.place):
                continue
            if _last(other.of) in self.disabled:
                return None
            n = min(len(other.place.loops), len(event.place.loops))
            if other.place.loops[:n] != event.place.loops[:n] or not self._both_run(other, event):
                return None
            between = unit.events[other.order + 1 : event.order]
            if any(e.kind == "backward" and not e.place.excludes(other.place) for e in between):
                return None
            return other
        return None

    # The mistakes.

    def _made_in_loop(self, unit: _Unit) -> Iterator[tuple[cst.CSTNode, str]]:
        for made in unit.all("make"):
            if not made.place.loops or _last(made.of) in self.disabled:
                continue
            loop = made.place.loops[-1]
            inside = [e for e in unit.events if loop in e.place.loops]
            if any(
                child_arm for child_arm in made.place.arms if self._is_below(child_arm[0], loop)
            ):
                continue
            calls = [e.node for e in inside if e.kind == "call"]
            if any(self._starts_anew(call) for call in calls):
                continue
            target = self.tree.code(loop.target) if isinstance(loop, cst.For) else ""
            words = set(re.findall(r"\w+", target)) & set(
                re.findall(r"\w+", self.tree.code(made.node))
            )
            if words or _TRAINS_ANEW.search(target):
                continue
            steps = [e for e in inside if e.kind == "scaler step" and e.of == made.of]
            optimizers = [e.optimizer for e in steps] or self._passed_along(calls, made.of, loop)
            if any(not self._is_made_in(unit.scope, key, loop) for key in optimizers):
                yield (
                    made.node,
                    f"{made.of} is made anew in each turn of the loop, and forgets the scale it "
                    "has found: make it once, before the loop",
                )

    def _starts_anew(self, call: cst.Call) -> bool:
        """Whether a call may put model or optimizer back to their start; a meter's is none."""
        if not _STARTS_ANEW.search(self.tree.code(call.func)):
            return False
        parts = dotted(call.func)
        is_of_something = parts is not None and len(parts) > 1 and parts[0] not in ("self", "torch")
        return not is_of_something or bool(_TRAINED.search(".".join(parts)))

    def _passed_along(self, calls: list[cst.Call], scaler: str, loop) -> list[str]:
        """The optimizers in calls that take the scaler too, in a loop over epochs or batches."""
        if not isinstance(loop, cst.For):
            return []
        if not _TRAINS_ON.search(self.tree.code(loop.target)):
            return []
        found = []
        for call in calls:
            keys = [self._key(arg.value) for arg in call.args]
            if scaler in keys:
                found += [key for key in keys if _OPTIMIZER.search(_last(key))]
        return found

    def _is_below(self, node: cst.CSTNode, above: cst.CSTNode) -> bool:
        return any(parent is above for parent, _ in self.tree.ancestors(node))

    def _made_in_each_call(self, unit: _Unit) -> Iterator[tuple[cst.CSTNode, str]]:
        """A scaler made in a function that a loop over epochs calls; the optimizer stays."""
        if not isinstance(unit.node, cst.FunctionDef):
            return
        for made in unit.all("make"):
            code = self.tree.code(unit.node)
            bindings = unit.scope.bindings.get(made.of, ())
            if (
                not bindings
                or any(isinstance(binding.node, cst.Param) for binding in bindings)
                or made.place.loops
                or made.of in self.disabled
                or "init_scale" in self.tree.code(made.node)
                or re.search(r"load_state_dict|\breturn\b.*\b" + made.of, code)
                or self._escapes(made.of)
            ):
                continue
            steps = [e.optimizer for e in unit.all("scaler step") if e.of == made.of]
            for call in self._calls_of(unit):
                loop = self._loop_around(call)
                found = [self._passed(unit, call, optimizer) for optimizer in steps]
                if loop is None or None in found or not found:
                    continue
                if not any(self._is_made_in(scope, key, loop) for scope, key in found):
                    yield (
                        made.node,
                        f"{made.of} is made anew in each call of {unit.node.name.value}(), in the "
                        f"loop of line {self.tree.line(loop)}, and forgets the scale it has found: "
                        "make it once, before that loop",
                    )
                    break

    def _calls_of(self, unit: _Unit) -> Iterator[cst.Call]:
        """The calls of a function of this file, or of a method through ``self``."""
        name = unit.node.name.value
        for call in self.tree.calls:
            parts, scope = dotted(call.func), self.tree.scope_of[call]
            if unit.scope.parent.kind == "class":
                if parts == ("self", name):
                    yield call
            elif parts == (name,):
                home = scope.find(name)
                if home and [binding.node for binding in home.bindings[name]] == [unit.node]:
                    yield call

    def _loop_around(self, call: cst.Call) -> cst.For | None:
        """The loop over epochs or batches that a call stands in, if that trains on."""
        for parent, _ in self.tree.ancestors(call):
            if isinstance(parent, cst.FunctionDef | cst.Lambda | cst.While):
                return None
            if isinstance(parent, cst.For):
                target = self.tree.code(parent.target)
                if not _TRAINS_ON.search(target) or _TRAINS_ANEW.search(target):
                    return None
                calls = [call for call in self.tree.calls if self._is_below(call, parent)]
                return None if any(map(self._starts_anew, calls)) else parent
        return None

    def _passed(self, unit: _Unit, call: cst.Call, key: str) -> tuple[Scope, str] | None:
        """The variable outside a function that a name in it stands for in a call of it."""
        root, dot, _ = key.partition(".")
        home = unit.scope.find(root)
        if home is None or not re.fullmatch(r"[\w.]+", key):
            return None
        is_method = unit.scope.parent.kind == "class"
        params = [p.name.value for p in unit.node.params.params][is_method:]
        if home is not unit.scope or (dot and is_method and root == "self"):
            return home, key
        if key not in params:
            return None
        given = {
            params[i] if arg.keyword is None else arg.keyword.value: arg.value
            for i, arg in enumerate(call.args)
            if not arg.star and (arg.keyword is not None or i < len(params))
        }
        parts = dotted(given.get(key))
        scope = self.tree.scope_of[call].find(parts[0]) if parts else None
        return None if scope is None else (scope, ".".join(parts))

    def _is_made_in(self, scope: Scope, key: str, loop: cst.CSTNode) -> bool:
        root = re.match(r"\w*", key).group()
        home = scope.find(root)
        bindings = home.bindings[root] if home else ()
        if any(self._is_below(binding.node, loop) for binding in bindings):
            return True
        assigned = rf"(?m)^\s*([\w.]+\s*,\s*)*{re.escape(key)}\s*(,[^=(\n]*)?=[^=]"
        return bool(re.search(assigned, self.tree.code(loop)))

    def _clipped_scaled(self, unit: _Unit) -> Iterator[tuple[cst.CSTNode, str]]:
        for clip in unit.all("clip"):
            scaled = self._scaled_before(unit, clip)
            if scaled is None:
                continue
            later = [
                e
                for e in unit.events[clip.order :]
                if e.kind == "scaler step"
                and e.of == scaled.of
                and not e.place.excludes(clip.place)
            ]
            between = unit.events[scaled.order + 1 : clip.order]
            if not later or any(e.kind in ("scaler step", "unscale") for e in between):
                continue
            if any(self._may_unscale(e.node, scaled.of) for e in between if e.kind == "call"):
                continue
            plain = any(
                not e.place.excludes(clip.place) and not e.place.excludes(scaled.place)
                for e in unit.all("backward")
            )
            if plain or "get_scale" in self.tree.code(unit.node):
                continue  # gradients of another network, or divided by hand
            if not self._both_run(clip, later[0]) and not self._both_run(scaled, later[0]):
                continue
            text = self._text_between(scaled, clip)
            passed_on = re.search(rf"[(,=]\s*{re.escape(scaled.of)}\s*[,)]", text)
            if _UNSCALES.search(text) or passed_on or re.search(r"\binf\b", text):
                continue
            yield (
                clip.node,
                f"scaled gradients are clipped: call {scaled.of}.unscale_({later[0].optimizer}) "
                "before",
            )

    def _may_unscale(self, call: cst.Call, scaler: str) -> bool:
        """Whether a call may lead to `scaler.unscale_`, though it is not given the scaler."""
        parts = dotted(call.func)
        function = self.functions.get(parts[-1]) if parts else None
        if function is not None:
            return "unscale" in self.tree.code(function)
        if any(dotted(arg.value) == ("self",) for arg in call.args):
            return scaler.startswith("self.")
        return parts is not None and len(parts) == 2 and parts[0] == scaler.partition(".")[0]

    def _stepped_beside(self, unit: _Unit) -> Iterator[tuple[cst.CSTNode, str]]:
        for step in unit.all("step"):
            if not self._is_optimizer(step.of):
                continue
            scaled = self._scaled_before(unit, step)
            if scaled is None or self._is_scheduler(step.of):
                continue
            between = unit.events[scaled.order + 1 : step.order]
            steps = [e for e in between if e.kind == "scaler step"]
            of_it = [e for e in steps if e.optimizer == step.of]
            others = {e.optimizer for e in unit.all("scaler step")} - {step.of}
            if of_it:
                after = (e for e in between if e.kind == "call" and e.order > of_it[-1].order)
                if any("zero_grad" in self.tree.code(e.node.func) for e in after):
                    continue  # and gradients anew, by something that is not seen
                if step.place.loops != of_it[-1].place.loops:
                    continue
                if self._both_run(of_it[-1], step):
                    yield (
                        step.node,
                        f"{of_it[-1].of}.step({step.of}) has stepped it: delete {step.of}.step()",
                    )
                continue
            if others and step.of not in {e.optimizer for e in unit.all("scaler step")}:
                continue
            if any(
                e.kind == "scaler step"
                and e.optimizer == step.of
                and e.place.excludes(step.place)
                and not e.place.excludes(scaled.place)
                for e in unit.events
            ):
                continue  # a choice between the two, and what it depends on may turn scaling off
            unscaled = any(e.kind == "unscale" and e.optimizer == step.of for e in between)
            own = [arm for arm in step.place.arms if arm not in scaled.place.arms]
            text = self._text_between(scaled, step)
            passed_on = re.search(rf"[(,=]\s*{re.escape(scaled.of)}\s*[,)]", text)
            if (unscaled and own) or passed_on or re.search(r"get_scale|\.grad\b", text):
                continue
            yield (
                step.node,
                f"{step.of} steps past its scaler, which would skip gradients that are not finite"
                f"{'' if unscaled else ', and unscale them'}: write {scaled.of}.step({step.of})",
            )

    def _is_scheduler(self, key: str) -> bool:
        return "sched" in key.lower()

    def _backward_in_autocast(self, unit: _Unit) -> Iterator[tuple[cst.CSTNode, str]]:
        for event in unit.events:
            if event.kind in ("scaled", "backward") and event.place.autocast:
                yield event.node, "backward runs inside autocast: end the block after the loss"

    def _never_updated(self) -> Iterator[tuple[cst.CSTNode, str]]:
        updated = {use.parts[-2] for use in self.tree.uses if use.parts[1:][-1:] == ("update",)}
        updated |= {_last(e.of) for e in self.events if e.kind == "update"}
        for name in self.made:
            if name in updated or name in self.disabled or self._escapes(name):
                continue
            for unit in self.units:
                steps = [e for e in unit.all("scaler step") if _last(e.of) == name]
                scaled = any(_last(e.of) == name for e in unit.all("scaled"))
                if steps and scaled:
                    yield (
                        steps[-1].node,
                        f"{steps[-1].of} is never updated, so its scale stays what it was: call "
                        f"{steps[-1].of}.update() after the step",
                    )
                    break

    def _escapes(self, name: str) -> bool:
        """Whether code that is not seen here may get hold of a scaler."""
        if any(event.of.startswith("self.") for event in self.made.get(name, ())):
            for call in self.tree.calls:
                is_given = any(dotted(arg.value) == ("self",) for arg in call.args)
                parts = dotted(call.func) or ()
                is_inherited = len(parts) == 2 and parts[0] == "self" and self._is_unknown(parts[1])
                if (is_given and parts != ("super",)) or is_inherited:
                    return True
        return any(
            use.parts[-1] == name and not self._stays(use.node, name) for use in self.tree.uses
        )

    def _is_unknown(self, method: str) -> bool:
        """Whether a method comes from a class of another file, and not from one of torch.nn."""
        if method in self.functions or ("self", method) in self.tree.assigned:
            return False
        return method not in _OF_MODULES

    def _stays(self, node: cst.CSTNode, name: str) -> bool:
        parents = self.tree.parents
        parent = parents[node]
        if isinstance(parent, cst.Attribute | cst.AssignTarget):
            return True
        if isinstance(parent, cst.Arg):
            call = parents[parent]
            function = (
                self.functions.get(self._key(call.func)) if isinstance(call, cst.Call) else None
            )
            if function is None:
                return False
            return name in {
                p.name.value for p in (*function.params.params, *function.params.kwonly_params)
            }
        if isinstance(parent, cst.Assign | cst.AnnAssign):
            targets = parent.targets if isinstance(parent, cst.Assign) else [parent]
            return all(_last(self._key(t.target)) == name for t in targets)
        tests = cst.Comparison | cst.ComparisonTarget | cst.If | cst.UnaryOperation
        return isinstance(parent, tests | cst.BooleanOperation)

    def _saved_without(self) -> Iterator[tuple[cst.CSTNode, str]]:
        scaled = {_last(e.of) for e in self.events if e.kind == "scaled"}
        names = [n for n in self.made if n in scaled and n not in self.disabled]
        code = self.tree.text
        if not names or any(
            re.search(rf"\b{name}\s*\.\s*state_dict", code) or self._escapes(name) for name in names
        ):
            return
        stepped = {
            self._passed(unit, call, event.optimizer)
            for unit in self.units
            if isinstance(unit.node, cst.FunctionDef)
            for event in unit.all("scaler step")
            if _last(event.of) in names
            for call in self._calls_of(unit)
        }
        for call in self.tree.calls:
            scope = self.tree.scope_of[call]
            if self._origin(call.func, scope) != "torch.save" or not call.args:
                continue
            is_seen = any("." in e.of or scope.find(e.of) for n in names for e in self.made[n])
            saved = self._dict(call.args[0].value, self.tree.scope_of[call])
            if saved is None:
                continue
            text = self.tree.code(saved)
            owners = re.findall(r"([\w.]+)\.state_dict\(\)", text)
            if not is_seen and not any(
                (scope.find(o), o) in stepped for o in owners if scope.find(o)
            ):
                continue  # the scaler is another function's, and so is the optimizer
            if any(map(self._is_optimizer, owners)) and not any(name in text for name in names):
                yield (
                    call,
                    f"the checkpoint holds the optimizer, but not {names[0]}: save "
                    f"{names[0]}.state_dict() too, or the scale starts anew",
                )

    def _dict(self, node: cst.BaseExpression, scope: Scope) -> cst.Dict | cst.Call | None:
        """The dict, written out, that an expression is, or that a name was given once."""
        if isinstance(node, cst.Name):
            bound = scope.find(node.value)
            bindings = bound.bindings[node.value] if bound else []
            changed = re.search(rf"\b{node.value}\s*(\[|\.|\|=)", self.tree.text)
            handed_on = any(
                dotted(arg.value) == (node.value,)
                for call in self.tree.calls
                if self._origin(call.func, self.tree.scope_of[call]) != "torch.save"
                for arg in call.args
            )
            if len(bindings) != 1 or changed or handed_on or bindings[0].value is None:
                return None
            node = bindings[0].value
        if isinstance(node, cst.Call) and dotted(node.func) == ("dict",):
            return node if node.args and all(arg.keyword for arg in node.args) else None
        has_star = isinstance(node, cst.Dict) and any(
            isinstance(e, cst.StarredDictElement) for e in node.elements
        )
        return node if isinstance(node, cst.Dict) and not has_star else None

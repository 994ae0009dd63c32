"""What a file does with autocast and a loss scaler, as events in the order of its statements.

The statements of each function are read with the branches, loops and autocast around them, so that
a rule can ask what surely runs before what.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable

import libcst as cst

from amp_lab.migrate.nodes import (
    arguments,
    assignments,
    children,
    dotted,
    is_false,
    is_star,
    leaves,
    module_of,
)
from amp_lab.migrate.python_tree import Scope, Tree
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
_NAMED_LOSS = re.compile(r"(?i)loss|err|cost|objective")
_NO_LOSS = {"self", "cls", "engine", "model_engine", "accelerator", "fabric", "manager", "trainer"}
_NO_LOSS |= {"model", "net", "module", "ctx", "layer"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a statement stands: the branches taken to it, the loops and the autocast around it."""

    arms: tuple[tuple[cst.CSTNode, int], ...] = ()
    loops: tuple[cst.CSTNode, ...] = ()
    autocast: bool = False

    def excludes(self, other: "Place") -> bool:
        """Whether no path runs through both."""
        return any(a is b and i != j for a, i in self.arms for b, j in other.arms)

    def in_arm(self, node: cst.CSTNode, number: int) -> "Place":
        """This place, in one of the branches of a statement."""
        return dataclasses.replace(self, arms=(*self.arms, (node, number)))


@dataclasses.dataclass(eq=False)
class Event:
    """Something done with a scaler, an optimizer or a gradient, or any other call."""

    kind: str
    """``scaled``, ``backward``, ``unscale``, ``clip``, ``scaler step``, ``step``,
    ``update`` or ``call``; empty for what is none of them.
    """
    node: cst.Call
    place: Place
    order: int
    of: str = ""
    """The scaler, or the optimizer of a plain step."""
    optimizer: str = ""


@dataclasses.dataclass(eq=False)
class Unit:
    """The module, or a function, and what happens in it."""

    node: cst.Module | cst.FunctionDef
    scope: Scope
    events: list[Event] = dataclasses.field(default_factory=list)
    scaled_names: dict[str, str] = dataclasses.field(default_factory=dict)

    def all(self, kind: str) -> list[Event]:
        """The events of a kind, in their order."""
        return [event for event in self.events if event.kind == kind]


def last_part(key: str) -> str:
    """``scaler`` of ``self.scaler``."""
    return key.rpartition(".")[2]


class CodeReader:
    """The units of a file, the module first, and what is made and stepped in them."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.units: list[Unit] = []
        self.scopes = {id(scope.node): scope for scope in tree.scopes}
        stars = {module_of(node) for node, _ in tree.imports if is_star(node)}
        self.star = min(stars & {*OLD_MODULES, "torch.amp"}, default=None)
        self.disabled: set[str] = set()  # scalers that are made with enabled=False
        self.made: defaultdict[str, set[str]] = defaultdict(set)  # by the last part of the name
        self._find_scalers()
        # What a scaler steps is an optimizer, whatever it is called: where each is bound.
        self.stepped: defaultdict[str, set[Scope | None]] = defaultdict(set)
        self._read_unit(tree.module, Place())  # it reads every function that it meets as well
        self.events = [event for unit in self.units for event in unit.events]
        nodes = [unit.node for unit in self.units]
        self.functions = {n.name.value: n for n in nodes if isinstance(n, cst.FunctionDef)}

    def _find_scalers(self) -> None:
        for parts, values in self.tree.assigned.items():
            for value in values:
                # GradScaler() if fp16 else None
                arms = (value.body, value.orelse) if isinstance(value, cst.IfExp) else (value,)
                calls = [arm for arm in arms if isinstance(arm, cst.Call)]
                self._note_scaler(".".join(parts), calls)

    def _note_scaler(self, key: str, calls: list[cst.Call]) -> None:
        made = [c for c in calls if self.origin(c.func, self.tree.scope_of[c]) in SCALERS]
        if made:
            self.made[last_part(key)].add(key)
            if any(self._is_off(call, 4, 5) for call in made):
                self.disabled.add(last_part(key))

    def origin(self, node: cst.CSTNode | None, scope: Scope | None) -> str | None:
        """The dotted name that an expression stands for, also after ``amp = torch.cuda.amp``."""
        parts = dotted(node)
        if parts is None or scope is None:
            return None
        bound = scope.find(parts[0])
        if bound is None and parts[0] not in ("torch", "apex"):
            return ".".join((self.star, *parts)) if self.star else None
        binding = scope.only(parts[0])
        if bound is not None and binding is not None and binding.value is not node:
            whole = bound.origin(binding.value)
            if whole is not None:
                return ".".join((whole, *parts[1:]))
        return scope.origin(node)

    def _read_unit(self, node: cst.Module | cst.FunctionDef, place: Place) -> None:
        unit = Unit(node, self.scopes[id(node)])
        self.units.append(unit)
        self._read_block(node if isinstance(node, cst.Module) else node.body, place, unit)

    def _read_block(self, block: cst.Module | cst.BaseSuite, place: Place, unit: Unit) -> None:
        for statement in block.body:
            self._read_statement(statement, place, unit)
            if isinstance(statement, cst.If):  # what follows is not reached through such a branch
                if leaves(statement.body):
                    place = place.in_arm(statement, 1)
                elif isinstance(statement.orelse, cst.Else) and leaves(statement.orelse.body):
                    place = place.in_arm(statement, 0)

    def _read_statement(self, node: cst.CSTNode, place: Place, unit: Unit) -> None:
        read = _STATEMENTS.get(type(node), CodeReader._read_expression)
        read(self, node, place, unit)

    def _read_function(self, node: cst.FunctionDef, place: Place, unit: Unit) -> None:
        calls = [self._autocast_of(item.decorator, unit.scope) for item in node.decorators]
        is_on = any(call is not None and not self._is_off(call, 0, 2) for call in calls)
        self._read_unit(node, Place(autocast=is_on))  # it runs elsewhere than where it stands

    def _read_class(self, node: cst.ClassDef, place: Place, unit: Unit) -> None:
        self._read_block(node.body, place, unit)

    def _read_if(self, node: cst.If, place: Place, unit: Unit) -> None:
        self._read_expression(node.test, place, unit)
        self._read_block(node.body, place.in_arm(node, 0), unit)
        if isinstance(node.orelse, cst.If):
            self._read_statement(node.orelse, place.in_arm(node, 1), unit)
        elif node.orelse is not None:
            self._read_block(node.orelse.body, place.in_arm(node, 1), unit)

    def _read_loop(self, node: cst.For | cst.While, place: Place, unit: Unit) -> None:
        head = node.iter if isinstance(node, cst.For) else node.test
        self._read_expression(head, place, unit)
        self._read_block(node.body, dataclasses.replace(place, loops=(*place.loops, node)), unit)
        if node.orelse is not None:
            self._read_block(node.orelse.body, place, unit)

    def _read_with(self, node: cst.With, place: Place, unit: Unit) -> None:
        for item in node.items:
            self._read_expression(item.item, place, unit)
            call = self._autocast_of(item.item, unit.scope)
            if call is not None:
                place = dataclasses.replace(place, autocast=not self._is_off(call, 0, 2))
        self._read_block(node.body, place, unit)

    def _read_arms(self, node: cst.Try | cst.TryStar | cst.Match, place: Place, unit: Unit) -> None:
        arms = node.cases if isinstance(node, cst.Match) else (node, *node.handlers)
        for number, arm in enumerate(arms):  # a handler runs in place of the rest
            self._read_block(arm.body, place.in_arm(node, number), unit)
        for part in () if isinstance(node, cst.Match) else (node.orelse, node.finalbody):
            if part is not None:
                self._read_block(part.body, place, unit)

    def _autocast_of(self, node: cst.CSTNode | None, scope: Scope | None) -> cst.Call | None:
        """The call of autocast that an expression is, or that a name was given once."""
        if isinstance(node, cst.Name) and scope is not None:
            binding = scope.only(node.value)
            node = binding.value if binding is not None else None
        is_call = isinstance(node, cst.Call) and self.origin(node.func, scope) in AUTOCASTS
        return node if is_call else None

    def _is_off(self, call: cst.Call, old_place: int, new_place: int) -> bool:
        """Whether a call has ``enabled=False``, by keyword or as the argument at its place."""
        is_old = self.origin(call.func, self.tree.scope_of[call]) in OLD
        # the old classes had no device before it
        names = [""] * (old_place if is_old else new_place) + ["enabled"]
        return is_false(arguments(call, names).get("enabled"))

    def _read_expression(self, node: cst.CSTNode, place: Place, unit: Unit) -> None:
        if isinstance(node, cst.Lambda):
            return
        for target, value in assignments(node):
            scaler = self._scaler_in(value)
            if scaler is not None:
                unit.scaled_names[self.key(target)] = scaler
        for child in children(node):
            self._read_expression(child, place, unit)
        if isinstance(node, cst.Call):
            kind, *names = self._kind(node, unit)
            unit.events.append(Event(kind, node, place, len(unit.events), *names))
            if kind in ("scaler step", "unscale"):
                self.stepped[names[1]].add(unit.scope.find(names[1]))

    def key(self, node: cst.CSTNode) -> str:
        """An expression as its dotted name, or its code if it is none."""
        parts = dotted(node)
        return ".".join(parts) if parts else self.tree.code(node).strip()

    def _kind(self, call: cst.Call, unit: Unit) -> tuple[str, str, str]:
        """The kind of event that a call is, its scaler or optimizer, and what a scaler steps."""
        func, origin = call.func, self.origin(call.func, unit.scope)
        if origin in CLIPS:
            return "clip", "", ""
        if origin == "torch.autograd.backward":
            return "backward", "", ""
        if not isinstance(func, cst.Attribute):
            return "call", "", ""
        name, key = func.attr.value, self.key(func.value)
        first = self.key(call.args[0].value) if call.args else ""
        if name == "backward":
            scaler = unit.scaled_names.get(key) or self._scaler_in(func.value)
            if scaler is not None:
                return "scaled", scaler, ""
            return "backward" if self._is_loss(func.value, call) else "", "", ""
        if name == "unscale_":
            return "unscale", key, first
        if name == "step" and first and self._is_scaler(key):
            return "scaler step", key, first
        return (name, key, "") if name in ("step", "update") else ("call", "", "")

    def _is_scaler(self, key: str) -> bool:
        return "scal" in key.lower() or last_part(key) in self.made  # it may be a parameter

    def _scaler_in(self, node: cst.CSTNode) -> str | None:
        func = node.func if isinstance(node, cst.Call) else None
        if not isinstance(func, cst.Attribute) or func.attr.value != "scale":
            return None
        key = self.key(func.value)
        return key if self._is_scaler(key) else None

    @staticmethod
    def _is_loss(receiver: cst.BaseExpression, call: cst.Call) -> bool:
        parts = dotted(receiver)
        is_given = any(arg.keyword is None for arg in call.args)
        if is_given and not _NAMED_LOSS.search((parts or ("",))[-1]):
            return False  # engine.backward(loss), flow.backward(x)
        if parts is None:  # super().backward, a.get_model().backward
            return not isinstance(receiver, cst.Call) or dotted(receiver.func) != ("super",)
        if parts[-1][:1].isupper():  # MyFunction.backward(ctx, gradient)
            return False
        return parts[0] not in _NO_LOSS if len(parts) == 1 else "loss" in parts[-1].lower()

    def is_optimizer(self, key: str) -> bool:
        """Whether a name is that of an optimizer, as far as names and steps tell."""
        is_named = bool(_OPTIMIZER.search(last_part(key))) and "sched" not in key.lower()
        return is_named or key in self.stepped

    def text_between(self, first: Event, second: Event) -> str:
        """The source from the end of one call to the end of another, without comments."""
        text = self.tree.text[self.tree.span(first.node)[1] : self.tree.span(second.node)[1]]
        return re.sub(r"#.*", "", text)  # a comment that names unscale_ unscales nothing

    def both_run(self, first: Event, second: Event) -> bool:
        """Whether a run that reaches the first can surely reach the second as well."""
        if first.place.excludes(second.place):
            return False
        of_first = self._tests(first.place, second.place)
        words = set(re.findall(r"\w+", " ".join(test for test, _ in of_first)))
        for test, number in self._tests(second.place, first.place):
            if (test, number) in of_first:  # the same question, asked twice
                continue
            shared = words & set(re.findall(r"[A-Za-z_]\w*", test))
            if _ABOUT_AMP.search(test) or shared - {"not", "self", "args", "None", "is"}:
                return False  # the two conditions may exclude each other
        return True

    def _tests(self, place: Place, other: Place) -> list[tuple[str, int]]:
        """The conditions on the way to a place that are not on the way to another one too."""
        own = [arm for arm in place.arms if arm not in other.arms]
        return [(self.tree.code(n.test) if isinstance(n, cst.If) else "", i) for n, i in own]

    def scaled_before(self, unit: Unit, event: Event) -> Event | None:
        """The last scaled backward before an event that is on a way to it, in its loops."""
        before = [e for e in unit.events[: event.order] if e.kind == "scaled"]
        scaled = next((e for e in reversed(before) if not e.place.excludes(event.place)), None)
        if scaled is None or last_part(scaled.of) in self.disabled:
            return None
        # One may stand in a loop inside the other's, but not in a loop beside it.
        pairs = zip(scaled.place.loops, event.place.loops, strict=False)
        if any(a is not b for a, b in pairs) or not self.both_run(scaled, event):
            return None
        later = [e for e in unit.events[scaled.order : event.order] if e.kind == "backward"]
        # What is clipped or stepped may be the gradients of a plain backward in between.
        return scaled if all(e.place.excludes(scaled.place) for e in later) else None


_STATEMENTS: dict[type[cst.CSTNode], Callable[..., None]] = {
    cst.FunctionDef: CodeReader._read_function,
    cst.ClassDef: CodeReader._read_class,
    cst.If: CodeReader._read_if,
    cst.For: CodeReader._read_loop,
    cst.While: CodeReader._read_loop,
    cst.With: CodeReader._read_with,
    cst.Try: CodeReader._read_arms,
    cst.TryStar: CodeReader._read_arms,
    cst.Match: CodeReader._read_arms,
}

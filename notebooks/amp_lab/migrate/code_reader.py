"""What a file does with autocast and a loss scaler, as events in the order of its statements.

The statements of each function are read with the branches, loops and autocast around them, so that
a rule can ask what surely runs before what.
"""

import dataclasses
import functools
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.amp_names import NEW, OLD, OLD_MODULES
from amp_lab.migrate.context_functions import contexts_of
from amp_lab.migrate.python_tree import Scope, Tree

# Each class with the place of `enabled` among its arguments: those of old had no device before it.
SCALERS = {origin: 4 for origin, (name, _) in OLD.items() if name == "GradScaler"}
SCALERS |= {"torch.amp.GradScaler": 5, "torch.amp.grad_scaler.GradScaler": 5}
AUTOCASTS = {origin: 0 for origin, (name, _) in OLD.items() if name == "autocast"}
AUTOCASTS |= {origin: 2 for origin, name in NEW.items() if name == "autocast"}
AUTOCASTS |= {"torch.amp.autocast_mode.autocast": 2}
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
_KEEPS = cst.Attribute | cst.AssignTarget | cst.Comparison | cst.ComparisonTarget | cst.If
_KEEPS |= cst.UnaryOperation | cst.BooleanOperation
_WORDS = re.compile(r"[A-Za-z_]\w*")
Found = Iterator[tuple[cst.CSTNode, str]]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a statement stands: the branches taken to it, the loops and the autocast around it."""

    arms: tuple[tuple[cst.CSTNode, int], ...] = ()
    loops: tuple[cst.CSTNode, ...] = ()
    autocast: cst.Call | None = None  # what opens the innermost one that is on
    autocast_loops: int = 0  # so many of the loops are around its block

    def excludes(self, other: "Place") -> bool:
        """Whether no path runs through both."""
        return any(a is b and i != j for a, i in self.arms for b, j in other.arms)

    @property
    def repeats_in_autocast(self) -> bool:
        """Whether autocast is on around a loop that this is in."""
        return self.autocast is not None and len(self.loops) > self.autocast_loops

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
    unit: "Unit"
    order: int  # its number among the events of its unit
    of: str  # the scaler, or the optimizer of a plain step
    optimizer: str


@dataclasses.dataclass(frozen=True)
class Exit:
    """A ``continue`` or ``return``."""

    node: cst.CSTNode
    place: Place
    order: int  # the number of events of its unit before it


@dataclasses.dataclass(eq=False)
class Unit:
    """The module, or a function, and what happens in it."""

    scope: Scope
    events: list[Event] = dataclasses.field(default_factory=list)
    exits: list[Exit] = dataclasses.field(default_factory=list)
    scaled_names: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def by_kind(self) -> defaultdict[str, list[Event]]:
        """The events of each kind, in their order; to be asked for when all of them are there."""
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.kind].append(event)
        return found

    @functools.cached_property
    def steps_of(self) -> defaultdict[str, list[Event]]:
        """The steps by a scaler, by their optimizer."""
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.by_kind["scaler step"]:
            found[event.optimizer].append(event)
        return found

    @functools.cached_property
    def by_scaler(self) -> defaultdict[tuple[str, str], list[Event]]:
        """The events of each kind and scaler, in their order."""
        found: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.kind, event.of].append(event)
        return found

    @functools.cached_property
    def by_loop(self) -> defaultdict[tuple[str, str, tuple[cst.CSTNode, ...]], list[Event]]:
        """The events of each kind and scaler in a loop and those inside it, by all its loops."""
        found: defaultdict[tuple[str, str, tuple[cst.CSTNode, ...]], list[Event]]
        found = defaultdict(list)
        for event in self.events:
            loops = event.place.loops
            for depth in range(len(loops) + 1):
                found[event.kind, event.of, loops[:depth]].append(event)
        return found

    @functools.cached_property
    def exits_of(self) -> defaultdict[tuple[cst.CSTNode, ...], list[Exit]]:
        """The exits by the loops around them, in their order."""
        found: defaultdict[tuple[cst.CSTNode, ...], list[Exit]] = defaultdict(list)
        for leaving in self.exits:
            found[leaving.place.loops].append(leaving)
        return found

    def after(self, kind: str, first: int) -> Iterator[Event]:
        """The events of a kind with an order from `first` on."""
        events = self.by_kind[kind]
        start = bisect_left(events, first, key=lambda e: e.order)
        return (events[number] for number in range(start, len(events)))

    def between(self, kind: str, first: int, end: int) -> Iterator[Event]:
        """The events of a kind with an order from `first` to before `end`, the last first."""
        events = self.by_kind[kind]
        start, stop = (bisect_left(events, at, key=lambda e: e.order) for at in (first, end))
        return (events[number] for number in range(stop - 1, start - 1, -1))


def of_kind(kind: str, events: Iterable[Event]) -> list[Event]:
    """The events of a kind, in their order."""
    return [event for event in events if event.kind == kind]


def last_part(key: str) -> str:
    """``scaler`` of ``self.scaler``."""
    return key.rpartition(".")[2]


class CodeReader:
    """The events of a file, those of the module first, and what is made and stepped in them."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.star = min({*tree.stars.values()} & {*OLD_MODULES, "torch.amp"}, default=None)
        self._opened: dict[cst.Call, cst.Call] = {}  # autocast by the call of what returns it
        self.disabled: set[str] = set()  # scalers that are made with enabled=False
        self.made: defaultdict[str, set[str]] = defaultdict(set)  # by the last part of the name
        self.makers: dict[str, cst.Call] = {}  # what makes each of them
        self._find_scalers()
        # What a scaler steps is an optimizer, whatever it is called: where each is bound.
        self.stepped: defaultdict[str, set[Scope | None]] = defaultdict(set)
        scopes = {scope.node: scope for scope in tree.scopes}
        self.functions = {n.name.value: n for n in scopes if isinstance(n, cst.FunctionDef)}
        units = [node for node in scopes if isinstance(node, cst.Module | cst.FunctionDef)]
        self._units = {node: Unit(scopes[node]) for node in units}
        self._read(tree.module, Place(), self._units[tree.module])
        self.events = [event for unit in self._units.values() for event in unit.events]

    def _find_scalers(self) -> None:
        for parts, values in self.tree.assigned.items():
            for value in values:
                # GradScaler() if fp16 else None
                for arm in (value.body, value.orelse) if isinstance(value, cst.IfExp) else (value,):
                    if isinstance(arm, cst.Call) and self._class_of(arm) in SCALERS:
                        self.made[parts[-1]].add(".".join(parts))
                        self.makers.setdefault(parts[-1], arm)
                        if self._is_off(arm):
                            self.disabled.add(parts[-1])

    def origin(self, node: cst.CSTNode | None, scope: Scope) -> str | None:
        """The dotted name that an expression stands for, also after ``amp = torch.cuda.amp``."""
        parts = nodes.dotted(node)
        if parts is None:
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

    def _read(self, node: cst.CSTNode, place: Place, unit: Unit) -> None:
        """Note what happens in a node, in the order in which it runs."""
        for target, value in nodes.assignments(node):
            scaler = self._scaler_in(value)
            if scaler is not None:
                unit.scaled_names[self.key(target)] = scaler
        for part in nodes.parts_that_run(node):
            if isinstance(part, cst.FunctionDef):  # it runs elsewhere than where it stands
                casts = [self._autocast(each.decorator, unit.scope) for each in part.decorators]
                cast = next((c for c in casts if c is not None and not self._is_off(c)), None)
                self._read(part.body, Place(autocast=cast), self._units[part])
            else:
                self._read(part, _place_of(part, node, place), unit)
            place = self._place_after(part, place, unit.scope)
        if isinstance(node, cst.Continue | cst.Return):
            unit.exits.append(Exit(node, place, len(unit.events)))
        if isinstance(node, cst.Call):
            kind, scaler, optimizer = self._kind(node, unit)
            order = len(unit.events)
            unit.events.append(Event(kind, node, place, unit, order, scaler, optimizer))
            if kind in ("scaler step", "unscale"):
                self.stepped[optimizer].add(unit.scope.find(optimizer))

    def _place_after(self, part: cst.CSTNode, place: Place, scope: Scope) -> Place:
        """The place of what follows a part, which may turn autocast on, or leave the block."""
        if isinstance(part, cst.WithItem):
            cast = self._autocast(part.item, scope)
            if cast is None:
                return place
            on = None if self._is_off(cast) else cast
            return dataclasses.replace(place, autocast=on, autocast_loops=len(place.loops))
        if isinstance(part, cst.If):
            if nodes.is_end(part.body):
                return place.in_arm(part, 1)
            if isinstance(part.orelse, cst.Else) and nodes.is_end(part.orelse.body):
                return place.in_arm(part, 0)
        return place

    def _autocast(self, node: cst.CSTNode, scope: Scope) -> cst.Call | None:
        """The call that opens autocast, which an expression is or its name was given; else None.

        It is one of autocast, or of a function of this file that returns nothing else.
        """
        node = scope.value_of(node)
        if not isinstance(node, cst.Call):
            return None
        if self.origin(node.func, scope) in AUTOCASTS:
            return node
        found = self._autocasts_of(node)
        if not found or len(set(map(self._is_off, found))) > 1:
            return None
        self._opened[node] = found[0]
        return node

    def _autocasts_of(self, call: cst.Call) -> list[cst.Call]:
        """The calls of autocast that a function gives to ``with``; none if it gives others too."""
        parts = nodes.dotted(call.func) or ("",)
        function = self.functions.get(parts[-1])
        if function is None or parts[:-1] not in ((), ("self",)):
            return []
        names = (unit.name.value for unit in self._units if isinstance(unit, cst.FunctionDef))
        scope, given = self._units[function].scope, contexts_of(function)
        found = [each for each in given if isinstance(each, cst.Call)]
        are_all = all(self.origin(each.func, scope) in AUTOCASTS for each in found)
        is_one = list(names).count(parts[-1]) == 1
        return found if is_one and are_all and len(found) == len(given) else []

    def autocast_of(self, call: cst.Call) -> cst.Call:
        """The call of autocast itself, of the call that opens it."""
        return self._opened.get(call, call)

    def _is_off(self, call: cst.Call) -> bool:
        """Whether a call has ``enabled=False``, by keyword or as the argument at its place."""
        call = self.autocast_of(call)
        made = self._class_of(call) or ""
        names = [""] * SCALERS.get(made, AUTOCASTS.get(made, 0)) + ["enabled"]
        return nodes.is_false(nodes.arguments(call.args, names).get("enabled"))

    def _class_of(self, call: cst.Call) -> str | None:
        return self.origin(call.func, self.tree.calls[call])

    def key(self, node: cst.CSTNode) -> str:
        """An expression as its dotted name, or its code if it is none."""
        parts = nodes.dotted(node)
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

    def scalers_used(self) -> list[str]:
        """The names of the scalers that are made here, turned on, and scale a loss."""
        scaled = {last_part(event.of) for event in of_kind("scaled", self.events)}
        return sorted(scaled & self.makers.keys() - self.disabled)

    def is_one(self, key: str) -> bool:
        """Whether a name is that of one scaler, and no other name of another one."""
        given = self.tree.assigned.get(tuple(key.split(".")), ())
        return all(isinstance(v, cst.Call) and self._class_of(v) in SCALERS for v in given)

    def _scaler_in(self, node: cst.CSTNode) -> str | None:
        func = node.func if isinstance(node, cst.Call) else None
        if not isinstance(func, cst.Attribute) or func.attr.value != "scale":
            return None
        key = self.key(func.value)
        return key if self._is_scaler(key) else None

    @staticmethod
    def _is_loss(receiver: cst.BaseExpression, call: cst.Call) -> bool:
        parts = nodes.dotted(receiver)
        is_given = any(arg.keyword is None for arg in call.args)
        if is_given and not _NAMED_LOSS.search((parts or ("",))[-1]):
            return False  # engine.backward(loss), flow.backward(x)
        if parts is None:  # super().backward, a.get_model().backward
            return not nodes.is_call_of(receiver, "super")
        if parts[-1][:1].isupper():  # MyFunction.backward(ctx, gradient)
            return False
        return parts[0] not in _NO_LOSS if len(parts) == 1 else "loss" in parts[-1].lower()

    def is_optimizer(self, key: str) -> bool:
        """Whether a name is that of an optimizer, as far as names and steps tell."""
        is_named = bool(_OPTIMIZER.search(last_part(key))) and "sched" not in key.lower()
        return is_named or key in self.stepped

    def may_inherit(self, node: cst.CSTNode) -> bool:
        """Whether the class around a node has a base from which methods may come, not seen here."""
        for parent, _ in self.tree.ancestors(node):
            if isinstance(parent, cst.ClassDef):
                bases = {self.origin(base.value, self.tree.scopes[0]) for base in parent.bases}
                names = {nodes.dotted(base.value) for base in parent.bases}
                return bool(bases - {"torch.nn.Module"}) and names != {("object",)}
        return False

    def is_of_torch(self, parts: tuple[str, ...]) -> bool:
        """Whether all that an attribute is given is made by torch, such as a loss function."""
        values = self.tree.assigned.get(parts, ())
        made = [self._class_of(v) or "" if isinstance(v, cst.Call) else "" for v in values]
        return bool(made) and all(origin.startswith("torch.") for origin in made)

    def escapes(self, name: str) -> bool:
        """Whether code that is not seen here may get hold of a scaler."""
        is_attribute = any(key.startswith("self.") for key in self.made.get(name, ()))
        if is_attribute and self._object_escapes:
            return True
        return not all(self.stays(use.node, name) for use in self.tree.uses_ending[name])

    @functools.cached_property
    def _object_escapes(self) -> bool:
        return any(map(self._hands_on_self, self.tree.calls))

    @functools.cached_property
    def last_of(self) -> defaultdict[str, dict[str, Event]]:
        """The last event of each kind, by the last part of the name of its scaler or optimizer."""
        found: defaultdict[str, dict[str, Event]] = defaultdict(dict)
        for event in self.events:
            found[last_part(event.of)][event.kind] = event
        return found

    @functools.cached_property
    def calls_of(self) -> defaultdict[str, list[Event]]:
        """The calls of each function, or method of ``self``, by its name."""
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for event in of_kind("call", self.events):
            parts = nodes.dotted(event.node.func) or ("",)
            if parts[:-1] in ((), ("self",)):
                found[parts[-1]].append(event)
        return found

    @functools.cached_property
    def updated_in(self) -> defaultdict[str, set[Unit]]:
        """The units in which each scaler is updated, by the last part of its name."""
        found: defaultdict[str, set[Unit]] = defaultdict(set)
        for event in of_kind("update", self.events):
            found[last_part(event.of)].add(event.unit)
        return found

    def _hands_on_self(self, call: cst.Call) -> bool:
        """Whether a call gives the object away, or is of a method from a class of another file."""
        parts = nodes.dotted(call.func) or ()
        # what gets the object may update its scaler
        if nodes.is_given(call, "self") and parts != ("super",):
            return True
        if len(parts) != 2 or parts[0] != "self":
            return False
        return parts[1] not in self.functions and parts not in self.tree.assigned

    def stays(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a use of a scaler leaves it in this file, and by its name."""
        parent = self.tree.parents[node]
        given = [last_part(self.key(target)) for target, _ in nodes.assignments(parent)]
        return isinstance(parent, _KEEPS) or (given != [] and {*given} == {name})

    @functools.cached_property
    def scale_names(self) -> set[str]:
        """``get_scale``, and the names that hold what it gave or what was computed from it."""
        words: defaultdict[str, set[str]] = defaultdict(set)
        for parts, values in self.tree.assigned.items():
            for value in values:
                words[parts[-1]] |= set(_WORDS.findall(self.tree.code(value)))
        found = {"get_scale"}
        size = 0
        while len(found) > size:  # until no name gets a value from one that was found
            size = len(found)
            found |= {name for name, read in words.items() if read & found}
        return found

    def text_between(self, first: Event, second: Event) -> str:
        """The source from the end of one call to the end of another, without comments."""
        text = self.tree.text[self.tree.span(first.node)[1] : self.tree.span(second.node)[1]]
        return re.sub(r"#.*", "", text)  # a comment that names unscale_ unscales nothing

    def both_run(self, first: Event, second: Event | Exit) -> bool:
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

    def scaled_before(self, event: Event) -> Event | None:
        """The last scaled backward before an event that is on a way to it, in its loops."""
        before = event.unit.between("scaled", 0, event.order)
        scaled = next((e for e in before if not e.place.excludes(event.place)), None)
        if scaled is None or last_part(scaled.of) in self.disabled:
            return None
        # One may stand in a loop inside the other's, but not in a loop beside it.
        pairs = zip(scaled.place.loops, event.place.loops, strict=False)
        if any(a is not b for a, b in pairs) or not self.both_run(scaled, event):
            return None
        later = event.unit.between("backward", scaled.order, event.order)
        # What is clipped or stepped may be the gradients of a plain backward in between.
        return scaled if all(e.place.excludes(scaled.place) for e in later) else None


def _arms(node: cst.CSTNode) -> list[cst.CSTNode | None]:
    """The parts of a statement that exclude each other; a handler runs in place of the rest."""
    if isinstance(node, cst.If):
        return [node.body, node.orelse]
    if isinstance(node, cst.Try | cst.TryStar):
        return [node.body, *node.handlers]
    return [*node.cases] if isinstance(node, cst.Match) else []


def _place_of(part: cst.CSTNode, node: cst.CSTNode, place: Place) -> Place:
    """The place of a part of a node that has a place itself."""
    arms = _arms(node)
    if part in arms:
        return place.in_arm(node, arms.index(part))
    if isinstance(node, cst.For | cst.While) and part is node.body:
        return dataclasses.replace(place, loops=(*place.loops, node))
    return place

"""What a file does with autocast and a loss scaler, as `events` in the order of its statements.

The statements of each function are read with the branches, loops and autocast around them, so that
a rule can ask what surely runs before what.
"""

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TypeGuard

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.amp_names import OLD, OLD_MODULES
from amp_lab.migrate.context_functions import contexts_of
from amp_lab.migrate.events import Event, Exit, Place, Unit, last_part, of_kind, place_of_part
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.scopes import Scope


def _old_names_of(name: str) -> list[str]:
    return [old for old, (today, _) in OLD.items() if today == name]


# Each class with the place of `enabled` among its arguments: those of old had no device before it.
SCALERS = dict.fromkeys(_old_names_of("GradScaler"), 4)
SCALERS |= {"torch.amp.GradScaler": 5, "torch.amp.grad_scaler.GradScaler": 5}
AUTOCASTS = dict.fromkeys(_old_names_of("autocast"), 0)
AUTOCASTS |= {"torch.amp.autocast": 2, "torch.autocast": 2}
AUTOCASTS |= {"torch.amp.autocast_mode.autocast": 2}
_CLIP_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
CLIPS = {f"torch.nn.utils.{name}" for name in _CLIP_NAMES}
CLIPS |= {f"torch.nn.utils.clip_grad.{name}" for name in _CLIP_NAMES}
_OPTIMIZER = re.compile(r"(?:^|_)(?:optimizer|optim|opt)(?:_|[A-Z0-9]|$)")
_ABOUT_AMP = re.compile(r"(?i)amp|scale|fp16|half|mixed|precision|float16|bf16|dtype|enabled")
_NAMED_LOSS = re.compile(r"(?i)loss|err|cost|objective")
_NO_LOSS = {"self", "cls", "engine", "model_engine", "accelerator", "fabric", "manager", "trainer"}
_NO_LOSS |= {"model", "net", "module", "ctx", "layer"}
_KEEPS = cst.Attribute | cst.AssignTarget | cst.Comparison | cst.ComparisonTarget | cst.If
_KEEPS |= cst.UnaryOperation | cst.BooleanOperation
_WORDS = re.compile(r"[A-Za-z_]\w*")
_SAY_NOTHING = {"not", "self", "args", "None", "is"}  # where two conditions share such a word
Found = Iterator[tuple[cst.CSTNode, str]]


class CodeReader:
    """The events of a file, those of the module first, and what is made and stepped in them."""

    def __init__(self, tree: Tree):
        self.tree = tree
        stars_of_amp = {*tree.stars.values()} & {*OLD_MODULES, "torch.amp"}
        self.star = min(stars_of_amp, default=None)
        self._opened: dict[cst.Call, cst.Call] = {}  # autocast by the call of what returns it
        self.disabled: set[str] = set()  # scalers that are made with enabled=False
        self.made: defaultdict[str, set[str]] = defaultdict(set)  # by the last part of the name
        self.makers: dict[str, cst.Call] = {}  # what makes each of them
        self._find_scalers()
        # What a scaler steps is an optimizer, whatever it is called: where each is bound.
        self.stepped: defaultdict[str, set[Scope | None]] = defaultdict(set)
        scopes = {scope.node: scope for scope in tree.scopes}
        functions = [node for node in scopes if isinstance(node, cst.FunctionDef)]
        self.functions = {function.name.value: function for function in functions}
        self._times_defined = Counter(function.name.value for function in functions)
        units = [node for node in scopes if isinstance(node, cst.Module | cst.FunctionDef)]
        self._units = {node: Unit(scopes[node]) for node in units}
        self._read(tree.module, Place(), self._units[tree.module])
        self.events: list[Event] = []
        for unit in self._units.values():
            self.events += unit.events

    def _find_scalers(self) -> None:
        for parts, values in self.tree.assigned.items():
            for value in values:
                if isinstance(value, cst.IfExp):  # GradScaler() if fp16 else None
                    self._note_scaler(parts, value.body)
                    self._note_scaler(parts, value.orelse)
                else:
                    self._note_scaler(parts, value)

    def _note_scaler(self, parts: tuple[str, ...], value: cst.CSTNode) -> None:
        """Note what a name is given, if that is a new scaler."""
        if not self._is_new_scaler(value):
            return
        name = parts[-1]
        self.made[name].add(".".join(parts))
        self.makers.setdefault(name, value)
        if self._is_off(value):
            self.disabled.add(name)

    def _is_new_scaler(self, value: cst.CSTNode) -> TypeGuard[cst.Call]:
        return isinstance(value, cst.Call) and self._class_of(value) in SCALERS

    # Names.

    def origin(self, node: cst.CSTNode | None, scope: Scope) -> str | None:
        """The dotted name that an expression stands for, also after ``amp = torch.cuda.amp``."""
        parts = nodes.dotted(node)
        if parts is None:
            return None
        name, *attributes = parts
        home = scope.find(name)
        if home is not None:
            binding = scope.only(name)
            if binding is not None and binding.value is not node:
                value_origin = home.origin(binding.value)
                if value_origin is not None:
                    return ".".join((value_origin, *attributes))
        elif name not in ("torch", "apex"):
            return ".".join((self.star, *parts)) if self.star else None
        return scope.origin(node)

    def _class_of(self, call: cst.Call) -> str | None:
        return self.origin(call.func, self.tree.calls[call])

    def key(self, node: cst.CSTNode) -> str:
        """An expression as its dotted name, or its code if it is none."""
        parts = nodes.dotted(node)
        if parts is None:
            return self.tree.code(node).strip()
        return ".".join(parts)

    # Reading.

    def _read(self, node: cst.CSTNode, place: Place, unit: Unit) -> None:
        """Note what happens in a node, in the order in which it runs."""
        for target, value in nodes.assignments(node):
            scaler = self._scaler_in(value)
            if scaler is not None:
                unit.scaled_names[self.key(target)] = scaler
        for part in nodes.parts_that_run(node):
            if isinstance(part, cst.FunctionDef):
                self._read_function(part, unit.scope)
            else:
                self._read(part, place_of_part(part, node, place), unit)
            place = self._place_after(part, place, unit.scope)
        if isinstance(node, cst.Continue | cst.Return):
            unit.exits.append(Exit(node, place, len(unit.events)))
        if isinstance(node, cst.Call):
            self._note_call(node, place, unit)

    def _read_function(self, function: cst.FunctionDef, scope: Scope) -> None:
        """Note what happens in a function, which runs elsewhere than where it stands."""
        start = self._start_of(function, scope)
        self._read(function.body, start, self._units[function])

    def _start_of(self, function: cst.FunctionDef, scope: Scope) -> Place:
        """The place in which a function starts: in autocast, if it is decorated so."""
        casts = [self._autocast(each.decorator, scope) for each in function.decorators]
        for cast in casts:
            if cast is not None and not self._is_off(cast):
                return Place(autocast=cast)
        return Place()

    def _note_call(self, call: cst.Call, place: Place, unit: Unit) -> None:
        """Add the event that a call is."""
        kind, scaler, optimizer = self._kind(call, unit)
        order = len(unit.events)
        event = Event(kind, call, place, unit, order, scaler, optimizer)
        unit.events.append(event)
        if kind in ("scaler step", "unscale"):
            self.stepped[optimizer].add(unit.scope.find(optimizer))

    def _place_after(self, part: cst.CSTNode, place: Place, scope: Scope) -> Place:
        """The place of what follows a part, which may turn autocast on, or leave the block."""
        if isinstance(part, cst.WithItem):
            cast = self._autocast(part.item, scope)
            if cast is None:
                return place
            cast_on = None if self._is_off(cast) else cast
            return dataclasses.replace(place, autocast=cast_on, autocast_loops=len(place.loops))
        if isinstance(part, cst.If):
            if nodes.is_end(part.body):
                return place.in_arm(part, 1)
            if isinstance(part.orelse, cst.Else) and nodes.is_end(part.orelse.body):
                return place.in_arm(part, 0)
        return place

    # Which calls open autocast, and which are on.

    def _autocast(self, node: cst.CSTNode, scope: Scope) -> cst.Call | None:
        """The call that opens autocast, which an expression is or its name was given; else None.

        It is one of autocast, or of a function of this file that returns nothing else.
        """
        call = scope.value_of(node)
        if not isinstance(call, cst.Call):
            return None
        if self.origin(call.func, scope) in AUTOCASTS:
            return call
        autocasts = self._autocasts_of(call)
        switches = {self._is_off(autocast) for autocast in autocasts}
        if len(switches) != 1:  # none, or some are on and some are off
            return None
        self._opened[call] = autocasts[0]
        return call

    def _autocasts_of(self, call: cst.Call) -> list[cst.Call]:
        """The calls of autocast that a function gives to ``with``; none if it gives others too."""
        *owner, name = nodes.dotted(call.func) or ("",)
        function = self.functions.get(name)
        if function is None or owner not in ([], ["self"]):
            return []
        if self._times_defined[name] > 1:
            return []
        scope = self._units[function].scope
        autocasts = []
        for context in contexts_of(function):
            if not isinstance(context, cst.Call):
                return []
            if self.origin(context.func, scope) not in AUTOCASTS:
                return []
            autocasts.append(context)
        return autocasts

    def autocast_of(self, call: cst.Call) -> cst.Call:
        """The call of autocast itself, of the call that opens it."""
        return self._opened.get(call, call)

    def _is_off(self, call: cst.Call) -> bool:
        """Whether a call has ``enabled=False``, by keyword or as the argument at its place."""
        call = self.autocast_of(call)
        origin = self._class_of(call) or ""
        place = SCALERS.get(origin, AUTOCASTS.get(origin, 0))
        names = [""] * place
        names.append("enabled")
        given = nodes.arguments(call.args, names)
        return nodes.is_false(given.get("enabled"))

    # Which kind of event a call is.

    def _kind(self, call: cst.Call, unit: Unit) -> tuple[str, str, str]:
        """The kind of event that a call is, its scaler or optimizer, and what a scaler steps."""
        func = call.func
        origin = self.origin(func, unit.scope)
        if origin in CLIPS:
            return "clip", "", ""
        if origin == "torch.autograd.backward":
            return "backward", "", ""
        if not isinstance(func, cst.Attribute):
            return "call", "", ""
        method = func.attr.value
        if method == "backward":
            return self._kind_of_backward(call, func.value, unit)
        if method not in ("unscale_", "step", "update"):
            return "call", "", ""
        key = self.key(func.value)
        optimizer = self.key(call.args[0].value) if call.args else ""
        if method == "unscale_":
            return "unscale", key, optimizer
        if method == "step" and optimizer and self._is_scaler(key):
            return "scaler step", key, optimizer
        return method, key, ""

    def _kind_of_backward(
        self, call: cst.Call, loss: cst.BaseExpression, unit: Unit
    ) -> tuple[str, str, str]:
        """As `_kind`, for a call of a method ``backward`` of what may be a loss."""
        scaler = unit.scaled_names.get(self.key(loss)) or self._scaler_in(loss)
        if scaler is not None:
            return "scaled", scaler, ""
        if self._is_loss(loss, call):
            return "backward", "", ""
        return "", "", ""

    def _scaler_in(self, node: cst.CSTNode) -> str | None:
        """The scaler of ``scaler.scale(...)``; None if an expression is something else."""
        func = node.func if isinstance(node, cst.Call) else None
        if not isinstance(func, cst.Attribute) or func.attr.value != "scale":
            return None
        key = self.key(func.value)
        return key if self._is_scaler(key) else None

    def _is_scaler(self, key: str) -> bool:
        return "scal" in key.lower() or last_part(key) in self.made  # it may be a parameter

    @staticmethod
    def _is_loss(receiver: cst.BaseExpression, call: cst.Call) -> bool:
        """Whether the object of which ``backward`` is called may be a loss."""
        parts = nodes.dotted(receiver) or ()
        name = parts[-1] if parts else ""
        is_given = any(arg.keyword is None for arg in call.args)
        if is_given and not _NAMED_LOSS.search(name):
            return False  # engine.backward(loss), flow.backward(x)
        if not parts:  # super().backward, a.get_model().backward
            return not nodes.is_call_of(receiver, "super")
        if name[:1].isupper():  # MyFunction.backward(ctx, gradient)
            return False
        if len(parts) == 1:
            return name not in _NO_LOSS
        return "loss" in name.lower()

    # Asking about names.

    def scalers_used(self) -> list[str]:
        """The names of the scalers that are made here, turned on, and scale a loss."""
        scaled = {last_part(event.of) for event in of_kind("scaled", self.events)}
        return sorted(scaled & self.makers.keys() - self.disabled)

    def is_one(self, key: str) -> bool:
        """Whether a name is that of one scaler, and no other name of another one."""
        parts = tuple(key.split("."))
        values = self.tree.assigned.get(parts, ())
        return all(map(self._is_new_scaler, values))

    def is_optimizer(self, key: str) -> bool:
        """Whether a name is that of an optimizer, as far as names and steps tell."""
        if key in self.stepped:
            return True
        is_named = _OPTIMIZER.search(last_part(key)) is not None
        return is_named and "sched" not in key.lower()

    def is_of_torch(self, parts: tuple[str, ...]) -> bool:
        """Whether all that an attribute is given is made by torch, such as a loss function."""
        values = self.tree.assigned.get(parts, [])
        return bool(values) and all(map(self._is_made_by_torch, values))

    def _is_made_by_torch(self, value: cst.CSTNode) -> bool:
        origin = self._class_of(value) if isinstance(value, cst.Call) else None
        return origin is not None and origin.startswith("torch.")

    def may_inherit(self, node: cst.CSTNode) -> bool:
        """Whether the class around a node has a base from which methods may come, not seen here."""
        for parent, _ in self.tree.ancestors(node):
            if isinstance(parent, cst.ClassDef):
                return self._has_unseen_base(parent)
        return False

    def _has_unseen_base(self, node: cst.ClassDef) -> bool:
        module = self.tree.scopes[0]
        bases = [base.value for base in node.bases]
        origins = {self.origin(base, module) for base in bases}
        if origins <= {"torch.nn.Module"}:
            return False
        names = {nodes.dotted(base) for base in bases}
        return names != {("object",)}

    @functools.cached_property
    def scale_names(self) -> set[str]:
        """``get_scale``, and the names that hold what it gave or what was computed from it."""
        words: defaultdict[str, set[str]] = defaultdict(set)
        for parts, values in self.tree.assigned.items():
            for value in values:
                code = self.tree.code(value)
                words[parts[-1]].update(_WORDS.findall(code))
        found = {"get_scale"}
        size = 0
        while len(found) > size:  # until no name gets a value from one that was found
            size = len(found)
            found |= {name for name, read in words.items() if read & found}
        return found

    # Whether a scaler leaves the file.

    def escapes(self, name: str) -> bool:
        """Whether code that is not seen here may get hold of a scaler."""
        is_attribute = any(key.startswith("self.") for key in self.made.get(name, ()))
        if is_attribute and self._object_escapes:
            return True
        uses = self.tree.uses_ending[name]
        return not all(self.stays(use.node, name) for use in uses)

    @functools.cached_property
    def _object_escapes(self) -> bool:
        return any(map(self._hands_on_self, self.tree.calls))

    def _hands_on_self(self, call: cst.Call) -> bool:
        """Whether a call gives the object away, or is of a method from a class of another file."""
        parts = nodes.dotted(call.func) or ()
        # what gets the object may update its scaler
        if nodes.is_given(call, "self") and parts != ("super",):
            return True
        if len(parts) != 2 or parts[0] != "self":
            return False
        _, method = parts
        return method not in self.functions and parts not in self.tree.assigned

    def stays(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a use of a scaler leaves it in this file, and by its name."""
        parent = self.tree.parents[node]
        if isinstance(parent, _KEEPS):
            return True
        new_names = set()
        for target, _ in nodes.assignments(parent):
            new_names.add(last_part(self.key(target)))
        return new_names == {name}

    # Events.

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
            *owner, name = nodes.dotted(event.node.func) or ("",)
            if owner in ([], ["self"]):
                found[name].append(event)
        return found

    @functools.cached_property
    def updated_in(self) -> defaultdict[str, set[Unit]]:
        """The units in which each scaler is updated, by the last part of its name."""
        found: defaultdict[str, set[Unit]] = defaultdict(set)
        for event in of_kind("update", self.events):
            found[last_part(event.of)].add(event.unit)
        return found

    # Asking about two events.

    def both_run(self, first: Event, second: Event | Exit) -> bool:
        """Whether a run that reaches the first can surely reach the second as well."""
        if first.place.excludes(second.place):
            return False
        first_tests = self._tests(first.place, second.place)
        first_text = " ".join(test for test, _ in first_tests)
        first_words = set(re.findall(r"\w+", first_text))
        for test, number in self._tests(second.place, first.place):
            if (test, number) in first_tests:  # the same question, asked twice
                continue
            if _ABOUT_AMP.search(test):
                return False
            shared_words = first_words.intersection(_WORDS.findall(test))
            if not shared_words <= _SAY_NOTHING:
                return False  # the two conditions may exclude each other
        return True

    def _tests(self, place: Place, other: Place) -> list[tuple[str, int]]:
        """The conditions on the way to a place that are not on the way to another one too."""
        tests = []
        for node, number in place.arms:
            if (node, number) not in other.arms:
                test = self.tree.code(node.test) if isinstance(node, cst.If) else ""
                tests.append((test, number))
        return tests

    def scaled_before(self, event: Event) -> Event | None:
        """The last scaled backward before an event that is on a way to it, in its loops."""
        scaled = event.unit.last_scaled_before(event)
        if scaled is None or last_part(scaled.of) in self.disabled:
            return None
        if not scaled.place.shares_loops(event.place):
            return None
        if not self.both_run(scaled, event):
            return None
        # What is clipped or stepped may be the gradients of a plain backward in between.
        for backward in event.unit.between("backward", scaled.order, event.order):
            if not backward.place.excludes(scaled.place):
                return None
        return scaled

    def text_between(self, first: Event, second: Event) -> str:
        """The source from the end of one call to the end of another, without comments."""
        _, start = self.tree.span(first.node)
        _, end = self.tree.span(second.node)
        text = self.tree.text[start:end]
        return re.sub(r"#.*", "", text)  # a comment that names unscale_ unscales nothing

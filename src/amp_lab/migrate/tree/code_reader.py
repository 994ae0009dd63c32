"""Read the `events` of a file: calls on a loss scaler, an optimizer or gradients, in order.

Each event has the branches, loops and autocast around it, so a rule can ask whether one event
surely runs before another.
"""

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple, TypeGuard

import libcst as cst

from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.amp_names import AUTOCASTS, OLD_MODULES, SCALERS
from amp_lab.migrate.tree.events import (
    CodeUnit,
    Event,
    Exit,
    Place,
    first_part,
    grouped,
    last_part,
    place_of_part,
)
from amp_lab.migrate.tree.python_tree import Tree
from amp_lab.migrate.tree.scopes import Scope

# Without a backward there is no mistake. The third is for a scaler that comes as a parameter.
MISTAKE_TRIGGERS = ("autocast backward", "GradScaler backward", "torch .scale( backward")
"""The triggers of a rule about training: a file with such a mistake has one of these texts."""

_CLIP_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
CLIPS = {f"torch.nn.utils.{name}" for name in _CLIP_NAMES}
CLIPS |= {f"torch.nn.utils.clip_grad.{name}" for name in _CLIP_NAMES}
# optimizer, self.opt_g, optimD; not adopt
_OPTIMIZER_NAME = re.compile(r"(?:^|_)(?:optimizer|optim|opt)(?:_|[A-Z0-9]|$)")
# Words in a condition that may turn mixed precision on or off: if args.use_amp
_ABOUT_AMP = re.compile(r"(?i)amp|scale|fp16|half|mixed|precision|float16|bf16|dtype|enabled")
_LOSS_NAME = re.compile(r"(?i)loss|err|cost|objective")
_NEVER_A_LOSS = re.compile(
    "self|cls|(?:model_)?engine|accelerator|fabric|manager|trainer|model|net|module|ctx|layer"
)
# Parents of a name that give its object no second name: scaler.step, if scaler, not scaler
_KEEPS_NAME = cst.Attribute | cst.AssignTarget | cst.Comparison | cst.ComparisonTarget | cst.If
_KEEPS_NAME |= cst.UnaryOperation | cst.BooleanOperation
_WORDS = re.compile(r"[A-Za-z_]\w*")
# Two conditions that share only such words are independent.
_COMMON_WORDS = {"not", "self", "args", "None", "is"}
Mistakes = Iterator[tuple[cst.CSTNode, str]]
"""The type that a rule about mistakes yields: the wrong node, and the message for its line."""


class _Meaning(NamedTuple):
    """The fields of an `Event` that tell what its call does."""

    kind: str
    owner: str = ""
    optimizer: str = ""


class CodeReader:
    """The events of a file, beginning with the module level, with its scalers and optimizers."""

    def __init__(self, tree: Tree):
        self.tree = tree
        stars_of_amp = {*tree.star_imports.values()} & {*OLD_MODULES, "torch.amp"}
        # Of `from torch.cuda.amp import *`; of several such modules always the same one.
        self.star_module = min(stars_of_amp, default=None)
        # For a call of a function that returns autocast(…): that call of autocast.
        self._opened_autocasts: dict[cst.Call, cst.Call] = {}
        # Scalers go by the last part of their name, "scaler" for self.scaler, because another
        # function may call the same one trainer.scaler. `scaler_keys` has the whole names.
        self.scaler_keys: defaultdict[str, set[str]] = defaultdict(set)
        self.scaler_calls: dict[str, cst.Call] = {}  # the first GradScaler(…) of each
        self.disabled_scalers: set[str] = set()  # those made with enabled=False
        self._find_scalers()
        # What a scaler steps is an optimizer, whatever its name: the scopes that bind its variable.
        self.optimizer_scopes: defaultdict[str, set[Scope | None]] = defaultdict(set)
        scopes = {scope.node: scope for scope in tree.scopes}
        functions = [node for node in scopes if isinstance(node, cst.FunctionDef)]
        self.functions = {function.name.value: function for function in functions}
        self._times_defined = Counter(function.name.value for function in functions)
        units = [node for node in scopes if isinstance(node, cst.Module | cst.FunctionDef)]
        self._units = {node: CodeUnit(scopes[node]) for node in units}
        self._read(tree.module, Place(), self._units[tree.module])
        self.events: list[Event] = []
        for unit in self._units.values():
            self.events += unit.events

    def _find_scalers(self) -> None:
        """Remember each scaler that the file makes, also if on a condition."""
        for parts, values in self.tree.assigned_values.items():
            for value in values:
                if isinstance(value, cst.IfExp):  # GradScaler() if fp16 else None
                    self._add_scaler(parts, value.body)
                    self._add_scaler(parts, value.orelse)
                else:
                    self._add_scaler(parts, value)

    def _add_scaler(self, parts: tuple[str, ...], value: cst.CSTNode) -> None:
        """Remember a name and its value, if that is a new scaler."""
        if not self._is_new_scaler(value):
            return
        name = parts[-1]
        self.scaler_keys[name].add(".".join(parts))
        self.scaler_calls.setdefault(name, value)
        if self.is_disabled(value):
            self.disabled_scalers.add(name)

    def _is_new_scaler(self, value: cst.CSTNode) -> TypeGuard[cst.Call]:
        return self.called_origin(value) in SCALERS

    # Names.

    def origin(self, node: cst.CSTNode | None, scope: Scope) -> str | None:
        """The imported name that an expression stands for, also after ``amp = torch.cuda.amp``.

        None if there is no such name. `Scope.origin` follows neither such an assignment nor
        ``import *``.
        """
        parts = nodes.name_parts(node)
        if parts is None:
            return None
        name, *attributes = parts
        owner = scope.find_scope(name)
        if owner is not None:
            binding = scope.only_binding(name)
            # `amp = amp.autocast` binds the name to this node itself.
            if binding is not None and binding.value is not node:
                value_origin = owner.origin(binding.value)
                if value_origin is not None:
                    return ".".join((value_origin, *attributes))
        elif name not in ("torch", "apex"):
            # Nothing binds the name, so it can only come from the star import.
            return ".".join((self.star_module, *parts)) if self.star_module else None
        return scope.origin(node)

    def called_origin(self, node: cst.CSTNode) -> str | None:
        """The `origin` of the function or class that a call calls; None for other nodes."""
        if not isinstance(node, cst.Call):
            return None
        return self.origin(node.func, self.tree.calls[node])

    def key(self, node: cst.CSTNode) -> str:
        """The text that identifies an object: ``self.scaler``, or code such as ``opts[0]``."""
        parts = nodes.name_parts(node)
        if parts is None:
            return self.tree.code(node).strip()
        return ".".join(parts)

    # Reading the events.

    def _read(self, node: cst.CSTNode, place: Place, unit: CodeUnit) -> None:
        """Add the events and exits below a node to its unit, in the order in which they run."""
        for target, value in nodes.assignments(node):
            scaler = self._scaler_in(value)
            if scaler is not None:
                unit.scaled_names[self.key(target)] = scaler
        for part in nodes.running_parts(node):
            if isinstance(part, cst.FunctionDef):  # a unit of its own: it runs where it is called
                self._read(part.body, self._start_of(part, unit.scope), self._units[part])
            else:
                self._read(part, place_of_part(part, node, place), unit)
            place = self._place_after(part, place, unit.scope)
        if isinstance(node, cst.Continue | cst.Return):
            unit.exits.append(Exit(node, place, len(unit.events)))
        if isinstance(node, cst.Call):  # after its arguments, which run first
            self._add_event(node, place, unit)

    def _start_of(self, function: cst.FunctionDef, scope: Scope) -> Place:
        """The place in which a function starts: inside ``@autocast()``, if it has that."""
        casts = [self._autocast(each.decorator, scope) for each in function.decorators]
        for cast in casts:
            if cast is not None and not self.is_disabled(cast):
                return Place(autocast=cast)
        return Place()

    def _add_event(self, call: cst.Call, place: Place, unit: CodeUnit) -> None:
        """Add the event of a call to its unit, and note the optimizer of a scaler."""
        kind, owner, optimizer = self._meaning(call, unit)
        order = len(unit.events)
        event = Event(kind, call, place, unit, order, owner, optimizer)
        unit.events.append(event)
        if kind in ("scaler step", "unscale"):
            self.optimizer_scopes[optimizer].add(unit.scope.find_scope(first_part(optimizer)))

    def _place_after(self, part: cst.CSTNode, place: Place, scope: Scope) -> Place:
        """The place of the code after `part`, if that is at `place`.

        That differs after ``autocast() as …`` of a `with`, and after an `if` of which one branch
        never goes on: what follows then belongs to the other branch.
        """
        if isinstance(part, cst.WithItem):
            cast = self._autocast(part.item, scope)
            if cast is None:
                return place
            cast_on = None if self.is_disabled(cast) else cast
            return dataclasses.replace(place, autocast=cast_on, autocast_loops=len(place.loops))
        if isinstance(part, cst.If):
            if nodes.never_passes(part.body):
                return place.in_arm(part, number=1)
            if isinstance(part.orelse, cst.Else) and nodes.never_passes(part.orelse.body):
                return place.in_arm(part, number=0)
        return place

    # Calls that open autocast.

    def _autocast(self, node: cst.CSTNode, scope: Scope) -> cst.Call | None:
        """The call that opens autocast in ``with node:``; None if `node` is another context.

        It is a call of autocast, or of a function of this file that returns only autocast, which
        `autocast_of` looks up from then on. The node may be a name with such a call as its value.
        """
        call = scope.value_of(node)
        if not isinstance(call, cst.Call):
            return None
        if self.origin(call.func, scope) in AUTOCASTS:
            return call
        autocasts = self._autocasts_of(call)
        switches = {self.is_disabled(autocast) for autocast in autocasts}
        if len(switches) != 1:  # there is no autocast, or some are enabled and some disabled
            return None
        self._opened_autocasts[call] = autocasts[0]
        return call

    def _autocasts_of(self, call: cst.Call) -> list[cst.Call]:
        """The autocasts that a called function returns; none if it has others, or is not known."""
        *owner, name = nodes.name_parts(call.func) or ("",)  # no name: f()()
        function = self.functions.get(name)
        if function is None or owner not in ([], ["self"]):
            return []
        if self._times_defined[name] > 1:
            return []
        scope = self._units[function].scope
        autocasts = []
        for context in nodes.contexts_of(function):
            if not isinstance(context, cst.Call):
                return []
            if self.origin(context.func, scope) not in AUTOCASTS:
                return []
            autocasts.append(context)
        return autocasts

    def autocast_of(self, call: cst.Call) -> cst.Call:
        """The call of autocast behind ``self.context()``; a call of autocast stays as it is."""
        return self._opened_autocasts.get(call, call)

    def is_disabled(self, call: cst.Call) -> bool:
        """Whether a call of a scaler or autocast has ``enabled=False``, by keyword or position."""
        return nodes.is_false(self.arguments(call).get("enabled"))

    def arguments(self, call: cst.Call) -> dict[str, cst.BaseExpression]:
        """The arguments by name of a call that makes a scaler, or of an `autocast_of` a call."""
        call = self.autocast_of(call)
        origin = self.called_origin(call) or ""
        parameters = SCALERS.get(origin) or AUTOCASTS.get(origin, ())
        return nodes.arguments(call.args, parameters)

    # Kinds of events.

    def _meaning(self, call: cst.Call, unit: CodeUnit) -> _Meaning:
        """The kind, owner and optimizer of the event of a call; see `Event`."""
        func = call.func
        origin = self.origin(func, unit.scope)
        if origin in CLIPS:
            return _Meaning("clip")
        if origin == "torch.autograd.backward":
            return _Meaning("backward")
        if not isinstance(func, cst.Attribute):
            return _Meaning("call")
        method = func.attr.value
        if method == "backward":
            return self._meaning_of_backward(call, func.value, unit)
        if method not in ("unscale_", "step", "update"):
            return _Meaning("call")
        owner = self.key(func.value)
        optimizer = self.key(call.args[0].value) if call.args else ""
        if method == "unscale_":
            return _Meaning("unscale", owner, optimizer)
        if method == "step" and optimizer and self._is_scaler(owner):
            return _Meaning("scaler step", owner, optimizer)
        return _Meaning(method, owner)

    def _meaning_of_backward(
        self, call: cst.Call, loss: cst.BaseExpression, unit: CodeUnit
    ) -> _Meaning:
        """The `_meaning` of ``loss.backward()``; the kind is empty if `loss` is no loss."""
        scaler = unit.scaled_names.get(self.key(loss)) or self._scaler_in(loss)
        if scaler is not None:
            return _Meaning("scaled", scaler)
        if self._is_loss(loss, call):
            return _Meaning("backward")
        return _Meaning("")

    def _scaler_in(self, node: cst.CSTNode) -> str | None:
        """``scaler`` for the expression ``scaler.scale(...)``; None for any other."""
        scaler = nodes.receiver_of(node, "scale")
        if scaler is None or not self._is_scaler(self.key(scaler)):
            return None
        return self.key(scaler)

    def _is_scaler(self, key: str) -> bool:
        # By its name too: a parameter `grad_scaler` gets its value from another file.
        return "scal" in key.lower() or last_part(key) in self.scaler_keys

    @staticmethod
    def _is_loss(receiver: cst.BaseExpression, call: cst.Call) -> bool:
        """Whether `receiver`, whose method ``backward`` is called, may be a loss."""
        parts = nodes.name_parts(receiver) or ()
        name = parts[-1] if parts else ""
        has_positional = any(arg.keyword is None for arg in call.args)
        if has_positional and not _LOSS_NAME.search(name):
            return False  # engine.backward(loss), flow.backward(x)
        if not parts:  # super().backward, a.get_model().backward
            return not nodes.is_call_of(receiver, "super")
        if name[:1].isupper():  # MyFunction.backward(ctx, gradient)
            return False
        if len(parts) == 1:
            return _NEVER_A_LOSS.fullmatch(name) is None
        return "loss" in name.lower()

    # Functions of this file.

    def called_function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """The function of this file, or any method, with the name in a call; None without one."""
        if not isinstance(node, cst.Call):
            return None
        return self.functions.get(nodes.called_name(node))

    def passed(self, call: cst.Call) -> dict[str, cst.BaseExpression]:
        """The arguments of a call by the parameters of its `called_function`; empty without one."""
        function = self.called_function(call)
        if function is None:
            return {}
        parameters = (*function.params.posonly_params, *function.params.params)
        names = [parameter.name.value for parameter in parameters]
        if isinstance(call.func, cst.Attribute):
            names = names[1:]  # a method is called without self
        return nodes.arguments(call.args, names)

    # Questions about names.

    def scalers_used(self) -> list[str]:
        """The last parts of the names of enabled scalers, created here, that scale a loss."""
        enabled = self.scaler_calls.keys() - self.disabled_scalers
        return sorted(name for name in enabled if self.by_scaler["scaled", name])

    def holds_only_new_scalers(self, key: str) -> bool:
        """Whether each value of a name in this file is a new scaler; also if no value is seen."""
        parts = tuple(key.split("."))
        values = self.tree.assigned_values.get(parts, ())
        return all(map(self._is_new_scaler, values))

    def is_optimizer(self, key: str) -> bool:
        """Whether a scaler steps the object with this name, or the name is an optimizer's."""
        if key in self.optimizer_scopes:
            return True
        sounds_like_one = _OPTIMIZER_NAME.search(last_part(key)) is not None
        return sounds_like_one and "sched" not in key.lower()  # lr_scheduler_opt.step()

    def is_optimizer_step(self, event: Event) -> bool:
        """Whether an event is a plain step of an optimizer, not of a learning rate scheduler."""
        if event.kind != "step" or "sched" in event.owner.lower():
            return False
        return self.is_optimizer(event.owner)

    def may_inherit(self, node: cst.CSTNode) -> bool:
        """Whether the class around a node may inherit methods from a class of another file.

        ``torch.nn.Module`` and ``object`` do not count.
        """
        class_ = self.tree.around(node, cst.ClassDef)
        if class_ is None:
            return False
        bases = [self.key(base.value) for base in class_.bases]
        return bases != ["object"] and not self.base_origins(class_) <= {"torch.nn.Module"}

    def base_origins(self, node: cst.ClassDef) -> set[str | None]:
        """The `origin` of each class that a class derives from."""
        module = self.tree.scopes[0]
        return {self.origin(base.value, module) for base in node.bases}

    # Does a scaler leave the file?

    def scaler_escapes(self, name: str) -> bool:
        """Whether code outside of this file may get a scaler, given the last part of its name."""
        is_attribute = any(key.startswith("self.") for key in self.scaler_keys.get(name, ()))
        if is_attribute and self._object_escapes:
            return True
        uses = self.tree.uses_by_last_part[name]
        return not all(self.keeps_name(use.node, name) for use in uses)

    @functools.cached_property
    def _object_escapes(self) -> bool:
        """Whether code outside of this file may get ``self``, and update the scaler that it has."""
        return any(map(self._hands_on_self, self.tree.calls))

    def _hands_on_self(self, call: cst.Call) -> bool:
        """Whether a call is ``f(self)``, or ``self.method()`` with a method of another file."""
        parts = nodes.name_parts(call.func) or ()
        if nodes.is_argument(call, "self") and parts != ("super",):
            return True
        if len(parts) != 2 or parts[0] != "self":
            return False
        _, method = parts
        return method not in self.functions and parts not in self.tree.assigned_values

    def keeps_name(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a use of a scaler gives it to no function and no variable of another name."""
        parent = self.tree.parents[node]
        if isinstance(parent, _KEEPS_NAME):
            return True
        new_names = {last_part(self.key(target)) for target, _ in nodes.assignments(parent)}
        return new_names == {name}  # self.scaler = scaler

    # Events.

    @functools.cached_property
    def by_kind(self) -> defaultdict[str, list[Event]]:
        """The events of each kind, in their order."""
        return grouped(self.events, attrgetter("kind"))

    @functools.cached_property
    def by_scaler(self) -> defaultdict[tuple[str, str], list[Event]]:
        """The events of each (kind, scaler): the last part of its name, ``scaler``."""
        return grouped(self.events, lambda event: (event.kind, last_part(event.owner)))

    def calls_of(self, unit: CodeUnit) -> list[Event]:
        """The calls of a unit's function; empty if a later function in the file has the same name.

        Empty also for the module.
        """
        function = unit.scope.node
        if not isinstance(function, cst.FunctionDef):
            return []
        name = function.name.value
        if self.functions[name] is not function:
            return []
        return self._calls_by_name[name]

    @functools.cached_property
    def _calls_by_name(self) -> defaultdict[str, list[Event]]:
        """The events of the calls ``name()`` and ``self.name()``, by the name."""
        calls: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.by_kind["call"]:
            *owner, name = nodes.name_parts(event.node.func) or ("",)  # no name: f()()
            if owner in ([], ["self"]):
                calls[name].append(event)
        return calls

    # Questions about two events.

    def both_run(self, first: Event, second: Event | Exit) -> bool:
        """Whether some run surely reaches both, because their conditions are independent.

        This is not sure if the conditions share a variable, or if a condition of `second` asks
        about mixed precision.
        """
        if first.place.excludes(second.place):
            return False
        first_tests = self._tests(first.place, second.place)
        first_text = " ".join(test for test, _ in first_tests)
        first_words = set(re.findall(r"\w+", first_text))
        for test, number in self._tests(second.place, first.place):
            if (test, number) in first_tests:  # two `if` statements with the same condition
                continue
            if _ABOUT_AMP.search(test):
                return False
            shared_words = first_words.intersection(_WORDS.findall(test))
            if not shared_words <= _COMMON_WORDS:
                return False
        return True

    def _tests(self, place: Place, other: Place) -> list[tuple[str, int]]:
        """Each (condition, branch) of `place` that `other` lacks; a `try` has "" as condition."""
        tests = []
        for node, number in place.arms:
            if (node, number) not in other.arms:
                test = self.tree.code(node.test) if isinstance(node, cst.If) else ""
                tests.append((test, number))
        return tests

    def scaled_before(self, event: Event) -> Event | None:
        """The scaled backward that made the gradients of an event; None if this is not sure."""
        scaled = next(event.unit.before("scaled", event), None)
        if scaled is None or last_part(scaled.owner) in self.disabled_scalers:
            return None
        if not scaled.place.shares_loops(event.place):
            return None
        if not self.both_run(scaled, event):
            return None
        # After a plain backward in between, the event may work on its gradients instead.
        for backward in event.unit.between("backward", scaled.order, event.order):
            if not backward.place.excludes(scaled.place):
                return None
        return scaled

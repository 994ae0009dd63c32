"""Which losses of a file autocast computed in float16, followed by the names of values."""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.amp_names import OLD
from amp_lab.migrate.code_reader import AUTOCASTS, CodeReader
from amp_lab.migrate.events import Event, Unit, last_part
from amp_lab.migrate.scopes import Scope

_Name = tuple[str, ...]  # dotted, by its parts
FLOAT16 = {"torch.float16", "torch.half"}
_NO_GRADIENTS = re.compile(r"\b(?:no_grad|inference_mode|set_grad_enabled\(\s*False)\b")
_DETACHED = re.compile(r"\.(?:detach|item|tolist|numpy|argmax)\(")
_NAMED_MODEL = re.compile(r"(?i)(?:model|net|network)$")
_NAMED_SWITCH = re.compile(r"(?i)(?<![a-z])amp|fp16|half|mixed|float16")


class Float16Values:
    """What a file computes in float16 by autocast, with gradients.

    A region of autocast counts only if it is surely turned on and surely for float16.
    """

    def __init__(self, code: CodeReader):
        self._code = code

    @functools.cached_property
    def is_any(self) -> bool:
        """Whether anything is computed in float16, with gradients."""
        return any(self._cast_around(event) is not None for event in self._code.events)

    def behind(self, backward: Event) -> cst.Call | None:
        """The autocast in which the loss of a backward was computed in float16; else None."""
        loss = nodes.loss_of(backward.node)
        if loss is None:
            return None
        cast = _first_of(_names_in(loss), self._names(backward))
        if cast is not None:
            return cast
        calls_in_loss = set(nodes.below(loss))
        for event in self._before(backward):
            if event.node in calls_in_loss:
                cast = self._cast_of(event)
                if cast is not None:
                    return cast
        return None

    def device(self, cast: cst.Call) -> str:
        """The code of the device that an autocast is for."""
        device = self._arguments(cast).get("device_type")
        return '"cuda"' if device is None else self._code.tree.code(device)

    def _before(self, backward: Event) -> Iterator[Event]:
        """The events on a way to a backward, in its own loops or in those around it."""
        for event in backward.unit.events[: backward.order]:
            place = event.place
            if place.shares_loops(backward.place) and not place.excludes(backward.place):
                yield event

    def _names(self, backward: Event) -> dict[_Name, cst.Call]:
        """The names that hold a value computed in float16 before a backward, with its autocast."""
        found: dict[_Name, cst.Call] = {}
        for event in self._before(backward):
            cast = self._cast_of(event)
            if cast is not None:
                for target in self._targets(event.node):
                    found.setdefault(target, cast)
        size = -1
        while len(found) > size:  # until no name gets a value from one that was found
            size = len(found)
            for target, sources in self._flows(backward.unit):
                cast = _first_of(sources, found)
                if cast is not None:
                    found.setdefault(target, cast)
        return found

    def _targets(self, node: cst.CSTNode) -> list[_Name]:
        """The names that get a value which a call is part of."""
        for parent, _ in self._code.tree.ancestors(node):
            targets: list[_Name] = []
            for target, _ in _assigned(parent):
                targets += _given_names(target)
            if targets:
                is_detached = _DETACHED.search(self._code.tree.code(parent))
                return [] if is_detached else targets
            if isinstance(parent, cst.BaseCompoundStatement | cst.SimpleStatementLine):
                return []
        return []

    def _flows(self, unit: Unit) -> list[tuple[_Name, list[_Name]]]:
        """Each name that is assigned in a function, with the names that its value is made of."""
        flows = []
        for part in nodes.below(unit.scope.node):
            for target, value in _assigned(part):
                if _DETACHED.search(self._code.tree.code(value)):
                    continue
                sources = list(_names_in(value))
                flows += [(name, sources) for name in _given_names(target)]
        return flows

    # The regions.

    def _cast_of(self, event: Event) -> cst.Call | None:
        """The autocast for float16 in which a call runs, here or in what it calls."""
        if event.place.autocast is not None:
            return self._cast_around(event)
        parts = nodes.dotted(event.node.func) or ("",)
        if len(parts) > 1 and parts[0] != "self":
            return None
        cast = self._functions.get(parts[-1])
        if cast is not None:
            return cast
        return self._cast_of_model(parts, event.unit.scope)

    def _cast_around(self, event: Event) -> cst.Call | None:
        """The autocast for float16 around a call, where its results have gradients."""
        if event.place.autocast is None:
            return None
        cast = self._code.autocast_of(event.place.autocast)
        if not self._is_float16(cast) or self._is_without_gradients(event):
            return None
        return cast

    def _cast_of_model(self, parts: _Name, scope: Scope) -> cst.Call | None:
        """The autocast in the ``forward`` of the model that a name is, as far as is known."""
        forward = self._functions.get("forward")
        if forward is None:
            return None
        return forward if self._is_model(parts, scope) else None

    def _is_model(self, parts: _Name, scope: Scope) -> bool:
        """Whether a name is that of a model of this file, by what it is given or by its sound."""
        binding = scope.only(parts[0])
        if len(parts) > 1 or binding is None or isinstance(binding.node, cst.Param):
            return _NAMED_MODEL.search(parts[-1]) is not None
        if binding.value is None:
            return False
        for part in nodes.below(binding.value):
            if isinstance(part, cst.Name) and part.value in self._classes_with_forward:
                return True
        return False

    @functools.cached_property
    def _functions(self) -> dict[str, cst.Call]:
        """The functions of the file that compute something in float16, each with its autocast."""
        found: dict[str, cst.Call] = {}
        for event in self._code.events:
            function = event.unit.scope.node
            if not isinstance(function, cst.FunctionDef):
                continue
            cast = self._cast_around(event)
            if cast is not None:
                found.setdefault(function.name.value, cast)
        return found

    @functools.cached_property
    def _classes_with_forward(self) -> set[str]:
        """The names of the classes that have a method ``forward`` with something in it."""
        classes: set[str] = set()
        for scope in self._code.tree.scopes:
            outer = scope.parent
            if outer is None or "forward" not in outer.bindings:
                continue
            if isinstance(outer.node, cst.ClassDef):
                classes.add(outer.node.name.value)
        return classes

    def _is_without_gradients(self, event: Event) -> bool:
        """Whether a call runs in ``no_grad``, by a block or by a decorator of its function."""
        for parent, _ in self._code.tree.ancestors(event.node):
            if isinstance(parent, cst.With) and self._turns_gradients_off(parent.items):
                return True
            if isinstance(parent, cst.FunctionDef):
                return self._turns_gradients_off(parent.decorators)
        return False

    def _turns_gradients_off(self, parts: Sequence[cst.CSTNode]) -> bool:
        """Whether one of the items of a ``with``, or one of the decorators, is ``no_grad``."""
        return any(_NO_GRADIENTS.search(self._code.tree.code(part)) for part in parts)

    # The arguments of autocast.

    def _arguments(self, cast: cst.Call) -> dict[str, cst.BaseExpression]:
        names = ("device_type", "dtype", "enabled")
        if self._is_old(cast):
            names = ("enabled", "dtype")
        return nodes.arguments(cast.args, names)

    def _is_old(self, cast: cst.Call) -> bool:
        return AUTOCASTS[self._origin(cast)] == 0

    def _origin(self, cast: cst.Call) -> str:
        return self._code.origin(cast.func, self._code.tree.calls[cast]) or ""

    def _is_float16(self, cast: cst.Call) -> bool:
        """Whether an autocast is surely on, and surely for float16, which is CUDA's default."""
        if any(arg.star for arg in cast.args):
            return False
        scope = self._code.tree.calls[cast]
        arguments = self._arguments(cast)
        if not self._is_on(arguments.get("enabled"), scope):
            return False
        if "dtype" in arguments:
            dtype = scope.value_of(arguments["dtype"])
            return self._code.origin(dtype, scope) in FLOAT16
        if self._is_old(cast):
            _, device = OLD[self._origin(cast)]
            return device == "cuda"
        if "device_type" not in arguments:
            return False
        device_type = scope.value_of(arguments["device_type"])
        return nodes.literal(device_type) == "cuda"

    def _is_on(self, enabled: cst.BaseExpression | None, scope: Scope) -> bool:
        """Whether an argument `enabled` is true, or a switch of mixed precision."""
        if enabled is None:
            return True
        value = scope.value_of(enabled)
        if nodes.is_false(value):
            return False
        if nodes.dotted(value) == ("True",):
            return True
        name = last_part(self._code.key(enabled))
        return _NAMED_SWITCH.search(name) is not None


def _assigned(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """What gets a value by a node, by an assignment, a loop or ``append``, and from what."""
    yield from nodes.assignments(node)
    if isinstance(node, cst.AugAssign):
        yield node.target, node.value
    elif isinstance(node, cst.For):
        yield node.target, node.iter
    elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        is_append = node.func.attr.value == "append"
        if is_append and node.args:
            yield node.func.value, node.args[0].value


def _given_names(target: cst.CSTNode) -> Iterator[_Name]:
    """The names and attributes that a target gives a value: ``losses`` of ``losses[i]``."""
    parts = nodes.dotted(target)
    if parts is not None:
        yield parts
    elif isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from _given_names(element.value)
    elif isinstance(target, cst.Subscript):
        yield from _given_names(target.value)


def _names_in(node: cst.CSTNode) -> Iterator[_Name]:
    """The names and attributes in an expression, each as a whole."""
    parts = nodes.dotted(node)
    if parts is not None:
        yield parts
        return
    for child in nodes.children(node):
        yield from _names_in(child)


def _first_of(names: Iterable[_Name], casts: dict[_Name, cst.Call]) -> cst.Call | None:
    """The autocast of the first name that has one, itself or as an attribute: of ``out.loss``."""
    for name in names:
        for length in range(len(name), 0, -1):
            owner = name[:length]
            if owner in casts:
                return casts[owner]
    return None

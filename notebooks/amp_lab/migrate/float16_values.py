"""Which losses of a file autocast computed in float16, followed by the names of values."""

import functools
import re
from collections.abc import Iterable, Iterator

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.amp_names import OLD
from amp_lab.migrate.code_reader import AUTOCASTS, CodeReader, Event, Unit, last_part
from amp_lab.migrate.python_tree import Scope

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
        parts = set(nodes.below(loss))
        own = (self._cast_of(event) for event in self._before(backward) if event.node in parts)
        return next(filter(None, own), None)

    def device(self, cast: cst.Call) -> str:
        """The code of the device that an autocast is for."""
        given = self._given(cast)
        return self._code.tree.code(given["device_type"]) if "device_type" in given else '"cuda"'

    def _before(self, backward: Event) -> Iterator[Event]:
        """The events on a way to a backward, in its own loops or in those around it."""
        for event in backward.unit.events[: backward.order]:
            pairs = zip(event.place.loops, backward.place.loops, strict=False)
            is_beside = any(a is not b for a, b in pairs)
            if not is_beside and not event.place.excludes(backward.place):
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
            targets = [name for target, _ in _assigned(parent) for name in _given_names(target)]
            if targets:
                return [] if _DETACHED.search(self._code.tree.code(parent)) else targets
            if isinstance(parent, cst.BaseCompoundStatement | cst.SimpleStatementLine):
                return []
        return []

    def _flows(self, unit: Unit) -> list[tuple[_Name, list[_Name]]]:
        """Each name that is assigned in a function, with the names that its value is made of."""
        flows = []
        for part in nodes.below(unit.scope.node):
            for target, value in _assigned(part):
                if not _DETACHED.search(self._code.tree.code(value)):
                    sources = list(_names_in(value))
                    flows += [(name, sources) for name in _given_names(target)]
        return flows

    # The regions.

    def _cast_of(self, event: Event) -> cst.Call | None:
        """The autocast for float16 in which a call runs, here or in what it calls."""
        if event.place.autocast is not None:
            return self._cast_around(event)
        parts = nodes.dotted(event.node.func) or ("",)
        if len(parts) == 1 or parts[0] == "self":
            return self._functions.get(parts[-1]) or self._cast_of_model(parts, event.unit.scope)
        return None

    def _cast_around(self, event: Event) -> cst.Call | None:
        """The autocast for float16 around a call, where its results have gradients."""
        if event.place.autocast is None:
            return None
        cast = self._code.autocast_of(event.place.autocast)
        return cast if self._is_float16(cast) and not self._is_without_gradients(event) else None

    def _cast_of_model(self, parts: _Name, scope: Scope) -> cst.Call | None:
        """The autocast in the ``forward`` of the model that a name is, as far as is known."""
        forward = self._functions.get("forward")
        if forward is None:
            return None
        binding = scope.only(parts[0])
        is_given = binding is None or isinstance(binding.node, cst.Param)
        if is_given or len(parts) > 1:
            return forward if _NAMED_MODEL.search(parts[-1]) else None
        value = binding.value if binding is not None else None
        made = nodes.below(value) if value is not None else ()
        names = {part.value for part in made if isinstance(part, cst.Name)}
        return forward if names & self._classes_with_forward else None

    @functools.cached_property
    def _functions(self) -> dict[str, cst.Call]:
        """The functions of the file that compute something in float16, each with its autocast."""
        found: dict[str, cst.Call] = {}
        for event in self._code.events:
            node = event.unit.scope.node
            cast = self._cast_around(event) if isinstance(node, cst.FunctionDef) else None
            if isinstance(node, cst.FunctionDef) and cast is not None:
                found.setdefault(node.name.value, cast)
        return found

    @functools.cached_property
    def _classes_with_forward(self) -> set[str]:
        scopes = (scope.parent for scope in self._code.tree.scopes if scope.parent is not None)
        classes = {scope.node for scope in scopes if "forward" in scope.bindings}
        return {node.name.value for node in classes if isinstance(node, cst.ClassDef)}

    def _is_without_gradients(self, event: Event) -> bool:
        """Whether a call runs in ``no_grad``, by a block or by a decorator of its function."""
        code = self._code.tree.code
        for parent, _ in self._code.tree.ancestors(event.node):
            if isinstance(parent, cst.With) and any(
                _NO_GRADIENTS.search(code(item.item)) for item in parent.items
            ):
                return True
            if isinstance(parent, cst.FunctionDef):
                return any(_NO_GRADIENTS.search(code(each)) for each in parent.decorators)
        return False

    def _given(self, cast: cst.Call) -> dict[str, cst.BaseExpression]:
        names = ("enabled", "dtype") if self._is_old(cast) else ("device_type", "dtype", "enabled")
        return nodes.arguments(cast.args, names)

    def _is_old(self, cast: cst.Call) -> bool:
        return AUTOCASTS[self._origin(cast)] == 0

    def _origin(self, cast: cst.Call) -> str:
        return self._code.origin(cast.func, self._code.tree.calls[cast]) or ""

    def _is_float16(self, cast: cst.Call) -> bool:
        """Whether an autocast is surely on, and surely for float16, which is CUDA's default."""
        scope, given = self._code.tree.calls[cast], self._given(cast)
        if any(arg.star for arg in cast.args) or not self._is_on(given.get("enabled"), scope):
            return False
        if "dtype" in given:
            return self._code.origin(scope.value_of(given["dtype"]), scope) in FLOAT16
        if self._is_old(cast):
            return OLD[self._origin(cast)][1] == "cuda"
        device = scope.value_of(given["device_type"]) if "device_type" in given else None
        return nodes.literal(device) == "cuda"

    def _is_on(self, enabled: cst.BaseExpression | None, scope: Scope) -> bool:
        """Whether an argument `enabled` is true, or a switch of mixed precision."""
        if enabled is None:
            return True
        value = scope.value_of(enabled)
        if nodes.is_false(value):
            return False
        name = last_part(self._code.key(enabled))
        return nodes.dotted(value) == ("True",) or bool(_NAMED_SWITCH.search(name))


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
            if name[:length] in casts:
                return casts[name[:length]]
    return None

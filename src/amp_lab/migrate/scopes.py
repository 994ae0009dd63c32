"""What each name of a source file is bound to, as it is seen from a place in it."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate import nodes

_Node = cst.CSTNode | None


@dataclasses.dataclass(eq=False)
class Binding:
    """A place where a name gets a value: `origin` is the dotted name of what an import binds.

    `value` is what is assigned to it, `source` that or what it is unpacked from.
    """

    origin: str | None
    node: cst.CSTNode
    value: _Node = None
    source: _Node = None

    @property
    def is_none(self) -> bool:
        """Whether the value is written as None."""
        return isinstance(self.value, cst.Name) and self.value.value == "None"


class Scope:
    """The names bound in a module, class, function or comprehension."""

    def __init__(self, kind: str, node: cst.CSTNode, parent: "Scope | None" = None):
        self.kind = kind
        self.node = node
        self.parent = parent
        self.bindings: dict[str, list[Binding]] = {}
        self.elsewhere: dict[str, Scope] = {}  # global and nonlocal
        self._origins: dict[tuple[str, bool, int], set[str | None]] = {}

    def bind(self, name: str, binding: Binding) -> None:
        """Give a name one more binding, here or where global and nonlocal move it."""
        home = self.elsewhere.get(name, self)
        home.bindings.setdefault(name, []).append(binding)

    def outwards(self) -> "Iterator[Scope]":
        """This scope, and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def find(self, name: str) -> "Scope | None":
        """The scope in which `name` is bound, as it is seen from this one."""
        for scope in self.outwards():
            if name in scope.bindings and (scope is self or scope.kind != "class"):
                return scope
        return None

    def bound(self, name: str) -> list[Binding]:
        """What `name` is bound to as it is seen from this scope."""
        home = self.find(name)
        return home.bindings[name] if home is not None else []

    def only(self, name: str) -> Binding | None:
        """What `name` is bound to as it is seen from this scope, if that is one thing only."""
        bindings = self.bound(name)
        return bindings[0] if len(bindings) == 1 else None

    def value_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """What a name was given, if that is one thing only; an expression as it is."""
        if not isinstance(node, cst.Name):
            return node
        binding = self.only(node.value)
        if binding is None or binding.value is None:
            return node
        return binding.value

    def origins(self, parts: tuple[str, ...]) -> set[str | None]:
        """The dotted names that a name may stand for; None for anything that is not imported.

        A torch that is None where it cannot be imported has no attributes: no other meaning.
        """
        home = self.find(parts[0])
        if home is None:
            is_from_star = parts[0] in ("torch", "apex")  # a module that some star import brings
            return {".".join(parts)} if is_from_star else {None}
        attributes = parts[1:]
        found = home._origins_of(parts[0], bool(attributes))
        return {origin and ".".join((origin, *attributes)) for origin in found}

    def _origins_of(self, name: str, has_attribute: bool) -> set[str | None]:
        """The dotted names of all that is bound to a name here, kept as long as no more is."""
        bindings = self.bindings[name]
        key = (name, has_attribute, len(bindings))
        if key not in self._origins:
            if has_attribute and any(binding.origin == "torch" for binding in bindings):
                bindings = [binding for binding in bindings if not binding.is_none]
            self._origins[key] = {binding.origin for binding in bindings}
        return self._origins[key]

    def origin(self, node: cst.CSTNode | None) -> str | None:
        """The dotted name that an expression stands for, if that is certain."""
        parts = nodes.dotted(node)
        if parts is None:
            return None
        found = self.origins(parts)
        if len(found) != 1:  # two meanings are none that is certain
            return None
        return found.pop()


class Use(NamedTuple):
    """A name or dotted name that is read, such as ``torch.cuda.amp``."""

    node: cst.BaseExpression
    parts: tuple[str, ...]
    scope: Scope

    @property
    def origins(self) -> set[str | None]:
        """What `Scope.origins` tells of it where it is used."""
        return self.scope.origins(self.parts)

"""Find the possible values of the names in a source file, by Python's scope rules."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate.tree import nodes

_Node = cst.CSTNode | None


@dataclasses.dataclass(eq=False)
class Binding:
    """One place in the source that gives a name a value."""

    node: cst.CSTNode
    """The node that binds the name: an import alias, a target, a parameter, a `def`, a `class`."""
    origin: str | None = None
    """For an import: the dotted name of the imported object, such as ``torch.cuda.amp``."""
    value: _Node = None
    """The expression assigned to the name, if it is known."""
    source: _Node = None
    """`value`, or the right side that the name is unpacked from: ``f()`` in ``a, b = f()``."""

    @property
    def is_none(self) -> bool:
        """Whether the value is the literal None."""
        return isinstance(self.value, cst.Name) and self.value.value == "None"


class Scope:
    """The names bound in a module, class, function or comprehension: `kind` is that word."""

    def __init__(self, kind: str, node: cst.CSTNode, parent: "Scope | None" = None):
        self.kind = kind
        self.node = node
        self.parent = parent
        self.bindings: dict[str, list[Binding]] = {}
        self.outer_names: dict[str, Scope] = {}  # declared global or nonlocal, with their scope
        self._origins: dict[tuple, set[str | None]] = {}  # cache of `origins`

    def bind(self, name: str, binding: Binding) -> None:
        """Add a binding of a name, to an outer scope if it is declared global or nonlocal here."""
        owner = self.outer_names.get(name, self)
        owner.bindings.setdefault(name, []).append(binding)

    def enclosing_scopes(self) -> "Iterator[Scope]":
        """Yield this scope, then those around it, the module last."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def find_scope(self, name: str) -> "Scope | None":
        """The innermost scope that binds `name`, as Python would look it up from this one.

        None if no scope binds it.
        """
        for scope in self.enclosing_scopes():
            # Functions inside a class do not see the names of its body.
            is_visible = scope is self or scope.kind != "class"
            if is_visible and name in scope.outer_names:
                owner = scope.outer_names[name]
                return owner if name in owner.bindings else None
            if is_visible and name in scope.bindings:
                return scope
        return None

    def bindings_of(self, name: str) -> list[Binding]:
        """All bindings of `name` that are visible in this scope; empty if nothing binds it."""
        owner = self.find_scope(name)
        return owner.bindings[name] if owner is not None else []

    def only_binding(self, name: str) -> Binding | None:
        """The only binding of `name` that is visible in this scope; None for several or none."""
        bindings = self.bindings_of(name)
        return bindings[0] if len(bindings) == 1 else None

    def value_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The value of a variable that is assigned once; any other expression itself."""
        if not isinstance(node, cst.Name):
            return node
        binding = self.only_binding(node.value)
        if binding is None or binding.value is None:
            return node
        return binding.value

    def origins(self, parts: tuple[str, ...]) -> set[str | None]:
        """The imported names that ``a.b.c``, given as its `parts`, may stand for.

        After ``from torch.cuda import amp``, ``amp.autocast`` is ``torch.cuda.amp.autocast``. The
        set has None for each binding that is no import, and is {None} if nothing binds ``a``.
        """
        name, *attributes = parts
        owner = self.find_scope(name)
        if owner is None:
            # Nothing binds the name, but `from other import *` may bring the module.
            is_from_star = name in ("torch", "apex")
            return {".".join(parts)} if is_from_star else {None}
        bindings = owner.bindings[name]
        key = (parts, len(bindings))  # a further binding of the name makes the cached set wrong
        if key not in owner._origins:
            if attributes and any(binding.origin == "torch" for binding in bindings):
                # `torch = None` after a failed import: torch.cuda can only mean the module.
                bindings = [binding for binding in bindings if not binding.is_none]
            origins = owner._origins[key] = set()
            for origin in {binding.origin for binding in bindings}:
                origins.add(None if origin is None else ".".join((origin, *attributes)))
        return owner._origins[key]

    def origin(self, node: cst.CSTNode | None) -> str | None:
        """The imported name that an expression stands for; None if there is none, or several."""
        parts = nodes.name_parts(node)
        if parts is None:
            return None
        origins = self.origins(parts)
        if len(origins) != 1:
            return None
        return next(iter(origins))


class Use(NamedTuple):
    """A place in the source that reads a name or dotted name, such as ``torch.cuda.amp``."""

    node: cst.BaseExpression
    parts: tuple[str, ...]
    scope: Scope

    @property
    def origins(self) -> set[str | None]:
        """The imported names that the use may stand for; see `Scope.origins`."""
        return self.scope.origins(self.parts)

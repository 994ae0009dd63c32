"""By which name the module torch can be had where something is used."""

import functools
from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.scopes import Scope, Use


class TorchName:
    """The names of the module torch in a file, among them ``torch`` where an import may bring it.

    `brings` is where `import torch` may be put, by scope; `needed` those scopes where it must be.
    """

    def __init__(self, tree: Tree):
        self.tree = tree
        self.brings: dict[Scope, cst.CSTNode] = {}
        self.needed: set[Scope] = set()
        self._names_in: dict[Scope, list[str]] = {}  # of torch, once they were asked for

    def at(self, use: Use) -> str | None:
        """The name of torch where something is used, if it is surely bound there."""
        for name in dict.fromkeys(self._names(use)):
            if self._is_torch(name, use):
                return name
        bound = use.scope.find("torch")
        for scope in use.scope.outwards() if bound is None else (bound,):
            if scope in self.brings:
                self.needed.add(scope)
                return "torch"
        return None

    def _names(self, use: Use) -> Iterator[str]:
        yield "torch"
        for scope in use.scope.outwards():
            if scope not in self._names_in:
                self._names_in[scope] = [
                    name
                    for name, bindings in scope.bindings.items()
                    if any(binding.origin == "torch" for binding in bindings)
                ]
            yield from self._names_in[scope]

    def _is_torch(self, name: str, use: Use) -> bool:
        # Its own spelling was understood as torch's already, whatever else may bind that name.
        if name == use.parts[0] and "torch" in use.scope.origins((name,)):
            return True
        bound = use.scope.find(name)
        if bound is None:  # a star import may bring it: other code takes that as given too
            return name in self._unbound
        return self._is_only_torch(bound, name, use)

    def _is_only_torch(self, bound: Scope, name: str, use: Use) -> bool:
        bindings = [binding for binding in bound.bindings[name] if not binding.is_none]
        if self._is_deleted(name) or any(binding.origin != "torch" for binding in bindings):
            return False
        is_later = bound.kind == "module" and use.scope is not bound
        return any(self._runs_before(binding.node, use, is_later) for binding in bindings)

    def _runs_before(self, node: cst.CSTNode, use: Use, is_later: bool) -> bool:
        """Whether a binding is made before a use; `is_later` if that runs after the module."""
        tree = self.tree
        statement = tree.statement(node)
        block = tree.parents[statement]
        tried = tree.parents.get(block)
        if isinstance(tried, cst.Try) and tried.body is block:  # who catches it has no torch at all
            statement = tried
            block = tree.parents[tried]
        if block is tree.module and is_later:
            return True
        # spans also order the parts of a line with semicolons
        return tree.is_in(use.node, block) and tree.span(node) < tree.span(use.node)

    def _is_deleted(self, name: str) -> bool:
        return name in self._deleted

    @functools.cached_property
    def _deleted(self) -> set[str]:
        """The names that some ``del`` takes away."""
        names = (use for use in self.tree.uses if len(use.parts) == 1)
        parents = self.tree.parents
        return {use.parts[0] for use in names if isinstance(parents[use.node], cst.Del)}

    @functools.cached_property
    def _unbound(self) -> set[str]:
        """The names that are used where nothing in the file binds them."""
        return {use.parts[0] for use in self.tree.uses if use.scope.find(use.parts[0]) is None}

    def offer(self, scope: Scope, statement: cst.CSTNode) -> None:
        """Let `import torch` be put before a statement, where nothing else has that name."""
        related = [s for s in self.tree.scopes if scope in s.outwards() or s in scope.outwards()]
        bindings = [binding for s in related for binding in s.bindings.get("torch", ())]
        if not self._is_deleted("torch") and all(b.origin == "torch" for b in bindings):
            self.brings.setdefault(scope, statement)

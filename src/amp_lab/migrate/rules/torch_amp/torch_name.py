"""Find the name of the module torch at a place in a file, or a place for ``import torch``."""

import functools

import libcst as cst

from amp_lab.migrate.tree.python_tree import Tree
from amp_lab.migrate.tree.scopes import Scope, Use


class TorchName:
    """The names of the module torch in a file, such as ``torch`` or ``th``."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.import_before: dict[Scope, cst.CSTNode] = {}
        """For each scope that may import torch: the statement before which it would."""
        self.scopes_to_import: set[Scope] = set()
        """Those of them in which `at` relies on that import."""

    def at(self, use: Use) -> str | None:
        """The name of torch at a use; None if no name is surely bound and torch cannot be imported.

        If the use needs an import of torch, the scope for the import is added to
        `scopes_to_import`.
        """
        for name in self._names:
            if self._is_torch(name, use):
                return name
        owner = use.scope.find_scope("torch")
        scopes = list(use.scope.enclosing_scopes())
        if owner is not None:  # it binds `torch`, so the use sees no import in another scope
            scopes = [owner]
        for scope in scopes:
            if scope in self.import_before:
                self.scopes_to_import.add(scope)
                return "torch"
        return None

    @functools.cached_property
    def _names(self) -> list[str]:
        """``torch``, and each other name that a scope of the file binds to torch."""
        names = ["torch"]
        for scope in self.tree.scopes:
            for name, bindings in scope.bindings.items():
                if any(binding.origin == "torch" for binding in bindings):
                    names.append(name)
        return list(dict.fromkeys(names))

    def _is_torch(self, name: str, use: Use) -> bool:
        """Whether a name surely stands for torch at a use."""
        # `th` of th.cuda.amp.autocast: the code at the use relies on it already
        if name == use.parts[0] and "torch" in use.scope.origins((name,)):
            return True
        owner = use.scope.find_scope(name)
        if owner is None:  # used, and not bound: a star import brings it
            return name in self._unbound_names
        return self._is_only_torch(owner, name, use)

    def _is_only_torch(self, owner: Scope, name: str, use: Use) -> bool:
        """Whether a scope binds a name to torch, or None, alone, before a use of the name runs."""
        bindings = [binding for binding in owner.bindings[name] if not binding.is_none]
        if name in self._deleted_names or any(binding.origin != "torch" for binding in bindings):
            return False
        runs_after_module = owner.kind == "module" and use.scope is not owner
        return any(self._runs_before(binding.node, use, runs_after_module) for binding in bindings)

    def _runs_before(self, node: cst.CSTNode, use: Use, runs_after_module: bool) -> bool:
        """Whether a binding has surely run when a use does.

        `runs_after_module` says that the use runs when the module has been executed, as in a
        function.
        """
        tree = self.tree
        statement = tree.statement_of(node)
        block = tree.parents[statement]
        try_ = tree.parents.get(block)
        if isinstance(try_, cst.Try) and try_.body is block:
            # try: import torch. Where that fails the use cannot work anyway.
            statement = try_
            block = tree.parents[try_]
        if block is tree.module and runs_after_module:
            return True
        # spans, not lines: several statements may share a line
        return tree.is_in(use.node, block) and tree.span(node) < tree.span(use.node)

    @functools.cached_property
    def _deleted_names(self) -> set[str]:
        """The names in the ``del`` statements of the file."""
        names = (use for use in self.tree.uses if len(use.parts) == 1)
        parents = self.tree.parents
        return {use.parts[0] for use in names if isinstance(parents[use.node], cst.Del)}

    @functools.cached_property
    def _unbound_names(self) -> set[str]:
        """The names that are used and that nothing in the file binds."""
        return {
            use.parts[0] for use in self.tree.uses if use.scope.find_scope(use.parts[0]) is None
        }

    def allow_import(self, scope: Scope, statement: cst.CSTNode) -> None:
        """Note that ``import torch`` may be added before a statement, for `at` to rely on.

        It may not be added if ``torch`` means something else in the scope, in a scope around it or
        in one inside it.
        """
        if "torch" in self._deleted_names:
            return
        for other in self.tree.scopes:
            is_inside = scope in other.enclosing_scopes()
            is_around = other in scope.enclosing_scopes()
            if not is_inside and not is_around:
                continue
            bindings = other.bindings.get("torch", ())
            if any(binding.origin != "torch" for binding in bindings):
                return
        self.import_before.setdefault(scope, statement)

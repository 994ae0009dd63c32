"""From ``torch.cuda.amp`` and ``torch.cpu.amp`` to ``torch.amp``, with the same behaviour.

What the old classes do is in ``torch/cuda/amp`` and ``torch/cpu/amp``: each calls the one of
``torch.amp`` with its device. A default differs. The old ``autocast`` had its own dtype, where
today's takes the one in force, which an autocast around it may have changed: so the dtype is
written out, unless ``enabled=False`` makes it idle. The old one also turned the cache of casts on,
where today's leaves it as it is: hardly any code turns it off, so that is not written out.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeGuard

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate import torch_amp_remedies as remedies
from amp_lab.migrate.amp_names import HOMES, NAMED, OLD, OLD_MODULES
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.rewriter import Edit, Rewriter
from amp_lab.migrate.scopes import Binding, Scope, Use
from amp_lab.migrate.torch_amp_edits import ByHand, UseEdits
from amp_lab.migrate.torch_name import TorchName
from amp_lab.migrate.version_guards import forget_fallbacks, is_guarded

TRIGGERS = (*NAMED, "torch cuda.amp", "torch cpu.amp")
_BELOW_OLD = tuple(f"{name}." for name in OLD)  # such as autocast.__init__


def _is_old(origin: str | None) -> TypeGuard[str]:
    if origin is None:
        return False
    return origin in OLD or origin in OLD_MODULES or origin.startswith(_BELOW_OLD)


class Rule(Rewriter):
    """The old names of torch in one file."""

    def __init__(self, tree: Tree, mark: bool = False):
        super().__init__(tree, mark)
        forget_fallbacks(tree)
        self.handled: set[cst.CSTNode] = set()  # import aliases that something was said about
        # Of names with several meanings, by their scope: what was found out, and what to say once.
        self._ambiguous: dict[tuple[Scope | None, str], tuple[bool, str]] = {}
        self._versioned: dict[tuple[Scope | None, str], tuple[str, list[Binding]]] = {}
        self.moved: defaultdict[cst.CSTNode, list[cst.ImportAlias]] = defaultdict(list)
        self.torch = TorchName(tree)
        self.replaced = self._find_replaced()
        self.use_edits = UseEdits(tree, self.replaced, self.torch, self._put_before)

    def run(self) -> None:
        """Rewrite the names that an import binds with all their uses, then the other uses."""
        for node, old in self.replaced.items():
            self.say(node, "by hand", remedies.REPLACED.said(old=old, name=OLD[old][0]))
        alone, groups = self._sort_uses()
        for scope in self.tree.scopes:
            for name, bindings in scope.bindings.items():
                if any(_is_old(binding.origin) for binding in bindings):
                    self._rewrite_group(scope, name, bindings, groups[scope, name])
        for planned in self._plan_uses(alone):  # last: a name may have brought torch with it
            self._rewrite_alone(*planned)
        for scope in self.torch.needed:
            self._put_before(self.torch.brings[scope], "import torch")
        self._rewrite_imports()

    def _sort_uses(self) -> tuple[list, defaultdict[tuple[Scope, str], list]]:
        """The uses through torch or torch.cuda, and those of each name that an import binds."""
        alone: list[tuple[Use, str]] = []
        groups: defaultdict[tuple[Scope, str], list[tuple[Use, str]]] = defaultdict(list)
        for use in self.tree.uses:
            old = next(filter(_is_old, use.origins), None)  # None: not a use of these names
            if old is None or self._is_in_replaced(use.node):
                continue
            name = use.parts[0]
            home = use.scope.find(name)
            bindings = use.scope.bound(name)
            if len(use.origins) > 1:
                self._say_ambiguous(use, bindings)
            elif home is not None and any(_is_old(binding.origin) for binding in bindings):
                groups[home, name].append((use, old))
            else:
                alone.append((use, old))
        for name, bindings in self._versioned.values():
            self._say_versioned(name, bindings)
        return alone, groups

    def _is_in_replaced(self, node: cst.CSTNode) -> bool:
        for replaced in self.replaced:
            if node is replaced or self.tree.is_in(node, replaced):
                return True
        return False

    def _find_replaced(self) -> dict[cst.CSTNode, str]:
        """Where an old name of torch is given another value, and which one."""
        found: list[tuple[cst.CSTNode, Iterable[str | None]]] = []
        for use in self.tree.uses:
            # Only of names that end as an old one: else all parents would be looked for.
            if len(use.parts) > 1 and use.parts[-1] in HOMES:
                parent = self.tree.parents[use.node]
                if isinstance(parent, cst.AssignTarget | cst.Del):
                    found.append((use.node, use.origins))
        for call in self.tree.calls:
            if nodes.name_called(call) in ("patch", "object", "setattr", "delattr"):
                found.append((call, self._patched(call)))
        replaced: dict[cst.CSTNode, str] = {}
        for node, names in found:
            for name in names:
                if name in OLD:
                    replaced[node] = name
        return replaced

    def _patched(self, call: cst.Call) -> tuple[str, ...]:
        """What a call may replace, given as one string, or as a module and a string."""
        names = []
        for value in (arg.value for arg in call.args[:2]):
            origin = self.tree.calls[call].origin(value)
            names.append(nodes.literal(value) or origin or "")
        return *names[:1], ".".join(filter(None, names))

    def _say_ambiguous(self, use: Use, bindings: list[Binding]) -> None:
        name = use.parts[0]
        home = use.scope.find(name)
        if (home, name) not in self._ambiguous:
            self._ambiguous[home, name] = self._what_is_bound(bindings)
        is_guarded_there, lines = self._ambiguous[home, name]
        if is_guarded_there or is_guarded(self.tree, use.node):
            self._versioned[home, name] = (name, bindings)
            return
        self.say(use.node, "by hand", remedies.AMBIGUOUS.said(name=name, lines=lines))

    def _what_is_bound(self, bindings: list[Binding]) -> tuple[bool, str]:
        """Whether some version of torch decides what a name is bound to, and on which lines."""
        bound = [binding.node for binding in bindings]
        self.handled.update(bound)  # so that the group of this name is not rewritten either
        lines = sorted({self.tree.line(node) for node in bound})
        is_guarded_there = any(is_guarded(self.tree, node) for node in bound)
        return is_guarded_there, ", ".join(map(str, lines))

    def _say_versioned(self, name: str, bindings: list[Binding]) -> None:
        olds = (binding.node for binding in bindings if _is_old(binding.origin))
        first = next(olds, bindings[0].node)
        self.say(first, "left", f"{name} depends on the version of torch: left alone")

    # One use.

    def _rewrite_alone(self, use: Use, old: str, edits: list[Edit]) -> None:
        """Rewrite a use to ``torch.amp.…``, by the name under which torch is known there."""
        name, _ = OLD[old]
        torch = self.torch.at(use)
        start, end = self.tree.span(use.node)
        if torch is None:
            written = ".".join(use.parts)
            self.say(use.node, "by hand", remedies.NO_TORCH.said(name=name, written=written))
        elif "#" in self.tree.text[start:end]:
            self.say(use.node, "by hand", remedies.COMMENT_INSIDE.said(name=name))
        else:
            self.replace(use.node, f"{torch}.amp.{name}")
            self._make(use, old, edits)

    def _make(self, use: Use, old: str, edits: list[Edit]) -> None:
        name, device = OLD[old]
        self.edits += edits
        message = f"torch.{device}.amp.{name} is torch.amp.{name} for {device!r}"
        self.say(use.node, "rewritten", message)

    def _plan_uses(self, uses: list[tuple[Use, str]]) -> list[tuple[Use, str, list[Edit]]]:
        """Those of the uses that can be rewritten, with their edits."""
        planned = []
        for use, old in uses:
            if is_guarded(self.tree, use.node):
                written = ".".join(use.parts)
                self.say(use.node, "left", f"{written} depends on a version: left alone")
                continue
            try:
                planned.append((use, old, self.use_edits.plan(use, old)))
            except ByHand as why:
                self.say(use.node, "by hand", str(why))
        return planned

    # A name that an import binds, with all its uses.

    def _rewrite_group(
        self, scope: Scope, name: str, bindings: list[Binding], uses: list[tuple[Use, str]]
    ) -> None:
        bound = [binding.node for binding in bindings]
        aliases = [node for node in bound if isinstance(node, cst.ImportAlias)]
        if self.handled.intersection(bound):
            return
        if any(is_guarded(self.tree, node) for node in bound):
            self._say_versioned(name, bindings)
            return
        stays = self._why_stays(scope, name, bindings, uses)
        if stays:
            self.say(bound[0], "by hand", stays)
            return
        statement = self.tree.parents[aliases[0]]
        assert isinstance(statement, cst.Import | cst.ImportFrom)
        if self.tree.imports[statement] is scope:
            self.torch.offer(scope, statement)
        planned = self._plan_uses(uses)
        if len(planned) < len(uses) or len(self.tree.uses_of(name, scope)) > len(uses):
            for each in planned:  # the import stays for the rest, so these go past it
                self._rewrite_alone(*each)
            return
        for each in planned:
            self._make(*each)
        if not uses:
            return
        for alias in aliases:  # it comes from torch.amp, with all its uses
            self.moved[self.tree.parents[alias]].append(alias)
            self.say(alias, "rewritten", f"{name} is imported from torch.amp")

    def _why_stays(self, scope: Scope, name: str, bindings: list[Binding], uses: list) -> str:
        """Why an import is left, and what to do; empty if it is not."""
        origin = bindings[0].origin
        if not _is_old(origin) or any(binding.origin != origin for binding in bindings):
            return remedies.TWO_THINGS.said(name=name)
        if origin in OLD:
            is_used_here_alone = bool(uses) and name not in self.tree.exported
            if scope.kind != "class" and is_used_here_alone:
                return ""
            _, device = OLD[origin]
            return remedies.CLASS_IMPORTED.said(name=name, device=device)
        if scope.kind != "class":
            return ""
        return remedies.MODULE_IMPORTED.said(name=name, device=OLD_MODULES[origin])

    def _put_before(self, statement: cst.CSTNode, line: str) -> None:
        start = self.tree.span(statement)[0]
        indent = self.tree.indent(start)
        separator = "; "
        if indent is not None:
            separator = self.tree.newline + indent
        self.insert(start, line + separator)

    def _rewrite_imports(self) -> None:
        for star, module in self.tree.stars.items():
            if module.startswith(tuple(OLD_MODULES)) and not is_guarded(self.tree, star):
                self.say(star, "by hand", remedies.STAR.said(module=module))
        for node in self.tree.imports:
            if isinstance(node, cst.Import):
                self._rewrite_import(node)
            elif self.moved[node]:
                self._rewrite_import_from(node, self.moved[node])

    def _rewrite_import(self, node: cst.Import) -> None:
        for alias in node.names:
            is_old = alias.evaluated_name in OLD_MODULES
            if is_old and alias.asname is None and not is_guarded(self.tree, alias):
                self.say(alias, "rewritten", "torch.amp is imported")
                self.replace(alias.name, "torch.amp")
            elif alias in self.moved[node]:
                self.replace(alias.name, "torch.amp")

    def _rewrite_import_from(self, node: cst.ImportFrom, moved: list[cst.ImportAlias]) -> None:
        aliases = nodes.aliases_of(node)
        assert node.module is not None  # what is moved comes from a module of torch
        is_module_of_device = nodes.module_of(node) in ("torch.cuda", "torch.cpu")
        new = "torch" if is_module_of_device else "torch.amp"
        if len(moved) == len(aliases):
            self.replace(node.module, new)
            return
        names = []
        for alias in moved:
            start, end = self.tree.span(alias)
            names.append(self.tree.text[start:end])
        self._put_before(node, f"from {new} import {', '.join(names)}")
        self.remove_names(node, moved)

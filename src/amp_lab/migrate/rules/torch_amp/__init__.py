"""The rule that moves ``torch.cuda.amp`` and ``torch.cpu.amp`` to ``torch.amp``.

The behaviour stays the same. Each old class calls the class of ``torch.amp`` with its device
(``torch/cuda/amp`` and ``torch/cpu/amp``), but two defaults of ``autocast`` differ:

- dtype: the old class has a fixed default; the new class uses the current autocast dtype, which an
  outer autocast may have changed. So the dtype is written out, except with ``enabled=False``.
- cache of casts: the old class turns the cache on; the new class does not change it. Hardly any
  code turns the cache off, so this is not written out.
"""

from collections import defaultdict
from typing import TypeGuard

import libcst as cst

from amp_lab.migrate.rules.torch_amp import remedies
from amp_lab.migrate.rules.torch_amp.torch_name import TorchName
from amp_lab.migrate.rules.torch_amp.uses import ByHand, OldUse, UseEdits
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.amp_names import OLD_MODULES, OLD_NAMES, SUBMODULES, TRIGGER_TEXTS
from amp_lab.migrate.tree.rewriter import Edit, Rewriter
from amp_lab.migrate.tree.scopes import Binding, Scope, Use
from amp_lab.migrate.tree.version_guards import forget_fallbacks, is_guarded

PART = "torch"
TRIGGERS = (*TRIGGER_TEXTS, "torch cuda.amp", "torch cpu.amp")
_ATTRIBUTES_OF_OLD = tuple(f"{name}." for name in OLD_NAMES)  # as in autocast.__init__
_Name = tuple[Scope | None, str]
"""A name in a scope that binds it."""


def _is_old(origin: str | None) -> TypeGuard[str]:
    """Whether a dotted name is an old name, an attribute of one, or a module of old names."""
    if origin is None:
        return False
    return origin in OLD_NAMES or origin in OLD_MODULES or origin.startswith(_ATTRIBUTES_OF_OLD)


def run(file: Rewriter) -> None:
    """Rewrite the old names of torch in a file, or report how to replace them by hand."""
    _OldNames(file).run()


class _OldNames:
    """The old names of torch in one file."""

    def __init__(self, file: Rewriter):
        self.file = file
        self.tree = tree = file.tree
        forget_fallbacks(tree)
        # By the (scope, name) of an import: the uses of the name, and of names with other meanings.
        self.groups: defaultdict[_Name, list[OldUse]] = defaultdict(list)
        self.ambiguous: defaultdict[_Name, list[Use]] = defaultdict(list)
        # By import statement: the names that come from torch.amp now.
        self.moved_aliases: defaultdict[cst.CSTNode, list[cst.ImportAlias]] = defaultdict(list)
        self.torch = TorchName(tree)
        self.replaced_at = self._find_replaced()  # each node with the old name
        self.use_edits = UseEdits(file, self.replaced_at, self.torch)

    def run(self) -> None:
        """Rewrite the names that an import binds with all their uses, then the other uses."""
        for node, old in self.replaced_at.items():
            name = OLD_NAMES[old].name
            self.file.say(node, "by hand", remedies.REPLACED.sentence(old=old, name=name))
        dotted_uses = self._group_uses()
        for (_, name), uses in self.ambiguous.items():
            self._report_ambiguous(name, uses)
        for scope in self.tree.scopes:
            for name, bindings in scope.bindings.items():
                is_old = any(_is_old(binding.origin) for binding in bindings)
                if is_old and (scope, name) not in self.ambiguous:
                    self._rewrite_group(scope, name, bindings)
        # After the groups: these may allow an `import torch` that the other uses need.
        for old, edits in self._plan_uses(dotted_uses):
            self._rewrite_dotted(old, edits)
        for scope in self.torch.scopes_to_import:
            self.file.put_before(self.torch.import_before[scope], "import torch")
        self._rewrite_imports()

    def _group_uses(self) -> list[OldUse]:
        """The uses such as ``torch.cuda.amp.autocast``; others go to `groups` and `ambiguous`.

        Uses in code that replaces an old name are left out.
        """
        dotted_uses: list[OldUse] = []
        for use in self.tree.uses:
            old_names = [origin for origin in use.origins if _is_old(origin)]
            if not old_names or self._is_replaced_here(use.node):
                continue
            name = use.parts[0]
            owner = use.scope.find_scope(name)
            bindings = use.scope.bindings_of(name)
            if len(use.origins) > 1:  # below, the use has one origin and so one old name
                self.ambiguous[owner, name].append(use)
            elif any(_is_old(binding.origin) for binding in bindings):
                self.groups[owner, name].append(OldUse.of(use, old_names[0]))
            else:
                dotted_uses.append(OldUse.of(use, old_names[0]))
        return dotted_uses

    def _is_replaced_here(self, node: cst.CSTNode) -> bool:
        """Whether a node is in a statement or call that replaces an old name of torch."""
        for replaced in self.replaced_at:
            if node is replaced or self.tree.is_in(node, replaced):
                return True
        return False

    def _find_replaced(self) -> dict[cst.CSTNode, str]:
        """The targets and calls that replace an old name of torch, each with that name.

        ``torch.cuda.amp.autocast = fake`` and ``mock.patch("torch.cuda.amp.autocast")``.
        """
        replaced: dict[cst.CSTNode, str] = {}
        for use in self.tree.uses:
            # The last part is asked first: most files then need no table of all parents.
            if len(use.parts) > 1 and use.parts[-1] in SUBMODULES:
                parent = self.tree.parents[use.node]
                if isinstance(parent, cst.AssignTarget | cst.Del):
                    for old in OLD_NAMES.keys() & use.origins:
                        replaced[use.node] = old
        for call in self.tree.calls:
            if nodes.called_name(call) in ("patch", "object", "setattr", "delattr"):
                for old in OLD_NAMES.keys() & self._patched_names(call):
                    replaced[call] = old
        return replaced

    def _patched_names(self, call: cst.Call) -> tuple[str, ...]:
        """The names that a call may replace: its first argument, and ``first.second``.

        For ``patch("torch.cuda.amp.autocast")`` and ``patch.object(torch.cuda.amp, "autocast")``.
        """
        names = []  # of the first two arguments, without those that are neither string nor name
        for arg in call.args[:2]:
            origin = self.tree.calls[call].origin(arg.value)
            names.append(nodes.string_value(arg.value) or origin or "")
        first_name = names[:1]  # a list, empty if the call has no arguments
        both_names = ".".join(filter(None, names))
        return *first_name, both_names

    def _report_ambiguous(self, name: str, uses: list[Use]) -> None:
        """Report the uses of a name with several meanings.

        Those that depend on torch's version are reported together, at the import.
        """
        bindings = uses[0].scope.bindings_of(name)
        lines = sorted({self.tree.line(binding.node) for binding in bindings})
        lines_text = ", ".join(map(str, lines))
        has_guard = any(is_guarded(self.tree, binding.node) for binding in bindings)
        is_versioned = False
        for use in uses:
            if has_guard or is_guarded(self.tree, use.node):
                is_versioned = True
            else:
                advice = remedies.AMBIGUOUS.sentence(name=name, lines=lines_text)
                self.file.say(use.node, "by hand", advice)
        if is_versioned:
            self._report_versioned(name, bindings)

    def _report_versioned(self, name: str, bindings: list[Binding]) -> None:
        """Report, at the first binding to an old name, that a name depends on the version."""
        old_bindings = [binding for binding in bindings if _is_old(binding.origin)]
        first = (old_bindings or bindings)[0]
        self.file.say(first.node, "left", f"{name} depends on the version of torch: not changed")

    # Uses such as torch.cuda.amp.autocast, each by itself.

    def _rewrite_dotted(self, old: OldUse, edits: list[Edit]) -> None:
        """Rewrite a use to ``torch.amp.autocast``, with the name that torch has in this place.

        Reports the use if torch has no name there, or if a comment stands inside the old name.
        """
        use = old.use
        torch = self.torch.at(use)
        start, end = self.tree.span(use.node)
        if torch is None:
            self._report(old.by_hand(remedies.NO_TORCH, written=".".join(use.parts)), use)
        elif "#" in self.tree.text[start:end]:
            self._report(old.by_hand(remedies.COMMENT_INSIDE), use)
        else:
            self.file.replace(use.node, f"{torch}.amp.{old.name}")
            self._apply_edits(old, edits)

    def _report(self, error: ByHand, use: Use) -> None:
        """Report a use that cannot be rewritten."""
        self.file.say(use.node, "by hand", str(error))

    def _apply_edits(self, old: OldUse, edits: list[Edit]) -> None:
        """Make the edits beside a name, such as those of its arguments, and report the use."""
        self.file.edits += edits
        message = f"torch.{old.device}.amp.{old.name} is torch.amp.{old.name} for {old.device!r}"
        self.file.say(old.use.node, "rewritten", message)

    def _plan_uses(self, uses: list[OldUse]) -> list[tuple[OldUse, list[Edit]]]:
        """Each (use, edits) that can be rewritten; the other uses are reported."""
        planned = []
        for old in uses:
            if is_guarded(self.tree, old.use.node):
                written = ".".join(old.use.parts)
                self.file.say(old.use.node, "left", f"{written} depends on a version: not changed")
                continue
            try:
                planned.append((old, self.use_edits.plan(old)))
            except ByHand as error:
                self._report(error, old.use)
        return planned

    # Names that an import binds, each with all its uses.

    def _rewrite_group(self, scope: Scope, name: str, bindings: list[Binding]) -> None:
        """Move the import of a name to torch.amp, if all its uses can be rewritten.

        If only some can, those are rewritten as dotted names, and the import stays for the others.
        """
        uses = self.groups[scope, name]
        binding_nodes = [binding.node for binding in bindings]
        aliases = [node for node in binding_nodes if isinstance(node, cst.ImportAlias)]
        if any(is_guarded(self.tree, node) for node in binding_nodes):
            self._report_versioned(name, bindings)
            return
        advice = self._advice_on_import(scope, name, bindings, uses)
        if advice:
            self.file.say(binding_nodes[0], "by hand", advice)
            return
        statement = self.tree.parents[aliases[0]]
        assert isinstance(statement, cst.Import | cst.ImportFrom)
        if self.tree.imports[statement] is scope:  # else `global` takes the name elsewhere
            self.torch.allow_import(scope, statement)
        planned = self._plan_uses(uses)
        has_other_uses = len(self.tree.uses_of(name, scope)) > len(uses)
        if len(planned) < len(uses) or has_other_uses:
            for old, edits in planned:
                self._rewrite_dotted(old, edits)
            return
        for old, edits in planned:
            self._apply_edits(old, edits)
        if not uses:  # a module that is imported and not used stays
            return
        for alias in aliases:
            self.moved_aliases[self.tree.parents[alias]].append(alias)
            self.file.say(alias, "rewritten", f"{name} is imported from torch.amp")

    def _advice_on_import(
        self, scope: Scope, name: str, bindings: list[Binding], uses: list[OldUse]
    ) -> str:
        """What to do by hand about an import that cannot be moved; empty if it can be.

        A name in a class may also be read as an attribute, such as ``self.amp``, so it stays.
        """
        origin = bindings[0].origin
        if not _is_old(origin) or any(binding.origin != origin for binding in bindings):
            return remedies.TWO_THINGS.sentence(name=name)
        if origin in OLD_NAMES:
            is_used_here_alone = bool(uses) and name not in self.tree.exported_names
            if scope.kind != "class" and is_used_here_alone:
                return ""
            device = OLD_NAMES[origin].device
            return remedies.CLASS_IMPORTED.sentence(name=name, device=device)
        if scope.kind != "class":
            return ""
        return remedies.MODULE_IMPORTED.sentence(name=name, device=OLD_MODULES[origin])

    def _rewrite_imports(self) -> None:
        """Rewrite the imports themselves, now that it is known which names are moved."""
        for star, module in self.tree.star_imports.items():
            if module.startswith(tuple(OLD_MODULES)) and not is_guarded(self.tree, star):
                self.file.say(star, "by hand", remedies.STAR.sentence(module=module))
        for node in self.tree.imports:
            if isinstance(node, cst.Import):
                self._rewrite_import(node)
            elif self.moved_aliases[node]:
                self._rewrite_import_from(node, self.moved_aliases[node])

    def _rewrite_import(self, node: cst.Import) -> None:
        """Rewrite ``import torch.cuda.amp``; with ``as`` only if all uses of its name are moved."""
        for alias in node.names:
            is_old = alias.evaluated_name in OLD_MODULES
            if is_old and alias.asname is None and not is_guarded(self.tree, alias):
                self.file.say(alias, "rewritten", "torch.amp is imported")
                self.file.replace(alias.name, "torch.amp")
            elif alias in self.moved_aliases[node]:
                self.file.replace(alias.name, "torch.amp")

    def _rewrite_import_from(self, node: cst.ImportFrom, moved: list[cst.ImportAlias]) -> None:
        """Import the moved names from torch.amp; the others stay, in an import of their own."""
        aliases = nodes.aliases_of(node)
        assert node.module is not None  # moved names come from a module of torch
        imports_module = nodes.module_of(node) in ("torch.cuda", "torch.cpu")  # import amp
        new_module = "torch" if imports_module else "torch.amp"
        if len(moved) == len(aliases):
            self.file.replace(node.module, new_module)
            return
        names = []
        for alias in moved:
            start, end = self.tree.span(alias)
            names.append(self.tree.text[start:end])
        self.file.put_before(node, f"from {new_module} import {', '.join(names)}")
        self.file.remove_names(node, moved)

"""From NVIDIA Apex to PyTorch: rewritten where that is certain, else reported with what to do.

A name is rewritten if torch has an exact equal. A training loop is not: what `amp.initialize` and
`amp.scale_loss` do is spread over model, optimizer and loop, so each such line is reported, and
gets a comment if marks are asked for. What is chosen where Apex is installed stays whole.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.apex_names import (
    EQUALS,
    UNUSED,
    Equal,
    advice_on,
    is_apex,
    public_name,
    section_of,
)
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.rewriter import Rewriter
from amp_lab.migrate.scopes import Binding, Scope, Use
from amp_lab.migrate.version_guards import is_guarded

TRIGGERS = ("apex",)
MARK = "# amp-lab migrate: "
_AVAILABLE = re.compile(
    r"(?i)^_*(?:has|have|is|no|found|imported)_*(?:\w+_)?apex|apex_*(?:is_*)?(?:avail|install|import|found|exist)"
)
_LOOKS_FOR = re.compile(r"(?i)find|avail|install|import|exist|has_")  # find_spec("apex")


class Rule(Rewriter):
    """The names of Apex in one file."""

    def __init__(self, tree: Tree, mark: bool = False):
        super().__init__(tree, mark)
        self.advice: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)  # by statement
        self.imported: defaultdict[cst.CSTNode, list[Use]] = defaultdict(list)  # by import alias
        self.spelled: Counter[cst.CSTNode] = Counter()  # uses rewritten to torch, by import alias

    def run(self) -> None:
        """Rewrite what is certain, and report the rest."""
        for use in self.tree.uses:
            origins = [origin for origin in use.origins if origin and origin.startswith("apex.")]
            if origins:
                self._look_at(use, min(origins))
        for star, module in self.tree.stars.items():
            if is_apex(module):
                self._advise(star, module)
        for node, scope in self.tree.imports.items():
            self._rewrite_import(node, scope)
        if self.mark:
            self._put_marks()  # last: one statement may have several

    def _look_at(self, use: Use, old: str) -> None:
        choice = self._choice(use)
        if choice is not None:
            self.say(choice, "left", "a choice for where Apex is installed: left alone")
        elif self._is_torchs_elsewhere(use, EQUALS.get(public_name(old))):
            self.say(use.node, "left", "the other arm is torch's own already: left alone")
        elif not self._rewrite(use, public_name(old)):
            self._advise(use.node, old)

    # What is chosen where Apex is installed.

    def _choice(self, use: Use) -> cst.CSTNode | None:
        """What decides, by whether Apex is installed, if a use runs; else None."""
        for binding in use.scope.bound(use.parts[0]):
            if not is_apex(binding.origin) and not binding.is_none:
                return use.node  # what it is called elsewhere is torch's, or the file's own
        for parent, child in self.tree.ancestors(use.node):
            if self._decides(parent, child):
                return parent
        return None

    def _decides(self, parent: cst.CSTNode, child: cst.CSTNode) -> bool:
        """Whether it depends on Apex, in a statement or an operator, if a part of it runs."""
        if isinstance(parent, cst.Try):
            return child is parent.body and not _always_ends(parent)
        if isinstance(parent, cst.With):
            return child is parent.body and _suppresses(parent)
        is_operator = isinstance(parent, cst.BooleanOperation)
        test = parent.left if is_operator else getattr(parent, "test", None)
        if test is None or test is child:
            return False
        return self._asks_for_apex(test)

    def _asks_for_apex(self, test: cst.CSTNode) -> bool:
        if _looks_for_apex(test):
            return True
        for use in self.tree.uses_among(nodes.below(test)):
            if _AVAILABLE.search(use.parts[-1]) or self._tells_of_apex(use):
                return True
        return False

    def _tells_of_apex(self, use: Use) -> bool:
        """Whether a name is of Apex, or was set where it was tried."""
        if any(map(is_apex, use.origins)):
            return True
        bindings = use.scope.bound(use.parts[-1])
        for binding in bindings:
            if binding.source is not None and _looks_for_apex(binding.source):
                return True
        return any(map(self._is_tried, bindings))

    def _is_tried(self, binding: Binding) -> bool:
        """Whether a name is set in a try that has to do with Apex."""
        for parent, _ in self.tree.ancestors(binding.node):
            if isinstance(parent, cst.Try) and "apex" in self.tree.code(parent.body):
                return True
        return False

    def _is_torchs_elsewhere(self, use: Use, equal: Equal | None) -> bool:
        """Whether the other arm of an `if` makes the same by torch: both would become equal."""
        call = self.tree.call_of(use.node)
        if call is None or equal is None or equal.added:
            return False
        for parent, child in self.tree.ancestors(use.node):
            arm = _other_arm(parent, child)
            if arm is not None and self._makes(arm, equal.dotted_name, call.args):
                return True
        return False

    def _makes(self, arm: cst.CSTNode, name: str, args: Sequence[cst.Arg]) -> bool:
        """Whether something of a dotted name is called in an arm, with the same arguments."""
        values = self._values(args)
        for node in nodes.below(arm):
            if not isinstance(node, cst.Call):
                continue
            origin = self.tree.calls[node].origin(node.func)
            if origin == name and self._values(node.args) == values:
                return True
        return False

    def _values(self, args: Sequence[cst.Arg]) -> list[str]:
        """The code of each argument, without its keyword."""
        return [self.tree.code(arg.value) for arg in args]

    # What is certain.

    @functools.cached_property
    def compared(self) -> set[str]:
        """The names of Apex that stand somewhere for a type."""
        compared: set[str] = set()
        for use in self.tree.uses:
            if self.tree.place_of_type(use.node) is not None:
                compared.update(public_name(origin) for origin in use.origins if origin)
        return compared

    def _rewrite(self, use: Use, old: str) -> bool:
        """Rewrite a use, or leave it to its import, if that is certain."""
        binding = use.scope.only(use.parts[0])
        if binding is None or old not in EQUALS or is_guarded(self.tree, use.node):
            return False
        if self._is_optional(binding) or not self._is_plain_call(use, EQUALS[old]):
            return False
        if len(use.parts) == 1:  # its import has to change with it, so that decides
            self.imported[binding.node].append(use)
            return True
        if not self._rewrite_spelled(use, old):
            return False
        self.spelled[binding.node] += 1
        return True

    def _is_optional(self, binding: Binding) -> bool:
        """Whether its import stays, as what is done without Apex may be elsewhere."""
        for parent, _ in self.tree.ancestors(binding.node):
            if isinstance(parent, cst.Try) and not _always_ends(parent):
                return True
        return False

    def _is_plain_call(self, use: Use, equal: Equal) -> bool:
        """Whether a use, a call or the name of a type, means the same by the new name."""
        call = self.tree.call_of(use.node)
        if call is None:  # a check of the type goes with what is made, by the import of both
            return len(use.parts) == 1 and self.tree.place_of_type(use.node) is not None
        # In an f-string a quote or a comment of ours might end the string.
        if self.tree.is_in(use.node, cst.FormattedString):
            return False
        if not call.args or any(arg.star for arg in call.args):
            return False
        given = nodes.arguments(call.args)
        if not given.keys() <= set(equal.keywords.split()):
            return False
        return len(call.args) - len(given) <= equal.positional

    def _rewrite_to(self, use: Use, old: str, name: str) -> None:
        call = self.tree.call_of(use.node)
        equal = EQUALS[old]
        self.replace(use.node, name)
        if call is not None:
            self._add_arguments(call, equal)
        self.say(use.node, "rewritten", f"{old} is {equal.dotted_name}")

    def _add_arguments(self, call: cst.Call, equal: Equal) -> None:
        """Add the keywords that give torch's class the defaults of Apex's."""
        given = nodes.arguments(call.args)
        added = ""
        for argument in equal.added.split():
            keyword, _, _ = argument.partition("=")
            if keyword not in given:
                added += f", {argument}"
        _, end = self.tree.span(call.args[-1])
        self.insert(end, added)

    def _rewrite_spelled(self, use: Use, old: str) -> bool:
        """Rewrite a use to a dotted name of torch, if torch is imported by that name."""
        origins = {binding.origin for binding in use.scope.bound("torch")}
        if origins != {"torch"}:
            return False
        if old in self.compared:  # what is made has to be of the class that is asked for
            return False
        self._rewrite_to(use, old, EQUALS[old].dotted_name)
        return True

    def _rewrite_import(self, node: cst.Import | cst.ImportFrom, scope: Scope) -> None:
        """Replace an import if each name in it can be, else the uses, and drop what is left."""
        olds: dict[cst.ImportAlias, str] = {}
        for alias in nodes.aliases_of(node):
            olds[alias] = public_name(self.tree.imported[alias] or "")
        if not any(map(is_apex, olds.values())):
            return
        counts: dict[cst.ImportAlias, int] = {}
        for alias in olds:
            uses = self.tree.uses_of(nodes.bound_name(alias), scope)
            counts[alias] = len(uses)
        if isinstance(node, cst.ImportFrom) and self._can_be_torch(node, olds, counts):
            self._import_from_torch(node, olds)
            return
        for alias, old in olds.items():
            self._rewrite_imported(alias, old)
        gone = [alias for alias in olds if self.spelled[alias] == counts[alias] > 0]
        if gone and not self.tree.is_in(node, cst.Try):
            self.remove_names(node, gone)
        for alias, old in olds.items():
            if counts[alias] == 0 and is_apex(old):
                self._advise_unused(alias, old, scope)

    def _rewrite_imported(self, alias: cst.ImportAlias, old: str) -> None:
        """Rewrite the uses of a name whose import cannot change, or report them."""
        for use in self.imported[alias]:
            if self._rewrite_spelled(use, old):
                self.spelled[alias] += 1
            else:
                self._advise(use.node, old)

    def _can_be_torch(
        self,
        node: cst.ImportFrom,
        olds: dict[cst.ImportAlias, str],
        counts: dict[cst.ImportAlias, int],
    ) -> bool:
        """Whether every name of an import has an equal in one module, by which all uses can go."""
        if not set(olds.values()) <= EQUALS.keys() or is_guarded(self.tree, node):
            return False
        for alias in olds:
            uses = self.imported[alias]
            if counts[alias] != len(uses):
                return False
            if not any(self.tree.call_of(use.node) for use in uses):
                return False  # others make what is only asked for here, and may still have Apex
        new_names = set()
        for alias, old in olds.items():
            if not alias.asname:  # else it is the alias that stays bound
                new_names.add(EQUALS[old].name.partition(".")[0])
        new_names -= {nodes.bound_name(alias) for alias in olds}
        if any(new_names & scope.bindings.keys() for scope in self.tree.scopes):
            return False  # AdamW may be another
        modules = {EQUALS[old].module for old in olds.values()}
        return len(modules) == 1

    def _import_from_torch(self, node: cst.ImportFrom, olds: dict[cst.ImportAlias, str]) -> None:
        assert node.module is not None  # it is an absolute import
        first_old = next(iter(olds.values()))
        self.replace(node.module, EQUALS[first_old].module)
        for alias, old in olds.items():
            bound, dot, rest = EQUALS[old].name.partition(".")
            self.replace(alias.name, bound)
            for use in self.imported[alias]:
                local = bound if alias.asname is None else use.parts[0]
                self._rewrite_to(use, old, local + dot + rest)

    # What is not.

    def _advise(self, node: cst.CSTNode, old: str) -> None:
        """Say what is to be done about a name, and where to read more."""
        self._report(node, advice_on(old), f' (notebook 13, "{section_of(old)}")')

    def _report(self, node: cst.CSTNode, advice: str, reference: str = "") -> None:
        """Report what is to be done by hand, with a reference, which a comment leaves out."""
        self.say(node, "by hand", f"{advice}{reference}")
        self.advice[self.tree.statement(node)].append(advice)

    def _advise_unused(self, alias: cst.ImportAlias, old: str, scope: Scope) -> None:
        """Say what to do with an import that nothing uses here, unless it is a choice."""
        if self._is_chosen(alias):
            return
        name = nodes.bound_name(alias)
        is_exported = name in self.tree.exported or alias.evaluated_alias == alias.evaluated_name
        if is_exported or scope.kind == "class":  # used from elsewhere
            self._advise(alias, old)
        else:
            self._report(alias, UNUSED.said(name=name))

    def _is_chosen(self, alias: cst.ImportAlias) -> bool:
        """Whether an import runs only where Apex is installed, for some versions, or for types."""
        if is_guarded(self.tree, alias):
            return True
        for parent, child in self.tree.ancestors(alias):
            if self._decides(parent, child) or _is_for_types(parent):
                return True
        return False

    def _put_marks(self) -> None:
        """Put each advice as a comment above its statement, unless it is there."""
        for statement, advice in self.advice.items():
            start, _ = self.tree.span(statement)
            indent = self.tree.indent(start) or ""
            marks_above = self._marks_above(start - len(indent))
            for sentence in dict.fromkeys(advice):
                if sentence not in marks_above:
                    self.insert(start, f"{MARK}{sentence}{self.tree.newline}{indent}")

    def _marks_above(self, offset: int) -> set[str]:
        """The advice that a run before has put above a line."""
        marks = set()
        for line in reversed(self.tree.text[:offset].splitlines()):
            if not line.lstrip().startswith(MARK):
                break
            marks.add(line.strip().removeprefix(MARK))
        return marks


def _other_arm(parent: cst.CSTNode, child: cst.CSTNode) -> cst.CSTNode | None:
    """The arm of an `if` that runs where one of its arms does not."""
    if not isinstance(parent, cst.If | cst.IfExp):
        return None
    if child is parent.body:
        return parent.orelse
    if child is parent.orelse:
        return parent.body
    return None


def _always_ends(tried: cst.Try) -> bool:
    """Whether nothing goes on without what is tried: no choice."""
    return all(_ends_program(nodes.last_statement(handler.body)) for handler in tried.handlers)


def _ends_program(statement: cst.CSTNode) -> bool:
    """Whether a statement raises, or leaves Python, as ``sys.exit`` does."""
    if isinstance(statement, cst.Raise):
        return True
    if not isinstance(statement, cst.Expr) or not isinstance(statement.value, cst.Call):
        return False
    return nodes.name_called(statement.value) in ("exit", "_exit", "quit")


def _suppresses(block: cst.With) -> bool:
    """Whether errors in a block are ignored, by ``contextlib.suppress``."""
    for item in block.items:
        if isinstance(item.item, cst.Call) and nodes.name_called(item.item) == "suppress":
            return True
    return False


def _looks_for_apex(node: cst.CSTNode) -> bool:
    """Whether something asks if Apex is installed: ``importlib.util.find_spec("apex")``."""
    for call in nodes.below(node):
        if isinstance(call, cst.Call) and _LOOKS_FOR.search(nodes.name_called(call)):
            names = [nodes.literal(arg.value) for arg in call.args]
            if any(map(is_apex, names)):
                return True
    return False


def _is_for_types(node: cst.CSTNode) -> bool:
    """Whether it is an ``if TYPE_CHECKING``, in which nothing runs."""
    if not isinstance(node, cst.If):
        return False
    parts = nodes.dotted(node.test)
    return parts is not None and parts[-1] == "TYPE_CHECKING"

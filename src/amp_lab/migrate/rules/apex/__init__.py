"""The rule that moves code from NVIDIA Apex to PyTorch, or reports what to do by hand.

A name is rewritten if torch has an exact equivalent. A training loop is not rewritten, because the
equivalent of `amp.initialize` and `amp.scale_loss` is spread over model, optimizer and loop. Each
such line is reported, and gets a comment with `mark`. If a file has code for machines with and
without Apex, the rule does not change the code that runs only with Apex.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import libcst as cst

from amp_lab.migrate.rules.apex.names import (
    EQUALS,
    UNUSED,
    Equal,
    advice_on,
    is_apex,
    public_name,
    section_of,
)
from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.rewriter import Rewriter
from amp_lab.migrate.tree.scopes import Binding, Scope, Use
from amp_lab.migrate.tree.version_guards import is_guarded

PART = "apex"
TRIGGERS = ("apex",)
MARK = "# amp-lab migrate: "
# has_apex, APEX_AVAILABLE, is_apex_installed
_AVAILABILITY_NAME = re.compile(
    r"(?i)^_*(?:has|have|is|no|found|imported)_*(?:\w+_)?apex|apex_*(?:is_*)?(?:avail|install|import|found|exist)"
)
_LOOKUP_NAME = re.compile(r"(?i)find|avail|install|import|exist|has_")  # find_spec("apex")


def run(file: Rewriter) -> None:
    """Rewrite the names of Apex in a file, or report how to replace them by hand."""
    _ApexNames(file).run()


class _ApexNames:
    """The names of Apex in one file."""

    def __init__(self, file: Rewriter):
        self.file = file
        self.tree = file.tree
        self.advice: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)  # by statement
        # By import alias: uses such as FusedAdam, which change together with their import.
        self.bare_uses: defaultdict[cst.CSTNode, list[Use]] = defaultdict(list)
        # By import alias: the number of uses that are torch.optim.AdamW now, without the import.
        self.dotted_rewrites: Counter[cst.CSTNode] = Counter()

    def run(self) -> None:
        """Rewrite what is certain, and report the rest."""
        for use in self.tree.uses:
            origins = [origin for origin in use.origins if origin and origin.startswith("apex.")]
            if origins:
                self._handle_use(use, min(origins))  # a set: min gives the same in each run
        for star, module in self.tree.star_imports.items():
            if is_apex(module):
                self._advise(star, module)
        for node, scope in self.tree.imports.items():
            self._rewrite_import(node, scope)
        if self.file.mark:
            self._put_marks()  # last: one statement may have several

    def _handle_use(self, use: Use, old: str) -> None:
        """Rewrite, leave or report one use of the name `old`, such as ``apex.amp.initialize``."""
        name = public_name(old)
        deciding_node = self._deciding_node(use)
        if deciding_node is not None:
            self.file.say(
                deciding_node, "left", "this code runs only where Apex is installed: not changed"
            )
        elif self._is_torch_in_other_arm(use, EQUALS.get(name)):
            self.file.say(use.node, "left", "the other branch already uses torch: not changed")
        elif not self._rewrite(use, name):
            self._advise(use.node, old)

    # Choices: code that runs only where Apex is installed.

    def _deciding_node(self, use: Use) -> cst.CSTNode | None:
        """The node that makes a use depend on whether Apex is installed; None if none does."""
        for binding in use.scope.bindings_of(use.parts[0]):
            if not is_apex(binding.origin) and not binding.is_none:
                return use.node  # without Apex, the same name stands for something else
        for parent, child in self.tree.ancestors(use.node):
            if self._decides(parent, child):
                return parent
        return None

    def _decides(self, parent: cst.CSTNode, child: cst.CSTNode) -> bool:
        """Whether it depends on Apex being installed whether `parent` runs its part `child`."""
        if isinstance(parent, cst.Try):
            return child is parent.body and not _has_only_fatal_handlers(parent)
        if isinstance(parent, cst.With):
            return child is parent.body and "suppress" in nodes.context_names(parent)
        # HAS_APEX and FusedAdam; if HAS_APEX: FusedAdam
        is_operator = isinstance(parent, cst.BooleanOperation)
        test = parent.left if is_operator else getattr(parent, "test", None)
        if test is None or test is child:  # no condition, or `child` is that condition
            return False
        return self._asks_for_apex(test)

    def _asks_for_apex(self, test: cst.CSTNode) -> bool:
        """Whether a condition depends on whether Apex is installed."""
        if _looks_for_apex(test):
            return True
        for use in self.tree.uses_in(nodes.walk(test)):
            if _AVAILABILITY_NAME.search(use.parts[-1]) or self._depends_on_apex(use):
                return True
        return False

    def _depends_on_apex(self, use: Use) -> bool:
        """Whether a name is Apex's, or is set by a try or a look-up of Apex."""
        if any(map(is_apex, use.origins)):
            return True
        # By the last part: an attribute, flags.has_apex, counts as the variable has_apex.
        bindings = use.scope.bindings_of(use.parts[-1])
        for binding in bindings:
            if binding.source is not None and _looks_for_apex(binding.source):
                return True
        return any(map(self._is_set_in_apex_try, bindings))

    def _is_set_in_apex_try(self, binding: Binding) -> bool:
        """Whether a name is set in a `try` whose body names Apex."""
        for parent, _ in self.tree.ancestors(binding.node):
            if isinstance(parent, cst.Try) and "apex" in self.tree.code(parent.body):
                return True
        return False

    def _is_torch_in_other_arm(self, use: Use, equal: Equal | None) -> bool:
        """Whether the other arm of an `if` has the same call by torch, so both would be equal.

        `equal` is torch's equal of the name that is used, or None.
        """
        call = self.tree.call_of(use.node)
        # with arguments to add, a call with the same arguments would not be the same
        if call is None or equal is None or equal.added:
            return False
        for parent, child in self.tree.ancestors(use.node):
            if not isinstance(parent, cst.If | cst.IfExp) or child is parent.test:
                continue
            arm = parent.orelse if child is parent.body else parent.body
            if arm is not None and self._calls_same(arm, equal.dotted_name, call.args):
                return True
        return False

    def _calls_same(self, arm: cst.CSTNode, name: str, args: Sequence[cst.Arg]) -> bool:
        """Whether an arm calls the function of a dotted name with the same arguments."""
        values = self._argument_codes(args)
        for node in nodes.walk(arm):
            if not isinstance(node, cst.Call):
                continue
            origin = self.tree.calls[node].origin(node.func)
            if origin == name and self._argument_codes(node.args) == values:
                return True
        return False

    def _argument_codes(self, args: Sequence[cst.Arg]) -> list[str]:
        """The code of each argument, without its keyword."""
        return [self.tree.code(arg.value) for arg in args]

    # Names with an exact equal in torch.

    @functools.cached_property
    def names_as_types(self) -> set[str]:
        """The imported names used as types, as in ``isinstance``; Apex's by `public_name`."""
        names_as_types: set[str] = set()
        for use in self.tree.uses:
            if self.tree.type_context(use.node) is not None:
                names_as_types.update(public_name(origin) for origin in use.origins if origin)
        return names_as_types

    def _rewrite(self, use: Use, old: str) -> bool:
        """Rewrite a use, or add it to the `bare_uses` of its import; False if it has to stay."""
        binding = use.scope.only_binding(use.parts[0])
        if binding is None or old not in EQUALS or is_guarded(self.tree, use.node):
            return False
        if self._is_optional(binding) or not self._means_same_in_torch(use, EQUALS[old]):
            return False
        if len(use.parts) == 1:  # a bare name: `_rewrite_import` decides when it has all uses
            self.bare_uses[binding.node].append(use)
            return True
        if not self._rewrite_dotted(use, old):
            return False
        self.dotted_rewrites[binding.node] += 1
        return True

    def _is_optional(self, binding: Binding) -> bool:
        """Whether a name is imported in a `try` after which the program goes on without Apex."""
        for parent, _ in self.tree.ancestors(binding.node):
            if isinstance(parent, cst.Try) and not _has_only_fatal_handlers(parent):
                return True
        return False

    def _means_same_in_torch(self, use: Use, equal: Equal) -> bool:
        """Whether a use, a call or the name of a type, means the same with torch's name."""
        call = self.tree.call_of(use.node)
        if call is None:
            # A bare name changes by its import, and so in isinstance and in calls alike.
            return len(use.parts) == 1 and self.tree.type_context(use.node) is not None
        # In an f-string a quote or a comment of ours might end the string.
        if self.tree.is_in(use.node, cst.FormattedString):
            return False
        # Apex's function needs an argument; with * or **, the arguments are not known.
        if not call.args or any(arg.star for arg in call.args):
            return False
        # torch's name takes these keywords, and so many positional arguments, with one meaning.
        keywords = nodes.arguments(call.args).keys()
        if not keywords <= set(equal.keywords.split()):
            return False
        positional_count = len(call.args) - len(keywords)
        return positional_count <= equal.positional

    def _rewrite_to(self, use: Use, old: str, name: str) -> None:
        """Write `name`, which is torch's equal of `old` at this place, and its arguments."""
        call = self.tree.call_of(use.node)
        equal = EQUALS[old]
        self.file.replace(use.node, name)
        if call is not None:
            self._add_arguments(call, equal)
        self.file.say(use.node, "rewritten", f"{old} is {equal.dotted_name}")

    def _add_arguments(self, call: cst.Call, equal: Equal) -> None:
        """Add the arguments of `equal.added` that a call lacks: they are Apex's defaults."""
        arguments = nodes.arguments(call.args)
        added = ""
        for argument in equal.added.split():
            keyword, _, _ = argument.partition("=")
            if keyword not in arguments:
                added += f", {argument}"
        _, end = self.tree.span(call.args[-1])
        self.file.insert(end, added)

    def _rewrite_dotted(self, use: Use, old: str) -> bool:
        """Rewrite a use to a dotted name of torch; False if it stays.

        The use stays where ``torch`` is not only the module, or if the file uses `old` as a type.
        """
        origins = {binding.origin for binding in use.scope.bindings_of("torch")}
        if origins != {"torch"}:
            return False
        if old in self.names_as_types:  # isinstance(optimizer, FusedAdam) would no longer be true
            return False
        self._rewrite_to(use, old, EQUALS[old].dotted_name)
        return True

    def _rewrite_import(self, node: cst.Import | cst.ImportFrom, scope: Scope) -> None:
        """Move an import to torch with its uses, if all can be; else rewrite uses one by one.

        Then delete the names that nothing uses any more, and report those that nothing ever used.
        """
        old_names: dict[cst.ImportAlias, str] = {}
        for alias in nodes.aliases_of(node):
            old_names[alias] = public_name(self.tree.alias_origins[alias] or "")
        if not any(map(is_apex, old_names.values())):
            return
        counts: dict[cst.ImportAlias, int] = {}  # of uses in the file, also of those that stay
        for alias in old_names:
            counts[alias] = len(self.tree.uses_of(nodes.bound_name(alias), scope))
        if isinstance(node, cst.ImportFrom) and self._can_be_torch(node, old_names, counts):
            self._import_from_torch(node, old_names)
            return
        removable: list[cst.ImportAlias] = []
        for alias, old in old_names.items():
            self._rewrite_bare_uses(alias, old)
            count = counts[alias]
            if count == 0 and is_apex(old):
                self._advise_unused(alias, old, scope)
            elif count > 0 and self.dotted_rewrites[alias] == count:
                removable.append(alias)  # all its uses are torch.optim.AdamW and the like now
        if removable and not self.tree.is_in(node, cst.Try):  # it may be a test for Apex
            self.file.remove_names(node, removable)

    def _rewrite_bare_uses(self, alias: cst.ImportAlias, old: str) -> None:
        """Rewrite the uses of a name whose import cannot change, or report them."""
        for use in self.bare_uses[alias]:
            if self._rewrite_dotted(use, old):
                self.dotted_rewrites[alias] += 1
            else:
                self._advise(use.node, old)

    def _can_be_torch(
        self,
        node: cst.ImportFrom,
        old_names: dict[cst.ImportAlias, str],
        counts: dict[cst.ImportAlias, int],
    ) -> bool:
        """Whether an import and all uses of its names can be moved to one module of torch.

        `old_names` has the public name in Apex of each alias, such as
        ``apex.optimizers.FusedAdam``, and `counts` how many uses it has in the file.
        """
        if not set(old_names.values()) <= EQUALS.keys() or is_guarded(self.tree, node):
            return False
        for alias in old_names:
            uses = self.bare_uses[alias]
            if counts[alias] != len(uses):
                return False  # some uses have to stay
            if not any(self.tree.call_of(use.node) for use in uses):
                return False  # only isinstance: another file makes the object, maybe by Apex
        new_names = set()
        for alias, old in old_names.items():
            if not alias.asname:  # with `as`, the file keeps its name
                new_names.add(EQUALS[old].name.partition(".")[0])
        new_names -= {nodes.bound_name(alias) for alias in old_names}  # the import itself binds it
        if any(new_names & scope.bindings.keys() for scope in self.tree.scopes):
            return False  # the file has another AdamW
        modules = {EQUALS[old].module for old in old_names.values()}
        return len(modules) == 1

    def _import_from_torch(
        self, node: cst.ImportFrom, old_names: dict[cst.ImportAlias, str]
    ) -> None:
        """Replace the module, the names and the uses of an import that `_can_be_torch`."""
        assert node.module is not None  # it is an absolute import
        (module,) = {EQUALS[old].module for old in old_names.values()}
        self.file.replace(node.module, module)
        for alias, old in old_names.items():
            # a function of a class, SyncBatchNorm.convert_sync_batchnorm, comes with its class
            imported_name, dot, attribute = EQUALS[old].name.partition(".")
            self.file.replace(alias.name, imported_name)
            for use in self.bare_uses[alias]:
                local_name = imported_name if alias.asname is None else use.parts[0]
                self._rewrite_to(use, old, local_name + dot + attribute)

    # Names to be changed by hand.

    def _advise(self, node: cst.CSTNode, old: str) -> None:
        """Report what to do about a name of Apex, and where to read more."""
        self._report(node, advice_on(old), f' (notebook 13, "{section_of(old)}")')

    def _report(self, node: cst.CSTNode, advice: str, reference: str = "") -> None:
        """Report what is to be done by hand; `reference` is left out of the comment."""
        self.file.say(node, "by hand", f"{advice}{reference}")
        self.advice[self.tree.statement_of(node)].append(advice)  # for `_put_marks`

    def _advise_unused(self, alias: cst.ImportAlias, old: str, scope: Scope) -> None:
        """Report what to do with an import that this file does not use, if it always runs."""
        if self._is_chosen(alias):
            return
        name = nodes.bound_name(alias)
        is_reexport = alias.evaluated_alias == alias.evaluated_name  # import x as x
        is_exported = name in self.tree.exported_names or is_reexport
        if is_exported or scope.kind == "class":  # other files may use it
            self._advise(alias, old)
        else:
            self._report(alias, UNUSED.sentence(name=name))

    def _is_chosen(self, alias: cst.ImportAlias) -> bool:
        """Whether an import depends on Apex, on torch's version, or on TYPE_CHECKING."""
        if is_guarded(self.tree, alias):
            return True
        for parent, child in self.tree.ancestors(alias):
            if self._decides(parent, child) or _is_type_checking(parent):
                return True
        return False

    def _put_marks(self) -> None:
        """Put each advice as a comment above its statement, unless an earlier run has done so."""
        lines = re.split(r"\r\n?|\n", self.tree.text)
        for statement, advice in self.advice.items():
            start, _ = self.tree.span(statement)
            indent = self.tree.indent(start) or ""
            marks_above = _marks_above(lines, self.tree.line(statement))
            for sentence in dict.fromkeys(advice):  # each once, in order
                if sentence not in marks_above:
                    self.file.insert(start, f"{MARK}{sentence}{self.tree.newline}{indent}")


def _marks_above(lines: list[str], number: int) -> set[str]:
    """The advice in the comments directly above a line, whose `number` counts from 1."""
    marks = set()
    index = number - 2  # of the line above, from 0
    while index >= 0 and lines[index].lstrip().startswith(MARK):
        marks.add(lines[index].strip().removeprefix(MARK))
        index -= 1
    return marks


def _has_only_fatal_handlers(try_: cst.Try) -> bool:
    """Whether each handler of a `try` ends the program, so its body runs or nothing does."""
    return all(_ends_program(nodes.last_statement(handler.body)) for handler in try_.handlers)


def _ends_program(statement: cst.CSTNode) -> bool:
    """Whether a statement raises, or leaves Python, as ``sys.exit`` does."""
    if isinstance(statement, cst.Raise):
        return True
    if not isinstance(statement, cst.Expr) or not isinstance(statement.value, cst.Call):
        return False
    return nodes.called_name(statement.value) in ("exit", "_exit", "quit")


def _looks_for_apex(node: cst.CSTNode) -> bool:
    """Whether an expression asks if Apex is installed: ``importlib.util.find_spec("apex")``."""
    for call in nodes.walk(node):
        if isinstance(call, cst.Call) and _LOOKUP_NAME.search(nodes.called_name(call)):
            names = [nodes.string_value(arg.value) for arg in call.args]
            if any(map(is_apex, names)):
                return True
    return False


def _is_type_checking(node: cst.CSTNode) -> bool:
    """Whether a node is ``if TYPE_CHECKING:``, whose body never runs."""
    if not isinstance(node, cst.If):
        return False
    parts = nodes.name_parts(node.test)
    return parts is not None and parts[-1] == "TYPE_CHECKING"

"""From NVIDIA Apex to PyTorch: rewritten where that is certain, else marked with what to do.

A name is rewritten if torch has an exact equal. A training loop is not: what `amp.initialize` and
`amp.scale_loss` do is spread over model, optimizer and loop, so each such line gets a comment.
"""

from collections import Counter, defaultdict
from pathlib import Path

import libcst as cst

from amp_lab.migrate.apex_names import (
    ADVICE,
    AUTOCAST,
    EQUALS,
    LEVELS,
    PLAIN,
    SCALER,
    SECTIONS,
    longest,
)
from amp_lab.migrate.nodes import arguments, dotted, is_false, module_of
from amp_lab.migrate.python_tree import Scope, Tree, Use
from amp_lab.migrate.rewriter import Edit, Rewriter
from amp_lab.migrate.version_guards import is_guarded

TRIGGERS = ("apex",)
MARK = "# amp-lab migrate: "
_OPERATIONS = cst.BinaryOperation | cst.UnaryOperation | cst.BooleanOperation | cst.IfExp


class Rule(Rewriter):
    """The names of Apex in one file."""

    def __init__(self, tree: Tree, path: Path | None = None):
        super().__init__(tree, path)
        self.marks: defaultdict[cst.CSTNode, list[str]] = defaultdict(list)  # by statement
        self.imported: defaultdict[cst.CSTNode, list[Use]] = defaultdict(list)  # by import alias
        self.spelled: Counter[cst.CSTNode] = Counter()  # uses rewritten to torch, by import alias
        self.uses: list[tuple[Use, str]] = []
        for use in tree.uses:
            found = sorted(o for o in use.origins if o and o.startswith("apex."))
            if found:
                self.uses.append((use, found[0]))
        self.initialized = [use for use, old in self.uses if old == "apex.amp.initialize"]
        self.levels = {self._level(self._call(use)) for use in self.initialized}

    def run(self) -> None:
        """Rewrite what is certain, and mark the rest."""
        for use, old in self.uses:
            if not self._rewrite(use, old):
                self._mark_use(use, old)
        for node, scope in self.tree.imports:
            module = module_of(node)
            if module == "apex" or module.startswith("apex."):
                self._rewrite_import(node, module, scope)
        self._put_marks()  # last: one statement may have several

    # What is certain.

    def _call(self, use: Use) -> cst.Call | None:
        # In an f-string a quote or a comment of ours might end the string.
        is_in_string = self.tree.is_in(use.node, cst.FormattedString)
        return None if is_in_string else self.tree.call_of(use.node)

    def _rewrite(self, use: Use, old: str) -> bool:
        """Rewrite a use, or leave it to its import, if that is certain."""
        binding = use.scope.only(use.parts[0])
        if binding is None or is_guarded(self.tree, use.node):
            return False
        if old in EQUALS and self._has_plain_arguments(use, old):
            if len(use.parts) == 1:  # its import has to change with it, so that decides
                self.imported[binding.node].append(use)
                return True
            if self._rewrite_spelled(use, old):
                self.spelled[binding.node] += 1
                return True
        # Where amp.initialize stays, the line belongs to a loop that is to be changed as a whole.
        is_alone = old == "apex.amp.master_params" and not self.initialized
        return is_alone and self._rewrite_parameters(use)

    def _has_plain_arguments(self, use: Use, old: str) -> bool:
        """Whether it is called, with arguments that mean the same to the new one."""
        call = self._call(use)
        if call is None or not call.args or any(arg.star for arg in call.args):
            return False
        given = [arg.keyword.value for arg in call.args if arg.keyword is not None]
        equal = EQUALS[old]
        return len(call.args) - len(given) <= equal.positional and set(given) <= set(equal.keywords)

    def _plan(self, use: Use, old: str, name: str) -> list[Edit]:
        """The edits of a call for today's `name`, which is said to be rewritten."""
        call, equal = self._call(use), EQUALS[old]
        given = arguments(call)
        end = self.tree.span(call.args[-1])[1]
        added = [f", {key}={value}" for key, value in equal.added if key not in given]
        self.say(use.node, "rewritten", f"{old} is {equal.module}.{equal.name}")
        edits = [Edit(*self.tree.span(use.node), name)]
        return [*edits, Edit(end, end, "".join(added))] if added else edits

    def _rewrite_spelled(self, use: Use, old: str) -> bool:
        """Rewrite a use to a dotted name of torch, if torch is imported by that name."""
        scope = use.scope.find("torch")
        if scope is None or {b.origin for b in scope.bindings["torch"]} != {"torch"}:
            return False
        self.edits += self._plan(use, old, f"{EQUALS[old].module}.{EQUALS[old].name}")
        return True

    def _rewrite_parameters(self, use: Use) -> bool:
        call = self._call(use)
        if call is None or len(call.args) != 1 or not dotted(call.args[0].value):
            return False
        has_comment = "#" in self.tree.text[slice(*self.tree.span(call))]
        if call.args[0].keyword is not None or call.args[0].star or has_comment:
            return False
        self.replace(call, _parameters(self.tree.code(call.args[0].value)))
        self.say(use.node, "rewritten", "amp.master_params: the parameters are the master weights")
        return True

    def _rewrite_import(self, node: cst.ImportFrom, module: str, scope: Scope) -> None:
        """Replace an import if each name in it can be, else mark the uses that could have been."""
        if isinstance(node.names, cst.ImportStar):
            self._mark(node, f"import the names that are used: {longest(ADVICE, module)}")
            return
        olds = {alias: f"{module}.{alias.name.value}" for alias in node.names}
        count = {alias: self._count_uses(alias, scope) for alias in olds}
        if self._can_be_torch(node, olds, count):
            self._import_from_torch(node, olds)
            return
        for alias, old in olds.items():
            left = count[alias] - self.spelled[alias]
            for use in self.imported[alias]:
                if self._rewrite_spelled(use, old):
                    left -= 1
                else:
                    self._mark_use(use, old)
            if left == 0:  # or the next run would tell what this one could have
                rest = (
                    "and the try around it" if self.tree.is_in(node, cst.Try) else "from the import"
                )
                self._mark(alias, f"nothing uses {old} here: delete it {rest}")

    def _can_be_torch(self, node: cst.ImportFrom, olds: dict, count: dict) -> bool:
        """Whether every name of an import has an equal in one module, by which all uses can go."""
        if not set(olds.values()) <= EQUALS.keys() or is_guarded(self.tree, node):
            return False
        if any(count[alias] != len(self.imported[alias]) or not count[alias] for alias in olds):
            return False
        equals = [EQUALS[old] for old in olds.values()]
        taken = {equal.name.partition(".")[0] for equal in equals}
        # AdamW may be another
        is_free = not any(taken & scope.bindings.keys() for scope in self.tree.scopes)
        return is_free and len({equal.module for equal in equals}) == 1

    def _import_from_torch(self, node: cst.ImportFrom, olds: dict[cst.ImportAlias, str]) -> None:
        self.replace(node.module, EQUALS[olds[node.names[0]]].module)
        for alias, old in olds.items():
            bound, dot, rest = EQUALS[old].name.partition(".")
            self.replace(alias.name, bound)
            for use in self.imported[alias]:
                local = bound if alias.asname is None else use.parts[0]
                self.edits += self._plan(use, old, local + dot + rest)

    def _count_uses(self, alias: cst.ImportAlias, scope: Scope) -> int:
        name = alias.name.value if alias.asname is None else alias.asname.name.value
        home = scope.find(name)
        return sum(u.parts[0] == name and u.scope.find(name) is home for u in self.tree.uses)

    # What is not.

    def _mark_use(self, use: Use, old: str) -> None:
        special = {
            "apex.amp.initialize": self._advice_on_level,
            "apex.amp.scale_loss": self._advice_on_loss,
            "apex.amp.master_params": self._advice_on_parameters,
        }.get(old)
        advice = special(use) if special else longest(ADVICE, old)
        self._mark(use.node, advice, f' (notebook 13, "{longest(SECTIONS, old)}")')

    def _level(self, call: cst.Call | None) -> str:
        """What of `LEVELS` a call of ``initialize`` asks for; empty if that is not written out."""
        if call is None:
            return "O1"
        given = arguments(call, ("models", "optimizers", "enabled", "opt_level"))
        if is_false(given.get("enabled")):  # whatever the level
            return "off"
        if "opt_level" in given:
            level = self.tree.code(given["opt_level"]).strip("\"'")
            return level if level in LEVELS else ""
        return "" if any(arg.star for arg in call.args) else "O1"

    def _advice_on_level(self, use: Use) -> str:
        generic = f"for O1 and O2 delete it, put {AUTOCAST}, and make {SCALER}"
        return LEVELS.get(self._level(self._call(use)), generic)

    def _advice_on_loss(self, use: Use) -> str:
        call = self._call(use)
        given = arguments(call, ("loss", "optimizers")) if call is not None else {}
        loss = self._in_one_line(given.get("loss"), "loss")
        if len(self.levels) == 1 and (reason := PLAIN.get(*self.levels)):
            needs_brackets = isinstance(given.get("loss"), _OPERATIONS)
            return f"write {f'({loss})' if needs_brackets else loss}.backward(): {reason}"
        listed = given.get("optimizers")
        several = listed.elements if isinstance(listed, cst.List | cst.Tuple) else ()
        names = [self._in_one_line(element.value, "optimizer") for element in several]
        names = names or [self._in_one_line(listed, "optimizer")]
        old_steps = " and ".join(f"{name}.step()" for name in names)
        steps, unscales = (
            " and ".join(f"scaler.{method}({name})" for name in names)
            for method in ("step", "unscale_")
        )
        return (
            f"write scaler.scale({loss}).backward(); for {old_steps} write {steps}, then "
            f"scaler.update() once; call {unscales} before clipping{self._passed_to(use.scope)}"
        )

    def _advice_on_parameters(self, use: Use) -> str:
        call = self._call(use)
        first = call.args[0].value if call is not None and call.args else None
        optimizer = self._in_one_line(first, "optimizer")
        after = (
            ""
            if self.levels <= PLAIN.keys() and self.levels
            else f", after scaler.unscale_({optimizer})"
        )
        return f"write {_parameters(optimizer)}{after}"

    def _in_one_line(self, node: cst.BaseExpression | None, default: str) -> str:
        """The code of an expression in one line; the default for none, or one with a comment."""
        code = self.tree.code(node) if node is not None else "#"
        return default if "#" in code else " ".join(code.split())

    def _passed_to(self, scope: Scope) -> str:
        """What to add where a function does not see the scaler that replaces ``initialize``."""
        if not isinstance(scope.node, cst.FunctionDef):
            return ""
        if any(use.scope in scope.outwards() for use in self.initialized):
            return ""
        if scope.parent is not None and scope.parent.kind == "class":
            return "; keep scaler as an attribute of the object"
        return f"; pass scaler to {scope.node.name.value}()"

    def _mark(self, node: cst.CSTNode, advice: str, where: str = "") -> None:
        """Say what is to be done, and `where` to read more, which the comment leaves out."""
        self.say(node, "by hand", advice + where)
        self.marks[self.tree.statement(node)].append(advice)

    def _put_marks(self) -> None:
        """Put each advice as a comment above its statement, unless it is there."""
        for statement, pieces in self.marks.items():
            start = self.tree.span(statement)[0]
            indent = self.tree.indent(start)
            above = self.tree.text[: start - len(indent)].splitlines()
            there = set()
            while above and above[-1].lstrip().startswith(MARK):  # marks of a run before
                there.add(above.pop().strip().removeprefix(MARK))
            for advice in dict.fromkeys(pieces):
                if advice not in there:
                    self.insert(start, f"{MARK}{advice}{self.tree.newline}{indent}")


def _parameters(optimizer: str) -> str:
    return f'(p for group in {optimizer}.param_groups for p in group["params"])'

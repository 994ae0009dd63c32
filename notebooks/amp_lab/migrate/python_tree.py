"""A source file as a tree, with what each name in it is bound to.

libcst's own scope analysis takes four times as long as its parser; this one walks the tree once and
keeps only what the migration asks: imports, other bindings, uses of names.
"""

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import libcst as cst
from libcst.metadata import CodePosition, MetadataWrapper, PositionProvider


class Finding(NamedTuple):
    """Something about a line: what was changed, what is to be done by hand, or what is wrong."""

    line: int
    kind: str
    """``rewritten``, ``by hand``, ``mistake``, or ``left`` where nothing is to be done."""
    message: str


class Edit(NamedTuple):
    """A piece of the text, from `start` to `end`, and what takes its place."""

    start: int
    end: int
    text: str


@dataclasses.dataclass(eq=False)
class Binding:
    """A place where a name gets a value: `origin` is the dotted name of what an import binds.

    `value` is what is assigned to it, `source` that or what it is unpacked from.
    """

    origin: str | None
    node: cst.CSTNode
    value: cst.CSTNode | None = None
    source: cst.CSTNode | None = None

    @property
    def is_none(self) -> bool:
        """Whether the value is written as None."""
        return isinstance(self.value, cst.Name) and self.value.value == "None"


class Scope:
    """The names bound in a module, class, function or comprehension."""

    def __init__(self, kind: str, parent: "Scope | None" = None, node: cst.CSTNode | None = None):
        self.kind, self.parent, self.node = kind, parent, node
        self.bindings: dict[str, list[Binding]] = {}
        self.elsewhere: dict[str, Scope] = {}  # global and nonlocal

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


class Use(NamedTuple):
    """A name or dotted name that is read, such as ``torch.cuda.amp``."""

    node: cst.BaseExpression
    parts: tuple[str, ...]
    scope: Scope


_NOT_CODE = ("whitespace", "lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace", "comma")
_NOT_CODE += (
    "semicolon",
    "equal",
    "dot",
    "leading_lines",
    "header",
    "footer",
    "trailing",
    "lines_",
)
_NOT_CODE += ("indent", "newline", "operator", "asynchronous", "encoding", "default_", "has_")


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    names = (field.name for field in dataclasses.fields(kind))
    return tuple(name for name in names if not name.startswith(_NOT_CODE))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The parts of a node that are code, in order."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, cst.CSTNode):
                    yield item


def below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node, and all the parts of it that are code, in order."""
    yield node
    for child in children(node):
        yield from below(child)


def _is_import_of_torch(value: cst.CSTNode | None) -> bool:
    """Whether it is a call such as ``pytest.importorskip("torch")``."""
    if not isinstance(value, cst.Call) or not value.args:
        return False
    first, name = value.args[0].value, name_called(value)
    is_torch = isinstance(first, cst.SimpleString) and first.raw_value == "torch"
    return is_torch and name in ("importorskip", "import_module", "__import__")


def dotted(node: cst.CSTNode | None) -> tuple[str, ...] | None:
    """``a.b.c`` as its parts, or None if the node is no such name."""
    parts = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return (node.value, *reversed(parts))


def name_called(call: cst.Call) -> str:
    """The last part of the name of what is called; empty if it has none."""
    return (dotted(call.func) or ("",))[-1]


def arguments(call: cst.Call, names: Sequence[str] = ()) -> dict[str, cst.BaseExpression]:
    """The arguments of a call by name, those by position named after `names`; none of a star."""
    given = {}
    for position, arg in enumerate(call.args):
        if arg.star == "*":
            names = ()  # it may hold any number, so the positions after it are not known
        elif arg.keyword is not None:
            given[arg.keyword.value] = arg.value
        elif not arg.star and position < len(names):
            given[names[position]] = arg.value
    return given


def module_of(node: cst.Import | cst.ImportFrom) -> str:
    """The dotted name of the module that names are imported from; empty for a relative import."""
    is_absolute = isinstance(node, cst.ImportFrom) and not node.relative
    return ".".join(dotted(node.module)) if is_absolute else ""


def is_false(node: cst.CSTNode | None) -> bool:
    """Whether it is written as False, or 0."""
    return (isinstance(node, cst.Name) and node.value == "False") or (
        isinstance(node, cst.Integer) and node.evaluated_value == 0
    )


def assignments(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Each target that a node assigns to, and what it is given; none if it is no assignment."""
    if isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
        yield node.target, node.value
    for target in node.targets if isinstance(node, cst.Assign) else ():
        targets, value = target.target, node.value
        if isinstance(targets, cst.Tuple) and isinstance(value, cst.Tuple):
            if len(targets.elements) == len(value.elements):
                for one, its in zip(targets.elements, value.elements, strict=True):
                    yield one.value, its.value
        else:
            yield targets, value


class Tree:
    """A parsed file: `parents`, `scopes`, `uses` of names, and `line` and `span` of each node.

    Raises `libcst.ParserSyntaxError` if the text is no Python.
    """

    def __init__(self, text: str):
        self.text = text
        self.module = cst.parse_module(text)
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.uses: list[Use] = []
        self.imports: list[tuple[cst.Import | cst.ImportFrom, Scope]] = []
        self.scope_of: dict[cst.CSTNode, Scope] = {}  # of each call
        self.calls: list[cst.Call] = []
        self.answers: dict[tuple, object] = {}  # to what `versions` asked of it
        self.scopes = [Scope("module", node=self.module)]
        self._visit_children(self.module, self.scopes[0])

    # Walking.

    def _visit(self, node: cst.CSTNode, parent: cst.CSTNode, scope: Scope) -> None:
        self.parents[node] = parent
        visit: Callable | None = _VISITORS.get(type(node))
        if visit is None:
            self._visit_children(node, scope)
        else:
            visit(self, node, scope)

    def _visit_children(self, node: cst.CSTNode, scope: Scope) -> None:
        for child in children(node):
            self._visit(child, node, scope)

    def _new_scope(self, kind: str, scope: Scope, node: cst.CSTNode) -> Scope:
        self.scopes.append(Scope(kind, scope, node))
        return self.scopes[-1]

    def _bind(self, scope: Scope, name: str, binding: Binding) -> None:
        scope = scope.elsewhere.get(name, scope)
        scope.bindings.setdefault(name, []).append(binding)

    def _bind_target(self, target, parent, scope: Scope, value=None, source=None) -> None:
        self.parents[target] = parent
        source = source or value
        if isinstance(target, cst.Name):
            origin = "torch" if _is_import_of_torch(value) else None
            self._bind(scope, target.value, Binding(origin, target, value, source))
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self.parents[element] = target
                self._bind_target(element.value, element, scope, source=source)
        elif isinstance(target, cst.StarredElement):
            self._bind_target(target.value, target, scope, source=source)
        else:
            self._visit(target, parent, scope)

    def _visit_name(self, node: cst.Name, scope: Scope) -> None:
        self.uses.append(Use(node, (node.value,), scope))

    def _visit_attribute(self, node: cst.Attribute, scope: Scope) -> None:
        parts = dotted(node)
        if parts is None:
            self._visit(node.value, node, scope)
            return
        self.uses.append(Use(node, parts, scope))

    def _visit_call(self, node: cst.Call, scope: Scope) -> None:
        self.calls.append(node)
        self.scope_of[node] = scope
        self._visit_children(node, scope)

    def _visit_arg(self, node: cst.Arg, scope: Scope) -> None:
        self._visit(node.value, node, scope)

    def _visit_function(self, node: cst.FunctionDef, scope: Scope) -> None:
        self._bind(scope, node.name.value, Binding(None, node))
        for decorator in node.decorators:
            self._visit(decorator, node, scope)
        if node.returns:
            self._visit(node.returns, node, scope)
        inner = self._new_scope("function", scope, node)
        self._visit_parameters(node.params, node, scope, inner)
        self._visit(node.body, node, inner)

    def _visit_lambda(self, node: cst.Lambda, scope: Scope) -> None:
        inner = self._new_scope("function", scope, node)
        self._visit_parameters(node.params, node, scope, inner)
        self._visit(node.body, node, inner)

    def _visit_parameters(self, params, parent, scope: Scope, inner: Scope) -> None:
        self.parents[params] = parent
        listed = [*params.posonly_params, *params.params, *params.kwonly_params]
        for param in [*listed, params.star_arg, params.star_kwarg]:
            if not isinstance(param, cst.Param):
                continue
            self.parents[param] = params
            self._bind(inner, param.name.value, Binding(None, param))
            for part in (param.annotation, param.default):
                if part is not None:
                    self._visit(part, param, scope)

    def _visit_class(self, node: cst.ClassDef, scope: Scope) -> None:
        self._bind(scope, node.name.value, Binding(None, node))
        for part in (*node.decorators, *node.bases, *node.keywords):
            self._visit(part, node, scope)
        self._visit(node.body, node, self._new_scope("class", scope, node))

    def _visit_comprehension(self, node, scope: Scope) -> None:
        inner = self._new_scope("comprehension", scope, node)
        self._visit(node.for_in, node, inner)
        for child in children(node):
            if child is not node.for_in:
                self._visit(child, node, inner)

    def _visit_for(self, node, scope: Scope) -> None:
        self._bind_target(node.target, node, scope)
        for child in children(node):
            if child is not node.target:
                self._visit(child, node, scope)

    def _visit_assign(self, node: cst.Assign, scope: Scope) -> None:
        self._visit(node.value, node, scope)
        for target in node.targets:
            self.parents[target] = node
            self._bind_target(target.target, target, scope, node.value)

    def _visit_other_assign(self, node, scope: Scope) -> None:
        for child in children(node):
            if child is not node.target:
                self._visit(child, node, scope)
        self._bind_target(node.target, node, scope, node.value)

    def _visit_as_name(self, node: cst.AsName, scope: Scope) -> None:
        self._bind_target(node.name, node, scope)

    def _visit_match_name(self, node, scope: Scope) -> None:
        if node.name is not None:
            self._bind(scope, node.name.value, Binding(None, node))
        if getattr(node, "pattern", None) is not None:
            self._visit(node.pattern, node, scope)

    def _visit_elsewhere(self, node: cst.Global | cst.Nonlocal, scope: Scope) -> None:
        for item in node.names:
            name, home = item.name.value, self.scopes[0]
            if isinstance(node, cst.Nonlocal):
                outer = [s for s in scope.outwards() if s.kind == "function" and s is not scope]
                home = next((s for s in outer if name in s.bindings), outer[0] if outer else home)
            scope.elsewhere[name] = home

    def _visit_import(self, node: cst.Import, scope: Scope) -> None:
        self.imports.append((node, scope))
        for alias in node.names:
            self.parents[alias] = node
            parts = dotted(alias.name)
            if alias.asname is None:
                self._bind(scope, parts[0], Binding(parts[0], alias))
            else:
                self._bind(scope, alias.asname.name.value, Binding(".".join(parts), alias))

    def _visit_import_from(self, node: cst.ImportFrom, scope: Scope) -> None:
        self.imports.append((node, scope))
        if isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            self.parents[alias] = node
            name = alias.name.value
            bound = name if alias.asname is None else alias.asname.name.value
            origin = None if node.relative else ".".join((*dotted(node.module), name))
            self._bind(scope, bound, Binding(origin, alias))

    # Asking.

    def origins(self, use: Use) -> set[str | None]:
        """The dotted names that a use may stand for; None for anything that is not imported.

        A torch that is None where it cannot be imported has no attributes: no other meaning.
        """
        scope = use.scope.find(use.parts[0])
        if scope is None:  # a module that some star import brings
            return {".".join(use.parts)} if use.parts[0] in ("torch", "apex") else {None}
        bindings = scope.bindings[use.parts[0]]
        if len(use.parts) > 1 and any(b.origin == "torch" for b in bindings):
            bindings = [b for b in bindings if not b.is_none]
        return {b.origin and ".".join((b.origin, *use.parts[1:])) for b in bindings}

    def origin(self, node: cst.BaseExpression, scope: Scope) -> str | None:
        """The dotted name that an expression stands for, if that is certain."""
        parts = dotted(node)
        if parts is None:
            return None
        found = self.origins(Use(node, parts, scope))
        return found.pop() if len(found) == 1 else None

    def ancestors(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
        """Each node above, with the one of its children through which it was reached."""
        while (parent := self.parents.get(node)) is not None:
            yield parent, node
            node = parent

    def is_in(self, node: cst.CSTNode, what: type | cst.CSTNode) -> bool:
        """Whether a node stands below another one, or below any of a kind."""
        is_kind = isinstance(what, type | types.UnionType)
        return any(
            isinstance(parent, what) if is_kind else parent is what
            for parent, _ in self.ancestors(node)
        )

    def call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """The call whose function a node is."""
        parent = self.parents[node]
        return parent if isinstance(parent, cst.Call) and parent.func is node else None

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement, simple line or compound, that a node is in."""
        for parent, child in self.ancestors(node):
            if isinstance(parent, cst.Module | cst.IndentedBlock):
                return child
        return node

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.module.code_for_node(node)

    @functools.cached_property
    def use_at(self) -> dict[cst.CSTNode, Use]:
        """The use of a name that a node is."""
        return {use.node: use for use in self.uses}

    @functools.cached_property
    def assigned(self) -> dict[tuple[str, ...], list[cst.BaseExpression]]:
        """What is assigned to each name and attribute of the file, whichever its scope."""
        found: dict[tuple[str, ...], list[cst.BaseExpression]] = {}
        for node in below(self.module):
            for target, value in assignments(node):
                if parts := dotted(target):
                    found.setdefault(parts, []).append(value)
        return found

    def uses_below(self, node: cst.CSTNode) -> list[Use]:
        """The uses of names in a part of the tree."""
        return [self.use_at[part] for part in below(node) if part in self.use_at]

    # Where it is. Positions cost more than parsing, and most files need none.

    @functools.cached_property
    def _positions(self):
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return PositionProvider()._gen(wrapper)  # resolve() would walk the tree for nothing as well

    @functools.cached_property
    def line_starts(self) -> list[int]:
        """Where in the text each line starts."""
        return [0, *(match.end() for match in re.finditer(r"\r\n?|\n", self.text))]

    def line(self, node: cst.CSTNode) -> int:
        """The line, from 1, on which a node starts."""
        return self._positions[node].start.line

    def _offset(self, position: CodePosition) -> int:
        start = self.line_starts[position.line - 1]
        if self.text[start : start + 1] == "\f":  # which libcst leaves out
            start += 1
        return start + position.column

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Where the text of a node, without brackets around it, starts and ends."""
        where = self._positions[node]
        return self._offset(where.start), self._offset(where.end)

    def indent(self, offset: int) -> str | None:
        """The blanks before `offset` in its line, or None if there is something else."""
        start = max(self.text.rfind("\n", 0, offset), self.text.rfind("\r", 0, offset)) + 1
        before = self.text[start:offset].lstrip("\ufeff")
        return before if not before.strip() else None

    @functools.cached_property
    def newline(self) -> str:
        """How the first line ends."""
        found = re.search(r"\r\n?|\n", self.text)
        return found.group() if found else "\n"


def leaves(block: cst.BaseSuite) -> bool:
    """Whether what stands after a block is not reached through it."""
    last = block.body[-1] if block.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, cst.Return | cst.Raise | cst.Continue | cst.Break)


_VISITORS = {
    cst.Name: Tree._visit_name,
    cst.Attribute: Tree._visit_attribute,
    cst.Call: Tree._visit_call,
    cst.Arg: Tree._visit_arg,
    cst.FunctionDef: Tree._visit_function,
    cst.Lambda: Tree._visit_lambda,
    cst.ClassDef: Tree._visit_class,
    cst.ListComp: Tree._visit_comprehension,
    cst.SetComp: Tree._visit_comprehension,
    cst.GeneratorExp: Tree._visit_comprehension,
    cst.DictComp: Tree._visit_comprehension,
    cst.For: Tree._visit_for,
    cst.CompFor: Tree._visit_for,
    cst.Assign: Tree._visit_assign,
    cst.AnnAssign: Tree._visit_other_assign,
    cst.AugAssign: Tree._visit_other_assign,
    cst.NamedExpr: Tree._visit_other_assign,
    cst.AsName: Tree._visit_as_name,
    cst.MatchAs: Tree._visit_match_name,
    cst.MatchStar: Tree._visit_match_name,
    cst.Global: Tree._visit_elsewhere,
    cst.Nonlocal: Tree._visit_elsewhere,
    cst.Import: Tree._visit_import,
    cst.ImportFrom: Tree._visit_import_from,
}


def apply(text: str, edits: list[Edit]) -> str:
    """The text with every edit made; they may touch, but not overlap."""
    parts, done = [], 0
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < done:
            raise ValueError(f"two edits overlap at {edit.start}: {edit.text!r}")
        parts += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*parts, text[done:]])

"""A source file as a tree, with what each name in it is bound to.

libcst's own scope analysis takes four times as long as its parser; this one walks the tree once and
keeps only what the migration asks: imports, other bindings, uses of names.
"""

import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper

from amp_lab.migrate import nodes
from amp_lab.migrate.scopes import Binding, Scope, Use

_Answer = TypeVar("_Answer")
_Node = cst.CSTNode | None


def _is_import_of_torch(value: cst.CSTNode | None) -> bool:
    """Whether it is a call such as ``pytest.importorskip("torch")``."""
    if not isinstance(value, cst.Call) or not value.args:
        return False
    is_torch = nodes.literal(value.args[0].value) == "torch"
    return is_torch and nodes.name_called(value) in ("importorskip", "import_module", "__import__")


def _checks_type(call: cst.Call, argument: cst.CSTNode) -> bool:
    """Whether a call is an ``isinstance``, with this argument as the type."""
    if not nodes.is_call_of(call, "isinstance", "issubclass"):
        return False
    return len(call.args) == 2 and call.args[1] is argument


_IN_A_TYPE = cst.Subscript | cst.SubscriptElement | cst.Index | cst.Tuple | cst.List | cst.Element
_IN_A_TYPE |= cst.BinaryOperation | cst.Arg | cst.ComparisonTarget


class Tree:
    """A parsed file: `parents`, `scopes`, `uses` of names, and `line` and `span` of each node.

    Raises `libcst.ParserSyntaxError` if the text is no Python.
    """

    def __init__(self, text: str):
        self.text = text
        self.module = cst.parse_module(text)
        self.uses: list[Use] = []
        self.calls: dict[cst.Call, Scope] = {}  # in order, each with its scope
        self.imports: dict[cst.Import | cst.ImportFrom, Scope] = {}
        self.stars: dict[cst.ImportFrom, str] = {}  # from which module each brings all names
        self.imported: dict[cst.CSTNode, str | None] = {}  # what an alias binds
        # What is assigned to each name and attribute of the file, whichever its scope.
        self.assigned: defaultdict[tuple[str, ...], list[cst.CSTNode]] = defaultdict(list)
        self.answers: dict[tuple, Any] = {}  # see `answered_once`
        self.scopes = [Scope("module", self.module)]
        self._visit(self.module, self.scopes[0])

    # Walking.

    def _visit(self, node: cst.CSTNode, scope: Scope) -> None:
        visit = _VISITORS.get(type(node))
        if visit is not None:
            visit(self, node, scope)
        else:
            self._visit_parts(nodes.children(node), scope)

    def _visit_parts(self, parts: Iterable[_Node], scope: Scope, but: _Node = None) -> None:
        for part in parts:
            if part is not None and part is not but:
                self._visit(part, scope)

    def _new_scope(self, kind: str, node: cst.CSTNode, scope: Scope) -> Scope:
        self.scopes.append(Scope(kind, node, scope))
        return self.scopes[-1]

    def _bind_target(
        self, target: cst.CSTNode, scope: Scope, source: _Node = None, is_part: bool = False
    ) -> None:
        if isinstance(target, cst.Name):
            value = None if is_part else source
            origin = None
            if _is_import_of_torch(value):  # as tests import it
                origin = "torch"
            scope.bind(target.value, Binding(origin, target, value, source))
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:  # which part of the source it gets is not known
                self._bind_target(element.value, scope, source, is_part=True)
        else:
            self._visit(target, scope)  # an attribute or an item: nothing new is bound

    def _visit_dotted(self, node: cst.Name | cst.Attribute, scope: Scope) -> None:
        parts = nodes.dotted(node)
        if parts is not None:  # as a whole: its parts are no uses of their own
            self.uses.append(Use(node, parts, scope))
        elif isinstance(node, cst.Attribute):
            self._visit(node.value, scope)

    def _visit_call(self, node: cst.Call, scope: Scope) -> None:
        self.calls[node] = scope
        self._visit_parts(nodes.children(node), scope)

    def _visit_function(self, node: cst.FunctionDef | cst.Lambda, scope: Scope) -> None:
        if isinstance(node, cst.FunctionDef):
            scope.bind(node.name.value, Binding(None, node))
            self._visit_parts((*node.decorators, node.returns), scope)
        inner = self._new_scope("function", node, scope)
        for param in nodes.children(node.params):
            if isinstance(param, cst.Param):
                inner.bind(param.name.value, Binding(None, param))
                # these are evaluated outside the function
                self._visit_parts((param.annotation, param.default), scope)
        self._visit(node.body, inner)

    def _visit_class(self, node: cst.ClassDef, scope: Scope) -> None:
        scope.bind(node.name.value, Binding(None, node))
        self._visit_parts((*node.decorators, *node.bases, *node.keywords), scope)
        inner = self._new_scope("class", node, scope)  # which methods do not see
        self._visit(node.body, inner)

    def _visit_comprehension(self, node: cst.BaseComp, scope: Scope) -> None:
        inner = self._new_scope("comprehension", node, scope)
        self._visit(node.for_in, inner)  # it binds what the element before it uses
        self._visit_parts(nodes.children(node), inner, but=node.for_in)

    def _visit_for(self, node: cst.For | cst.CompFor, scope: Scope) -> None:
        self._bind_target(node.target, scope)  # before the element, which uses it
        self._visit_parts(nodes.children(node), scope, but=node.target)

    def _visit_assign(
        self, node: cst.Assign | cst.AnnAssign | cst.AugAssign | cst.NamedExpr, scope: Scope
    ) -> None:
        for target, value in nodes.assignments(node):
            parts = nodes.dotted(target)
            if parts:
                self.assigned[parts].append(value)
        # The value is read before any target is bound.
        if isinstance(node, cst.AnnAssign):
            self._visit(node.annotation, scope)
        self._visit_parts((node.value,), scope)
        if isinstance(node, cst.Assign):
            targets = [each.target for each in node.targets]
        else:
            targets = [node.target]
        for target in targets:
            self._bind_target(target, scope, node.value)

    def _visit_as_name(self, node: cst.AsName, scope: Scope) -> None:
        self._bind_target(node.name, scope)

    def _visit_match_name(self, node: cst.MatchAs | cst.MatchStar, scope: Scope) -> None:
        if node.name is not None:
            scope.bind(node.name.value, Binding(None, node))
        self._visit_parts(nodes.children(node), scope, but=node.name)

    def _visit_elsewhere(self, node: cst.Global | cst.Nonlocal, scope: Scope) -> None:
        for item in node.names:
            name = item.name.value
            home = self.scopes[0]
            if isinstance(node, cst.Nonlocal):
                home = self._home_of_nonlocal(name, scope)
            scope.elsewhere[name] = home

    def _home_of_nonlocal(self, name: str, scope: Scope) -> Scope:
        """The function around a scope that has bound a name; the nearest if none has yet."""
        outer = [s for s in scope.outwards() if s.kind == "function" and s is not scope]
        for function in outer:
            if name in function.bindings:
                return function
        return outer[0] if outer else self.scopes[0]

    def _visit_import(self, node: cst.Import | cst.ImportFrom, scope: Scope) -> None:
        self.imports[node] = scope
        if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
            self.stars[node] = nodes.module_of(node)
        for alias in nodes.aliases_of(node):
            name = nodes.bound_name(alias)
            origin = self._origin_of(alias, node, name)
            self.imported[alias] = origin
            scope.bind(name, Binding(origin, alias))

    def _origin_of(
        self, alias: cst.ImportAlias, node: cst.Import | cst.ImportFrom, name: str
    ) -> str | None:
        """The dotted name of what an import binds to a name; None within the user's package."""
        if isinstance(node, cst.Import):
            return name if alias.asname is None else alias.evaluated_name
        if node.relative:
            return None
        return f"{nodes.module_of(node)}.{alias.evaluated_name}"

    # Asking.

    @functools.cached_property
    def parents(self) -> dict[cst.CSTNode, cst.CSTNode]:
        """The node of which each node is a part."""
        parents: dict[cst.CSTNode, cst.CSTNode] = {}
        left: list[cst.CSTNode] = [self.module]
        while left:
            node = left.pop()
            below = nodes.children(node)
            parents.update(dict.fromkeys(below, node))
            left += below
        return parents

    def ancestors(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
        """Each node above, with the one of its children through which it was reached."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent, node
            node = parent
            parent = self.parents.get(node)

    def is_in(self, node: cst.CSTNode, what: type | cst.CSTNode) -> bool:
        """Whether a node stands below another one, or below any of a kind."""
        above = (parent for parent, _ in self.ancestors(node))
        if isinstance(what, cst.CSTNode):
            return what in above
        return any(isinstance(parent, what) for parent in above)

    def call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """The call whose function a node is."""
        parent = self.parents[node]
        if isinstance(parent, cst.Call) and parent.func is node:
            return parent
        return None

    def place_of_type(self, node: cst.BaseExpression) -> _Node:
        """The annotation or comparison in which a name stands for a type; None elsewhere."""
        for parent, child in self.ancestors(node):
            if isinstance(parent, cst.Annotation | cst.Comparison):  # type(x) is …
                return parent
            if isinstance(parent, cst.MatchClass):
                return parent if parent.cls is child else None
            if isinstance(parent, cst.Call):
                return parent if _checks_type(parent, child) else None
            if not isinstance(parent, _IN_A_TYPE):
                return None
        return None

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement, simple line or compound, that a node is in."""
        blocks = cst.Module | cst.IndentedBlock
        return next(child for above, child in self.ancestors(node) if isinstance(above, blocks))

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.module.code_for_node(node)

    @functools.cached_property
    def use_at(self) -> dict[cst.CSTNode, Use]:
        """The use of a name that a node is."""
        return {use.node: use for use in self.uses}

    @functools.cached_property
    def uses_ending(self) -> defaultdict[str, list[Use]]:
        """The uses by the last part of their names."""
        found: defaultdict[str, list[Use]] = defaultdict(list)
        for use in self.uses:
            found[use.parts[-1]].append(use)
        return found

    def uses_among(self, parts: Iterable[cst.CSTNode]) -> list[Use]:
        """The uses of names that are among some nodes."""
        return [self.use_at[node] for node in parts if node in self.use_at]

    def uses_of(self, name: str, scope: Scope) -> list[Use]:
        """The uses of a name, as it is seen from a scope."""
        home = scope.find(name)
        same_name = (use for use in self.uses if use.parts[0] == name)
        return [use for use in same_name if use.scope.find(name) is home]

    @functools.cached_property
    def exported(self) -> set[str]:
        """The names in ``__all__``, which other files may import from here."""
        bindings = self.scopes[0].bindings.get("__all__", [])
        values = [binding.value for binding in bindings if binding.value is not None]
        for call in self.calls:
            parts = nodes.dotted(call.func)
            if parts and parts[0] == "__all__":
                values.append(call)
        text = "".join(map(self.code, values))
        return set(re.findall(r"['\"](\w+)['\"]", text))

    # Where it is. Positions cost more than parsing, and most files need none.

    @functools.cached_property
    def _spans(self) -> Mapping[cst.CSTNode, CodeSpan]:
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        # resolve() would walk the tree for nothing as well
        return cast("Mapping[cst.CSTNode, CodeSpan]", ByteSpanPositionProvider()._gen(wrapper))

    @functools.cached_property
    def _form_feeds(self) -> list[int]:
        """Where libcst leaves out a form feed that begins a line, in the bytes that it has."""
        found = re.finditer(rb"(?m)(?:^|(?<=\r))\f", self.text.encode())
        return [match.start() - number for number, match in enumerate(found)]

    def _offset(self, byte: int) -> int:
        at = byte + bisect_right(self._form_feeds, byte)
        return at - self._more_bytes[bisect_left(self._wide, at)]

    @functools.cached_property
    def _wide(self) -> list[int]:
        """Where each character of several bytes starts, in bytes."""
        if self.text.isascii():
            return []
        found = re.finditer(rb"[\xc0-\xff]", self.text.encode())
        return [match.start() for match in found]

    @functools.cached_property
    def _more_bytes(self) -> list[int]:
        """How many bytes more than characters there are, before each of those and after all."""
        wide = re.findall(r"[^\x00-\x7f]", self.text)
        return list(itertools.accumulate((len(sign.encode()) - 1 for sign in wide), initial=0))

    @functools.cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(end.end() for end in re.finditer(r"\r\n?|\n", self.text))]

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Where the text of a node, without brackets around it, starts and ends."""
        where = self._spans[node]
        return self._offset(where.start), self._offset(where.start + where.length)

    def line(self, node: cst.CSTNode) -> int:
        """The line, from 1, on which a node starts."""
        return bisect_right(self._line_starts, self.span(node)[0])

    def indent(self, offset: int) -> str | None:
        """The blanks before `offset` in its line, or None if there is something else."""
        line = bisect_right(self._line_starts, offset) - 1
        start = self._line_starts[line]
        before = self.text[start:offset].lstrip("\ufeff")
        if before.strip():  # a statement after a semicolon
            return None
        return before

    @functools.cached_property
    def newline(self) -> str:
        """How the first line ends."""
        found = re.search(r"\r\n?|\n", self.text)
        return found.group() if found else "\n"


def answered_once(ask: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Keep the answer to a question about a node with its tree: many uses ask the same."""

    @functools.wraps(ask)
    def answer(tree: Tree, *about: object) -> _Answer:
        key = (ask, *about)
        if key not in tree.answers:
            tree.answers[key] = None  # no, as long as the question leads back to itself
            tree.answers[key] = ask(tree, *about)
        return tree.answers[key]

    return answer


_VISITORS: dict[type[cst.CSTNode], Callable[..., None]] = {
    cst.Name: Tree._visit_dotted,
    cst.Attribute: Tree._visit_dotted,
    cst.Call: Tree._visit_call,
    cst.FunctionDef: Tree._visit_function,
    cst.Lambda: Tree._visit_function,
    cst.ClassDef: Tree._visit_class,
    cst.ListComp: Tree._visit_comprehension,
    cst.SetComp: Tree._visit_comprehension,
    cst.DictComp: Tree._visit_comprehension,
    cst.GeneratorExp: Tree._visit_comprehension,
    cst.For: Tree._visit_for,
    cst.CompFor: Tree._visit_for,
    cst.Assign: Tree._visit_assign,
    cst.AnnAssign: Tree._visit_assign,
    cst.AugAssign: Tree._visit_assign,
    cst.NamedExpr: Tree._visit_assign,
    cst.AsName: Tree._visit_as_name,
    cst.MatchAs: Tree._visit_match_name,
    cst.MatchStar: Tree._visit_match_name,
    cst.Global: Tree._visit_elsewhere,
    cst.Nonlocal: Tree._visit_elsewhere,
    cst.Import: Tree._visit_import,
    cst.ImportFrom: Tree._visit_import,
}

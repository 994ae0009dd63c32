"""A parsed source file, with the bindings and uses of its names.

libcst's own scope analysis takes four times as long as its parser. This one walks the tree once and
keeps only what the rules need: imports, other bindings, and uses of names.
"""

import functools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeSpan
from libcst.metadata.span_provider import SpanProvidingCodegenState

from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.scopes import Binding, Scope, Use

_Answer = TypeVar("_Answer")
_Kind = TypeVar("_Kind", bound=cst.CSTNode)
_Node = cst.CSTNode | None


def _is_import_of_torch(value: cst.CSTNode | None) -> bool:
    """Whether a value is a call such as ``pytest.importorskip("torch")``."""
    if not isinstance(value, cst.Call) or not value.args:
        return False
    if nodes.string_value(value.args[0].value) != "torch":
        return False
    return nodes.called_name(value) in ("importorskip", "import_module", "__import__")


def _checks_type(call: cst.Call, argument: cst.CSTNode) -> bool:
    """Whether a call is ``isinstance(x, argument)`` or ``issubclass(x, argument)``."""
    if not nodes.is_call_of(call, "isinstance", "issubclass"):
        return False
    return len(call.args) == 2 and call.args[1] is argument


# What may stand between a type and the annotation that it is in: list[T], (T, U), T | U.
_PARTS_OF_A_TYPE = cst.Subscript | cst.SubscriptElement | cst.Index | cst.Tuple | cst.List
_PARTS_OF_A_TYPE |= cst.Element | cst.BinaryOperation | cst.Arg | cst.ComparisonTarget


class Tree:
    """A parsed file: `parents`, `scopes`, `uses` of names, and `line` and `span` of each node.

    Raises `libcst.ParserSyntaxError` if the text is not Python.
    """

    def __init__(self, text: str):
        self.text = text
        self.module = cst.parse_module(text)
        self.uses: list[Use] = []
        self.calls: dict[cst.Call, Scope] = {}  # in the order of the source
        self.imports: dict[cst.Import | cst.ImportFrom, Scope] = {}
        self.star_imports: dict[cst.ImportFrom, str] = {}  # `from module import *`: its module
        self.alias_origins: dict[cst.CSTNode, str | None] = {}  # see `Binding.origin`
        # By the parts of a dotted name, such as ("self", "scaler"), in all scopes together.
        self.assigned_values: defaultdict[tuple[str, ...], list[cst.CSTNode]] = defaultdict(list)
        self.cache: dict[tuple, Any] = {}  # see `cached_in_tree`
        self.scopes = [Scope("module", self.module)]
        self._visit(self.module, self.scopes[0])

    # Walking the tree: bindings and uses are gathered in the order in which Python runs them.
    # Each `_visit_…` is for the types of nodes that `_VISITORS` gives it.

    def _visit(self, node: cst.CSTNode, scope: Scope) -> None:
        """Add what `node` and its descendants bind and use in `scope`, or in new scopes below."""
        visit = _VISITORS.get(type(node))
        if visit is not None:
            visit(self, node, scope)
        else:
            self._visit_parts(nodes.children(node), scope)

    def _visit_parts(self, parts: Iterable[_Node], scope: Scope, skip: _Node = None) -> None:
        """Visit each of `parts`, but not `skip`, and not what is None."""
        for part in parts:
            if part is not None and part is not skip:
                self._visit(part, scope)

    def _new_scope(self, kind: str, node: cst.CSTNode, scope: Scope) -> Scope:
        """Add a scope inside `scope` for the names that `node` binds; `Scope` lists the kinds."""
        self.scopes.append(Scope(kind, node, scope))
        return self.scopes[-1]

    def _bind_target(
        self, target: cst.CSTNode, scope: Scope, source: _Node = None, is_part: bool = False
    ) -> None:
        """Bind the names of a target to `source`, or to an unknown part of it if `is_part`.

        A `source` of None is an unknown value.
        """
        if isinstance(target, cst.Name):
            value = None if is_part else source
            origin = None
            if _is_import_of_torch(value):  # tests write torch = pytest.importorskip("torch")
                origin = "torch"
            scope.bind(target.value, Binding(target, origin, value, source))
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self._bind_target(element.value, scope, source, is_part=True)
        else:
            self._visit(target, scope)  # x.a or x[i] binds no name, but uses x

    def _visit_dotted(self, node: cst.Name | cst.Attribute, scope: Scope) -> None:
        """Add the use of a dotted name; of ``f().b``, which is none, visit ``f()``."""
        parts = nodes.name_parts(node)
        if parts is not None:  # one use of a.b.c, not also of a.b and of a
            self.uses.append(Use(node, parts, scope))
        elif isinstance(node, cst.Attribute):
            self._visit(node.value, scope)

    def _visit_call(self, node: cst.Call, scope: Scope) -> None:
        self.calls[node] = scope
        self._visit_parts(nodes.children(node), scope)

    def _visit_function(self, node: cst.FunctionDef | cst.Lambda, scope: Scope) -> None:
        """Bind a function in `scope`, and its parameters in a new scope, then visit its body."""
        if isinstance(node, cst.FunctionDef):
            scope.bind(node.name.value, Binding(node))
            self._visit_parts((*node.decorators, node.returns), scope)
        inner = self._new_scope("function", node, scope)
        for param in nodes.children(node.params):
            if isinstance(param, cst.Param):
                inner.bind(param.name.value, Binding(param))
                # annotations and defaults are evaluated outside the function
                self._visit_parts((param.annotation, param.default), scope)
        self._visit(node.body, inner)

    def _visit_class(self, node: cst.ClassDef, scope: Scope) -> None:
        scope.bind(node.name.value, Binding(node))
        self._visit_parts((*node.decorators, *node.bases, *node.keywords), scope)
        inner = self._new_scope("class", node, scope)
        self._visit(node.body, inner)

    def _visit_comprehension(self, node: cst.BaseComp, scope: Scope) -> None:
        inner = self._new_scope("comprehension", node, scope)
        self._visit(node.for_in, inner)  # first: it binds the names that the element uses
        self._visit_parts(nodes.children(node), inner, skip=node.for_in)

    def _visit_for(self, node: cst.For | cst.CompFor, scope: Scope) -> None:
        self._bind_target(node.target, scope)  # first: the body uses its names
        self._visit_parts(nodes.children(node), scope, skip=node.target)

    def _visit_assign(
        self, node: cst.Assign | cst.AnnAssign | cst.AugAssign | cst.NamedExpr, scope: Scope
    ) -> None:
        """Remember the values of the targets, visit the value, then bind the targets."""
        for target, value in nodes.assignments(node):
            parts = nodes.name_parts(target)
            if parts:
                self.assigned_values[parts].append(value)
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
        """Bind ``x`` of ``case Loss() as x``, ``case x`` and ``case [*x]``."""
        if node.name is not None:
            scope.bind(node.name.value, Binding(node))
        self._visit_parts(nodes.children(node), scope, skip=node.name)

    def _visit_global_or_nonlocal(self, node: cst.Global | cst.Nonlocal, scope: Scope) -> None:
        """Note to which outer scope the names belong, so that `Scope.bind` binds them there."""
        for item in node.names:
            name = item.name.value
            owner = self.scopes[0]
            if isinstance(node, cst.Nonlocal) and scope.parent is not None:
                # if the function around this one binds the name later, it has not done so yet
                owner = scope.parent.find_scope(name) or scope.parent
            scope.outer_names[name] = owner

    def _visit_import(self, node: cst.Import | cst.ImportFrom, scope: Scope) -> None:
        """Note an import, and bind the name of each of its aliases in `scope`."""
        self.imports[node] = scope
        if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
            self.star_imports[node] = nodes.module_of(node)
        for alias in nodes.aliases_of(node):
            name = nodes.bound_name(alias)
            origin = self._origin_of(alias, node, name)
            self.alias_origins[alias] = origin
            scope.bind(name, Binding(alias, origin))

    def _origin_of(
        self, alias: cst.ImportAlias, node: cst.Import | cst.ImportFrom, name: str
    ) -> str | None:
        """The full name of an import: ``a.b`` for ``from a import b``; None for a relative one.

        `name` is the variable that the import binds. For ``import a.b`` it is ``a``, and so is the
        full name.
        """
        if isinstance(node, cst.Import):
            return name if alias.asname is None else alias.evaluated_name
        if node.relative:
            return None
        return f"{nodes.module_of(node)}.{alias.evaluated_name}"

    # Questions about the nodes around a node.

    @functools.cached_property
    def parents(self) -> dict[cst.CSTNode, cst.CSTNode]:
        """The parent of each node but the module."""
        parents: dict[cst.CSTNode, cst.CSTNode] = {}
        to_visit: list[cst.CSTNode] = [self.module]
        while to_visit:
            node = to_visit.pop()
            children = nodes.children(node)
            parents.update(dict.fromkeys(children, node))
            to_visit += children
        return parents

    def ancestors(self, node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
        """Yield each (ancestor, child): the child is `node` or the ancestor that contains it."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent, node
            node = parent
            parent = self.parents.get(node)

    def around(self, node: cst.CSTNode, kind: type[_Kind]) -> _Kind | None:
        """The innermost ancestor of a node with a type; None if there is no such ancestor."""
        ancestors = (parent for parent, _ in self.ancestors(node))
        return next((parent for parent in ancestors if isinstance(parent, kind)), None)

    def is_in(self, node: cst.CSTNode, outer: type | cst.CSTNode) -> bool:
        """Whether `outer` is an ancestor of a node, or if it is a type, the type of an ancestor."""
        if isinstance(outer, type):
            return self.around(node, outer) is not None
        return any(parent is outer for parent, _ in self.ancestors(node))

    def call_of(self, node: cst.CSTNode) -> cst.Call | None:
        """The call ``f(...)`` of a node ``f``; None if the node is not called."""
        parent = self.parents[node]
        if isinstance(parent, cst.Call) and parent.func is node:
            return parent
        return None

    def type_context(self, node: cst.BaseExpression) -> _Node:
        """The annotation, comparison, isinstance or case that uses a name as a type, else None."""
        for parent, child in self.ancestors(node):
            if isinstance(parent, cst.Annotation | cst.Comparison):  # type(x) is GradScaler
                return parent
            if isinstance(parent, cst.MatchClass):
                return parent if parent.cls is child else None
            if isinstance(parent, cst.Call):
                return parent if _checks_type(parent, child) else None
            if not isinstance(parent, _PARTS_OF_A_TYPE):
                return None
        return None

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The innermost statement around a node: a line, or a compound such as `if`."""
        blocks = cst.Module | cst.IndentedBlock
        return next(child for parent, child in self.ancestors(node) if isinstance(parent, blocks))

    def code(self, node: cst.CSTNode) -> str:
        """The source text of a node."""
        return self.module.code_for_node(node)

    # Questions about names.

    @functools.cached_property
    def use_by_node(self) -> dict[cst.CSTNode, Use]:
        """Each use of a name, by its node."""
        return {use.node: use for use in self.uses}

    @functools.cached_property
    def uses_by_last_part(self) -> defaultdict[str, list[Use]]:
        """The uses by the last part of their names: ``torch.cuda.amp`` is under ``amp``."""
        uses: defaultdict[str, list[Use]] = defaultdict(list)
        for use in self.uses:
            uses[use.parts[-1]].append(use)
        return uses

    def has_attribute(self, name: str, attribute: str) -> bool:
        """Whether the file has ``name.attribute``, also as ``self.name.attribute``."""
        uses = self.uses_by_last_part[attribute]
        return any(use.parts[-2:-1] == (name,) for use in uses)

    def uses_in(self, parts: Iterable[cst.CSTNode]) -> list[Use]:
        """The uses of names whose nodes are among `parts`."""
        return [self.use_by_node[node] for node in parts if node in self.use_by_node]

    def uses_of(self, name: str, scope: Scope) -> list[Use]:
        """The uses of the variable that is called `name` in `scope`, in the whole file."""
        owner = scope.find_scope(name)
        same_name = (use for use in self.uses if use.parts[0] == name)
        return [use for use in same_name if use.scope.find_scope(name) is owner]

    @functools.cached_property
    def exported_names(self) -> set[str]:
        """The names in ``__all__``, which other files may import from this one."""
        bindings = self.scopes[0].bindings.get("__all__", [])
        values = [binding.value for binding in bindings if binding.value is not None]
        for call in self.calls:
            parts = nodes.name_parts(call.func)
            if parts and parts[0] == "__all__":  # __all__.append("autocast")
                values.append(call)
        text = "".join(map(self.code, values))
        return set(re.findall(r"['\"](\w+)['\"]", text))

    # Positions of nodes. To compute them costs more than parsing, so only files that need them do.

    @functools.cached_property
    def _spans(self) -> Mapping[cst.CSTNode, CodeSpan]:
        """The start and length of each node, in characters without some form feeds."""
        # ByteSpanPositionProvider does the same, in bytes; it only holds the result here.
        holder = ByteSpanPositionProvider()
        indent = self.module.default_indent
        state = SpanProvidingCodegenState(
            indent, self.module.default_newline, provider=holder, get_length=len
        )
        self.module._codegen(state)
        return cast("Mapping[cst.CSTNode, CodeSpan]", holder._computed)

    @functools.cached_property
    def _form_feeds(self) -> list[int]:
        """The positions that libcst gives to form feeds at the start of a line.

        libcst does not count them, so they are counted here.
        """
        matches = re.finditer(r"(?m)(?:^|(?<=\r))\f", self.text)
        # each is moved back by the form feeds before it, `number` of them
        return [match.start() - number for number, match in enumerate(matches)]

    def _offset(self, position: int) -> int:
        """The index in `text` of the character at a position that libcst counts."""
        return position + bisect_right(self._form_feeds, position)

    @functools.cached_property
    def _line_starts(self) -> list[int]:
        """The index in `text` at which each line starts."""
        return [0, *(end.end() for end in re.finditer(r"\r\n?|\n", self.text))]

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The start and end in `text` of a node's code, without brackets around it."""
        span = self._spans[node]
        return self._offset(span.start), self._offset(span.start + span.length)

    def line(self, node: cst.CSTNode) -> int:
        """The number of the line on which a node starts, from 1."""
        return bisect_right(self._line_starts, self.span(node)[0])

    def indent(self, offset: int) -> str | None:
        """The blanks between the start of the line and `offset`; None if code is in between."""
        line = bisect_right(self._line_starts, offset) - 1
        start = self._line_starts[line]
        blanks = self.text[start:offset].lstrip("\ufeff")  # a byte order mark is no code
        if blanks.strip():  # a statement before a semicolon
            return None
        return blanks

    @functools.cached_property
    def newline(self) -> str:
        """The characters that end the first line; a line feed if the text has only one line."""
        line_end = re.search(r"\r\n?|\n", self.text)
        return line_end.group() if line_end else "\n"


def cached_in_tree(function: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Cache the results of ``function(tree, *arguments)`` in `tree.cache`: many rules ask the same.

    A call that leads back to itself, as ``a = b; b = a`` does, gets None from the inner call.
    """

    @functools.wraps(function)
    def cached(tree: Tree, *arguments: object) -> _Answer:
        key = (function, *arguments)
        if key not in tree.cache:
            tree.cache[key] = None
            tree.cache[key] = function(tree, *arguments)
        return tree.cache[key]

    return cached


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
    cst.Global: Tree._visit_global_or_nonlocal,
    cst.Nonlocal: Tree._visit_global_or_nonlocal,
    cst.Import: Tree._visit_import,
    cst.ImportFrom: Tree._visit_import,
}

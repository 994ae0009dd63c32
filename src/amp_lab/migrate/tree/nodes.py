"""Facts about one node of libcst's tree that need only the node, not its parents."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import libcst as cst

# A field whose name starts with one of these holds blanks, brackets or commas: half of all nodes.
_NOT_CODE = re.compile(
    "whitespace|[lr](?:par|bracket|brace)|comma|semicolon|equal|dot|leading_lines|header|footer"
    "|trailing|lines_|indent|newline|operator|asynchronous|encoding|default_|has_"
)

_ONLY_BODY_RUNS = cst.ClassDef | cst.ExceptHandler | cst.ExceptStarHandler | cst.MatchCase


@functools.cache
def _code_fields(node_type: type) -> tuple[str, ...]:
    """The names of the fields of a type of node that hold code."""
    names = [field.name for field in dataclasses.fields(node_type)]
    # The keyword of an argument is a cst.Name too, but it does not read a variable.
    return tuple(name for name in names if not _NOT_CODE.match(name) and name != "keyword")


@functools.cache
def _is_node_type(candidate: type) -> bool:
    return issubclass(candidate, cst.CSTNode)  # cached: slow, because CSTNode is abstract


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The children of a node that are code, in the order of the source."""
    parts = []
    for name in _code_fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, list | tuple):
            parts += [item for item in value if _is_node_type(type(item))]
        elif _is_node_type(type(value)):
            parts.append(value)
    return parts


def walk(node: cst.CSTNode, skip: tuple[type, ...] = ()) -> Iterator[cst.CSTNode]:
    """Yield a node and all its descendants that are code, in the order of the source.

    Nodes of the types in `skip` are left out with all their descendants.
    """
    if isinstance(node, skip):
        return
    yield node
    for child in children(node):
        yield from walk(child, skip)


def name_parts(node: cst.CSTNode | None) -> tuple[str, ...] | None:
    """``("a", "b", "c")`` for the expression ``a.b.c``; None unless it is a (dotted) name."""
    parts = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return (node.value, *reversed(parts))


def called_name(call: cst.Call) -> str:
    """``c`` for a call ``a.b.c()``; empty if the function is not a (dotted) name."""
    parts = name_parts(call.func)
    if parts is None:
        return ""
    return parts[-1]


def is_call_of(node: cst.CSTNode | None, *names: str) -> TypeGuard[cst.Call]:
    """Whether a node is ``name(...)``, without a dot, for one of `names`."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Name):
        return False
    return node.func.value in names


def receiver_of(node: cst.CSTNode, method: str) -> cst.BaseExpression | None:
    """``a.b`` for a call ``a.b.method(...)``; None for any other node."""
    func = node.func if isinstance(node, cst.Call) else None
    if not isinstance(func, cst.Attribute) or func.attr.value != method:
        return None
    return func.value


def context_names(block: cst.With) -> list[str]:
    """The names of the functions that a ``with`` calls, such as ``suppress``."""
    calls = [item.item for item in block.items if isinstance(item.item, cst.Call)]
    return [called_name(call) for call in calls]


def is_argument(call: cst.Call, name: str) -> bool:
    """Whether one argument of a call is the plain variable `name`."""
    return any(name_parts(arg.value) == (name,) for arg in call.args)


def arguments(args: Sequence[cst.Arg], names: Sequence[str] = ()) -> dict[str, cst.BaseExpression]:
    """The values of a call's arguments by name.

    Positional arguments take their names from `names`, in order. Left out are ``*args`` with the
    positions after it, ``**kwargs``, and positional arguments beyond `names`.
    """
    values = {}
    for position, arg in enumerate(args):
        if arg.star == "*":
            names = ()  # *args may hold any number of values: later positions are unknown
        elif arg.keyword is not None:
            values[arg.keyword.value] = arg.value
        elif not arg.star and position < len(names):
            values[names[position]] = arg.value
    return values


def module_of(node: cst.ImportFrom) -> str:
    """``a.b`` for ``from a.b import c``; empty for a relative import."""
    if node.relative:
        return ""
    return ".".join(name_parts(node.module) or ())


def aliases_of(node: cst.Import | cst.ImportFrom) -> Sequence[cst.ImportAlias]:
    """The names of an import, each with its ``as``; empty for ``import *``."""
    if isinstance(node.names, cst.ImportStar):
        return ()
    return node.names


def bound_name(alias: cst.ImportAlias) -> str:
    """The variable that an import assigns: ``a`` for ``import a.b``, ``c`` for ``a as c``."""
    return (alias.evaluated_alias or alias.evaluated_name).partition(".")[0]


def string_value(node: cst.CSTNode | None) -> str | None:
    """The text of a string literal, without its quotes; None for any other expression."""
    if not isinstance(node, cst.SimpleString):
        return None
    return node.raw_value


def is_false(node: cst.CSTNode | None) -> bool:
    """Whether an expression is the literal ``False`` or ``0``."""
    if isinstance(node, cst.Integer):
        return node.evaluated_value == 0
    return isinstance(node, cst.Name) and node.value == "False"


def assignments(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield each (target, value) of an assignment: ``a, b = 1, 2`` gives ``a, 1`` and ``b, 2``.

    Also of ``a: int = 1`` and ``a := 1``. Yields nothing for ``a, *b = 1, 2, 3`` and other nodes.
    """
    if isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
        yield node.target, node.value
    if not isinstance(node, cst.Assign):
        return
    right = node.value
    for left in (target.target for target in node.targets):
        if not isinstance(left, cst.Tuple) or not isinstance(right, cst.Tuple):
            yield left, right
        elif len(left.elements) == len(right.elements):  # else one element is a *rest
            for left_part, right_part in zip(left.elements, right.elements, strict=True):
                yield left_part.value, right_part.value


def single_target(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """The target of an assignment; None if there are several, or none in `statement`."""
    targets = [target for target, _ in assignments(statement)]
    if len(targets) != 1:
        return None
    return targets[0]


def bound_names(target: cst.CSTNode) -> Iterator[tuple[str, ...]]:
    """Yield the parts of each name that a target stores into: ``losses`` for ``losses[i]``."""
    parts = name_parts(target)
    if parts is not None:
        yield parts
    elif isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from bound_names(element.value)
    elif isinstance(target, cst.Subscript):
        yield from bound_names(target.value)


def loss_of(backward: cst.Call) -> cst.BaseExpression | None:
    """``loss`` for ``loss.backward()`` and ``torch.autograd.backward(loss)``.

    None for a call of the function without an argument.
    """
    func = backward.func
    autograd = (("torch", "autograd"), ("autograd",))
    if isinstance(func, cst.Attribute) and name_parts(func.value) not in autograd:
        return func.value
    if not backward.args:
        return None
    return backward.args[0].value


def last_statement(block: cst.CSTNode) -> cst.CSTNode:
    """The last statement of a block, also of a last line such as ``a(); b()``."""
    assert isinstance(block, cst.BaseSuite)
    last = block.body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        return last.body[-1]
    return last


def leaves_block(block: cst.CSTNode) -> bool:
    """Whether a block ends with return, raise, continue or break."""
    return isinstance(last_statement(block), cst.Return | cst.Raise | cst.Continue | cst.Break)


def never_passes(block: cst.BaseSuite) -> bool:
    """Whether every path through a block leaves it, so that the code after it never runs.

    Also looks into a `with`, or an `if` with an `else`, at the end of the block.
    """
    last = last_statement(block)
    if isinstance(last, cst.With):
        # suppress() goes on after the block, where the error was raised
        return never_passes(last.body) and "suppress" not in context_names(last)
    if isinstance(last, cst.If):
        if not isinstance(last.orelse, cst.Else):
            return False
        return never_passes(last.body) and never_passes(last.orelse.body)
    return leaves_block(block)


def running_parts(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The children of a node that run when the node does.

    - a lambda: no child, because its body runs later
    - a `match`: the cases
    - a class, handler or case: the body
    - any other node: all children
    """
    if isinstance(node, cst.Lambda):
        return ()
    if isinstance(node, cst.Match):
        return node.cases
    if isinstance(node, _ONLY_BODY_RUNS):
        return (node.body,)
    return children(node)


def contexts_of(function: cst.FunctionDef) -> list[cst.BaseExpression]:
    """The expressions that a function returns, and the expressions of each ``with`` around a yield.

    The first are for ``return autocast()``, the second for a ``@contextmanager``.
    """
    functions = (cst.FunctionDef, cst.Lambda)  # what is defined in it runs elsewhere
    contexts: list[cst.BaseExpression] = []
    for part in walk(function.body, skip=functions):
        if isinstance(part, cst.Return) and part.value is not None:
            contexts.append(part.value)
        elif isinstance(part, cst.With):
            body = walk(part.body, skip=functions)
            if any(isinstance(inner, cst.Yield) for inner in body):
                contexts += [item.item for item in part.items]
    return contexts

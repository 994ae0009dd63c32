"""What can be asked of a node of libcst's tree by itself, without the tree around it."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import libcst as cst

# Fields that begin so hold blanks, brackets and commas, which are half of a tree, and no code.
_NOT_CODE = ("whitespace", "lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace", "comma")
_NOT_CODE += ("semicolon", "equal", "dot", "leading_lines", "header", "footer", "trailing")
_NOT_CODE += ("lines_", "indent", "newline", "operator", "asynchronous", "encoding", "default_")
_NOT_CODE += ("has_",)

_BODY_ALONE = cst.ClassDef | cst.ExceptHandler | cst.ExceptStarHandler | cst.MatchCase


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    names = [field.name for field in dataclasses.fields(kind)]
    # The keyword of an argument is a name, but no use of one.
    return tuple(name for name in names if not name.startswith(_NOT_CODE) and name != "keyword")


@functools.cache
def _is_node(kind: type) -> bool:
    return issubclass(kind, cst.CSTNode)  # slow, as it is of an abstract class


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The parts of a node that are code, in order."""
    parts = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, list | tuple):
            parts += [item for item in value if _is_node(type(item))]
        elif _is_node(type(value)):
            parts.append(value)
    return parts


def below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node, and all the parts of it that are code, in order."""
    yield node
    for child in children(node):
        yield from below(child)


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
    parts = dotted(call.func)
    if parts is None:
        return ""
    return parts[-1]


def is_call_of(node: cst.CSTNode | None, *names: str) -> TypeGuard[cst.Call]:
    """Whether it is a call of something that has one of these names, without a dot."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Name):
        return False
    return node.func.value in names


def is_given(call: cst.Call, name: str) -> bool:
    """Whether a name by itself is an argument of a call."""
    return any(dotted(arg.value) == (name,) for arg in call.args)


def arguments(args: Sequence[cst.Arg], names: Sequence[str] = ()) -> dict[str, cst.BaseExpression]:
    """The arguments of a call by name, those by position named after `names`; none of a star."""
    given = {}
    for position, arg in enumerate(args):
        if arg.star == "*":
            names = ()  # it may hold any number, so the positions after it are not known
        elif arg.keyword is not None:
            given[arg.keyword.value] = arg.value
        elif not arg.star and position < len(names):
            given[names[position]] = arg.value
    return given


def module_of(node: cst.ImportFrom) -> str:
    """The dotted name of the module that names are imported from; empty for a relative import."""
    if node.relative:
        return ""
    return ".".join(dotted(node.module) or ())


def aliases_of(node: cst.Import | cst.ImportFrom) -> Sequence[cst.ImportAlias]:
    """What an import names; nothing for a star."""
    if isinstance(node.names, cst.ImportStar):
        return ()
    return node.names


def bound_name(alias: cst.ImportAlias) -> str:
    """The name that an import binds: ``import a.b`` binds ``a`` alone."""
    return (alias.evaluated_alias or alias.evaluated_name).partition(".")[0]


def literal(node: cst.CSTNode | None) -> str | None:
    """The text of a string that is written out, without its quotes; None for anything else."""
    if not isinstance(node, cst.SimpleString):
        return None
    return node.raw_value


def is_false(node: cst.CSTNode | None) -> bool:
    """Whether it is written as False, or 0."""
    if isinstance(node, cst.Integer):
        return node.evaluated_value == 0
    return isinstance(node, cst.Name) and node.value == "False"


def assignments(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Each target that a node assigns to, and what it is given; none if it is no assignment."""
    if isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
        yield node.target, node.value
    if not isinstance(node, cst.Assign):
        return
    right = node.value
    for left in (target.target for target in node.targets):
        if not isinstance(left, cst.Tuple) or not isinstance(right, cst.Tuple):
            yield left, right
        elif len(left.elements) == len(right.elements):  # else a star takes what is left over
            for name, value in zip(left.elements, right.elements, strict=True):
                yield name.value, value.value


def loss_of(backward: cst.Call) -> cst.BaseExpression | None:
    """What a call of ``backward`` computes the gradients of."""
    func = backward.func
    modules = (("torch", "autograd"), ("autograd",))
    if isinstance(func, cst.Attribute) and dotted(func.value) not in modules:
        return func.value
    if not backward.args:
        return None
    return backward.args[0].value


def last_statement(block: cst.CSTNode) -> cst.CSTNode:
    """The statement that a block ends with; several may share its line."""
    assert isinstance(block, cst.BaseSuite)
    last = block.body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        return last.body[-1]
    return last


def leaves(block: cst.CSTNode) -> bool:
    """Whether what stands after a block is not reached through it."""
    return isinstance(last_statement(block), cst.Return | cst.Raise | cst.Continue | cst.Break)


def is_end(block: cst.BaseSuite) -> bool:
    """Whether no path through a block, or through one that it ends with, leads past it."""
    last = last_statement(block)
    if isinstance(last, cst.With):
        is_caught = any(is_call_of(item.item, "suppress") for item in last.items)
        return is_end(last.body) and not is_caught
    if isinstance(last, cst.If):
        if not isinstance(last.orelse, cst.Else):
            return False
        return is_end(last.body) and is_end(last.orelse.body)
    return leaves(block)


def parts_that_run(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """What of a node runs in its turn; a lambda runs later, if at all."""
    if isinstance(node, cst.Lambda):
        return ()
    if isinstance(node, cst.Match):
        return node.cases
    if isinstance(node, _BODY_ALONE):
        return (node.body,)
    return children(node)

"""The contexts that a function gives to a ``with``, such as ``with self.autocast():``."""

from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate.tree import nodes


def contexts_of(function: cst.FunctionDef) -> list[cst.BaseExpression]:
    """The expressions that a function returns, and those of each ``with`` in which it yields.

    The first for ``return autocast()``, the second for a ``@contextmanager``.
    """
    contexts: list[cst.BaseExpression] = []
    for part in _walk_without_functions(function.body):
        if isinstance(part, cst.Return) and part.value is not None:
            contexts.append(part.value)
        elif isinstance(part, cst.With) and _has_yield(part.body):
            contexts += [item.item for item in part.items]
    return contexts


def _has_yield(block: cst.CSTNode) -> bool:
    """Whether a block yields, outside of functions that are defined in it."""
    return any(isinstance(part, cst.Yield) for part in _walk_without_functions(block))


def _walk_without_functions(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the descendants of a node, without functions that are defined in it."""
    for child in nodes.children(node):
        if not isinstance(child, cst.FunctionDef | cst.Lambda):
            yield child
            yield from _walk_without_functions(child)

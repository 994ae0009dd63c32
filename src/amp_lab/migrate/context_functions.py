"""What a function of the file gives to ``with``: ``with self.autocast():``."""

from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate import nodes


def contexts_of(function: cst.FunctionDef) -> list[cst.BaseExpression]:
    """What a function returns, and the blocks in which a context manager yields."""
    found: list[cst.BaseExpression] = []
    for part in _own_parts(function.body):
        if isinstance(part, cst.Return) and part.value is not None:
            found.append(part.value)
        elif isinstance(part, cst.With) and _yields(part.body):
            found += [item.item for item in part.items]
    return found


def _yields(block: cst.CSTNode) -> bool:
    return any(isinstance(part, cst.Yield) for part in _own_parts(block))


def _own_parts(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The parts of a node without those of functions that are defined in it."""
    for child in nodes.children(node):
        if not isinstance(child, cst.FunctionDef | cst.Lambda):
            yield child
            yield from _own_parts(child)

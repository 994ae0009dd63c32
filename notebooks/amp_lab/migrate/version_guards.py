"""Whether code is meant for some versions of torch alone, as far as its source shows that.

Such code stays as it is: the branch for an old torch needs the old names.
"""

import functools
import re
from collections.abc import Callable, Iterator

import libcst as cst

from amp_lab.migrate.python_tree import (
    Binding,
    Tree,
    Use,
    below,
    children,
    dotted,
    leaves,
    name_called,
)

_NAMED_AFTER_TORCH = re.compile(  # TORCH_GE_2_4, is_torch_version, torch_at_least, PT24
    r"(?i)(?<![a-z])(?:py)?torch_?(?:v?\d+(?:_\d+)*(?![a-z\d])|greater|less|at_least|newer|older"
    r"|before|since|(?:v|ver|version|major|minor|gte?|lte?|ge|le)(?![a-z]))"
    r"|(?<![a-z])(?:old|new)_torch(?![a-z])|(?<![a-z])pt_?v?(?:\d_\d|\d\d)(?![a-z])"
)
_VERSIONS = re.compile(r"torch\.(?:__version__|torch_version|version\.(?!cuda|hip))")
_OF_AMP = re.compile(r"(?i)amp|autocast|scaler|custom_(?:fwd|bwd)")
_NEW = {
    "torch.autocast": "autocast",
    "torch.amp.autocast": "autocast",
    "torch.amp.GradScaler": "GradScaler",
    "torch.amp.custom_fwd": "custom_fwd",
    "torch.amp.custom_bwd": "custom_bwd",
}
_FALLBACK = re.compile(
    r"except\s*(:|.*\b(ImportError|ModuleNotFoundError|AttributeError|TypeError|NameError|Exception)\b)"
)
_MISSING = re.compile(r"except.*\b(ImportError|ModuleNotFoundError|AttributeError|NameError)\b")
_FURTHEST = 3  # assignments that a name in a test is followed through


def _answered_once(ask: Callable) -> Callable:
    """Keep the answer to a question about a node with its tree."""

    @functools.wraps(ask)
    def answer(tree: Tree, *about):
        key = ask, *about
        if key not in tree.answers:
            tree.answers[key] = ask(tree, *about)
        return tree.answers[key]

    return answer


def is_guarded(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether a test of torch's version, or a try of its new names, decides if a node runs."""
    for parent, child in tree.ancestors(node):
        if isinstance(parent, cst.If | cst.IfExp):
            if child is parent.test:
                continue
            arms = [arm for arm in (parent.body, parent.orelse) if arm not in (None, child)]
            block = tree.parents[parent]
            if (
                not arms
                and isinstance(block, cst.Module | cst.IndentedBlock)
                and leaves(parent.body)
            ):
                arms = list(block.body[block.body.index(parent) + 1 :])
            if _asks_for_torch(tree, parent.test) or any(_is_newer(tree, a, node) for a in arms):
                return True
        elif isinstance(parent, cst.While):
            if child is not parent.test and _asks_for_torch(tree, parent.test):
                return True
        elif isinstance(parent, cst.Call):
            if dotted(parent.func) in (("hasattr",), ("getattr",)) and child is parent.args[0]:
                return True
        elif isinstance(parent, cst.BooleanOperation):
            if child is parent.right and _asks_for_torch(tree, parent.left):
                return True
        elif isinstance(parent, cst.ExceptHandler):
            if _is_fallback(tree, parent):
                return True
        elif isinstance(parent, cst.Try) and child is parent.body:
            if any(_new_uses(tree, handler) for handler in parent.handlers):
                return True
        elif isinstance(parent, cst.Module | cst.IndentedBlock):
            earlier = parent.body[: parent.body.index(child)]
            if any(_leaves_by_version(tree, statement, node) for statement in earlier):
                return True
    return False


def _leaves_by_version(tree: Tree, statement: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether a statement ends a block for some versions, so that what follows is for others.

    One that raises does not: it is for what this file cannot run with.
    """
    if not isinstance(statement, cst.If | cst.Try | cst.With) or not leaves(statement.body):
        return False
    last = statement.body.body[-1]
    if isinstance(last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last, cst.Raise):
        return False
    if isinstance(statement, cst.With) and "suppress" not in tree.code(statement.items[0]):
        return False
    if isinstance(statement, cst.If) and _asks_for_torch(tree, statement.test):
        return True
    return _is_newer(tree, statement.body, node)


@_answered_once
def _asks_for_torch(tree: Tree, test: cst.BaseExpression, depth: int = 0) -> bool:
    """Whether an expression depends on the version of torch, or on what names it has."""
    parts = list(_below_but_in_dicts(test))
    if any(isinstance(node, cst.Call) and _looks_up(tree, node) for node in parts):
        return True
    for use in (tree.use_at[node] for node in parts if node in tree.use_at):
        if any(map(_NAMED_AFTER_TORCH.search, use.parts)):
            return True
        if any(origin and _VERSIONS.match(origin) for origin in tree.origins(use)):
            return True
        if depth < _FURTHEST and _tells_of_torch(tree, use, depth + 1):
            return True
    return False


def _below_but_in_dicts(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and its parts; a version among the values of a dict is there to be logged."""
    if not isinstance(node, cst.Dict):
        yield node
        for child in children(node):
            yield from _below_but_in_dicts(child)


def _tells_of_torch(tree: Tree, use: Use, depth: int) -> bool:
    """Whether what a name or an attribute was given depends on the version of torch."""
    attributes = [use.parts[:n] for n in range(2, len(use.parts) + 1)]
    sources = [value for parts in attributes for value in tree.assigned.get(parts, ())]
    scope = use.scope.find(use.parts[0])
    for binding in scope.bindings[use.parts[0]] if scope else ():
        if binding.source is not None:
            sources.append(binding.source)
            if _is_set_by_version(tree, binding):
                return True
    # An IfExp chooses by a version, which what it gives no longer tells.
    sources = [source for source in sources if not isinstance(source, cst.IfExp)]
    return any(_asks_for_torch(tree, source, depth) for source in sources)


def _is_set_by_version(tree: Tree, binding: Binding) -> bool:
    """Whether a flag is set, or a thing of today's made, where a version or a try of it allows."""
    value, key = binding.value, (_is_set_by_version, binding)
    if key not in tree.answers:
        tree.answers[key] = False  # while it is looked for
        is_flag = isinstance(value, cst.Name) and value.value in ("True", "False", "None")
        is_new = isinstance(value, cst.Call) and any(
            use is not None and use.node is value.func for use, _ in _new_uses(tree, value)
        )
        tree.answers[key] = (is_flag or is_new) and any(
            (isinstance(above, cst.Try) and _is_try_of_new(tree, above))
            or (is_flag and isinstance(above, cst.If) and _asks_for_torch(tree, above.test))
            for above, _ in tree.ancestors(binding.node)
        )
    return tree.answers[key]


def _is_try_of_new(tree: Tree, node: cst.Try) -> bool:
    """Whether today's names are tried, and their lack is caught."""
    is_caught = any(_FALLBACK.search(tree.code(handler)) for handler in node.handlers)
    return is_caught and bool(_new_uses(tree, node.body))


def _looks_up(tree: Tree, call: cst.Call) -> bool:
    """Whether a call asks for a name of torch's mixed precision, or for torch's version."""
    name = name_called(call)
    if not call.args:
        return False
    first, texts = call.args[0].value, [_literal(arg.value) for arg in call.args]
    if name in ("hasattr", "getattr"):
        module = _any_origin(tree, first)
        asked = texts[1] if len(texts) > 1 else None
        is_torch = module is not None and module.partition(".")[0] == "torch"
        return is_torch and bool(_OF_AMP.search(module if asked is None else asked))
    if name in ("version", "distribution", "get_distribution"):
        return texts[0] == "torch"
    if name in ("find_spec", "import_module"):
        return texts[0] is not None and bool(re.match(r"torch\..*amp", texts[0]))
    if name in ("signature", "getfullargspec", "dir", "vars"):
        return any(
            origin is not None and origin.startswith("torch") and bool(_OF_AMP.search(origin))
            for use in tree.uses_below(first)
            for origin in tree.origins(use)
        )
    return False


def _literal(node: cst.BaseExpression) -> str | None:
    return node.raw_value if isinstance(node, cst.SimpleString) else None


def _any_origin(tree: Tree, node: cst.BaseExpression) -> str | None:
    use = tree.use_at.get(node)
    return next((o for o in tree.origins(use) if o), None) if use is not None else None


@_answered_once
def _new_uses(tree: Tree, node: cst.CSTNode) -> list[tuple[Use | None, str]]:
    """Each use or import of today's names below a node; None for an import."""
    found: list[tuple[Use | None, str]] = [
        (use, _NEW[origin])
        for use in tree.uses_below(node)
        for origin in tree.origins(use)
        if origin in _NEW
    ]
    for part in below(node):
        if isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
            module = "" if part.relative else ".".join(dotted(part.module))
            for alias in part.names:
                if (name := f"{module}.{alias.name.value}") in _NEW:
                    found.append((None, _NEW[name]))
    return found


def _is_newer(tree: Tree, arm: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether the other arm of a branch does with today's name what a node does with the old one.

    That of another device does not count, nor does a call of ``torch.autocast``, older than the
    other new names: it may be there for another dtype.
    """
    found = _new_uses(tree, arm)
    if not found:
        return False
    use, old = tree.use_at.get(node), None
    if use is not None:
        old = {origin.rpartition(".")[2] for origin in tree.origins(use) if origin}
    elif isinstance(node, cst.ImportAlias):
        old = {node.name.value}
    for new, name in found:
        if old is not None and not old & {name, "amp"}:
            continue
        if new is None:
            return True
        if name == "autocast":
            continue
        call = tree.call_of(new.node)
        devices = [
            _literal(arg.value)
            for i, arg in enumerate(call.args if call is not None else ())
            if (i == 0 and arg.keyword is None)
            or (arg.keyword is not None and arg.keyword.value in ("device", "device_type"))
        ]
        device = devices[0] if devices else None
        if device is None or device.partition(":")[0] == "cuda":
            return True
    return False


def _is_fallback(tree: Tree, handler: cst.ExceptHandler) -> bool:
    """Whether a handler is for what an old torch lacks."""
    header, tried = tree.code(handler), tree.parents[handler].body
    if not _FALLBACK.search(header):
        return False
    imports = (isinstance(part, cst.Import | cst.ImportFrom) for part in below(tried))
    return bool(_new_uses(tree, tried)) or bool(_MISSING.search(header) and any(imports))

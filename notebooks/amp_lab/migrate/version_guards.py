"""Whether code is meant for some versions of torch alone, as far as its source shows that.

Such code stays as it is: the branch for an old torch needs the old names. A test for a torch that
is older than today's names, such as ``>= 1.6``, decides nothing where these exist.
"""

import functools
import re
from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.amp_names import HOMES, NEW, OLD_MODULES
from amp_lab.migrate.python_tree import Binding, Tree, Use, answered_once

_NAMED_AFTER_TORCH = re.compile(  # TORCH_GE_2_4, is_torch_version, torch_at_least, PT24
    r"(?i)(?<![a-z])(?:py)?torch_?(?:v?\d+(?:_\d+)*(?![a-z\d])|greater|less|at_least|newer|older"
    r"|before|since|(?:v|ver|version|major|minor|gte?|lte?|ge|le)(?![a-z]))"
    r"|(?<![a-z])(?:old|new)_torch(?![a-z])|(?<![a-z])pt_?v?(?:\d_\d|\d\d)(?![a-z])"
)
_VERSIONS = re.compile(r"torch\.(?:__version__|torch_version|version\.(?!cuda|hip))")
_OF_AMP = re.compile(r"(?i)amp|autocast|scaler|custom_(?:fwd|bwd)")
_FALLBACK = re.compile(
    r"except\s*(:|.*\b(ImportError|ModuleNotFoundError|AttributeError|TypeError|NameError|Exception)\b)"
)
_MISSING = re.compile(r"except.*\b(ImportError|ModuleNotFoundError|AttributeError|NameError)\b")
_FURTHEST = 3  # assignments that a name in a test is followed through
_FIRST_WITH_SCALER = (2, 3)  # the torch that first had torch.amp.GradScaler


_Compound = cst.If | cst.Try | cst.With


def forget_fallbacks(tree: Tree) -> None:
    """Forget what takes the place of old names where their import fails: with today's, it cannot.

    An import of torch in the same try may fail by itself, so that there it is a choice.
    """
    olds = [alias for alias, origin in tree.imported.items() if _is_of_old_module(origin)]
    tries = {tree.parents.get(tree.parents[tree.statement(alias)]) for alias in olds}
    dead = [h for tried in tries if isinstance(tried, cst.Try) for h in _fallbacks(tree, tried)]
    for bindings in (b for scope in tree.scopes for b in scope.bindings.values() if dead):
        kept = [b for b in bindings if not any(tree.is_in(b.node, handler) for handler in dead)]
        bindings[:] = kept or bindings


def _is_of_old_module(origin: str | None) -> bool:
    return origin is not None and origin.startswith((*OLD_MODULES,))


def _fallbacks(tree: Tree, tried: cst.Try) -> list[cst.ExceptHandler]:
    """The handlers of a try for old names that are not there, if it imports nothing else."""
    names = [tree.imported[p] for p in nodes.below(tried.body) if p in tree.imported]
    handlers = tried.handlers if all(map(_is_of_old_module, names)) else ()
    caught = [handler for handler in handlers if _MISSING.search(tree.code(handler))]
    return [handler for handler in caught if not _new_uses(tree, handler)]


def is_guarded(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether a test of torch's version, or a try of its new names, decides if a node runs."""
    return any(_decides(parent, child, node, tree) for parent, child in tree.ancestors(node))


@functools.singledispatch
def _decides(parent: cst.CSTNode, child: cst.CSTNode, node: cst.CSTNode, tree: Tree) -> bool:
    """Whether `parent` decides by version if `node`, which is in `child`, runs."""
    return False


@_decides.register
def _(parent: cst.If | cst.IfExp, child, node, tree) -> bool:
    if child is parent.test:
        return False
    arms = [arm for arm in (parent.body, parent.orelse) if arm is not None and arm is not child]
    block = tree.parents[parent]
    if not arms and isinstance(block, cst.Module | cst.IndentedBlock) and nodes.leaves(parent.body):
        arms = block.body[block.body.index(parent) + 1 :]  # they are its else
    is_taken = child is parent.body
    return _asks(tree, parent.test, is_taken) or any(_is_newer(tree, arm, node) for arm in arms)


@_decides.register
def _(parent: cst.While | cst.BooleanOperation, child, node, tree) -> bool:
    test = parent.test if isinstance(parent, cst.While) else parent.left
    is_taken = isinstance(parent, cst.While) or isinstance(parent.operator, cst.And)
    return child is not test and _asks(tree, test, is_taken)


@_decides.register
def _(parent: cst.Call, child, node, tree) -> bool:
    if nodes.is_call_of(parent, "hasattr", "getattr") and child is parent.args[0]:
        return True
    # getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
    is_default = nodes.is_call_of(parent, "getattr") and child in parent.args[2:]
    return is_default and _looks_up(tree, parent)


@_decides.register
def _(parent: cst.Match, child, node, tree) -> bool:
    if child is parent.subject:
        return False
    others = [case for case in parent.cases if case is not child]
    is_newer = any(_is_newer(tree, case, node) for case in others)
    return is_newer or _asks_for_torch(tree, parent.subject)


@_decides.register
def _(parent: cst.Subscript, child, node, tree) -> bool:  # (old, new)[torch.__version__ >= "2.3"]
    is_chosen = any(_asks_for_torch(tree, index) for index in parent.slice)
    return child is parent.value and is_chosen


@_decides.register
def _(parent: cst.With, child, node, tree) -> bool:
    """Whether today's name is tried where an old one is in force, and its lack is no error."""
    if child is not parent.body or tree.imported.get(node) not in NEW:
        return False
    calls = [item.item for item in parent.items if isinstance(item.item, cst.Call)]
    return any(nodes.name_called(call) == "suppress" for call in calls)


@_decides.register
def _(parent: cst.ExceptHandler, child, node, tree) -> bool:
    header, tried = tree.code(parent), tree.parents[parent].body
    if not _FALLBACK.search(header):  # it is for errors of another kind
        return False
    imports = (isinstance(part, cst.Import | cst.ImportFrom) for part in nodes.below(tried))
    return bool(_new_uses(tree, tried)) or bool(_MISSING.search(header) and any(imports))


@_decides.register
def _(parent: cst.Try, child, node, tree) -> bool:
    if child is not parent.body:
        return False
    if tree.imported.get(node) in NEW:  # in place of an old one that was imported before
        return any(_FALLBACK.search(tree.code(handler)) for handler in parent.handlers)
    return any(_new_uses(tree, handler) for handler in parent.handlers)


@_decides.register
def _(parent: cst.Module | cst.IndentedBlock, child, node, tree) -> bool:
    places, leaving = _leaving(tree, parent)
    earlier = (statement for statement in leaving if places[statement] < places[child])
    return any(_leaves_by_version(tree, statement, node) for statement in earlier)


@answered_once
def _leaving(
    tree: Tree, block: cst.Module | cst.IndentedBlock
) -> tuple[dict[cst.CSTNode, int], list[_Compound]]:
    """The place of each statement in a block, and those that may leave it, but for an error."""
    places: dict[cst.CSTNode, int] = {part: number for number, part in enumerate(block.body)}
    compound = [part for part in block.body if isinstance(part, _Compound)]
    return places, [part for part in compound if _may_leave(tree, part)]


def _may_leave(tree: Tree, statement: _Compound) -> bool:
    if not nodes.leaves(statement.body):
        return False
    if isinstance(nodes.last_statement(statement.body), cst.Raise):
        return False  # it is for what this file cannot run with
    # only suppress goes on after an error
    return not isinstance(statement, cst.With) or "suppress" in tree.code(statement.items[0])


def _leaves_by_version(tree: Tree, statement: _Compound, node: cst.CSTNode) -> bool:
    """Whether a statement ends a block for some versions, so that what follows is for others."""
    is_asked = isinstance(statement, cst.If) and _asks(tree, statement.test, is_taken=False)
    return is_asked or _is_newer(tree, statement.body, node)


def _asks(tree: Tree, test: cst.BaseExpression, is_taken: bool) -> bool:
    """Whether the version of torch decides if a test is true, or, if not `is_taken`, false."""
    settled = _settled(tree, test)
    if settled is not None:
        return settled != is_taken
    # all parts of an `and` have to be true, and all of an `or` false
    joint = cst.And if is_taken else cst.Or
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, joint):
        return _asks(tree, test.left, is_taken) or _asks(tree, test.right, is_taken)
    return _asks_for_torch(tree, test)


@answered_once
def _settled(tree: Tree, test: cst.CSTNode) -> bool | None:
    """What a test of torch says wherever today's names exist; None if it depends."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        value = _settled(tree, test.expression)
        return None if value is None else not value
    if isinstance(test, cst.Name) and test in tree.use_at:
        value = tree.use_at[test].scope.value_of(test)
        return None if value is test else _settled(tree, value)
    if nodes.is_call_of(test, "hasattr"):
        return True if _is_old_name(tree, test) else None
    return _settled_comparison(tree, test) if isinstance(test, cst.Comparison) else None


def _is_old_name(tree: Tree, call: cst.Call) -> bool:
    """Whether a ``hasattr`` asks for a name that was there before today's."""
    thing = tree.calls[call].origin(call.args[0].value)
    name = nodes.literal(call.args[-1].value)
    return (thing in OLD_MODULES and name in HOMES) or f"{thing}.{name}" in OLD_MODULES


def _settled_comparison(tree: Tree, test: cst.Comparison) -> bool | None:
    target = test.comparisons[0]
    numbers = re.findall(r"\d+", tree.code(target.comparator))[:2]
    true, false = cst.GreaterThanEqual | cst.GreaterThan, cst.LessThanEqual | cst.LessThan
    if not numbers and nodes.literal(target.comparator):  # "parrots": all versions have numbers
        true, false, numbers = cst.NotEqual, cst.Equal, ["0", "0"]
    is_true, is_false = isinstance(target.operator, true), isinstance(target.operator, false)
    if len(test.comparisons) > 1 or len(numbers) < 2 or not (is_true or is_false):
        return None
    if tuple(map(int, numbers)) >= _FIRST_WITH_SCALER or not _asks_for_torch(tree, test.left):
        return None
    return is_true


@answered_once
def _asks_for_torch(tree: Tree, test: cst.CSTNode, depth: int = 0) -> bool:
    """Whether an expression depends on the version of torch, or on what names it has."""
    parts = list(_below_but_in_dicts(test))
    if any(isinstance(node, cst.Call) and _looks_up(tree, node) for node in parts):
        return True
    return any(_is_of_version(tree, use, depth) for use in tree.uses_among(parts))


def _is_of_version(tree: Tree, use: Use, depth: int) -> bool:
    if any(map(_NAMED_AFTER_TORCH.search, use.parts)):
        return True
    if any(origin and _VERSIONS.match(origin) for origin in use.origins):
        return True
    return depth < _FURTHEST and _tells_of_torch(tree, use, depth + 1)


def _below_but_in_dicts(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and its parts; a version among the values of a dict is there to be logged."""
    if not isinstance(node, cst.Dict):
        yield node
        for child in nodes.children(node):
            yield from _below_but_in_dicts(child)


def _tells_of_torch(tree: Tree, use: Use, depth: int) -> bool:
    """Whether what a name or an attribute was given depends on the version of torch."""
    sources = []
    for n in range(2, len(use.parts) + 1):
        sources += tree.assigned.get(use.parts[:n], ())
    given = [binding for binding in use.scope.bound(use.parts[0]) if binding.source is not None]
    if any(_is_set_by_version(tree, binding) for binding in given):
        return True
    sources += [binding.source for binding in given]
    # An IfExp chooses by a version, which what it gives no longer tells.
    sources = [source for source in sources if not isinstance(source, cst.IfExp)]
    return any(_asks_for_torch(tree, source, depth) for source in sources)


@answered_once  # and a flag may be set by itself
def _is_set_by_version(tree: Tree, binding: Binding) -> bool:
    """Whether a flag is set, or a thing of today's made, where a version or a try of it allows."""
    value = binding.value
    func = value.func if isinstance(value, cst.Call) else None
    made = [use.node for use, _ in _new_uses(tree, value) if use is not None] if func else []
    is_flag = getattr(value, "value", None) in ("True", "False", "None")
    if not is_flag and func not in made:
        return False
    return any(_chooses_version(tree, node, is_flag) for node, _ in tree.ancestors(binding.node))


def _chooses_version(tree: Tree, node: cst.CSTNode, is_flag: bool) -> bool:
    """Whether today's names are tried and their lack is caught, or an if sets a flag by them."""
    if isinstance(node, cst.Try):
        is_caught = any(_FALLBACK.search(tree.code(handler)) for handler in node.handlers)
        return is_caught and bool(_new_uses(tree, node.body))
    if not isinstance(node, cst.If) or not _asks_for_torch(tree, node.test):
        return False
    return is_flag or _settled(tree, node.test) is None


def _looks_up(tree: Tree, call: cst.Call) -> bool:
    """Whether a call asks for a name of torch's mixed precision, or for torch's version."""
    if not call.args:
        return False
    name, thing = nodes.name_called(call), call.args[0].value
    first, *rest = [nodes.literal(arg.value) for arg in call.args]
    if name in ("version", "distribution", "get_distribution"):
        return first == "torch"  # importlib.metadata.version("torch")
    if name in ("find_spec", "import_module"):
        return bool(re.match(r"torch\..*amp", first or ""))
    is_lookup = name in ("hasattr", "getattr", "signature", "getfullargspec", "dir", "vars")
    asked = rest[0] if name in ("hasattr", "getattr") and rest else None
    return is_lookup and _is_about_amp(tree.uses_among(nodes.below(thing)), asked)


def _is_about_amp(uses: list[Use], asked: str | None) -> bool:
    names = [o for use in uses for o in use.origins if o and o.startswith("torch")]
    if names and asked is not None:
        names = [asked]  # of something of torch
    return any(map(_OF_AMP.search, names))


@answered_once
def _new_uses(tree: Tree, node: cst.CSTNode) -> list[tuple[Use | None, str]]:
    """Each use or import of today's names below a node; None for an import."""
    found: list[tuple[Use | None, str]] = []
    for part in nodes.below(node):
        use = tree.use_at.get(part)  # an attribute, such as torch.amp.GradScaler
        origins = {tree.imported.get(part)} if use is None else use.origins
        found += [(use, name) for new, name in NEW.items() if new in origins]
    return found


def _is_newer(tree: Tree, arm: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether the other arm of a branch does with today's name what a node does with the old one.

    That of another device does not count, nor does a call of ``torch.autocast``, older than the
    other new names: it may be there for another dtype.
    """
    use, old = tree.use_at.get(node), None
    if use is not None:
        old = {origin.rpartition(".")[2] for origin in use.origins if origin}
    elif isinstance(node, cst.ImportAlias):
        old = {node.name.value}
    for new, name in _new_uses(tree, arm):
        if (old is None or old & {name, "amp"}) and (new is None or _is_for_cuda(tree, new, name)):
            return True
    return False


def _is_for_cuda(tree: Tree, new: Use, name: str) -> bool:
    call = tree.call_of(new.node)
    given = nodes.arguments(call.args, ("device",)) if call is not None else {}
    device = nodes.literal(given.get("device", given.get("device_type")))
    # None: a variable
    return name != "autocast" and (device is None or device.partition(":")[0] == "cuda")

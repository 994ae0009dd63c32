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
from amp_lab.migrate.python_tree import Tree, answered_once
from amp_lab.migrate.scopes import Binding, Use

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
    tries = set()
    for alias, origin in tree.imported.items():
        if _is_of_old_module(origin):
            block = tree.parents[tree.statement(alias)]
            tries.add(tree.parents.get(block))
    never_run: list[cst.ExceptHandler] = []
    for tried in tries:
        if isinstance(tried, cst.Try):
            never_run += _fallbacks(tree, tried)
    if not never_run:
        return
    for scope in tree.scopes:
        for bindings in scope.bindings.values():
            kept = [each for each in bindings if not _is_in_any(tree, each.node, never_run)]
            bindings[:] = kept or bindings


def _is_in_any(tree: Tree, node: cst.CSTNode, handlers: list[cst.ExceptHandler]) -> bool:
    return any(tree.is_in(node, handler) for handler in handlers)


def _is_of_old_module(origin: str | None) -> bool:
    return origin is not None and origin.startswith((*OLD_MODULES,))


def _fallbacks(tree: Tree, tried: cst.Try) -> list[cst.ExceptHandler]:
    """The handlers of a try for old names that are not there, if it imports nothing else."""
    for part in nodes.below(tried.body):
        if part in tree.imported and not _is_of_old_module(tree.imported[part]):
            return []
    fallbacks = []
    for handler in tried.handlers:
        if _MISSING.search(tree.code(handler)) and not _new_uses(tree, handler):
            fallbacks.append(handler)
    return fallbacks


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
    is_taken = child is parent.body
    if _asks(tree, parent.test, is_taken):
        return True
    arms = [arm for arm in (parent.body, parent.orelse) if arm is not None and arm is not child]
    block = tree.parents[parent]
    if not arms and isinstance(block, cst.Module | cst.IndentedBlock) and nodes.leaves(parent.body):
        place = block.body.index(parent)
        arms = block.body[place + 1 :]  # they are its else
    return any(_is_newer(tree, arm, node) for arm in arms)


@_decides.register
def _(parent: cst.While | cst.BooleanOperation, child, node, tree) -> bool:
    if isinstance(parent, cst.While):
        test = parent.test
        is_taken = True
    else:
        test = parent.left
        is_taken = isinstance(parent.operator, cst.And)
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
    header = tree.code(parent)
    tried = tree.parents[parent].body
    if not _FALLBACK.search(header):  # it is for errors of another kind
        return False
    if _new_uses(tree, tried):
        return True
    if not _MISSING.search(header):
        return False
    return any(isinstance(part, cst.Import | cst.ImportFrom) for part in nodes.below(tried))


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
    if isinstance(statement, cst.If) and _asks(tree, statement.test, is_taken=False):
        return True
    return _is_newer(tree, statement.body, node)


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
        answer = _settled(tree, test.expression)
        return None if answer is None else not answer
    if isinstance(test, cst.Name) and test in tree.use_at:
        value = tree.use_at[test].scope.value_of(test)
        return None if value is test else _settled(tree, value)
    if nodes.is_call_of(test, "hasattr"):
        return True if _is_old_name(tree, test) else None
    if isinstance(test, cst.Comparison):
        return _settled_comparison(tree, test)
    return None


def _is_old_name(tree: Tree, call: cst.Call) -> bool:
    """Whether a ``hasattr`` asks for a name that was there before today's."""
    thing = tree.calls[call].origin(call.args[0].value)
    name = nodes.literal(call.args[-1].value)
    if thing in OLD_MODULES and name in HOMES:
        return True
    return f"{thing}.{name}" in OLD_MODULES


def _settled_comparison(tree: Tree, test: cst.Comparison) -> bool | None:
    if len(test.comparisons) > 1:
        return None
    (target,) = test.comparisons
    answer = _answer_for_a_later_torch(target.operator)
    numbers = re.findall(r"\d+", tree.code(target.comparator))[:2]
    if not numbers and nodes.literal(target.comparator):
        # Such as "parrots", which no version is called.
        answer = _answer_for_another_name(target.operator)
    elif len(numbers) < 2 or tuple(map(int, numbers)) >= _FIRST_WITH_SCALER:
        return None
    if answer is None or not _asks_for_torch(tree, test.left):
        return None
    return answer


def _answer_for_a_later_torch(operator: cst.BaseCompOp) -> bool | None:
    if isinstance(operator, cst.GreaterThanEqual | cst.GreaterThan):
        return True
    if isinstance(operator, cst.LessThanEqual | cst.LessThan):
        return False
    return None


def _answer_for_another_name(operator: cst.BaseCompOp) -> bool | None:
    if isinstance(operator, cst.NotEqual):
        return True
    if isinstance(operator, cst.Equal):
        return False
    return None


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
    for count in range(2, len(use.parts) + 1):
        attribute = use.parts[:count]
        sources += tree.assigned.get(attribute, ())
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
    is_flag = getattr(value, "value", None) in ("True", "False", "None")
    if not is_flag and not _is_made_by_new_name(tree, value):
        return False
    return any(_chooses_version(tree, node, is_flag) for node, _ in tree.ancestors(binding.node))


def _is_made_by_new_name(tree: Tree, value: cst.CSTNode | None) -> bool:
    """Whether a value is a call of one of today's names."""
    if not isinstance(value, cst.Call):
        return False
    return any(use is not None and use.node is value.func for use, _ in _new_uses(tree, value))


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
    name = nodes.name_called(call)
    first, *rest = [nodes.literal(arg.value) for arg in call.args]
    if name in ("version", "distribution", "get_distribution"):
        return first == "torch"  # importlib.metadata.version("torch")
    if name in ("find_spec", "import_module"):
        return bool(re.match(r"torch\..*amp", first or ""))
    if name not in ("hasattr", "getattr", "signature", "getfullargspec", "dir", "vars"):
        return False
    asked = None
    if name in ("hasattr", "getattr") and rest:
        asked = rest[0]
    thing = call.args[0].value
    return _is_about_amp(tree.uses_among(nodes.below(thing)), asked)


def _is_about_amp(uses: list[Use], asked: str | None) -> bool:
    names: list[str] = []
    for use in uses:
        names += [origin for origin in use.origins if origin and origin.startswith("torch")]
    if names and asked is not None:
        names = [asked]  # of something of torch
    return any(_OF_AMP.search(name) for name in names)


@answered_once
def _new_uses(tree: Tree, node: cst.CSTNode) -> list[tuple[Use | None, str]]:
    """Each use or import of today's names below a node; None for an import."""
    found: list[tuple[Use | None, str]] = []
    for part in nodes.below(node):
        use = tree.use_at.get(part)  # an attribute, such as torch.amp.GradScaler
        origins = use.origins if use is not None else {tree.imported.get(part)}
        found += [(use, name) for new, name in NEW.items() if new in origins]
    return found


def _is_newer(tree: Tree, arm: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether the other arm of a branch does with today's name what a node does with the old one.

    That of another device does not count, nor does a call of ``torch.autocast``, older than the
    other new names: it may be there for another dtype.
    """
    old_names = _last_names(tree, node)
    for new, name in _new_uses(tree, arm):
        is_same_name = old_names is None or bool(old_names & {name, "amp"})
        if is_same_name and (new is None or _is_for_cuda(tree, new, name)):
            return True
    return False


def _last_names(tree: Tree, node: cst.CSTNode) -> set | None:
    """The last part of what a node stands for; None if it is neither a use nor an import."""
    use = tree.use_at.get(node)
    if use is not None:
        return {origin.rpartition(".")[2] for origin in use.origins if origin}
    if isinstance(node, cst.ImportAlias):
        return {node.name.value}
    return None


def _is_for_cuda(tree: Tree, new: Use, name: str) -> bool:
    if name == "autocast":
        return False
    call = tree.call_of(new.node)
    if call is None:
        return True
    given = nodes.arguments(call.args, ("device",))
    device = nodes.literal(given.get("device", given.get("device_type")))
    if device is None:  # a variable, or nothing
        return True
    return device.partition(":")[0] == "cuda"

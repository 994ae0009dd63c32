"""Find code that is only for some versions of torch, so rules do not change this code.

The branch for an old torch needs the old names. A test for a torch version that is older than the
new names, such as ``>= 1.6``, does not count: it is true for every torch that has the new names.
"""

import functools
import re

import libcst as cst

from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.amp_names import NEW_NAMES, OLD_MODULES, SUBMODULES
from amp_lab.migrate.tree.python_tree import Tree, cached_in_tree
from amp_lab.migrate.tree.scopes import Binding, Use

_NAMED_AFTER_TORCH = re.compile(  # TORCH_GE_2_4, is_torch_version, torch_at_least, PT24
    r"(?i)(?<![a-z])(?:py)?torch_?(?:v?\d+(?:_\d+)*(?![a-z\d])|greater|less|at_least|newer|older"
    r"|before|since|(?:v|ver|version|major|minor|gte?|lte?|ge|le)(?![a-z]))"
    r"|(?<![a-z])(?:old|new)_torch(?![a-z])|(?<![a-z])pt_?v?(?:\d_\d|\d\d)(?![a-z])"
)
# torch.__version__ and torch.version.__version__; torch.version.cuda is another version
_VERSION_ORIGIN = re.compile(r"torch\.(?:__version__|torch_version|version\.(?!cuda|hip))")
_AMP_NAME = re.compile(r"(?i)amp|autocast|scaler|custom_(?:fwd|bwd)")
# "except ImportError:" and "except:"; not "except KeyError:"
_CATCHES_FAILURE = re.compile(
    r"except\s*(:|.*\b(ImportError|ModuleNotFoundError|AttributeError|TypeError|NameError|Exception)\b)"
)
_CATCHES_MISSING_NAME = re.compile(
    r"except.*\b(ImportError|ModuleNotFoundError|AttributeError|NameError)\b"
)
_MAX_DEPTH = 3  # how many assignments a name in a condition is followed through
_FIRST_WITH_SCALER = (2, 3)  # the first torch that has torch.amp.GradScaler
# Whether a later torch fulfils torch.__version__ <operator> "1.6"
_FOR_A_LATER_TORCH: dict[type, bool] = {cst.GreaterThanEqual: True, cst.GreaterThan: True}
_FOR_A_LATER_TORCH |= {cst.LessThanEqual: False, cst.LessThan: False}
# Whether a version fulfils version <operator> "parrots"
_FOR_ANOTHER_NAME: dict[type, bool] = {cst.NotEqual: True, cst.Equal: False}


_Compound = cst.If | cst.Try | cst.With


def forget_fallbacks(tree: Tree) -> None:
    """Remove from the scopes the names that a handler binds if the import of an old name fails.

    With the new names the import cannot fail, so the handler never runs. But if the same `try` also
    imports something else, this import may fail.
    """
    around_imports = set()  # the statement around each import of an old name, such as a `try`
    for alias, origin in tree.alias_origins.items():
        if _is_of_old_module(origin):
            block = tree.parents[tree.statement_of(alias)]
            around_imports.add(tree.parents.get(block))  # None at the top level
    never_run: list[cst.ExceptHandler] = []
    for statement in around_imports:
        if isinstance(statement, cst.Try):
            never_run += _handlers_for_old_names(tree, statement)
    if not never_run:
        return
    for scope in tree.scopes:
        for bindings in scope.bindings.values():
            remaining = [each for each in bindings if not _is_in_any(tree, each.node, never_run)]
            bindings[:] = remaining or bindings  # each name keeps at least one


def _is_in_any(tree: Tree, node: cst.CSTNode, handlers: list[cst.ExceptHandler]) -> bool:
    """Whether a node is inside one of the handlers."""
    return any(tree.is_in(node, handler) for handler in handlers)


def _is_of_old_module(origin: str | None) -> bool:
    """Whether a dotted name is an old module, or a name in one."""
    return origin is not None and origin.startswith((*OLD_MODULES,))


def _handlers_for_old_names(tree: Tree, try_: cst.Try) -> list[cst.ExceptHandler]:
    """The handlers without new names that run if an old name is missing.

    Empty if the `try` imports anything else.
    """
    for part in nodes.walk(try_.body):
        if part in tree.alias_origins and not _is_of_old_module(tree.alias_origins[part]):
            return []
    handlers = []
    for handler in try_.handlers:
        if _CATCHES_MISSING_NAME.search(tree.code(handler)) and not _new_uses(tree, handler):
            handlers.append(handler)
    return handlers


def is_guarded(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether a condition on torch's version, or a `try` of its new names, decides if `node` runs.

    Each ancestor is asked by `_decides`, which has one function for each type of node.
    """
    return any(_decides(parent, child, node, tree) for parent, child in tree.ancestors(node))


@functools.singledispatch
def _decides(parent: cst.CSTNode, child: cst.CSTNode, node: cst.CSTNode, tree: Tree) -> bool:
    """Whether `parent` decides by torch's version if `node` runs.

    `child` is the child of `parent` that `node` is, or is inside of.
    """
    return False  # nodes without a function of their own below decide nothing


@_decides.register
def _(parent: cst.If | cst.IfExp, child, node, tree) -> bool:
    """Whether the condition asks for a version, or the other branch has the new name."""
    if child is parent.test:
        return False
    if _asks_version(tree, parent.test, is_taken=child is parent.body):
        return True
    arms = [arm for arm in (parent.body, parent.orelse) if arm is not None and arm is not child]
    block = tree.parents[parent]
    is_in_block = isinstance(block, cst.Module | cst.IndentedBlock)
    if not arms and is_in_block and nodes.leaves_block(parent.body):
        position = block.body.index(parent)
        arms = block.body[position + 1 :]  # after `if …: return`, the rest is its else
    return any(_does_same_with_new_name(tree, arm, node) for arm in arms)


@_decides.register
def _(parent: cst.While | cst.BooleanOperation, child, node, tree) -> bool:
    """Whether a loop's condition, or the left side of ``and`` or ``or``, asks for a version."""
    if isinstance(parent, cst.While):
        test = parent.test
        is_taken = True
    else:
        test = parent.left
        is_taken = isinstance(parent.operator, cst.And)
    return child is not test and _asks_version(tree, test, is_taken)


@_decides.register
def _(parent: cst.Call, child, node, tree) -> bool:
    """Whether the node is looked up in ``hasattr(node, …)``, or the default of a ``getattr``."""
    if nodes.is_call_of(parent, "hasattr", "getattr") and child is parent.args[0]:
        return True
    # getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
    is_default = nodes.is_call_of(parent, "getattr") and child in parent.args[2:]
    return is_default and _is_lookup(tree, parent)


@_decides.register
def _(parent: cst.Match, child, node, tree) -> bool:
    """Whether another case has the new name, or the subject depends on the version."""
    if child is parent.subject:
        return False
    others = [case for case in parent.cases if case is not child]
    has_new_name = any(_does_same_with_new_name(tree, case, node) for case in others)
    return has_new_name or _depends_on_torch(tree, parent.subject)


@_decides.register
def _(parent: cst.Subscript, child, node, tree) -> bool:
    """Whether the node is chosen as in ``(old, new)[torch.__version__ >= "2.3"]``."""
    is_index_by_version = any(_depends_on_torch(tree, index) for index in parent.slice)
    return child is parent.value and is_index_by_version


@_decides.register
def _(parent: cst.With, child, node, tree) -> bool:
    """Whether the node imports a new name inside ``with contextlib.suppress(…)``."""
    if child is not parent.body or tree.alias_origins.get(node) not in NEW_NAMES:
        return False
    return "suppress" in nodes.context_names(parent)


@_decides.register
def _(parent: cst.ExceptHandler, child, node, tree) -> bool:
    """Whether the handler runs where the new name, or any import of its `try`, is missing."""
    header = tree.code(parent)
    tried = tree.parents[parent].body
    if not _CATCHES_FAILURE.search(header):
        return False
    if _new_uses(tree, tried):
        return True
    if not _CATCHES_MISSING_NAME.search(header):
        return False
    return any(isinstance(part, cst.Import | cst.ImportFrom) for part in nodes.walk(tried))


@_decides.register
def _(parent: cst.Try, child, node, tree) -> bool:
    """Whether a `try` has the node in its body, and another name for another version of torch.

    If the node imports a new name, a handler catches that it is missing. The old name need not be
    in the handler, since it may be imported before the `try`. For an old name, a handler has a new
    name.
    """
    if child is not parent.body:
        return False
    if tree.alias_origins.get(node) in NEW_NAMES:
        return any(_CATCHES_FAILURE.search(tree.code(handler)) for handler in parent.handlers)
    return any(_new_uses(tree, handler) for handler in parent.handlers)


@_decides.register
def _(parent: cst.Module | cst.IndentedBlock, child, node, tree) -> bool:
    """Whether an earlier statement leaves the block for some versions: ``if old: return``."""
    positions, exits = _positions_and_exits(tree, parent)
    earlier = (statement for statement in exits if positions[statement] < positions[child])
    return any(_ends_by_version(tree, statement, node) for statement in earlier)


@cached_in_tree
def _positions_and_exits(
    tree: Tree, block: cst.Module | cst.IndentedBlock
) -> tuple[dict[cst.CSTNode, int], list[_Compound]]:
    """The position of each statement in a block, and the statements that may leave the block."""
    positions: dict[cst.CSTNode, int] = {part: number for number, part in enumerate(block.body)}
    compound = [part for part in block.body if isinstance(part, _Compound)]
    return positions, [part for part in compound if _may_end_block(tree, part)]


def _may_end_block(tree: Tree, statement: _Compound) -> bool:
    """Whether a statement may end with return, continue or break, and may also be passed."""
    if not nodes.leaves_block(statement.body):
        return False
    if isinstance(nodes.last_statement(statement.body), cst.Raise):
        return False  # the file refuses such a torch altogether
    # A `with` always runs its body to the end, except if it suppresses an error.
    return not isinstance(statement, cst.With) or "suppress" in nodes.context_names(statement)


def _ends_by_version(tree: Tree, statement: _Compound, node: cst.CSTNode) -> bool:
    """Whether a statement leaves its block for some versions: the rest is then for the others.

    Also if its body uses the new name for `node`.
    """
    if isinstance(statement, cst.If) and _asks_version(tree, statement.test, is_taken=False):
        return True
    return _does_same_with_new_name(tree, statement.body, node)


def _asks_version(tree: Tree, test: cst.BaseExpression, is_taken: bool) -> bool:
    """Whether a branch runs for some versions of torch only.

    Parameters
    ----------
    test : cst.BaseExpression
        The condition of the branch.
    is_taken : bool
        Whether the branch runs if the condition is true; else it runs if it is false.
    """
    answer = _constant_answer(tree, test)
    if answer is not None:
        # Where today's names exist, the condition has this value. The branch that is not run then
        # is for an older torch.
        return answer != is_taken
    # The branch needs both sides of an `and` to be true, or both sides of an `or` to be false.
    needs_both_sides = cst.And if is_taken else cst.Or
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, needs_both_sides):
        return _asks_version(tree, test.left, is_taken) or _asks_version(tree, test.right, is_taken)
    return _depends_on_torch(tree, test)


@cached_in_tree
def _constant_answer(tree: Tree, test: cst.CSTNode) -> bool | None:
    """The value of a condition wherever today's names exist; None if it is not always the same.

    ``torch.__version__ >= "1.6"`` and ``hasattr(torch.cuda, "amp")`` are always true there.
    """
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        answer = _constant_answer(tree, test.expression)
        return None if answer is None else not answer
    if isinstance(test, cst.Name) and test in tree.use_by_node:
        value = tree.use_by_node[test].scope.value_of(test)
        return None if value is test else _constant_answer(tree, value)
    if nodes.is_call_of(test, "hasattr"):
        return True if _is_old_name(tree, test) else None
    if isinstance(test, cst.Comparison):
        return _constant_comparison(tree, test)
    return None


def _is_old_name(tree: Tree, call: cst.Call) -> bool:
    """Whether ``hasattr(torch.cuda.amp, "autocast")`` asks for an old module or an old name."""
    module = tree.calls[call].origin(call.args[0].value)
    name = nodes.string_value(call.args[-1].value)
    if module in OLD_MODULES and name in SUBMODULES:
        return True
    return f"{module}.{name}" in OLD_MODULES  # hasattr(torch.cuda, "amp")


def _constant_comparison(tree: Tree, test: cst.Comparison) -> bool | None:
    """The constant value of a comparison with a version or a string; see `_constant_answer`."""
    if len(test.comparisons) > 1:
        return None
    (target,) = test.comparisons
    numbers = re.findall(r"\d+", tree.code(target.comparator))
    version = tuple(map(int, numbers[:2]))
    if not version and nodes.string_value(target.comparator):
        # TORCH_VERSION != "parrots": a string without numbers is no version
        answer = _FOR_ANOTHER_NAME.get(type(target.operator))
    elif len(version) < 2 or version >= _FIRST_WITH_SCALER:
        return None  # no version, or one that some torch with today's names is older than
    else:
        answer = _FOR_A_LATER_TORCH.get(type(target.operator))
    if answer is None or not _depends_on_torch(tree, test.left):
        return None
    return answer


@cached_in_tree
def _depends_on_torch(tree: Tree, test: cst.CSTNode, depth: int = 0) -> bool:
    """Whether an expression depends on the version of torch, or on which names torch has.

    `depth` is the number of assignments that led to it; more than `_MAX_DEPTH` are not followed.
    """
    parts = list(nodes.walk(test, skip=(cst.Dict,)))  # a version in a dict is only logged
    if any(isinstance(node, cst.Call) and _is_lookup(tree, node) for node in parts):
        return True
    return any(_is_of_version(tree, use, depth) for use in tree.uses_in(parts))


def _is_of_version(tree: Tree, use: Use, depth: int) -> bool:
    """Whether a name is torch's version, is named after one, or gets its value from one."""
    if any(map(_NAMED_AFTER_TORCH.search, use.parts)):
        return True
    if any(origin and _VERSION_ORIGIN.match(origin) for origin in use.origins):
        return True
    return depth < _MAX_DEPTH and _comes_from_version(tree, use, depth + 1)


def _comes_from_version(tree: Tree, use: Use, depth: int) -> bool:
    """Whether the value of a name or attribute depends on torch's version; see `_is_of_version`."""
    sources = []
    for count in range(2, len(use.parts) + 1):  # of a.b.c: a.b, then a.b.c
        attribute = use.parts[:count]
        sources += tree.assigned_values.get(attribute, ())
    bindings = use.scope.bindings_of(use.parts[0])
    assignments = [binding for binding in bindings if binding.source is not None]
    if any(_is_set_by_version(tree, binding) for binding in assignments):
        return True
    sources += [binding.source for binding in assignments]
    # GradScaler = new if TORCH_2_3 else old: its value works with every version.
    sources = [source for source in sources if not isinstance(source, cst.IfExp)]
    return any(_depends_on_torch(tree, source, depth) for source in sources)


@cached_in_tree  # also because a flag may be computed from itself
def _is_set_by_version(tree: Tree, binding: Binding) -> bool:
    """Whether a flag, or an object of a new class, is assigned under a condition on the version."""
    value = binding.value
    is_flag = isinstance(value, cst.Name) and value.value in ("True", "False", "None")
    if not is_flag and not _is_made_by_new_name(tree, value):
        return False
    return any(_chooses_version(tree, node, is_flag) for node, _ in tree.ancestors(binding.node))


def _is_made_by_new_name(tree: Tree, value: cst.CSTNode | None) -> bool:
    """Whether a value is a call of one of today's names."""
    if not isinstance(value, cst.Call):
        return False
    use = tree.use_by_node.get(value.func)
    return use is not None and not use.origins.isdisjoint(NEW_NAMES)


def _chooses_version(tree: Tree, node: cst.CSTNode, is_flag: bool) -> bool:
    """Whether a node is a `try` of new names, or an `if` on the version of torch.

    For an object of a new class, not a flag, an `if` with a constant answer does not count.
    """
    if isinstance(node, cst.Try):
        is_caught = any(_CATCHES_FAILURE.search(tree.code(handler)) for handler in node.handlers)
        return is_caught and bool(_new_uses(tree, node.body))
    if not isinstance(node, cst.If) or not _depends_on_torch(tree, node.test):
        return False
    return is_flag or _constant_answer(tree, node.test) is None


def _is_lookup(tree: Tree, call: cst.Call) -> bool:
    """Whether a call looks up a name of torch's mixed precision, or torch's version."""
    if not call.args:
        return False
    name = nodes.called_name(call)
    first, *rest = [nodes.string_value(arg.value) for arg in call.args]
    if name in ("version", "distribution", "get_distribution"):
        return first == "torch"  # importlib.metadata.version("torch")
    if name in ("find_spec", "import_module"):
        return bool(re.match(r"torch\..*amp", first or ""))  # find_spec("torch.cuda.amp")
    if name not in ("hasattr", "getattr", "signature", "getfullargspec", "dir", "vars"):
        return False
    use = tree.use_by_node.get(call.args[0].value)
    origins = set() if use is None else use.origins
    torch_names = [origin for origin in origins if origin and origin.startswith("torch")]
    if torch_names and rest and rest[0] and name in ("hasattr", "getattr"):
        return bool(_AMP_NAME.search(rest[0]))  # hasattr(torch.amp, "GradScaler")
    # signature(torch.amp.autocast), dir(torch.amp)
    return any(_AMP_NAME.search(torch_name) for torch_name in torch_names)


@cached_in_tree
def _new_uses(tree: Tree, node: cst.CSTNode) -> list[tuple[Use | None, str]]:
    """Each (use, name) of a new name in a node; the name is its last part, ``"GradScaler"``.

    The use is None for an import.
    """
    new_uses: list[tuple[Use | None, str]] = []
    for part in nodes.walk(node):
        use = tree.use_by_node.get(part)
        origins = use.origins if use is not None else {tree.alias_origins.get(part)}
        new_uses += [(use, name) for new, name in NEW_NAMES.items() if new in origins]
    return new_uses


def _does_same_with_new_name(tree: Tree, arm: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether another branch, `arm`, uses the new name for the old one that `node` is.

    A new name for another device does not count, nor does a use of ``torch.autocast``: it is older
    than the other new names, and may be there for another dtype. If `node` is no name, any of the
    other new names counts.
    """
    old_names = _last_parts(tree, node)
    for use, name in _new_uses(tree, arm):
        # the node may be the module, `amp`: any new name may be in the place of one of its names
        is_same_name = old_names is None or bool(old_names & {name, "amp"})
        if is_same_name and (use is None or _is_for_cuda(tree, use, name)):
            return True
    return False


def _last_parts(tree: Tree, node: cst.CSTNode) -> set | None:
    """The last parts, as text, of the names that `node` may stand for; None if it is no name.

    ``{"autocast"}`` for ``torch.cuda.amp.autocast``, or for its import.
    """
    use = tree.use_by_node.get(node)
    if use is not None:
        return {origin.rpartition(".")[2] for origin in use.origins if origin}
    if isinstance(node, cst.ImportAlias):
        return {node.name.value}
    return None


def _is_for_cuda(tree: Tree, use: Use, name: str) -> bool:
    """Whether a use of a new name other than autocast may be for CUDA."""
    if name == "autocast":
        return False
    call = tree.call_of(use.node)
    if call is None:
        return True
    arguments = nodes.arguments(call.args, ("device",))
    device = nodes.string_value(arguments.get("device", arguments.get("device_type")))
    if device is None:  # a variable, or nothing
        return True
    return device.partition(":")[0] == "cuda"

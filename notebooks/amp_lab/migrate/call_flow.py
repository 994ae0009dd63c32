"""What goes from one function of a file to another, and what leaves the file."""

import re
from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate.code_reader import CodeReader, Unit, last_part
from amp_lab.migrate.nodes import arguments, dotted
from amp_lab.migrate.python_tree import Scope

_OF_MODULES = {"parameters", "named_parameters", "modules", "children", "forward", "train", "eval"}
_OF_MODULES |= {"to", "cuda", "state_dict", "load_state_dict", "zero_grad", "register_buffer"}

_KEEPS = cst.Attribute | cst.AssignTarget | cst.Comparison | cst.ComparisonTarget | cst.If
_KEEPS |= cst.UnaryOperation | cst.BooleanOperation


def calls_of(code: CodeReader, unit: Unit) -> Iterator[cst.Call]:
    """The calls of a function of this file, or of a method through ``self``."""
    name = unit.node.name.value
    for call in code.tree.calls:
        parts = dotted(call.func)
        if unit.scope.parent.kind == "class":
            if parts == ("self", name):
                yield call
        elif parts == (name,):
            binding = code.tree.scope_of[call].only(name)
            if binding is not None and binding.node is unit.node:
                yield call


def passed(code: CodeReader, unit: Unit, call: cst.Call, key: str) -> tuple[Scope, str] | None:
    """The variable outside a function that a name in it stands for in a call of it."""
    root, dot, _ = key.partition(".")
    home = unit.scope.find(root)
    if home is None or not re.fullmatch(r"[\w.]+", key):
        return None
    is_method = unit.scope.parent.kind == "class"
    if home is not unit.scope or (dot and is_method and root == "self"):
        return home, key  # the function sees it itself
    params = [param.name.value for param in unit.node.params.params][is_method:]
    parts = dotted(arguments(call, params).get(key)) if key in params else None
    scope = code.tree.scope_of[call].find(parts[0]) if parts else None
    return None if scope is None else (scope, ".".join(parts))


def is_made_in(code: CodeReader, scope: Scope, key: str, loop: cst.CSTNode) -> bool:
    """Whether a variable, or an attribute of one, gets a new value in a loop."""
    root = re.match(r"\w*", key).group()
    home = scope.find(root)
    bindings = home.bindings[root] if home else ()
    if any(code.tree.is_in(binding.node, loop) for binding in bindings):
        return True
    # a.b = …, also among others
    assigned = rf"(?m)^\s*([\w.]+\s*,\s*)*{re.escape(key)}\s*(,[^=(\n]*)?=[^=]"
    return bool(re.search(assigned, code.tree.code(loop)))


def escapes(code: CodeReader, name: str) -> bool:
    """Whether code that is not seen here may get hold of a scaler."""
    is_attribute = any(event.of.startswith("self.") for event in code.made.get(name, ()))
    if is_attribute and any(_hands_on_self(code, call) for call in code.tree.calls):
        return True
    uses = (use.node for use in code.tree.uses if use.parts[-1] == name)
    return not all(_stays(code, node, name) for node in uses)


def _hands_on_self(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call gives the object away, or is of a method from a class of another file."""
    parts = dotted(call.func) or ()
    # what gets the object may update its scaler
    if any(dotted(arg.value) == ("self",) for arg in call.args) and parts != ("super",):
        return True
    if len(parts) != 2 or parts[0] != "self":
        return False
    is_here = parts[1] in code.functions or parts in code.tree.assigned
    return not is_here and parts[1] not in _OF_MODULES


def _stays(code: CodeReader, node: cst.CSTNode, name: str) -> bool:
    """Whether a use of a scaler leaves it in this file, and by its name."""
    parents = code.tree.parents
    parent = parents[node]
    if isinstance(parent, cst.Arg):
        call = parents[parent]
        called = code.key(call.func) if isinstance(call, cst.Call) else ""
        function = code.functions.get(called)
        params = function.params if function is not None else cst.Parameters()
        # there it is found by the same name
        return name in {param.name.value for param in (*params.params, *params.kwonly_params)}
    if isinstance(parent, cst.Assign | cst.AnnAssign):
        targets = parent.targets if isinstance(parent, cst.Assign) else [parent]
        return all(last_part(code.key(target.target)) == name for target in targets)
    return isinstance(parent, _KEEPS)


def is_handed_on(code: CodeReader, name: str) -> bool:
    """Whether a call other than ``torch.save`` is given a dict, which it may add to."""
    given = [c for c in code.tree.calls if any(dotted(arg.value) == (name,) for arg in c.args)]
    return any(code.origin(c.func, code.tree.scope_of[c]) != "torch.save" for c in given)

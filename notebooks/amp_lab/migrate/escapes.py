"""Whether code that is not seen may do something with a scaler."""

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader, last_part

_KEEPS = cst.Attribute | cst.AssignTarget | cst.Comparison | cst.ComparisonTarget | cst.If
_KEEPS |= cst.UnaryOperation | cst.BooleanOperation


def is_given(call: cst.Call, name: str) -> bool:
    """Whether a name by itself is an argument of a call."""
    return any(nodes.dotted(arg.value) == (name,) for arg in call.args)


def escapes(code: CodeReader, name: str) -> bool:
    """Whether code that is not seen here may get hold of a scaler."""
    is_attribute = any(key.startswith("self.") for key in code.made.get(name, ()))
    if is_attribute and any(_hands_on_self(code, call) for call in code.tree.calls):
        return True
    uses = (use.node for use in code.tree.uses if use.parts[-1] == name)
    return not all(stays(code, node, name) for node in uses)


def _hands_on_self(code: CodeReader, call: cst.Call) -> bool:
    """Whether a call gives the object away, or is of a method from a class of another file."""
    parts = nodes.dotted(call.func) or ()
    # what gets the object may update its scaler
    if is_given(call, "self") and parts != ("super",):
        return True
    if len(parts) != 2 or parts[0] != "self":
        return False
    return parts[1] not in code.functions and parts not in code.tree.assigned


def stays(code: CodeReader, node: cst.CSTNode, name: str) -> bool:
    """Whether a use of a scaler leaves it in this file, and by its name."""
    parent = code.tree.parents[node]
    given = [last_part(code.key(target)) for target, _ in nodes.assignments(parent)]
    return isinstance(parent, _KEEPS) or (given != [] and {*given} == {name})

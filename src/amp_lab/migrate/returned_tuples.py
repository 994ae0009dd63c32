"""Tuples that functions of a file return, such as a model with its optimizer and its scaler.

They are followed by name: ``state = build()``, ``state[1]``, ``train(state)``,
``model, optimizer, scaler = state``.
"""

from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.code_reader import CodeReader
from amp_lab.migrate.scopes import Scope


def stays_in_tuple(code: CodeReader, use: cst.CSTNode, name: str) -> bool:
    """Whether a use of a scaler puts it into a tuple that only names of this file get.

    It is unpacked under its own name then, or not at all.
    """
    element = code.tree.parents[use]
    if not isinstance(element, cst.Element):
        return False
    returned = code.tree.parents[element]
    if not isinstance(returned, cst.Tuple):
        return False
    function = _function_returning(code, returned)
    if function is None:
        return False
    place = returned.elements.index(element)
    names: list[str] = []
    for call in _calls_of(code, function):
        if not _is_kept(code, call, name, place, names):
            return False
    followed: set[str] = set()
    while names:
        holder = names.pop()
        if holder in followed:
            continue
        followed.add(holder)
        for reading in code.tree.uses_by_last_part[holder]:
            if not _is_kept(code, reading.node, name, place, names):
                return False
    return True


def _function_returning(code: CodeReader, returned: cst.Tuple) -> cst.FunctionDef | None:
    """The function that returns this tuple, if it is one of the file's, and no method."""
    if not isinstance(code.tree.parents[returned], cst.Return):
        return None
    for parent, _ in code.tree.ancestors(returned):
        if isinstance(parent, cst.FunctionDef):
            is_known = code.functions.get(parent.name.value) is parent
            return parent if is_known else None
    return None


def _calls_of(code: CodeReader, function: cst.FunctionDef) -> Iterator[cst.Call]:
    for call in code.tree.calls:
        if nodes.called_name(call) == function.name.value:
            yield call


def _is_kept(code: CodeReader, node: cst.CSTNode, name: str, place: int, names: list[str]) -> bool:
    """Whether what has the tuple keeps the scaler in this file; adds the names that get it."""
    parent = code.tree.parents[node]
    if isinstance(parent, cst.Subscript) and parent.value is node:
        number = _number_in(parent)
        return number is not None and number != place
    if isinstance(parent, cst.Arg):
        return _is_given_to_a_function(code, parent, names)
    for target, value in nodes.assignments(parent):
        if value is not node:
            return False
        if isinstance(target, cst.Name):
            names.append(target.value)
        elif not _unpacks_as(target, name, place):
            return False
    return isinstance(parent, cst.Assign)


def _unpacks_as(target: cst.BaseExpression, name: str, place: int) -> bool:
    """Whether the scaler gets its own name in an unpacking."""
    if not isinstance(target, cst.Tuple) or place >= len(target.elements):
        return False
    if any(isinstance(element, cst.StarredElement) for element in target.elements):
        return False
    return nodes.name_parts(target.elements[place].value) == (name,)


def _is_given_to_a_function(code: CodeReader, argument: cst.Arg, names: list[str]) -> bool:
    """Whether an argument becomes a parameter of a function of this file; adds its name."""
    call = code.tree.parents[argument]
    if not isinstance(call, cst.Call) or argument.star:
        return False
    function = code.functions.get(nodes.called_name(call))
    if function is None or not isinstance(call.func, cst.Name):
        return False
    if argument.keyword is not None:
        names.append(argument.keyword.value)
        return True
    parameters = (*function.params.posonly_params, *function.params.params)
    number = call.args.index(argument)
    if number >= len(parameters):
        return False
    names.append(parameters[number].name.value)
    return True


def _number_in(subscript: cst.Subscript) -> int | None:
    """The number in ``state[1]``; None for any other index."""
    index = subscript.slice[0].slice
    if isinstance(index, cst.Index) and isinstance(index.value, cst.Integer):
        return index.value.evaluated_value
    return None


def name_in_tuple(code: CodeReader, node: cst.CSTNode, scope: Scope) -> str | None:
    """The name that ``state[1]`` has in the function that returned it; None for all else."""
    if not isinstance(node, cst.Subscript):
        return None
    number = _number_in(node)
    call = scope.value_of(node.value)
    if number is None or not isinstance(call, cst.Call):
        return None
    function = code.functions.get(nodes.called_name(call))
    if function is None:
        return None
    tuples = [part.value for part in nodes.walk(function) if isinstance(part, cst.Return)]
    if len(tuples) != 1 or not isinstance(tuples[0], cst.Tuple):
        return None
    elements = tuples[0].elements
    if number >= len(elements):
        return None
    return code.key(elements[number].value)

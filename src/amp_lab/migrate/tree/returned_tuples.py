"""Tuples that functions of a file return, such as a model with its optimizer and its scaler.

They are followed by name: ``state = build()``, ``state[1]``, ``train(state)``,
``model, optimizer, scaler = state``.
"""

from collections.abc import Iterator

import libcst as cst

from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import CodeReader
from amp_lab.migrate.tree.scopes import Scope


def stays_in_tuple(code: CodeReader, use: cst.CSTNode, name: str) -> bool:
    """Whether `use` puts the scaler called `name` into a returned tuple that stays in this file.

    The tuple stays if it is only unpacked, with `name` for the scaler again, read by number for
    its other elements, or passed to functions of this file.
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
    index = returned.elements.index(element)
    holders: list[str] = []  # names that get the tuple, and are not followed yet
    for call in _calls_of(code, function):
        if not _stays_in_file(code, call, name, index, holders):
            return False
    followed: set[str] = set()
    while holders:
        holder = holders.pop()
        if holder in followed:
            continue
        followed.add(holder)
        for reading in code.tree.uses_by_last_part[holder]:
            if not _stays_in_file(code, reading.node, name, index, holders):
                return False
    return True


def _function_returning(code: CodeReader, returned: cst.Tuple) -> cst.FunctionDef | None:
    """The function that returns this tuple; None if a later one in the file has its name.

    Also None if the tuple is not the whole value of a ``return``.
    """
    if not isinstance(code.tree.parents[returned], cst.Return):
        return None
    for parent, _ in code.tree.ancestors(returned):
        if isinstance(parent, cst.FunctionDef):
            is_last_of_name = code.functions.get(parent.name.value) is parent
            return parent if is_last_of_name else None
    return None


def _calls_of(code: CodeReader, function: cst.FunctionDef) -> Iterator[cst.Call]:
    """Yield the calls in the file of a function, or of any method, with this name."""
    for call in code.tree.calls:
        if nodes.called_name(call) == function.name.value:
            yield call


def _stays_in_file(
    code: CodeReader, node: cst.CSTNode, name: str, index: int, holders: list[str]
) -> bool:
    """Whether the code around `node`, an expression for the tuple, keeps the scaler in this file.

    Parameters
    ----------
    name : str
        The name of the scaler.
    index : int
        Its position in the tuple.
    holders : list
        The names that get the tuple from this code are added to it.
    """
    parent = code.tree.parents[node]
    if isinstance(parent, cst.Subscript) and parent.value is node:
        number = _number_in(parent)
        return number is not None and number != index  # another element
    if isinstance(parent, cst.Arg):
        return _becomes_parameter(code, parent, holders)
    for target, value in nodes.assignments(parent):
        if value is not node:
            return False
        if isinstance(target, cst.Name):
            holders.append(target.value)
        elif not _unpacks_as(target, name, index):
            return False
    return isinstance(parent, cst.Assign)  # any other code may hand it on


def _unpacks_as(target: cst.BaseExpression, name: str, index: int) -> bool:
    """Whether a target such as ``model, scaler`` has `name` as its element `index`."""
    if not isinstance(target, cst.Tuple) or index >= len(target.elements):
        return False
    if any(isinstance(element, cst.StarredElement) for element in target.elements):
        return False
    return nodes.name_parts(target.elements[index].value) == (name,)


def _becomes_parameter(code: CodeReader, argument: cst.Arg, holders: list[str]) -> bool:
    """Whether an argument goes to a function of this file; adds the parameter to `holders`."""
    call = code.tree.parents[argument]
    if not isinstance(call, cst.Call) or argument.star:
        return False
    function = code.functions.get(nodes.called_name(call))
    if function is None or not isinstance(call.func, cst.Name):
        return False
    if argument.keyword is not None:
        holders.append(argument.keyword.value)
        return True
    parameters = (*function.params.posonly_params, *function.params.params)
    number = call.args.index(argument)
    if number >= len(parameters):
        return False
    holders.append(parameters[number].name.value)
    return True


def _number_in(subscript: cst.Subscript) -> int | None:
    """The number in ``state[1]``; None for any other index."""
    index = subscript.slice[0].slice
    if isinstance(index, cst.Index) and isinstance(index.value, cst.Integer):
        return index.value.evaluated_value
    return None


def name_in_tuple(code: CodeReader, node: cst.CSTNode, scope: Scope) -> str | None:
    """The name that the value of ``state[1]`` has in the function that returned ``state``.

    None for any other expression, and unless that function has one ``return``, of a tuple that has
    this element. An element that is no name is given as its code: see `CodeReader.key`.
    """
    if not isinstance(node, cst.Subscript):
        return None
    number = _number_in(node)
    call = scope.value_of(node.value)
    if number is None or not isinstance(call, cst.Call):
        return None
    function = code.functions.get(nodes.called_name(call))
    if function is None:
        return None
    returned = [part.value for part in nodes.walk(function) if isinstance(part, cst.Return)]
    if len(returned) != 1 or not isinstance(returned[0], cst.Tuple):
        return None
    elements = returned[0].elements
    if number >= len(elements):
        return None
    return code.key(elements[number].value)

"""Tuples that functions of a file return, such as a model with its optimizer and its scaler.

They are followed by name: ``state = build()``, ``state[1]``, ``train(state)``,
``model, optimizer, scaler = state``.
"""

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
    returned = code.tree.parents[element]
    if not isinstance(element, cst.Element) or not isinstance(returned, cst.Tuple):
        return False
    function = _function_returning(code, returned)
    if function is None:
        return False
    index = returned.elements.index(element)
    holders: list[str] = []  # names that get the tuple; `_stays_in_file` adds those that it finds
    for call in code.tree.calls:
        is_of_function = nodes.called_name(call) == function.name.value
        if is_of_function and not _stays_in_file(code, call, name, index, holders):
            return False
    for holder in holders:  # the loop also reaches the names that are added while it runs
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
    function = code.tree.around(returned, cst.FunctionDef)
    if function is None or code.functions.get(function.name.value) is not function:
        return None
    return function


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
        # outputs[0]: in this file if it is another element than the scaler.
        return _number_in(parent) not in (None, index)
    new_holders = []
    if isinstance(parent, cst.Arg):
        new_holders = _parameters_for(code, parent)
    for target, value in nodes.assignments(parent):
        if value is not node:  # the tuple is only a part of the value
            return False
        if isinstance(target, cst.Name):
            new_holders.append(target.value)
        elif (name,) not in nodes.bound_names(target):  # unpacked, with another name for the scaler
            return False
    holders += [holder for holder in new_holders if holder not in holders]
    is_unpacked = isinstance(parent, cst.Assign)
    return bool(new_holders) or is_unpacked  # any other code may hand the tuple on


def _parameters_for(code: CodeReader, argument: cst.Arg) -> list[str]:
    """The parameter of a function of this file that gets an argument; empty if there is none."""
    call = code.tree.parents[argument]
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Name):
        return []
    passed = code.passed(call).items()
    return [parameter for parameter, value in passed if value is argument.value]


def _number_in(subscript: cst.Subscript) -> int | None:
    """The number in ``state[1]``; None for any other index."""
    index = subscript.slice[0].slice
    if isinstance(index, cst.Index) and isinstance(index.value, cst.Integer):
        return index.value.evaluated_value
    return None


def name_in_tuple(code: CodeReader, node: cst.CSTNode, scope: Scope) -> str | None:
    """The name that the value of ``state[1]`` has in the function that returned ``state``.

    The function must have only one ``return``, and return a tuple with this element; otherwise, and
    for any other expression, the result is None. If the element is not a name, the result is its
    code: see `CodeReader.key`.
    """
    if not isinstance(node, cst.Subscript):
        return None
    number = _number_in(node)
    function = code.called_function(scope.value_of(node.value))
    if number is None or function is None:
        return None
    returned = [part.value for part in nodes.walk(function) if isinstance(part, cst.Return)]
    if len(returned) != 1 or not isinstance(returned[0], cst.Tuple):
        return None
    elements = returned[0].elements
    if number >= len(elements):
        return None
    return code.key(elements[number].value)

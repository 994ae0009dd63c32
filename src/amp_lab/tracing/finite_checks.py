"""Follow checks for inf or NaN through a trace, and compute their results for finite values.

Models check ``if x.dtype == torch.float16 and torch.isinf(x).any()``. A trace in fp16 has no values
for this check, and the real run, in fp32, does not make the check. But if all values are finite,
the result is known: isinf returns False everywhere, so any() returns False.

So each op of a check stores an attribute on its result: the value that all elements of the result
have if all values of the model are finite. ``isinf(x)`` gets False, and ``isinf(x).any()`` too.
"""

import math
import operator
from typing import Any

import torch
from torch._ops import OpOverload

_ATTRIBUTE = "amp_lab_element_if_finite"

# The ops that begin a check, and the value of each element of their result for finite inputs.
_CHECKS = {"isinf": False, "isposinf": False, "isneginf": False, "isnan": False, "isfinite": True}
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
# Elementwise ops: if all elements of each argument are equal, so are those of the result.
_ELEMENTWISE = _COMPARISONS | {
    "logical_not": operator.not_,
    "bitwise_not": operator.not_,
    "logical_and": operator.and_,
    "bitwise_and": operator.and_,
    "logical_or": operator.or_,
    "bitwise_or": operator.or_,
    "mul": operator.mul,
    "add": operator.add,
}
_OF_BOOLS = {"logical_not", "bitwise_not", "logical_and", "logical_or"}  # take operands as bools
_SUMS = {"sum", "count_nonzero"}
# Ops whose result has only elements of their first argument, or means of equal ones.
_KEEPS_ELEMENTS = {
    "any", "all", "max", "min", "amax", "amin", "mean",
    "_to_copy", "alias", "clone", "detach", "expand", "select", "slice", "squeeze", "unsqueeze",
    "view", "_unsafe_view",
}  # fmt: skip
_FOLLOWED = {*_CHECKS, *_ELEMENTWISE, *_SUMS, *_KEEPS_ELEMENTS}


def remember_check(op: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """If an op is part of a check, store the value of its elements for finite inputs on `out`.

    `out` is the result of the op. `result_if_finite` reads the stored value.
    """
    if not isinstance(out, torch.Tensor):
        return
    element = None
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    if name in _FOLLOWED and "alpha" not in kwargs:  # by which `add` multiplies an argument
        element = _element_if_finite(name, args, out)
    if element is None:
        if hasattr(out, _ATTRIBUTE):  # of an in-place op, whose result is no check any more
            delattr(out, _ATTRIBUTE)
        return
    if out.dtype is torch.bool:
        element = bool(element)
    setattr(out, _ATTRIBUTE, element)


def result_if_finite(op: OpOverload, args: tuple) -> bool | int | float | None:
    """What ``item()`` returns if it ends a check for inf or NaN and all values are finite.

    None for an op other than ``item()``, and for a tensor that is not the result of a check.
    """
    if op is not torch.ops.aten._local_scalar_dense.default:
        return None
    return _stored_element(args[0])


def _element_if_finite(name: str, args: tuple, out: torch.Tensor) -> bool | int | float | None:
    """The value of each element of `out` if all values are finite; None if it is not known.

    `out` is the result of the op of this name.
    """
    if name in _CHECKS:
        return _CHECKS[name]
    if name in _COMPARISONS:
        left, right = args[:2]
        if right is left and _is_float_tensor(left):  # x != x, a check for NaN
            return _COMPARISONS[name](0.0, 0.0)  # 0.0 stands for any finite value
        if _is_infinity(right) and _is_float_tensor(left):
            return _COMPARISONS[name](0.0, right)
    if name in _ELEMENTWISE:
        operands = [_stored_element(operand) for operand in args[:2]]
        if None in operands:
            return None
        if name in _OF_BOOLS:
            operands = [bool(value) for value in operands]
        return _ELEMENTWISE[name](*operands)
    # All other ops that are followed reduce their first argument, or rearrange it.
    reduced = args[0]
    element = _stored_element(reduced)
    if element is None or reduced.numel() == 0 or out.numel() == 0:
        return None
    if name in _SUMS:
        summands = reduced.numel() // out.numel()  # of each element of the result
        return element * summands
    return element


def _is_float_tensor(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor) and operand.is_floating_point()


def _is_infinity(operand: Any) -> bool:
    return isinstance(operand, float) and math.isinf(operand)


def _stored_element(operand: Any) -> bool | int | float | None:
    """The value of each element of an operand for finite inputs; None if it is not known.

    A number stands for itself.
    """
    if isinstance(operand, torch.Tensor):
        return getattr(operand, _ATTRIBUTE, None)
    return operand

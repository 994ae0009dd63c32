"""Follow checks for inf or NaN through a trace, and compute their results for finite values.

Models check ``if x.dtype == torch.float16 and torch.isinf(x).any()``. A trace in fp16 has no values
for this check, and the real run, in fp32, does not make the check. But if all values are finite,
the result is known: isinf returns False everywhere, so any() returns False.
"""

import math
import operator
from typing import Any

import torch
from torch._ops import OpOverload

# The attribute of a result of a check: the value of each of its elements if the inputs are finite.
_ELEMENT = "found_in_finite_values"

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

    `out` is the result of the op. `found_in_finite_values` reads the stored value.
    """
    if not isinstance(out, torch.Tensor):
        return
    element = None
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    if name in _FOLLOWED and "alpha" not in kwargs:  # by which `add` multiplies an argument
        element = _evaluate(name, args, out)
    if element is None:
        if hasattr(out, _ELEMENT):  # of an in-place op, whose result is no check any more
            delattr(out, _ELEMENT)
        return
    if out.dtype is torch.bool:
        element = bool(element)
    setattr(out, _ELEMENT, element)


def found_in_finite_values(op: OpOverload, args: tuple) -> bool | int | float | None:
    """The number that a check for inf or NaN reads, if all values are finite.

    None if the op does not read a number, as ``item()`` does, or if the number is not a check.
    """
    if op is not torch.ops.aten._local_scalar_dense.default:
        return None
    return _element_of(args[0])


def _evaluate(name: str, args: tuple, out: torch.Tensor) -> bool | int | float | None:
    """The value of each element of `out`, an op's result, for finite inputs; None if not known."""
    if name in _CHECKS:
        return _CHECKS[name]
    if name in _COMPARISONS and _is_check(*args[:2]):
        left, right = args[:2]
        if right is left:  # x != x, a check for NaN
            right = 0.0
        return _COMPARISONS[name](0.0, right)  # 0.0 stands for any finite value
    if name in _ELEMENTWISE:
        operands = [_element_of(operand) for operand in args[:2]]
        if None in operands:
            return None
        if name in _OF_BOOLS:
            operands = [bool(value) for value in operands]
        return _ELEMENTWISE[name](*operands)
    element = _element_of(args[0])
    if element is None or args[0].numel() == 0 or out.numel() == 0:
        return None
    if name in _SUMS:
        element *= args[0].numel() // out.numel()
    return element


def _is_check(left: Any, right: Any) -> bool:
    """Whether a comparison is a check: of a tensor with an infinity, or with itself (x != x)."""
    if not isinstance(left, torch.Tensor) or not left.is_floating_point():
        return False
    return right is left or (isinstance(right, float) and math.isinf(right))


def _element_of(operand: Any) -> bool | int | float | None:
    """The value of each element of an operand for finite inputs; None if it is not known.

    A number stands for itself.
    """
    if isinstance(operand, torch.Tensor):
        return getattr(operand, _ELEMENT, None)
    return operand

"""Follow checks for inf or NaN through a trace, and compute what they return for finite values.

Models ask ``if x.dtype == torch.float16 and torch.isinf(x).any()``. A trace in fp16 has no values
to answer that with, and the real run, in fp32, does not ask. But if all values are finite, the
result is known: isinf returns False everywhere, and any() of that is False.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

# The attribute of a result of a check: the value of each of its elements if the inputs are finite.
_ELEMENT = "found_in_finite_values"

_CHECKS = {"isinf": False, "isposinf": False, "isneginf": False, "isnan": False, "isfinite": True}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
# Elementwise ops: if all elements of each argument are equal, so are those of the result.
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **_COMPARISONS,
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


def remember_check(op: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """If an op is part of a check, store on `out` the value of its elements for finite inputs.

    `out` is the result of the op. `found_in_finite_values` reads the value.
    """
    if not isinstance(out, torch.Tensor):
        return
    element = None
    if "alpha" not in kwargs:  # `add` would multiply its second argument by it
        name = op._schema.name.removeprefix("aten::").rstrip("_")
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

    None if the op is not the one that reads a number (``item()``), or reads something else.
    """
    if op is not torch.ops.aten._local_scalar_dense.default:
        return None
    return getattr(args[0], _ELEMENT, None)


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
        return _evaluate_elementwise(name, args)
    if name in _KEEPS_ELEMENTS:
        return _evaluate_elements(args[0], out)
    if name in _SUMS:
        return _evaluate_sum(args[0], out)
    return None


def _evaluate_elementwise(name: str, args: tuple) -> bool | int | float | None:
    """The value of each element of an elementwise op; None if an operand is not known."""
    operands = [_element_of(operand) for operand in args[:2]]
    if None in operands:
        return None
    if name in _OF_BOOLS:
        operands = [bool(value) for value in operands]
    return _ELEMENTWISE[name](*operands)


def _evaluate_elements(operand: Any, out: torch.Tensor) -> bool | int | float | None:
    """The value of each element of a result with only elements of `operand`, or means of them.

    None if the value is not known, or if `operand` or `out` has no elements.
    """
    if not isinstance(operand, torch.Tensor):
        return None
    if operand.numel() == 0 or out.numel() == 0:
        return None
    return _element_of(operand)


def _evaluate_sum(operand: Any, out: torch.Tensor) -> int | float | None:
    """The value of each element of `out`, the sums of equal elements of `operand`.

    None if the value is not known.
    """
    element = _evaluate_elements(operand, out)
    if element is None:
        return None
    terms = operand.numel() // out.numel()
    return element * terms


def _is_check(left: Any, right: Any) -> bool:
    """Whether a comparison is a check: of a tensor with an infinity, or with itself (x != x)."""
    if not isinstance(left, torch.Tensor) or not left.is_floating_point():
        return False
    if right is left:
        return True
    return isinstance(right, float) and math.isinf(right)


def _element_of(operand: Any) -> bool | int | float | None:
    """The value of each element of an operand for finite inputs; None if it is not known.

    A number stands for itself.
    """
    if isinstance(operand, torch.Tensor):
        return getattr(operand, _ELEMENT, None)
    return operand

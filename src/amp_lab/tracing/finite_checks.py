"""Checks for inf and NaN: what they find in finite values, followed from op to op.

Models ask ``if x.dtype == torch.float16 and torch.isinf(x).any()``, which a run in fp32 never does.
A trace that asks it has no values, but knows what the check finds if all of them are finite.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_ATTRIBUTE = "found_in_finite_values"  # of a tensor: what each of its elements is

_FINDS = {"isinf": False, "isposinf": False, "isneginf": False, "isnan": False, "isfinite": True}
_COMPARES: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
# Ops on equal elements of each argument, whose result has equal elements too.
_COMPUTES: dict[str, Callable[..., Any]] = {
    **_COMPARES,
    "logical_not": operator.not_,
    "bitwise_not": operator.not_,
    "logical_and": operator.and_,
    "bitwise_and": operator.and_,
    "logical_or": operator.or_,
    "bitwise_or": operator.or_,
    "mul": operator.mul,
    "add": operator.add,
}
_OF_BOOLS = {"logical_not", "bitwise_not", "logical_and", "logical_or"}
_SUMS = {"sum", "count_nonzero"}
_KEEPS = {
    "any", "all", "max", "min", "amax", "amin", "mean",
    "_to_copy", "alias", "clone", "detach", "expand", "select", "slice", "squeeze", "unsqueeze",
    "view", "_unsafe_view",
}  # fmt: skip


def remember_check(op: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Keep on the result of an op what it is in finite values, if it is part of a check."""
    if not isinstance(out, torch.Tensor):
        return
    found = None
    if "alpha" not in kwargs:
        name = op._schema.name.removeprefix("aten::").rstrip("_")
        found = _evaluate(name, args, out)
    if found is None:
        if hasattr(out, _ATTRIBUTE):  # an in-place op may have changed it
            delattr(out, _ATTRIBUTE)
        return
    if out.dtype is torch.bool:
        found = bool(found)
    setattr(out, _ATTRIBUTE, found)


def found_in_finite_values(op: OpOverload, args: tuple) -> bool | int | float | None:
    """What a check for inf or NaN reads in finite values; None if an op reads something else."""
    if op is not torch.ops.aten._local_scalar_dense.default:
        return None
    return getattr(args[0], _ATTRIBUTE, None)


def _evaluate(name: str, args: tuple, out: torch.Tensor) -> bool | int | float | None:
    """What each element of the result is; None if the op is no part of a check."""
    if name in _FINDS:
        return _FINDS[name]
    if name in _COMPARES and _is_check(*args[:2]):
        left, right = args[:2]
        if right is left:
            right = 0.0
        return _COMPARES[name](0.0, right)  # 0.0 stands for any finite value
    if name in _COMPUTES:
        return _evaluate_elementwise(name, args)
    if name in _KEEPS:
        return _evaluate_kept(args[0], out)
    if name in _SUMS:
        return _evaluate_sum(args[0], out)
    return None


def _evaluate_elementwise(name: str, args: tuple) -> bool | int | float | None:
    operands = [_element(given) for given in args[:2]]
    if None in operands:
        return None
    if name in _OF_BOOLS:
        operands = [bool(value) for value in operands]
    return _COMPUTES[name](*operands)


def _evaluate_kept(given: Any, out: torch.Tensor) -> bool | int | float | None:
    """What each element of a result is that has elements of one operand alone."""
    if not isinstance(given, torch.Tensor):
        return None
    if given.numel() == 0 or out.numel() == 0:
        return None
    return _element(given)


def _evaluate_sum(given: Any, out: torch.Tensor) -> int | float | None:
    element = _evaluate_kept(given, out)
    if element is None:
        return None
    terms = given.numel() // out.numel()
    return element * terms


def _is_check(left: Any, right: Any) -> bool:
    """Whether a tensor is compared with itself, which NaN is not equal to, or with an infinity."""
    if not isinstance(left, torch.Tensor) or not left.is_floating_point():
        return False
    if right is left:
        return True
    return isinstance(right, float) and math.isinf(right)


def _element(given: Any) -> bool | int | float | None:
    """What each element of an operand is; None if that is not known."""
    if isinstance(given, torch.Tensor):
        return getattr(given, _ATTRIBUTE, None)
    return given

"""Constants among the arguments of an op, and its divisor, for `find_nonfinite`."""

import functools
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from amp_lab.numerics.watched_ops import Call

# Ops that write a number into a tensor, as masks do.
FILLING = (
    "fill", "masked_fill", "index_put", "index_fill", "where", "copy", "scatter", "full",
    "scalar_tensor",
)  # fmt: skip
# Ops that people use with an eps, to keep a divisor or the argument of a logarithm away from 0.
_GUARDING = ("add", "clamp", "clamp_min")
# Ops whose result is 0 where their input is 0; a quotient, where its dividend is 0.
_KEEPING_ZERO = ("sqrt", "pow", "mul", "div", "to_copy", "clone")
_LOGARITHMS = ("log", "log2", "log10")
_DIVISORS = {"div": 1, "reciprocal": 0, "rsqrt": 0, "addcdiv": 2}  # an op: its divisor's index


@functools.cache
def _name(func: Any) -> str:
    """The op's name without underscores at its ends.

    Such as ``sqrt`` for ``sqrt_``, which works in place, and ``to_copy`` for ``_to_copy``.
    """
    return func._schema.name.partition("::")[2].strip("_")


def constant_beyond(call: Call, dtype: torch.dtype) -> float | None:
    """A constant argument outside the range of `dtype`, such as -1e9 for fp16.

    None if there is no such constant, in a backward pass, and for integers.
    """
    if call.is_backward or not dtype.is_floating_point:
        return None
    largest = torch.finfo(dtype).max
    for number in [*_constants(call), *_mask_in_cast(call, largest)]:
        if largest < abs(number) < math.inf:
            return number
    return None


def exponent(call: Call) -> float | None:
    """The exponent of a power, if it is a constant; None if it is a tensor, and for other ops."""
    if _name(call.func) != "pow" or not isinstance(call.args[1], (int, float)):
        return None
    return float(call.args[1])


def lost_eps(call: Call, dtype: torch.dtype) -> float | None:
    """A constant, such as an eps of 1e-8, that an op adds or clamps to, and that is 0 in fp16.

    `dtype` is the dtype of the result. None if there is no such constant, or for another dtype.
    """
    if dtype is not torch.float16 or _name(call.func) not in _GUARDING or call.is_backward:
        return None
    for number in _constants(call):
        # fp16's smallest number is 2^-24. Half of it is a tie, which rounds to 0.
        if 0 < number <= 2.0**-25:
            return number
    return None


def keeps_zero(call: Call) -> bool:
    """Whether the op's result is 0 where its input is 0."""
    return _name(call.func) in _KEEPING_ZERO


def divisor(call: Call) -> Tensor | None:
    """The tensor that an op divides by; None if there is no divisor."""
    index = _DIVISORS.get(_name(call.func))
    power = exponent(call)
    if power is not None and power < 0:  # x ** -1 divides by x
        index = 0
    if index is None:
        return None
    argument = call.args[index]
    if not isinstance(argument, Tensor):  # a constant
        return None
    return argument


def infinite_at_zero(call: Call) -> list[Tensor]:
    """The inputs of an op for which a value of 0 makes the result infinite or NaN."""
    divided_by = divisor(call)
    if divided_by is not None:
        return [divided_by]
    if _name(call.func) in _LOGARITHMS:
        return [call.args[0]]
    return []


def _constants(call: Call) -> Iterator[float]:
    """The constants among an op's arguments, without sizes and dimensions.

    For an op that fills a tensor with a value, also the number in a tensor without dimensions.
    """
    is_filling = _name(call.func).startswith(FILLING)
    for type_in_schema, argument in _arguments(call):
        is_flag_or_size = isinstance(argument, bool) or type_in_schema == "int"
        if isinstance(argument, (float, int)) and not is_flag_or_size:
            yield argument
        elif is_filling and _is_single_number(argument):
            yield argument.item()


def _mask_in_cast(call: Call, largest: float) -> list[float]:
    """The value of a mask in the input of a cast, as a list of one number; empty if there is none.

    If the input has two or more values below -`largest`, and they are all equal, they are a mask.
    """
    if _name(call.func) != "to_copy":
        return []
    values = call.args[0]
    too_low = values[values < -largest]
    if too_low.numel() < 2 or not (too_low == too_low[0]).all():
        return []
    return [too_low[0].item()]


def _arguments(call: Call) -> Iterator[tuple[str, Any]]:
    """The type in the op's schema, and the value, of each argument."""
    schema = call.func._schema.arguments
    types = {argument.name: str(argument.type) for argument in schema}
    yield from zip(types.values(), call.args, strict=False)
    for name, value in call.kwargs.items():
        yield types[name], value


def _is_single_number(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a floating-point tensor without dimensions: ``torch.tensor(-1e9)``."""
    return isinstance(value, Tensor) and not value.dim() and value.is_floating_point()

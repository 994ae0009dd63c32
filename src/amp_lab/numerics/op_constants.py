"""The numbers in the code of an op, and what it divides by, as far as `find_nonfinite` asks."""

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
# Ops that keep a divisor, or the argument of a root or logarithm, away from 0.
_GUARDING = ("add", "clamp", "clamp_min")
# Ops that make 0 of 0.
_KEEPING_ZERO = ("sqrt", "pow", "mul", "to_copy", "clone")
_LOGARITHMS = ("log", "log2", "log10")
_DIVISORS = {"div": 1, "reciprocal": 0, "rsqrt": 0, "addcdiv": 2}  # by the place of the argument


@functools.cache
def _name(func: Any) -> str:
    """The op's name, whether it works in place or not."""
    return func._schema.name.partition("::")[2].strip("_")


def constant_beyond(call: Call, dtype: torch.dtype) -> float | None:
    """The number in the code that exceeds the largest of `dtype`, as -1e9 does in fp16."""
    if call.is_backward or not dtype.is_floating_point:
        return None
    largest = torch.finfo(dtype).max
    for number in [*_numbers(call), *_cast_mask(call, largest)]:
        if largest < abs(number) < math.inf:
            return number
    return None


def exponent(call: Call) -> float | None:
    """The number that an op raises to, where that stands in the code."""
    if _name(call.func) != "pow" or not isinstance(call.args[1], (int, float)):
        return None
    return float(call.args[1])


def lost_eps(call: Call, dtype: torch.dtype) -> float | None:
    """The small number that an op adds, or clamps to, and that is 0 in `dtype`, if that is fp16."""
    if dtype is not torch.float16 or _name(call.func) not in _GUARDING or call.is_backward:
        return None
    for number in _numbers(call):
        # The smallest number is 2^-24. Half of it is between that and 0, and goes to the even one.
        if 0 < number <= 2.0**-25:
            return number
    return None


def keeps_zero(call: Call) -> bool:
    """Whether the op's result is 0 where what it was given is 0."""
    return _name(call.func) in _KEEPING_ZERO


def divisor(call: Call) -> Tensor | None:
    """The tensor that an op divides by."""
    name = _name(call.func)
    place = _DIVISORS.get(name)
    if name == "pow" and isinstance(call.args[1], (int, float)) and call.args[1] < 0:
        place = 0
    if place is None:
        return None
    argument = call.args[place]
    if not isinstance(argument, Tensor):
        return None
    return argument


def infinite_at_zero(call: Call) -> list[Tensor]:
    """The tensors of which a 0 makes the op's result infinite or NaN."""
    by = divisor(call)
    if by is not None:
        return [by]
    if _name(call.func) in _LOGARITHMS:
        return [call.args[0]]
    return []


def _numbers(call: Call) -> Iterator[float]:
    """The numbers that an op was given; sizes and dimensions are none."""
    is_filling = _name(call.func).startswith(FILLING)
    for kind, argument in _arguments(call):
        is_flag_or_size = isinstance(argument, bool) or kind == "int"
        if isinstance(argument, (float, int)) and not is_flag_or_size:
            yield argument
        elif is_filling and _is_single_number(argument):
            yield argument.item()


def _cast_mask(call: Call, largest: float) -> list[float]:
    """What a mask that is cast holds where it hides something: one negative number, often."""
    if _name(call.func) != "to_copy":
        return []
    source = call.args[0]
    hidden = source[source < -largest]
    if hidden.numel() < 2 or not (hidden == hidden[0]).all():
        return []
    return [hidden[0].item()]


def _arguments(call: Call) -> Iterator[tuple[str, Any]]:
    """What an op was given, each with its type in the op's schema."""
    schema = call.func._schema.arguments
    kinds = {argument.name: str(argument.type) for argument in schema}
    yield from zip(kinds.values(), call.args, strict=False)
    for name, given in call.kwargs.items():
        yield kinds[name], given


def _is_single_number(given: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor without dimensions, as ``torch.tensor(-1e9)`` is."""
    return isinstance(given, Tensor) and not given.dim() and given.is_floating_point()

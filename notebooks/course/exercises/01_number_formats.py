"""Checks for notebook 01, Read number formats as range and spacing."""

import math
from collections.abc import Callable
from typing import Any

import torch

from course.exercises import call, exercise, need


def _in_bf16(value: float) -> float:
    """The nearest number of bf16."""
    return torch.tensor(value).bfloat16().item()


@exercise
def check_first_missing(number: int) -> str:
    """The first positive whole number that bf16 does not have."""
    is_number = isinstance(number, int | float)
    is_positive = is_number and number > 0
    is_positive_and_whole = is_positive and number == int(number)
    need(is_positive_and_whole, f"The answer is a positive whole number, but you gave {number!r}.")
    rounded = _in_bf16(float(number))
    is_representable = rounded == number
    need(
        not is_representable,
        f"bf16 can represent {number:g}, because it is a multiple of the spacing there. Find "
        "the first number that is not a multiple of the spacing.",
    )
    whole = torch.arange(1.0, 1025.0)
    nearest = whole.bfloat16().float()
    is_missing = nearest != whole
    missing = whole[is_missing]
    first = missing[0].item()
    is_first = number == first
    need(
        is_first,
        f"bf16 cannot represent {number:g}, but this is not the first such number. From which "
        "power of two on is the spacing larger than 1?",
    )
    previous = number - 1
    return f"bf16 rounds {number:g} to {rounded:g}. From {previous:g} on, it has only even numbers."


@exercise
def check_sum_stops(number: float) -> str:
    """Where a sum of 0.1 stops growing in fp16."""
    total = torch.zeros((), dtype=torch.float16)
    addend = torch.tensor(0.1).half()
    while total + addend > total:
        total = total + addend
    last = total.item()
    is_number = isinstance(number, int | float)
    need(is_number, f"The answer is a number, but you gave {number!r}.")
    magnitude = max(abs(number), 1.0)
    exponent = math.floor(math.log2(magnitude))
    spacing_at_1 = torch.finfo(torch.float16).eps
    spacing = spacing_at_1 * 2.0**exponent
    spacing_there = f"At {number:g}, the spacing is {spacing:g}."
    has_stopped = number >= last
    need(
        has_stopped,
        f"{spacing_there} 0.1 is more than half of it, so the sum still grows there.",
    )
    need(
        number == last,
        f"The sum does not reach {number:g}. It stops growing at a smaller power of two.",
    )
    return f"{spacing_there} 0.1 is less than half of it, so the sum stops growing."


_GENERATOR = torch.Generator().manual_seed(0)
_LARGE_VALUES = torch.tensor([300.0, 400.0])
_SMALL_VALUES = torch.tensor([3e-5, 4e-5])
_MANY_VALUES = torch.randn(4096, generator=_GENERATOR)
_VECTORS = {
    "[300, 400]": _LARGE_VALUES,
    "[3e-5, 4e-5]": _SMALL_VALUES,
    "4096 random numbers": _MANY_VALUES,
}


@exercise
def check_length(length: Callable[..., Any]) -> str:
    """The length of an fp16 vector, for large, small and many components."""
    for name, values in _VECTORS.items():
        vector = values.half()
        norm = vector.double().norm()
        right = norm.item()
        found = float(call(length, vector))
        error = abs(found / right - 1)
        is_finite = math.isfinite(found)
        need(
            is_finite,
            f"For {name}, your function returns {found:g} instead of {right:.5g}: a value "
            "overflows before the cast. What is the largest number that you compute in fp16?",
        )
        need(
            found > 0,
            f"For {name}, your function returns 0 instead of {right:.3g}: the squares underflow.",
        )
        is_accurate = error < 1e-5
        need(
            is_accurate,
            f"For {name}, your function returns {found:.7g} instead of {right:.7g}: a value is"
            " still rounded to 16 bits.",
        )
    return "The lengths of vectors with large, small and many components agree with fp64."


def _overflows(gradients: torch.Tensor, scale: float) -> bool:
    scaled = (gradients * scale).half()
    is_infinite = scaled.isinf()
    return bool(is_infinite.any())


_GRADIENTS = ([1e-3, 2e-5], [0.5, -3.0], [1.0, 1e-7], [-200_000.0, 1.0], [0.0039])


@exercise
def check_largest_scale(largest_scale: Callable[..., Any]) -> str:
    """The largest power of two that lets no gradient overflow in fp16."""
    for values in _GRADIENTS:
        gradients = torch.tensor(values)
        scale = float(call(largest_scale, gradients))
        result = f"For {values}, your function returns {scale:g}"
        is_power_of_two = scale > 0 and math.log2(scale).is_integer()
        need(
            is_power_of_two,
            f"{result}. This is not a power of two, so multiplying by it rounds the gradients "
            "again.",
        )
        largest_gradient = gradients.abs().max().item()
        scaled = scale * largest_gradient
        overflows = _overflows(gradients, scale)
        need(
            not overflows,
            f"{result}, and {scaled:g} overflows. The largest magnitude decides, whatever its "
            "sign.",
        )
        is_largest = _overflows(gradients, 2 * scale)
        need(is_largest, f"{result}, but twice this scale also fits.")
    return "With twice this scale, the largest gradient would be infinite, whatever its sign."

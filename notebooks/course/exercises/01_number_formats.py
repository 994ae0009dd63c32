"""Checks for notebook 01, Read number formats as range and spacing."""

import math
from collections.abc import Callable
from typing import Any

import torch

from course.exercises import call, exercise, need


@exercise
def check_first_missing(number: int) -> str:
    """The first positive whole number that bf16 does not have."""
    is_number = isinstance(number, int | float)
    is_positive_and_whole = is_number and number > 0 and number == int(number)
    need(is_positive_and_whole, f"It is a positive whole number; this is {number!r}.")
    held = torch.tensor(float(number)).bfloat16().item()
    need(
        held != number,
        f"bf16 does hold {number:g}: it is a multiple of the spacing there. Look for the first "
        "number that is no multiple of the spacing.",
    )
    whole = torch.arange(1.0, 1025.0)
    is_missing = whole.bfloat16().float() != whole
    first = whole[is_missing][0].item()
    need(
        first == number,
        f"bf16 does not hold {number:g}, but a smaller number is missing already. From which power "
        "of two on is the spacing larger than 1?",
    )
    return f"bf16 makes {held:g} of {number:g}: from {number - 1:g} on it has only even numbers."


@exercise
def check_sum_stops(number: float) -> str:
    """Where a sum of 0.1 stops growing in fp16."""
    total, addend = torch.zeros((), dtype=torch.float16), torch.tensor(0.1).half()
    while total + addend > total:
        total = total + addend
    last = total.item()
    need(isinstance(number, int | float), f"It is a number; this is {number!r}.")
    exponent = math.floor(math.log2(max(abs(number), 1.0)))
    spacing = torch.finfo(torch.float16).eps * 2.0**exponent
    need(
        number >= last,
        f"At {number:g} the spacing is {spacing:g}, and 0.1 is more than half of it, so the sum "
        "still grows there.",
    )
    need(
        number == last,
        f"The sum never gets as far as {number:g}: 0.1 is lost at a smaller power of two already.",
    )
    return f"At {number:g} the spacing is {spacing:g}, and 0.1 is less than half of it."


_VECTORS = {
    "[300, 400]": torch.tensor([300.0, 400.0]),
    "[3e-5, 4e-5]": torch.tensor([3e-5, 4e-5]),
    "4096 random numbers": torch.randn(4096, generator=torch.Generator().manual_seed(0)),
}


@exercise
def check_length(length: Callable[..., Any]) -> str:
    """The length of an fp16 vector, for large, small and many components."""
    for what, values in _VECTORS.items():
        vector = values.half()
        right = vector.double().norm().item()
        found = float(call(length, vector))
        error = abs(found / right - 1)
        need(
            math.isfinite(found),
            f"For {what} it returns {found:g}, where {right:.5g} is right: something overflows "
            "before the cast. What is the largest number that is computed in fp16?",
        )
        need(
            found > 0,
            f"For {what} it returns 0, where {right:.3g} is right: the squares underflow.",
        )
        need(
            error < 1e-5,
            f"For {what} it returns {found:.7g}, where {right:.7g} is right: a rounding to 16 bits "
            "is still in it.",
        )
    return "Large, small and many components all have the length that they have in fp64."


def _overflows(gradients: torch.Tensor, scale: float) -> bool:
    return bool((gradients * scale).half().isinf().any())


_GRADIENTS = ([1e-3, 2e-5], [0.5, -3.0], [1.0, 1e-7], [-200_000.0, 1.0], [0.0039])


@exercise
def check_largest_scale(largest_scale: Callable[..., Any]) -> str:
    """The largest power of two that lets no gradient overflow in fp16."""
    for values in _GRADIENTS:
        gradients = torch.tensor(values)
        scale = float(call(largest_scale, gradients))
        is_power_of_two = scale > 0 and math.log2(scale).is_integer()
        need(
            is_power_of_two,
            f"For {values} it returns {scale:g}, which is not a power of two: a scale that is not "
            "would round every gradient once more.",
        )
        largest = scale * gradients.abs().max().item()
        need(
            not _overflows(gradients, scale),
            f"For {values} it returns {scale:g}, and {largest:g} overflows: the largest magnitude "
            "decides, with either sign.",
        )
        need(
            _overflows(gradients, 2 * scale),
            f"For {values} it returns {scale:g}, and twice as much would still fit.",
        )
    return "With twice this scale the largest gradient would be infinite, whatever its sign."

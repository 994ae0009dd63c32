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
    need(is_positive_and_whole, f"The answer is a positive whole number, but you gave {number!r}.")
    held = torch.tensor(float(number)).bfloat16().item()
    need(
        held != number,
        f"bf16 can represent {number:g}, because it is a multiple of the spacing there. Find "
        "the first number that is not a multiple of the spacing.",
    )
    whole = torch.arange(1.0, 1025.0)
    is_missing = whole.bfloat16().float() != whole
    first = whole[is_missing][0].item()
    need(
        first == number,
        f"bf16 cannot represent {number:g}, but this is not the first such number. From which "
        "power of two on is the spacing larger than 1?",
    )
    return f"bf16 rounds {number:g} to {held:g}. From {number - 1:g} on, it has only even numbers."


@exercise
def check_sum_stops(number: float) -> str:
    """Where a sum of 0.1 stops growing in fp16."""
    total, addend = torch.zeros((), dtype=torch.float16), torch.tensor(0.1).half()
    while total + addend > total:
        total = total + addend
    last = total.item()
    need(isinstance(number, int | float), f"The answer is a number, but you gave {number!r}.")
    exponent = math.floor(math.log2(max(abs(number), 1.0)))
    spacing = torch.finfo(torch.float16).eps * 2.0**exponent
    need(
        number >= last,
        f"At {number:g}, the spacing is {spacing:g}. 0.1 is more than half of it, so the sum "
        "still grows there.",
    )
    need(
        number == last,
        f"The sum does not reach {number:g}. It stops growing at a smaller power of two.",
    )
    return (
        f"At {number:g}, the spacing is {spacing:g}. 0.1 is less than half of it, so the "
        "sum stops growing."
    )


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
            f"For {what}, your function returns {found:g} instead of {right:.5g}: a value "
            "overflows before the cast. What is the largest number that you compute in fp16?",
        )
        need(
            found > 0,
            f"For {what}, your function returns 0 instead of {right:.3g}: the squares underflow.",
        )
        need(
            error < 1e-5,
            f"For {what}, your function returns {found:.7g} instead of {right:.7g}: a value is"
            " still rounded to 16 bits.",
        )
    return "The lengths of vectors with large, small and many components agree with fp64."


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
            f"For {values}, your function returns {scale:g}. This is not a power of two, so "
            "multiplying by it rounds the gradients again.",
        )
        largest = scale * gradients.abs().max().item()
        need(
            not _overflows(gradients, scale),
            f"For {values}, your function returns {scale:g}, and {largest:g} overflows. The "
            "largest magnitude decides, whatever its sign.",
        )
        need(
            _overflows(gradients, 2 * scale),
            f"For {values}, your function returns {scale:g}, but twice this scale also fits.",
        )
    return "With twice this scale, the largest gradient would be infinite, whatever its sign."

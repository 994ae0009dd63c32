"""Checks for notebook 16, Keep weights and optimizer state below 32 bits."""

from collections.abc import Callable
from typing import Any

import torch

from course.exercises import call, exercise, need


@exercise
def check_smallest_update(bound: float) -> str:
    """Half of the distance from 0.75 to the next number of bf16."""
    need(
        bound != 2**-8,
        "That is the whole distance to the next number: rounding to nearest helps from the middle.",
    )
    need(
        bound not in (2**-7, 2**-8 * 0.75, 2**-7 * 0.75),
        f"{bound:g} follows from the spacing at 1: between 0.5 and 1 the numbers lie closer.",
    )
    weight = torch.tensor(0.75, dtype=torch.bfloat16)
    need(
        bool((weight.float() + 1.01 * bound).bfloat16() > weight),
        f"An update of {1.01 * bound:g}, a little more than your bound, is rounded away.",
    )
    need(
        bool((weight.float() + 0.99 * bound).bfloat16() == weight),
        f"An update of {0.99 * bound:g}, a little less than your bound, moves the weight already.",
    )
    return "An update of 0.001 or less, as of Adam at that learning rate, is lost on such a weight."


@exercise
def check_round_stochastically(round_stochastically: Callable[[torch.Tensor], Any]) -> str:
    """Either whole number beside a value, and the value on average."""
    torch.manual_seed(0)
    for value in (2.3, -1.25, 4.0):
        found = call(round_stochastically, torch.full((20_000,), value))
        below = torch.tensor(value).floor()
        strange = found[(found != below) & (found != below + 1)].tolist()
        need(
            not strange,
            f"{value} becomes {', '.join(f'{x:g}' for x in strange[:1])}, which is not one of the "
            "two whole numbers beside it.",
        )
        mean = float(found.mean())
        need(
            abs(mean - value) < 0.02,
            f"{value} becomes {mean:.2f} on average over 20,000 values.",
        )
    return "On average nothing is lost."


@exercise
def check_bytes(bytes_each: float) -> str:
    """Weights, gradients, what was lost, and two moments with their scales."""
    need(
        abs(bytes_each - 8) > 1e-9,
        "Add the scales: each moment has four bytes for every 256 values.",
    )
    need(
        abs(bytes_each - (6 + 2 * 5)) > 1e-9,
        "A scale is shared: it costs a value 4 / 256 bytes, and not 4.",
    )
    need(
        abs(bytes_each - (6 + 1 + 4 / 256)) > 1e-9,
        "That is one moment, and Adam has two.",
    )
    need(
        abs(bytes_each - 8.03125) < 1e-3,
        f"It is not {bytes_each:g}: count three bf16 numbers, and two moments with their scales.",
    )
    return "Stochastic rounding would save two bytes of them."


@exercise
def check_store_squares(store_squares: Callable[[torch.Tensor], Any]) -> str:
    """Nearest multiples of a 256th of each row's largest value, and none of them 0."""
    torch.manual_seed(0)
    rows = torch.randn(4, 64).square() * torch.logspace(-8, 4, 4)[:, None]
    rows[0, 0] = rows[0].max() * 1e-6
    found = call(store_squares, rows)
    step = rows.amax(1, keepdim=True) / 256
    need(
        bool((found > 0).all()),
        f"{int((found <= 0).sum())} squares become 0 or less: they have to stay at one step.",
    )
    need(
        bool((found <= rows.amax(1, keepdim=True) * 1.001).all()),
        "A square becomes larger than the largest of its row.",
    )
    off = ((found - rows) / step).abs()
    large = rows > step
    need(
        bool((off[large] < 0.501).all()),
        f"A square is {float(off[large].max()):.2g} steps off, and the nearest is half a step off: "
        "each row has a step of its own.",
    )
    whole = (found / step - (found / step).round()).abs()
    need(bool((whole < 1e-2).all()), "A square is no multiple of its row's step.")
    return "Eight bits, and nothing is ever divided by zero."

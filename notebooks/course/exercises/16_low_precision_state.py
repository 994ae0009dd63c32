"""Checks for notebook 16, Keep weights and optimizer state below 32 bits."""

import math
from collections.abc import Callable
from typing import Any

import torch

from course.exercises import call, exercise, need


def _moves(weight: torch.Tensor, update: float) -> bool:
    """Whether a bf16 weight grows if `update` is added to it, and the sum is rounded."""
    exact = weight.float() + update
    return bool(exact.bfloat16() > weight)


@exercise
def check_smallest_update(bound: float) -> str:
    """Half of the distance from 0.75 to the next number of bf16."""
    need(
        bound != 2**-8,
        "That is the whole distance to the next number: rounding to nearest helps from the middle.",
    )
    spacing_at_1 = 2**-7
    from_1 = (spacing_at_1, 0.75 * spacing_at_1, 0.75 * spacing_at_1 / 2)
    need(
        bound not in from_1,
        f"{bound:g} follows from the spacing at 1: between 0.5 and 1 the numbers lie closer.",
    )
    weight = torch.tensor(0.75, dtype=torch.bfloat16)
    more = 1.01 * bound
    need(
        _moves(weight, more),
        f"An update of {more:g}, a little more than your bound, is rounded away.",
    )
    less = 0.99 * bound
    need(
        not _moves(weight, less),
        f"An update of {less:g}, a little less than your bound, moves the weight already.",
    )
    return "An update of 0.001 or less, as of Adam at that learning rate, is lost on such a weight."


@exercise
def check_round_stochastically(round_stochastically: Callable[[torch.Tensor], Any]) -> str:
    """Either whole number beside a value, and the value on average."""
    torch.manual_seed(0)
    for value in (2.3, -1.25, 4.0):
        found = call(round_stochastically, torch.full((20_000,), value))
        below = math.floor(value)
        for whole in found.unique().tolist():
            need(
                whole in (below, below + 1),
                f"{value} becomes {whole:g}, which is not one of the two whole numbers beside it.",
            )
        mean = float(found.mean())
        bias = abs(mean - value)
        need(
            bias < 0.02,
            f"{value} becomes {mean:.2f} on average over 20,000 values.",
        )
    return "On average nothing is lost."


@exercise
def check_bytes(bytes_each: float) -> str:
    """Weights, gradients, what was lost, and two moments with their scales."""
    three_bf16, moment, scale = 6, 1, 4
    shared_scale = scale / 256
    without_scales = three_bf16 + 2 * moment
    with_own_scales = three_bf16 + 2 * (moment + scale)
    with_one_moment = three_bf16 + moment + shared_scale
    right = three_bf16 + 2 * (moment + shared_scale)
    forgot_scales = math.isclose(bytes_each, without_scales)
    need(
        not forgot_scales,
        "Add the scales: each moment has four bytes for every 256 values.",
    )
    gave_each_a_scale = math.isclose(bytes_each, with_own_scales)
    need(
        not gave_each_a_scale,
        "A scale is shared: it costs a value 4 / 256 bytes, and not 4.",
    )
    forgot_a_moment = math.isclose(bytes_each, with_one_moment)
    need(not forgot_a_moment, "That is one moment, and Adam has two.")
    need(
        abs(bytes_each - right) < 1e-3,
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
    largest = rows.amax(1, keepdim=True)
    step = largest / 256
    is_positive = found > 0
    zeros = int((~is_positive).sum())
    need(zeros == 0, f"{zeros} squares become 0 or less: they have to stay at one step.")
    is_within = found <= 1.001 * largest
    need(bool(is_within.all()), "A square becomes larger than the largest of its row.")
    steps_off = ((found - rows) / step).abs()
    worst = float(steps_off[rows > step].max())
    need(
        worst < 0.501,
        f"A square is {worst:.2g} steps off, and the nearest is half a step off: "
        "each row has a step of its own.",
    )
    steps = found / step
    from_whole = (steps - steps.round()).abs()
    need(float(from_whole.max()) < 1e-2, "A square is no multiple of its row's step.")
    return "Eight bits, and nothing is ever divided by zero."

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
        "This is the whole distance to the next number. If the update is larger than half of it, "
        "the sum is rounded to the next number.",
    )
    spacing_at_1 = 2**-7
    share_of_it = 0.75 * spacing_at_1
    from_1 = (spacing_at_1, share_of_it, share_of_it / 2)
    need(
        bound not in from_1,
        f"{bound:g} uses the spacing at 1. Between 0.5 and 1, the spacing is smaller.",
    )
    weight = torch.tensor(0.75, dtype=torch.bfloat16)
    more = 1.01 * bound
    need(
        _moves(weight, more),
        f"An update of {more:g}, which is a little larger than your number, does not change "
        "the weight.",
    )
    less = 0.99 * bound
    need(
        not _moves(weight, less),
        f"An update of {less:g}, which is a little smaller than your number, already changes "
        "the weight.",
    )
    return "For example, an update of 0.001 does not change a weight of 0.75."


@exercise
def check_round_stochastically(round_stochastically: Callable[[torch.Tensor], Any]) -> str:
    """Either whole number beside a value, and the value on average."""
    torch.manual_seed(0)
    for value in (2.3, -1.25, 4.0):
        values = torch.full((20_000,), value)
        found = call(round_stochastically, values)
        below = math.floor(value)
        for whole in found.unique().tolist():
            need(
                whole in (below, below + 1),
                f"{value} becomes {whole:g}. This is not one of the two integers next to it.",
            )
        mean = float(found.mean())
        bias = abs(mean - value)
        need(
            bias < 0.02,
            f"The mean of 20,000 rounded values is {mean:.2f}, but it should be about {value}.",
        )
    return "The mean does not change."


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
        "Add the scales: each moment needs four bytes for every 256 values.",
    )
    gave_each_a_scale = math.isclose(bytes_each, with_own_scales)
    need(
        not gave_each_a_scale,
        "256 values share a scale, so it adds 4 / 256 bytes for each value, not 4.",
    )
    forgot_a_moment = math.isclose(bytes_each, with_one_moment)
    need(not forgot_a_moment, "This is one moment. Adam has two.")
    need(
        abs(bytes_each - right) < 1e-3,
        f"{bytes_each:g} is wrong. Count three bf16 numbers, and two moments with their scales.",
    )
    return "With stochastic rounding, you would need two bytes less."


@exercise
def check_store_squares(store_squares: Callable[[torch.Tensor], Any]) -> str:
    """Nearest multiples of a 256th of each row's largest value, and none of them 0."""
    torch.manual_seed(0)
    magnitudes = torch.logspace(-8, 4, 4)
    squares = torch.randn(4, 64).square()
    rows = squares * magnitudes[:, None]
    largest_of_first_row = rows[0].max()
    rows[0, 0] = largest_of_first_row * 1e-6
    found = call(store_squares, rows)
    largest = rows.amax(1, keepdim=True)
    step = largest / 256
    is_not_positive = found <= 0
    zeros = int(is_not_positive.sum())
    need(zeros == 0, f"{zeros} squares become 0 or negative. Use at least one step.")
    is_within = found <= 1.001 * largest
    need(bool(is_within.all()), "A square becomes larger than the largest square in its row.")
    errors = (found - rows).abs()
    steps_off = errors / step
    is_above_step = rows > step
    worst = float(steps_off[is_above_step].max())
    need(
        worst < 0.501,
        f"The error of a square is {worst:.2g} steps, but rounding to nearest gives at most "
        "half a step. Each row has a different step.",
    )
    steps = found / step
    from_whole = (steps - steps.round()).abs()
    farthest = float(from_whole.max())
    need(farthest < 1e-2, "A square is not a multiple of the step of its row.")
    return "Each square fits into eight bits, and no update is divided by zero."

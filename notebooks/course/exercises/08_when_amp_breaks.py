"""Checks for notebook 08, Find out why AMP broke, and repair it."""

from collections.abc import Callable
from typing import Any

import torch

from course.exercises import call, exercise, need


def _sum_of_squares(value: float) -> float:
    """The sum of the squares of two such numbers, each step rounded to fp16."""
    h = torch.full((2,), float(value)).half()
    return float((h * h).sum(dtype=torch.float16))


@exercise
def check_largest_value(value: int) -> str:
    """The largest integer whose square, added twice, is finite in fp16."""
    need(
        isinstance(value, int) and value > 0,
        f"The answer is a positive whole number, but you gave {value!r}.",
    )
    total = _sum_of_squares(value)
    need(
        total < torch.inf,
        f"The exact sum of two squares of {value} is {2 * value * value}. In fp16, the sum is "
        "infinite: fp16 rounds the squares and their sum, and its largest number is 65504.",
    )
    need(
        _sum_of_squares(value + 1) == torch.inf,
        f"{value} does not overflow, but {value + 1} does not overflow either: the sum of its "
        f"squares is {_sum_of_squares(value + 1):g}. Try a larger number.",
    )
    return (
        f"The sum is {total:g}, and it is infinite for the next number. The limit is near "
        "the root of 65504 / 2."
    )


_CASES = {
    "the equal losses": (
        "AMP0026",
        "Which tensor should change in each step, but stays the same?",
    ),
    "the clipped run": ("AMP0015", "What multiplies the gradients when the norm is that large?"),
    "the NaN in evaluation": (
        "AMP0007",
        "Which tensors are used in evaluation, but not in training?",
    ),
}


@exercise
def check_diagnosis(codes: Any) -> str:
    """The codes of the failures that three descriptions lead to."""
    need(
        isinstance(codes, tuple | list) and len(codes) == len(_CASES),
        f"The answer is three codes in the order of the descriptions, but you gave {codes!r}.",
    )
    for found, (case, (right, why)) in zip(codes, _CASES.items(), strict=True):
        need(found == right, f"{found} does not fit {case}. {why}")
    return "The tables on this page lead from the words of a symptom to its cause."


@exercise
def check_masked(mask_scores: Callable[..., Any]) -> str:
    """Scores masked before a softmax, in any dtype, also where a whole row is masked."""
    mask = torch.tensor([[True, True], [False, True]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = torch.tensor([[-20.0, -20.0], [1.0, 2.0]]).to(dtype)
        masked = call(mask_scores, scores.clone(), mask)
        need(
            torch.is_tensor(masked) and masked.dtype is dtype and masked.shape == scores.shape,
            f"For scores in {dtype}, return scores of the same dtype and shape.",
        )
        rows = masked.float().softmax(-1)
        need(
            bool(rows.isfinite().all()),
            f"In {dtype}, the row that is completely masked is NaN after the softmax, because "
            "all its scores are minus infinity.",
        )
        need(
            rows[1].tolist() == [1.0, 0.0] and masked[1, 0] == 1,
            f"In {dtype}, the masked score of the second row still gets {rows[1, 1]:.2f} of "
            "the attention, or you changed the other score.",
        )
    return "This number fits into fp16, bf16 and fp32, and a completely masked row stays finite."


@exercise
def check_advance(advance: Callable[..., Any]) -> str:
    """An update of the scaler that moves the schedule only if the step was not skipped."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    # The counter of a schedule itself: torch's would warn of a first step that was skipped.
    calls = []

    class Schedule:
        def step(self) -> None:
            calls.append(True)

    seen = []
    for factor in (torch.inf, 1.0, 1.0, torch.inf):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        call(advance, scaler, Schedule())
        expected = {1: 512, 2: 512, 3: 1024, 4: 512}[len(seen) + 1]
        need(
            scaler.get_scale() == expected,
            f"The loss scale is {scaler.get_scale():g} after step {len(seen) + 1} instead of "
            f"{expected}. Call `scaler.update()` once in your function.",
        )
        seen.append(len(calls))
    need(
        seen != [1, 2, 3, 4],
        "You called `scheduler.step` in every step, also in the two skipped steps.",
    )
    need(
        seen != [0, 0, 1, 1],
        "You called `scheduler.step` only if the scale rose. After most good steps, the scale"
        " stays the same.",
    )
    need(
        seen == [0, 1, 2, 2],
        "Of four steps, the first and the last were skipped, and you called `scheduler.step` "
        f"{seen} times. Compare the scale before and after `update`: it falls if the step was "
        "skipped.",
    )
    return "The schedule moved on in the two good steps, and not in the skipped ones."

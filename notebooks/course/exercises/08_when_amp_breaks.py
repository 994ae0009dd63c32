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
    """The largest whole number of which two squares can be added in fp16."""
    need(
        isinstance(value, int) and value > 0,
        f"We look for a positive whole number, not {value!r}.",
    )
    total = _sum_of_squares(value)
    need(
        total < torch.inf,
        f"Two squares of {value} are {2 * value * value} when exact, and infinite in fp16, "
        "where squares and their sum are rounded and 65504 is the end.",
    )
    need(
        _sum_of_squares(value + 1) == torch.inf,
        f"{value} is safe, and {value + 1} is safe as well: its squares add up to "
        f"{_sum_of_squares(value + 1):g}. Go higher.",
    )
    return f"The sum is {total:g} there, and infinite one further, at about the root of 65504 / 2."


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
        f"Three codes are asked for, in order; this is {codes!r}.",
    )
    for found, (case, (right, why)) in zip(codes, _CASES.items(), strict=True):
        need(found == right, f"{found} does not fit {case}. {why}")
    return "The words of each symptom led to its cause, through the tables of this page."


@exercise
def check_masked(mask_scores: Callable[..., Any]) -> str:
    """Scores masked before a softmax, in any dtype, also where a whole row is masked."""
    mask = torch.tensor([[True, True], [False, True]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = torch.tensor([[-20.0, -20.0], [1.0, 2.0]]).to(dtype)
        masked = call(mask_scores, scores.clone(), mask)
        need(
            torch.is_tensor(masked) and masked.dtype is dtype and masked.shape == scores.shape,
            f"For scores in {dtype} it should return scores of that dtype and shape.",
        )
        rows = masked.float().softmax(-1)
        need(
            bool(rows.isfinite().all()),
            f"In {dtype} the row that is masked everywhere is NaN after the softmax: "
            "its scores are all minus infinity.",
        )
        need(
            rows[1].tolist() == [1.0, 0.0] and masked[1, 0] == 1,
            f"In {dtype} the hidden score of the second row still gets {rows[1, 1]:.2f} of the "
            "attention, or the visible one was changed.",
        )
    return "It fits in fp16, bf16 and fp32, and a row that is masked everywhere stays finite."


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
            f"The loss scale is {scaler.get_scale():g} after step {len(seen) + 1} and should be "
            f"{expected}: `scaler.update()` belongs into the function, once.",
        )
        seen.append(len(calls))
    need(
        seen != [1, 2, 3, 4],
        "The schedule moved in every step, also in the two that were skipped.",
    )
    need(
        seen != [0, 0, 1, 1],
        "The schedule moved only when the scale rose. It stays the same after most good steps.",
    )
    need(
        seen == [0, 1, 2, 2],
        f"After four steps, the first and last of them skipped, the schedule had moved {seen} "
        "times. Compare the scale before and after `update`: it falls if a step was skipped.",
    )
    return "It moved in the two good steps and in neither of the skipped ones."

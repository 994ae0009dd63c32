"""Checks for notebook 08, Find out why AMP broke, and repair it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from course.exercises import call, exercise, need


def _sum_of_squares(value: float) -> float:
    """The sum of the squares of two such numbers, each step rounded to fp16."""
    numbers = torch.full((2,), float(value)).half()
    squares = numbers * numbers
    return float(squares.sum(dtype=torch.float16))


@exercise
def check_largest_value(value: int) -> str:
    """The largest integer whose square, added twice, is finite in fp16."""
    is_positive_integer = isinstance(value, int) and value > 0
    need(
        is_positive_integer,
        f"The answer is a positive whole number, but you gave {value!r}.",
    )
    total = _sum_of_squares(value)
    exact_total = 2 * value * value
    need(
        total < torch.inf,
        f"The exact sum of two squares of {value} is {exact_total}. In fp16, the sum is "
        "infinite: fp16 rounds the squares and their sum, and its largest number is 65504.",
    )
    next_value = value + 1
    next_total = _sum_of_squares(next_value)
    need(
        next_total == torch.inf,
        f"{value} does not overflow, but {next_value} does not overflow either: the sum of its "
        f"squares is {next_total:g}. Try a larger number.",
    )
    return (
        f"The sum is {total:g}, and it is infinite for the next number. The limit is near "
        "the root of 65504 / 2."
    )


class _Case(NamedTuple):
    """A failure that the reader finds from a description."""

    name: str
    code: str
    hint: str


_CASES = [
    _Case(
        "the equal losses",
        "AMP0026",
        "Which tensor should change in each step, but stays the same?",
    ),
    _Case(
        "the clipped run",
        "AMP0015",
        "What multiplies the gradients when the norm is that large?",
    ),
    _Case(
        "the NaN in evaluation",
        "AMP0007",
        "Which tensors are used in evaluation, but not in training?",
    ),
]


@exercise
def check_diagnosis(codes: Any) -> str:
    """The codes of the failures that three descriptions lead to."""
    is_sequence = isinstance(codes, tuple | list)
    has_every_case = is_sequence and len(codes) == len(_CASES)
    need(
        has_every_case,
        f"The answer is three codes in the order of the descriptions, but you gave {codes!r}.",
    )
    for code, case in zip(codes, _CASES, strict=True):
        is_right = code == case.code
        need(is_right, f"{code} does not fit {case.name}. {case.hint}")
    return "The tables on this page lead from the words of a symptom to its cause."


def _is_tensor_like(value: Any, reference: torch.Tensor) -> bool:
    """Whether a value is a tensor with the dtype and shape of `reference`."""
    if not torch.is_tensor(value):
        return False
    has_dtype = value.dtype is reference.dtype
    return has_dtype and value.shape == reference.shape


@exercise
def check_masked(mask_scores: Callable[..., Any]) -> str:
    """Scores masked before a softmax, in any dtype, also where a whole row is masked."""
    mask = torch.tensor([[True, True], [False, True]])
    fp32_scores = torch.tensor([[-20.0, -20.0], [1.0, 2.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = fp32_scores.to(dtype)
        masked = call(mask_scores, scores.clone(), mask)
        is_like_scores = _is_tensor_like(masked, scores)
        need(
            is_like_scores,
            f"For scores in {dtype}, return scores of the same dtype and shape.",
        )
        attention = masked.float().softmax(-1)
        is_finite = attention.isfinite()
        need(
            bool(is_finite.all()),
            f"In {dtype}, the row that is completely masked is NaN after the softmax, because "
            "all its scores are minus infinity.",
        )
        second_row = attention[1]
        is_masked = second_row.tolist() == [1.0, 0.0]
        has_same_score = masked[1, 0] == 1
        need(
            is_masked and has_same_score,
            f"In {dtype}, the masked score of the second row still gets {second_row[1]:.2f} of "
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

    call_counts = []
    expected_scales = [512, 512, 1024, 512]
    for step, expected in enumerate(expected_scales, start=1):
        factor = torch.inf if step in (1, 4) else 1.0
        loss = (weight * factor).sum()
        optimizer.zero_grad()
        scaled_loss = scaler.scale(loss)
        scaled_loss.backward()
        scaler.step(optimizer)
        call(advance, scaler, Schedule())
        scale = scaler.get_scale()
        need(
            scale == expected,
            f"The loss scale is {scale:g} after step {step} instead of {expected}. Call "
            "`scaler.update()` once in your function.",
        )
        call_counts.append(len(calls))
    is_called_always = call_counts == [1, 2, 3, 4]
    need(
        not is_called_always,
        "You called `scheduler.step` in every step, also in the two skipped steps.",
    )
    is_called_after_growth = call_counts == [0, 0, 1, 1]
    need(
        not is_called_after_growth,
        "You called `scheduler.step` only if the scale rose. After most good steps, the scale"
        " stays the same.",
    )
    is_called_after_good_steps = call_counts == [0, 1, 2, 2]
    need(
        is_called_after_good_steps,
        "Of four steps, the first and the last were skipped, and you called `scheduler.step` "
        f"{call_counts} times. Compare the scale before and after `update`: it falls if the step "
        "was skipped.",
    )
    return "The schedule moved on in the two good steps, and not in the skipped ones."

"""Checks for notebook 03, Follow a GradScaler step by step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need

_GRADIENT = 2.0**-26


def _in_fp16(value: float) -> float:
    """The nearest number of fp16."""
    return torch.tensor(value).half().item()


@exercise
def check_smallest_scale(scale: float) -> str:
    """The smallest power of two with which a gradient of 2^-26 survives fp16."""
    need(
        isinstance(scale, int | float) and scale > 0 and math.log2(scale).is_integer(),
        f"A loss scale is a positive number, and a power of two here; this is {scale!r}.",
    )
    scaled = _GRADIENT * scale
    rounded = _in_fp16(scaled)
    need(
        rounded > 0,
        f"2^-26 times {scale:g} is {scaled:.3g}, which fp16 still rounds to 0: "
        "its smallest number is 2^-24, and what is at most half of it becomes 0.",
    )
    lower = scale / 2
    rounded_lower = _in_fp16(_GRADIENT * lower)
    need(
        rounded_lower == 0,
        f"It does survive with {scale:g}, and with {lower:g} as well: go lower.",
    )
    return (
        "2^-26 times 4 is 2^-24, the smallest number that fp16 has. Times 2 it lies exactly "
        "between 0 and 2^-24, and a tie is rounded to the even one, 0."
    )


@exercise
def check_scale_after(scale: float) -> str:
    """The scale after ten steps of which the second and the eighth overflowed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=3)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    history = []
    for step in range(1, 11):
        factor = torch.inf if step in (2, 8) else 1.0
        loss = (weight * factor).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    need(
        scale != 1024,
        "1024 would be right if two falls met two rises. Count the good steps in a row again: an "
        "overflow sets the counter back to 0.",
    )
    need(
        scale != 2048,
        "After step 7 the counter stands at 2, not at 3: step 5 had already used up "
        "the first three.",
    )
    need(
        scale == history[-1],
        f"{scale} is not it. Write the counter of good steps beside each step: at 3 the scale "
        "doubles, at an overflow it halves, and both set the counter back to 0.",
    )
    scales = ", ".join(f"{value:g}" for value in history)
    return f"Scales after each step: {scales}."


def _clipped_with(step: Callable[..., Any], scale: float) -> tuple[list[torch.Tensor], int]:
    """The parameters after a step that should clip to a norm of 1, and the good steps counted."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loss = 10 * model(torch.randn(8, 4)).square().mean()
    call(step, loss, model, optimizer, scaler)
    return [p.detach() for p in model.parameters()], scaler.state_dict()["_growth_tracker"]


def _distance(parameters: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The norm of the difference between two lists of parameters."""
    differences = [a - b for a, b in zip(parameters, others, strict=True)]
    return float(nn.utils.get_total_norm(differences))


@exercise
def check_clipped_step(step: Callable[..., Any]) -> str:
    """A step that clips the gradients' norm to 1, held against the same in fp32."""

    def plain(
        loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, _: Any
    ) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    start, _ = _clipped_with(lambda *_: None, 1.0)
    right, _ = _clipped_with(plain, 1.0)
    found, good_steps = _clipped_with(step, 2.0**10)
    moved = _distance(found, start)
    wanted = _distance(right, start)
    need(
        moved > 0,
        "The weights did not move at all: has every one of backward, step and update been called?",
    )
    need(
        moved > 0.01 * wanted,
        f"The weights moved by {moved:.2g} where they should by {wanted:.2g}: the norm was "
        "taken of gradients that were still multiplied by the scale. Divide them first.",
    )
    need(
        moved < 1.5 * wanted,
        f"The weights moved by {moved:.2g} where a norm of 1 allows {wanted:.2g}: clip to a norm "
        "of 1, and clip before the optimizer takes its step.",
    )
    for a, b in zip(found, right, strict=True):
        is_same = torch.allclose(a, b, atol=1e-6)
        need(is_same, "The weights differ from those of a clipped fp32 step.")
    need(
        good_steps == 1,
        "The weights are right, but the scaler has not counted a good step: either `update` is "
        "missing, or the scaler was not used at all.",
    )
    return "With a scale of 1024 the weights are those of the clipped fp32 step."


@exercise
def check_resumed(resume: Callable[..., Any]) -> str:
    """A scaler that goes on as one that was never stopped: scale and counter."""
    old = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
    old.load_state_dict(old.state_dict() | {"scale": 2.0**9, "_growth_tracker": 4})
    state = old.state_dict()
    new = call(resume, state)
    kind = type(new).__name__
    is_scaler = isinstance(new, torch.amp.GradScaler)
    need(is_scaler, f"`resumed_scaler` has to return a GradScaler; this is of type {kind}.")
    need(new.is_enabled(), "The new scaler is disabled, so it has no scale to go on with.")
    found = new.state_dict()
    new_scale = found["scale"]
    need(
        new_scale == 2.0**9,
        f"The new scaler's scale is {new_scale:g} where the old one had come to 512.",
    )
    has_counter = found["_growth_tracker"] == 4
    has_interval = found["growth_interval"] == 5
    need(
        has_counter and has_interval,
        "The scale is right, but the number of good steps or the growth interval is lost, so "
        "the new scaler doubles its scale in another step than the old scaler.",
    )
    return "The scale, the growth interval and the number of good steps have not changed."

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
        f"The loss scale is a power of two here, but you gave {scale!r}.",
    )
    scaled = _GRADIENT * scale
    rounded = _in_fp16(scaled)
    need(
        rounded > 0,
        f"2^-26 times {scale:g} is {scaled:.3g}. fp16 still rounds this to 0: its smallest "
        "number is 2^-24, and it rounds half of this number or less to 0.",
    )
    lower = scale / 2
    rounded_lower = _in_fp16(_GRADIENT * lower)
    need(
        rounded_lower == 0,
        f"The gradient does not become 0 with {scale:g}, but it does not with {lower:g} "
        "either. Try a smaller scale.",
    )
    return (
        "2^-26 times 4 is 2^-24, the smallest positive number of fp16. 2^-26 times 2 lies "
        "halfway between 0 and 2^-24, and PyTorch rounds such a tie to the even neighbor, 0."
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
        "1024 would be right if the scale had doubled as often as it halved. Count the good "
        "steps in a row again: an overflow resets the counter to 0.",
    )
    need(
        scale != 2048,
        "After step 7, the counter is 2, not 3. Step 5 doubled the scale and reset the "
        "counter to 0.",
    )
    need(
        scale == history[-1],
        f"{scale} is wrong. Write down the counter of good steps after each step. When it "
        "reaches 3, the scale doubles. An overflow halves the scale. Both reset the counter "
        "to 0.",
    )
    scales = ", ".join(f"{value:g}" for value in history)
    return f"The scale after each step: {scales}."


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
    """A step that clips the gradients' norm to 1, compared with the same step in fp32."""

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
        "The weights did not move. Do you call `backward`, `step` and `update`?",
    )
    need(
        moved > 0.01 * wanted,
        f"The weights moved by {moved:.2g} instead of {wanted:.2g}: you clipped gradients that"
        " were still multiplied by the scale. Divide them first.",
    )
    need(
        moved < 1.5 * wanted,
        f"The weights moved by {moved:.2g}, but a norm of 1 allows {wanted:.2g}. Clip to a "
        "norm of 1 before the optimizer step.",
    )
    for a, b in zip(found, right, strict=True):
        is_same = torch.allclose(a, b, atol=1e-6)
        need(is_same, "The weights differ from the weights after a clipped step in fp32.")
    need(
        good_steps == 1,
        "The weights are right, but the scaler did not count a good step. Call `update`, and "
        "use the scaler for the whole step.",
    )
    return "With a scale of 1024, the weights are the same as after a clipped step in fp32."


@exercise
def check_resumed(resume: Callable[..., Any]) -> str:
    """A scaler that goes on as one that was never stopped: scale and counter."""
    old = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=5)
    old.load_state_dict(old.state_dict() | {"scale": 2.0**9, "_growth_tracker": 4})
    state = old.state_dict()
    new = call(resume, state)
    kind = type(new).__name__
    is_scaler = isinstance(new, torch.amp.GradScaler)
    need(
        is_scaler,
        f"`resumed_scaler` must return a GradScaler, but it returned an object of type {kind}.",
    )
    need(new.is_enabled(), "The new scaler is disabled, so it has no scale.")
    found = new.state_dict()
    new_scale = found["scale"]
    need(
        new_scale == 2.0**9,
        f"The scale of the new scaler is {new_scale:g}, but the old scaler had reached 512.",
    )
    has_counter = found["_growth_tracker"] == 4
    has_interval = found["growth_interval"] == 5
    need(
        has_counter and has_interval,
        "The scale is right, but the number of good steps or the growth interval is lost. So "
        "the new scaler doubles its scale in another step than the old scaler.",
    )
    return "The new scaler has the same scale, growth interval and number of good steps."

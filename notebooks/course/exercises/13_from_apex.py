"""Checks for notebook 13, Move from Apex to torch.amp."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need


@exercise
def check_momentum_bytes(o2: float, autocast: float) -> str:
    """Bytes per parameter with SGD and momentum, at O2 and with autocast."""
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    in_fp32 = (weight.nbytes + weight.grad.nbytes + momentum.nbytes) / weight.numel()
    in_fp16 = 2 * weight.detach().half().nbytes / weight.numel()
    need(
        autocast != in_fp32 + 4,
        f"{autocast} bytes would be right for Adam. SGD with momentum stores only one value "
        "for each parameter.",
    )
    need(
        autocast == in_fp32,
        f"Autocast does not need {autocast} bytes. The parameters, the gradients and the "
        "momentum are fp32, and the 16-bit copies of the weights are temporary.",
    )
    need(
        o2 != in_fp16 + in_fp32 - 4,
        f"With {o2} bytes, one fp32 value is missing at O2. The optimizer updates the master "
        "weights, so these have gradients too.",
    )
    need(
        o2 == in_fp16 + in_fp32,
        f"O2 did not need {o2} bytes. Count a weight and a gradient in fp16. Add everything "
        "that training in fp32 stores with this optimizer.",
    )
    return f"O2 needed {o2} bytes for each parameter, and autocast needs {autocast}."


@exercise
def check_moved_scaler(scaler: torch.amp.GradScaler) -> str:
    """A scaler that begins at 1024 and grows after 500 good steps."""
    need(
        isinstance(scaler, torch.amp.GradScaler),
        f"The answer is a GradScaler, but you gave an object of type {type(scaler).__name__}.",
    )
    need(
        type(scaler) is torch.amp.GradScaler,
        "This is the old, deprecated class. The new class is in torch.amp.",
    )
    scale = scaler.get_scale()
    growth_interval = scaler.get_growth_interval()
    need(
        scale != 65536,
        "The scale is 65536, the default, so 1024 is not the initial scale. What does the "
        "first argument mean?",
    )
    need(scale == 1024, f"The scale is {scale:g} instead of 1024.")
    need(
        growth_interval == 500,
        f"The scale is right, but it grows after {growth_interval} good steps. The old scale "
        "grew after 500.",
    )
    return "The scale starts at 1024 and grows after 500 good steps, like the old scale."


def _exponents_with(update: Callable[..., Any], gradients: list[float]) -> list[float]:
    """The exponent of the scale (a power of two) after each step, with limits of 2^23 and 2^24."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23, growth_interval=1)
    exponents = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale(gradient * weight).sum().backward()
        scaler.step(optimizer)
        call(update, scaler, 2.0**23, 2.0**24)
        exponents.append(math.log2(scaler.get_scale()))
    return exponents


@exercise
def check_limits(update: Callable[..., Any]) -> str:
    """An update that keeps the scale between two limits."""
    rising = _exponents_with(update, [0.1, 0.1, 0.1])
    first, highest = rising[0], max(rising)
    need(
        first == 24,
        "After a good step, the scale should rise from 2^23 to 2^24, because the growth "
        f"interval is 1 here. Your scale is 2^{first:g}. Did you call `scaler.update()` "
        "without an argument?",
    )
    need(
        highest == 24,
        f"The scale rose to 2^{highest:g}, above the maximum of 2^24. Check the scale after "
        "the update, because the update may have doubled it.",
    )
    falling = _exponents_with(update, [0.1, math.inf, math.inf, 0.1])
    lowest, last = min(falling), falling[-1]
    need(
        lowest == 23,
        f"After overflows, the scale fell to 2^{lowest:g}, below the minimum of 2^23. Check "
        "the scale after the update, because the update may have halved it.",
    )
    need(
        last == 24,
        "After your function set the scale to a limit, a good step should give 2^24, but it "
        f"gives 2^{last:g}.",
    )
    return "The scale stays between the minimum and the maximum."


@exercise
def check_two_optimizers(step: Callable[..., Any]) -> str:
    """A step of two optimizers with one scaler whose scale grows after each good step."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    losses = [weight.sum() for weight in weights]
    call(step, losses, optimizers, scaler)
    first, second = (1 - weight[0].item() for weight in weights)
    for number, moved in (("first", first), ("second", second)):
        need(moved != 0, f"The weights of the {number} optimizer did not move.")
    need(
        max(first, second) < 1,
        "The weights moved much too far, because an optimizer used a scaled gradient. Call "
        "`scaler.step`.",
    )
    need(
        first == second == 0.5,
        f"Both weights should move by 0.5, but they moved by {first:g} and {second:g}. The "
        "scale changed between the two steps, so one gradient was divided by the wrong scale.",
    )
    scale = scaler.get_scale()
    need(
        scale == 2048,
        f"Both steps are right, but the scale is {scale:g}. After a good step, it should be "
        "twice the old scale of 1024.",
    )
    return "Both weights moved as in fp32, and you updated the scale once."

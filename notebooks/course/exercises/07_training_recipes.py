"""Checks for notebook 07, Combine AMP with the rest of your training loop."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from course.exercises import call, exercise, need

_SCALE = 1024.0


def _clipped_without_unscale(length: float) -> float:
    """What is left of a gradient that was clipped to 0.5 while it was still scaled."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE)
    scaler.scale(length * weight.sum()).backward()
    clip_grad_norm_([weight], 0.5)
    scaler.step(optimizer)
    return abs(weight.item())


@exercise
def check_norms(norms: tuple[float, float]) -> str:
    """What clipping leaves of gradients with norms of 6 and 0.0003 if `unscale_` was forgotten."""
    is_pair = isinstance(norms, tuple | list) and len(norms) == 2
    need(is_pair, f"The answer is two numbers, such as (6.0, 0.0003), but you gave {norms!r}.")
    first, second = norms
    is_only_clipped = math.isclose(first, 0.5, rel_tol=1e-2)
    need(
        not is_only_clipped,
        "0.5 is the norm of the first gradient after clipping. What does `step` do after that?",
    )
    need(
        math.isclose(first, _clipped_without_unscale(6.0), rel_tol=1e-2),
        f"The final norm of the first gradient is not {first:g}. Before clipping, its norm is 6 "
        "times 1024. Write down its norm after clipping, and then after `step` has divided it by "
        "the scale.",
    )
    need(
        math.isclose(second, _clipped_without_unscale(0.0003), rel_tol=1e-2),
        f"The first number is right, but the final norm of the second gradient is not {second:g}. "
        "Compare 0.0003 times 1024 with the limit of 0.5. Does clipping change this gradient?",
    )
    return "Clipping makes the first gradient far too small. It does not change the second one."


def _after_group(step: Callable[..., Any], scale: float) -> torch.Tensor:
    """How far a group of two losses moves the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    losses = [
        weight * model(torch.randn(8, 4)).pow(2).mean(dim=0)[output]
        for output, weight in enumerate((0.25, 0.75))
    ]
    call(step, losses, model, optimizer, scaler)
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


@exercise
def check_group_step(step: Callable[..., Any]) -> str:
    """A step for a group of losses that clips their sum, compared with the same step in fp32."""

    def plain(
        losses: list[torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, _: Any
    ) -> None:
        torch.stack(losses).sum().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    right, found = _after_group(plain, 1.0), _after_group(step, _SCALE)
    moved, wanted = float(found.norm()), float(right.norm())
    need(
        moved > 0,
        "The weights did not move. Do you call `backward` and `step`, and are all gradients "
        "finite?",
    )
    need(
        moved > 0.01 * wanted,
        f"The weights moved by {moved:.2g} instead of {wanted:.2g}. The gradients were divided"
        " by the scale twice, or you clipped them before `unscale_`.",
    )
    need(
        moved < 1.01 * wanted,
        f"The weights moved by {moved:.2g}, but a norm of 0.1 allows {wanted:.2g}. Clip the "
        "sum of the gradients before the step.",
    )
    need(
        torch.allclose(found, right, atol=1e-5),
        "The weights moved in another direction than after a clipped step in fp32. Add the "
        "gradients of all losses before you clip.",
    )
    return (
        "The weights are the same as after an fp32 step with both losses, clipped to a norm of 0.1."
    )


def _scheduled(
    end: Callable[..., Any], overflows: tuple[int, ...], interval: int
) -> tuple[int, int, float]:
    """How often the schedule and the weight moved in six steps, and the scale at the end."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=interval)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(6):
            optimizer.zero_grad()
            factor = math.inf if number in overflows else 1.0
            scaler.scale(factor * weight.sum()).backward()
            call(end, optimizer, scaler, scheduler)
    return scheduler.last_epoch, round(-weight.item()), scaler.get_scale()


@exercise
def check_end_of_step(end: Callable[..., Any]) -> str:
    """The end of a step that moves a schedule on only if the step was taken."""
    moves, steps, scale = _scheduled(end, (1, 4), 100)
    need(
        steps == 4 and scale == _SCALE / 4,
        "Two of the six steps overflow, so the optimizer takes 4 steps, and the scale falls "
        f"from 1024 to 256. With your function, the optimizer takes {steps} steps, and the "
        f"scale is {scale:g}. Call `step` and `update`.",
    )
    need(
        moves != 6,
        "You called `scheduler.step` in all six steps, although two steps were skipped. When "
        "do you read the old scale?",
    )
    need(
        moves == steps,
        f"You called `scheduler.step` {moves} times, but the optimizer took 4 steps. Call it "
        "if the scale did not fall.",
    )
    grown, _, _ = _scheduled(end, (), 2)
    need(
        grown == 6,
        f"Without an overflow, you called `scheduler.step` only {grown} times in six steps. If"
        " the scale *rose*, the optimizer took its step too.",
    )
    return "The schedule moves on after each step that the optimizer took, and only then."


def _with(job: str, early: bool) -> torch.Tensor:
    """What a step ends with if it does a job before or after `unscale_`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE)
    scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    noise = [0.01 * torch.randn_like(gradient) for gradient in gradients]
    logged = torch.zeros(())
    if not early:
        scaler.unscale_(optimizer)
    if job == "log":
        logged = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    elif job == "clamp":
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    elif job == "noise":
        torch._foreach_add_(gradients, noise)
    elif job == "freeze":
        gradients[-1].zero_()
    elif job == "average":
        average.update_parameters(model)
    scaler.step(optimizer)
    weights = [p.detach().flatten() for p in (*model.parameters(), *average.parameters())]
    return torch.cat([*weights, logged.reshape(1)])


@exercise
def check_after_unscale(names: set[str]) -> str:
    """Which jobs change what a step ends with if they come before `unscale_`."""
    jobs = ("log", "clamp", "noise", "freeze", "average")
    need(
        not isinstance(names, str) and set(names) <= set(jobs),
        f"The answer is a set of names from {', '.join(jobs)}, but you gave {names!r}.",
    )
    right = {job for job in jobs if not torch.allclose(_with(job, True), _with(job, False))}
    for job in jobs:
        need(
            job in right or job not in names,
            f"`{job}` gives the same result before and after `unscale_`. Does it use "
            "gradients? If so, does their size matter?",
        )
    missing = len(right - set(names))
    need(
        missing == 0,
        f"The names that you gave are right, but {missing} more jobs go wrong before "
        "`unscale_`. Which jobs compare the gradients with a number, add something to them, "
        "or log them?",
    )
    return "These jobs depend on the size of the gradients. The others do not."

"""Checks for notebook 05, Put AMP into an image-classification loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from course.exercises import call, exercise, need

_Batch = tuple[torch.Tensor, torch.Tensor]


@exercise
def check_needed_difference(points: float) -> str:
    """How far two accuracies must differ to count: the spread, and two standard errors."""
    spread = 0.5
    accuracy = 0.9
    variance = accuracy * (1 - accuracy) / 900
    standard_error = variance**0.5
    error = 100 * standard_error
    right = spread + 2 * error
    distance_to_share = abs(points - right / 100)
    need(
        distance_to_share > 1e-6,
        f"{points:g} is a share between 0 and 1. The question asks for percentage points.",
    )
    distance_to_two_errors = abs(points - 2 * error)
    need(
        distance_to_two_errors > 1e-6,
        "You counted only the two standard errors. Add the difference between seeds.",
    )
    distance_to_one_error = abs(points - spread - error)
    need(
        distance_to_one_error > 1e-6,
        "You added one standard error, but the yardstick uses two.",
    )
    distance_to_right = abs(points - right)
    need(
        distance_to_right < 1e-6,
        f"{points:g} is wrong. Compute the standard error of 90 % accuracy on 900 images, in "
        "percentage points.",
    )
    return f"Two standard errors of {error:.0f} point each, plus {spread} points between the seeds."


def _speedup(times: dict[str, float], factors: dict[str, float]) -> float:
    """Of a step as a whole, from the time of each part and by what factor it is faster."""
    old_time = sum(times.values())
    new_time = 0.0
    for part, time in times.items():
        new_time += time / factors[part]
    return old_time / new_time


@exercise
def check_speedups(speedups: Sequence[float]) -> str:
    """Speed-ups of a step of three parts, as a whole, from the times of its parts."""
    is_pair = isinstance(speedups, list | tuple) and len(speedups) == 2
    need(
        is_pair,
        f"The answer is two numbers, such as (2.0, 3.0), but you gave {speedups!r}.",
    )
    fp32: dict[str, float] = {"pointwise": 60, "depthwise": 30, "rest": 10}
    factors: dict[str, float] = {"pointwise": 2, "depthwise": 0.5, "rest": 1}
    mean = sum(factors.values()) / len(factors)
    plain = _speedup(fp32, factors)
    with_islands = _speedup(fp32, factors | {"depthwise": 1})
    first, second = speedups
    distance_to_mean = abs(first - mean)
    need(
        distance_to_mean > 0.01,
        "The first number is the mean of three speed-ups. But the three parts do not take the"
        " same time.",
    )
    with_faster_depthwise = _speedup(fp32, factors | {"depthwise": 2})
    distance_to_faster_depthwise = abs(first - with_faster_depthwise)
    need(
        distance_to_faster_depthwise > 0.01,
        "In the first number, the depthwise layers became faster. Half as fast means that "
        "they take twice their 30 ms.",
    )
    distance_to_plain = abs(first - plain)
    need(
        distance_to_plain < 0.01,
        f"{first:g} is not the speed-up with autocast alone. Add up the milliseconds of "
        "the three parts, and divide 100 ms by the sum.",
    )
    distance_to_islands = abs(second - with_islands)
    need(
        distance_to_islands < 0.01,
        f"The first number is right, but {second:g} is not the second. The depthwise "
        "layers take 30 ms again, and the pointwise layers stay as fast as under autocast.",
    )
    return (
        f"Autocast alone gives {plain:.2f}x, because the depthwise layers become slower. With "
        f"these layers in fp32, it is {with_islands:.2f}x."
    )


def _epoch() -> list[_Batch]:
    """Three random batches."""
    return [(torch.randn(4, 6), torch.arange(4) % 3) for _ in range(3)]


def _tiny() -> tuple[nn.Linear, torch.optim.SGD, list[list[_Batch]]]:
    """A network, SGD for it, and two epochs of three batches, the very first with an infinity."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    epochs = [_epoch(), _epoch()]
    images, _ = epochs[0][0]
    images[0, 0] = torch.inf
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, epochs


def _largest_difference(weights: torch.Tensor, others: torch.Tensor) -> float:
    difference = weights - others
    return difference.abs().max().item()


@exercise
def check_mended_loop(loop: Callable[..., Any]) -> str:
    """A loop in fp16 with one scaler, compared with the same loop in fp32."""
    model, optimizer, epochs = _tiny()
    scaler = call(loop, model, optimizer, epochs)
    kind = type(scaler).__name__
    is_scaler = isinstance(scaler, torch.amp.GradScaler)
    need(
        is_scaler,
        f"Return the scaler, because the check reads it. You returned an object of type {kind}.",
    )
    found = model.weight.detach()
    reference, optimizer, epochs = _tiny()
    is_finite = bool(found.isfinite().all())
    need(
        is_finite,
        "The weights are inf or NaN. The gradients of one batch are infinite, but the "
        "optimizer took this step. Check the gradients before the step.",
    )
    batches = epochs[0] + epochs[1]
    for images, targets in batches[1:]:  # the first has an infinity, and no step
        output = reference(images)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = reference.weight.detach()
    far = _largest_difference(found, expected)
    need(
        far < 1,
        f"The weights are off by {far:.0f}. The optimizer used gradients that were still "
        "multiplied by the loss scale.",
    )
    need(far < 1e-2, f"The weights differ by {far:.2g} from the weights of the same loop in fp32.")
    good_steps = scaler.state_dict()["_growth_tracker"]
    need(
        good_steps == 5,
        f"The weights are right, but the scaler has counted {good_steps} good steps in a row, not "
        "5. Create the scaler only once, before the loop.",
    )
    return "The weights are the same as in fp32, and the scaler has skipped the bad step."


def _new_run(seed: int) -> dict[str, Any]:
    """A network, and all that trains it, under the names in its checkpoint."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def _take_steps(run: dict[str, Any], steps: range) -> None:
    model = run["model"]
    optimizer = run["optimizer"]
    scaler = run["scaler"]
    targets = torch.arange(4) % 3
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x).float()
            loss = F.cross_entropy(output, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run["scheduler"].step()


def _resume(run: dict[str, Any], forget: Iterable[str]) -> dict[str, Any]:
    """A new run that loads the state of `run`, except the parts to forget."""
    saved = {name: part.state_dict() for name, part in run.items()}
    random_state = torch.get_rng_state()
    new_run = _new_run(seed=1)
    for name, part in new_run.items():
        if name not in forget:
            part.load_state_dict(saved[name])
    if "random" not in forget:
        torch.set_rng_state(random_state)
    return new_run


def _finished(forget: Iterable[str] | None = None) -> torch.Tensor:
    """The weights of a run in bf16 after six steps; with `forget`, interrupted and resumed."""
    run = _new_run(seed=0)
    _take_steps(run, range(3))
    if forget is not None:
        run = _resume(run, forget)
    _take_steps(run, range(3, 6))
    parameters = run["model"].parameters()
    return nn.utils.parameters_to_vector(parameters).detach()


@exercise
def check_superfluous(names: Iterable[str]) -> str:
    """The parts of a checkpoint without which a run in bf16 ends with the same weights."""
    parts = {"optimizer", "scheduler", "scaler", "random"}
    if isinstance(names, str):
        names = [names]
    chosen = set(names)
    unknown = chosen - parts
    unknown_names = sorted(map(str, unknown))
    listed = ", ".join(unknown_names)
    need(not unknown, f"{listed}: use the names from the exercise.")
    whole = _finished()
    for name in sorted(chosen):
        weights = _finished(forget=[name])
        off = _largest_difference(weights, whole)
        need(
            off == 0,
            f"Without {name!r}, the weights differ by up to {off:.2g} at the end. This run "
            "changes it, and the next step depends on it.",
        )
    others = parts - chosen
    missing = 0
    for name in others:
        weights = _finished(forget=[name])
        missing += torch.equal(weights, whole)
    need(
        missing == 0,
        f"You can leave out all that you named, and {missing} more. What does this run never"
        " change or never use?",
    )
    return "A disabled scaler has no state, and no layer of this network draws random numbers."

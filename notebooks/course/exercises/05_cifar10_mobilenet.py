"""Checks for notebook 05, Put AMP into an image-classification loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from course.exercises import call, exercise, need


@exercise
def check_needed_difference(points: float) -> str:
    """How far two accuracies must differ to count: the spread, and two standard errors."""
    spread, error = 0.5, 100 * (0.9 * (1 - 0.9) / 900) ** 0.5
    need(
        abs(points - (spread + 2 * error) / 100) > 1e-6,
        f"{points:g} is a share between 0 and 1. The question asks for percentage points.",
    )
    need(
        abs(points - 2 * error) > 1e-6,
        "You counted only the two standard errors. Add the difference between seeds.",
    )
    need(
        abs(points - spread - error) > 1e-6,
        "You added one standard error, but the yardstick uses two.",
    )
    need(
        abs(points - spread - 2 * error) < 1e-6,
        f"{points:g} is wrong. Compute the standard error of 90 % accuracy on 900 images, in "
        "percentage points.",
    )
    return f"Two standard errors of {error:.0f} point each, plus {spread} points between the seeds."


@exercise
def check_speedups(speedups: Sequence[float]) -> str:
    """Speed-ups of a step of three parts, as a whole, from the times of its parts."""
    need(
        isinstance(speedups, list | tuple) and len(speedups) == 2,
        f"The answer is two numbers, such as (2.0, 3.0), but you gave {speedups!r}.",
    )
    fp32 = {"pointwise": 60, "depthwise": 30, "rest": 10}
    factors = {"pointwise": 2, "depthwise": 0.5, "rest": 1}
    total = sum(fp32.values())
    mean = sum(factors.values()) / len(factors)
    plain = total / sum(ms / factors[part] for part, ms in fp32.items())
    factors["depthwise"] = 1
    islands = total / sum(ms / factors[part] for part, ms in fp32.items())
    need(
        abs(speedups[0] - mean) > 0.01,
        "The first number is the mean of three speed-ups. But the three parts do not take the"
        " same time.",
    )
    need(
        abs(speedups[0] - total / 75) > 0.01,
        "In the first number, the depthwise layers became faster. Half as fast means that "
        "they take twice their 30 ms.",
    )
    need(
        abs(speedups[0] - plain) < 0.01,
        f"{speedups[0]:g} is not the speed-up with autocast alone. Add up the milliseconds of "
        "the three parts, and divide 100 ms by the sum.",
    )
    need(
        abs(speedups[1] - islands) < 0.01,
        f"The first number is right, but {speedups[1]:g} is not the second. The depthwise "
        "layers take 30 ms again, and the pointwise layers stay as fast as under autocast.",
    )
    return (
        f"Autocast alone gives {plain:.2f}x, because the depthwise layers become slower. With "
        f"these layers in fp32, it is {islands:.2f}x."
    )


def _tiny() -> tuple[nn.Linear, torch.optim.SGD, list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """A network, SGD for it, and two epochs of three batches, the very first with an infinity."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    epochs = [[(torch.randn(4, 6), torch.arange(4) % 3) for _ in range(3)] for _ in range(2)]
    epochs[0][0][0][0, 0] = torch.inf
    return model, torch.optim.SGD(model.parameters(), lr=0.1), epochs


@exercise
def check_mended_loop(loop: Callable[..., Any]) -> str:
    """A loop in fp16 with one scaler, compared with the same loop in fp32."""
    model, optimizer, epochs = _tiny()
    scaler = call(loop, model, optimizer, epochs)
    need(
        isinstance(scaler, torch.amp.GradScaler),
        "Return the scaler, because the check reads it. You returned an object of type "
        f"{type(scaler).__name__}.",
    )
    found, (reference, optimizer, epochs) = model.weight.detach(), _tiny()
    need(
        bool(found.isfinite().all()),
        "The weights are inf or NaN. The gradients of one batch are infinite, but the "
        "optimizer took this step. Check the gradients before the step.",
    )
    for images, targets in (epochs[0] + epochs[1])[1:]:
        F.cross_entropy(reference(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    far = (found - reference.weight.detach()).abs().max().item()
    need(
        far < 1,
        f"The weights are off by {far:.0f}. The optimizer used gradients that were still "
        "multiplied by the loss scale.",
    )
    need(far < 1e-2, f"The weights differ by {far:.2g} from the weights of the same loop in fp32.")
    good = scaler.state_dict()["_growth_tracker"]
    need(
        good == 5,
        f"The weights are right, but the scaler has counted {good} good steps in a row, not 5."
        " Create the scaler only once, before the loop.",
    )
    return "The weights are the same as in fp32, and the scaler has skipped the bad step."


def _finished(forget: Iterable[str] | None = None) -> torch.Tensor:
    """The weights of a run in bf16 after six steps; with `forget`, interrupted and resumed."""

    def new_run(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    def take_steps(run: dict[str, Any], steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(run["model"](x).float(), torch.arange(4) % 3)
            run["scaler"].scale(loss).backward()
            run["scaler"].step(run["optimizer"])
            run["scaler"].update()
            run["optimizer"].zero_grad()
            run["scheduler"].step()

    run = new_run(seed=0)
    take_steps(run, range(3))
    if forget is not None:
        saved = {name: part.state_dict() for name, part in run.items()}
        random, run = torch.get_rng_state(), new_run(seed=1)
        for name, part in run.items():
            if name not in forget:
                part.load_state_dict(saved[name])
        if "random" not in forget:
            torch.set_rng_state(random)
    take_steps(run, range(3, 6))
    return nn.utils.parameters_to_vector(run["model"].parameters()).detach()


@exercise
def check_superfluous(names: Iterable[str]) -> str:
    """The parts of a checkpoint without which a run in bf16 ends with the same weights."""
    parts = {"optimizer", "scheduler", "scaler", "random"}
    chosen = {names} if isinstance(names, str) else set(names)
    need(
        chosen <= parts,
        f"{', '.join(map(str, sorted(chosen - parts, key=str)))}: use the names from the exercise.",
    )
    whole = _finished()
    for name in sorted(chosen):
        off = (_finished(forget=[name]) - whole).abs().max().item()
        need(
            off == 0,
            f"Without {name!r}, the weights differ by up to {off:.2g} at the end. This run "
            "changes it, and the next step depends on it.",
        )
    more = [n for n in parts - chosen if torch.equal(_finished(forget=[n]), whole)]
    need(
        not more,
        f"You can leave out all that you named, and {len(more)} more. What does this run never"
        " change or never use?",
    )
    return "A disabled scaler has no state, and no layer of this network draws random numbers."

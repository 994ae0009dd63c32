"""Whole programs with the lines of a step, as `advise` prints them."""

import subprocess
import sys

import torch

from amp_lab.model_call import ModelCall
from amp_lab.recipes.loss import OutputLoss
from amp_lab.recipes.recipe import TRAINING, Recipe
from amp_lab.recipes.step import step_code

YOURS = "# Define model, args, kwargs and loss_fn. The loss is loss_fn(model(*args, **kwargs))."


def program(
    call: ModelCall, recipe: Recipe, device: torch.device, scale: float, beginning: str = ""
) -> str:
    """Return a program that creates the objects in `YOURS`, and defines and calls a recipe's step.

    `beginning` is the code that creates these objects, except for a loss that this function chose.
    By default, a comment names the objects.
    """
    setup = beginning.strip() or YOURS
    end = "step()"
    if recipe.use == TRAINING:
        end = "for i in range(3):  # replace by your training loop\n    print(i, step().item())"
        if beginning and isinstance(call.loss_fn, OutputLoss):  # `loss_of` chose it, not the user
            setup += f"\n\n\ndef loss_fn(output):  # your loss\n    return {call.loss_fn}"
    return f"import torch\n\n{setup}\n\n{step_code(call.model, recipe, device, scale)}\n\n\n{end}\n"


def error_of(text: str, timeout: float) -> str:
    """Run a program in another process; return the last line of its error, empty if it succeeds."""
    command = [sys.executable, "-c", text]
    try:
        process = subprocess.run(command, timeout=timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"it did not finish in {timeout:.0f} s"
    if not process.returncode:
        return ""
    lines = process.stderr.strip().splitlines() or ["it failed"]
    return lines[-1]

"""Run a model in fp32, as the baseline with which `advise` compares all other recipes."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from amp_lab.advisor.candidates import Candidate
from amp_lab.advisor.learning import CHAOTIC, Fp32Outputs, Learning, choose_loss_scale
from amp_lab.model_call import ModelCall
from amp_lab.recipes import (
    DEFAULT_SCALE,
    INFERENCE,
    OWN_LOSS,
    TRAINING,
    Recipe,
    Step,
    loss_of,
    uses_of,
)

Check = Callable[[Candidate], Step]
"""`Learning.check` or `Fp32Outputs.check`: compares a recipe with fp32, and returns its step."""


class Baseline(NamedTuple):
    """The model in fp32, with which other recipes are compared."""

    call: ModelCall  # with a loss, if one can be made
    checks: dict[str, Check]
    """By use. Inference comes first, and then training if it is possible."""
    loss_scale: float = DEFAULT_SCALE  # the first one in fp16


def run_baseline(
    call: ModelCall, device: torch.device, seconds: float, watch: list[str]
) -> Baseline:
    """Run the model in fp32, as the baseline of inference and training.

    All training runs, including later ones of the checks, may take `seconds` together. Adds remarks
    for the user to `watch`. Without a loss that can be differentiated, there is no check for
    training.
    """
    checks: dict[str, Check] = {INFERENCE: Fp32Outputs(call, device).check}
    if TRAINING not in uses_of(call.model):
        return Baseline(call, checks)
    if call.loss_fn is None:
        loss = loss_of(Step(call, Recipe(TRAINING), device).output())
        if loss is None:
            watch.append(
                "No output has a gradient, so there is no loss to train with: advise skips "
                "training."
            )
            return Baseline(call, checks)
        call = replace(call, loss_fn=loss)
        watch.append(OWN_LOSS.sentence(loss=loss))
    scaling = choose_loss_scale(call, device)
    watch += scaling.remarks
    learning = Learning(call, device, seconds, scaling.scale)
    checks[TRAINING] = learning.check
    if not learning.learns:
        watch.append(
            "In fp32, the loss does not fall by more than 5 % in these few steps, so of the losses "
            "only the first are compared."
        )
    if learning.noise > CHAOTIC:
        watch.append(
            f"A little noise in the weights changes the fp32 gradients by {learning.noise:.0%}, "
            "so only their size is compared."
        )
    return Baseline(call, checks, scaling.scale)

"""Recipes: how a step of a model runs, as a precision with options such as `torch.compile`.

A `Step` runs a recipe, and `program` writes the same recipe as lines of code.
"""

from amp_lab.recipes.distance import distance, floats, norm
from amp_lab.recipes.loss import OWN_LOSS, OutputLoss, loss_of
from amp_lab.recipes.program import error_of, program
from amp_lab.recipes.recipe import INFERENCE, TRAINING, Recipe, uses_of
from amp_lab.recipes.step import DEFAULT_SCALE, Step

__all__ = [
    "DEFAULT_SCALE",
    "INFERENCE",
    "OWN_LOSS",
    "TRAINING",
    "OutputLoss",
    "Recipe",
    "Step",
    "distance",
    "error_of",
    "floats",
    "loss_of",
    "norm",
    "program",
    "uses_of",
]

"""Recipes: a precision with options such as `torch.compile`, which define how a step runs.

A `Step` runs a recipe, and `program` returns the code of the same recipe.
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

"""The recipes that `advise` tries, each with its measurements and its verdict."""

import re
from dataclasses import dataclass

from amp_lab.core.estimates import Estimate, Ratio
from amp_lab.core.precision import Precision
from amp_lab.recipes import INFERENCE, Recipe


@dataclass(eq=False)
class Candidate:
    """A recipe with its forecast, its measurements and its verdict."""

    recipe: Recipe
    verdict: str = ""  # such as "recommended", "slower", "unlike fp32", "raises", "does not fit"
    reason: str = ""  # the reason for the verdict
    peak_bytes: int | None = None  # forecast of the peak memory
    largest_batch: int | None = None  # forecast of the largest batch that fits
    against_fp32: str = ""
    """How far the gradients and losses, or the output, are from those in fp32."""
    losses: tuple[float, ...] = ()  # losses of the first training steps
    time_s: Estimate | None = None  # seconds of a step, measured in turns with other recipes
    speedup: Ratio | None = None  # time of the baseline over the time of this recipe
    # Rough seconds of a step, from the check: the fastest in training, the median in inference.
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return str(self.recipe)


_NAMES_DTYPE = re.compile(r"\bd?type\b")
_LACKS_DTYPE = re.compile("[Uu]nsupported|not supported|not implemented")  # no kernel has it


def mixes_dtypes(error: Exception) -> bool:
    """Whether an error is about operands of several dtypes, not about one that has no kernel."""
    text = str(error)
    return bool(_NAMES_DTYPE.search(text)) and not _LACKS_DTYPE.search(text)


def first_recipes(use: str, precisions: list[Precision]) -> list[Recipe]:
    """The recipes to try first: each precision under autocast and, if possible, with cast weights.

    `use` is ``training`` or ``inference``.
    """
    castable = {Precision.BF16}
    if use == INFERENCE:  # fp16 weights cannot be trained: GradScaler refuses their gradients
        castable.add(Precision.FP16)
    recipes = []
    for precision in precisions:
        recipes.append(Recipe(use, precision))
        if precision in castable:
            recipes.append(Recipe(use, precision, cast=True))
    return recipes

"""A model with its inputs, its loss and a device, of which steps make copies."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.recipes.recipe import INFERENCE, TRAINING, Recipe
from amp_lab.tracing.copies import copied


@dataclass(frozen=True)
class Case:
    """A model with its inputs, its loss and a device. Steps work on copies, so none is changed."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], Any] | None = None  # takes the output
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def uses(self) -> tuple[str, ...]:
        """TRAINING and INFERENCE; INFERENCE alone if no weight requires a gradient."""
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            return TRAINING, INFERENCE
        return (INFERENCE,)

    def dtype_of(self, recipe: Recipe) -> torch.dtype | None:
        """The dtype to which weights and inputs are cast; None if they need no cast."""
        if recipe.cast:
            return recipe.precision.dtype
        if any(parameter.dtype in LOWER_DTYPES for parameter in self.model.parameters()):
            return torch.float32
        return None

    def random_numbers_kept(self) -> AbstractContextManager:
        """A context after which the random state of CPU and device is what it was before."""
        # `fork_rng` keeps the CPU's state in any case, and that of the listed devices.
        if self.device.type == "cpu":
            return torch.random.fork_rng([], device_type="cuda")
        index = torch.accelerator.current_device_index()
        return torch.random.fork_rng([index], device_type=self.device.type)

    def copied(self, recipe: Recipe) -> "Case":
        """The case with copies of model and inputs, in the dtype of the recipe."""
        dtype = self.dtype_of(recipe)
        model = copied(self.model)

        if dtype is not None:
            model = model.to(dtype)

        def copied_input(x: torch.Tensor) -> torch.Tensor:
            x = x.detach().clone()
            if dtype is not None and x.is_floating_point():
                return x.to(dtype)
            return x

        args, kwargs = tree_map_only(torch.Tensor, copied_input, (self.args, self.kwargs))
        return replace(self, model=model, args=args, kwargs=kwargs)

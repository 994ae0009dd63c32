"""How a step runs: in which precision, layout and compilation."""

from dataclasses import dataclass

import torch
from torch import nn

from amp_lab.core.precision import Precision
from amp_lab.core.tensors import LOWER_DTYPES

TRAINING = "training"
INFERENCE = "inference"


@dataclass(frozen=True)
class Recipe:
    """A precision with options for a step. `str(recipe)` is its name, such as "bf16"."""

    use: str  # TRAINING or INFERENCE
    precision: Precision = Precision.FP32
    cast: bool = False  # whether weights and inputs are cast, instead of autocast
    channels_last: bool = False
    fused: bool = False  # whether the optimizer is fused, so that its update is one kernel
    compiled: bool = False
    compile_mode: str = "default"  # of torch.compile

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under `torch.autocast`."""
        return self.precision.dtype is not torch.float32 and not self.cast

    def dtype_for(self, model: nn.Module) -> torch.dtype | None:
        """The dtype to which the weights and inputs of a model are cast; None without a cast."""
        if self.cast:
            return self.precision.dtype
        if any(parameter.dtype in LOWER_DTYPES for parameter in model.parameters()):
            return torch.float32
        return None

    def __str__(self) -> str:
        name = str(self.precision)
        if self.cast:
            name += " weights"
        if self.autocasts:
            name += " autocast"
        if self.channels_last:
            name += ", channels-last"
        if self.fused:
            name += ", fused AdamW"
        if self.compiled:
            name += ", torch.compile"
            if self.compile_mode != "default":
                name += f" ({self.compile_mode})"
        return name


def uses_of(model: nn.Module) -> tuple[str, ...]:
    """Return TRAINING and INFERENCE, or only INFERENCE if no weight requires a gradient."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return TRAINING, INFERENCE
    return (INFERENCE,)

"""Whether a step of training used its `GradScaler`: `find_nonfinite` asks it."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_lab.numerics.call_stack import applied_loss_scale
from amp_lab.numerics.optimizer_step import bypasses_scaler


class ScalerWatch:
    """What a scaler multiplied the loss by, and whether an optimizer stepped without the scaler."""

    def __init__(self) -> None:
        self.loss_scale: float | None = None
        self.bypassed = False

    def note_op(self, func: Any, args: tuple) -> None:
        """Note the loss scale if this op, outside of all modules, is `GradScaler.scale`'s.

        Called for every op, also after a report: the step that follows may bypass the scaler.
        """
        in_backward_pass = torch._C._current_autograd_node() is not None
        if func is torch.ops.aten.mul.Tensor and not in_backward_pass:
            self.loss_scale = applied_loss_scale(args) or self.loss_scale

    def before_step(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Note whether an optimizer of the model steps without the scaler that scaled the loss."""
        if self.loss_scale is not None and bypasses_scaler(optimizer, model):
            self.bypassed = True

"""A loss for a model without one, as a function and as the code that a program shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amp_lab.core.remedies import remedy

OWN_LOSS = remedy(
    "advise.own_loss",
    "you train a model, but gave no loss",
    "You gave no loss, so this report uses {loss}. Pass the loss that you train with.",
)


@dataclass(frozen=True)
class OutputLoss:
    """A loss: a part of an output, or the mean square of this part. `str(loss)` is the code."""

    keys: tuple = ()  # the keys and indices of the part in the output; empty for the output itself
    is_loss: bool = False  # whether the part is the loss itself

    def __call__(self, output: Any) -> Tensor:
        """The loss of an output."""
        part = output
        for key in self.keys:
            part = part[key]
        if self.is_loss:
            return part
        return part.float().square().mean()

    def __str__(self) -> str:
        code = "output"
        for key in self.keys:
            code += f"[{key!r}]"
        if self.is_loss:
            return code
        return f"{code}.float().square().mean()"


def loss_of(output: Any) -> OutputLoss | None:
    """Return a loss for an output: the loss in the output, or the mean square of a tensor.

    Returns None if no tensor in the output has a gradient.
    """
    # The parts of the output, by the keys that lead to them: output[key], or output itself.
    parts: dict[tuple, Any] = {(): output}
    if isinstance(output, Mapping):
        parts = {(key,): part for key, part in output.items()}
    elif isinstance(output, (list, tuple)):
        parts = {(i,): part for i, part in enumerate(output)}
    differentiable = {keys: part for keys, part in parts.items() if _has_gradient(part)}
    for keys, part in differentiable.items():
        is_called_loss = not keys or "loss" in repr(keys)
        if is_called_loss and not part.dim():  # a scalar
            return OutputLoss(keys, is_loss=True)
    for keys in differentiable:
        return OutputLoss(keys)
    return None


def _has_gradient(part: Any) -> bool:
    """Whether a part of an output is a tensor that autograd can differentiate."""
    return isinstance(part, Tensor) and part.requires_grad

"""Checks for notebook 00, Train with AMP in five minutes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need


@exercise
def check_needs_scaler(needs_scaler: Callable[[torch.dtype], bool]) -> str:
    """Whether a dtype needs a scaler: where gradients vanish that fp32 would keep."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tiny = torch.finfo(torch.float32).smallest_normal
        needed = torch.finfo(dtype).smallest_normal > tiny
        answer = call(needs_scaler, dtype)
        need(
            bool(answer) == needed,
            f"For {dtype}, you answered {bool(answer)}. Its smallest normal number is "
            f"{torch.finfo(dtype).smallest_normal:.3g}, that of fp32 is {tiny:.3g}. Does this "
            "dtype lose gradients that fp32 keeps?",
        )
    return (
        "Only the smallest normal number of fp16 is larger than that of fp32, so only fp16"
        " needs a scaler."
    )


class _Watched(nn.Module):
    """A network that notes where autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.forward_on = self.backward_on = False
        self.forward_dtype: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_on = torch.is_autocast_enabled("cpu")
        output = self.layer(x)
        self.forward_dtype = output.dtype

        def note(_: torch.Tensor) -> None:
            self.backward_on = torch.is_autocast_enabled("cpu")

        output.register_hook(note)
        return output


def _step(function: Callable[..., Any], scale: float) -> tuple[_Watched, Any, torch.Tensor]:
    """The network after a step, what the step returned, and the weights before it."""
    torch.manual_seed(0)
    model, scaler = _Watched(), torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.layer.weight.grad = torch.full((3, 4), 1e8)  # of an earlier step: zero_grad clears it
    before = model.layer.weight.detach().clone()
    images, labels = torch.randn(8, 4), torch.arange(8) % 3
    return model, call(function, model, optimizer, scaler, images, labels), before


@exercise
def check_marked_lines(amp_step: Callable[..., Any]) -> str:
    """A training step under autocast, whose backward pass is outside of it."""
    model, loss, before = _step(amp_step, 2.0**8)
    need(
        model.forward_on and model.forward_dtype is torch.bfloat16,
        "The forward pass did not run under autocast in bfloat16. Call the model inside `with"
        " torch.autocast(device.type, dtype=torch.bfloat16):`.",
    )
    after = model.layer.weight.detach()
    need(
        not torch.equal(after, before),
        "The weights did not move. Scale the loss, call `backward()`, and then call "
        "`scaler.step` and `scaler.update`.",
    )
    need(
        not model.backward_on,
        "The backward pass ran inside the autocast block. PyTorch advises against this. End "
        "the block before `backward()`. No error tells you, because the weights still move.",
    )
    moved = float((after - before).abs().max())
    need(moved < 1e3, "The gradients of an earlier step were still there. Call `zero_grad` first.")
    need(
        moved < 1,
        f"A weight moved by {moved:.3g}, as if its gradient were still multiplied by the "
        "scale. Only `scaler.step` divides it by the scale.",
    )
    need(
        isinstance(loss, torch.Tensor) and bool(loss.isfinite()) and float(loss) < 10,
        "Return the loss itself, not the scaled loss.",
    )
    return "Autocast covers only the forward pass and the loss, and the scaler does the rest."

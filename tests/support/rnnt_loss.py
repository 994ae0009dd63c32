"""The RNN-T loss of torchaudio: its own op where that is installed, else one of the same schema."""

import importlib
import importlib.util
from typing import Any

import torch

NAME = "torchaudio::rnnt_loss_forward"
_SCHEMA = (
    "rnnt_loss_forward(Tensor logits, Tensor targets, Tensor logit_lengths, Tensor target_lengths, "
    "int blank, float clamp, bool fused_log_softmax) -> (Tensor, Tensor)"
)


def _costs(logits: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the right shapes and dtypes; refuses the dtypes that torchaudio refuses."""
    if logits.dtype not in (torch.float32, torch.float16):
        raise RuntimeError("logits must be float32 or float16 (half) type")
    return logits.sum((1, 2, 3)), torch.ones_like(logits)


if importlib.util.find_spec("torchaudio") is not None:
    importlib.import_module("torchaudio")  # which registers it
else:
    _LIBRARY = torch.library.Library("torchaudio", "FRAGMENT")
    _LIBRARY.define(_SCHEMA)
    _LIBRARY.impl("rnnt_loss_forward", _costs, "CPU")


class _RnntLoss(torch.autograd.Function):
    """As torchaudio.functional has it."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        costs, gradient = torch.ops.torchaudio.rnnt_loss_forward(*args)
        ctx.save_for_backward(gradient)
        return costs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        return saved * gradient.view(-1, 1, 1, 1), *[None] * 6


def rnnt_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean loss of logits (B, T, U, V), with as many targets as they are for."""
    batch, times, places, _ = logits.shape
    targets = torch.ones(batch, places - 1, dtype=torch.int32, device=logits.device)
    lengths = [
        torch.full((batch,), length, dtype=torch.int32, device=logits.device)
        for length in (times, places - 1)
    ]
    return _RnntLoss.apply(logits, targets, *lengths, 0, -1.0, True).mean()

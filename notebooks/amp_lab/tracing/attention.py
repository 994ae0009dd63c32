"""Attention as one op: a call of it, its FLOPs, and how it runs on a device that is not here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from amp_lab.backends import Backend
from amp_lab.tracing.dtype_checks import require_alike
from amp_lab.tracing.ops_seen import LOWER_DTYPES

ATTENTION = "scaled_dot_product_attention"


class Attention(NamedTuple):
    """A call of `scaled_dot_product_attention`: its arguments, by their names and in their order.

    Shapes: query (…, H, T, D), key (…, H, S, D), value (…, H, S, V); the output is (…, H, T, V).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def in_plain_ops(self) -> torch.Tensor:
        """The output by attention's definition, without asking the device for a kernel."""
        *tensors, scale, enable_gqa = self
        return torch.ops.aten._scaled_dot_product_attention_math(
            *tensors, scale=scale, enable_gqa=enable_gqa
        )[0]

    def flops(self) -> int:
        """FLOPs of both matrix products, of every query with every key, also if it is causal."""
        width = self.query.shape[-1] + self.value.shape[-1]
        return 2 * self.query[..., 0].numel() * self.key.shape[-2] * width


@contextmanager
def attention_of(device: Backend) -> Iterator[None]:
    """The block in which attention runs as on such a device, which is not asked for its kernel.

    Where it is fused: flash for low precision without a mask, else the memory-efficient kernel; all
    else is computed step by step. Source: ATen/native/transformers/cuda/sdp_utils.cpp.
    """

    def run(*args, **kwargs) -> torch.Tensor:
        call = Attention(*args, **kwargs)
        require_alike(ATTENTION, list(call[:3]))
        return _kernel(call)(call) if device.fused_attention else call.in_plain_ops()

    with torch.library._scoped_library("aten", "IMPL") as library:
        if not device.is_host:
            # In the dispatcher, which comes after autocast, and which also sees the calls inside of
            # nn.MultiheadAttention, as a mode for functions does not.
            library.impl(ATTENTION, run, f"Autograd{device.key}", allow_override=True)
        yield


def _kernel(call: Attention) -> Callable[[Attention], torch.Tensor]:
    query, key, value = call[:3]
    head, low = query.size(-1), query.dtype in LOWER_DTYPES
    if query.dim() != 4 or query.dtype == torch.float64:
        return Attention.in_plain_ops
    if low and call.attn_mask is None and head == key.size(-1) == value.size(-1) and head <= 256:
        return _flash
    width = 8 if low else 4  # numbers in the 16 bytes that the kernel reads at once
    fits = head % width == value.size(-1) % width == 0 and not call.enable_gqa
    return _efficient if fits else Attention.in_plain_ops


def _flash(call: Attention) -> torch.Tensor:
    head = call.query.size(-1)
    pad = -head % 8  # the kernel reads 16 bytes at a time, so torch pads what they do not divide
    query, key, value = (nn.functional.pad(t, (0, pad)) if pad else t for t in call[:3])
    scale = head**-0.5 if call.scale is None else call.scale  # of the width before padding
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return result[..., :head] if pad else result


def _efficient(call: Attention) -> torch.Tensor:
    mask, dtype = call.attn_mask, call.query.dtype
    if mask is not None:
        if mask.dtype == torch.bool:  # the kernel adds its mask to the scores
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
        mask = mask.to(dtype).expand(*call.query.shape[:-1], call.key.size(-2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        *call[:3], mask, torch.is_grad_enabled(), call.dropout_p, call.is_causal, scale=call.scale
    )[0]

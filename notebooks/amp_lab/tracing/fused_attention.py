"""Attention as a recent GPU runs it, which a torch without one does not know."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from amp_lab.backends import backend
from amp_lab.tracing.fake_device import LOWER_DTYPES
from amp_lab.tracing.ops_seen import ATTENTION, Attention


@contextmanager
def fused_attention(device_type: str) -> Iterator[None]:
    """The block in which attention runs in the kernel that torch would take on such a device.

    Flash for low precision without a mask, else the memory-efficient kernel; what neither takes is
    computed step by step. Does nothing for a device type whose attention is not known to be fused.
    Source: ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    device = backend(device_type)
    library = torch.library.Library("aten", "IMPL")  # what it registers goes when it is destroyed
    try:
        if device.fused_attention:
            # In the dispatcher, which comes after autocast, and which also sees the calls inside of
            # nn.MultiheadAttention, as a mode for functions does not.
            library.impl(ATTENTION, _attention, f"Autograd{device.key}", allow_override=True)
        yield
    finally:
        library._destroy()


def _attention(*args, **kwargs) -> torch.Tensor:
    call = Attention(*args, **kwargs)
    query, key, value = call[:3]
    head = query.size(-1)
    low = query.dtype in LOWER_DTYPES
    if query.dim() != 4 or query.dtype == torch.float64:
        return call.in_plain_ops()
    if low and call.attn_mask is None and head == key.size(-1) == value.size(-1) and head <= 256:
        return _flash(call)
    width = 8 if low else 4  # numbers in the 16 bytes that the kernel reads at once
    if head % width == value.size(-1) % width == 0 and not call.enable_gqa:
        return _efficient(call)
    return call.in_plain_ops()


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

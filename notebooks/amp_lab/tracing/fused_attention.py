"""Attention as a GPU runs it, which a torch without one does not know."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amp_lab.tracing.fake_device import LOWER_DTYPES
from amp_lab.tracing.ops_seen import Attention

_ATTENTION = nn.functional.scaled_dot_product_attention


class FusedAttention(TorchFunctionMode):
    """Runs scaled-dot-product attention in the kernel that torch takes on a recent NVIDIA GPU.

    The rules are those of torch's sdp_utils: flash for low precision without a mask, else the
    memory-efficient kernel; what neither takes is left to torch, which computes it step by step.
    Source: ATen/native/transformers/cuda/sdp_utils.cpp.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not _ATTENTION:
            return func(*args, **(kwargs or {}))
        call = Attention(*args, **(kwargs or {}))
        if torch.is_autocast_enabled("cuda"):
            call = call.autocast_to(torch.get_autocast_dtype("cuda"))
        if _flash_takes(call):
            return _flash(call)
        if _efficient_takes(call):
            return _efficient(call)
        *tensors, scale, enable_gqa = call
        return _ATTENTION(*tensors, scale=scale, enable_gqa=enable_gqa)


def _flash_takes(call: Attention) -> bool:
    head = call.query.size(-1)
    same = head == call.key.size(-1) == call.value.size(-1)
    low = call.query.dtype in LOWER_DTYPES
    return call.attn_mask is None and low and call.query.dim() == 4 and same and head <= 256


def _flash(call: Attention) -> torch.Tensor:
    head = call.query.size(-1)
    pad = -head % 8  # flash reads 16 bytes at a time, so torch pads what does not divide
    query, key, value = (nn.functional.pad(t, (0, pad)) if pad else t for t in call[:3])
    scale = head**-0.5 if call.scale is None else call.scale  # of the width before padding
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return result[..., :head] if pad else result


def _efficient_takes(call: Attention) -> bool:
    numbers = 8 if call.query.dtype in LOWER_DTYPES else 4  # in the 16 bytes that it reads at once
    aligned = call.query.size(-1) % numbers == 0 and call.value.size(-1) % numbers == 0
    is_double = call.query.dtype == torch.float64
    return call.query.dim() == 4 and aligned and not call.enable_gqa and not is_double


def _efficient(call: Attention) -> torch.Tensor:
    mask = call.attn_mask
    if mask is not None:
        if mask.dtype == torch.bool:  # the kernel adds its mask to the scores
            zeros = torch.zeros_like(mask, dtype=call.query.dtype)
            mask = zeros.masked_fill(~mask, -torch.inf)
        mask = mask.to(call.query.dtype).expand(*call.query.shape[:-1], call.key.size(-2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        *call[:3], mask, torch.is_grad_enabled(), call.dropout_p, call.is_causal, scale=call.scale
    )[0]

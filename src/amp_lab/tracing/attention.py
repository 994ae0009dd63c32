"""Attention as one op: its arguments, its FLOPs, and its kernels on a GPU not in this machine."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch._higher_order_ops.flex_attention import _permute_strides

from amp_lab.core.backends import Backend
from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.tracing.kernel_limits import require_same_dtype

ATTENTION = "scaled_dot_product_attention"
FLEX_ATTENTION = "flex_attention"

_IN_FLEX_ATTENTION = ContextVar("in flex_attention", default=False)


class Attention(NamedTuple):
    """The arguments of a call of `scaled_dot_product_attention`, in torch's order.

    Shapes: query (…, H, T, D), key (…, H, S, D), value (…, H, S, V); the output is (…, H, T, V).
    H: heads, T: queries, S: keys, D and V: sizes of a head.
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
        """Compute the output with matmuls and a softmax, without a kernel of the device."""
        *positional, scale, enable_gqa = self  # the last two are keyword-only in torch's op
        return torch.ops.aten._scaled_dot_product_attention_math(
            *positional, scale=scale, enable_gqa=enable_gqa
        )[0]  # the second result is the softmax

    def flops(self) -> int:
        """FLOPs of both matmuls, of every query with every key, also if the mask is causal."""
        queries = self.query[..., 0].numel()  # in all heads of the batch
        width = self.query.shape[-1] + self.value.shape[-1]  # D for the scores, V for the output
        return 2 * queries * self.key.shape[-2] * width


@contextmanager
def attention_of(device: Backend) -> Iterator[None]:
    """The block in which attention runs as on this type of device, even without such a device.

    If the device has fused attention, each call runs the first of `KERNELS` that the program allows
    and that takes the call. Otherwise, attention runs as matmuls and a softmax. For a CPU, nothing
    changes.
    """

    if device.is_host:  # a CPU is always there, with torch's own choice of kernel
        yield
        return

    def run_attention(*args, **kwargs) -> torch.Tensor:
        """Replaces torch's function: runs a kernel, or matmuls and a softmax."""
        call = Attention(*args, **kwargs)
        require_same_dtype(ATTENTION, [call.query, call.key, call.value])
        if not device.fused_attention and not _IN_FLEX_ATTENTION.get():
            return call.in_plain_ops()
        for kernel in KERNELS:
            if kernel.is_allowed() and kernel.takes(call):
                return kernel.run(call)
        raise RuntimeError("No available kernel. Aborting execution.")  # torch's own error

    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        _decomposed_to(run_attention),
    ):
        # Registered in the dispatcher, below autocast. A function mode would run before autocast
        # casts, and would miss the calls that nn.MultiheadAttention makes in C++.
        library.impl(ATTENTION, run_attention, f"Autograd{device.key}", allow_override=True)
        yield


@contextmanager
def running_flex_attention() -> Iterator[None]:
    """The block in which a call of attention stands for one of `flex_attention`.

    `flex_attention` has one kernel, the first of `KERNELS`, which runs only in this block.
    """
    token = _IN_FLEX_ATTENTION.set(True)
    try:
        yield
    finally:
        _IN_FLEX_ATTENTION.reset(token)


@contextmanager
def _decomposed_to(run_attention: Callable[..., torch.Tensor]) -> Iterator[None]:
    """The block in which a dispatch mode that decomposes attention calls `run_attention` instead.

    Modes decompose it under inference_mode, where no autograd kernel runs before them.
    """
    # The functions that `OpOverload.decompose` calls, by dispatch key.
    kernels = torch.ops.aten.scaled_dot_product_attention.default.py_kernels
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = kernels.get(key)
    kernels[key] = run_attention
    try:
        yield
    finally:
        del kernels[key]
        if before is not None:
            kernels[key] = before


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel of CUDA's attention: whether the program allows it, and which calls it takes."""

    is_allowed: Callable[[], bool]  # by the program, for example with `sdpa_kernel`
    takes: Callable[[Attention], bool]  # whether the kernel can run a call
    run: Callable[[Attention], torch.Tensor]  # returns the output
    source: str  # the file and the function of torch that decide which calls it takes


def _has_4d_16_bit_query(call: Attention) -> bool:
    """Whether the query is (B, H, T, D) in fp16 or bf16."""
    return call.query.dim() == 4 and call.query.dtype in LOWER_DTYPES


def _same_heads(call: Attention) -> bool:
    """Whether query, key and value have the same batch and the same number of heads."""
    return call.query.shape[:2] == call.key.shape[:2] == call.value.shape[:2]


def _heads_fit(call: Attention) -> bool:
    """Whether flash and cuDNN take these heads.

    With `enable_gqa`, keys and values may have fewer heads than queries.
    """
    return call.enable_gqa or _same_heads(call)


def _fits_flash(call: Attention) -> bool:
    """Whether flash attention takes a call: 16 bits, no mask, heads of one size up to 256.

    Besides, 4-D tensors, an Ampere GPU or later and, if causal, as many queries as keys.
    """
    if not _has_4d_16_bit_query(call) or not _is_ampere_or_later() or not _heads_fit(call):
        return False
    if call.attn_mask is not None:
        return False
    as_many_queries_as_keys = call.query.size(-2) == call.key.size(-2)
    if call.is_causal and not as_many_queries_as_keys:
        return False
    head_size = call.query.size(-1)
    if head_size > 256:
        return False
    return head_size == call.key.size(-1) == call.value.size(-1)


def _fits_efficient(call: Attention) -> bool:
    """Whether memory-efficient attention takes a call: 4-D tensors in fp32 or 16 bits.

    Keys and values need as many heads as queries. The bytes of a head have to be a multiple of 16.
    bf16 needs an Ampere GPU or later.
    """
    dtype = call.query.dtype
    if call.query.dim() != 4 or dtype == torch.float64 or not _same_heads(call):
        return False
    if dtype == torch.bfloat16 and not _is_ampere_or_later():
        return False
    values_per_read = 8 if dtype in LOWER_DTYPES else 4  # it reads 16 bytes at once
    head_sizes = (call.query.size(-1), call.value.size(-1))
    return all(size % values_per_read == 0 for size in head_sizes)


def _fits_cudnn(call: Attention) -> bool:
    """Whether cuDNN's attention takes a call: 4-D, 16 bits, heads of 8, 16, … up to 256.

    It needs an Ampere GPU or later.
    """
    if not _has_4d_16_bit_query(call) or not _is_ampere_or_later() or not _heads_fit(call):
        return False
    head_sizes = [tensor.size(-1) for tensor in (call.query, call.key, call.value)]
    return all(size % 8 == 0 and size <= 256 for size in head_sizes)


def _is_ampere_or_later() -> bool:
    """Whether torch reports a GPU of compute capability 8.0 or more; a pretended one counts."""
    return torch.cuda.get_device_capability() >= (8, 0)


def _flash(call: Attention) -> torch.Tensor:
    """Run flash attention, with heads padded as torch does; return its output."""
    head_size = call.query.size(-1)
    # The kernel reads 16 bytes at once, so torch pads other sizes of a head up to a multiple of 8.
    padding = -head_size % 8
    tensors = [call.query, call.key, call.value]
    if padding:
        tensors = [nn.functional.pad(tensor, (0, padding)) for tensor in tensors]
    scale = call.scale
    if scale is None:
        scale = 1 / math.sqrt(head_size)  # torch's default, of the size before padding
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        *tensors, call.dropout_p, call.is_causal, scale=scale
    )[0]
    if padding:
        return result[..., :head_size]
    return result


def _efficient(call: Attention) -> torch.Tensor:
    """Run memory-efficient attention; return its output."""
    returns_logsumexp = torch.is_grad_enabled()  # the log-sum-exp of the scores, for backward
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        call.query,
        call.key,
        call.value,
        _added_mask(call),
        returns_logsumexp,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
    )[0]


class _FlexKernel(torch.autograd.Function):
    """The kernels of `flex_attention` on fake tensors: the tensors that they return and save.

    Shapes are those of `Attention`. Nothing is computed, since fake tensors have no values.
    """

    @staticmethod
    def forward(ctx, query, key, value):
        """The output (…, H, T, V), with what the kernel saves for the backward pass."""
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        output = _permute_strides(output, query.stride())  # torch's op keeps the query's layout
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx, *grad_outputs):
        """The gradients of query, key and value."""
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _flex(call: Attention) -> torch.Tensor:
    """Run the kernel of `flex_attention`; return its output."""
    return _FlexKernel.apply(call.query, call.key, call.value)


def _added_mask(call: Attention) -> torch.Tensor | None:
    """The mask (…, H, T, S) as numbers to add to the scores: a bool mask becomes 0 and -inf.

    None if the call has no mask.
    """
    mask = call.attn_mask
    if mask is None:
        return None
    dtype = call.query.dtype
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    return mask.to(dtype).expand(*call.query.shape[:-1], call.key.size(-2))


_SDP_UTILS = "ATen/native/transformers/cuda/sdp_utils.cpp"
# torch asks these in this order, but prefers cuDNN on an H100. That makes no difference here: cuDNN
# saves the same tensors for backward as flash does.
KERNELS: tuple[AttentionKernel, ...] = (
    AttentionKernel(
        _IN_FLEX_ATTENTION.get,  # only a call of flex_attention takes this kernel, and always
        lambda call: True,
        _flex,
        "torch/_higher_order_ops/flex_attention.py, FlexAttentionAutogradOp",
    ),
    AttentionKernel(
        torch.backends.cuda.flash_sdp_enabled,
        _fits_flash,
        _flash,
        f"{_SDP_UTILS}, can_use_flash_attention",
    ),
    AttentionKernel(
        torch.backends.cuda.mem_efficient_sdp_enabled,
        _fits_efficient,
        _efficient,
        f"{_SDP_UTILS}, can_use_mem_efficient_attention",
    ),
    AttentionKernel(
        torch.backends.cuda.cudnn_sdp_enabled,
        _fits_cudnn,
        _efficient,  # cuDNN's kernel saves as much for backward
        f"{_SDP_UTILS}, can_use_cudnn_attention",
    ),
    AttentionKernel(
        torch.backends.cuda.math_sdp_enabled,
        lambda call: True,
        Attention.in_plain_ops,
        f"{_SDP_UTILS}, select_sdp_backend",
    ),
)
"""The kernels of attention on CUDA; the first that is allowed and takes a call runs it."""

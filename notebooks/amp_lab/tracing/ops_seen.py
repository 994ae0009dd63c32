"""What every tracer asks of an op: whose memory it is, views, FLOPs, and attention."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

ATTENTION = "scaled_dot_product_attention"

_MEMORY_ONLY = {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided"}


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored values of a sparse tensor; any other as it is."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.values()
    return tensor


def storage_key(tensor: torch.Tensor) -> int | None:
    """What tells the tensor's storage from all others that live; None for oneDNN's, without one.

    It is the address of the storage itself, since fake tensors, and those on ``meta``, have no
    data. When the storage ends, another may get the same: keep it, or a weak reference.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        values = stored_values(tensor)
        return None if values is tensor else storage_key(values)


def computes_nothing(func: OpOverload) -> bool:
    """Whether an op returns a view, or memory that is not written yet."""
    return func.is_view or func._schema.name.removeprefix("aten::") in _MEMORY_ONLY


def flops(func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Multiplications and additions of a matrix product, convolution or attention kernel; else 0.

    Attention counts in full, although a causal kernel may leave out up to half of it.
    """
    packet = func._overloadpacket
    if packet in FLOP_FORMULAS:
        formula = shape_wrapper(FLOP_FORMULAS[packet])
    else:
        formula = flop_registry.get(packet)  # whose formulas are wrapped already
    return formula(*args, **kwargs, out_val=out) if formula else 0


def _product_flops(left, right, out_shape=None) -> int:
    return 2 * math.prod(left)  # a matrix or a vector, times a vector


def _added_product_flops(added, left, right, out_shape=None, **scales) -> int:
    return 2 * math.prod(left) * math.prod(right[2:])


def _convolution_backward_flops(gradient, inputs, weight, *more, out_shape=None, **settings) -> int:
    """FLOPs for the gradients that are wanted, of which torch's own count leaves out the groups."""
    # As the op's schema has them: bias sizes, stride, padding, dilation, transposed, …
    transposed, wanted = more[4], more[7]
    # Each takes what the forward pass does: every weight meets every pixel of the output, or of the
    # input if transposed.
    pixels = inputs if transposed else gradient  # (N, C, …)
    forward = 2 * pixels[0] * math.prod(pixels[2:]) * math.prod(weight)
    return forward * (wanted[0] + wanted[1])


# What torch's `flop_registry` lacks or counts wrongly, for `FlopCounterMode(custom_mapping=…)` too.
FLOP_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mv: _product_flops,
    torch.ops.aten.dot: _product_flops,
    torch.ops.aten.addmv: _added_product_flops,
    torch.ops.aten.addbmm: _added_product_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
}


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

    def autocast_to(self, dtype: torch.dtype | None) -> "Attention":
        """The same call with inputs as autocast casts them: to `dtype`, but for fp64; None: off.

        A mask that is not of truth values has to be in the dtype of the query.
        """
        query, key, value, mask = self[:4]
        if dtype is not None:
            query, key, value = (
                t if t.dtype is torch.float64 else t.to(dtype) for t in (query, key, value)
            )
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        return self._replace(query=query, key=key, value=value, attn_mask=mask)

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

"""The products of a model with its parameters, handed to a function of ours while it runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Layer:
    """A product of ``(rows, inner)`` values with an ``(outer, inner)`` parameter."""

    name: str  # of the module, or of the parameter where that is no layer of torch
    kind: str  # "linear", "convolution" or "grouped"
    inner: int
    outer: int

    def misfit(self, inner_multiple: int, outer_multiple: int) -> str:
        """Why kernels that take multiples of these cannot multiply it; empty if they can."""
        if self.inner % inner_multiple:
            return f"{self.inner} to {self.outer}: no multiple of {inner_multiple}"
        if self.outer % outer_multiple:
            return f"{self.inner} to {self.outer}: no multiple of {outer_multiple}"
        return ""


Product = Callable[[Tensor, Tensor], Tensor]
"""Of ``(rows, inner)`` and ``(outer, inner)``, giving ``(rows, outer)``."""


@contextlib.contextmanager
def intercepted(
    model: nn.Module, product_of: Callable[[Layer], Product | None]
) -> Iterator[dict[str, dict[str, None]]]:
    """The block in which products with the model's parameters are `product_of`'s.

    So are those with views of them, such as transposed ones and single experts, and convolutions
    of one and two dimensions, as products of their patches. Where it gives None, torch computes
    them. What multiplies in another way is left to torch, and the dict names its weights by op:
    recurrent layers, ``einsum``, and weights that are computed of parameters first, among others.
    """
    with _Interception(model, product_of) as mode:
        yield mode.others


class _Interception(TorchFunctionMode):
    def __init__(self, model: nn.Module, product_of: Callable[[Layer], Product | None]):
        super().__init__()
        self._product_of = product_of
        self.others: dict[str, dict[str, None]] = {}
        self._asked = False  # whether the op that runs was offered to `product_of`
        # The parameter that a tensor is, or is computed of alone; "" is for buffers and constants.
        self._names = WeakTensorKeyDictionary(dict.fromkeys(model.buffers(), ""))
        self._names.update({p: name for name, p in model.named_parameters()})
        self._layers = WeakTensorKeyDictionary()
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
                self._layers[module.weight] = name or type(module).__name__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = getattr(func, "__name__", "").strip("_")
        self._asked = False
        out = None
        if op in _HANDLERS and len(args) > 1:
            out = _HANDLERS[op](self, *args, **kwargs)
        if out is None:
            out = func(*args, **kwargs)
        self._follow(op, _tensors(args, kwargs), out)
        return out

    def _follow(self, op: str, tensors: list[Tensor], out: Any) -> None:
        """Note what a result is computed of, and a product that is left to torch."""
        picks_experts = op in ("getitem", "index_select") and tensors[0].dim() > 2  # by token
        followed = tensors[:1] if picks_experts else tensors
        names = [self._names.get(_root(tensor)) for tensor in followed]
        if None not in names and op not in _ACTIVATIONS:
            first_name = next(filter(None, names), "")
            self._names.update(dict.fromkeys(_tensors(out), first_name))
        elif names[:1] == [""] and (op == "setitem" or out is tensors[0]):
            del self._names[_root(tensors[0])]  # an activation was written into it
        if op not in _PRODUCTS or self._asked:
            return
        for tensor, name in zip(followed, names, strict=True):
            if name and tensor.dim() > 1:
                self.others.setdefault(op, {})[name] = None
                return

    def _chosen(self, values: Tensor, weight: Tensor, *size: Any) -> Product | None:
        root = _root(weight)
        if not isinstance(root, nn.Parameter) or root not in self._names:
            return None
        self._asked = True
        if not values.numel():
            return None
        name = self._layers.get(weight) or self._names[root]
        return self._product_of(Layer(name, *size))

    # What each of these does not compute, torch does: it then returns None.

    def linear(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if weight.dim() != 2:
            return None
        product = self._chosen(values, weight, "linear", *weight.shape[::-1])
        return _on_rows(product, values, weight, bias) if product else None

    def matmul(self, values: Any, weight: Any, bias: Any = None, **options: Any) -> Tensor | None:
        """`weight` lies as GPT-2's do, ``(in, out)``."""
        if options or not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        product = self._chosen(values, weight, "linear", *weight.shape)
        return _on_rows(product, values, weight.T, bias) if product else None

    def addmm(self, bias: Tensor, values: Any, weight: Any = None, **scales: Any) -> Tensor | None:
        return self.matmul(values, weight, bias, **scales)

    def convolution(
        self, values: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor | None:  # fmt: skip
        inner, outer = weight[0].numel(), len(weight) // groups
        product = self._chosen(values, weight, "convolution", inner, outer)
        if product is None:
            return None
        is_batch = values.dim() == weight.dim()
        image = values if is_batch else values[None]
        kernel = weight
        dimensions = weight.dim() - 2
        if dimensions == 1:  # as an image of height 1
            image = image[:, :, None]
            kernel = kernel[:, :, None]
        around = 0 if isinstance(padding, str) else padding
        sizes = (
            _of_two_dimensions(stride, dimensions, 1),
            _of_two_dimensions(dilation, dimensions, 1),
            _of_two_dimensions(around, dimensions, 0),
        )
        if padding == "same":
            image = F.pad(image, _same(kernel.shape[2:], sizes[1]))
        out = _of_patches(product, image, kernel, sizes, groups)
        if dimensions == 1:
            out = out[:, :, 0]
        if bias is not None:
            out = out + bias.view(-1, *[1] * dimensions)
        return out if is_batch else out[0]

    def grouped(self, values: Tensor, weights: Tensor, offs: Any = None, **options: Any) -> Any:
        plain = offs is not None and all(option is None for option in options.values())
        if not plain or values.dim() != 2 or weights.dim() != 3:
            return None
        product = self._chosen(values, weights, "grouped", *weights.shape[1:])
        if product is None:
            return None
        parts = torch.tensor_split(values, offs.tolist())  # the last lies behind all groups
        pairs = zip(parts, weights, strict=False)
        out = [product(part, weight.T) for part, weight in pairs if len(part)]
        return torch.cat([*out, values.new_zeros(len(parts[-1]), weights.shape[2])]).to(values)


_HANDLERS: dict[str, Callable[..., Tensor | None]] = {
    "linear": _Interception.linear, "matmul": _Interception.matmul, "mm": _Interception.matmul,
    "addmm": _Interception.addmm, "grouped_mm": _Interception.grouped,
    "conv1d": _Interception.convolution, "conv2d": _Interception.convolution,
}  # fmt: skip
_PRODUCTS = {
    *_HANDLERS, "rmatmul", "bmm", "baddbmm", "addbmm", "einsum", "inner", "tensordot", "bilinear",
    "multi_dot", "chain_matmul", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip
_ACTIVATIONS = {*_PRODUCTS, "embedding"} - {"matmul", "mm", "bmm", "einsum"}  # of whatever it is


def _root(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, if it is one."""
    return tensor if tensor._base is None else tensor._base


def _on_rows(product: Product, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = product(values.reshape(-1, values.shape[-1]), weight)
    out = out.view(*values.shape[:-1], len(weight))
    return out if bias is None else out + bias


def _of_patches(
    product: Product, image: Tensor, kernel: Tensor, sizes: Sequence[tuple], groups: int
) -> Tensor:
    """A convolution as a product of patches, ``(positions, in·height·width)``, for each group."""
    (stride, dilation, padding), window = sizes, kernel.shape[2:]
    high, wide = (
        (image.shape[2 + i] + 2 * padding[i] - dilation[i] * (window[i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    )
    patches = F.unfold(image, window, dilation=dilation, padding=padding, stride=stride)
    rows = patches.transpose(1, 2).flatten(0, 1)  # (batch * positions, channels * window)
    pairs = zip(rows.chunk(groups, 1), kernel.flatten(1).chunk(groups), strict=True)
    out = torch.cat([product(part, weight) for part, weight in pairs], 1)
    return out.view(len(image), high * wide, -1).transpose(1, 2).unflatten(2, (high, wide))


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _of_two_dimensions(value: int | Sequence[int], dimensions: int, least: int) -> tuple[int, ...]:
    """A size for height and width, of one for all `dimensions` or for each; `least` for height."""
    values = (value,) if isinstance(value, int) else tuple(value)
    own = values * (dimensions // len(values))
    return (least,) * (2 - dimensions) + own


def _same(window: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """What keeps the size, as `torch.nn.functional.pad` takes it: the last dimension first."""
    wanted = [step * (size - 1) for size, step in zip(window, dilation, strict=True)]
    return [part for whole in reversed(wanted) for part in (whole // 2, whole - whole // 2)]

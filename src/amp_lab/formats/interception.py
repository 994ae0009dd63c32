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
        for name, parameter in model.named_parameters():
            self._names[parameter] = name
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
        followed = tensors
        if op in ("getitem", "index_select") and tensors[0].dim() > 2:  # picks experts by token
            followed = tensors[:1]
        names = [self._names.get(_root(tensor)) for tensor in followed]
        if None not in names and op not in _ACTIVATIONS:
            first_name = next(filter(None, names), "")
            for result in _tensors(out):
                self._names[result] = first_name
        elif names[:1] == [""]:
            is_written = op == "setitem" or out is tensors[0]
            if is_written:  # by an activation
                del self._names[_root(tensors[0])]
        if op not in _PRODUCTS or self._asked:
            return
        for tensor, name in zip(followed, names, strict=True):
            if name and tensor.dim() > 1:
                self.others.setdefault(op, {})[name] = None
                return

    def _product_for(
        self, values: Tensor, weight: Tensor, kind: str, inner: int, outer: int
    ) -> Product | None:
        """What `product_of` gives for a weight; None if it is no parameter of the model."""
        root = _root(weight)
        if not isinstance(root, nn.Parameter) or root not in self._names:
            return None
        self._asked = True
        if not values.numel():
            return None
        name = self._layers.get(weight) or self._names[root]
        return self._product_of(Layer(name, kind, inner, outer))

    # What each of these does not compute, torch does: it then returns None.

    def linear(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if weight.dim() != 2:
            return None
        outer, inner = weight.shape
        product = self._product_for(values, weight, "linear", inner, outer)
        if product is None:
            return None
        return _on_rows(product, values, weight, bias)

    def matmul(self, values: Any, weight: Any, bias: Any = None, **options: Any) -> Tensor | None:
        """`weight` lies as GPT-2's do, ``(in, out)``."""
        if options or not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        inner, outer = weight.shape
        product = self._product_for(values, weight, "linear", inner, outer)
        if product is None:
            return None
        return _on_rows(product, values, weight.T, bias)

    def addmm(self, bias: Tensor, values: Any, weight: Any = None, **scales: Any) -> Tensor | None:
        return self.matmul(values, weight, bias, **scales)

    def convolution(
        self, values: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor | None:  # fmt: skip
        inner = weight[0].numel()
        outer = len(weight) // groups
        product = self._product_for(values, weight, "convolution", inner, outer)
        if product is None:
            return None
        image = values
        kernel = weight
        is_batch = values.dim() == weight.dim()
        if not is_batch:
            image = image[None]
        dimensions = weight.dim() - 2
        if dimensions == 1:  # as an image of height 1
            image = image[:, :, None]
            kernel = kernel[:, :, None]
        strides = _of_two_dimensions(stride, dimensions, 1)
        dilations = _of_two_dimensions(dilation, dimensions, 1)
        if padding == "same":
            image = F.pad(image, _same_padding(kernel.shape[2:], dilations))
        if isinstance(padding, str):  # "same" was done, and "valid" is none
            padding = 0
        paddings = _of_two_dimensions(padding, dimensions, 0)
        out = _multiply_patches(product, image, kernel, groups, strides, dilations, paddings)
        if dimensions == 1:
            out = out[:, :, 0]
        if bias is not None:
            ones = [1] * dimensions
            out = out + bias.view(-1, *ones)
        return out if is_batch else out[0]

    def grouped(self, values: Tensor, weights: Tensor, offs: Any = None, **options: Any) -> Any:
        has_options = any(option is not None for option in options.values())
        if offs is None or has_options or values.dim() != 2 or weights.dim() != 3:
            return None
        _, inner, outer = weights.shape
        product = self._product_for(values, weights, "grouped", inner, outer)
        if product is None:
            return None
        groups = torch.tensor_split(values, offs.tolist())  # the last lies behind all experts
        pairs = zip(groups, weights, strict=False)
        out = [product(rows, weight.T) for rows, weight in pairs if len(rows)]
        out.append(values.new_zeros(len(groups[-1]), outer))
        return torch.cat(out).to(values)


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
    if tensor._base is None:
        return tensor
    return tensor._base


def _on_rows(product: Product, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    *batch, inner = values.shape
    rows = values.reshape(-1, inner)
    out = product(rows, weight).view(*batch, len(weight))
    if bias is None:
        return out
    return out + bias


def _multiply_patches(
    product: Product, image: Tensor, kernel: Tensor, groups: int,
    stride: tuple[int, ...], dilation: tuple[int, ...], padding: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """A convolution as a product of patches, ``(positions, in·height·width)``, for each group."""
    window = kernel.shape[2:]
    patches = F.unfold(image, window, dilation=dilation, padding=padding, stride=stride)
    rows = patches.transpose(1, 2).flatten(0, 1)  # (batch * positions, channels * window)
    weights = kernel.flatten(1).chunk(groups)
    pairs = zip(rows.chunk(groups, 1), weights, strict=True)
    out = torch.cat([product(group, weight) for group, weight in pairs], 1)
    channels_last = out.view(len(image), -1, len(kernel))
    height, width = map(_positions, image.shape[2:], window, stride, dilation, padding)
    return channels_last.transpose(1, 2).unflatten(2, (height, width))


def _positions(size: int, window: int, stride: int, dilation: int, padding: int) -> int:
    """Where a window can lie along one dimension of an image."""
    reach = dilation * (window - 1) + 1
    return (size + 2 * padding - reach) // stride + 1


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _of_two_dimensions(value: int | Sequence[int], dimensions: int, least: int) -> tuple[int, ...]:
    """A size for height and width, of one for all `dimensions` or for each; `least` for height."""
    values = (value,) if isinstance(value, int) else tuple(value)
    for_each = values * (dimensions // len(values))
    return (least,) * (2 - dimensions) + for_each


def _same_padding(window: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """What keeps the size, as `torch.nn.functional.pad` takes it: the last dimension first."""
    padding = []
    for size, step in zip(reversed(window), reversed(dilation), strict=True):
        both = step * (size - 1)
        before = both // 2
        padding += [before, both - before]
    return padding

"""The products of a model with its parameters, handed to a function of ours while it runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from amp_lab.formats.scaling import Format


@dataclass(frozen=True)
class Layer:
    """A product of ``(rows, inner)`` values with an ``(outer, inner)`` parameter."""

    name: str  # of the module, or of the parameter where that is no layer of torch
    kind: str  # "linear", "convolution" or "grouped"
    inner: int
    outer: int

    def misfit(self, form: Format) -> str:
        """Why kernels of a format cannot multiply it; empty if they can."""
        if self.inner % form.multiple or self.outer % form.multiple:
            return f"{self.inner} to {self.outer}: no multiple of {form.multiple}"
        return ""


Product = Callable[[Tensor, Tensor], Tensor]
"""Of ``(rows, inner)`` and ``(outer, inner)``, giving ``(rows, outer)``."""


@contextlib.contextmanager
def intercepted(
    model: nn.Module, product_of: Callable[[Layer], Product | None]
) -> Iterator[set[str]]:
    """The block in which products of the model's 2-D and 4-D parameters are `product_of`'s.

    Where that gives None, torch computes them. Convolutions of one and two dimensions become
    products of their patches. What multiplies in another way is left to torch, and the set names
    it: transposed and 3-D convolutions, and ``nn.MultiheadAttention``, which multiplies inside one
    function.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            names[id(module.weight)] = name or type(module).__name__
    mode = _Interception(names, product_of)
    with mode:
        yield mode.others


class _Interception(TorchFunctionMode):
    def __init__(self, names: dict[int, str], product_of: Callable[[Layer], Product | None]):
        super().__init__()
        self._names, self._product_of, self.others = names, product_of, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OTHERS:
            self.others.add(_OTHERS[func])
        found = func in _HANDLERS and _HANDLERS[func](self, *args, **kwargs)
        return found if isinstance(found, Tensor) else func(*args, **kwargs)

    def _chosen(self, weight: Tensor, kind: str, inner: int, outer: int) -> Product | None:
        name = self._names.get(id(weight))
        return self._product_of(Layer(name, kind, inner, outer)) if name is not None else None

    # What each of these does not compute, torch does: it then returns None.

    def linear(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        product = self._chosen(weight, "linear", *weight.shape[::-1]) if weight.dim() == 2 else None
        return _on_rows(product, values, weight, bias) if product else None

    def matmul(self, values: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
        """`weight` lies as GPT-2's do, ``(in, out)``."""
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            return None
        product = self._chosen(weight, "linear", *weight.shape)
        return _on_rows(product, values, weight.T, bias) if product else None

    def addmm(self, bias: Tensor, values: Tensor, weight: Tensor, **scales: Any) -> Tensor | None:
        return None if scales else self.matmul(values, weight, bias)

    def convolution(self, values: Tensor, weight: Tensor, *options: Any) -> Tensor | None:
        defaults: tuple[Any, ...] = (None, 1, 0, 1, 1)
        bias, stride, padding, dilation, groups = (*options, *defaults[len(options) :])
        inner, outer = weight[0].numel(), len(weight) // groups
        product = self._chosen(weight, "convolution", inner, outer)
        if product is None:
            return None
        one = weight.dim() == 3  # of one dimension: an image of height 1
        batched = values.dim() == weight.dim()
        image, kernel = (values if batched else values[None]), weight
        around = 0 if isinstance(padding, str) else padding
        of_two = ((stride, 1), (dilation, 1), (around, 0))
        size = [(*([least] * one), *_sized(x, 2 - one)) for x, least in of_two]
        image, kernel = (image[:, :, None], kernel[:, :, None]) if one else (image, kernel)
        if padding == "same":
            image = nn.functional.pad(image, _same(kernel.shape[2:], size[1]))
        out = _of_patches(product, image, kernel, size, groups)
        out = out[:, :, 0] if one else out
        out = out if bias is None else out + bias.view(-1, *[1] * (weight.dim() - 2))
        return out if batched else out[0]

    def grouped(self, values: Tensor, weights: Tensor, **options: Any) -> Tensor | None:
        ends, plain = options.get("offs"), not (options.get("bias") or options.get("out_dtype"))
        if ends is None or not plain or values.dim() != 2 or weights.dim() != 3:
            return None
        product = self._chosen(weights, "grouped", *weights.shape[1:])
        if product is None:
            return None
        parts = torch.tensor_split(values, ends.tolist())  # the last lies behind all groups
        out = [product(part, weight.T) for part, weight in zip(parts, weights, strict=False)]
        return torch.cat([*out, values.new_zeros(len(parts[-1]), weights.shape[2])]).to(values)


_HANDLERS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _Interception.linear,
    torch.matmul: _Interception.matmul,
    Tensor.matmul: _Interception.matmul,
    Tensor.__matmul__: _Interception.matmul,
    torch.addmm: _Interception.addmm,
    torch.conv1d: _Interception.convolution,
    torch.conv2d: _Interception.convolution,
    torch._grouped_mm: _Interception.grouped,
}
_OTHERS = {
    torch.conv3d: "3-D convolutions",
    torch.conv_transpose1d: "transposed convolutions",
    torch.conv_transpose2d: "transposed convolutions",
    torch.conv_transpose3d: "transposed convolutions",
    F.multi_head_attention_forward: "nn.MultiheadAttention",
}


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


def _sized(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * (dimensions // len(values))


def _same(window: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """What keeps the size, as `torch.nn.functional.pad` takes it: the last dimension first."""
    wanted = [step * (size - 1) for size, step in zip(window, dilation, strict=True)]
    return [part for whole in reversed(wanted) for part in (whole // 2, whole - whole // 2)]

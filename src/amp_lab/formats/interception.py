"""Replace the matmuls of a model that use its parameters by other functions while it runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils.weak import WeakTensorKeyDictionary

from amp_lab.core.tensors import tensors_in


@dataclass(frozen=True)
class Layer:
    """A matmul of ``(rows, inner)`` values with an ``(outer, inner)`` parameter."""

    name: str  # of the layer, such as "blocks.0.up"; of the parameter if it is in no nn.Linear etc.
    kind: str  # "linear", "convolution" or "grouped"
    inner: int  # the size that is summed over
    outer: int  # the other size of the parameter: values in a row of the result

    def misfit(self, inner_multiple: int, outer_multiple: int) -> str:
        """The reason why kernels with these multiples cannot run the layer; empty if they can."""
        if self.inner % inner_multiple:
            return f"its input size {self.inner} is not a multiple of {inner_multiple}"
        if self.outer % outer_multiple:
            return f"its output size {self.outer} is not a multiple of {outer_multiple}"
        return ""


Matmul = Callable[[Tensor, Tensor], Tensor]
"""A function that multiplies ``(rows, inner)`` and ``(outer, inner)`` to ``(rows, outer)``."""


@contextlib.contextmanager
def intercepted(
    model: nn.Module, choose_matmul: Callable[[Layer], Matmul | None]
) -> Iterator[dict[str, dict[str, None]]]:
    """In the block, multiply by the model's parameters with the functions of `choose_matmul`.

    `choose_matmul` returns the function for a layer, or None to let torch multiply. The block
    replaces matmuls with a parameter or with a view of a parameter, such as a transposed parameter
    or a single expert. It also replaces convolutions of one and two dimensions, as matmuls of their
    patches.

    Yields the weights with matmuls that cannot be replaced, by op, such as
    ``{"einsum": {"w": None}}``, where the inner dict is an ordered set. Examples are recurrent
    layers, ``einsum``, and weights that are computed from parameters.
    """
    with _Interception(model, choose_matmul) as mode:
        yield mode.unreplaced


class _Interception(TorchFunctionMode):
    """The mode of `intercepted`: it sees each call of a torch function by the model."""

    def __init__(self, model: nn.Module, choose_matmul: Callable[[Layer], Matmul | None]):
        super().__init__()
        self._choose_matmul = choose_matmul
        self.unreplaced: dict[str, dict[str, None]] = {}
        self._is_replaceable = False  # whether the current op multiplies by a parameter's view
        # The name of the parameter that a tensor is computed from; "" if from buffers and constants
        # alone. Tensors that depend on the model's input have no entry.
        self._sources = WeakTensorKeyDictionary(dict.fromkeys(model.buffers(), ""))
        for name, parameter in model.named_parameters():
            self._sources[parameter] = name
        self._layer_names = WeakTensorKeyDictionary()  # by weight
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
                self._layer_names[module.weight] = name or type(module).__name__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, by a handler if it has one that does not return None."""
        kwargs = kwargs or {}
        op = getattr(func, "__name__", "").strip("_")  # "matmul", also for `__matmul__`
        if isinstance(func, OpOverload) and func.namespace != "aten":
            op = func._schema.name  # "mine::op", which may multiply
        self._is_replaceable = False  # a handler may change it
        out = None
        if op in _HANDLERS and len(args) > 1:  # with operands as keywords torch computes it
            out = _HANDLERS[op](self, *args, **kwargs)
        if out is None:
            out = func(*args, **kwargs)
        self._track(op, tensors_in((args, kwargs)), out)
        return out

    def _track(self, op: str, tensors: list[Tensor], out: Any) -> None:
        """Note what the results of an op are computed from, and a matmul that is left to torch.

        `_sources` has the name of a parameter for each tensor that is computed from it, and "" for
        a constant. A tensor that depends on the input is not in it.
        """
        operands = tensors
        # Picks experts by token: the result is made of parameters, wherever the indices come from.
        if op in ("getitem", "index_select") and tensors[0].dim() > 2:
            operands = tensors[:1]
        names = [self._sources.get(_root(tensor)) for tensor in operands]
        # Computed from parameters and constants alone: the results are weights or constants.
        if None not in names and op not in _ACTIVATION_OPS:
            parameter_names = [name for name in names if name]
            for result in tensors_in(out):
                self._sources[result] = parameter_names[0] if parameter_names else ""
        elif names[:1] == [""]:
            # A constant into which an activation is written depends on the input from now on.
            is_written = op == "setitem" or out is tensors[0]
            if is_written:
                del self._sources[_root(tensors[0])]
        # An op of torch.library may multiply; torch's ops do so only if they are in `_MATMULS`.
        is_custom_op_on_activation = "::" in op and None in names
        is_unreplaced_matmul = op in _MATMULS and not self._is_replaceable
        if not is_custom_op_on_activation and not is_unreplaced_matmul:
            return
        for tensor, name in zip(operands, names, strict=True):
            if name and tensor.dim() > 1:
                self.unreplaced.setdefault(op, {})[name] = None  # adds it to an ordered set
                return  # only the first weight of a call is named

    def _matmul_for(
        self, values: Tensor, weight: Tensor, kind: str, inner: int, outer: int
    ) -> Matmul | None:
        """Return the function of `choose_matmul` for a weight, or None to let torch multiply.

        torch multiplies if the weight is neither a parameter nor a view of one, if it is made of
        other tensors, as quantised weights are, or if there are no values. For any other parameter
        or a view of one, sets `_is_replaceable`. `kind`, `inner` and `outer` are those of `Layer`.
        """
        root = _root(weight)
        if not isinstance(root, nn.Parameter) or root not in self._sources or is_wrapper(root):
            return None
        self._is_replaceable = True
        if not values.numel():
            return None
        name = self._layer_names.get(weight) or self._sources[root]
        return self._choose_matmul(Layer(name, kind, inner, outer))

    # --- The handlers of ops, with the arguments of the torch function. They return the result, or
    # None to let torch compute it.

    def linear(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Compute ``values @ weight.T + bias``, where the weight is ``(out, in)``.

        Returns None to let torch compute it, as all handlers do.
        """
        if weight.dim() != 2:
            return None
        outer, inner = weight.shape
        matmul = self._matmul_for(values, weight, "linear", inner, outer)
        if matmul is None:
            return None
        return _on_rows(matmul, values, weight, bias)

    def matmul(self, values: Any, weight: Any, bias: Any = None, **options: Any) -> Tensor | None:
        """Compute ``values @ weight + bias``, where the weight is ``(in, out)`` as in GPT-2.

        Returns None to let torch compute it.
        """
        if options or not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        inner, outer = weight.shape
        matmul = self._matmul_for(values, weight, "linear", inner, outer)
        if matmul is None:
            return None
        return _on_rows(matmul, values, weight.T, bias)

    def addmm(self, bias: Tensor, values: Any, weight: Any = None, **scales: Any) -> Tensor | None:
        """Compute ``values @ weight + bias``; None with `scales` (``alpha``, ``beta``)."""
        return self.matmul(values, weight, bias, **scales)

    def convolution(
        self, values: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor | None:  # fmt: skip
        """Compute a convolution of one or two dimensions as matmuls of its patches.

        Returns None to let torch compute it.
        """
        inner = weight[0].numel()  # channels of a group, times the size of the window
        outer = len(weight) // groups
        matmul = self._matmul_for(values, weight, "convolution", inner, outer)
        if matmul is None:
            return None
        image = values
        kernel = weight
        is_batch = values.dim() == weight.dim()
        if not is_batch:
            image = image[None]
        dimensions = weight.dim() - 2
        if dimensions == 1:  # a sequence becomes an image of height 1
            image = image[:, :, None]
            kernel = kernel[:, :, None]
        strides = _height_and_width(stride, dimensions, height=1)
        dilations = _height_and_width(dilation, dimensions, height=1)
        if padding == "same":
            image = F.pad(image, _same_padding(kernel.shape[2:], dilations))
        if isinstance(padding, str):  # "same" has been applied, and "valid" means no padding
            padding = 0
        paddings = _height_and_width(padding, dimensions, height=0)
        out = _multiply_patches(matmul, image, kernel, groups, strides, dilations, paddings)
        if dimensions == 1:
            out = out[:, :, 0]
        if bias is not None:
            ones = [1] * dimensions  # to broadcast over the positions
            out = out + bias.view(-1, *ones)
        return out if is_batch else out[0]

    def grouped(self, values: Tensor, weights: Tensor, offs: Any = None, **options: Any) -> Any:
        """Multiply groups of rows, such as the tokens of each expert, by one weight each.

        `weights` are ``(groups, in, out)``, and `offs` the index behind the last row of each group.
        """
        has_options = any(option is not None for option in options.values())
        # Only this form is that of tokens with experts; torch computes the others.
        if offs is None or has_options or values.dim() != 2 or weights.dim() != 3:
            return None
        _, inner, outer = weights.shape
        matmul = self._matmul_for(values, weights, "grouped", inner, outer)
        if matmul is None:
            return None
        # The last piece has the rows behind all groups, which have no weight and become zeros.
        groups = torch.tensor_split(values, offs.tolist())
        pairs = zip(groups, weights, strict=False)
        out = [matmul(rows, weight.T) for rows, weight in pairs if len(rows)]
        out.append(values.new_zeros(len(groups[-1]), outer))
        return torch.cat(out).to(values)


_HANDLERS: dict[str, Callable[..., Tensor | None]] = {
    "linear": _Interception.linear, "matmul": _Interception.matmul, "mm": _Interception.matmul,
    "addmm": _Interception.addmm, "grouped_mm": _Interception.grouped,
    "conv1d": _Interception.convolution, "conv2d": _Interception.convolution,
}  # fmt: skip
"""The handler of each op that can be replaced."""
_MATMULS = {
    *_HANDLERS, "rmatmul", "bmm", "baddbmm", "addbmm", "einsum", "inner", "tensordot", "bilinear",
    "multi_dot", "chain_matmul", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip
"""Ops that multiply: those with a weight that no handler replaces are `unreplaced`."""
_ACTIVATION_OPS = {*_MATMULS, "embedding"} - {"matmul", "mm", "bmm", "einsum"}
"""Ops whose result is an activation even if all operands are parameters or constants. The others,
such as ``matmul``, may compute a weight from parameters."""


def _root(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself."""
    if tensor._base is None:
        return tensor
    return tensor._base


def _on_rows(matmul: Matmul, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply values ``(…, inner)`` by a weight ``(outer, inner)``, and add the bias."""
    *batch, inner = values.shape
    rows = values.reshape(-1, inner)
    out = matmul(rows, weight).view(*batch, len(weight))
    if bias is None:
        return out
    return out + bias


def _multiply_patches(
    matmul: Matmul, image: Tensor, kernel: Tensor, groups: int,
    stride: tuple[int, ...], dilation: tuple[int, ...], padding: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """A convolution of two dimensions as matmuls of patches ``(positions, in·height·width)``.

    `image` is ``(batch, in, height, width)``, and `kernel` the weight of `conv2d`. Each group of
    channels is one matmul. The result is ``(batch, out, height, width)``.
    """
    window = kernel.shape[2:]
    patches = F.unfold(image, window, dilation=dilation, padding=padding, stride=stride)
    rows = patches.transpose(1, 2).flatten(0, 1)  # (batch * positions, channels * window)
    weights = kernel.flatten(1).chunk(groups)
    pairs = zip(rows.chunk(groups, 1), weights, strict=True)
    out = torch.cat([matmul(group_rows, weight) for group_rows, weight in pairs], 1)
    channels_last = out.view(len(image), -1, len(kernel))  # (batch, positions, out)
    height, width = map(_positions, image.shape[2:], window, stride, dilation, padding)
    return channels_last.transpose(1, 2).unflatten(2, (height, width))


def _positions(size: int, window: int, stride: int, dilation: int, padding: int) -> int:
    """The number of positions of a window along one dimension of an image: the output's size."""
    dilated_window = dilation * (window - 1) + 1
    return (size + 2 * padding - dilated_window) // stride + 1


def _height_and_width(value: int | Sequence[int], dimensions: int, height: int) -> tuple[int, ...]:
    """The setting of a convolution, such as its stride, for height and width.

    `value` is one number for all dimensions, or one for each. A convolution of one dimension has
    only a width, and gets this `height`.
    """
    values = (value,) if isinstance(value, int) else tuple(value)
    per_dimension = values * (dimensions // len(values))  # repeats a single number
    return (height,) * (2 - dimensions) + per_dimension


def _same_padding(window: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """The padding that keeps the size of an image, for `torch.nn.functional.pad`.

    `window` and `dilation` are each ``(height, width)``. The padding is ``[left, right, top,
    bottom]``: the last dimension comes first.
    """
    padding = []
    for size, step in zip(reversed(window), reversed(dilation), strict=True):
        total = step * (size - 1)
        before = total // 2
        padding += [before, total - before]
    return padding

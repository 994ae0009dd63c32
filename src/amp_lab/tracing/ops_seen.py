"""The facts about an op that tracers need: does it compute values, its autocast rule, its FLOPs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, shape_wrapper

from amp_lab.core.backends import backend
from amp_lab.tracing.records import PlainArgument

# Ops that return memory without computing anything, and that torch does not mark as views.
_MEMORY_ONLY = {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided"}
_PLAIN_TYPES = {bool, int, float, type(None), torch.dtype}


def op_name(func: OpOverload) -> str:
    """The name of an op without its namespace and overload: ``mm`` for ``aten::mm.out``."""
    return func._schema.name.rpartition("::")[2]


def plain_arguments(func: OpOverload, args: tuple, kwargs: dict) -> dict[str, PlainArgument]:
    """The arguments of a call of an op that `plain_values` keeps, by their names in the schema.

    For ``cumsum(x, 1)``, the result is ``{"dim": 1}``. Arguments that were not given are left out.
    """
    names = _argument_names(func)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return plain_values(arguments)


def plain_values(arguments: dict[str, Any]) -> dict[str, PlainArgument]:
    """The arguments that are numbers, booleans, dtypes, None or lists of whole numbers.

    Lists become tuples.
    """
    values: dict[str, PlainArgument] = {}
    for name, value in arguments.items():
        if type(value) in _PLAIN_TYPES:
            values[name] = value
        elif type(value) in (list, tuple) and all(type(item) is int for item in value):
            values[name] = tuple(value)
    return values


@functools.cache  # reading a schema takes several microseconds
def _argument_names(func: OpOverload) -> tuple[str, ...]:
    """The names of an op's arguments, in the order of its schema."""
    return tuple(argument.name for argument in func._schema.arguments)


def computes_nothing(func: OpOverload) -> bool:
    """Whether an op only returns a view, or memory that is not written yet."""
    return func.is_view or func._schema.name.removeprefix("aten::") in _MEMORY_ONLY


def has_autocast_rule(name: str, device_type: str) -> bool:
    """Whether autocast on a backend has a rule for an op, such as ``aten::mm``."""
    key = f"Autocast{backend(device_type).key}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def flops(func: OpOverload, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Multiplications plus additions of a call of a matmul, convolution or attention.

    0 for any other op. `out` is the result of the call. Attention counts in full, although a causal
    kernel may leave out up to half of the work.
    """
    packet = func._overloadpacket  # the op with all its overloads
    formula = FLOP_FORMULAS.get(packet) or _FLOPS_BY_NAME.get(func._schema.name)
    if formula is not None:
        # The wrapper passes shapes in place of tensors, as these formulas take them.
        return shape_wrapper(formula)(*args, **kwargs, out_val=out)
    torch_formula = flop_registry.get(packet)  # torch has put `shape_wrapper` around it already
    if torch_formula is None:
        return 0
    return torch_formula(*args, **kwargs, out_val=out)


def has_unknown_work(func: OpOverload, outs: Sequence[torch.Tensor]) -> bool:
    """Whether an op is a custom op that computes numbers, and has no formula for its FLOPs.

    `outs` are its results. Ops that return integers alone, such as indices, multiply nothing.
    """
    if func.namespace == "aten":
        return False
    has_formula = func._schema.name in _FLOPS_BY_NAME or func._overloadpacket in flop_registry
    if has_formula:
        return False
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in outs)


# Each formula gets the op's arguments as its schema has them, with shapes in place of tensors.
# `out_shape` is the shape of the result; `more`, `settings` and `scales` take the other arguments.


def _matmul_flops(*shapes, out_shape=None, **scales) -> int:
    """FLOPs of (K,) or (M, K) times (K,), and of (B, M, K) times (B, K, N).

    `shapes` ends with those of the two operands.
    """
    left, right = shapes[-2:]  # addmv and addbmm have the tensor that they add to before them
    columns = math.prod(right[2:])  # N of (B, K, N); 1 for a vector (K,)
    return 2 * math.prod(left) * columns


def _convolution_backward_flops(gradient, inputs, weight, *more, out_shape=None, **settings) -> int:
    """FLOPs for the gradients that the mask asks for; torch's own count ignores groups."""
    # `more`: bias sizes, stride, padding, dilation, transposed, output padding, groups, mask.
    transposed = more[4]
    needs_input, needs_weight, _ = more[7]
    # A gradient costs as much as the forward pass, in which every weight is multiplied with every
    # pixel of the output, or of the input if transposed.
    image = inputs if transposed else gradient  # (N, C, …)
    pixels = image[0] * math.prod(image[2:])
    forward_flops = 2 * pixels * math.prod(weight)
    return forward_flops * (needs_input + needs_weight)  # the two are booleans


def _grouped_matmul_flops(left, right, offsets=None, *more, out_shape=None, **settings) -> int:
    """FLOPs of a matmul for each group, as of (G, M, K) times (G, K, N).

    With a 2-D argument the groups split one of M, K and N, at the `offsets`. Where they split it
    does not change the FLOPs.
    """
    rows, inner = left[-2:]
    columns = right[-1]
    is_batched = len(left) == 3 and len(right) == 3  # else the groups split a dimension
    groups = left[0] if is_batched else 1
    return 2 * groups * rows * inner * columns


def _bilinear_flops(left, weight, right, *more, out_shape=None, **settings) -> int:
    """FLOPs of (B, I), (O, I, J) and (B, J): each weight is multiplied once for each item of B."""
    batch = math.prod(left[:-1])
    return 2 * batch * math.prod(weight)


def _deform_convolution_flops(image, weight, *more, out_shape: Any = None, **settings) -> int:
    """FLOPs as of a convolution, without the interpolation between pixels."""
    outputs = math.prod(out_shape)
    weights_per_output = math.prod(weight[1:])
    return 2 * outputs * weights_per_output


# Formulas for ops that torch's `flop_registry` lacks or counts wrongly. They also fit
# `FlopCounterMode(custom_mapping=…)`.
FLOP_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mv: _matmul_flops,
    torch.ops.aten.dot: _matmul_flops,
    torch.ops.aten.addmv: _matmul_flops,
    torch.ops.aten.addbmm: _matmul_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    torch.ops.aten._grouped_mm: _grouped_matmul_flops,
    torch.ops.aten._trilinear: _bilinear_flops,
}
# Ops of packages that may not be installed.
_FLOPS_BY_NAME = {"torchvision::deform_conv2d": _deform_convolution_flops}

"""Every tensor of a run a second time, in fp64: what the run would compute without rounding.

As shadow values in the debugging of numerical programs (F. Benz, A. Hildebrandt and S. Hack, A
Dynamic Program Analysis to Find Floating-Point Accuracy Problems, 2012): an op is applied to the
shadows too, and a cast leaves them as they are. Views and writes in place need nothing more, since
a shadow of a view is a view of the shadow.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map, tree_map_only

from amp_lab.difference.rounding import FLOAT32_ROUNDOFF, rms, unmasked
from amp_lab.tracing.ops_seen import tensors_in

_WITHOUT_DOUBLES = ("mps",)  # there the shadows are on the CPU
WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64,
         torch.float32: torch.float64, torch.complex64: torch.complex128}  # fmt: skip
_Failed = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
_PERTURBATION = 2.0**-20
_PROBES = 3


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor, in fp64 if it is a floating-point one."""
    device = "cpu" if tensor.device.type in _WITHOUT_DOUBLES else tensor.device
    return tensor.detach().to(device, WIDER.get(tensor.dtype, tensor.dtype), copy=True)


def in_doubles(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the op returns for arguments that are in fp64 already; None if it cannot say."""
    name = func._schema.name.removeprefix("aten::")
    if name == "view" and func._overloadname == "dtype":
        return None  # bits that are read as another format
    args, kwargs = tree_map(_wider_setting, (args, kwargs))
    if name in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # a half that turns float: a double does not
    with contextlib.suppress(*_Failed):
        if "dot_product" in name and "attention" in name:
            return _attention(func, args, kwargs)
        if name == "mkldnn_rnn_layer":
            return _lstm(*args, **kwargs)
        if name in ("view", "_unsafe_view"):
            return args[0].reshape(args[1])  # the shadow may lie otherwise in memory
        return func(*args, **kwargs)
    return None


def _wider_setting(value: Any) -> Any:
    """A dtype or a device that is an argument of the op."""
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, torch.device) and value.type in _WITHOUT_DOUBLES:
        return torch.device("cpu")
    return value


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The kernels' common meaning, since few of them take fp64; of the output alone."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("dropout_p"):
        return None
    return F.scaled_dot_product_attention(
        *args[:3],
        attn_mask=given.get("attn_mask", given.get("attn_bias")),
        is_causal=given.get("is_causal", False),
        scale=given.get("scale"),
        enable_gqa=args[0].shape[-3] != args[1].shape[-3],
    )


def _lstm(inputs: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """oneDNN's layer, whose kernel has no fp64: (T, B, C) to (T, B, H) and the two last states."""
    weights, states, backwards, has_biases = args[:4], args[4:6], args[6], args[11]
    inputs = inputs.flip(0) if backwards else inputs
    weights = weights if has_biases else weights[:2]
    states = [state.reshape(1, *state.shape[-2:]) for state in states]
    out, *last = torch.lstm(inputs, states, weights, has_biases, 1, 0.0, False, False, False)
    return (out.flip(0) if backwards else out, *last)


def wide_inputs(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Copies in fp64 of what an op really gets, before it may write into it."""
    if name == "_fused_rms_norm" and args[3] is None:  # it takes its eps from the dtype
        args = (*args[:3], torch.finfo(args[0].dtype).eps)
    return tree_map_only(torch.Tensor, widened, (args, kwargs))


def effective_roundoff(func: Any, given: tuple, result: torch.Tensor) -> float:
    """An op's own error, per unit of what a relative change of its inputs would do to its result.

    `given` are its `wide_inputs`. 0 if fp64 cannot tell.
    """
    exact = _result_of(func, given)
    if exact is None or exact.shape != result.shape:
        return 0.0
    left, right = unmasked(result.to(exact.device), exact)
    error, size = rms(left - right), rms(right)
    if not math.isfinite(error):
        return math.inf
    if error <= 2 * FLOAT32_ROUNDOFF * size:  # no more than a single rounding
        return error / size if error else 0.0
    moved = [_moved(func, given, exact, seed) for seed in range(_PROBES)]
    whole = size + max(filter(math.isfinite, moved), default=0.0)
    return error / whole if whole else math.inf


def _result_of(func: Any, given: tuple) -> torch.Tensor | None:
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, given)  # an op may write into them
    return next(iter(tensors_in(in_doubles(func, args, kwargs))), None)


def _moved(func: Any, given: tuple, exact: torch.Tensor, seed: int) -> float:
    """How far the exact result moves, per unit, if the inputs are changed at random."""
    source = torch.Generator().manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        by = torch.rand(tensor.shape, generator=source, device="cpu").to(tensor.device) * 2 - 1
        return tensor * (1 + by * _PERTURBATION)

    moved = _result_of(func, tree_map_only(torch.Tensor, change, given))
    if moved is None or moved.shape != exact.shape:
        return 0.0
    left, right = unmasked(moved, exact)
    return rms(left - right) / _PERTURBATION


def laid_out_as(tensor: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """The shadow with the strides of its tensor, so that what is a view of one is one of both."""
    if shadow.stride() == tensor.stride() or 0 in tensor.stride():
        return shadow
    return shadow.new_empty_strided(tensor.shape, tensor.stride()).copy_(shadow)

"""What rounding explains: the error that the formats of an op predict.

The model. An op computes in fp32 at the least and rounds its result once, to the format of its
output. Its error, in root mean square over the output, is then at most

    u(output) * |result|  +  (8 + 2 log2 n) * u(arithmetic) * (|result| + amplification)

where u is the unit roundoff, half the distance from 1 to the next number; n is the number of terms
that go into one value; and the amplification is how far the exact result moves, per unit, if
each input is changed by a random relative amount. The first term is the standard model of
floating-point arithmetic, the second a backward stable algorithm's (N. Higham, Accuracy and
Stability of Numerical Algorithms, 2002, sections 2.2 and 1.5). That random roundings of n
terms largely cancel is N. Higham and T. Mary, A new approach to probabilistic rounding error
analysis, 2019; the sqrt(n) that is left of n is in the amplification, measured with random signs.

What an op computes without rounding is known from doing it in fp64. `run_log` does so twice, on the
inputs that it really got and on fp64 shadows of all tensors (F. Benz, A. Hildebrandt and S. Hack, A
Dynamic Program Analysis to Find Floating-Point Accuracy Problems, 2012), which a cast leaves as
they are. A shadow of a view is a view of the shadow.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map, tree_map_only

from amp_lab.report import short_name
from amp_lab.tracing.ops_seen import tensors_in

EXACT = 1e-10  # relative: what fp64 leaves of an op's exact result, after many ops
FLOAT32_ROUNDOFF = 2.0**-24
_LARGEST = 1e30  # what is larger, or minus infinity's stand-in, is a mask and no result
_MASK = -6e4

_WITHOUT_DOUBLES = ("mps",)  # there the shadows are on the CPU
_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64,
          torch.float32: torch.float64, torch.complex64: torch.complex128}  # fmt: skip
_Failed = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
_PERTURBATION = 2.0**-20
_PROBES = 3
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "addbmm")


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number; 0 of integers, which are not rounded."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def float32_roundoff(op: str, device_type: str) -> float:
    """Unit roundoff of float32 arithmetic in this op: TF32's or bf16's where torch's mode is so."""
    library: Any = torch.backends.mkldnn if device_type == "cpu" else torch.backends.cudnn
    product: Any = library if device_type == "cpu" else torch.backends.cuda
    mode = product.matmul.fp32_precision if op in _PRODUCTS else ""
    if "convolution" in op:
        mode = library.conv.fp32_precision
    return {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(mode, FLOAT32_ROUNDOFF)


def allowance(op: str, inputs: object, result: torch.Tensor) -> float:
    """What the arithmetic of an op may add to its format's unit roundoff: the model's 2nd term."""
    # About as many terms as a product's inner size, or as a sum has values.
    given = tensors_in(inputs)
    sizes = [t.numel() for t in given if t.is_floating_point()]
    terms = max([1.0, *(size / max(result.numel(), 1) for size in sizes)])
    if len(sizes) > 1:
        terms = max(1, *given[0].shape[-1:], max(sizes) / max(sizes[0], 1))
    return (8 + 2 * math.log2(terms)) * float32_roundoff(op, result.device.type)


def unmasked(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in fp64, with 0 where they agree that the value is none: a mask, an inf or a NaN."""
    left, right = (torch.view_as_real(t) if t.is_complex() else t for t in (left, right))
    left, right = left.double(), right.to(left.device, torch.float64)
    same = (left < _MASK) & (right < _MASK) & ((left < -_LARGEST) | (right < -_LARGEST))
    same |= (left > _LARGEST) & (right > _LARGEST)
    same |= left.isnan() & right.isnan()
    if bool(same.any()):
        left, right = left.masked_fill(same, 0.0), right.masked_fill(same, 0.0)
    return left, right


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the error, relative to that of the exact result; inf of a NaN."""
    left, right = unmasked(result.to(exact.device), exact)
    error = rms(left - right)
    return math.inf if math.isnan(error) else error / (rms(right) or 1.0)


def nonfinite(result: torch.Tensor, exact: torch.Tensor) -> str:
    """What the result has where the exact one has numbers, in words; empty if it has numbers."""
    left, right = unmasked(result.to(exact.device), exact)
    if bool(left.isfinite().all()) or not bool(right.isfinite().all()):
        return ""
    largest, end = float(right.abs().max()), torch.finfo(result.dtype).max
    said = f"{'NaN' if left.isnan().any() else 'inf'} where fp64 has numbers up to {largest:.6g}"
    beyond = f": it overflows {short_name(result.dtype)}, whose largest is {end:g}"
    return said + (beyond if largest > end else "")


def rms(tensor: torch.Tensor) -> float:
    """Root mean square; 0 of no values."""
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(tensor.numel() or 1)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor, in fp64 if it is a floating-point one."""
    device = "cpu" if tensor.device.type in _WITHOUT_DOUBLES else tensor.device
    return tensor.detach().to(device, _WIDER.get(tensor.dtype, tensor.dtype), copy=True)


def in_doubles(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the op returns for arguments that are in fp64 already; None if it cannot say."""
    name = func._schema.name.removeprefix("aten::")
    args, kwargs = tree_map(_wider_setting, (args, kwargs))
    if name in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # a half that turns float: a double does not
    with contextlib.suppress(*_Failed):
        if "dot_product" in name and "attention" in name:
            return _attention(func, args, kwargs)
        if name == "mkldnn_rnn_layer":
            return _lstm(*args, **kwargs)
        if name in ("view", "_unsafe_view"):
            # The shadow may lie otherwise in memory. Bits read as another dtype have no meaning.
            return args[0].reshape(args[1])
        return func(*args, **kwargs)
    return None


def _wider_setting(value: Any) -> Any:
    """A dtype or a device that is an argument of the op."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
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
    """An op's error on its `wide_inputs`, per unit of what a relative change of them would do.

    0 if fp64 cannot tell.
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
    shadow = shadow.to(_WIDER.get(tensor.dtype, tensor.dtype))
    if shadow.stride() == tensor.stride() or 0 in tensor.stride():
        return shadow
    return shadow.new_empty_strided(tensor.shape, tensor.stride()).copy_(shadow)

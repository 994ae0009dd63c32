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
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from amp_lab.core.report import short_name
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
_MODE_ROUNDOFF = {"tf32": 2.0**-11, "bf16": 2.0**-8}  # by torch's name of a mode


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number; 0 of integers, which are not rounded."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).eps / 2
    return 0.0


def float32_roundoff(op: str, device_type: str) -> float:
    """Unit roundoff of float32 arithmetic in this op: TF32's or bf16's where torch's mode is so."""
    backends: Any = torch.backends
    convolutions = backends.cudnn
    matmuls = backends.cuda
    if device_type == "cpu":
        convolutions = backends.mkldnn
        matmuls = backends.mkldnn
    if "convolution" in op:
        mode = convolutions.conv.fp32_precision
    elif op in _PRODUCTS:
        mode = matmuls.matmul.fp32_precision
    else:
        return FLOAT32_ROUNDOFF
    return _MODE_ROUNDOFF.get(mode, FLOAT32_ROUNDOFF)


def allowance(op: str, inputs: object, result: Tensor) -> float:
    """What the arithmetic of an op may add to its format's unit roundoff: the model's 2nd term."""
    terms = _terms(tensors_in(inputs), result)
    return (8 + 2 * math.log2(terms)) * float32_roundoff(op, result.device.type)


def _terms(inputs: list[Tensor], result: Tensor) -> float:
    """About how many terms go into one value: a product's inner size, or a sum's values."""
    sizes = [tensor.numel() for tensor in inputs if tensor.is_floating_point()]
    largest = max(sizes, default=0)
    if len(sizes) < 2:
        return max(1.0, largest / max(result.numel(), 1))
    first_size = max(sizes[0], 1)
    inner_size = inputs[0].shape[-1:]  # empty of a single number
    return max(1, *inner_size, largest / first_size)


def unmasked(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp64, with 0 where they agree that the value is none: a mask, an inf or a NaN."""
    left = _real(left).double()
    right = _real(right).to(left.device, torch.float64)
    is_far_below = (left < -_LARGEST) | (right < -_LARGEST)
    agree = (left < _MASK) & (right < _MASK) & is_far_below
    agree |= (left > _LARGEST) & (right > _LARGEST)
    agree |= left.isnan() & right.isnan()
    if bool(agree.any()):
        left = left.masked_fill(agree, 0.0)
        right = right.masked_fill(agree, 0.0)
    return left, right


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Root mean square of the error, relative to that of the exact result; inf of a NaN."""
    left, right = unmasked(result.to(exact.device), exact)
    error = rms(left - right)
    if math.isnan(error):
        return math.inf
    return error / (rms(right) or 1.0)


def nonfinite(result: Tensor, exact: Tensor) -> str:
    """What the result has where the exact one has numbers, in words; empty if it has numbers."""
    left, right = unmasked(result.to(exact.device), exact)
    if bool(left.isfinite().all()) or not bool(right.isfinite().all()):
        return ""
    kind = "inf"
    if left.isnan().any():
        kind = "NaN"
    largest = float(right.abs().max())
    text = f"{kind} where fp64 has numbers up to {largest:.6g}"
    limit = torch.finfo(result.dtype).max
    if largest > limit:
        text += f": it overflows {short_name(result.dtype)}, whose largest is {limit:g}"
    return text


def rms(tensor: Tensor) -> float:
    """Root mean square; 0 of no values."""
    norm = float(torch.linalg.vector_norm(tensor))
    return norm / math.sqrt(tensor.numel() or 1)


def widened(tensor: Tensor) -> Tensor:
    """A copy of the tensor, in fp64 if it is a floating-point one."""
    device = tensor.device
    if device.type in _WITHOUT_DOUBLES:
        device = "cpu"
    dtype = _WIDER.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(device, dtype, copy=True)


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


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The kernels' common meaning, since few of them take fp64; of the output alone."""
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if arguments.get("dropout_p"):
        return None
    query, key, value = args[:3]
    has_fewer_keys = query.shape[-3] != key.shape[-3]  # a head of keys for several of queries
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=arguments.get("is_causal", False),
        scale=arguments.get("scale"),
        enable_gqa=has_fewer_keys,
    )


def _lstm(inputs: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """oneDNN's layer, whose kernel has no fp64: (T, B, C) to (T, B, H) and the two last states."""
    weights = args[:4]
    states = [state.reshape(1, *state.shape[-2:]) for state in args[4:6]]
    is_backwards = args[6]
    has_biases = args[11]
    if not has_biases:
        weights = weights[:2]
    if is_backwards:
        inputs = inputs.flip(0)
    out, *last = torch.lstm(inputs, states, weights, has_biases, 1, 0.0, False, False, False)
    if is_backwards:
        out = out.flip(0)
    return (out, *last)


def wide_inputs(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Copies in fp64 of what an op really gets, before it may write into it."""
    if name == "_fused_rms_norm" and args[3] is None:  # it takes its eps from the dtype
        eps = torch.finfo(args[0].dtype).eps
        args = (*args[:3], eps)
    return tree_map_only(Tensor, widened, (args, kwargs))


def effective_roundoff(func: Any, inputs: tuple, result: Tensor) -> float:
    """An op's error on its `wide_inputs`, per unit of what a relative change of them would do.

    0 if fp64 cannot tell.
    """
    exact = _result_of(func, inputs)
    if exact is None or exact.shape != result.shape:
        return 0.0
    left, right = unmasked(result.to(exact.device), exact)
    error = rms(left - right)
    size = rms(right)
    if not math.isfinite(error):
        return math.inf
    if error == 0:
        return 0.0
    if error <= 2 * FLOAT32_ROUNDOFF * size:  # no more than a single rounding
        return error / size
    changes = [_change_of_result(func, inputs, exact, seed) for seed in range(_PROBES)]
    explained = size + max(filter(math.isfinite, changes), default=0.0)
    if explained == 0:
        return math.inf
    return error / explained


def _result_of(func: Any, inputs: tuple) -> Tensor | None:
    args, kwargs = tree_map_only(Tensor, torch.clone, inputs)  # an op may write into them
    results = tensors_in(in_doubles(func, args, kwargs))
    if not results:
        return None
    return results[0]


def _change_of_result(func: Any, inputs: tuple, exact: Tensor, seed: int) -> float:
    """How far the exact result moves, per unit, if the inputs are changed at random."""
    source = torch.Generator().manual_seed(seed)

    def perturbed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        uniform = torch.rand(tensor.shape, generator=source, device="cpu").to(tensor.device)
        change = uniform * 2 - 1  # from -1 to 1
        return tensor * (1 + change * _PERTURBATION)

    moved = _result_of(func, tree_map_only(Tensor, perturbed, inputs))
    if moved is None or moved.shape != exact.shape:
        return 0.0
    left, right = unmasked(moved, exact)
    return rms(left - right) / _PERTURBATION


def laid_out_as(tensor: Tensor, shadow: Tensor) -> Tensor:
    """The shadow with the strides of its tensor, so that what is a view of one is one of both."""
    strides = tensor.stride()
    shadow = shadow.to(_WIDER.get(tensor.dtype, tensor.dtype))
    if shadow.stride() == strides or 0 in strides:
        return shadow
    return shadow.new_empty_strided(tensor.shape, strides).copy_(shadow)

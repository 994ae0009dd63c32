"""Predict the rounding error of an op from its formats, and measure it against fp64.

The error model. An op computes in fp32 at the least, and rounds its result once, to the format of
its output. Its error, in root mean square over the output, is then at most

    u(output) * |result|  +  (8 + 2 log2 n) * u(arithmetic) * (|result| + amplification)

where u is the unit roundoff, half the distance from 1 to the next number; n is the number of terms
that go into one value; and the amplification is how far the exact result moves, per unit of
relative change, if each input is changed by a random relative amount. The first term is the
standard model of floating-point arithmetic, the second that of a backward stable algorithm (N.
Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 2.2 and 1.5). Random
roundings of n terms largely cancel (N. Higham and T. Mary, A new approach to probabilistic rounding
error analysis, 2019). The sqrt(n) that remains of n is in the amplification, which is measured with
random signs.

The result without rounding is computed in fp64. `run_log` does so twice: on the inputs that the op
really got, and on the fp64 shadows of its inputs. A shadow is a copy of a tensor that is computed
in fp64 from the beginning of the run, so casts do not change it; a view has a view as its shadow
(F. Benz, A. Hildebrandt and S. Hack, A Dynamic Program Analysis to Find Floating-Point Accuracy
Problems, 2012).
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from amp_lab.core.report import short_name
from amp_lab.core.tensors import tensors_in

EXACT = 1e-10  # relative error of the fp64 results themselves, after many ops
FLOAT32_ROUNDOFF = 2.0**-24
# Masks are large numbers in place of an infinity: beyond 1e30, or in fp16 at least below -6e4.
_LARGEST_VALUE = 1e30
_LARGEST_MASK = -6e4

_DEVICES_WITHOUT_FP64 = ("mps",)  # their shadows are on the CPU
_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64,
          torch.float32: torch.float64, torch.complex64: torch.complex128}  # fmt: skip
# Raised by ops that have no kernel for fp64.
_ERRORS_WITHOUT_FP64 = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
_PERTURBATION = 2.0**-20  # largest relative change of an input, to measure the amplification
_PERTURBED_RUNS = 3
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "addbmm")
_MODE_ROUNDOFF = {"tf32": 2.0**-11, "bf16": 2.0**-8}  # by the value of torch's `fp32_precision`


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number; 0 for integers, which are not rounded."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).eps / 2
    return 0.0


def float32_roundoff(op: str, device_type: str) -> float:
    """Unit roundoff of fp32 arithmetic in this op; of TF32 or bf16 if torch is set to use it."""
    backends: Any = torch.backends
    # Each library has its own setting: cuDNN and cuBLAS on a GPU, oneDNN on a CPU.
    convolutions = backends.cudnn
    matmuls = backends.cuda
    if device_type == "cpu":
        convolutions = backends.mkldnn
        matmuls = backends.mkldnn
    if "convolution" in op:
        mode = convolutions.conv.fp32_precision
    elif op in _MATMULS:
        mode = matmuls.matmul.fp32_precision
    else:
        return FLOAT32_ROUNDOFF
    return _MODE_ROUNDOFF.get(mode, FLOAT32_ROUNDOFF)


def allowance(op: str, inputs: object, result: Tensor) -> float:
    """Roundoff of the arithmetic of an op: (8 + 2 log2 n) * u(arithmetic) of the error model.

    `op` is the op's name, `inputs` holds its arguments, and `result` is its first result.
    """
    terms = _terms_per_value(tensors_in(inputs), result)
    return (8 + 2 * math.log2(terms)) * float32_roundoff(op, result.device.type)


def _terms_per_value(inputs: list[Tensor], result: Tensor) -> float:
    """Estimate how many terms are added for one value of an op's result.

    With one input, as in a sum: how many of its values there are for each value of the result. With
    several, as in a matmul (n, k) x (k, m): k, the last size of the first input; or how many times
    larger than the first input the largest is, if that is more.
    """
    counts = [tensor.numel() for tensor in inputs if tensor.is_floating_point()]
    largest_count = max(counts, default=0)
    if len(counts) < 2:
        return max(1.0, largest_count / max(result.numel(), 1))
    times_the_first = largest_count / max(counts[0], 1)
    inner_size = 1
    if inputs[0].dim() > 0:
        inner_size = inputs[0].shape[-1]
    return max(1, inner_size, times_the_first)


def without_masks(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of one shape, with 0 where both have a mask, an inf, or a NaN.

    Both are returned in fp64 on the device of `right`. Complex tensors become pairs of real
    numbers, in a last dimension of 2.
    """
    left = _view_as_real(left.to(right.device)).double()
    right = _view_as_real(right).double()
    # A mask in fp16 may be only -65504, where the same mask is -1e38 in fp64. So one of the two has
    # to be far below all values, and for the other it is enough to be below -6e4.
    is_far_below = (left < -_LARGEST_VALUE) | (right < -_LARGEST_VALUE)
    are_low = (left < _LARGEST_MASK) & (right < _LARGEST_MASK)
    has_one_overflow = left.isinf() ^ right.isinf()
    are_high = (left > _LARGEST_VALUE) & (right > _LARGEST_VALUE) & ~has_one_overflow
    are_nan = left.isnan() & right.isnan()
    is_masked = (are_low & is_far_below) | are_high | are_nan
    if bool(is_masked.any()):
        left = left.masked_fill(is_masked, 0.0)
        right = right.masked_fill(is_masked, 0.0)
    return left, right


def _view_as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers; any other as it is."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Root mean square of the error, relative to the exact result's; inf for a NaN."""
    left, right = without_masks(result, exact)
    error = rms(left - right)
    if math.isnan(error):
        return math.inf
    size = rms(right) or 1.0  # if the exact result is all zeros, the error stays absolute
    return error / size


def nonfinite(result: Tensor, exact: Tensor) -> str:
    """Describe an inf or NaN in a result that is finite in fp64; "" if there is none.

    For example ``inf where fp64 has numbers up to 70000``.
    """
    left, right = without_masks(result, exact)
    if bool(left.isfinite().all()) or not bool(right.isfinite().all()):
        return ""
    kind = "inf"
    if left.isnan().any():
        kind = "NaN"
    largest = float(right.abs().max())
    text = f"{kind} where fp64 has values of up to {largest:.6g}"
    limit = torch.finfo(result.dtype).max
    if largest > limit:
        text += f", which overflows {short_name(result.dtype)} (largest value {limit:g})"
    return text


def rms(tensor: Tensor) -> float:
    """Root mean square; 0 for an empty tensor."""
    norm = float(torch.linalg.vector_norm(tensor))
    count = max(1, tensor.numel())  # the norm of an empty tensor is 0, so any count will do
    return norm / math.sqrt(count)


def widen(tensor: Tensor) -> Tensor:
    """Copy a tensor to fp64, or to complex128 if it is complex; integers keep their dtype."""
    device = tensor.device
    if device.type in _DEVICES_WITHOUT_FP64:
        device = "cpu"
    dtype = _WIDER.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(device, dtype, copy=True)


def run_in_fp64(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op on arguments that are in fp64 and return its result; None if it cannot run so.

    Ops whose kernels have no fp64, such as attention, are replaced by ops that compute the same.
    """
    name = func._schema.name.removeprefix("aten::")
    args, kwargs = tree_map(_widen_setting, (args, kwargs))
    if name in ("_softmax", "_log_softmax"):
        tensor, dim, _half_to_float = args
        args = (tensor, dim, False)  # True would mean: from fp16 to fp32
    with contextlib.suppress(*_ERRORS_WITHOUT_FP64):
        if "dot_product" in name and "attention" in name:
            return _attention(func, args, kwargs)
        if name == "mkldnn_rnn_layer":
            return _lstm(*args, **kwargs)
        if name in ("view", "_unsafe_view"):
            # A shadow may have other strides, so a view may not be possible. A view as another
            # dtype raises here and gives None: the bits of the shadow have no such meaning.
            return args[0].reshape(args[1])
        return func(*args, **kwargs)
    return None


def _widen_setting(value: Any) -> Any:
    """Replace a dtype by the fp64 one, and a device without fp64 by the CPU.

    Any other argument of an op is returned as it is.
    """
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, torch.device) and value.type in _DEVICES_WITHOUT_FP64:
        return torch.device("cpu")
    return value


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The output, in fp64, of one of torch's attention kernels; None if it has dropout.

    Further results of the kernel, such as the logsumexp, are left out.
    """
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if arguments.get("dropout_p"):
        return None
    query, key, value = args[:3]
    is_gqa = query.shape[-3] != key.shape[-3]  # one head of keys for several heads of queries
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=arguments.get("is_causal", False),
        scale=arguments.get("scale"),
        enable_gqa=is_gqa,
    )


def _lstm(inputs: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute one layer and direction of an LSTM as oneDNN's op does, which has no fp64.

    `inputs` are (T, B, C), and `args` the other arguments of ``mkldnn_rnn_layer``, in its order.
    Returns the outputs (T, B, H), and the last hidden and cell state, (B, H) each.
    """
    weights_and_biases = args[:4]  # two weights and two biases
    hidden_and_cell = [state.reshape(1, *state.shape[-2:]) for state in args[4:6]]
    is_backwards = args[6]
    has_biases = args[11]
    if not has_biases:  # the op has two biases all the same, but torch.lstm takes none
        weights_and_biases = weights_and_biases[:2]
    if is_backwards:
        inputs = inputs.flip(0)
    out, hidden, cell = torch.lstm(
        inputs,
        hidden_and_cell,
        weights_and_biases,
        has_biases,
        num_layers=1,
        dropout=0.0,
        train=False,
        bidirectional=False,
        batch_first=False,
    )
    if is_backwards:
        out = out.flip(0)
    return out, hidden[0], cell[0]


def widen_inputs(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Copy the inputs of an op to fp64, and return them as (args, kwargs).

    Call it before the op runs, which may write into its inputs.
    """
    # Without an eps this op takes that of the dtype, which must be the original one.
    if name == "_fused_rms_norm" and args[3] is None:
        eps = torch.finfo(args[0].dtype).eps
        args = (*args[:3], eps)
    return tree_map_only(Tensor, widen, (args, kwargs))


def effective_roundoff(func: Any, inputs: tuple, result: Tensor) -> float:
    """The unit roundoff that explains the error of an op's result; 0 if fp64 cannot compute it.

    `inputs` are the op's (args, kwargs) in fp64, from `widen_inputs`; the error is the difference
    of `result` from the op's result on them. The roundoff is this error, divided by |result| +
    amplification of the error model. It is inf if the error is inf or NaN, or if this sum is 0.
    """
    exact = _first_result(func, inputs)
    if exact is None or exact.shape != result.shape:
        return 0.0
    left, right = without_masks(result, exact)
    error = rms(left - right)
    size = rms(right)
    if not math.isfinite(error):
        return math.inf
    if error == 0:
        return 0.0
    # An error of at most two roundings in fp32 is below any limit, so the amplification, which
    # needs further runs in fp64, is not measured.
    if error <= 2 * FLOAT32_ROUNDOFF * size:
        return error / size
    changes = [_change_of_result(func, inputs, exact, seed) for seed in range(_PERTURBED_RUNS)]
    amplification = max(filter(math.isfinite, changes), default=0.0)
    error_per_roundoff = size + amplification
    if error_per_roundoff == 0:
        return math.inf
    return error / error_per_roundoff


def _first_result(func: Any, inputs: tuple) -> Tensor | None:
    """The first tensor that an op returns in fp64; None if it returns none or has no fp64."""
    args, kwargs = tree_map_only(Tensor, torch.clone, inputs)  # an op may write into them
    results = tensors_in(run_in_fp64(func, args, kwargs))
    if not results:
        return None
    return results[0]


def _change_of_result(func: Any, inputs: tuple, exact: Tensor, seed: int) -> float:
    """The amplification: how far the exact result moves, per unit of random relative change.

    `inputs` are (args, kwargs) in fp64. The return value is a root mean square over the result, and
    0 if the changed inputs give no result of its shape.
    """
    generator = torch.Generator().manual_seed(seed)

    def perturbed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        uniform = torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.device)
        change = uniform * 2 - 1  # from -1 to 1
        return tensor * (1 + change * _PERTURBATION)

    perturbed_result = _first_result(func, tree_map_only(Tensor, perturbed, inputs))
    if perturbed_result is None or perturbed_result.shape != exact.shape:
        return 0.0
    left, right = without_masks(perturbed_result, exact)
    return rms(left - right) / _PERTURBATION


def with_strides_of(tensor: Tensor, shadow: Tensor) -> Tensor:
    """The shadow with the strides of its tensor, so that both can be viewed in the same way.

    If the tensor is expanded, the shadow keeps its own strides.
    """
    strides = tensor.stride()
    shadow = shadow.to(_WIDER.get(tensor.dtype, tensor.dtype))
    # A stride of 0, of an expanded tensor, means that several values share their memory.
    if shadow.stride() == strides or 0 in strides:
        return shadow
    return shadow.new_empty_strided(tensor.shape, strides).copy_(shadow)

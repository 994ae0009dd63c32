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
"""

import math
from typing import Any

import torch

from amp_lab.tracing.ops_seen import tensors_in

EXACT = 1e-10  # relative: what fp64 leaves of an op's exact result, after many ops
FLOAT32_ROUNDOFF = 2.0**-24
_LARGEST = 1e30  # what is larger, or minus infinity's stand-in, is a mask and no result
_MASK = -6e4

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "addbmm")


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number; 0 of integers, which are not rounded."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps / 2


def float32_roundoff(op: str, device_type: str) -> float:
    """Unit roundoff of float32 arithmetic in this op: TF32's or bf16's where torch's mode is so."""
    library: Any = torch.backends.mkldnn if device_type == "cpu" else torch.backends.cudnn
    product: Any = library if device_type == "cpu" else torch.backends.cuda
    if op in _PRODUCTS:
        mode = product.matmul.fp32_precision
    elif "convolution" in op:
        mode = library.conv.fp32_precision
    else:
        return FLOAT32_ROUNDOFF
    return {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(mode, FLOAT32_ROUNDOFF)


def allowance(op: str, inputs: object, result: torch.Tensor) -> float:
    """What the arithmetic of an op may add to its format's unit roundoff: the model's second term.

    The number of terms is about that of a product's inner size, or of the values in a sum.
    """
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


def rms(tensor: torch.Tensor) -> float:
    """Root mean square; 0 of no values."""
    if not tensor.numel():
        return 0.0
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(tensor.numel())

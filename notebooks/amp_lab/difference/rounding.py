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
from collections.abc import Callable
from typing import Any

import torch

from amp_lab.tracing.ops_seen import tensors_in

EXACT = 1e-10  # relative: what fp64 leaves of an op's exact result, after many ops
_FLOAT32_ROUNDOFF = 2.0**-24
_LARGEST = 1e30  # what is larger, or minus infinity's stand-in, is a mask and no result
_MASK = -6e4
_PROBES = 3

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
        return _FLOAT32_ROUNDOFF
    return {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(mode, _FLOAT32_ROUNDOFF)


def allowance(roundoff: float, arithmetic: float, terms: float) -> float:
    """The largest effective roundoff (see `effective_roundoff`) that the formats explain."""
    return roundoff + (8 + 2 * math.log2(max(terms, 1.0))) * arithmetic


def effective_roundoff(
    result: torch.Tensor, exact: torch.Tensor, moved: Callable[[int], torch.Tensor | None]
) -> float:
    """The error of a result, per unit of what a relative change of the inputs would do to it.

    `exact` is the same op in fp64 on the same inputs, and `moved(seed)` how far that moves, per
    unit, if they are changed at random. It is asked only where the error is no single rounding.
    """
    result, exact = unmasked(result, exact)
    error, size = rms(result - exact), rms(exact)
    if not error:
        return 0.0
    if not math.isfinite(error):
        return math.inf
    if size and error / size <= 2 * _FLOAT32_ROUNDOFF:
        return error / size
    moves = [rms(move) for move in map(moved, range(_PROBES)) if move is not None]
    whole = size + max((move for move in moves if math.isfinite(move)), default=0.0)
    return error / whole if whole else math.inf


def terms_of(inputs: object, result: torch.Tensor) -> float:
    """About how many terms go into one value of the result: of a product its inner size."""
    given = tensors_in(inputs)
    sizes = [t.numel() for t in given if t.is_floating_point()]
    if len(sizes) > 1:
        return max(given[0].shape[-1] if given[0].dim() else 1, max(sizes) / max(sizes[0], 1))
    return max([1.0, *(size / max(result.numel(), 1) for size in sizes)])


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


def rms(tensor: torch.Tensor) -> float:
    """Root mean square; 0 of no values."""
    if not tensor.numel():
        return 0.0
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(tensor.numel())

"""Sums of FP8 products as an H100 computes them: in about 14 bits instead of fp32's 24.

Hopper's tensor cores add 32 products and the sum so far at once. They first shift all of them to
the largest exponent among them, and cut off what is below 13 binary places.

Sources: Fasi and others, "Numerical behavior of NVIDIA tensor cores" (2021); Khattak and Mikaitis,
"Accurate models of NVIDIA tensor cores", arXiv 2512.07004; DeepSeek-V3's report, arXiv 2412.19437,
section 3.3.2.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from amp_lab.core.errors import NumericsError
from amp_lab.formats.noise import squares

_PRODUCTS = 32  # added at once
_PROMOTED = 128  # products after which a sum moves to fp32, without `use_fast_accum`
_PLACES = 13  # binary places that are left after the shift
_LEAST_EXPONENT = -132.0  # of the shift
_NO_EXPONENT = -1000.0  # of a product that is zero
_PIECE = 2**22  # products at a time
_SAMPLE = 32  # rows of an operand
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def hopper_matmul(left: Tensor, right: Tensor, *, fast_accum: bool = True) -> Tensor:
    """Compute ``left @ right.T`` of FP8 tensors with the summation of an H100.

    The function is slow, because it computes every product separately. It does not model the order
    in which cuBLAS adds the parts of a very long sum.

    Args:
        left: (rows, K), in `torch.float8_e4m3fn` or `torch.float8_e5m2`, finite.
        right: (columns, K), likewise.
        fast_accum: Whether one sum accumulates all products, as with `use_fast_accum` of
            `torch.nn.functional.scaled_mm`. If false, partial sums of 128 products are added in
            fp32.

    Returns:
        The sums (rows, columns) in fp32. They are not multiplied by scales.

    Raises:
        NumericsError: If a tensor has another dtype, is not a matrix, or if the lengths differ.
    """
    for name, operand in (("left", left), ("right", right)):
        if operand.dtype not in _DTYPES or operand.dim() != 2:
            shape = tuple(operand.shape)
            problem = f"{name} is {operand.dtype} of shape {shape}"
            cure = "give a matrix in torch.float8_e4m3fn or torch.float8_e5m2"
            raise NumericsError(f"hopper_matmul: {problem}: {cure}")
    left_length = left.shape[1]
    right_length = right.shape[1]
    if left_length != right_length:
        raise NumericsError(
            f"hopper_matmul: rows of left have {left_length} values and rows of right "
            f"{right_length}; the lengths must be equal"
        )
    # Rows of a piece: with each row of `right`, each has `_PRODUCTS` products at a time.
    rows = max(1, _PIECE // (len(right) * _PRODUCTS))
    pieces = [_matmul(piece, right, fast_accum) for piece in left.split(rows)]
    return torch.cat(pieces)


def noise_of_hopper_sums(left: Tensor, right: Tensor) -> tuple[float, float]:
    """How much the sums of ``left @ right.T`` lose on an H100 with `use_fast_accum`.

    A sample of the rows of both operands is rounded to E4M3, with a scale for each row.

    Args:
        left: (rows, K), in any floating-point dtype.
        right: (columns, K), likewise.

    Returns:
        The sum of the squares of the exact sums, and that of their errors; both 0 for operands
        that are not finite.
    """
    left_sample = _sample_in_e4m3(left)
    right_sample = _sample_in_e4m3(right)
    exact = left_sample.double() @ right_sample.double().T
    if not exact.isfinite().all():
        return 0.0, 0.0
    errors = hopper_matmul(left_sample, right_sample) - exact
    return squares(exact), squares(errors)


def _sample_in_e4m3(operand: Tensor) -> Tensor:
    """At most `_SAMPLE` rows of an operand, evenly spaced, scaled to the range of E4M3."""
    step = math.ceil(len(operand) / _SAMPLE)
    rows = operand.detach()[::step].float()
    largest = rows.abs().amax(1, keepdim=True)
    # A row of zeros is divided by `tiny` instead of 0.
    largest.clamp_(min=torch.finfo(torch.float32).tiny)
    largest_e4m3 = torch.finfo(torch.float8_e4m3fn).max
    scaled = rows / largest * largest_e4m3
    return scaled.to(torch.float8_e4m3fn)


def _matmul(left: Tensor, right: Tensor, fast_accum: bool) -> Tensor:
    """`hopper_matmul` of a piece of the rows of `left`, without its checks."""
    left_values = _in_groups(left.double())[:, None]  # (rows, 1, groups, 32)
    right_values = _in_groups(right.double())[None]  # (1, columns, groups, 32)
    left_exponents = _in_groups(_exponents(left))[:, None]
    right_exponents = _in_groups(_exponents(right))[None]
    total = torch.zeros(len(left), len(right), device=left.device)  # in fp32
    partial = total.double()  # the tensor core's sum, which `_add_shifted` cuts to its places
    for group in range(left_values.shape[2]):
        products = left_values[:, :, group] * right_values[:, :, group]
        exponents = left_exponents[:, :, group] + right_exponents[:, :, group]
        exponents = exponents.where(products != 0, _NO_EXPONENT)
        partial = _add_shifted(products, exponents.amax(-1), partial)
        products_so_far = (group + 1) * _PRODUCTS
        if not fast_accum and products_so_far % _PROMOTED == 0:
            total += partial.float()
            partial = torch.zeros_like(partial)
    return total + partial.float()


def _in_groups(rows: Tensor) -> Tensor:
    """Split each row into groups of `_PRODUCTS`, the last one filled with zeros."""
    missing = -rows.shape[1] % _PRODUCTS
    padded = F.pad(rows, (0, missing))
    return padded.unflatten(1, (-1, _PRODUCTS))


def _exponents(operand: Tensor) -> Tensor:
    """The exponents of FP8 values as hardware has them: subnormals have that of normal ones."""
    smallest = torch.finfo(operand.dtype).smallest_normal
    magnitudes = operand.double().abs()
    return _exponent(magnitudes.clamp(min=smallest))


def _exponent(values: Tensor) -> Tensor:
    """The exponent of the largest power of two that is not above the magnitude of a value."""
    return torch.frexp(values).exponent - 1.0  # `frexp` has mantissas from 0.5 to 1


def _add_shifted(products: Tensor, exponent: Tensor, partial: Tensor) -> Tensor:
    """Add products (…, n) to the partial sums (…), all cut to `_PLACES` after the shift.

    `exponent` (…) is the largest of the products.
    """
    partial_exponent = _exponent(partial).where(partial != 0, _NO_EXPONENT)
    largest = torch.maximum(exponent, partial_exponent)
    largest = largest.clamp(min=_LEAST_EXPONENT)
    unit = torch.exp2(largest - _PLACES)
    cut_products = _cut(products, unit[..., None])
    added = cut_products.sum(-1) + _cut(partial, unit)
    # The result keeps as many places below its own exponent.
    return _cut(added, torch.exp2(_exponent(added) - _PLACES))


def _cut(values: Tensor, unit: Tensor) -> Tensor:
    """The values without what is smaller than the unit, a power of two."""
    return (values / unit).trunc() * unit

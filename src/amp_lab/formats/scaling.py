"""Tensors in the formats below 16 bits: which values share a scale, and what scale that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_lab.core.errors import NumericsError
from amp_lab.formats.elements import ELEMENTS, Element

_LEAST_AMAX = 1e-12  # of torchao's float8: a tensor of zeros has a finite scale
_E4M3 = ELEMENTS["e4m3"]
_E2M1 = ELEMENTS["e2m1"]
_FP32_MANTISSA = 0x7FFFFF
_PIECE = 2**16  # values
_POWERS = ("floor", "ceil", "even", "rceil")
_SCALES_OF_8_BITS = ("e4m3", "e8m0")


@dataclass(frozen=True)
class Format:
    """How a tensor is held below 16 bits: an element for each value, and scales that values share.

    `block` is the rows and columns that share a scale, where a 0 stands for all of them: ``(0, 0)``
    is a scale for the tensor, ``(1, 0)`` for each row, ``(1, 32)`` for 32 values that lie in line.
    `scale` is what a scale is held in: ``fp32``, ``power2`` (fp32, but a power of two), ``e8m0``,
    or ``e4m3``, whose scales have a scale of the tensor, in fp32, above them; ``none`` is a cast.

    `power` says how an E8M0 scale comes from the largest magnitude of its block: ``rceil`` (of
    Blackwell, where nothing is clipped), ``floor`` (the OCP's), ``ceil`` or ``even``.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: str = "fp32"
    power: str = "rceil"

    def __post_init__(self) -> None:
        if self.power not in _POWERS:
            raise NumericsError(f"Format: power {self.power!r} is none of {', '.join(_POWERS)}")

    @property
    def bits(self) -> float:
        """Bits for each value, with its part of a block's scale; those of rows are not counted."""
        block_values = math.prod(self.block)
        if not block_values:
            return self.element.bits
        scale_bits = 8 if self.scale in _SCALES_OF_8_BITS else 32
        return self.element.bits + scale_bits / block_values

    @property
    def multiple(self) -> int:
        """What the sizes of a product have to be multiples of, for kernels of today's hardware."""
        if self.scale == "none":
            return 1
        return max(16, *self.block)


FORMATS = {
    form.name: form
    for form in (
        Format("bf16", ELEMENTS["bf16"], (0, 0), "none"),
        Format("fp16", ELEMENTS["fp16"], (0, 0), "none"),
        Format("fp8", _E4M3, (0, 0)),
        Format("fp8-rowwise", _E4M3, (1, 0), "power2"),
        Format("fp8-1x128", _E4M3, (1, 128)),
        Format("fp8-128x128", _E4M3, (128, 128)),
        Format("fp8-e5m2", ELEMENTS["e5m2"], (0, 0)),
        Format("fp8-e4m3fnuz", ELEMENTS["e4m3fnuz"], (0, 0)),
        Format("fp8-e5m2fnuz", ELEMENTS["e5m2fnuz"], (0, 0)),
        Format("int8", ELEMENTS["int8"], (0, 0)),
        Format("int8-rowwise", ELEMENTS["int8"], (1, 0)),
        Format("mxfp8", _E4M3, (1, 32), "e8m0"),
        Format("mxfp8-e5m2", ELEMENTS["e5m2"], (1, 32), "e8m0"),
        Format("mxfp6-e2m3", ELEMENTS["e2m3"], (1, 32), "e8m0"),
        Format("mxfp6-e3m2", ELEMENTS["e3m2"], (1, 32), "e8m0"),
        Format("mxfp4", _E2M1, (1, 32), "e8m0"),
        Format("nvfp4", _E2M1, (1, 16), "e4m3"),
    )
}


@dataclass
class Counts:
    """What became of values that were quantised; what is counted adds up from call to call."""

    values: int = 0
    nonfinite: int = 0
    clipped: int = 0  # beyond the largest number, by more than rounding explains
    flushed: int = 0  # to zero
    subnormal: int = 0

    def add(self, values: Tensor, scaled: Tensor, rounded: Tensor, element: Element) -> None:
        """Count values, as they were divided by their scale, and what they were rounded to."""
        before = scaled.abs()
        after = rounded.abs()
        kept = _count(after)  # NaN too
        self.values += before.numel()
        self.flushed += _count(before) - kept
        self.subnormal += kept - _count(after >= element.smallest_normal)
        largest = float(before.max())  # NaN if one of them is
        is_finite = math.isfinite(largest)
        if not is_finite:
            self.nonfinite += before.numel() - _count(values.isfinite())
            self.subnormal -= _count(after.isnan())
        if largest >= element.overflow or not is_finite:
            clipped = before >= element.overflow
            self.clipped += _count(clipped & before.isfinite())

    def shares(self) -> dict[str, float]:
        """Each of them as a share of the values."""
        return {name: count / self.values for name, count in vars(self).items() if name != "values"}


def _count(found: Tensor) -> int:
    return int(torch.count_nonzero(found))


def quantize(
    values: Tensor,
    form: str | Format,
    *,
    amax: float | None = None,
    generator: torch.Generator | None = None,
    counts: Counts | None = None,
) -> Tensor:
    """`values` as they come back from a format: quantised and dequantised, in fp32, same shape.

    `form` is a name of `FORMATS` or a `Format`. Rows are the last dimension; what stands before it
    counts as one. `amax` takes the place of the largest magnitude where the whole tensor has a
    scale, as delayed scaling does. With a `generator` elements, but not scales, are rounded
    stochastically. `counts` is told what was clipped and flushed.

    `torch.compile(quantize)` gives the same bits, in fewer passes over memory. The result has no
    gradient. It is torchao's (float8, MXTensor, NVFP4Tensor), bit for bit; where
    that divides zero by zero, for a tensor of zeros in NVFP4, it is zero. A NaN makes all that
    share its scale NaN.

    Raises `NumericsError` for a format that does not exist, values that are not floating or have
    no dimension, and a size that is no multiple of the block's.
    """
    form = format_of(form)
    has_one_scale = form.block == (0, 0) and form.scale != "none"
    if amax is not None and not has_one_scale:
        raise NumericsError(f"quantize: amax is for one scale of the whole tensor, not {form.name}")
    if not values.is_floating_point() or not values.dim():
        raise NumericsError("quantize: it takes a floating-point tensor of one dimension or more")
    exact = values.detach().float()
    if not exact.numel():
        return exact
    if form.scale == "none":
        rounded = exact.to(form.element.dtype).float()
        if counts:
            counts.add(exact, exact, rounded, form.element)
        return rounded
    return _quantize_scaled(exact, form, amax, generator, counts)


def _quantize_scaled(
    values: Tensor,
    form: Format,
    amax: float | None,
    generator: torch.Generator | None,
    counts: Counts | None,
) -> Tensor:
    blocks = _blocks(values, form)
    count = values.numel()
    block_amax = _block_amax(_pieces(blocks, count), form)
    if amax is not None:
        block_amax = torch.full_like(block_amax, amax)
    factors, scales = _SCALES[form.scale](block_amax, form)
    factors = factors.expand(len(blocks), -1, -1, -1)
    scales = scales.expand(len(blocks), -1, -1, -1)
    rounded = torch.empty_like(blocks)
    pieces = [_pieces(each, count) for each in (blocks, rounded, factors, scales)]
    for exact, out, factor, scale in zip(*pieces, strict=True):
        torch.mul(exact, factor, out=out)
        scaled = out.clone() if counts else out
        form.element.round_(out, generator)
        if counts:
            counts.add(exact, scaled, out, form.element)
        if form.scale in _SCALES_OF_8_BITS:
            out.mul_(scale)
        else:
            out.div_(scale)
    return rounded.view(values.shape)


def _block_amax(pieces: Sequence[Tensor], form: Format) -> Tensor:
    """The largest magnitude of what shares a scale, of shape (rows or 1, 1, columns, 1)."""
    found = []
    for piece in pieces:
        row_amax = piece.abs().amax(3, keepdim=True)
        found.append(row_amax.amax(1, keepdim=True))
    amax = torch.cat(found)
    if form.block[0] == 0:
        amax = amax.amax(0, keepdim=True)
    return amax


def format_of(form: str | Format) -> Format:
    """The format of a name; raises `NumericsError` if there is none."""
    if isinstance(form, Format):
        return form
    if form not in FORMATS:
        raise NumericsError(f"format: {form!r} is none of {', '.join(FORMATS)}")
    return FORMATS[form]


def _blocks(values: Tensor, form: Format) -> Tensor:
    """The values as rows of blocks, rows in a block, columns of blocks, columns in a block.

    Where the whole tensor has one scale, its rows are blocks all the same, so that it can be taken
    in pieces.
    """
    columns = values.shape[-1]
    rows = values.numel() // columns
    block_rows = form.block[0] or 1
    block_columns = form.block[1] or columns
    if rows % block_rows or columns % block_columns:
        raise NumericsError(
            f"quantize: {form.name} has blocks of {block_rows}x{block_columns}, and "
            f"{rows}x{columns} values, of the shape {tuple(values.shape)}, are no multiple of that"
        )
    return values.reshape(rows // block_rows, block_rows, columns // block_columns, block_columns)


def _pieces(blocks: Tensor, values: int) -> tuple[Tensor, ...]:
    """Some rows of blocks at a time, so that what is computed on the way stays in the cache.

    A compiler does that by itself.
    """
    if torch.compiler.is_compiling():
        return (blocks,)
    rows = _PIECE * len(blocks) // values
    return blocks.split(max(1, rows))


# Scales of blocks by their largest magnitude. The first is what values are multiplied with before
# they are rounded. After that they are divided by the second, or multiplied with it if it has 8
# bits.


def _fp32_scales(amax: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """As torchao's float8 has them: one number is held, to multiply with and to divide by."""
    amax = amax.double().clamp(min=_LEAST_AMAX)
    factor = (form.element.largest / amax).float()
    if form.scale == "power2":
        factor = factor.log2().floor().exp2()
    return factor, factor


def _e4m3_scales(amax: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """The two levels of NVFP4: the largest block's scale is E4M3's largest number."""
    tensor_scale = amax.amax() / (_E4M3.largest * form.element.largest)
    tensor_scale = torch.where(tensor_scale == 0, 1.0, tensor_scale)
    block_scale = amax / form.element.largest / tensor_scale
    block_scale = _E4M3.round(block_scale.clamp(_E4M3.smallest_normal, _E4M3.largest))
    return (1.0 / tensor_scale) / block_scale, block_scale * tensor_scale


def _e8m0_scales(amax: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Powers of two.

    At the ends of the range the two are not each other's inverse, as in torchao: 2^-127 divides as
    2^-126 does, or, with "rceil", as 1.
    """
    if form.power == "rceil":
        ratio = amax / form.element.largest
        exponent = ratio.log2().ceil().clamp(-127, 127)
        factor = torch.where(exponent == -127, 1.0, torch.exp2(-exponent))
        return factor, torch.exp2(exponent)
    bits = amax.view(torch.int32)
    if form.power == "even":  # as if the magnitude had been rounded to the element's mantissa first
        bits = bits + (1 << (22 - form.element.mantissa_bits))
    exponent = (bits >> 23) - 127 - form.element.largest_exponent
    if form.power == "ceil":
        is_above = (bits & _FP32_MANTISSA) > 0
        exponent = exponent + is_above
    exponent = exponent.clamp(-127, 127).float()
    exponent = torch.where(amax.isnan(), torch.nan, exponent)
    factor = torch.exp2(-exponent.clamp(min=-126))
    return factor, torch.exp2(exponent)


_SCALES = {
    "fp32": _fp32_scales,
    "power2": _fp32_scales,
    "e4m3": _e4m3_scales,
    "e8m0": _e8m0_scales,
}

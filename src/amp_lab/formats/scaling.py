"""Quantise tensors to formats below 16 bits, with a scale for each block of values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_lab.core.errors import NumericsError
from amp_lab.formats.elements import ELEMENTS, Element

_LEAST_AMAX = 1e-12  # as in torchao's float8, so that a tensor of zeros has a finite scale
_E4M3 = ELEMENTS["e4m3"]
_E2M1 = ELEMENTS["e2m1"]
_FP32_MANTISSA = 0x7FFFFF  # a mask of its bits
_PIECE = 2**16  # values that are quantised at a time
_POWERS = ("floor", "ceil", "even", "rceil")
_SCALES_OF_8_BITS = ("e4m3", "e8m0")


@dataclass(frozen=True)
class Format:
    """How a tensor is stored below 16 bits: an element for each value, and shared scales.

    `block` is the number of rows and of columns that share a scale. Write 0 for all rows or all
    columns:

    - ``(0, 0)`` is one scale for the tensor,
    - ``(1, 0)`` is one for each row,
    - ``(1, 32)`` is one for every 32 neighbours in a row.

    `scale` is the number format of a scale: ``fp32``, ``power2`` (a power of two in fp32), ``e8m0``
    or ``e4m3``. For ``e4m3``, the whole tensor has a second scale in fp32. ``none`` is a plain cast
    without scales.

    `power` is the rounding of an E8M0 scale to a power of two: ``rceil`` (Blackwell's rounding,
    which clips nothing), ``floor`` (OCP's rounding), ``ceil`` or ``even``. The scale is computed
    from the largest magnitude of the block.

    The other fields say which GPUs and libraries support the format, and how `rehearse` uses it:

    - `matmul` is the name of the format in the `matmuls` of GPUs (see `core.gpus`).
    - `torchao` is the name of torchao's recipe. Forecasts of times and the code for torchao need
      this name.
    - `gradient` is the name of the format of gradients. If it is empty, gradients use this format
      too.
    - `rank` is the place of the format in the recommendations of `rehearse`. Formats that libraries
      have considered safe for longest come first.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: str = "fp32"
    power: str = "rceil"
    matmul: str = ""
    torchao: str = ""
    gradient: str = ""
    rank: int = 9

    def __post_init__(self) -> None:
        if self.power not in _POWERS:
            raise NumericsError(
                f"Format: power {self.power!r} is unknown; give one of {', '.join(_POWERS)}"
            )

    @property
    def bits(self) -> float:
        """The bits of each value, including its share of the block's scale.

        Scales of rows and tensors are not included, because their share depends on the shape.
        """
        block_values = math.prod(self.block)
        if not block_values:
            return self.element.bits
        scale_bits = 8 if self.scale in _SCALES_OF_8_BITS else 32
        return self.element.bits + scale_bits / block_values

    @property
    def multiple(self) -> int:
        """Each size of a matmul must be a multiple of this number.

        Today's FP8 and FP4 kernels need whole blocks and multiples of 16.
        """
        if self.scale == "none":
            return 1
        return max(16, *self.block)


FORMATS = {
    form.name: form
    for form in (
        Format("bf16", ELEMENTS["bf16"], (0, 0), "none", matmul="bf16"),
        Format("fp16", ELEMENTS["fp16"], (0, 0), "none", matmul="fp16"),
        Format(
            "fp8",
            _E4M3,
            (0, 0),
            matmul="fp8",
            torchao="tensorwise",
            gradient="fp8-e5m2",
            rank=3,
        ),
        Format("fp8-rowwise", _E4M3, (1, 0), "power2", matmul="fp8", torchao="rowwise", rank=1),
        Format("fp8-1x128", _E4M3, (1, 128)),
        Format("fp8-128x128", _E4M3, (128, 128)),
        Format("fp8-e5m2", ELEMENTS["e5m2"], (0, 0)),
        Format("fp8-e4m3fnuz", ELEMENTS["e4m3fnuz"], (0, 0)),
        Format("fp8-e5m2fnuz", ELEMENTS["e5m2fnuz"], (0, 0)),
        Format("int8", ELEMENTS["int8"], (0, 0)),
        Format("int8-rowwise", ELEMENTS["int8"], (1, 0)),
        Format("mxfp8", _E4M3, (1, 32), "e8m0", matmul="mxfp8", torchao="mxfp8", rank=2),
        Format("mxfp8-e5m2", ELEMENTS["e5m2"], (1, 32), "e8m0", matmul="mxfp8"),
        Format("mxfp6-e2m3", ELEMENTS["e2m3"], (1, 32), "e8m0"),
        Format("mxfp6-e3m2", ELEMENTS["e3m2"], (1, 32), "e8m0"),
        Format("mxfp4", _E2M1, (1, 32), "e8m0", matmul="mxfp4", torchao="mxfp4", rank=5),
        Format("nvfp4", _E2M1, (1, 16), "e4m3", matmul="nvfp4", torchao="nvfp4", rank=4),
    )
}
"""The formats by name. To add a format, add a row: all other code reads the row."""


@dataclass
class Counts:
    """Counts of clipped and flushed values, summed over all calls of `quantize`."""

    values: int = 0  # all of them
    nonfinite: int = 0
    clipped: int = 0  # finite, and so far above the largest number that they would overflow
    flushed: int = 0  # to zero
    subnormal: int = 0

    def add(self, values: Tensor, scaled: Tensor, rounded: Tensor, element: Element) -> None:
        """Count the values of one call, all three in fp32 and of one shape.

        `values` are the values before quantisation. `scaled` are the values multiplied by the
        factor of their block. `rounded` are the numbers of the element to which `scaled` were
        rounded.
        """
        before = scaled.abs()
        after = rounded.abs()
        nonzero = _count_nonzero(after)  # NaN counts as nonzero
        normal = _count_nonzero(after >= element.smallest_normal)
        self.values += before.numel()
        self.flushed += _count_nonzero(before) - nonzero
        self.subnormal += nonzero - normal
        # The usual case needs no further pass over the values: all are finite, and none clipped.
        if float(before.max()) < element.overflow:  # False if any value is NaN
            return
        is_clipped = (before >= element.overflow) & before.isfinite()
        self.clipped += _count_nonzero(is_clipped)
        self.nonfinite += values.numel() - _count_nonzero(values.isfinite())
        # NaN is not >= anything, so it was counted as subnormal above.
        self.subnormal -= _count_nonzero(after.isnan())

    def shares(self) -> dict[str, float]:
        """Each count as a share of all values."""
        return {name: count / self.values for name, count in vars(self).items() if name != "values"}


def _count_nonzero(values: Tensor) -> int:
    """How many numbers are not 0, or how many booleans are True."""
    return int(torch.count_nonzero(values))


def quantize(
    values: Tensor,
    form: str | Format,
    *,
    amax: float | None = None,
    generator: torch.Generator | None = None,
    counts: Counts | None = None,
) -> Tensor:
    """Quantise `values` to a format and dequantise them: returns fp32 in the same shape.

    `form` is a name in `FORMATS` or a `Format`. Rows run along the last dimension. The dimensions
    before it are flattened. If the format has one scale for the tensor, `amax` replaces the largest
    magnitude, as in delayed scaling. With a `generator`, elements are rounded stochastically, but
    scales and formats without a scale (bf16, fp16) are not. `counts`, if given, adds up the numbers
    of clipped and flushed values.

    The result equals that of torchao (float8, MXTensor, NVFP4Tensor) bit for bit, with one
    exception: in NVFP4 a tensor of zeros stays zero, where torchao divides zero by zero. A NaN
    makes all values with the same scale NaN. The result has no gradient. `torch.compile(quantize)`
    gives the same bits, with fewer passes over memory.

    Raises `NumericsError` for an unknown format, for values that are not floating-point or have no
    dimension, and for a shape that cannot be divided into blocks.
    """
    form = format_of(form)
    has_one_scale = form.block == (0, 0) and form.scale != "none"
    if amax is not None and not has_one_scale:
        raise NumericsError(
            "quantize: amax applies only to formats with one scale for the whole tensor, not "
            f"to {form.name}"
        )
    if not values.is_floating_point() or not values.dim():
        raise NumericsError(
            "quantize: values must be a floating-point tensor with at least one dimension"
        )
    exact = values.detach().float()
    if not exact.numel():
        return exact
    if form.scale == "none":  # a plain cast, which torch rounds itself
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
    """What `quantize` returns for a format with scales, from fp32 `values`."""
    blocks = _blocks(values, form)  # a view of four dimensions
    piece_rows = _rows_in_piece(blocks)
    block_amax = _block_amax(blocks.split(piece_rows), form)
    if amax is not None:
        block_amax = torch.full_like(block_amax, amax)
    factors, scales = _SCALES[form.scale](block_amax, form)
    # One for each row of blocks, so that they can be cut into pieces as the blocks are.
    factors = factors.expand(len(blocks), -1, -1, -1)
    scales = scales.expand(len(blocks), -1, -1, -1)
    rounded = torch.empty_like(blocks)
    pieces = [tensor.split(piece_rows) for tensor in (blocks, rounded, factors, scales)]
    for exact, out, factor, scale in zip(*pieces, strict=True):  # `out` is a view of `rounded`
        torch.mul(exact, factor, out=out)
        scaled = out.clone() if counts else out  # a copy, since `out` is rounded in place
        form.element.round_(out, generator)
        if counts:
            counts.add(exact, scaled, out, form.element)
        if form.scale in _SCALES_OF_8_BITS:
            out.mul_(scale)
        else:
            out.div_(scale)
    return rounded.view(values.shape)


def _block_amax(pieces: Sequence[Tensor], form: Format) -> Tensor:
    """The largest magnitude of each block, from pieces of the tensor of `_blocks`.

    Its shape is (rows of blocks, 1, columns of blocks, 1), or (1, 1, 1, 1) for one scale in all.
    """
    amax_of_pieces = []
    for piece in pieces:
        row_amax = piece.abs().amax(3, keepdim=True)
        amax_of_pieces.append(row_amax.amax(1, keepdim=True))
    amax = torch.cat(amax_of_pieces)
    if form.block[0] == 0:
        amax = amax.amax(0, keepdim=True)
    return amax


def format_of(form: str | Format) -> Format:
    """Return the format with a name; a `Format` is returned unchanged.

    Raises `NumericsError` for an unknown name.
    """
    if isinstance(form, Format):
        return form
    if form not in FORMATS:
        raise NumericsError(f"format: {form!r} is unknown; give one of {', '.join(FORMATS)}")
    return FORMATS[form]


def _blocks(values: Tensor, form: Format) -> Tensor:
    """View values as (rows of blocks, rows in a block, columns of blocks, columns in a block).

    Where the whole tensor has one scale, each of its rows becomes a block, so that it can be cut
    into pieces. Raises `NumericsError` if blocks do not divide the shape evenly.
    """
    columns = values.shape[-1]
    rows = values.numel() // columns
    block_rows = form.block[0] or 1
    block_columns = form.block[1] or columns
    if rows % block_rows or columns % block_columns:
        raise NumericsError(
            f"quantize: the shape {tuple(values.shape)}, {rows}x{columns} values, is not a "
            f"multiple of the {block_rows}x{block_columns} blocks of {form.name}"
        )
    return values.reshape(rows // block_rows, block_rows, columns // block_columns, block_columns)


def _rows_in_piece(blocks: Tensor) -> int:
    """How many rows of blocks are quantised at a time: about `_PIECE` values, or all if compiled.

    The intermediate results of a piece stay in the cache. torch.compile fuses the ops instead.
    """
    if torch.compiler.is_compiling():
        return len(blocks)
    row_values = blocks[0].numel()
    return max(1, _PIECE // row_values)


# --- Each of these functions returns ``(factors, scales)`` from the largest magnitudes of blocks.
# Values are multiplied by the factor before they are rounded. To dequantise, they are divided by
# the scale, or multiplied by it if it has 8 bits (`_SCALES_OF_8_BITS`).


def _fp32_scales(amax: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Scales in fp32, as torchao's float8 has them: factor and scale are the same number.

    With ``power2`` it is rounded down to a power of two.
    """
    amax = amax.double().clamp(min=_LEAST_AMAX)
    factor = (form.element.largest / amax).float()
    if form.scale == "power2":
        factor = factor.log2().floor().exp2()
    return factor, factor


def _e4m3_scales(amax: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Scales of NVFP4 on two levels: in E4M3 for each block, and in fp32 for the tensor.

    A value is element * block scale * tensor scale. The tensor's scale is chosen so that the
    largest block's scale is E4M3's largest number.
    """
    tensor_scale = amax.amax() / (_E4M3.largest * form.element.largest)
    tensor_scale = torch.where(tensor_scale == 0, 1.0, tensor_scale)  # for a tensor of zeros
    block_scale = amax / form.element.largest / tensor_scale
    block_scale = _E4M3.round(block_scale.clamp(_E4M3.smallest_normal, _E4M3.largest))
    # torchao divides in this order, too: another one would round to other bits.
    factor = (1.0 / tensor_scale) / block_scale
    return factor, block_scale * tensor_scale


def _e8m0_scales(amax: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Scales that are powers of two, from 2^-127 to 2^127.

    As in torchao, factor and scale are each other's inverse except for the smallest scale, 2^-127:
    its factor is 2^126, or 1 with ``rceil``.
    """
    exponent = _e8m0_exponent(amax, form).clamp(-127, 127)  # NaN stays
    factor_of_smallest = 1.0 if form.power == "rceil" else 2.0**126
    factor = torch.where(exponent == -127, factor_of_smallest, torch.exp2(-exponent))
    return factor, torch.exp2(exponent)


def _e8m0_exponent(amax: Tensor, form: Format) -> Tensor:
    """The exponent of each scale, in fp32, before it is limited to E8M0's range; NaN for NaN."""
    if form.power == "rceil":
        ratio = amax / form.element.largest
        return ratio.log2().ceil()
    bits = amax.view(torch.int32)  # of fp32: the exponent, with a bias of 127, and 23 mantissa bits
    if form.power == "even":
        # Half a unit of the element's last mantissa bit is added, so that the shift below rounds
        # to the element's mantissa. This may carry into the exponent.
        last_bit = 23 - form.element.mantissa_bits
        bits = bits + (1 << (last_bit - 1))
    exponent = (bits >> 23) - 127
    if form.power == "ceil":
        is_above_power = (bits & _FP32_MANTISSA) > 0
        exponent = exponent + is_above_power
    exponent = (exponent - form.element.largest_exponent).float()
    return torch.where(amax.isnan(), torch.nan, exponent)


_SCALES = {
    "fp32": _fp32_scales,
    "power2": _fp32_scales,
    "e4m3": _e4m3_scales,
    "e8m0": _e8m0_scales,
}

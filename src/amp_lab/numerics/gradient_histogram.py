"""A histogram of gradient values, with bins that end exactly where fp16 rounds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amp_lab.core.errors import NumericsError

KEEP = 0.999  # share of the non-zero gradient values that `smallest_scale` keeps
SAMPLE = 2**17  # values counted, about, of a gradient with twice as many or more
LARGEST_POWER = 64  # scales go from 2^-64 to 2^64, far from where fp32 itself underflows


def log2_of(scale: float) -> int:
    """The exponent of a scale; raises `NumericsError` if it is no power of two."""
    if scale > 0 and math.isfinite(scale):
        mantissa, exponent = math.frexp(scale)
        power = exponent - 1  # the mantissa of a power of two is 0.5
        if mantissa == 0.5 and abs(power) <= LARGEST_POWER:
            return power
    raise NumericsError(f"loss scale {scale:g}: give a power of two from 2^-64 to 2^64")


# What fp16 makes of a value, at any power of two as a scale, follows from the value's exponent in
# fp32: the bits of its magnitude, shifted right by the 23 bits of the mantissa. But fp16 does not
# round exactly at powers of two. So an offset is added to the bits before the shift, which moves
# the values at the edge to the next exponent. Three questions have three offsets:
#   zero?      -1    2^-25 itself still rounds to zero
#   normal?    2^13  2^-14 - 2^-25 already rounds to the smallest normal number
#   infinite?  2^12  65520 = 2^16 - 2^4 already rounds to infinity
# So a value has three exponents. They are equal, or the second is 1 more than the first, or the
# second and the third are. One number holds all three, so that a value is counted once: their sum.
# Its quotient by 3 is the first exponent, and its remainder says how many are 1 more. For example,
# 2^-25 has the exponents 101 (it rounds to zero), 102 and 102, and the sum 305 = 3 * 101 + 2.
# The sum is -1 for the value zero, so the key of a value, an index of bins, is the sum plus 1.
_KEYS = 3 * 255 + 2
_SUMS = torch.arange(-1, _KEYS - 1)  # the sum of each key
# The three exponents of each key: for rounding to zero, to normal numbers and to infinity.
_TO_ZERO = _SUMS.div(3, rounding_mode="floor") - 127
_TO_NORMAL = _TO_ZERO + (_SUMS % 3 > 0)
_TO_INFINITY = _TO_ZERO + (_SUMS % 3 > 1)


def _count_by_key(values: Tensor) -> Tensor:
    """Count values by their key, which is described above: (_KEYS,) in int64 on the CPU.

    A float64 beyond fp32 becomes inf in it, and counts as a value that overflows at every scale.
    """
    bits = values.to(torch.float32).abs().view(torch.int32)
    # The key is 1 + ((bits - 1) >> 23) + ((bits + 2**12) >> 23) + ((bits + 2**13) >> 23). It is
    # computed in place, which takes half the time.
    key = bits - 1
    key >>= 23
    key += 1
    bits += 2**12
    key += bits >> 23
    bits += 2**12  # together 2**13
    key += bits >> 23
    bins = torch.bincount(key, minlength=_KEYS).cpu()
    if values.dtype is torch.float64:
        # A value that is too small for fp32 became zero, but belongs to the smallest non-zero ones.
        zeros = (values == 0).sum().cpu()
        tiny = bins[0] - zeros
        bins[0] -= tiny
        bins[1] += tiny
    return bins


@dataclass(eq=False)
class GradientCount:
    """Counts of the gradient values of one or several layers that fp16 would change.

    Each value is treated as ``(gradient * scale).to(torch.float16)``; scales are powers of two.
    """

    layer: str  # qualified name of the module
    what: str  # the parameter's name, or ``output of OP``: the gradient that arrives there
    values: int = 0
    nonfinite: int = 0  # inf or NaN before any cast; not in the other counts
    half: bool = False  # whether some gradients were fp16, so that `zero` has what it flushed
    sample: int | None = None  # size of the smallest sample; None if all values were counted
    # Number of values by key, (_KEYS,).
    _bins: Tensor = field(default_factory=lambda: torch.zeros(_KEYS).long(), repr=False)

    @torch.no_grad()
    def add(self, gradients: Iterable[Tensor | None]) -> None:
        """Count the values of these gradients, which may have any layout and dtype.

        As a hook of an autograd node, it gets all gradients that arrive there, with None for none.
        """
        for gradient in gradients:
            if gradient is not None:
                values = _flattened(gradient.detach())
                self.values += len(values)
                self._bins += self._count(values)

    def _count(self, values: Tensor) -> Tensor | int:
        """Number of the finite ones among values (n,) by key, estimated from a sample if many.

        Returns a tensor (_KEYS,), or 0 without values. Also adds the number of inf and NaN to
        `nonfinite`, and notes the size of the sample in `sample`.
        """
        if not len(values):
            return 0
        extremes = torch.stack(values.aminmax())
        if not all(map(math.isfinite, extremes.tolist())):
            finite = values[values.isfinite()]
            self.nonfinite += len(values) - len(finite)
            return self._count(finite)
        if len(values) < 2 * SAMPLE:
            return _count_by_key(values)
        sample = values[:: _sampling_stride(len(values))]
        self.sample = min(self.sample or len(sample), len(sample))
        # The sample stands for all values but the extremes, which are counted exactly.
        others = len(values) - len(extremes)
        bins = _count_by_key(sample) * others // len(sample)
        bins[bins.argmax()] += others - bins.sum()  # the division rounds down
        return bins + _count_by_key(extremes)

    @property
    def zero(self) -> int:
        """Number of values that are exactly zero before any cast."""
        return int(self._bins[0])

    @property
    def nonzero(self) -> int:
        """Number of values that are finite and not zero, which fp16 could lose."""
        return self.values - self.zero - self.nonfinite

    def _below(self, exponents: Tensor, end: int) -> int:
        """Number of non-zero values whose exponent is below `end`.

        `exponents` has the exponent of each key: `_TO_ZERO`, `_TO_NORMAL` or `_TO_INFINITY`.
        """
        is_below = exponents[1:] < end  # without key 0, that of zeros
        return int(self._bins[1:][is_below].sum())

    def zero_in_fp16(self, scale: float) -> int:
        """Number of non-zero values that become zero in fp16 at this loss scale."""
        # fp16's smallest number is 2^-24. Half of it is a tie, which rounds to zero, since zero is
        # even; larger values round to 2^-24.
        return self._below(_TO_ZERO, -25 - log2_of(scale))

    def subnormal_in_fp16(self, scale: float) -> int:
        """Number of values that become subnormal, with fewer than 11 significant bits."""
        below_normal = self._below(_TO_NORMAL, -14 - log2_of(scale))
        return below_normal - self.zero_in_fp16(scale)

    def inf_in_fp16(self, scale: float) -> int:
        """Number of finite values that become infinite."""
        finite = self._below(_TO_INFINITY, 16 - log2_of(scale))
        return self.nonzero - finite

    def lost(self, scale: float) -> float:
        """Share of the non-zero values, from 0 to 1, that become zero; NaN if `half`."""
        if self.half:
            return math.nan
        if not self.nonzero:
            return 0.0
        return self.zero_in_fp16(scale) / self.nonzero

    @property
    def histogram(self) -> dict[int, int]:
        """For each exponent k with values, the number of magnitudes in (2^k, 2^(k+1)].

        Zeros are left out. The entry -127 also counts all smaller magnitudes.
        """
        lowest = -127
        counts = torch.zeros(256, dtype=torch.int64)  # of exponents from the lowest on
        # Several keys have one exponent. Key 0, that of zeros, is left out.
        counts.index_add_(0, _TO_ZERO[1:] - lowest, self._bins[1:])
        return {exponent: count for exponent, count in enumerate(counts.tolist(), lowest) if count}

    @property
    def smallest_scale(self) -> float | None:
        """The smallest power of two, from 1 to 2^64, that keeps 99.9 % of the non-zero values.

        None if there is no such power, or no value, or if `half`.
        """
        if self.half or not self.nonzero:
            return None
        allowed = (1 - KEEP) * self.nonzero
        for power in range(LARGEST_POWER + 1):
            if self.zero_in_fp16(2.0**power) <= allowed:
                return 2.0**power
        return None

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two at which no value becomes infinite; None without values."""
        if not self.nonzero:
            return None
        for power in range(LARGEST_POWER, -LARGEST_POWER - 1, -1):
            if not self.inf_in_fp16(2.0**power):
                return 2.0**power
        return None


def together(what: str, rows: Sequence[GradientCount]) -> GradientCount:
    """The sum of several counts, with ``all`` as its `layer` and with this `what`."""
    total = GradientCount("all", what, half=any(row.half for row in rows))
    for row in rows:
        total.values += row.values
        total.nonfinite += row.nonfinite
        total._bins += row._bins
    total.sample = min((row.sample for row in rows if row.sample), default=None)
    return total


def _sampling_stride(count: int) -> int:
    """A stride that samples about `SAMPLE` of `count` values.

    It shares no divisor with `count`, so that the sample has values of every column of a matrix.
    """
    stride = count // SAMPLE
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride


def _flattened(tensor: Tensor) -> Tensor:
    """The values in one dimension; no copy if the memory is dense, in any order of dimensions.

    Of a sparse tensor the stored values; of a complex one the real and imaginary parts.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce()
    if tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # With the largest stride first, the values are read as they lie in memory.
    by_stride = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)))
    by_stride.reverse()
    return tensor.permute(by_stride).reshape(-1)

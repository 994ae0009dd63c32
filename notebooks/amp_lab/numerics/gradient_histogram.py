"""How many gradient values lie where, exactly as fp16 would round them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from amp_lab.numerics.checks import LARGEST_POWER, log2_of

KEEP = 0.999
"""The share of the non-zero gradient values that `smallest_scale` keeps."""
_CHUNK = 2**17  # values at a time: the buffers for them stay in a core's cache


@dataclass
class GradientCount:
    """How the gradient values of one layer, or of several together, would fare in fp16.

    A value fares as ``(gradient * scale).to(torch.float16)`` does. Scales are powers of two from
    2^-64 to 2^64.
    """

    layer: str
    """Qualified name of the module."""
    what: str
    """The parameter's name, or ``output of OP``: the gradient that arrives there."""
    values: int = 0
    zero: int = 0
    """Values that are exactly zero before any cast."""
    nonfinite: int = 0
    """Values that are infinite or NaN before any cast; counted nowhere else."""
    _classes: Counter[int] = field(default_factory=Counter)  # see Histogram

    @property
    def nonzero(self) -> int:
        """Values that are finite and not zero: those that fp16 could lose."""
        return self.values - self.zero - self.nonfinite

    def zero_in_fp16(self, scale: float) -> int:
        """Number of values that are not zero, and would be in fp16 at this loss scale."""
        # fp16's smallest number is 2^-24. Half of it lies between that and zero and goes to the
        # even one of the two, which is zero; what is larger goes to 2^-24.
        below = -25 - log2_of(scale)
        return sum(n for key, n in self._classes.items() if _exponents(key)[0] < below)

    def subnormal_in_fp16(self, scale: float) -> int:
        """Number of values that would be kept with fewer than fp16's 11 significant bits."""
        below = -14 - log2_of(scale)
        small = sum(n for key, n in self._classes.items() if _exponents(key)[1] < below)
        return small - self.zero_in_fp16(scale)

    def inf_in_fp16(self, scale: float) -> int:
        """Number of finite values that would be infinite."""
        top = 16 - log2_of(scale)
        return sum(n for key, n in self._classes.items() if _exponents(key)[2] >= top)

    def lost(self, scale: float) -> float:
        """Share of the non-zero values, from 0 to 1, that would be zero."""
        return self.zero_in_fp16(scale) / self.nonzero if self.nonzero else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """Exponent k: number of values with a magnitude in (2^k, 2^(k+1)]; -127: all below, too."""
        result: Counter[int] = Counter()
        for key, count in self._classes.items():
            result[_exponents(key)[0]] += count
        return dict(sorted(result.items()))

    @property
    def smallest_scale(self) -> float | None:
        """The smallest power of two, 1 or more, at which 99.9 % of the non-zero values stay so.

        None if there are no such values, or 2^64 would not do.
        """
        allowed = (1 - KEEP) * self.nonzero
        scales = (2.0**p for p in range(LARGEST_POWER + 1))
        return next((s for s in scales if self.nonzero and self.zero_in_fp16(s) <= allowed), None)

    @property
    def largest_scale(self) -> float | None:
        """The largest power of two at which no value becomes infinite; None without values."""
        scales = (2.0**p for p in range(LARGEST_POWER, -LARGEST_POWER - 1, -1))
        return next((s for s in scales if self.nonzero and not self.inf_in_fp16(s)), None)

    def add(self, other: "GradientCount") -> None:
        """Count the values of another as well."""
        self.values += other.values
        self.zero += other.zero
        self.nonfinite += other.nonfinite
        self._classes.update(other._classes)


class Buffers:
    """Room for the steps of one chunk, used again for the next."""

    def __init__(self, device: torch.device):
        self.size = _CHUNK if device.type == "cpu" else 2**24
        self.magnitude, self.exponent, self.sum = (
            torch.empty(self.size, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.key = torch.empty(self.size, dtype=torch.int16, device=device)


class Histogram:
    """Counts gradient values by where they lie between powers of two, exactly as fp16 rounds.

    fp32's own exponents make the bins: the bits of a magnitude, as an integer, shifted right by
    its 23 bits of mantissa. An offset before the shift moves the edges of the bins to where fp16
    rounds, for every power of two as a scale:

    - -1 lets a bin end with its power of two, since 2^-25 itself still rounds to zero;
    - 2^13 lets it begin earlier, since 2^-14 - 2^-25 already rounds to the smallest normal number;
    - 2^12 likewise, since 65520 = 2^16 - 2^4 already rounds to infinity.

    The second is the first or one more, and the third likewise and never more than the second, so
    that their sum tells all three (`_exponents`), and one pass of `bincount` serves for all.
    """

    def __init__(self, layer: str, what: str):
        self._layer, self._what = layer, what
        self._bins: torch.Tensor | None = None
        self._values = self._nonfinite = self._tiny = 0

    @property
    def seen(self) -> bool:
        """Whether any value was added."""
        return self._values > 0

    @torch.no_grad()
    def add(self, gradient: torch.Tensor, buffers: dict[torch.device, Buffers]) -> None:
        """Count the values of a gradient of any layout and dtype, in room that is used again."""
        gradient = gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient.values()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        if gradient.device not in buffers:
            buffers[gradient.device] = Buffers(gradient.device)
        room = buffers[gradient.device]
        self._values += gradient.numel()
        if self._bins is None:
            self._bins = torch.zeros(_KEYS, dtype=torch.int64, device=gradient.device)
        for chunk in _as_it_lies(gradient).split(room.size):
            bins = self._count(chunk.to(torch.float32), room)
            if bins[-2:].any():  # inf or NaN, or the last numbers before inf
                finite = chunk.to(torch.float64).isfinite()
                chunk = chunk[finite]
                self._nonfinite += finite.numel() - chunk.numel()
                # float64 values that are too large for fp32 are too large for every scale.
                largest = torch.finfo(torch.float32).max
                chunk = chunk.clamp(-largest, largest)
                bins = self._count(chunk.to(torch.float32), room)
            self._bins += bins
            if chunk.dtype is torch.float64:  # or too small
                self._tiny += int(((chunk.to(torch.float32) == 0) & (chunk != 0)).sum())

    @staticmethod
    def _count(values: torch.Tensor, room: Buffers) -> torch.Tensor:
        """Number of values by key, (765 + 2,)."""
        size = values.numel()
        magnitude, exponent, total, key = (
            buffer[:size] for buffer in (room.magnitude, room.exponent, room.sum, room.key)
        )
        torch.abs(values, out=magnitude.view(torch.float32))
        torch.sub(magnitude, 1, out=total).bitwise_right_shift_(23)
        for offset in (2**13, 2**12):
            torch.add(magnitude, offset, out=exponent).bitwise_right_shift_(23)
            total += exponent
        key.copy_(total).add_(1)  # of zero the first exponent is -1
        return torch.bincount(key, minlength=_KEYS)

    def count(self) -> GradientCount:
        """What was counted so far."""
        result = GradientCount(self._layer, self._what, self._values, nonfinite=self._nonfinite)
        if self._bins is not None:
            bins = self._bins.tolist()
            result.zero = bins[0] - self._tiny
            bins[0], bins[1] = 0, bins[1] + self._tiny
            result._classes = Counter({key: n for key, n in enumerate(bins) if n})
        return result


_KEYS = 3 * 255 + 2


def _exponents(key: int) -> tuple[int, int, int]:
    """The three exponents of a key: for rounding to zero, to normal numbers, and to infinity."""
    first, more = divmod(key - 1, 3)
    return first - 127, first - 127 + (more > 0), first - 127 + (more > 1)


def together(what: str, rows: Iterable[GradientCount]) -> GradientCount:
    """The sum of several counts."""
    total = GradientCount("all", what)
    for row in rows:
        total.add(row)
    return total


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The values in one dimension, without a copy if they are dense in memory in any order."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)))[::-1]
    return tensor.permute(order).reshape(-1)

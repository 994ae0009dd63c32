"""Measured values with their uncertainty: medians with intervals, and ratios of times."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

_NARROWEST = 0.02  # an interval reaches at least this share of the median to either side


@dataclass(frozen=True)
class Estimate:
    """A measured value with its uncertainty."""

    median: float
    interval: tuple[float, float]
    """95 % interval of the median; at least 2 % to either side, because two measurements of the
    same function differ by as much on a machine with shared cores (`tools/measure/timing.py`)."""
    trusted: bool = True
    """Whether the machine was quiet enough to trust the value."""

    def is_above(self, value: float) -> bool:
        """Whether the estimate is larger than `value`, beyond its uncertainty."""
        return self.trusted and self.interval[0] > value

    def is_below(self, value: float) -> bool:
        """Whether the estimate is smaller than `value`, beyond its uncertainty."""
        return self.trusted and self.interval[1] < value

    def times(self, factor: float) -> Self:
        """The same value in another unit: a factor of 1000 turns seconds into milliseconds."""
        low, high = self.interval
        return replace(self, median=factor * self.median, interval=(factor * low, factor * high))

    def rate(self, amount: float) -> Self:
        """The rate at which `amount` was done in this time, such as FLOPs in seconds."""
        low, high = self.interval
        return replace(self, median=amount / self.median, interval=(amount / high, amount / low))


@dataclass(frozen=True)
class Ratio(Estimate):
    """How long one function takes as a multiple of another, measured side by side."""

    def __str__(self) -> str:
        low, high = self.interval
        spread = f"{low:.2f}x to {high:.2f}x"
        if not self.trusted:  # in this order, so that it can stand before "as fast"
            return f"{spread} (not reliable)"
        return f"{self.median:.2f}x ({spread})"


def bootstrap(values: np.ndarray) -> tuple[float, float, float]:
    """Median of `values` (n,), and the ends of its 95 % interval.

    The ends are the 0.5 % and 99.5 % quantiles of the bootstrap. Its 2.5 % and 97.5 % quantiles
    would be too narrow: neighbouring rounds are alike, and measuring stops when they look narrow.
    """
    # 1,000 samples of n values, drawn with replacement.
    indices = np.random.default_rng(0).integers(len(values), size=(1000, len(values)))
    medians = np.median(values[indices], axis=1)
    low, high = np.quantile(medians, [0.005, 0.995])
    return float(np.median(values)), float(low), float(high)


def estimate_median(values: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Median of `values` (n,), and its interval, at least 2 % to either side."""
    median, low, high = bootstrap(values)
    low = min(low, median * (1 - _NARROWEST))
    high = max(high, median * (1 + _NARROWEST))
    return median, (low, high)

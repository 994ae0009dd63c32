"""The size of rounding errors: SQNR in dB, and the usual value for a format."""

import functools
import math

import torch
from torch import Tensor

from amp_lab.formats.matmul import MatmulFormats
from amp_lab.formats.scaling import Counts


@functools.cache
def usual_noise(formats: MatmulFormats, which: str) -> tuple[float, float]:
    """SQNR in dB of a matmul of normally distributed values, and the share of values that become 0.

    `which` is one of `MATMULS`.
    """
    draws = torch.Generator().manual_seed(0)
    left = torch.randn(256, 256, generator=draws)
    right = torch.randn(256, 256, generator=draws)
    exact = left @ right.T
    counts = Counts()
    rounded = formats.matmul(which, left, right, (counts, None))  # counts values of `left` alone
    sqnr = to_decibels(squares(exact), squares(rounded - exact))
    return sqnr, counts.shares()["flushed"]


def peak_of(values: Tensor) -> float:
    """The largest magnitude over the root mean square; 0 if all values are 0."""
    largest = float(values.abs().max())
    mean_square = squares(values) / values.numel()
    return largest / math.sqrt(mean_square or 1.0)  # 0 / 1 if all values are 0


def squares(values: Tensor) -> float:
    """The sum of the squares."""
    return float(torch.linalg.vector_norm(values)) ** 2


def to_decibels(signal: float, noise: float) -> float:
    """The ratio of two sums of squares in dB: inf without noise, else -inf without signal."""
    if not noise:
        return math.inf
    if not signal:
        return -math.inf
    return 10 * math.log10(signal / noise)

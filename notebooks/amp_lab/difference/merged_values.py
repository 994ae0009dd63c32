"""Values that a 16-bit format makes equal: whole numbers and evenly spaced ones, as positions are.

Rounding explains each of them, and what is computed of them is wrong all the same: where two
positions are one number, the model cannot tell them apart.
"""

from typing import NamedTuple

import torch

from amp_lab.report import short_name
from amp_lab.tracing.ops_seen import LOWER_DTYPES, largest_whole_number

_EVEN = 2.0**-22  # relative to the largest value: what fp32 leaves of an even spacing
_WHOLE_IN_FP32 = 2.0**24


class Merged(NamedTuple):
    """An input of an op that has fewer different values than it has in fp64."""

    what: str  # the values, in words
    dtype: torch.dtype
    before: int  # different values in fp64
    after: int

    def __str__(self) -> str:
        """A sentence without its end."""
        low = short_name(self.dtype)
        most = largest_whole_number(self.dtype)
        said = f"{self.before:,} different {self.what} are only {self.after:,} in {low}"
        return f"{said}, which has all whole numbers only up to {most:,}"


def merged(tensor: torch.Tensor, exact: torch.Tensor) -> Merged | None:
    """What the tensor makes equal of the whole numbers or evenly spaced values of `exact`."""
    if tensor.dtype not in LOWER_DTYPES or tensor.shape != exact.shape or tensor.numel() < 2:
        return None
    low = tensor.detach().to(exact.device)
    if _is_whole(exact):
        what = "whole numbers"
    elif any(_merges_neighbours(low, exact, dim) for dim in range(exact.dim())):
        what = "evenly spaced values"
    else:
        return None
    before, after = len(exact.unique()), len(low.unique())
    return Merged(what, tensor.dtype, before, after) if after < before else None


def _is_whole(exact: torch.Tensor) -> bool:
    if exact.is_complex() or not bool((exact.abs() <= _WHOLE_IN_FP32).all()):
        return False
    return bool((exact == exact.round()).all())


def _merges_neighbours(low: torch.Tensor, exact: torch.Tensor, dim: int) -> bool:
    """Whether the values are evenly spaced along a dimension, and some are equal in `low`."""
    if exact.shape[dim] < 4 or not _are_even(exact.narrow(dim, 0, 4), dim):
        return False  # four values are looked at first, since nearly all tensors end there
    steps = exact.diff(dim=dim)
    return _are_even(exact, dim) and bool(((low.diff(dim=dim) == 0) & (steps != 0)).any())


def _are_even(exact: torch.Tensor, dim: int) -> bool:
    """Whether each line along a dimension has one distance between neighbours, some more than 0."""
    steps = exact.diff(dim=dim)
    least, most = steps.amin(dim), steps.amax(dim)
    spread = _EVEN * exact.abs().amax(dim)
    return bool((most - least <= spread).all()) and bool((most.abs() > 4 * spread).any())

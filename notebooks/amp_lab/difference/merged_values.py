"""Values that a 16-bit format makes equal: whole numbers and evenly spaced ones, as positions are.

Rounding explains each of them, and what is computed of them is wrong all the same: where two
positions are one number, the model cannot tell them apart.
"""

from typing import NamedTuple

import torch

from amp_lab.report import short_name
from amp_lab.tracing.ops_seen import LOWER_DTYPES, largest_whole_number

_EVEN = 2.0**-21  # relative to the largest value: what fp32 leaves of an even spacing
_WHOLE_IN_FP32 = 2.0**24


class Merged(NamedTuple):
    """An input of an op that has fewer different values than it has in fp64."""

    is_whole: bool  # whether they are whole numbers; else evenly spaced
    dtype: torch.dtype
    before: int  # different values in fp64
    after: int

    def __str__(self) -> str:
        """A sentence without its end."""
        low = short_name(self.dtype)
        if self.is_whole:
            most = largest_whole_number(self.dtype)
            what = "whole numbers"
            why = f"has all of them only up to {most:,}"
        else:
            bits = largest_whole_number(self.dtype).bit_length() - 1
            what = "evenly spaced values"
            why = f"keeps {bits} significant bits of each"
        return f"{self.before:,} different {what} are only {self.after:,} in {low}, which {why}"


def merged(tensor: torch.Tensor, exact: torch.Tensor) -> Merged | None:
    """What the tensor makes equal of the whole numbers or evenly spaced values of `exact`.

    Of values in several dimensions those along one count, and only where all others beside them
    are equal too: what differs in one column can be told apart.
    """
    if tensor.dtype not in LOWER_DTYPES or tensor.shape != exact.shape or tensor.numel() < 2:
        return None
    low = tensor.detach().to(exact.device)
    if _is_whole(exact):
        before = len(exact.unique())
        after = len(low.unique())
        return Merged(True, tensor.dtype, before, after) if after < before else None
    for dim, size in enumerate(exact.shape):
        lost = _equal_neighbours(low, exact, dim)
        if lost:
            return Merged(False, tensor.dtype, size, size - lost)
    return None


def _is_whole(exact: torch.Tensor) -> bool:
    if not bool((exact.abs() <= _WHOLE_IN_FP32).all()):
        return False
    return bool((exact == exact.round()).all())


def _equal_neighbours(low: torch.Tensor, exact: torch.Tensor, dim: int) -> int:
    """How many of the evenly spaced values along a dimension are the same as the one before."""
    if exact.shape[dim] < 4 or not _are_even(exact.narrow(dim, 0, 4), dim):
        return 0  # four values are looked at first, since nearly all tensors end there
    if not _are_even(exact, dim):
        return 0
    differs = _any_beside(exact.diff(dim=dim) != 0, dim)
    differs_in_low = _any_beside(low.diff(dim=dim) != 0, dim)
    return int((differs & ~differs_in_low).sum())


def _any_beside(found: torch.Tensor, dim: int) -> torch.Tensor:
    """For each place along a dimension, whether any of the values there is true."""
    return found.movedim(dim, 0).flatten(1).any(1) if found.dim() > 1 else found


def _are_even(exact: torch.Tensor, dim: int) -> bool:
    """Whether each line along a dimension has one distance between neighbours, some more than 0."""
    steps = exact.diff(dim=dim)
    least = steps.amin(dim)
    most = steps.amax(dim)
    spread = _EVEN * exact.abs().amax(dim)
    return bool((most - least <= spread).all()) and bool((most.abs() > 4 * spread).any())

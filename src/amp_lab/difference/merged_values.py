"""Values that a 16-bit format makes equal: whole numbers and evenly spaced ones, as positions are.

Rounding explains each of them, and what is computed of them is wrong all the same: where two
positions are one number, the model cannot tell them apart.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from amp_lab.core.report import short_name
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
        dtype = short_name(self.dtype)
        limit = largest_whole_number(self.dtype)
        if self.is_whole:
            what = "whole numbers"
            reason = f"has all of them only up to {limit:,}"
        else:
            bits = limit.bit_length() - 1
            what = "evenly spaced values"
            reason = f"keeps {bits} significant bits of each"
        counts = f"{self.before:,} different {what} are only {self.after:,} in {dtype}"
        return f"{counts}, which {reason}"


def merged(tensor: Tensor, exact: Tensor) -> Merged | None:
    """What the tensor makes equal of the whole numbers or evenly spaced values of `exact`.

    Of values in several dimensions those along one count, and only where all others beside them
    are equal too: what differs in one column can be told apart.
    """
    if tensor.dtype not in LOWER_DTYPES or tensor.shape != exact.shape or tensor.numel() < 2:
        return None
    rounded = tensor.detach().to(exact.device)
    if _is_whole(exact):
        return _merged_numbers(rounded, exact)
    for dim, size in enumerate(exact.shape):
        lost = _equal_neighbours(rounded, exact, dim)
        if lost:
            return Merged(False, tensor.dtype, size, size - lost)
    return None


def _is_whole(exact: Tensor) -> bool:
    if not bool((exact.abs() <= _WHOLE_IN_FP32).all()):
        return False
    return bool((exact == exact.round()).all())


def _merged_numbers(rounded: Tensor, exact: Tensor) -> Merged | None:
    """What is made equal of whole numbers, wherever they are."""
    before = len(exact.unique())
    after = len(rounded.unique())
    if after >= before:
        return None
    return Merged(True, rounded.dtype, before, after)


def _equal_neighbours(rounded: Tensor, exact: Tensor, dim: int) -> int:
    """How many of the evenly spaced values along a dimension are the same as the one before."""
    if exact.shape[dim] < 4:
        return 0
    # Four values are looked at first, since nearly all tensors end there.
    if not _are_even(exact.narrow(dim, 0, 4), dim) or not _are_even(exact, dim):
        return 0
    differ = _any_beside(exact.diff(dim=dim) != 0, dim)
    differ_when_rounded = _any_beside(rounded.diff(dim=dim) != 0, dim)
    return int((differ & ~differ_when_rounded).sum())


def _any_beside(values: Tensor, dim: int) -> Tensor:
    """For each place along a dimension, whether any of the values there is true."""
    if values.dim() < 2:
        return values
    return values.movedim(dim, 0).flatten(1).any(1)


def _are_even(exact: Tensor, dim: int) -> bool:
    """Whether each line along a dimension has one distance between neighbours, some more than 0."""
    steps = exact.diff(dim=dim)
    smallest = steps.amin(dim)
    largest = steps.amax(dim)
    tolerance = _EVEN * exact.abs().amax(dim)
    if not bool((largest - smallest <= tolerance).all()):
        return False
    return bool((largest.abs() > 4 * tolerance).any())

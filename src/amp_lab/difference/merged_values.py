"""Find values that become equal in a 16-bit format: whole numbers or evenly spaced ones.

Such values are often positions. Rounding explains each of them, and still the result is wrong: if
two positions become one number, the model cannot distinguish them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from amp_lab.core.report import short_name
from amp_lab.core.tensors import LOWER_DTYPES, largest_integer

_SPACING_TOLERANCE = 2.0**-21  # relative to the largest value: rounding of even steps in fp32
_LARGEST_INTEGER_IN_FP32 = 2.0**24  # fp32 has all whole numbers up to this one


class MergedValues(NamedTuple):
    """How many different values an input of an op has in fp64, and in 16 bits."""

    are_integers: bool  # True: whole numbers. False: evenly spaced values
    dtype: torch.dtype
    before: int  # number of different values in fp64
    after: int  # in `dtype`

    def __str__(self) -> str:
        """Describe them in a sentence without a full stop."""
        dtype = short_name(self.dtype)
        limit = largest_integer(self.dtype)
        if self.are_integers:
            what = "whole numbers"
            reason = f"can represent every whole number only up to {limit:,}"
        else:
            bits = limit.bit_length() - 1  # 8 for bf16, whose limit is 256
            what = "evenly spaced values"
            reason = f"keeps only {bits} significant bits of each value"
        counts = f"{self.before:,} different {what} become {self.after:,} in {dtype}"
        return f"{counts}, because {dtype} {reason}"


def find_merged_values(tensor: Tensor, exact: Tensor) -> MergedValues | None:
    """Count the values of `exact`, in fp64, that are equal in `tensor`, its 16-bit version.

    None if there are none, or if `tensor` is not in 16 bits, has another shape or only one value.

    Counts whole numbers anywhere in the tensor, or else evenly spaced values along one dimension.
    In a table (positions, columns) two rows count as merged only if all their columns are equal.
    """
    if tensor.dtype not in LOWER_DTYPES or tensor.shape != exact.shape or tensor.numel() < 2:
        return None
    rounded = tensor.detach().to(exact.device)
    if _are_integers(exact):
        before = len(exact.unique())
        after = len(rounded.unique())
        if after >= before:
            return None
        return MergedValues(are_integers=True, dtype=rounded.dtype, before=before, after=after)
    for dim, size in enumerate(exact.shape):
        merged = _count_merged_neighbours(rounded, exact, dim)
        if merged:
            # Each lost step makes two neighbours equal.
            return MergedValues(
                are_integers=False, dtype=tensor.dtype, before=size, after=size - merged
            )
    return None


def _are_integers(exact: Tensor) -> bool:
    """Whether all values are whole numbers that fp32 has without rounding."""
    if not bool((exact.abs() <= _LARGEST_INTEGER_IN_FP32).all()):
        return False
    return bool((exact == exact.round()).all())


def _count_merged_neighbours(rounded: Tensor, exact: Tensor, dim: int) -> int:
    """Count the steps along a dimension that rounding has made 0; 0 unless evenly spaced.

    A step leads from one index of the dimension to the next.
    """
    if exact.shape[dim] < 4:  # too few values to call them evenly spaced
        return 0
    # The first four values are checked alone, which is fast, and rejects nearly all tensors.
    if not _is_evenly_spaced(exact.narrow(dim, 0, 4), dim) or not _is_evenly_spaced(exact, dim):
        return 0
    has_step = _any_at_index(exact.diff(dim=dim) != 0, dim)
    has_step_when_rounded = _any_at_index(rounded.diff(dim=dim) != 0, dim)
    return int((has_step & ~has_step_when_rounded).sum())


def _any_at_index(values: Tensor, dim: int) -> Tensor:
    """Reduce a bool tensor to the shape (size of `dim`,): whether any value at an index is true."""
    if values.dim() < 2:
        return values
    return values.movedim(dim, 0).flatten(1).any(1)


def _is_evenly_spaced(exact: Tensor, dim: int) -> bool:
    """Whether the steps along a dimension are equal in each line, and are not all 0.

    A line has the values at all indices of the dimension, with the other indices fixed.
    """
    steps = exact.diff(dim=dim)
    smallest = steps.amin(dim)
    largest = steps.amax(dim)
    tolerance = _SPACING_TOLERANCE * exact.abs().amax(dim)
    if not bool((largest - smallest <= tolerance).all()):
        return False
    # Smaller steps cannot be told from the rounding of equal values.
    return bool((largest.abs() > 4 * tolerance).any())

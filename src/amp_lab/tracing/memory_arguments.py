"""The arguments of a memory forecast: the size of the memory, and the shapes of the inputs."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from amp_lab.core.errors import TraceError

Shapes = Sequence[int] | Sequence[Sequence[int]]
Dtypes = torch.dtype | Sequence[torch.dtype]

# The bytes of each unit: "kb" 1000, "kib" 1024, "mb" 1000**2, …, "tib" 1024**4.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def memory_and_limit(
    memory_bytes: int | str | None, reserve: float
) -> tuple[int, int] | tuple[None, None]:
    """The bytes of a memory, and the bytes without `reserve`, a share of the memory from 0 to 1.

    Both are None if `memory_bytes` is None.
    """
    if memory_bytes is None:
        return None, None
    total = parse_bytes(memory_bytes)
    return total, int(total * (1 - reserve))


def parse_bytes(text: str | int) -> int:
    """Return the bytes in ``"24GiB"`` (24 x 2^30), ``"24 GB"`` (24 x 10^9) or ``"25769803776"``.

    Raises `TraceError` for

    - any other text;
    - ``"24G"``, which may mean GiB or GB;
    - less than one byte, or more than 2^62 bytes;
    - less than 1 MiB in a text without a unit.
    """
    if isinstance(text, str) and text.strip().isdecimal() and 0 < int(text) < 2**20:
        raise TraceError(f"memory {text!r} means {text} bytes: add a unit, as in {text}GiB")
    count = _count_of_bytes(str(text))
    if count is None:
        raise TraceError(
            f"memory {text!r} is not a size: give bytes, as 24GiB (24 x 2^30) or 24GB (24 x 10^9)"
        )
    if not 1 <= count <= 2**62:
        raise TraceError(f"memory {text!r} is out of range: give 1 byte to 2^62 bytes")
    return int(count)


def _count_of_bytes(text: str) -> Fraction | None:
    """The bytes in a text such as "1.5 GB"; None for other texts, and for a fraction of a byte."""
    # Such as ``24gib``, ``1.5 gb`` or ``.5gib``: the number, and the unit or nothing.
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    if match is None:
        return None
    unit = _UNITS.get(match[2])
    if unit is None:
        return None
    number = Fraction(match[1])  # exact, unlike 1.1 * 10**9
    is_fraction_of_a_byte = unit == 1 and number.denominator > 1
    if is_fraction_of_a_byte:
        return None
    return number * unit


def inputs_of_shapes(input_shape: Shapes, input_dtype: Dtypes, *, batched: bool) -> tuple:
    """Inputs of these shapes and dtypes, on ``meta``.

    If `batched`, the first size of each shape is the batch. Otherwise, every shape gets a batch of
    1 in front, except if all shapes already begin with 1. Raises `TraceError` for shapes and dtypes
    that do not match.
    """
    shapes = _checked_shapes(input_shape)
    if isinstance(input_dtype, torch.dtype):
        dtypes = [input_dtype] * len(shapes)
    else:
        dtypes = list(input_dtype)
    if len(dtypes) != len(shapes):
        counts = f"{len(dtypes)} input dtypes for {len(shapes)} inputs"
        raise TraceError(f"{counts}: give one for all, or one for each")
    batches = {shape[0] for shape in shapes}
    if batched and len(batches) > 1:
        text = ", ".join(map(str, shapes))
        raise TraceError(
            f"the inputs have shapes {text}, but the first size is the batch: give the same batch "
            "for all"
        )
    if not batched and batches != {1}:
        shapes = [(1, *shape) for shape in shapes]
    inputs = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        inputs.append(torch.empty(shape, dtype=dtype, device="meta"))
    return tuple(inputs)


def _checked_shapes(input_shape: Any) -> list[tuple[int, ...]]:
    """One shape or several as a list; raises `TraceError` for a size that is not 1 or more."""
    if input_shape and all(isinstance(shape, Sequence) for shape in input_shape):
        shapes = [tuple(shape) for shape in input_shape]
    else:
        shapes = [tuple(input_shape)]
    for sizes in shapes:
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise TraceError(f"input shape {sizes} has a size below 1: give sizes of 1 or more")
    return shapes

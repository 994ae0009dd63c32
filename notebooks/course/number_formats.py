"""Number formats, their bits, limits and spacing, for notebook 01."""

import math
from dataclasses import dataclass

import torch

FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 E5M2": torch.float8_e5m2,
    "fp8 E4M3": torch.float8_e4m3fn,  # fn: finite, it has no infinity
}
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes: an integer of the same size


def fields(number):
    """The bits of a number, as text: sign, exponent, mantissa."""
    info = torch.finfo(number.dtype)
    width = info.bits
    mantissa = -int(math.log2(info.eps))  # eps = 2^-(mantissa bits)
    integer = number.view(INTEGER[number.dtype.itemsize]).item()
    bits = integer & (2**width - 1)  # without a sign, which would be printed
    text = f"{bits:0{width}b}"
    return text[0], text[1:-mantissa], text[-mantissa:]


def to_tf32(number):
    """Round finite float32 numbers to TF32's 10 bits of mantissa: to nearest, ties to even."""
    bits = number.view(torch.int32)
    last_kept = (bits >> 13) & 1
    bits = bits + 0xFFF + last_kept  # just under half a unit; half if the last bit is odd
    bits = bits & ~0x1FFF
    return bits.view(torch.float32)


@dataclass(frozen=True)
class Limits:
    """The four numbers that describe a format."""

    subnormal: float  # the smallest positive number
    normal: float  # the smallest positive number with the full mantissa
    largest: float  # the largest finite number
    eps: float  # the distance from 1 to the next larger number

    @property
    def digits(self):
        """The precision in decimal digits."""
        return math.log10(2 / self.eps)


def limits(dtype):
    """The limits of a dtype, from `torch.finfo`."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    return Limits(smallest, info.smallest_normal, info.max, info.eps)


def _limits_of_tf32():
    """The range of fp32, with 10 bits of mantissa."""
    eps = 2**-10
    normal = limits(torch.float32).normal
    largest = (2 - eps) * 2.0**127
    return Limits(normal * eps, normal, largest, eps)


LIMITS = {"fp32": limits(torch.float32), "tf32": _limits_of_tf32()}
LIMITS |= {name: limits(dtype) for name, dtype in FORMATS.items()}


def spacing_by_magnitude(name):
    """Exponents of two over a format's range, the relative spacing at each, the first normal one.

    The number that follows a positive one has 1 added to its last bit, so we see by how much it
    grew.
    """
    of_format = LIMITS[name]
    dtype = FORMATS.get(name, torch.float32)  # TF32 has none of its own
    lowest = round(math.log2(of_format.subnormal))
    highest = math.floor(math.log2(of_format.largest))
    first_normal = round(math.log2(of_format.normal))
    exponents = list(range(lowest, highest + 1))
    numbers = torch.tensor([2.0**exponent for exponent in exponents]).to(dtype)
    last_bit = 2**13 if name == "tf32" else 1
    bits = numbers.view(INTEGER[dtype.itemsize])
    following = (bits + last_bit).view(dtype)
    exact = numbers.double()
    growth = following.double() - exact
    spacing = growth / exact
    return exponents, spacing.tolist(), first_normal

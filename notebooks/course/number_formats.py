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
    width = torch.finfo(number.dtype).bits
    mantissa = -int(math.log2(torch.finfo(number.dtype).eps))  # eps = 2^-(mantissa bits)
    bits = number.view(INTEGER[number.dtype.itemsize]).item() & (2**width - 1)
    text = f"{bits:0{width}b}"
    return text[0], text[1:-mantissa], text[-mantissa:]


def to_tf32(number):
    """Round finite float32 numbers to TF32's 10 bits of mantissa: to nearest, ties to even."""
    bits = number.view(torch.int32)
    bits = bits + 0xFFF + ((bits >> 13) & 1)  # just under half a unit; half if the last bit is odd
    return (bits & ~0x1FFF).view(torch.float32)


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
    return Limits(info.smallest_normal * info.eps, info.smallest_normal, info.max, info.eps)


_fp32 = limits(torch.float32)
_tf32 = Limits(_fp32.normal * 2**-10, _fp32.normal, (2 - 2**-10) * 2.0**127, 2**-10)
LIMITS = {"fp32": _fp32, "tf32": _tf32}
LIMITS |= {name: limits(dtype) for name, dtype in FORMATS.items() if name != "fp32"}


def spacing_by_magnitude(name):
    """Exponents of two over a format's range, the relative spacing at each, the first normal one.

    The number that follows a positive one has 1 added to its last bit, so we see by how much it
    grew.
    """
    of_format, dtype = LIMITS[name], FORMATS.get(name, torch.float32)
    lowest, highest = math.log2(of_format.subnormal), math.log2(of_format.largest)
    exponents = list(range(round(lowest), math.floor(highest) + 1))
    numbers = torch.tensor([2.0**exponent for exponent in exponents]).to(dtype)
    last_bit = 2**13 if name == "tf32" else 1
    following = (numbers.view(INTEGER[dtype.itemsize]) + last_bit).view(dtype)
    spacing = (following.double() - numbers.double()) / numbers.double()
    return exponents, spacing.tolist(), round(math.log2(of_format.normal))

"""The number formats of 16 bits or fewer, and how a value is rounded to them.

Sources: the OCP specifications of 8-bit floating point (1.0) and of microscaling formats (1.0) for
E4M3, E5M2, E3M2, E2M3, E2M1 and E8M0; Noune et al., arXiv 2206.02915, for the two "fnuz".
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_FP32_BIAS = 127
_FP32_MANTISSA_BITS = 23
_FP32_EXPONENT = 0x7F800000  # a mask of the exponent's bits


@dataclass(frozen=True)
class Element:
    """A number format of 16 bits or fewer. `largest` is the largest finite magnitude.

    `mantissa_bits` is the number of stored bits of the mantissa. `least_exponent` is the exponent
    of the smallest normal number. Between zero and this number, the spacing is constant. In `int8`
    the spacing is 1 everywhere, so `int8` has no subnormal numbers.
    """

    name: str
    bits: int
    mantissa_bits: int
    least_exponent: int
    largest: float
    dtype: torch.dtype | None = None  # torch's dtype for the format, if there is one

    @property
    def smallest_normal(self) -> float:
        """The smallest magnitude with all mantissa bits; 1 for `int8`."""
        if self.dtype is torch.int8:
            return self.smallest
        return 2.0**self.least_exponent

    @property
    def smallest(self) -> float:
        """The smallest magnitude above zero."""
        return 2.0 ** (self.least_exponent - self.mantissa_bits)

    @property
    def overflow(self) -> float:
        """The smallest magnitude that overflows: half a spacing above `largest`."""
        spacing = 2.0 ** (self.largest_exponent - self.mantissa_bits)
        return self.largest + spacing / 2

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest number: 8 for 448 = 1.75 * 2^8."""
        _, exponent = math.frexp(self.largest)  # of a mantissa in [0.5, 1)
        return exponent - 1

    def round(self, values: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Round `values` to the nearest numbers of this format, in fp32 and of the same shape.

        A value halfway between two numbers is rounded to the even one. With a `generator` on the
        device of the values, rounding is stochastic: a value becomes the number above or below it,
        and the mean over many draws is the value. Magnitudes above `largest`, also infinity, become
        `largest`. NaN stays NaN.
        """
        return self.round_(values.to(torch.float32, copy=True), generator)

    def round_(self, values: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Round the fp32 tensor `values` in place, by the rules of `round`, and return it."""
        values.clamp_(-self.largest, self.largest)  # NaN stays
        # An fp32 number with its sign and mantissa bits cleared is the power of two at or below
        # its magnitude. Below the smallest normal number, that number's power takes its place.
        exponent_bits = values.view(torch.int32) & _FP32_EXPONENT
        least_bits = (self.least_exponent + _FP32_BIAS) << _FP32_MANTISSA_BITS
        powers = exponent_bits.clamp_(min=least_bits).view(torch.float32)
        spacing = powers.mul_(2.0**-self.mantissa_bits)
        values.div_(spacing)  # exact, since the spacing is a power of two
        if generator is None:
            return values.round_().mul_(spacing)
        # A value goes up with a probability of its distance from the number below, in spacings.
        draws = torch.rand(values.shape, generator=generator, device=values.device)
        goes_up = draws < values - values.floor()
        return values.floor_().add_(goes_up).mul_(spacing)

    def numbers(self) -> Tensor:
        """All finite numbers of this format in rising order, in fp32, with one zero."""
        # For each exponent, all multiples of its spacing up to the next power of two; those that
        # repeat smaller exponents' numbers go with `unique`.
        multiples = torch.arange(2 ** (self.mantissa_bits + 1))
        magnitudes = []
        for exponent in range(self.least_exponent, self.largest_exponent + 1):
            spacing = 2.0 ** (exponent - self.mantissa_bits)
            magnitudes.append(multiples * spacing)
        finite = torch.cat(magnitudes)
        finite = finite[finite <= self.largest]
        return torch.cat([-finite, finite]).unique()


ELEMENTS = {
    element.name: element
    for element in (  # name, bits, mantissa bits, least exponent, largest number, dtype
        Element("bf16", 16, 7, -126, torch.finfo(torch.bfloat16).max, torch.bfloat16),
        Element("fp16", 16, 10, -14, 65504.0, torch.float16),
        Element("e4m3", 8, 3, -6, 448.0, torch.float8_e4m3fn),
        Element("e5m2", 8, 2, -14, 57344.0, torch.float8_e5m2),
        Element("e4m3fnuz", 8, 3, -7, 240.0, torch.float8_e4m3fnuz),
        Element("e5m2fnuz", 8, 2, -15, 57344.0, torch.float8_e5m2fnuz),
        Element("e2m3", 6, 3, 0, 7.5),
        Element("e3m2", 6, 2, -2, 28.0),
        Element("e2m1", 4, 1, 0, 6.0),
        # Its spacing is 2^(6 - 6) = 1 from the least exponent to the largest.
        Element("int8", 8, 6, 6, 127.0, torch.int8),
    )
}
"""The number formats by name."""

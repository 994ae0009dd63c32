"""What the tools check alike, and how they write a scale."""

import math

from torch import nn

from amp_lab.errors import NumericsError

LARGEST_POWER = 64
"""Scales go from 2^-64 to 2^64, far from where fp32 itself underflows."""


def checked_model(model: object, caller: str) -> nn.Module:
    """`model`, if it is one; raises `NumericsError` otherwise."""
    if not isinstance(model, nn.Module):
        raise NumericsError(f"{caller}: the model must be an nn.Module, not {type(model).__name__}")
    return model


def log2_of(scale: float) -> int:
    """The exponent of a scale; raises `NumericsError` if it is no power of two."""
    mantissa, exponent = math.frexp(scale) if scale > 0 and math.isfinite(scale) else (0.0, 0)
    if mantissa != 0.5 or abs(exponent - 1) > LARGEST_POWER:
        raise NumericsError(f"loss scale {scale:g}: give a power of two from 2^-64 to 2^64")
    return exponent - 1


def power(scale: float | None) -> str:
    """A scale, which is a power of two, as people write it."""
    if scale is None:
        return "none"
    power = log2_of(scale)
    return f"2^{power}" if abs(power) > 3 else f"{scale:g}"

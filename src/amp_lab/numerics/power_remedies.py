"""Remedies for a power or a division that is not finite, chosen by its inputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from amp_lab.core.remedies import Remedy, remedy

if TYPE_CHECKING:
    from amp_lab.numerics.nonfinite_report import NonfiniteReport
    from amp_lab.numerics.tensor_summary import TensorSummary

_FRACTION = remedy(
    "nonfinite.pow.fraction",
    "a negative number is raised to a fractional exponent",
    "A negative number has no power with a fractional exponent. If x should not be negative, use "
    "x.clamp_min(1e-3) ** p. If x may have both signs, keep the sign: x.sign() * "
    "x.abs().clamp_min(1e-3) ** p.",
)
_ZERO = remedy(
    "nonfinite.pow.zero",
    "a number that is 0 or nearly 0, and not negative, is raised to a negative exponent",
    "0 has no power with a negative exponent. Use x.clamp_min(1e-3) ** p, with a limit that suits "
    "p.",
)
_TOO_LARGE_FOR_FP16 = remedy(
    "nonfinite.pow.fp16",
    "a power exceeds fp16 but fits fp32",
    "The power is too large for fp16 but fits fp32. Use x.float() ** p, which keeps all values "
    "and their signs.",
    failure="AMP0006",
)
_TOO_LARGE = remedy(
    "nonfinite.pow.range",
    "a power exceeds fp32",
    "The power is too large even for fp32. Use x.clamp(-1e3, 1e3) ** p, with a limit that suits "
    "p. Use the same limit on both sides, because the values may have both signs.",
)
EXPONENT = remedy(
    "nonfinite.pow.exponent",
    "a number is raised to exponents that are too large",
    "The exponent is too large: 2 ** x overflows in fp16 from x = 16 on, and in fp32 and bf16 "
    "from x = 128 on. For a > 1, subtract the largest exponent first: a ** (x - x.max()). Or "
    "clamp the exponent: a ** x.clamp_max(limit).",
)
BOTH_SIGNS = remedy(
    "nonfinite.both_signs",
    "a division by numbers near 0 that may be negative, or a negative power of them",
    "The divisor x is 0 or nearly 0, and some of its values are negative. Move each value away "
    "from 0 and keep its sign: use torch.where(x < 0, x.clamp_max(-1e-2), x.clamp_min(1e-2)) "
    "instead of x. Do not use clamp_min alone, which changes every negative value. Do not add an "
    "eps, which moves negative values towards 0.",
)


def remedy_for_power(report: NonfiniteReport) -> Remedy:
    """The remedy for a power in a forward pass."""
    base = input_of(report, "self")
    if base is None and input_of(report, "exponent") is not None:  # as in 2 ** x
        return EXPONENT
    if report.value.nan:
        return _FRACTION
    if _smallest_exponent(report) < 0:
        return BOTH_SIGNS if base is None or base.low < 0 else _ZERO
    if report.value.dtype is torch.float16 and _fits_fp32(report, base):
        return _TOO_LARGE_FOR_FP16
    return _TOO_LARGE


def divides_by_both_signs(report: NonfiniteReport) -> bool:
    """Whether an op divides by negative numbers, as far as its inputs were recorded."""
    divisor = input_of(report, _divisor_name(report))
    return divisor is not None and divisor.low < 0


def _divisor_name(report: NonfiniteReport) -> str:
    """Name of the kernel's input that is the divisor, or has its sign; empty if there is none."""
    if report.op == "ReciprocalBackward0":
        # It multiplies the reciprocal, which has the sign of the divisor, by itself.
        return "self" if report.kernel == "mul" else ""
    kernel = (report.kernel or "").strip("_")
    if kernel.startswith("div"):
        return "other"
    if kernel.startswith(("reciprocal", "pow")) and _smallest_exponent(report) < 0:
        return "self"
    return ""


def input_of(report: NonfiniteReport, name: str) -> TensorSummary | None:
    """The summary of the kernel's input of this name; None if it was not recorded."""
    return next((summary for summary in report.inputs if summary.name == name), None)


def _smallest_exponent(report: NonfiniteReport) -> float:
    """The smallest exponent of a power; -1 for a reciprocal, 0 if unknown."""
    if (report.kernel or "").startswith("reciprocal"):
        return -1.0
    if report.exponent is not None:
        return report.exponent
    exponents = input_of(report, "exponent")
    if exponents is None:
        return 0.0
    return exponents.low


def _fits_fp32(report: NonfiniteReport, base: TensorSummary | None) -> bool:
    """Whether the power of the largest base fits fp32, or its exponent is unknown.

    `base` is None if the op overwrote it; it then counts as 65504.
    """
    exponents = input_of(report, "exponent")
    exponent = report.exponent
    if exponents is not None:
        exponent = exponents.high
    largest = torch.finfo(torch.float16).max
    if base is not None:
        largest = max(abs(base.low), abs(base.high))
    if exponent is None or largest <= 1:
        return True
    return exponent * math.log2(largest) < 128  # fp32 ends at 2^128

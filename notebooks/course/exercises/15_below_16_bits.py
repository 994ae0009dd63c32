"""Checks for notebook 15, Go below 16 bits with FP8, MX and NVFP4."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need

from amp_lab import rehearse


@exercise
def check_bits(mebibytes: float) -> str:
    """Memory of a weight in NVFP4, with its scales."""
    need(
        mebibytes != 8,
        "This counts only the four bits of each value. 16 values also share a scale of eight bits.",
    )
    mebibits = 72
    number_of_bytes = 9 * 2**20
    number_of_bits = mebibits * 2**20
    is_in_another_unit = mebibytes in (mebibits, number_of_bytes, number_of_bits)
    need(
        not is_in_another_unit,
        f"{mebibytes:g} is right in another unit. A byte has eight bits, and a MiB has 2^20 bytes.",
    )
    need(
        mebibytes == 9,
        f"{mebibytes:g} MiB is wrong. Count four bits for each value, and a sixteenth of eight"
        " bits for the scale.",
    )
    return "Each of 16.8 million values takes 4.5 bits, and half a bit of this is the scale."


@exercise
def check_scale_of(factor_of: Callable[[torch.Tensor], Any]) -> str:
    """The factor that makes a tensor's largest magnitude 448."""
    torch.manual_seed(0)
    random_values = torch.randn(100)
    mixed_signs = torch.tensor([1.0, -4.0, 2.0])
    small_gradient = torch.full((4,), 1e-6)
    inputs = {
        "random values": random_values,
        "values with a negative number of the largest magnitude": mixed_signs,
        "a gradient of 1e-6": small_gradient,
    }
    for name, values in inputs.items():
        scaled = values * call(factor_of, values)
        magnitudes = scaled.abs()
        largest = float(magnitudes.max())
        error = abs(largest / 448 - 1)
        need(
            error < 1e-3,
            f"For {name}, the largest magnitude becomes {largest:g} instead of 448.",
        )
    zeros = torch.zeros(4)
    result = call(factor_of, zeros)
    factor = torch.as_tensor(result, dtype=torch.float32)
    is_finite = factor.isfinite()
    need(
        bool(is_finite.all()),
        f"For zeros, your function returns {float(factor):g}. Zero times this is NaN. Give the"
        " divisor a minimum.",
    )
    return "With this factor, a tensor uses the whole range of E4M3, and zeros stay zeros."


@exercise
def check_block_scales(block_scales: Callable[[torch.Tensor], Any]) -> str:
    """Powers of two, as small as can be without a value beyond 6."""
    torch.manual_seed(0)
    magnitudes = torch.logspace(-4, 4, 8)
    rows = torch.randn(8, 32) * magnitudes[:, None]
    rows[0] = 6.0  # whose scale is exactly 1
    scales = call(block_scales, rows)
    shape = tuple(scales.shape)
    need(
        shape == (8, 1),
        f"Your function returns the shape {shape} instead of (8, 1), one scale for each row.",
    )
    exponents = scales.double().log2()
    is_power_of_two = exponents == exponents.round()
    need(
        bool(is_power_of_two.all()),
        "Some scales are not powers of two, but E8M0 can represent only powers of two.",
    )
    scaled = rows / scales
    row_maxima = scaled.abs().amax(1)
    highest = float(row_maxima.max())
    need(
        highest <= 6,
        f"Divided by its scale, a row reaches {highest:.3g}, but values above 6 are clipped. "
        "Round the power of two up.",
    )
    lowest = float(row_maxima.min())
    need(
        lowest > 3,
        f"Divided by its scale, a row reaches only {lowest:.3g} of 6. Half of this scale is "
        "enough.",
    )
    return (
        "The largest value of each row is above 3 and at most 6, so you lose at most one "
        "bit of the range."
    )


def _left_out_layers(report: Any, form: str) -> list[str]:
    """The names of the layers that a report leaves in 16 bits for a format."""
    results = [result for result in report.layers if result.format == form]
    return [result.layer.name for result in results if result.left_out]


@exercise
def check_left_out(left_out: Callable[[Any, str], Any]) -> str:
    """The layers that a report leaves in 16 bits for a format; the report is of a small model."""
    torch.manual_seed(0)
    sizes = [32, 64, 48, 64, 64, 32]  # 48 is a multiple of 16, which is enough for FP8 alone
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    model = nn.Sequential(*layers)
    inputs = torch.randn(16, 32)
    formats = ("fp8", "mxfp8")
    report = rehearse(model, inputs, formats=formats)
    first_layer = report.layers[0].layer
    for form in formats:
        right = _left_out_layers(report, form)
        found = call(left_out, report, form)
        is_list = isinstance(found, list)
        kind = type(found).__name__
        need(is_list, f"Return a list. Your function returns an object of type {kind}.")
        extra = [name for name in found if name not in right]
        extra_names = ", ".join(map(str, extra[:3]))
        need(
            not extra,
            f"For {form}, your list contains {extra_names}. This layer is converted, or the name "
            f"is not a layer name such as {first_layer.name!r}.",
        )
        missing = [name for name in right if name not in found]
        missing_names = ", ".join(missing)
        need(not missing, f"For {form}, your list does not contain {missing_names}.")
        need(
            found == right,
            f"For {form}, your list has a name twice, or the names are in another order.",
        )
    return "The code in the report passes such a list to torchao, in `module_filter_fn`."

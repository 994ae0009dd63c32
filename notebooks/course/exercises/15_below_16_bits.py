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
    need(
        mebibytes not in (72, 72 * 2**17, 9 * 2**20),
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
    for what, values in (
        ("random values", torch.randn(100)),
        ("values with a negative number of the largest magnitude", torch.tensor([1.0, -4.0, 2.0])),
        ("a gradient of 1e-6", torch.full((4,), 1e-6)),
    ):
        largest = float((values * call(factor_of, values)).abs().max())
        need(
            abs(largest / 448 - 1) < 1e-3,
            f"For {what}, the largest magnitude becomes {largest:g} instead of 448.",
        )
    factor = torch.as_tensor(call(factor_of, torch.zeros(4)), dtype=torch.float32)
    need(
        bool(factor.isfinite().all()),
        f"For zeros, your function returns {float(factor):g}. Zero times this is NaN. Give the"
        " divisor a minimum.",
    )
    return "With this factor, a tensor uses the whole range of E4M3, and zeros stay zeros."


@exercise
def check_block_scales(block_scales: Callable[[torch.Tensor], Any]) -> str:
    """Powers of two, as small as can be without a value beyond 6."""
    torch.manual_seed(0)
    rows = torch.randn(8, 32) * torch.logspace(-4, 4, 8)[:, None]
    rows[0] = 6.0  # whose scale is exactly 1
    scales = call(block_scales, rows)
    need(
        tuple(scales.shape) == (8, 1),
        f"Your function returns the shape {tuple(scales.shape)} instead of (8, 1), one scale "
        "for each row.",
    )
    exponents = scales.double().log2()
    need(
        bool((exponents == exponents.round()).all()),
        "Some scales are not powers of two, but E8M0 can represent only powers of two.",
    )
    largest = (rows / scales).abs().amax(1)
    need(
        bool((largest <= 6).all()),
        f"Divided by its scale, a row reaches {float(largest.max()):.3g}, but values above 6 "
        "are clipped. Round the power of two up.",
    )
    need(
        bool((largest > 3).all()),
        f"Divided by its scale, a row reaches only {float(largest.min()):.3g} of 6. Half of "
        "this scale is enough.",
    )
    return (
        "The largest value of each row is above 3 and at most 6, so you lose at most one "
        "bit of the range."
    )


@exercise
def check_left_out(left_out: Callable[[Any, str], Any]) -> str:
    """The layers that a report leaves in 16 bits for a format; the report is of a small model."""
    torch.manual_seed(0)
    sizes = [32, 64, 48, 64, 64, 32]  # 48 is a multiple of 16, which is enough for FP8 alone
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
    report = rehearse(model, torch.randn(16, 32), formats=("fp8", "mxfp8"))
    names = [r.layer.name for r in report.layers if r.format == "fp8"]
    for form in ("fp8", "mxfp8"):
        right = [r.layer.name for r in report.layers if r.format == form and r.left_out]
        found = call(left_out, report, form)
        need(
            isinstance(found, list),
            f"Return a list. Your function returns an object of type {type(found).__name__}.",
        )
        more = [name for name in found if name not in right]
        need(
            not more,
            f"For {form}, your list contains {', '.join(map(str, more[:3]))}. This layer is "
            f"converted, or the name is not a layer name such as {names[0]!r}.",
        )
        missing = [name for name in right if name not in found]
        need(not missing, f"For {form}, your list does not contain {', '.join(missing)}.")
        need(
            found == right,
            f"For {form}, your list has a name twice, or the names are in another order.",
        )
    return "The code in the report passes such a list to torchao, in `module_filter_fn`."

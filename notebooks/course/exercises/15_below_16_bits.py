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
        "That is the four bits of each value alone. Every 16 of them share a scale of eight bits.",
    )
    need(
        mebibytes not in (72, 72 * 2**17, 9 * 2**20),
        f"{mebibytes:g} is right but for its unit: eight bits are a byte, and 2^20 bytes a MiB.",
    )
    need(
        mebibytes == 9,
        f"It is not {mebibytes:g} MiB: count four bits for a value, and a sixteenth of eight more.",
    )
    return "4.5 bits for each of 16.8 million values: half a bit of it is the scale."


@exercise
def check_scale_of(factor_of: Callable[[torch.Tensor], Any]) -> str:
    """The factor that makes a tensor's largest magnitude 448."""
    torch.manual_seed(0)
    for what, values in (
        ("random values", torch.randn(100)),
        ("values whose largest is negative", torch.tensor([1.0, -4.0, 2.0])),
        ("a gradient of 1e-6", torch.full((4,), 1e-6)),
    ):
        largest = float((values * call(factor_of, values)).abs().max())
        need(
            abs(largest / 448 - 1) < 1e-3,
            f"For {what} the largest magnitude becomes {largest:g}, and not 448.",
        )
    factor = torch.as_tensor(call(factor_of, torch.zeros(4)), dtype=torch.float32)
    need(
        bool(factor.isfinite().all()),
        f"For zeros it returns {float(factor):g}, and zero times that is NaN: give the divisor a "
        "smallest value.",
    )
    return "With it E4M3 uses its whole range, and a tensor of zeros stays one."


@exercise
def check_block_scales(block_scales: Callable[[torch.Tensor], Any]) -> str:
    """Powers of two, as small as can be without a value beyond 6."""
    torch.manual_seed(0)
    rows = torch.randn(8, 32) * torch.logspace(-4, 4, 8)[:, None]
    rows[0] = 6.0  # whose scale is exactly 1
    scales = call(block_scales, rows)
    need(
        tuple(scales.shape) == (8, 1),
        f"It returns the shape {tuple(scales.shape)}: one scale for each row is (8, 1).",
    )
    exponents = scales.double().log2()
    need(
        bool((exponents == exponents.round()).all()),
        "Some scales are no powers of two, which is all that E8M0 can hold.",
    )
    largest = (rows / scales).abs().amax(1)
    need(
        bool((largest <= 6).all()),
        f"A row reaches {float(largest.max()):.3g} when it is divided by its scale, and is clipped "
        "at 6: round the power of two up.",
    )
    need(
        bool((largest > 3).all()),
        f"A row reaches only {float(largest.min()):.3g} of 6: half the scale is enough.",
    )
    return "Each row reaches between 3 and 6, so that at most one bit of range is lost."


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
        need(isinstance(found, list), f"It returns a {type(found).__name__}: make it a list.")
        more = [name for name in found if name not in right]
        need(
            not more,
            f"For {form} it names {', '.join(map(str, more[:3]))}, which is converted, or is no "
            f"name of a layer such as {names[0]!r}.",
        )
        missing = [name for name in right if name not in found]
        need(not missing, f"For {form} it does not name {', '.join(missing)}.")
        need(found == right, f"For {form} it names a layer twice, or in another order.")
    return "Such a list is what torchao's `module_filter_fn` is given in the lines of the report."

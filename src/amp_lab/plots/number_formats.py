"""Histograms of gradients over the range of fp16."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from torch import Tensor

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Options, Values

# Limits of fp16 as exponents of two.
ZERO = -25  # a magnitude up to 2^-25 rounds to 0
NORMAL = -14  # from there up to 2^-14 numbers are subnormal
TOP = 16  # from 65520 on, just below 2^16, a magnitude rounds to infinity
RIGHT = 20  # the right end of the x axis
LEFT: Options = {"loc": "left", "fontsize": 11}  # how titles are placed
_HISTOGRAM: Options = {
    "width": 1.0,
    "align": "edge",
    "alpha": 0.7,
    "linewidth": 0.3,
    **style.EDGED,
}
_HISTOGRAM_OPTIONS: list[Options] = [
    {"color": COLOURS["fp16"], "hatch": "", **_HISTOGRAM},
    {"color": COLOURS["bf16"], "hatch": "//", **_HISTOGRAM},
    {"color": COLOURS["tf32"], "hatch": "xx", **_HISTOGRAM},
]
Histogram = Mapping[int, int]
"""How many values have each exponent of two."""


def gradients_against_fp16(log2_magnitudes: Tensor, scales: Values) -> list[Axes]:
    """Draw histograms of log2|gradient · scale| over the range of fp16, a panel for each scale.

    `log2_magnitudes` contains log2|gradient| of the nonzero gradients. The axis begins at -60.
    """
    lowest = -60
    # The name "zero in fp16" stands in the middle of its range, from -60 to -25.
    axes = _fp16_ranges(scales, lowest, name_zero_at=-42)
    bins = range(lowest, RIGHT + 1)
    for ax, scale in zip(axes, scales, strict=True):
        shifted = log2_magnitudes + math.log2(scale)
        ax.hist(shifted, bins=bins, color=COLOURS["fp16"])
        ax.set_ylabel("number of values")
        ax.margins(y=0.2)  # room for the names of the ranges
    return axes


def exponents_against_fp16(kinds: Mapping[str, Histogram], scales: Values) -> list[Axes]:
    """Draw histograms of scaled gradients over the range of fp16, a panel for each of `scales`.

    `kinds` maps the name of a group of gradients to {k: number of values from 2^k to 2^(k+1)}. At
    most three groups are drawn.
    """
    lowest = -60  # the axis begins at 2^-60, or as low as the values, but not below 2^-130
    for histogram in kinds.values():
        lowest = min(lowest, *histogram.keys())
    left = max(-130, lowest)
    axes = _fp16_ranges(scales, left, name_zero_at=-31)  # the x at which "zero in fp16" is written
    for ax, scale in zip(axes, scales, strict=True):
        shift = math.log2(scale)
        for (name, histogram), options in zip(kinds.items(), _HISTOGRAM_OPTIONS, strict=False):
            exponents = [k + shift for k in histogram]
            ax.bar(exponents, _percentages(histogram), label=name, **options)
        ax.set_ylabel("values (%)")
        ax.margins(y=0.25)  # room for the names of the ranges
    first, *_ = axes
    first.legend(loc="center left")
    return axes


def _percentages(histogram: Histogram) -> list[float]:
    """Each count in percent of all values, to compare groups of different sizes."""
    counts = list(histogram.values())
    total = max(1, sum(counts))  # at least 1, since it is divided by
    return [100 * count / total for count in counts]


def _fp16_ranges(scales: Values, left: int, name_zero_at: float) -> list[Axes]:
    """Make a panel for each loss scale, with the ranges of fp16 shaded, and named in the first.

    `left` is where the x axis begins, and `name_zero_at` where on it the name of the zeros stands.
    Both are exponents of two. Returns the axes of the panels, from the top.
    """
    rows = len(scales)
    height = 2.2 * rows + 0.6  # inches: 0.6 for the label of the x axis
    size = (8.0, height)
    _, panels = style.rows(rows, size, sharex=True, sharey=True)
    axes = list(panels)
    for ax, scale in zip(axes, scales, strict=True):
        ax.axvspan(left, ZERO, color=style.LOST)
        ax.axvspan(ZERO, NORMAL, color=style.SUBNORMAL)
        ax.axvspan(TOP, RIGHT, color=style.LOST)
        exponent = math.log2(scale)
        title = rf"loss scale $2^{{{exponent:.0f}}}$"
        ax.set_title(title, **LEFT)
    first = axes[0]
    last = axes[-1]
    names = {  # of the ranges, by the x of their middle
        name_zero_at: "zero in fp16",
        -19.5: "subnormal",
        1: "normal",
        18: "inf",
    }
    share_of_height = first.get_xaxis_transform()  # for a y that is a share of the axes' height
    on_top: Options = {
        "transform": share_of_height,
        "ha": "center",
        "va": "top",
        "fontsize": 10,
    }
    for middle, name in names.items():
        first.text(middle, 0.97, name, **on_top)
    last.set_xlim(left, RIGHT)
    last.set_xlabel("log2 of |gradient × loss scale|")
    return axes

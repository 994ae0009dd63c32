"""What the formats of numbers can hold, and which of them ops compute in."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from torch import Tensor

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Look, Values

# Exponents of two at the edges of fp16: what lies at or below the first is zero, from there to the
# second subnormal, and from 65520 on, just below the third, infinite.
ZERO = -25
NORMAL = -14
TOP = 16
RIGHT = 20  # where the axis of gradients ends
LEFT: Look = {"loc": "left", "fontsize": 11}  # of titles
_HISTOGRAM: Look = {
    "width": 1.0,
    "align": "edge",
    "alpha": 0.7,
    "linewidth": 0.3,
    **style.EDGED,
}
_HISTOGRAM_LOOKS: list[Look] = [
    {"color": COLOURS["fp16"], "hatch": "", **_HISTOGRAM},
    {"color": COLOURS["bf16"], "hatch": "//", **_HISTOGRAM},
    {"color": COLOURS["tf32"], "hatch": "xx", **_HISTOGRAM},
]
Histogram = Mapping[int, int]
"""How many values have each exponent of two."""


def gradients_against_fp16(log2_magnitudes: Tensor, scales: Values) -> list[Axes]:
    """Histograms of log2|gradient|, moved by each of `scales`, over the range of fp16.

    `log2_magnitudes` has a value for each gradient but zeros; below 2^-60 none is drawn.
    """
    lowest = -60
    axes = _fp16_ranges(scales, lowest, name_zero_at=-42)
    bins = range(lowest, RIGHT + 1)
    for ax, scale in zip(axes, scales, strict=True):
        shifted = log2_magnitudes + math.log2(scale)
        ax.hist(shifted, bins=bins, color=COLOURS["fp16"])
        ax.set_ylabel("number of values")
        ax.margins(y=0.2)  # room for the names of the ranges
    return axes


def exponents_against_fp16(kinds: Mapping[str, Histogram], scales: Values) -> list[Axes]:
    """Histograms of gradient exponents, moved by each of `scales`, over the range of fp16.

    `kinds` maps a name to {exponent k: number of values between 2^k and 2^(k+1)}.
    """
    lowest = -60
    for counts in kinds.values():
        lowest = min([lowest, *counts])
    left = max(-130, lowest)
    axes = _fp16_ranges(scales, left, name_zero_at=-31)
    for ax, scale in zip(axes, scales, strict=True):
        shift = math.log2(scale)
        for (name, counts), look in zip(kinds.items(), _HISTOGRAM_LOOKS, strict=False):
            exponents = [k + shift for k in counts]
            shares = _percentages(counts)
            ax.bar(exponents, shares, label=name, **look)
        ax.set_ylabel("values (%)")
        ax.margins(y=0.25)  # room for the names of the ranges
    first, *_ = axes
    first.legend(loc="center left")
    return axes


def _percentages(counts: Histogram) -> list[float]:
    """Shares of the values of a kind, since kinds differ in number."""
    total = max(1, sum(counts.values()))
    return [100 * count / total for count in counts.values()]


def _fp16_ranges(scales: Values, left: int, name_zero_at: float) -> list[Axes]:
    """A panel for each loss scale, with fp16's ranges as backgrounds, named in the first."""
    rows = len(scales)
    height = 2.2 * rows + 0.6
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
    names = {
        name_zero_at: "zero in fp16",
        -19.5: "subnormal",
        1: "normal",
        18: "inf",
    }
    share_of_height = first.get_xaxis_transform()
    on_top: Look = {
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

"""What the formats of numbers can hold, and which of them ops compute in."""

import itertools
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
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


def range_and_spacing(formats: Mapping[str, tuple[Sequence[int], Values, int]]) -> list[Axes]:
    """Range (above) and relative spacing (below) of number formats, over one magnitude axis.

    `formats[name]`, whose first word is a precision, has the exponents of two from the smallest
    subnormal number to the largest, spacing / magnitude at each, and the smallest normal exponent.
    """
    _, (above, below) = style.subplots(2, size=(8.5, 6.5), sharex=True, height_ratios=[1, 1.3])
    dashes = ["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))]
    # Points up, for labels that would meet another line.
    raised = {"fp16": -12, "fp8 E5M2": 5, "fp8 E4M3": -5}
    for row, (name, (exponents, spacing, normal)) in enumerate(formats.items()):
        colour = COLOURS[style.precision_of(name)]
        low = exponents[0]
        high = exponents[-1] + 1
        hollow = {"color": "white", "edgecolor": colour, "hatch": "////"}
        above.barh(row, normal - low, left=low, height=0.6, **hollow)
        above.barh(row, high - normal, left=normal, height=0.6, color=colour)
        above.text(high + 3, row, name, va="center")
        curve = dict(zip(exponents, spacing, strict=True))
        style.lines(below, {name: curve}, [dashes[row % len(dashes)]], linewidth=2.5)
        where: Look = {"xytext": (6, raised.get(name, 0)), "textcoords": "offset points"}
        below.annotate(name, (high, spacing[-1]), va="center_baseline", **where)
    above.invert_yaxis()
    above.set_yticks([])
    below.set_yscale("log", base=2)
    below.set_xticks(range(-150, 151, 25))
    below.set_xlim(-155, 165)
    style.label(below, "log2 of the magnitude", "spacing / magnitude")
    above.set_title("range: solid = normal numbers, hatched = subnormal numbers", **LEFT)
    below.set_title("spacing of neighbours, relative to their size", **LEFT)
    for ax in (above, below):
        ax.axvline(0, color="grey", linewidth=0.8, zorder=0)
    return [above, below]


def weight_over_updates(weights: Mapping[str, Values]) -> Axes:
    """A weight after each of many small updates; `weights` maps a precision to its history."""
    _, ax = style.subplots()
    style.lines(ax, weights, {"fp32": "-", "bf16": "--", "fp16": ":"}, linewidth=3)
    return style.label(ax, "updates so far", "weight", legend="upper left")


def gradients_against_fp16(log2_magnitudes: Tensor, scales: Values) -> list[Axes]:
    """Histograms of log2|gradient|, moved by each of `scales`, over the range of fp16.

    `log2_magnitudes` has a value for each gradient but zeros; below 2^-60 none is drawn.
    """
    axes = _fp16_ranges(scales, -60, name_zero_at=-42)
    for ax, scale in zip(axes, scales, strict=True):
        shifted = log2_magnitudes + math.log2(scale)
        ax.hist(shifted, bins=range(-60, RIGHT + 1), color=COLOURS["fp16"])
        ax.set_ylabel("number of values")
        ax.margins(y=0.2)  # room for the names of the ranges
    return axes


def exponents_against_fp16(kinds: Mapping[str, Mapping[int, int]], scales: Values) -> list[Axes]:
    """Histograms of gradient exponents, moved by each of `scales`, over the range of fp16.

    `kinds` maps a name to {exponent k: number of values between 2^k and 2^(k+1)}.
    """
    looks = [(COLOURS["fp16"], ""), (COLOURS["bf16"], "//"), (COLOURS["tf32"], "xx")]
    lowest = min([-60, *itertools.chain.from_iterable(kinds.values())])
    axes = _fp16_ranges(scales, max(-130, lowest), name_zero_at=-31)
    for ax, scale in zip(axes, scales, strict=True):
        shift = math.log2(scale)
        for (name, histogram), (colour, hatch) in zip(kinds.items(), looks, strict=False):
            total = max(1, sum(histogram.values()))  # shares, since kinds differ in number
            exponents = [k + shift for k in histogram]
            shares = [100 * count / total for count in histogram.values()]
            look: Look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
            ax.bar(exponents, shares, width=1.0, align="edge", alpha=0.7, label=name, **look)
        ax.set_ylabel("values (%)")
        ax.margins(y=0.25)  # room for the names of the ranges
    axes[0].legend(loc="center left")
    return axes


def _fp16_ranges(scales: Values, left: int, name_zero_at: float) -> list[Axes]:
    """A panel for each loss scale, with fp16's ranges as backgrounds, named in the first."""
    size = (8.0, 2.2 * len(scales) + 0.6)
    _, grid = style.subplots(len(scales), size=size, sharex=True, sharey=True, squeeze=False)
    axes = list(grid[:, 0])
    for ax, scale in zip(axes, scales, strict=True):
        ax.axvspan(left, ZERO, color=style.LOST)
        ax.axvspan(ZERO, NORMAL, color=style.SUBNORMAL)
        ax.axvspan(TOP, RIGHT, color=style.LOST)
        ax.set_title(rf"loss scale $2^{{{math.log2(scale):.0f}}}$", **LEFT)
    names = {name_zero_at: "zero in fp16", -19.5: "subnormal", 1: "normal", 18: "inf"}
    on_top: Look = {"transform": axes[0].get_xaxis_transform(), "ha": "center", "va": "top"}
    for middle, name in names.items():
        axes[0].text(middle, 0.97, name, fontsize=10, **on_top)
    axes[-1].set(xlim=(left, RIGHT), xlabel="log2 of |gradient × loss scale|")
    return axes


def dtype_track(steps: Sequence[tuple[str, str]]) -> Axes:
    """The dtype after each of `steps`, (name, precision): fp32 above, what is narrower below."""
    _, ax = style.subplots(size=(8.0, 2.4))
    names, precisions = zip(*steps, strict=True)
    lanes = [int(precision == "fp32") for precision in precisions]
    ax.plot(range(len(steps)), lanes, color=style.PATH, linewidth=1.5, zorder=1)
    for at, (precision, lane) in enumerate(zip(precisions, lanes, strict=True)):
        marker = "s" if lane else "o"
        ax.scatter(at, lane, s=90, marker=marker, color=COLOURS[precision], zorder=2)
    narrower = [precision for precision in precisions if precision != "fp32"]
    ax.set_yticks([0, 1], [narrower[0] if narrower else "", "fp32"])
    ax.set_xticks(range(len(steps)), names, rotation=20)
    ax.set_ylim(-0.4, 1.4)
    return style.label(ax, "step of the forward pass", "dtype")


def dtype_grid(outcomes: Mapping[str, Mapping[str, str]]) -> Axes:
    """What ops return on backends: `outcomes[backend][op]` is a key of `COLOURS`, or "error"."""
    ops = list(next(iter(outcomes.values())))
    _, ax = style.subplots(size=(8.0, 0.32 * len(ops) + 0.6))
    style.dtype_cells(ax, outcomes, ops)
    return ax


def dtypes_by_model(outcomes: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Figure:
    """What the ops of models compute in: `outcomes[model][backend][op]`, a dtype or a word."""
    found: dict[str, None] = {}  # a set in order
    for backends in outcomes.values():
        for op_dtypes in backends.values():
            found |= dict.fromkeys(op_dtypes)
    ops = list(found)
    size = (9.0, 0.3 * len(ops) + 0.8)
    figure, axes = style.subplots(1, len(outcomes), size=size, sharey=True, squeeze=False)
    for ax, (title, backends) in zip(axes[0], outcomes.items(), strict=True):
        style.dtype_cells(ax, backends, ops, fontsize=9)
        ax.set_title(title, fontsize=11)
    return figure

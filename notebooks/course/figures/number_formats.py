"""Range and spacing of number formats, and the dtypes that ops compute in."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Options, Values

_LEFT: Options = {"loc": "left", "fontsize": 11}  # how titles are placed
_DASHES = style.DASHES[:6]
# How many points labels are moved up, so that they do not touch another line.
_RAISED = {"fp16": -12, "fp8 E5M2": 5, "fp8 E4M3": -5}
Exponents = tuple[Sequence[int], Values, int]
"""(exponents of two, spacing / magnitude at each of them, smallest exponent of normal numbers)."""
DtypeOf = Mapping[str, str]
"""{op: the dtype that it computes in, or a word such as "error"}."""


def range_and_spacing(formats: Mapping[str, Exponents]) -> list[Axes]:
    """Range (above) and relative spacing (below) of number formats, over one magnitude axis.

    The first word of a format's name is its precision. `formats[name]` has the exponents from the
    smallest subnormal number to the largest number.
    """
    size = (8.5, 6.5)
    heights = [1, 1.3]
    _, axes = style.rows(2, size, sharex=True, height_ratios=heights)
    above, below = axes
    for row, (name, facts) in enumerate(formats.items()):
        exponents, spacing, normal = facts
        _range_bar(above, row, name, exponents, normal)
        dash = _DASHES[row % len(_DASHES)]
        _spacing_line(below, name, exponents, spacing, dash)
    above.invert_yaxis()  # the first format on top
    above.set_yticks([])
    below.set_yscale("log", base=2)
    ticks = range(-150, 151, 25)
    below.set_xticks(ticks)
    below.set_xlim(-155, 165)
    style.label(below, "log2 of the magnitude", "spacing / magnitude")
    of_range = "range: solid = normal numbers, hatched = subnormal numbers"
    above.set_title(of_range, **_LEFT)
    of_spacing = "spacing of neighbours, relative to their size"
    below.set_title(of_spacing, **_LEFT)
    for ax in (above, below):
        ax.axvline(0, color="grey", linewidth=0.8, zorder=0)
    return [above, below]


def _range_bar(ax: Axes, row: int, name: str, exponents: Sequence[int], normal: int) -> None:
    """Draw the range of a format as a bar, hatched where numbers are subnormal."""
    colour = COLOURS[style.precision_of(name)]
    low = exponents[0]
    high = exponents[-1] + 1  # where the last power of two ends
    hollow: Options = {
        "color": "white",
        "edgecolor": colour,
        "hatch": "////",
        "height": 0.6,
    }
    subnormal_length = normal - low
    ax.barh(row, subnormal_length, left=low, **hollow)
    normal_length = high - normal
    ax.barh(row, normal_length, left=normal, height=0.6, color=colour)
    ax.text(high + 3, row, name, va="center")  # a little right of the bar


def _spacing_line(
    ax: Axes, name: str, exponents: Sequence[int], spacing: Values, dash: object
) -> None:
    """Draw the relative spacing of a format over the magnitude, with its name at the right end."""
    curve = dict(zip(exponents, spacing, strict=True))
    style.lines(ax, {name: curve}, [dash], linewidth=2.5)
    x = exponents[-1] + 1
    y = spacing[-1]
    points_up = _RAISED.get(name, 0)
    beside: Options = {
        "xytext": (6, points_up),
        "textcoords": "offset points",
        "va": "center_baseline",
    }
    right_end = (x, y)
    ax.annotate(name, right_end, **beside)


def dtype_grid(outcomes: Mapping[str, DtypeOf]) -> Axes:
    """A table of the dtypes that ops return: `outcomes[backend][op]`, a precision or "error"."""
    first, *_ = outcomes.values()
    ops = list(first)
    height = 0.32 * len(ops) + 0.6
    _, ax = style.subplots(size=(8.0, height))
    style.dtype_cells(ax, outcomes, ops)
    return ax


def dtypes_by_model(outcomes: Mapping[str, Mapping[str, DtypeOf]]) -> Figure:
    """Tables of the dtypes that the ops of models compute in: `outcomes[model][backend][op]`."""
    names: dict[str, None] = {}  # used as an ordered set
    for backends in outcomes.values():
        for dtype_of in backends.values():
            names |= dict.fromkeys(dtype_of)
    ops = list(names)
    height = 0.3 * len(ops) + 0.8
    count = len(outcomes)
    size = (9.0, height)
    figure, axes = style.columns(count, size, sharey=True)
    for ax, title, backends in style.by_panel(axes, outcomes):
        style.dtype_cells(ax, backends, ops, fontsize=9)
        ax.set_title(title, fontsize=11)
    return figure

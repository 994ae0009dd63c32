"""The look of every figure: colours, the parts figures are built from, and how one is saved."""

import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from amp_lab.core import files
from amp_lab.core.timing import Estimate

# One look per precision in every figure. The colours differ in lightness too, and bars are hatched,
# so that a print in black and white can be read as well.
COLOURS = {
    "fp32": "#1b1b3a",
    "tf32": "#4a4e9e",
    "bf16": "#d9822b",
    "fp16": "#b3446c",
    "fp8": "#8fbcbb",
}
HATCHES = {
    "fp32": "",
    "tf32": "..",
    "bf16": "//",
    "fp16": "xx",
    "fp8": "--",
}
# Greys for what is no precision: backgrounds, then lines, then anything else.
LOST = "0.80"
SUBNORMAL = "0.91"
SCALED = "0.85"
SECOND = "0.45"
GUIDE = "0.4"
PATH = "0.6"
STRONG_GRID = "0.7"
GRID = "0.9"
OTHER = "0.75"
# What was measured while the machine was busy: it must not be taken for a result.
BUSY = "machine too busy"
UNTRUSTED = {"color": "0.92", "hatch": "////", "edgecolor": "0.7"}
_UNTRUSTED_BOX = {
    "facecolor": UNTRUSTED["color"],
    "edgecolor": UNTRUSTED["edgecolor"],
    "hatch": UNTRUSTED["hatch"],
    "marker": "s",
    "s": 90,
    "zorder": 3,
}
_INTERVAL = {"ecolor": SECOND, "capsize": 3}
# The parts of a stack, from its beginning. Neighbours differ in their hatch as well.
THREE_PARTS = (
    ("0.15", ""),
    ("0.5", "//"),
    ("0.8", ".."),
)
FIVE_PARTS = (
    ("0.1", ""),
    ("0.45", "//"),
    ("0.65", "xx"),
    ("0.75", ""),
    ("0.9", ".."),
)
# Of lines that are no precisions, or have their colours alone. The last: lengths of strokes, gaps.
LONG_DASH = (0, (5, 1))
DENSE_DOTS = (0, (1, 1))
DASH_AND_DOTS = (0, (3, 1, 1, 1))
DASHES = (
    "-",
    "--",
    "-.",
    ":",
    LONG_DASH,
    DENSE_DOTS,
    DASH_AND_DOTS,
)

Look = dict[str, Any]
Grey = tuple[str, str]  # a shade and a hatch
Size = tuple[float, float]  # width and height in inches
Bars = list[tuple[float, Look]]  # of a stack: length and look of each
Values = Sequence[float]
Panels = Mapping[str, Any]  # what each panel shows, by its title
CENTRED: Look = {"ha": "center", "va": "center"}
SLANTED: Look = {"rotation": 30, "ha": "right", "fontsize": 9}  # names below an axis
EDGED: Look = {"edgecolor": "white"}  # bars that touch are told apart by it
Inside = Literal["best", "upper left", "center right", "lower right"]  # of the axes, for a legend

_SETTINGS = {
    "figure.dpi": 80,
    "figure.figsize": (8.0, 3.5),
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "legend.frameon": False,
}
"""Of matplotlib, for all figures."""

# pyplot shows what it makes in a notebook, but keeps a list of it, and may open a window for it.
# `save` wants neither, so it puts a bare `Figure` here for as long as it draws.
_new_figure: ContextVar[Callable[..., Figure]] = ContextVar("_new_figure", default=plt.figure)


def use_style() -> None:
    """Set the collection's matplotlib style for this process; call it once, at the top."""
    if "ipykernel" in sys.modules:  # a notebook shows figures of twice the dpi at half the size
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina")
    plt.rcParams.update(_SETTINGS)


def image(draw: Callable[..., Figure], *arguments: object, form: str = "png") -> bytes:
    """Draw a figure as PNG or SVG, without a window and without pyplot's list of them.

    `draw` is one of the figures here that return a `Figure`.
    """
    use_style()
    picture = io.BytesIO()
    maker = "Software" if form == "png" else "Creator"  # what the format calls it
    token = _new_figure.set(Figure)
    try:
        figure = draw(*arguments)
        figure.savefig(picture, format=form, dpi=160, metadata={maker: files.MADE_BY})
    finally:
        _new_figure.reset(token)
    return picture.getvalue()


def save(path: str | PathLike[str], draw: Callable[..., Figure], *arguments: object) -> None:
    """Write what `image` draws to a file, whose name says in which form.

    Raises `OptionError` if it cannot be written.
    """
    suffix = Path(path).suffix
    form = suffix.removeprefix(".") or "png"
    picture = image(draw, *arguments, form=form)
    files.save(Path(path), [picture])


def subplots(
    rows: int = 1, columns: int = 1, size: Size | None = None, **options: Any
) -> tuple[Figure, Any]:
    """`pyplot.subplots` with a size in inches, for figures that `save` can write too."""
    figure = _new_figure.get()(figsize=size)
    return figure, figure.subplots(rows, columns, **options)


def columns(count: int, size: Size, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side, of which there may be one alone."""
    figure, grid = subplots(1, count, size=size, squeeze=False, **options)
    (axes,) = grid
    return figure, axes


def rows(count: int, size: Size, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """Panels one below the other, of which there may be one alone."""
    figure, grid = subplots(count, size=size, squeeze=False, **options)
    return figure, grid[:, 0]


def by_panel(axes: Iterable[Axes], panels: Panels) -> Iterator[tuple[Axes, str, Any]]:
    """The axes, the title and the contents of each panel."""
    for ax, (title, contents) in zip(axes, panels.items(), strict=True):
        yield ax, title, contents


def look_of(precision: str, **more: Any) -> Look:
    """How bars of a precision are drawn; what is no precision is light grey with dots."""
    return {
        "color": COLOURS.get(precision, OTHER),
        "hatch": HATCHES.get(precision, ".."),
        **EDGED,
        **more,
    }


def part_looks(parts: Iterable[str], greys: Sequence[Grey]) -> dict[str, Look]:
    """The looks of the parts of a stack, which are no precisions; as many as there are greys."""
    looks: dict[str, Look] = {}
    for part, (grey, hatch) in zip(parts, greys, strict=True):
        looks[part] = {"color": grey, "hatch": hatch, "label": part, **EDGED}
    return looks


def bar(ax: Axes, at: Any, length: float, text: str, size: int = 9, **look: Any) -> None:
    """A lying bar, with a text of this font size beyond its end.

    It stands upright if its look has a ``width`` in place of a ``height``.
    """
    if "width" in look:
        upright = ax.bar(at, length, **look)
        if text:
            ax.bar_label(upright, [text], padding=3)  # off the bar's edge
        return
    lying = ax.barh(at, length, **look)
    if text:
        ax.bar_label(lying, [f" {text}"], fontsize=size)


def measured_bar(ax: Axes, at: Any, estimate: Estimate, text: str, **look: Any) -> None:
    """A bar as long as a measured value, with its interval; hatched in grey if not trusted.

    ``text`` is then `BUSY`; a text that is empty stays so.
    """
    axis = "xerr"
    busy = BUSY
    if "width" in look:  # it stands upright
        axis = "yerr"
        busy = BUSY.replace(" ", "\n", 1)
    if not estimate.trusted:
        look |= UNTRUSTED
        text = text and busy
    look[axis] = _errors([estimate])
    look["error_kw"] = _INTERVAL
    bar(ax, at, estimate.median, text, **look)


def measured_line(
    ax: Axes, at: Sequence[float], estimates: Sequence[Estimate], form: str, **look: Any
) -> None:
    """A line through measured values with their intervals, in matplotlib's format such as ``-o``.

    It leaves out those that are not trusted: they are hatched in grey, and the axes say `BUSY`.
    """
    medians: list[float] = []
    untrusted: dict[float, Estimate] = {}
    for x, estimate in zip(at, estimates, strict=True):
        if estimate.trusted:
            medians.append(estimate.median)
        else:  # no number to the line, which has a gap there
            medians.append(math.nan)
            untrusted[x] = estimate
    intervals = _errors(estimates)
    ax.errorbar(at, medians, intervals, fmt=form, capsize=3, **look)
    if untrusted:
        _grey_boxes(ax, untrusted)


def _grey_boxes(ax: Axes, untrusted: Mapping[float, Estimate]) -> None:
    """Boxes {x: estimate} with their intervals, and `BUSY` once above all lines of the axes."""
    places = list(untrusted)
    estimates = list(untrusted.values())
    medians = [estimate.median for estimate in estimates]
    intervals = _errors(estimates)
    grey = UNTRUSTED["edgecolor"]
    ax.errorbar(places, medians, intervals, fmt="none", capsize=3, ecolor=grey)
    ax.scatter(places, medians, **_UNTRUSTED_BOX)
    texts = [text.get_text() for text in ax.texts]
    if BUSY not in texts:
        above: Look = {"ha": "center", "va": "bottom", "transform": ax.transAxes}
        ax.text(0.5, 1.0, BUSY, fontsize=9, color=GUIDE, **above)


def _errors(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Distances from the medians to the ends of the intervals, as matplotlib takes them."""
    below: list[float] = []
    above: list[float] = []
    for estimate in estimates:
        low, high = estimate.interval
        below.append(estimate.median - low)
        above.append(high - estimate.median)
    return [below, above]


def stacked(ax: Axes, at: float, parts: Bars, total: str = "", size: int = 9) -> None:
    """Bars of (length, look), each from where the one before it ends; `total` formats the sum."""
    start = 0.0
    last = len(parts) - 1
    for i, (length, look) in enumerate(parts):
        end = start + length
        text = ""
        if i == last:
            text = total.format(end)
        side = "left"
        if "width" in look:  # the bars stand upright
            side = "bottom"
        placed = look | {side: start}
        bar(ax, at, length, text, size, **placed)
        start = end


def shade(i: int, of: int) -> tuple[float, ...]:
    """Colours that differ in lightness, from dark to light."""
    last = max(1, of - 1)
    return colormaps["viridis"](0.9 * i / last)


def stairs(ax: Axes, scales: Values, skipped: Sequence[int], markersize: float) -> None:
    """The scale at each step, with a cross where the step was skipped."""
    steps = range(len(scales))
    line: Look = {
        "where": "mid",
        "color": COLOURS["fp16"],
        "label": "loss scale",
    }
    ax.step(steps, scales, **line)
    at_skips = [scales[step] for step in skipped]
    cross: Look = {
        "color": "black",
        "markersize": markersize,
        "label": "step skipped",
    }
    ax.plot(skipped, at_skips, "x", **cross)
    ax.set_yscale("log", base=2)


def name_rows(
    ax: Axes, names: Sequence[str], room: float, fontsize: float = 9, middle: float = 0.0
) -> None:
    """Names beside rows of lying bars, the first on top, and `room` for texts at the other side."""
    places = range(len(names))
    middles = [place + middle for place in places]
    ax.set_yticks(middles, names, fontsize=fontsize)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=room)


def lines(
    ax: Axes,
    curves: Mapping[str, Values | Mapping[Any, float]],
    dashes: Sequence[Any] | Mapping[str, Any] = ("-", "--", ":", "-."),
    markers: str = "",
    first: int = 0,
    **look: Any,
) -> None:
    """Curves {label: {x: y}}, or {label: values} that are numbered from `first`.

    A label begins with a precision, which gives the colour. `dashes` are by precision or in order.
    """
    for i, (label, points) in enumerate(curves.items()):
        precision = precision_of(label)
        if isinstance(dashes, Mapping):
            dash = dashes[precision]
        else:
            dash = dashes[i]
        marker = None
        if markers:
            marker = markers[i]
        if not isinstance(points, Mapping):
            points = dict(enumerate(points, first))
        colour = COLOURS[precision]
        line: Look = {
            "label": label,
            "linestyle": dash,
            "marker": marker,
            "color": colour,
            **look,
        }
        x = list(points)
        y = list(points.values())
        ax.plot(x, y, **line)


def precision_of(label: str) -> str:
    """The precision that a label begins with: ``fp16`` of ``fp16, O1``."""
    first_word, *_ = label.split()
    return first_word.rstrip(",")


def label(ax: Axes, x: str, y: str, legend: Inside | None = None) -> Axes:
    """Name the axes and, if told where, put a legend inside of them; returns `ax`."""
    ax.set(xlabel=x, ylabel=y)
    if legend is not None:
        ax.legend(loc=legend)
    return ax


def log2_axis(ax: Axes, ticks: Sequence[int]) -> None:
    """Make the x axis logarithmic, with these numbers alone on it."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()


def dtype_cells(
    ax: Axes, outcomes: Mapping[str, Mapping[str, str]], ops: Sequence[str], fontsize: float = 11
) -> None:
    """A table of `outcomes[backend][op]`, a column for each backend; a missing op is left empty."""
    for column, outcome_of in enumerate(outcomes.values()):
        for row, op in enumerate(ops):
            if op in outcome_of:
                _cell(ax, column, row, outcome_of[op], fontsize)
    width = len(outcomes)
    height = len(ops)
    middles_of_columns = [column + 0.48 for column in range(width)]
    middles_of_rows = [row + 0.45 for row in range(height)]
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.set_xticks(middles_of_columns, list(outcomes))
    ax.set_yticks(middles_of_rows, ops)
    ax.xaxis.tick_top()  # as the head of a table
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _cell(ax: Axes, column: int, row: int, text: str, fontsize: float) -> None:
    """A box in the colour of its text, if that is a precision."""
    face = COLOURS.get(text, "white")
    corner = (column, row)
    box = Rectangle(corner, width=0.96, height=0.9, facecolor=face, edgecolor=GUIDE)
    ax.add_patch(box)
    ink = "black"
    if text in ("fp32", "fp16"):  # whose colours are dark
        ink = "white"
    x = column + 0.48
    y = row + 0.45
    ax.text(x, y, text, color=ink, fontsize=fontsize, **CENTRED)


def legend_beside(
    figure: Figure, loc: Literal["outside lower center", "outside right upper"], **options: Any
) -> None:
    """One legend outside of the axes; what several bars or axes share stands in it once."""
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        shapes, labels = ax.get_legend_handles_labels()
        for shape, label in zip(shapes, labels, strict=True):
            handles.setdefault(label, shape)
    labels = list(handles)
    shapes = list(handles.values())
    figure.legend(shapes, labels, loc=loc, **options)

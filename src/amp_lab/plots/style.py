"""The style of all figures: colours, shared elements such as bars and legends, and saving."""

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
from amp_lab.core.estimates import Estimate

# One style per precision in every figure. The colours differ in lightness too, and bars are
# hatched, so that figures can be read in greyscale.
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
# Greys for everything that is not a precision: first backgrounds, then lines, then other bars.
LOST = "0.80"
SUBNORMAL = "0.91"
SCALED = "0.85"
SECOND = "0.45"
GUIDE = "0.4"
PATH = "0.6"
STRONG_GRID = "0.7"
GRID = "0.9"
OTHER = "0.75"
# The text and options of values measured while the machine was busy, which are not results.
BUSY = "not reliable"
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
# Styles of the segments of a stacked bar, from its start. Neighbours differ in their hatch too.
FIVE_PARTS = (
    ("0.1", ""),
    ("0.45", "//"),
    ("0.65", "xx"),
    ("0.75", ""),
    ("0.9", ".."),
)
# Dashes of lines. Matplotlib's (offset, (length of a stroke, length of a gap, …)) has more of them.
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

Options = dict[str, Any]  # keyword arguments of a matplotlib function, such as colour and hatch
Grey = tuple[str, str]  # a shade and a hatch
Size = tuple[float, float]  # width and height in inches
Bars = list[tuple[float, Options]]  # length and options of each segment of a stacked bar
Values = Sequence[float]
Panels = Mapping[str, Any]  # the content of each panel by its title
CENTRED: Options = {"ha": "center", "va": "center"}
SLANTED: Options = {"rotation": 30, "ha": "right", "fontsize": 9}  # names below an axis
EDGED: Options = {"edgecolor": "white"}  # separates bars that touch
Inside = Literal["best", "upper left", "center right", "lower right"]  # a legend in the axes

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
"""Settings of matplotlib for all figures."""

# The function that makes a figure. A notebook shows the figures of pyplot. But pyplot also keeps a
# reference to each and may open a window, so `image` replaces it by `Figure` while it draws.
_new_figure: ContextVar[Callable[..., Figure]] = ContextVar("_new_figure", default=plt.figure)


def use_style() -> None:
    """Set our matplotlib style for this process. Figures in notebooks also become sharper."""
    if "ipykernel" in sys.modules:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina")  # twice the resolution in the same size
    plt.rcParams.update(_SETTINGS)


def image(draw: Callable[..., Figure], *arguments: object, form: str = "png") -> bytes:
    """Draw a figure and return it as a PNG or SVG file, without opening a window.

    `draw` is a function of `amp_lab.plots` that returns a `Figure`. It gets `arguments`. `form` is
    "png" or "svg". The style stays set for this process, as after `use_style`.
    """
    use_style()
    picture = io.BytesIO()
    # The key under which each file format says which program made the file.
    metadata_key = "Software" if form == "png" else "Creator"
    token = _new_figure.set(Figure)
    try:
        figure = draw(*arguments)
        figure.savefig(picture, format=form, dpi=160, metadata={metadata_key: files.GENERATOR})
    finally:
        _new_figure.reset(token)
    return picture.getvalue()


def save(path: str | PathLike[str], draw: Callable[..., Figure], *arguments: object) -> None:
    """Draw a figure as `image` does, and write it to a file.

    The suffix of the file, ``.png`` or ``.svg``, sets the format. The default is PNG.

    Raises `OptionError` if the file cannot be written.
    """
    suffix = Path(path).suffix
    form = suffix.removeprefix(".") or "png"
    picture = image(draw, *arguments, form=form)
    files.save(Path(path), [picture])


def subplots(
    rows: int = 1, columns: int = 1, size: Size | None = None, **options: Any
) -> tuple[Figure, Any]:
    """Like `pyplot.subplots`, with a size in inches or from the style; also works in `image`.

    Returns the figure and its axes: one, or an array of several, as in matplotlib.
    """
    figure = _new_figure.get()(figsize=size)
    return figure, figure.subplots(rows, columns, **options)


def columns(count: int, size: Size, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure with `count` panels side by side, and the axes in a sequence, even for one."""
    figure, grid = subplots(1, count, size=size, squeeze=False, **options)
    (axes,) = grid
    return figure, axes


def rows(count: int, size: Size, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure with `count` panels one below the other; the axes in a sequence, from the top."""
    figure, grid = subplots(count, size=size, squeeze=False, **options)
    return figure, grid[:, 0]


def by_panel(axes: Iterable[Axes], panels: Panels) -> Iterator[tuple[Axes, str, Any]]:
    """Yield (axes, title, content) of each panel; there must be as many axes as panels."""
    for ax, (title, contents) in zip(axes, panels.items(), strict=True):
        yield ax, title, contents


def precision_options(precision: str, **more: Any) -> Options:
    """The options of bars of a precision, with the entries of `more` added or replaced.

    The bars of any other name are light grey with dots.
    """
    return {
        "color": COLOURS.get(precision, OTHER),
        "hatch": HATCHES.get(precision, ".."),
        **EDGED,
        **more,
    }


def segment_options(parts: Iterable[str], greys: Sequence[Grey]) -> dict[str, Options]:
    """The options of each segment of a stacked bar, by name in `parts`; one for each grey."""
    segments: dict[str, Options] = {}
    for part, (grey, hatch) in zip(parts, greys, strict=True):
        segments[part] = {"color": grey, "hatch": hatch, "label": part, **EDGED}
    return segments


def bar(ax: Axes, at: Any, length: float, text: str, size: int = 9, **options: Any) -> None:
    """Draw a bar at position `at`, a number or a name, with a text beyond its end; "" for none.

    The bar is horizontal, or vertical if its options have a ``width`` instead of a ``height``.
    `size` is the font size of the text of a horizontal bar; a vertical bar has the usual font size.
    """
    if "width" in options:
        vertical = ax.bar(at, length, **options)
        if text:
            ax.bar_label(vertical, [text], padding=3)  # a gap to the end of the bar
        return
    horizontal = ax.barh(at, length, **options)
    if text:
        ax.bar_label(horizontal, [f" {text}"], fontsize=size)  # the space is the gap


def measured_bar(ax: Axes, at: Any, estimate: Estimate, text: str, **options: Any) -> None:
    """Draw a measured value as a bar with its interval; see `bar`.

    If the value is not trusted, the bar is hatched in grey, and a text is replaced by `BUSY`.
    """
    error_argument = "xerr"
    busy = BUSY
    if "width" in options:  # the bar is vertical
        error_argument = "yerr"
        busy = BUSY.replace(" ", "\n", 1)  # in two lines, since the bar is narrow
    if not estimate.trusted:
        options |= UNTRUSTED
        if text:
            text = busy
    options[error_argument] = _errors([estimate])
    options["error_kw"] = _INTERVAL
    bar(ax, at, estimate.median, text, **options)


def measured_line(
    ax: Axes, at: Sequence[float], estimates: Sequence[Estimate], form: str, **options: Any
) -> None:
    """Draw a line through measured values with their intervals.

    `at` has the x of each, and `form` is matplotlib's format of a line, such as ``-o``. The line
    has gaps at values that are not trusted: these are grey boxes, and the axes say `BUSY`.
    """
    medians: list[float] = []
    untrusted: dict[float, Estimate] = {}
    for x, estimate in zip(at, estimates, strict=True):
        if estimate.trusted:
            medians.append(estimate.median)
        else:
            medians.append(math.nan)  # a gap in the line
            untrusted[x] = estimate
    intervals = _errors(estimates)
    ax.errorbar(at, medians, intervals, fmt=form, capsize=3, **options)
    if untrusted:
        _grey_boxes(ax, untrusted)


def _grey_boxes(ax: Axes, untrusted: Mapping[float, Estimate]) -> None:
    """Draw grey boxes with their intervals, and the text `BUSY` above the axes.

    `untrusted` is {x: estimate}.
    """
    x = list(untrusted)
    estimates = list(untrusted.values())
    medians = [estimate.median for estimate in estimates]
    intervals = _errors(estimates)
    grey = UNTRUSTED["edgecolor"]
    ax.errorbar(x, medians, intervals, fmt="none", capsize=3, ecolor=grey)
    ax.scatter(x, medians, **_UNTRUSTED_BOX)
    texts = [text.get_text() for text in ax.texts]
    if BUSY not in texts:  # once, even if several lines have such values
        above: Options = {"ha": "center", "va": "bottom", "transform": ax.transAxes}
        ax.text(0.5, 1.0, BUSY, fontsize=9, color=GUIDE, **above)


def _errors(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Distances from the medians to the ends of the intervals: [below, above] for matplotlib."""
    below: list[float] = []
    above: list[float] = []
    for estimate in estimates:
        low, high = estimate.interval
        below.append(estimate.median - low)
        above.append(high - estimate.median)
    return [below, above]


def stacked(ax: Axes, at: float, segments: Bars, total: str = "", size: int = 9) -> None:
    """Draw a stacked bar of segments (length, options), at position `at`.

    `total` is the format of the sum at its end, such as ``{:.3g}``; "" for none. `size` is its font
    size. As for `bar`, the stacked bar is vertical if the options have a ``width``.
    """
    start = 0.0
    last = len(segments) - 1
    for i, (length, options) in enumerate(segments):
        end = start + length
        text = ""
        if i == last:
            text = total.format(end)
        side = "left"
        if "width" in options:  # the bar is vertical
            side = "bottom"
        segment = options | {side: start}
        bar(ax, at, length, text, size, **segment)
        start = end


def shade(i: int, count: int) -> tuple[float, ...]:
    """The colour number `i` of `count` colours that go from dark to light, as RGBA."""
    last = max(1, count - 1)
    return colormaps["viridis"](0.9 * i / last)  # its last tenth is too light on white


def stairs(ax: Axes, scales: Values, skipped: Sequence[int], markersize: float) -> None:
    """Draw the loss scale at each step, with a cross at each `skipped` step."""
    steps = range(len(scales))
    line: Options = {
        "where": "mid",
        "color": COLOURS["fp16"],
        "label": "loss scale",
    }
    ax.step(steps, scales, **line)
    at_skips = [scales[step] for step in skipped]
    cross: Options = {
        "color": "black",
        "markersize": markersize,
        "label": "step skipped",
    }
    ax.plot(skipped, at_skips, "x", **cross)
    ax.set_yscale("log", base=2)


def name_rows(
    ax: Axes, names: Sequence[str], room: float, fontsize: float = 9, middle: float = 0.0
) -> None:
    """Name rows of horizontal bars, the first on top.

    `room` is the margin for texts beyond the bars, as a share of the axis. `middle` is how far the
    middle of a row of bars is from the row's number.
    """
    y = [row + middle for row in range(len(names))]
    ax.set_yticks(y, names, fontsize=fontsize)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=room)


def lines(
    ax: Axes,
    curves: Mapping[str, Values | Mapping[Any, float]],
    dashes: Sequence[Any] | Mapping[str, Any] = ("-", "--", ":", "-."),
    markers: str = "",
    first: int = 0,
    **options: Any,
) -> None:
    """Draw curves {label: {x: y}}, or {label: values} with x = `first`, `first` + 1, ….

    A label begins with a precision, which gives the colour. `dashes` are given by precision, or for
    each curve in order. `markers` has a letter for each curve, or is empty. `options` is for all.
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
        line: Options = {
            "label": label,
            "linestyle": dash,
            "marker": marker,
            "color": colour,
            **options,
        }
        x = list(points)
        y = list(points.values())
        ax.plot(x, y, **line)


def precision_of(label: str) -> str:
    """The precision that a label begins with: ``fp16`` for ``fp16, O1``."""
    first_word, *_ = label.split()
    return first_word.rstrip(",")


def label(ax: Axes, x: str, y: str, legend: Inside | None = None) -> Axes:
    """Label the axes, and draw a legend at the place `legend` in them, if given; return `ax`."""
    ax.set(xlabel=x, ylabel=y)
    if legend is not None:
        ax.legend(loc=legend)
    return ax


def dtype_cells(
    ax: Axes, outcomes: Mapping[str, Mapping[str, str]], ops: Sequence[str], fontsize: float = 11
) -> None:
    """Draw a table of `outcomes[backend][op]`, with a column for each backend, a row for each op.

    The cell of an op that a backend lacks stays empty.
    """
    for column, outcome_of in enumerate(outcomes.values()):
        for row, op in enumerate(ops):
            if op in outcome_of:
                _cell(ax, column, row, outcome_of[op], fontsize)
    width = len(outcomes)
    height = len(ops)
    # A cell is 0.96 wide and 0.9 high, which leaves gaps between cells: see `_cell`.
    middles_of_columns = [column + 0.48 for column in range(width)]
    middles_of_rows = [row + 0.45 for row in range(height)]
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.set_xticks(middles_of_columns, list(outcomes))
    ax.set_yticks(middles_of_rows, ops)
    ax.xaxis.tick_top()  # names of backends above, as in a table
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _cell(ax: Axes, column: int, row: int, text: str, fontsize: float) -> None:
    """Draw a cell with a text; if that is a precision, the cell has its colour."""
    face_colour = COLOURS.get(text, "white")
    corner = (column, row)
    box = Rectangle(corner, width=0.96, height=0.9, facecolor=face_colour, edgecolor=GUIDE)
    ax.add_patch(box)
    text_colour = "black"
    if text in ("fp32", "fp16"):  # their colours are dark
        text_colour = "white"
    x = column + 0.48  # the middle of the box
    y = row + 0.45
    ax.text(x, y, text, color=text_colour, fontsize=fontsize, **CENTRED)


def legend_beside(
    figure: Figure, loc: Literal["outside lower center", "outside right upper"], **options: Any
) -> None:
    """Draw one legend for all axes, outside of them; each label stands in it once.

    `options` are the options of matplotlib's `Figure.legend`.
    """
    handle_of: dict[str, Any] = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            if label not in handle_of:
                handle_of[label] = handle
    labels = list(handle_of)
    handles = list(handle_of.values())
    figure.legend(handles, labels, loc=loc, **options)

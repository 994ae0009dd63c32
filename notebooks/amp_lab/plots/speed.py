"""Times, rates and speed-ups, and the limits of a device."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Look, Values
from amp_lab.timing import Comparison, Estimate, Ratio

_LEVEL: Look = {"color": "black", "linewidth": 1}  # a line to compare with
_TICK: Look = {"color": "black", "linewidth": 2}  # of a limit on a bar
_LAYER_DOT: Look = {
    "linestyle": "none",
    "markersize": 7,
    "markeredgecolor": "black",
    "markeredgewidth": 0.6,
}
_KIND_LOOKS = [
    ("black", "*"),
    (style.PATH, "^"),
    (COLOURS["bf16"], "o"),
    ("black", "v"),
]
# Both lines may be of one precision, and one colour: their dash and their fill differ.
_LINE_LOOKS = (("-o", None), ("--s", "white"))
_ROOF_DASHES = ["-", "--", ":", "-."]
_POINT_MARKS = "osD^vP*X"

Bar = tuple[str, str, Estimate | None, float | None, str]
"""Precision, rung, milliseconds, those at the limit, and the text beside the bar."""
Layers = Sequence[tuple[str, float]]
"""Kind and FLOPs per byte of each layer."""
Growth = tuple[Sequence[int], Sequence[Ratio], Values]
"""Values, and for each the speed-up and the share of memory."""
Point = tuple[str, str, float, Estimate]
"""Label, precision, FLOPs per byte, and FLOP/s."""


def time_and_memory(
    times: Comparison,
    mebibytes: Mapping[str, float],
    memory_label: str,
    losses: Mapping[str, Values] | None = None,
) -> Figure:
    """Bars of time and of memory {precision: MiB}, with their ratio to the first precision.

    The names of the comparison are precisions. Losses of each step are drawn beside them, if given.
    """
    panels = 2
    if losses:
        panels = 3
    width = 4.0 * panels
    figure, axes = style.columns(panels, size=(width, 3.2))
    left, right, *rest = axes
    _time_bars(left, times)
    left.set_ylabel("time of a step (ms)")
    left.margins(y=0.4)  # room for three lines above the highest bar
    _memory_bars(right, mebibytes)
    right.set_ylabel(f"memory, {memory_label} (MiB)")
    right.margins(y=0.25)
    for ax in rest:
        style.lines(ax, losses or {}, first=1, linewidth=2)
        style.label(ax, "step", "loss", legend="best")
        ax.set_ylim(bottom=0)
    return figure


def _time_bars(ax: Axes, times: Comparison) -> None:
    first, *_ = times.samples_s
    for name in times.samples_s:
        seconds = times.time_s(name)
        milliseconds = seconds.times(1e3)
        text = f"{milliseconds.median:.3g}"
        if name != first:
            speedup = times.ratio(first, name)
            low, high = speedup.interval
            text += f"\n{speedup.median:.2f}x as fast"
            text += f"\n({low:.2f}x to {high:.2f}x)"
        look = style.look_of(name, width=0.6)
        style.measured_bar(ax, name, milliseconds, text, **look)


def _memory_bars(ax: Axes, mebibytes: Mapping[str, float]) -> None:
    first, *_ = mebibytes.values()
    for name, value in mebibytes.items():
        text = f"{value:.3g}"
        if value != first:
            share = value / first
            text += f"\n{share:.0%}"
        look = style.look_of(name, width=0.6)
        style.bar(ax, name, value, text, **look)


def time_by_kind(kinds: Mapping[str, Comparison]) -> Axes:
    """Bars of time, `kinds[kind]` over precisions, with the speed-up over the first precision."""
    _, ax = style.subplots(size=(7.0, 3.2))
    comparisons = list(kinds.values())
    precisions = list(comparisons[0].samples_s)
    first = precisions[0]
    width = 0.8 / len(precisions)
    for i, precision in enumerate(precisions):
        look = style.look_of(precision, width=width)
        offset = i * width
        for k, times in enumerate(comparisons):
            seconds = times.time_s(precision)
            milliseconds = seconds.times(1e3)
            text = ""
            has_room = i == 1 or times.trusted  # not to say twice that it was busy
            if i and has_room:
                speedup = times.ratio(first, precision)
                text = f"{speedup.median:.2f}x"
            style.measured_bar(ax, k + offset, milliseconds, text, **look)
        ax.bar([0], [0], label=precision, **look)  # for the legend, whatever could be measured
    names = list(kinds)
    half_width = width / 2
    middles = [k + 0.4 - half_width for k in range(len(names))]
    ax.set_xticks(middles, names)
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("forward and backward (ms)")
    ax.margins(y=0.2)  # room for the text above the highest bar
    ax.legend()
    return ax


def throughput_over_batch(batches: Mapping[int, Comparison]) -> Figure:
    """Samples per second against the batch, in two precisions, and their ratio.

    `batches[batch]` compares the time of a step of so many samples in both.
    """
    figure, axes = style.columns(2, size=(8.5, 2.9))
    left, right = axes
    sizes = list(batches)
    comparisons = list(batches.values())
    first, second = comparisons[0].samples_s
    for precision, form in ((first, "-o"), (second, "--s")):
        rates: list[Estimate] = []
        for batch, times in batches.items():
            step_s = times.time_s(precision)
            rates.append(step_s.rate(batch))
        look: Look = {"color": COLOURS[precision], "label": precision}
        style.measured_line(left, sizes, rates, form, **look)
    left.set_yscale("log")
    style.label(left, "batch", "samples per second", legend="lower right")
    ratios = [times.ratio(first, second) for times in comparisons]
    style.measured_line(right, sizes, ratios, "-D", color="black")
    right.axhline(1, **_LEVEL)
    right.set_ylim(bottom=0)  # a small ratio shall look small
    y_label = f"speed-up of {second} over {first}"
    style.label(right, "batch", y_label)
    for ax in (left, right):
        style.log2_axis(ax, ticks=sizes)
    return figure


def growth(panels: Mapping[str, Growth]) -> Figure:
    """Speed-up and share of FP32's memory by AMP: `panels[what]` is (values, speed-ups, shares)."""
    size = (8.5, 4.4)
    columns = len(panels)
    alike = {
        "sharey": "row",
        "sharex": "col",
        "squeeze": False,
    }
    figure, axes = style.subplots(2, columns, size, **alike)
    upper_row, lower_row = axes
    of_speed: Look = {"color": COLOURS["bf16"], "linewidth": 2}
    of_memory: Look = {"color": COLOURS["fp32"], "linewidth": 2}
    for column, what, curves in style.by_panel(axes.T, panels):
        upper, lower = column
        values, speedups, shares = curves
        style.measured_line(upper, values, speedups, "-o", **of_speed)
        upper.axhline(1, **_LEVEL)
        lower.plot(values, shares, "--s", **of_memory)
        lower.axhline(0.5, **_LEVEL)
        style.log2_axis(lower, ticks=values)
        lower.set_xlabel(what)
    _limit_around(upper_row, level=1)
    _limit_around(lower_row, level=0.5)
    upper_row[0].set_ylabel("speed-up by AMP")
    lower_row[0].set_ylabel("memory, share of FP32")
    return figure


def _limit_around(row: Sequence[Axes], level: float) -> None:
    """Limit the y axis that a row of axes shares to its level and what is drawn."""
    ends: list[float] = []
    for ax in row:
        ends.extend(ax.dataLim.intervaly)
    below_level = 0.85 * level
    below_all = 0.95 * min(ends)
    bottom = min(below_level, below_all)
    top = 1.05 * max(ends)
    row[0].set_ylim(bottom, top)


def speedup_over_size(sizes: Sequence[int], speedups: Mapping[str, Sequence[Ratio]]) -> Axes:
    """Speed-ups against the image size; `speedups[label]` has a ratio for each size."""
    _, ax = style.subplots(size=(7.0, 3.2))
    ax.axhline(1, **_LEVEL)
    for (label, ratios), line_look in zip(speedups.items(), _LINE_LOOKS, strict=False):
        form, face = line_look
        precision = style.precision_of(label)
        look: Look = {
            "color": COLOURS[precision],
            "markerfacecolor": face,
            "linewidth": 2,
            "label": label,
        }
        style.measured_line(ax, sizes, ratios, form, **look)
    ax.set_xticks(sizes)
    x_label = "height and width of the images (pixels)"
    return style.label(ax, x_label, "speed-up", legend="lower right")


def flops_per_byte(panels: Mapping[str, Layers]) -> Figure:
    """FLOPs per byte of layers in their order: `panels[title]` is a list of (kind, value)."""
    size = (8.0, 3.4)
    columns = len(panels)
    figure, axes = style.subplots(1, columns, size, sharey=True)
    kinds: dict[str, None] = {}  # a set in order
    for layers in panels.values():
        kinds |= dict.fromkeys(kind for kind, _ in layers)
    for ax, title, layers in style.by_panel(axes, panels):
        for kind, (colour, marker) in zip(kinds, _KIND_LOOKS, strict=False):
            look: Look = {"color": colour, "marker": marker, **_LAYER_DOT}
            _dots_of_kind(ax, layers, kind, look)
        ax.set_yscale("log")
        ax.set_xlabel("layer, from input to output")
        powers = [1, 10, 100]
        names = [str(power) for power in powers]
        ax.set_yticks(powers, names)
        ax.set_title(title, fontsize=11)
        ax.grid(axis="y", color=style.GRID)
    axes[0].set_ylabel("FLOPs per byte, in fp32")
    style.legend_beside(figure, "outside lower center", ncols=4)
    return figure


def _dots_of_kind(ax: Axes, layers: Layers, kind: str, look: Look) -> None:
    places: list[int] = []
    intensities: list[float] = []
    for place, (kind_of_layer, intensity) in enumerate(layers):
        if kind_of_layer == kind:
            places.append(place)
            intensities.append(intensity)
    ax.plot(places, intensities, label=kind, **look)


def speed_ladder(panels: Mapping[str, Sequence[Bar]]) -> Figure:
    """Bars of time from the lowest rung to the highest, and a tick where the device's limit is.

    `panels[title]` has (precision, rung, milliseconds, those at the limit, text beside the bar).
    """
    heights = [len(bars) + 1.5 for bars in panels.values()]
    height = 0.26 * sum(heights) + 0.6
    size = (8.0, height)
    count = len(panels)
    figure, axes = style.rows(count, size, height_ratios=heights)
    has_limits = False
    for ax, title, bars in style.by_panel(axes, panels):
        names: list[str] = []
        for y, bar in enumerate(bars):
            precision, rung, milliseconds, limit, text = bar
            names.append(f"{precision} {rung}")
            _rung_bar(ax, y, precision, milliseconds, text)
            if limit is not None:
                has_limits = True
                _limit_tick(ax, y, limit)
        style.name_rows(ax, names, room=0.12)
        ax.set_xlim(left=0)  # margins would begin the bars left of 0
        ax.set_title(title, fontsize=10, loc="left")
    x_label = "time of a step (ms)"
    if has_limits:
        x_label += "; black: the limit of the device"
    lowest = axes[-1]
    lowest.set_xlabel(x_label)
    return figure


def _rung_bar(ax: Axes, y: int, precision: str, time: Estimate | None, text: str) -> None:
    """The bar of a rung; without a time, its text alone."""
    look = style.look_of(precision, height=0.75)
    if time is None:
        style.bar(ax, y, 0, text, **look)
        return
    style.measured_bar(ax, y, time, text, **look)


def _limit_tick(ax: Axes, y: int, limit: float) -> None:
    lower_end = y - 0.45
    upper_end = y + 0.45
    ax.plot([limit, limit], [lower_end, upper_end], **_TICK)


def roofline(roofs: Mapping[str, float], bytes_per_s: float, points: Sequence[Point]) -> Figure:
    """FLOP/s against FLOPs per byte, both logarithmic, below the roofs of each precision.

    `roofs` is {precision: FLOP/s}; `points` are (label, precision, FLOPs per byte, FLOP/s).
    """
    figure, ax = style.subplots(size=(8.0, 4.2))
    _roofs(ax, roofs, bytes_per_s, points)
    labels = dict.fromkeys(label for label, *_ in points)
    marker_of = dict(zip(labels, _POINT_MARKS, strict=False))
    for label, precision, intensity, achieved in points:
        marker = marker_of[label]
        look: Look = {
            "color": COLOURS[precision],
            "markersize": 8,
            "markeredgecolor": "black",
        }
        style.measured_line(ax, [intensity], [achieved], marker, **look)
    # The legend has them without a precision's colour.
    grey: Look = {"color": style.STRONG_GRID, "markeredgecolor": "black"}
    for label, marker in marker_of.items():
        ax.plot([], [], marker, label=label, **grey)
    ax.set_xscale("log")
    ax.set_yscale("log")
    style.label(ax, "FLOPs per byte moved", "FLOP/s")
    style.legend_beside(figure, "outside right upper", fontsize=9)
    return figure


def _roofs(
    ax: Axes, roofs: Mapping[str, float], bytes_per_s: float, points: Iterable[Point]
) -> None:
    """The limit of each precision, over a range that has all points."""
    intensities = [intensity for _, _, intensity, _ in points]
    lowest = min([1.0, *intensities])
    highest = max([100.0, *intensities])
    low = lowest / 2
    high = highest * 4
    for (precision, flops_per_s), dash in zip(roofs.items(), _ROOF_DASHES, strict=False):
        ridge = flops_per_s / bytes_per_s  # left of it, memory is the limit
        x = [low, ridge, high]
        lowest_rate = low * bytes_per_s
        y = [lowest_rate, flops_per_s, flops_per_s]
        colour = COLOURS[precision]
        label = f"limit in {precision}"
        ax.plot(x, y, dash, color=colour, label=label)


def best_speedups(machines: Mapping[str, Mapping[str, Ratio]]) -> Figure:
    """Bars of the best speed-up of each workload, side by side: `machines[name][workload]`."""
    workloads: dict[str, None] = {}  # a set in order
    for speedup_of in machines.values():
        workloads |= dict.fromkeys(speedup_of)
    names = list(workloads)
    count = len(machines)
    height = 0.3 * len(names) * count + 1.4
    figure, ax = style.subplots(size=(8.0, height))
    bar_height = 0.8 / count
    last = max(1, count - 1)
    for i, (machine, speedup_of) in enumerate(machines.items()):
        grey = 0.15 + 0.6 * i / last
        look: Look = {
            "color": str(grey),
            "height": bar_height,
            **style.EDGED,
        }
        offset = i * bar_height
        for name, speedup in speedup_of.items():
            y = names.index(name) + offset
            text = f"{speedup.median:.2f}x"
            style.measured_bar(ax, y, speedup, text, **look)
        ax.barh([0], [0], label=machine, **look)  # for the legend, whatever could be measured
    middle = 0.4 - bar_height / 2
    style.name_rows(ax, names, room=0.12, middle=middle)
    ax.set_xlabel("best speed-up over fp32 eager on the same device")
    style.legend_beside(figure, "outside lower center", ncols=2, fontsize=9)
    return figure


def passes(chains: Mapping[str, Sequence[str]]) -> Axes:
    """Each pass over the data as a chain of boxes.

    Those that begin with "read" or "write" stand for memory and are black, the others for what
    stays in the cache.
    """
    count = len(chains)
    height = 0.62 * count + 0.5
    _, ax = style.subplots(size=(8.5, height))
    for y, chain in enumerate(chains.values()):
        left = 0.0
        for text in chain:
            letters = len(text)
            width = 0.085 * letters + 0.3
            _box(ax, left, y, width, text)
            left += width + 0.12
    rows = range(count)
    names = list(chains)
    ax.set_yticks(rows, names)
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_frame_on(False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("what a pass does, from left to right")
    return ax


def _box(ax: Axes, left: float, y: int, width: float, text: str) -> None:
    face = "white"
    ink = "black"
    if text.startswith(("read", "write")):
        face = "black"
        ink = "white"
    box: Look = {
        "height": 0.6,
        "color": face,
        "edgecolor": "black",
    }
    ax.barh(y, width, left=left, **box)
    middle = left + width / 2
    ax.text(middle, y, text, fontsize=9, color=ink, **style.CENTRED)

"""Times, rates and speed-ups, and the limits of a device."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Look, Values

Rates = Mapping[str, Mapping[int, float]]


def time_and_memory(
    milliseconds: Mapping[str, float], mebibytes: Mapping[str, float], memory_label: str
) -> Figure:
    """Bars of time {precision: ms} and memory {precision: MiB}, with their ratio to the first."""
    figure, (left, right) = style.subplots(1, 2, size=(8.0, 3.0))
    _compared(left, milliseconds, lambda value, first: f"{first / value:.2f}x as fast")
    left.set_ylabel("time of a step (ms)")
    _compared(right, mebibytes, lambda value, first: f"{value / first:.0%}")
    right.set_ylabel(f"memory, {memory_label} (MiB)")
    return figure


def _compared(ax: Axes, values: Mapping[str, float], ratio: Callable[[float, float], str]) -> None:
    """A bar {precision: value} for each, with its value and its `ratio` to the first."""
    first = next(iter(values.values()))
    for name, value in values.items():
        text = f"{value:.3g}" if value == first else f"{value:.3g}\n{ratio(value, first)}"
        style.bars(ax, [name], [value], [text], **style.look_of(name, width=0.6))
    ax.margins(y=0.25)  # room for two lines above the highest bar


def time_by_kind(milliseconds: Mapping[str, Mapping[str, float]]) -> Axes:
    """Bars `milliseconds[precision][kind]`, with their speed-up over the first precision."""
    _, ax = style.subplots(size=(7.0, 3.2))
    first = next(iter(milliseconds.values()))
    width = 0.8 / len(milliseconds)
    for i, (precision, times) in enumerate(milliseconds.items()):
        at = [k + i * width for k in range(len(times))]
        texts = [f"{first[kind] / value:.2f}x" for kind, value in times.items()] if i else []
        look = style.look_of(precision, width=width, label=precision)
        style.bars(ax, at, list(times.values()), texts, **look)
    ax.set_xticks([k + 0.4 - width / 2 for k in range(len(first))], list(first))
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("forward and backward (ms)")
    ax.margins(y=0.15)  # room for the text above the highest bar
    ax.legend()
    return ax


def throughput_over_batch(rates: Rates) -> Figure:
    """Samples per second against the batch, `rates[precision][batch]`, and their ratio."""
    figure, (left, right) = style.subplots(1, 2, size=(8.5, 2.9))
    style.lines(left, rates, markers="os")
    left.set_yscale("log")
    style.label(left, "batch", "samples per second", legend="lower right")
    (first, baseline), (second, other) = rates.items()
    ratios = [rate / baseline[batch] for batch, rate in other.items()]
    right.plot(list(baseline), ratios, "-D", color="black")
    right.axhline(1, color="black", linewidth=1)
    right.set_ylim(bottom=0)  # a small ratio shall look small
    style.label(right, "batch", f"speed-up of {second} over {first}")
    for ax in (left, right):
        style.log2_axis(ax, ticks=list(baseline))
    return figure


def growth(panels: Mapping[str, tuple[Sequence[int], Values, Values]]) -> Figure:
    """Speed-up and share of FP32's memory by AMP: `panels[what]` is (values, speed-ups, shares)."""
    figure, axes = style.subplots(2, len(panels), size=(8.5, 4.4), sharey="row", sharex="col")
    for (upper, lower), (what, curves) in zip(axes.T, panels.items(), strict=True):
        values, speedups, shares = curves
        upper.plot(values, speedups, "-o", color=COLOURS["bf16"], linewidth=2)
        lower.plot(values, shares, "--s", color=COLOURS["fp32"], linewidth=2)
        for ax, level in ((upper, 1), (lower, 0.5)):
            ax.axhline(level, color="black", linewidth=1)
        style.log2_axis(lower, ticks=values)
        lower.set_xlabel(what)
    for row in axes:
        highest = max(ax.dataLim.ymax for ax in row)
        row[0].set_ylim(0, 1.1 * highest)  # the others of the row share it
    axes[0, 0].set_ylabel("speed-up by AMP")
    axes[1, 0].set_ylabel("memory, share of FP32")
    return figure


def speedup_over_size(sizes: Sequence[int], speedups: Mapping[str, Values]) -> Axes:
    """Speed-up over fp32 against the image size; `speedups[label]` has a value for each size."""
    _, ax = style.subplots(size=(7.0, 3.2))
    ax.axhline(1, color="black", linewidth=1)
    curves = {label: dict(zip(sizes, values, strict=True)) for label, values in speedups.items()}
    style.lines(ax, curves, markers="os", linewidth=2)
    ax.lines[-1].set_markerfacecolor("white")  # both may be of one precision, and one colour
    ax.set_xticks(sizes)
    ax.set_ylim(bottom=0)  # a small speed-up shall look small
    x_label = "height and width of the images (pixels)"
    return style.label(ax, x_label, "speed-up over fp32", legend="lower right")


def rate_over_size(panels: Mapping[str, Rates], multiple: int) -> Figure:
    """`panels[what][precision][size]` is a rate; drawn over its line's median, multiples marked."""
    figure, axes = style.subplots(1, len(panels), size=(8.5, 2.9), sharey=True)
    for ax, (what, rates) in zip(axes, panels.items(), strict=True):
        curves = {}
        for precision, found in rates.items():
            median = sorted(found.values())[len(found) // 2]  # an outlier does not move it
            curves[precision] = {size: rate / median for size, rate in found.items()}
        style.lines(ax, curves, markers="oo", markersize=4)
        ax.set_xticks([size for size in found if size % multiple == 0])
        ax.grid(axis="x", color=style.STRONG_GRID)
        ax.set_xlabel(what)
    axes[0].set_ylabel("rate / median rate")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(loc="lower left")
    return figure


def flops_per_byte(panels: Mapping[str, Sequence[tuple[str, float]]]) -> Figure:
    """FLOPs per byte of layers in their order: `panels[title]` is a list of (kind, value)."""
    figure, axes = style.subplots(1, len(panels), size=(8.0, 3.4), sharey=True)
    kinds = dict.fromkeys(kind for layers in panels.values() for kind, _ in layers)  # in order
    looks = [("black", "*"), (style.PATH, "^"), (COLOURS["bf16"], "o"), ("black", "v")]
    for ax, (title, layers) in zip(axes, panels.items(), strict=True):
        for kind, (colour, marker) in zip(kinds, looks, strict=False):
            at = [i for i, (found, _) in enumerate(layers) if found == kind]
            values = [layers[i][1] for i in at]
            look: Look = {"color": colour, "markeredgecolor": "black", "markeredgewidth": 0.6}
            ax.plot(at, values, marker, markersize=7, label=kind, **look)
        ax.set(yscale="log", xlabel="layer, from input to output")
        ax.set_yticks([1, 10, 100], ["1", "10", "100"])
        ax.set_title(title, fontsize=11)
        ax.grid(axis="y", color=style.GRID)
    axes[0].set_ylabel("FLOPs per byte, in fp32")
    style.legend_beside(figure, "outside lower center", ncols=4)
    return figure


def speed_ladder(
    panels: Mapping[str, Sequence[tuple[str, str, float | None, float | None, str]]],
) -> Figure:
    """Bars of time from the lowest rung to the highest, and a tick where the device's limit is.

    `panels[title]` has (precision, rung, milliseconds, those at the limit, text beside the bar).
    """
    heights = [len(rows) + 1.5 for rows in panels.values()]
    size = (8.0, 0.26 * sum(heights) + 0.6)
    figure, axes = style.subplots(len(panels), size=size, height_ratios=heights, squeeze=False)
    for ax, (title, rows) in zip(axes[:, 0], panels.items(), strict=True):
        for y, (precision, _, milliseconds, limit, text) in enumerate(rows):
            look = style.look_of(precision, height=0.75)
            style.bars(ax, [y], [milliseconds or 0], [text], **look)
            if limit is not None:
                ax.plot([limit, limit], [y - 0.45, y + 0.45], color="black", linewidth=2)
        style.name_rows(ax, [f"{precision} {rung}" for precision, rung, *_ in rows], room=0.12)
        ax.set_xlim(left=0)  # margins would begin the bars left of 0
        ax.set_title(title, fontsize=10, loc="left")
    axes[-1, 0].set_xlabel("time of a step (ms); black: the limit of the device")
    return figure


def roofline(
    roofs: Mapping[str, float], bytes_per_s: float, points: Sequence[tuple[str, str, float, float]]
) -> Figure:
    """FLOP/s against FLOPs per byte, both logarithmic, below the roofs of each precision.

    `roofs` is {precision: FLOP/s}; `points` are (label, precision, FLOPs per byte, FLOP/s).
    """
    figure, ax = style.subplots(size=(8.0, 4.2))
    intensities = [x for _, _, x, _ in points]
    low, high = min([1.0, *intensities]) / 2, max([100.0, *intensities]) * 4
    for (precision, flops_per_s), dash in zip(roofs.items(), ["-", "--", ":", "-."], strict=False):
        x = [low, flops_per_s / bytes_per_s, high]
        y = [low * bytes_per_s, flops_per_s, flops_per_s]  # left of the ridge, memory is the limit
        ax.plot(x, y, dash, color=COLOURS[precision], label=f"limit in {precision}")
    markers = dict(zip(dict.fromkeys(label for label, *_ in points), "osD^vP*X", strict=False))
    for label, precision, intensity, achieved in points:
        look: Look = {"color": COLOURS[precision], "markeredgecolor": "black", "markersize": 8}
        ax.plot(intensity, achieved, markers[label], **look)
    for label, marker in markers.items():  # the legend has them without a precision's colour
        ax.plot([], [], marker, color=style.STRONG_GRID, markeredgecolor="black", label=label)
    ax.set(xscale="log", yscale="log")
    style.label(ax, "FLOPs per byte moved", "FLOP/s")
    style.legend_beside(figure, "outside right upper", fontsize=9)
    return figure


def best_speedups(machines: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bars of the best speed-up of each workload, side by side: `machines[name][workload]`."""
    names = list(dict.fromkeys(title for found in machines.values() for title in found))
    figure, ax = style.subplots(size=(8.0, 0.3 * len(names) * len(machines) + 1.4))
    width = 0.8 / len(machines)
    for i, (machine, found) in enumerate(machines.items()):
        grey = str(0.15 + 0.6 * i / max(1, len(machines) - 1))
        at = [names.index(title) + i * width for title in found]
        texts = [f"{value:.2f}x" for value in found.values()]
        look = {"color": grey, "edgecolor": "white", "label": machine, "height": width}
        style.bars(ax, at, list(found.values()), texts, **look)
    style.name_rows(ax, names, room=0.12, middle=0.4 - width / 2)
    ax.set_xlabel("best speed-up over fp32 eager on the same device")
    style.legend_beside(figure, "outside lower center", ncols=2, fontsize=9)
    return figure

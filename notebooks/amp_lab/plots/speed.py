"""Times, rates and speed-ups, and the limits of a device."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Look, Values
from amp_lab.timing import Comparison, Estimate, Ratio


def time_and_memory(
    times: Comparison,
    mebibytes: Mapping[str, float],
    memory_label: str,
    losses: Mapping[str, Values] | None = None,
) -> Figure:
    """Bars of time and of memory {precision: MiB}, with their ratio to the first precision.

    The names of the comparison are precisions. Losses of each step are drawn beside them, if given.
    """
    panels = 3 if losses else 2
    figure, (left, right, *rest) = style.subplots(1, panels, size=(4.0 * panels, 3.2))
    first, *_ = times.samples_s
    for name in times.samples_s:
        milliseconds = times.time_s(name).times(1e3)
        text = f"{milliseconds.median:.3g}"
        if name != first:
            speedup = times.ratio(first, name)
            low, high = speedup.interval
            text += f"\n{speedup.median:.2f}x as fast\n({low:.2f}x to {high:.2f}x)"
        style.measured_bar(left, name, milliseconds, text, **style.look_of(name, width=0.6))
    left.set_ylabel("time of a step (ms)")
    first_value = next(iter(mebibytes.values()))
    for name, value in mebibytes.items():
        text = f"{value:.3g}"
        if value != first_value:
            text += f"\n{value / first_value:.0%}"
        style.bar(right, name, value, text, **style.look_of(name, width=0.6))
    right.set_ylabel(f"memory, {memory_label} (MiB)")
    left.margins(y=0.4)  # room for three lines above the highest bar
    right.margins(y=0.25)
    for ax in rest:
        style.lines(ax, losses or {}, first=1, linewidth=2)
        style.label(ax, "step", "loss", legend="best").set_ylim(bottom=0)
    return figure


def time_by_kind(kinds: Mapping[str, Comparison]) -> Axes:
    """Bars of time, `kinds[kind]` over precisions, with the speed-up over the first precision."""
    _, ax = style.subplots(size=(7.0, 3.2))
    first, *others = next(iter(kinds.values())).samples_s
    width = 0.8 / (1 + len(others))
    for i, precision in enumerate([first, *others]):
        look = style.look_of(precision, width=width)
        for k, times in enumerate(kinds.values()):
            milliseconds = times.time_s(precision).times(1e3)
            text = ""
            has_room = i == 1 or times.trusted  # not to say twice that it was busy
            if i and has_room:
                text = f"{times.ratio(first, precision).median:.2f}x"
            style.measured_bar(ax, k + i * width, milliseconds, text, **look)
        ax.bar([0], [0], label=precision, **look)  # for the legend, whatever could be measured
    middles = [k + 0.4 - width / 2 for k in range(len(kinds))]
    ax.set_xticks(middles, list(kinds))
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("forward and backward (ms)")
    ax.margins(y=0.2)  # room for the text above the highest bar
    ax.legend()
    return ax


def throughput_over_batch(batches: Mapping[int, Comparison]) -> Figure:
    """Samples per second against the batch, in two precisions, and their ratio.

    `batches[batch]` compares the time of a step of so many samples in both.
    """
    figure, (left, right) = style.subplots(1, 2, size=(8.5, 2.9))
    first, second = next(iter(batches.values())).samples_s
    for precision, form in ((first, "-o"), (second, "--s")):
        rates = [times.time_s(precision).rate(batch) for batch, times in batches.items()]
        look: Look = {"color": COLOURS[precision], "label": precision}
        style.measured_line(left, list(batches), rates, form, **look)
    left.set_yscale("log")
    style.label(left, "batch", "samples per second", legend="lower right")
    ratios = [times.ratio(first, second) for times in batches.values()]
    style.measured_line(right, list(batches), ratios, "-D", color="black")
    right.axhline(1, color="black", linewidth=1)
    right.set_ylim(bottom=0)  # a small ratio shall look small
    style.label(right, "batch", f"speed-up of {second} over {first}")
    for ax in (left, right):
        style.log2_axis(ax, ticks=list(batches))
    return figure


def growth(panels: Mapping[str, tuple[Sequence[int], Sequence[Ratio], Values]]) -> Figure:
    """Speed-up and share of FP32's memory by AMP: `panels[what]` is (values, speed-ups, shares)."""
    alike = {"sharey": "row", "sharex": "col", "squeeze": False}
    figure, axes = style.subplots(2, len(panels), size=(8.5, 4.4), **alike)
    for (upper, lower), (what, curves) in zip(axes.T, panels.items(), strict=True):
        values, speedups, shares = curves
        style.measured_line(upper, values, speedups, "-o", color=COLOURS["bf16"], linewidth=2)
        lower.plot(values, shares, "--s", color=COLOURS["fp32"], linewidth=2)
        for ax, level in ((upper, 1), (lower, 0.5)):
            ax.axhline(level, color="black", linewidth=1)
        style.log2_axis(lower, ticks=values)
        lower.set_xlabel(what)
    for row, level in zip(axes, (1, 0.5), strict=True):  # each row around its level
        ends: list[float] = []
        for ax in row:
            ends.extend(ax.dataLim.intervaly)
        bottom = min(0.85 * level, 0.95 * min(ends))
        row[0].set_ylim(bottom, 1.05 * max(ends))  # a row's axes share it
    axes[0, 0].set_ylabel("speed-up by AMP")
    axes[1, 0].set_ylabel("memory, share of FP32")
    return figure


def speedup_over_size(sizes: Sequence[int], speedups: Mapping[str, Sequence[Ratio]]) -> Axes:
    """Speed-ups against the image size; `speedups[label]` has a ratio for each size."""
    _, ax = style.subplots(size=(7.0, 3.2))
    ax.axhline(1, color="black", linewidth=1)
    # Both lines may be of one precision, and one colour: their dash and their fill differ.
    looks = (("-o", None), ("--s", "white"))
    for (label, ratios), (form, face) in zip(speedups.items(), looks, strict=False):
        look: Look = {"color": COLOURS[style.precision_of(label)], "markerfacecolor": face}
        style.measured_line(ax, sizes, ratios, form, linewidth=2, label=label, **look)
    ax.set_xticks(sizes)
    x_label = "height and width of the images (pixels)"
    return style.label(ax, x_label, "speed-up", legend="lower right")


def flops_per_byte(panels: Mapping[str, Sequence[tuple[str, float]]]) -> Figure:
    """FLOPs per byte of layers in their order: `panels[title]` is a list of (kind, value)."""
    figure, axes = style.subplots(1, len(panels), size=(8.0, 3.4), sharey=True)
    kinds: dict[str, None] = {}  # a set in order
    for layers in panels.values():
        kinds |= dict.fromkeys(kind for kind, _ in layers)
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
    panels: Mapping[str, Sequence[tuple[str, str, Estimate | None, float | None, str]]],
) -> Figure:
    """Bars of time from the lowest rung to the highest, and a tick where the device's limit is.

    `panels[title]` has (precision, rung, milliseconds, those at the limit, text beside the bar).
    """
    heights = [len(rows) + 1.5 for rows in panels.values()]
    size = (8.0, 0.26 * sum(heights) + 0.6)
    figure, axes = style.subplots(len(panels), size=size, height_ratios=heights, squeeze=False)
    has_limits = False
    for ax, (title, rows) in zip(axes[:, 0], panels.items(), strict=True):
        for y, (precision, _, milliseconds, limit, text) in enumerate(rows):
            look = style.look_of(precision, height=0.75)
            if milliseconds is None:
                style.bar(ax, y, 0, text, **look)
            else:
                style.measured_bar(ax, y, milliseconds, text, **look)
            if limit is not None:
                has_limits = True
                ax.plot([limit, limit], [y - 0.45, y + 0.45], color="black", linewidth=2)
        style.name_rows(ax, [f"{precision} {rung}" for precision, rung, *_ in rows], room=0.12)
        ax.set_xlim(left=0)  # margins would begin the bars left of 0
        ax.set_title(title, fontsize=10, loc="left")
    x_label = "time of a step (ms)"
    if has_limits:
        x_label += "; black: the limit of the device"
    axes[-1, 0].set_xlabel(x_label)
    return figure


def roofline(
    roofs: Mapping[str, float],
    bytes_per_s: float,
    points: Sequence[tuple[str, str, float, Estimate]],
) -> Figure:
    """FLOP/s against FLOPs per byte, both logarithmic, below the roofs of each precision.

    `roofs` is {precision: FLOP/s}; `points` are (label, precision, FLOPs per byte, FLOP/s).
    """
    figure, ax = style.subplots(size=(8.0, 4.2))
    intensities = [x for _, _, x, _ in points]
    low = min([1.0, *intensities]) / 2
    high = max([100.0, *intensities]) * 4
    for (precision, flops_per_s), dash in zip(roofs.items(), ["-", "--", ":", "-."], strict=False):
        x = [low, flops_per_s / bytes_per_s, high]
        y = [low * bytes_per_s, flops_per_s, flops_per_s]  # left of the ridge, memory is the limit
        ax.plot(x, y, dash, color=COLOURS[precision], label=f"limit in {precision}")
    labels = dict.fromkeys(label for label, *_ in points)
    markers = dict(zip(labels, "osD^vP*X", strict=False))
    for label, precision, intensity, achieved in points:
        look: Look = {"color": COLOURS[precision], "markeredgecolor": "black", "markersize": 8}
        style.measured_line(ax, [intensity], [achieved], markers[label], **look)
    for label, marker in markers.items():  # the legend has them without a precision's colour
        ax.plot([], [], marker, color=style.STRONG_GRID, markeredgecolor="black", label=label)
    ax.set(xscale="log", yscale="log")
    style.label(ax, "FLOPs per byte moved", "FLOP/s")
    style.legend_beside(figure, "outside right upper", fontsize=9)
    return figure


def best_speedups(machines: Mapping[str, Mapping[str, Ratio]]) -> Figure:
    """Bars of the best speed-up of each workload, side by side: `machines[name][workload]`."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(machines.values())))
    figure, ax = style.subplots(size=(8.0, 0.3 * len(names) * len(machines) + 1.4))
    width = 0.8 / len(machines)
    for i, (machine, found) in enumerate(machines.items()):
        grey = str(0.15 + 0.6 * i / max(1, len(machines) - 1))
        look: Look = {"color": grey, "edgecolor": "white", "height": width}
        for title, speedup in found.items():
            text = f"{speedup.median:.2f}x"
            style.measured_bar(ax, names.index(title) + i * width, speedup, text, **look)
        ax.barh([0], [0], label=machine, **look)  # for the legend, whatever could be measured
    style.name_rows(ax, names, room=0.12, middle=0.4 - width / 2)
    ax.set_xlabel("best speed-up over fp32 eager on the same device")
    style.legend_beside(figure, "outside lower center", ncols=2, fontsize=9)
    return figure


def passes(chains: Mapping[str, Sequence[str]]) -> Axes:
    """Each pass over the data as a chain of boxes.

    Those that begin with "read" or "write" stand for memory and are black, the others for what
    stays in the cache.
    """
    _, ax = style.subplots(size=(8.5, 0.62 * len(chains) + 0.5))
    for y, chain in enumerate(chains.values()):
        left = 0.0
        for text in chain:
            width = 0.085 * len(text) + 0.3
            face = "white"
            ink = "black"
            if text.startswith(("read", "write")):
                face = "black"
                ink = "white"
            ax.barh(y, width, left=left, height=0.6, color=face, edgecolor="black")
            ax.text(left + width / 2, y, text, ha="center", va="center", fontsize=9, color=ink)
            left += width + 0.12
    ax.set_yticks(range(len(chains)), list(chains))
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_frame_on(False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("what a pass does, from left to right")
    return ax

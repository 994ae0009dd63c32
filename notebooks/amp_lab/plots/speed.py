"""Times, rates and speed-ups, and the limits of a device."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from amp_lab.plots.style import COLOURS, HATCHES, use_style


def time_and_memory(milliseconds, mebibytes, memory_label) -> plt.Figure:
    """Bars of time {precision: ms} and memory {precision: MiB}, with their ratio to the first."""
    figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.0))
    for ax, values, label, ratio in (
        (
            axes[0],
            milliseconds,
            "time of a step (ms)",
            lambda value, first: f"{first / value:.2f}x as fast",
        ),
        (
            axes[1],
            mebibytes,
            f"memory, {memory_label} (MiB)",
            lambda value, first: f"{value / first:.0%}",
        ),
    ):
        first = next(iter(values.values()))
        for name, value in values.items():
            ax.bar(
                name, value, color=COLOURS[name], hatch=HATCHES[name], edgecolor="white", width=0.6
            )
            text = f"{value:.3g}" if value == first else f"{value:.3g}\n{ratio(value, first)}"
            ax.annotate(
                text,
                (name, value),
                ha="center",
                va="bottom",
                xytext=(0, 3),
                textcoords="offset points",
            )
        ax.set_ylabel(label)
        ax.margins(y=0.25)
    return figure


def time_by_kind(milliseconds) -> plt.Axes:
    """Bars `milliseconds[precision][kind]`, with their speed-up over the first precision."""
    _, ax = plt.subplots(figsize=(7.0, 3.2))
    first = next(iter(milliseconds.values()))
    width = 0.8 / len(milliseconds)
    for i, (precision, times) in enumerate(milliseconds.items()):
        at = [k + i * width for k in range(len(times))]
        ax.bar(
            at,
            list(times.values()),
            width,
            color=COLOURS[precision],
            hatch=HATCHES[precision],
            edgecolor="white",
            label=precision,
        )
        if i == 0:
            continue
        for x, (kind, value) in zip(at, times.items(), strict=True):
            text = f"{first[kind] / value:.2f}x"
            ax.annotate(text, (x, value), ha="center", xytext=(0, 3), textcoords="offset points")
    ax.set_xticks([k + 0.4 - width / 2 for k in range(len(first))], list(first))
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("forward and backward (ms)")
    ax.margins(y=0.15)
    ax.legend()
    return ax


def throughput_over_batch(rates) -> plt.Figure:
    """Samples per second against the batch, `rates[precision][batch]`, and their ratio."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 2.9))
    (first, base), (second, other) = rates.items()
    for precision, found, line in ((first, base, "-o"), (second, other, "--s")):
        left.plot(
            found.keys(), found.values(), line, color=COLOURS[precision], label=str(precision)
        )
    left.set_yscale("log")
    left.set_ylabel("samples per second")
    left.legend(loc="lower right")
    ratios = [rate / base[batch] for batch, rate in other.items()]
    right.plot(base.keys(), ratios, "-D", color="black")
    right.axhline(1, color="black", linewidth=1)
    right.set_ylim(bottom=0)
    right.set_ylabel(f"speed-up of {second} over {first}")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(base), [str(batch) for batch in base])
        ax.minorticks_off()
        ax.set_xlabel("batch")
    return figure


def growth(panels) -> plt.Figure:
    """Speed-up by AMP and its share of FP32's memory while something grows.

    `panels[what]` is (values, speed-ups, shares), each with one entry for each value.
    """
    figure, axes = plt.subplots(2, len(panels), figsize=(8.5, 4.4), sharey="row", sharex="col")
    for (upper, lower), (what, (values, speedups, shares)) in zip(
        axes.T, panels.items(), strict=True
    ):
        upper.plot(values, speedups, "-o", color=COLOURS["bf16"], linewidth=2)
        lower.plot(values, shares, "--s", color=COLOURS["fp32"], linewidth=2)
        for ax, level in ((upper, 1), (lower, 0.5)):
            ax.axhline(level, color="black", linewidth=1)
        lower.set_xscale("log", base=2)
        lower.set_xticks(values, [str(value) for value in values])
        lower.minorticks_off()
        lower.set_xlabel(what)
    for row in axes:
        highest = max(ax.dataLim.ymax for ax in row)
        row[0].set_ylim(0, 1.1 * highest)  # the others of the row share it
    axes[0, 0].set_ylabel("speed-up by AMP")
    axes[1, 0].set_ylabel("memory, share of FP32")
    return figure


def speedup_over_size(sizes, speedups) -> plt.Axes:
    """Speed-up over fp32 against the image size; `speedups[label]` has a value for each size.

    The first word of a label is a key of `COLOURS`.
    """
    _, ax = plt.subplots(figsize=(7.0, 3.2))
    ax.axhline(1, color="black", linewidth=1)
    for (label, values), line in zip(speedups.items(), ["-o", "--s"], strict=True):
        colour, face = COLOURS[label.split()[0]], None if line == "-o" else "white"
        ax.plot(sizes, values, line, color=colour, markerfacecolor=face, linewidth=2, label=label)
    ax.set_xticks(sizes)
    ax.set_xlabel("height and width of the images (pixels)")
    ax.set_ylabel("speed-up over fp32")
    ax.set_ylim(bottom=0)
    ax.legend(loc="lower right")
    return ax


def rate_over_size(panels, multiple) -> plt.Figure:
    """Rates against a size near a multiple of 8, each divided by the median of its line.

    `panels[what]` maps a precision to {size: rate}. Grid lines stand at multiples of `multiple`.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(8.5, 2.9), sharey=True)
    for ax, (what, rates) in zip(axes, panels.items(), strict=True):
        for (precision, found), line in zip(rates.items(), ["-", "--"], strict=True):
            values = sorted(found.values())
            middle = values[len(values) // 2]
            ax.plot(
                found.keys(),
                [rate / middle for rate in found.values()],
                line,
                marker="o",
                markersize=4,
                color=COLOURS[precision],
                label=precision,
            )
        ax.set_xticks([size for size in found if size % multiple == 0])
        ax.grid(axis="x", color="0.7")
        ax.set_xlabel(what)
    axes[0].set_ylabel("rate / median rate")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(loc="lower left")
    return figure


def flops_per_byte(panels) -> plt.Figure:
    """FLOPs per byte of layers in their order: `panels[title]` is a list of (kind, value)."""
    figure, axes = plt.subplots(1, len(panels), figsize=(8.0, 3.4), sharey=True)
    kinds = list(dict.fromkeys(kind for layers in panels.values() for kind, _ in layers))
    looks = dict(
        zip(kinds, [("k", "*"), ("0.6", "^"), (COLOURS["bf16"], "o"), ("k", "v")], strict=False)
    )
    for ax, (title, layers) in zip(axes, panels.items(), strict=True):
        for kind, (colour, marker) in looks.items():
            at = [i for i, (found, _) in enumerate(layers) if found == kind]
            values = [layers[i][1] for i in at]
            ax.plot(
                at,
                values,
                marker,
                color=colour,
                markeredgecolor="black",
                markeredgewidth=0.6,
                markersize=7,
                label=kind,
            )
        ax.set_yscale("log")
        ax.set_yticks([1, 10, 100], ["1", "10", "100"])
        ax.set_title(title, fontsize=11)
        ax.set_xlabel("layer, from input to output")
        ax.grid(axis="y", color="0.9")
    axes[0].set_ylabel("FLOPs per byte, in fp32")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def speed_ladder(panels, figure=None) -> Figure:
    """Bars of time from the lowest rung to the highest, and a tick where the device's limit is.

    `panels[title]` is a list of (precision, rung, milliseconds, milliseconds at the limit or None,
    text beside the bar); without milliseconds there is the text alone. `figure` is one to draw in,
    in place of pyplot's next.
    """
    use_style()
    figure = figure or plt.figure()
    heights = [len(bars) + 1.5 for bars in panels.values()]
    figure.set_size_inches(8.0, 0.26 * sum(heights) + 0.6)
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, (title, bars) in zip(axes, panels.items(), strict=True):
        for y, (precision, _, milliseconds, limit, text) in enumerate(bars):
            ax.barh(
                y,
                milliseconds or 0,
                0.75,
                color=COLOURS[precision],
                hatch=HATCHES[precision],
                edgecolor="white",
            )
            if limit is not None:
                ax.plot([limit, limit], [y - 0.45, y + 0.45], color="black", linewidth=2)
            ax.annotate(f" {text}", (milliseconds or 0, y), va="center", fontsize=9)
        names = [f"{precision} {rung}" for precision, rung, *_ in bars]
        ax.set_yticks(range(len(bars)), names, fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_xlim(left=0)
        ax.set_title(title, fontsize=10, loc="left")
    axes[-1].set_xlabel("time of a step (ms); black: the limit of the device")
    return figure


def roofline(roofs, bytes_per_s, points, figure=None) -> Figure:
    """FLOP/s against FLOPs per byte, both logarithmic, below the roofs of each precision.

    `roofs` is {precision: FLOP/s}; `points` are (label, precision, FLOPs per byte, FLOP/s).
    `figure` is one to draw in, in place of pyplot's next.
    """
    use_style()
    figure = figure or plt.figure()
    figure.set_size_inches(8.0, 4.2)
    ax = figure.subplots()
    intensities = [x for _, _, x, _ in points]
    low, high = min([1.0, *intensities]) / 2, max([100.0, *intensities]) * 4
    lines = ["-", "--", ":", "-."]
    for (precision, flops_per_s), line in zip(roofs.items(), lines, strict=False):
        ridge = flops_per_s / bytes_per_s
        ax.plot(
            [low, ridge, high],
            [low * bytes_per_s, flops_per_s, flops_per_s],
            line,
            color=COLOURS[precision],
            label=f"limit in {precision}",
        )
    markers = dict(zip(dict.fromkeys(label for label, *_ in points), "osD^vP*X", strict=False))
    for label, precision, intensity, achieved in points:
        ax.plot(
            intensity,
            achieved,
            markers[label],
            color=COLOURS[precision],
            markeredgecolor="black",
            markersize=8,
        )
    for label, marker in markers.items():
        ax.plot([], [], marker, color="0.7", markeredgecolor="black", label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOPs per byte moved")
    ax.set_ylabel("FLOP/s")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def best_speedups(machines, figure=None) -> Figure:
    """Bars of the best speed-up of each workload, side by side: `machines[name][workload]`.

    `figure` is one to draw in, in place of pyplot's next.
    """
    use_style()
    figure = figure or plt.figure()
    names = list(dict.fromkeys(title for found in machines.values() for title in found))
    figure.set_size_inches(8.0, 0.3 * len(names) * len(machines) + 1.4)
    ax = figure.subplots()
    height = 0.8 / len(machines)
    greys = [str(0.15 + 0.6 * i / max(1, len(machines) - 1)) for i in range(len(machines))]
    for i, ((machine, found), grey) in enumerate(zip(machines.items(), greys, strict=True)):
        at = [names.index(title) + i * height for title in found]
        ax.barh(at, list(found.values()), height, color=grey, edgecolor="white", label=machine)
        for y, value in zip(at, found.values(), strict=True):
            ax.annotate(f" {value:.2f}x", (value, y), va="center", fontsize=9)
    middle = 0.4 - height / 2
    ax.set_yticks([k + middle for k in range(len(names))], names, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel("best speed-up over fp32 eager on the same device")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure

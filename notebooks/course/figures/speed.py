"""Times, rates and speed-ups, and the limits of a device."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.core.estimates import Ratio
from amp_lab.core.timing_result import Comparison
from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Options, Values

_LEVEL: Options = {"color": "black", "linewidth": 1}  # a reference line
# (format, marker fill) of two lines, which may have the same colour.
_LINE_OPTIONS = (("-o", None), ("--s", "white"))


def time_and_memory(
    times: Comparison,
    mebibytes: Mapping[str, float],
    memory_label: str,
    losses: Mapping[str, Values] | None = None,
) -> Figure:
    """Bars of time and of memory {precision: MiB}, with their ratio to the first precision.

    The names of the comparison are precisions. A third panel shows `losses`, {precision: loss of
    each step}, if they are given.
    """
    panels = 2
    if losses:
        panels = 3
    width = 4.0 * panels
    figure, axes = style.columns(panels, size=(width, 3.2))
    left, right, *rest = axes  # `rest` is the panel of losses, if there is one
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
    """Draw a bar for each precision: milliseconds, and the speed-up over the first precision."""
    first, *_ = times.samples_s  # the precision to compare with
    for name in times.samples_s:
        seconds = times.time_s(name)
        milliseconds = seconds.times(1e3)
        text = f"{milliseconds.median:.3g}"
        if name != first:
            speedup = times.ratio(first, name)
            low, high = speedup.interval
            text += f"\n{speedup.median:.2f}x as fast"
            text += f"\n({low:.2f}x to {high:.2f}x)"
        options = style.precision_options(name, width=0.6)
        style.measured_bar(ax, name, milliseconds, text, **options)


def _memory_bars(ax: Axes, mebibytes: Mapping[str, float]) -> None:
    """Draw a bar for each precision: MiB, and the share of the first precision's memory."""
    first, *_ = mebibytes.values()
    for name, value in mebibytes.items():
        text = f"{value:.3g}"
        if value != first:
            share = value / first
            text += f"\n{share:.0%}"
        options = style.precision_options(name, width=0.6)
        style.bar(ax, name, value, text, **options)


def time_by_kind(kinds: Mapping[str, Comparison]) -> Axes:
    """Bars of time, `kinds[kind]` over precisions, with the speed-up over the first precision."""
    _, ax = style.subplots(size=(7.0, 3.2))
    comparisons = list(kinds.values())
    precisions = list(comparisons[0].samples_s)
    first = precisions[0]
    width = 0.8 / len(precisions)  # the bars of a kind fill 0.8 of its place on the axis
    for i, precision in enumerate(precisions):
        options = style.precision_options(precision, width=width)
        offset = i * width
        for k, times in enumerate(comparisons):
            seconds = times.time_s(precision)
            milliseconds = seconds.times(1e3)
            text = ""
            is_first = i == 0
            is_repeated = i > 1 and not times.trusted  # "not reliable", said once is enough
            if not is_first and not is_repeated:
                speedup = times.ratio(first, precision)
                text = f"{speedup.median:.2f}x"
            style.measured_bar(ax, k + offset, milliseconds, text, **options)
        ax.bar([0], [0], label=precision, **options)  # for the legend, even without any value
    names = list(kinds)
    half_width = width / 2
    middles = [k + 0.4 - half_width for k in range(len(names))]  # of the bars of each kind
    ax.set_xticks(middles, names)
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("forward and backward (ms)")
    ax.margins(y=0.2)  # room for the text above the highest bar
    ax.legend()
    return ax


def speedup_over_size(sizes: Sequence[int], speedups: Mapping[str, Sequence[Ratio]]) -> Axes:
    """Speed-ups against the image size; `speedups[label]` has a ratio for each size."""
    _, ax = style.subplots(size=(7.0, 3.2))
    ax.axhline(1, **_LEVEL)
    for (label, ratios), line in zip(speedups.items(), _LINE_OPTIONS, strict=False):
        form, marker_fill = line
        precision = style.precision_of(label)
        options: Options = {
            "color": COLOURS[precision],
            "markerfacecolor": marker_fill,
            "linewidth": 2,
            "label": label,
        }
        style.measured_line(ax, sizes, ratios, form, **options)
    ax.set_xticks(sizes)
    x_label = "height and width of the images (pixels)"
    return style.label(ax, x_label, "speed-up", legend="lower right")

"""Times, rates and speed-ups, and the limits of a device."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.core.estimates import Estimate, Ratio
from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Options

_TICK: Options = {"color": "black", "linewidth": 2}  # marks the device's limit on a bar
_ROOF_DASHES = ["-", "--", ":", "-."]
_POINT_MARKS = "osD^vP*X"
Bar = tuple[str, str, Estimate | None, float | None, str]
"""(precision, rung, milliseconds, milliseconds at the device's limit, text beside the bar).

Each number is None if it is unknown.
"""
Point = tuple[str, str, float, Estimate]
"""(label, precision, FLOPs per byte, FLOP/s)."""


def speed_ladder(panels: Mapping[str, Sequence[Bar]]) -> Figure:
    """Draw bars of the time of a step, from the lowest rung to the highest, a panel for each title.

    A tick shows the time of the step at the device's peak rate, if the rate is known.
    """
    heights = [len(bars) + 1.5 for bars in panels.values()]  # in bars: 1.5 for title and ticks
    height = 0.26 * sum(heights) + 0.6  # in inches: 0.6 for the label of the x axis
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
        ax.set_xlim(left=0)  # the margins would otherwise begin left of 0
        ax.set_title(title, fontsize=10, loc="left")
    x_label = "time of a step (ms)"
    if has_limits:
        x_label += "; black mark: limit of the device"
    bottom_axes = axes[-1]
    bottom_axes.set_xlabel(x_label)
    return figure


def _rung_bar(ax: Axes, y: int, precision: str, time: Estimate | None, text: str) -> None:
    """Draw the bar of a rung, for its `time` in ms; without a time, only its text."""
    options = style.precision_options(precision, height=0.75)
    if time is None:
        style.bar(ax, y, 0, text, **options)
        return
    style.measured_bar(ax, y, time, text, **options)


def _limit_tick(ax: Axes, y: int, limit: float) -> None:
    """Draw a vertical tick at `limit` ms, a little longer than the bar at `y` is high."""
    lower_end = y - 0.45
    upper_end = y + 0.45
    ax.plot([limit, limit], [lower_end, upper_end], **_TICK)


def roofline(roofs: Mapping[str, float], bytes_per_s: float, points: Sequence[Point]) -> Figure:
    """Draw the roofline of a device: FLOP/s against FLOPs per byte, with a roof for each precision.

    `roofs` is {precision: peak FLOP/s}, with at most four precisions. `bytes_per_s` is the memory
    bandwidth. The points have at most eight different labels, each with a separate marker.
    """
    figure, ax = style.subplots(size=(8.0, 4.2))
    _draw_roofs(ax, roofs, bytes_per_s, points)
    labels = dict.fromkeys(label for label, *_ in points)
    marker_of = dict(zip(labels, _POINT_MARKS, strict=False))
    for label, precision, intensity, achieved in points:
        marker = marker_of[label]
        options: Options = {
            "color": COLOURS[precision],
            "markersize": 8,
            "markeredgecolor": "black",
        }
        style.measured_line(ax, [intensity], [achieved], marker, **options)
    # Empty lines for the legend: markers stand for labels, and are grey, as of no precision.
    grey: Options = {"color": style.STRONG_GRID, "markeredgecolor": "black"}
    for label, marker in marker_of.items():
        ax.plot([], [], marker, label=label, **grey)
    ax.set_xscale("log")
    ax.set_yscale("log")
    style.label(ax, "FLOPs per byte moved", "FLOP/s")
    style.legend_beside(figure, "outside right upper", fontsize=9)
    return figure


def _draw_roofs(
    ax: Axes, roofs: Mapping[str, float], bytes_per_s: float, points: Iterable[Point]
) -> None:
    """Draw the limit of each precision, over an x range that includes all points."""
    intensities = [intensity for _, _, intensity, _ in points]
    lowest = min([1.0, *intensities])
    highest = max([100.0, *intensities])
    low = lowest / 2  # with some room beyond the points
    high = highest * 4
    for (precision, flops_per_s), dash in zip(roofs.items(), _ROOF_DASHES, strict=False):
        ridge = flops_per_s / bytes_per_s  # left of it, the memory bandwidth is the limit
        x = [low, ridge, high]
        lowest_rate = low * bytes_per_s
        y = [lowest_rate, flops_per_s, flops_per_s]
        colour = COLOURS[precision]
        label = f"limit in {precision}"
        ax.plot(x, y, dash, color=colour, label=label)


def best_speedups(machines: Mapping[str, Mapping[str, Ratio]]) -> Figure:
    """Draw bars of the best speed-up of each workload: `machines[name][workload]`.

    The bars of a workload on all machines are next to each other.
    """
    workloads: dict[str, None] = {}  # used as an ordered set
    for speedup_of in machines.values():
        workloads |= dict.fromkeys(speedup_of)
    names = list(workloads)
    count = len(machines)
    height = 0.3 * len(names) * count + 1.4  # inches: 1.4 for axis and legend
    figure, ax = style.subplots(size=(8.0, height))
    bar_height = 0.8 / count  # the bars of a workload fill 0.8 of its row
    last = max(1, count - 1)  # at least 1, since it is divided by
    for i, (machine, speedup_of) in enumerate(machines.items()):
        grey = 0.15 + 0.6 * i / last  # from dark to light
        options: Options = {
            "color": str(grey),
            "height": bar_height,
            **style.EDGED,
        }
        offset = i * bar_height
        for name, speedup in speedup_of.items():
            y = names.index(name) + offset
            text = f"{speedup.median:.2f}x"
            style.measured_bar(ax, y, speedup, text, **options)
        ax.barh([0], [0], label=machine, **options)  # for the legend, even without any value
    middle = 0.4 - bar_height / 2  # of the bars of a workload, where its name stands
    style.name_rows(ax, names, room=0.12, middle=middle)
    ax.set_xlabel("best speed-up over fp32 eager on the same device")
    style.legend_beside(figure, "outside lower center", ncols=2, fontsize=9)
    return figure

"""The loss scale over the steps of a training run, and what it does to a gradient's length."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Values


def _stairs(ax: Axes, scales: Values, skipped: Sequence[int], markersize: float) -> None:
    """The scale at each step, with a cross where the step was skipped."""
    ax.step(range(len(scales)), scales, where="mid", color=COLOURS["fp16"], label="loss scale")
    at_skips = [scales[step] for step in skipped]
    ax.plot(skipped, at_skips, "x", color="black", markersize=markersize, label="step skipped")
    style.log2_axis(ax)


def scale_over_time(scales: Values, skipped: Sequence[int]) -> Axes:
    """The loss scale before each step, on a log2 axis, and the steps that were skipped."""
    _, ax = style.subplots()
    _stairs(ax, scales, skipped, markersize=8)
    return style.label(ax, "step", "loss scale", legend="lower right")


def scales_by_setting(logs: Mapping[str, tuple[Values, Sequence[int]]]) -> Figure:
    """Loss scales and skipped steps, one panel a setting: `logs[setting]` is (scales, skipped)."""
    size = (8.0, 1.35 * len(logs) + 0.5)
    figure, axes = style.subplots(len(logs), size=size, sharex=True, sharey=True)
    for ax, (setting, (scales, skipped)) in zip(axes, logs.items(), strict=True):
        _stairs(ax, scales, skipped, markersize=6)
        ax.set_title(f"{setting}: {len(skipped)} skipped", loc="left", fontsize=10)
        ax.set_ylabel("loss scale")
    axes[-1].set_xlabel("step; x: skipped")
    return figure


def loss_scales(histories: Mapping[str, Values]) -> Axes:
    """Two loss scales {name: scale after each step}, a precision in its colour; dotted: 1."""
    _, ax = style.subplots()
    looks = [("black", "-"), (style.SECOND, "--")]
    for (name, scales), (colour, line) in zip(histories.items(), looks, strict=True):
        colour = COLOURS.get(style.precision_of(name), colour)
        steps = range(1, len(scales) + 1)
        ax.step(steps, scales, line, where="mid", color=colour, linewidth=2, label=name)
    ax.axhline(1, color="black", linestyle=":", linewidth=1)
    style.log2_axis(ax)
    ax.yaxis.set_major_locator(LogLocator(base=2**16))  # the scale may rise by a hundred powers
    return style.label(ax, "step", "loss scale", legend="center right")


def gradient_norm_in_step(norms: Mapping[str, float], scaled: Sequence[str]) -> Axes:
    """Length of the gradient after each stage {name: length} of a step, on a log2 axis.

    The stages named in `scaled` come first; they are set off by a grey background.
    """
    _, ax = style.subplots(size=(8.0, 3.2))
    ax.axvspan(-0.5, len(scaled) - 0.5, color=style.SCALED)
    ax.plot(range(len(norms)), norms.values(), ":", color=style.GUIDE, zorder=1)  # behind the dots
    ax.plot(range(len(norms)), norms.values(), "o", color=COLOURS["fp16"], markersize=10)
    for at, value in enumerate(norms.values()):
        text = f"{value:,.0f}" if value > 100 else f"{value:.2f}"
        ax.annotate(text, (at, value), xytext=(12, 6), textcoords="offset points")  # off the line
    for at, text in ((0, "scaled: do not look"), (len(scaled), "true: clip, log, step")):
        ax.text(at - 0.45, 0.96, text, transform=ax.get_xaxis_transform(), va="top")
    style.log2_axis(ax)
    ax.margins(y=0.3)  # room for both texts above the highest value
    ax.set_xticks(range(len(norms)), norms)
    ax.set_xlim(-0.5, len(norms) - 0.5)
    return style.label(ax, "after this stage of the step", "length of the gradient")

"""Training runs: losses, accuracies and scores, and the loss scale with what it does."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from torch import Tensor

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Values


def _mean_and_band(ax: Axes, runs: Mapping[str, Tensor], **look: Any) -> None:
    """Values {precision: (seeds, epochs)}: their mean, and a band from lowest to highest seed."""
    for precision, run in runs.items():
        low = run.amin(0)
        high = run.amax(0)
        epochs = range(1, run.shape[1] + 1)
        ax.fill_between(epochs, low, high, color=COLOURS[precision], alpha=0.2, linewidth=0)
    means = {precision: run.mean(0).tolist() for precision, run in runs.items()}
    style.lines(ax, means, first=1, linewidth=2, **look)


def loss_curves(losses: Mapping[str, Tensor]) -> Axes:
    """Losses {precision: (seeds, epochs)}: their mean, and a band from lowest to highest seed."""
    _, ax = style.subplots()
    _mean_and_band(ax, losses)
    ax.set_yscale("log")  # a loss falls by the same factor, not amount
    return style.label(ax, "epoch", "loss (mean squared error)", legend="best")


def loss_and_accuracy(losses: Mapping[str, Tensor], accuracies: Mapping[str, Tensor]) -> Figure:
    """Loss and accuracy {precision: (seeds, epochs)}: mean, and a band from lowest to highest."""
    figure, (left, right) = style.subplots(1, 2, size=(7.5, 2.9))
    for ax, curves in ((left, losses), (right, accuracies)):
        _mean_and_band(ax, curves, dashes=["-", "--", "-.", ":"], markers="osd^")
        ax.xaxis.get_major_locator().set_params(integer=True)  # there is no epoch 1.5
    left.set_ylim(bottom=0)  # a small difference shall look small
    style.label(left, "epoch", "training loss (cross-entropy)", legend="best")
    right.set_ylim(0, 1)  # all that an accuracy can be
    style.label(right, "epoch", "held-out accuracy")
    right.yaxis.set_major_formatter("{x:.0%}")
    return figure


def loss_by_backend(panels: Mapping[str, Mapping[str, Values]]) -> Figure:
    """Loss over the epochs, a panel for each backend: `panels[backend][precision]` is a list."""
    figure, axes = style.subplots(1, len(panels), size=(4.0 * len(panels), 3.0), sharey=True)
    for ax, (backend, losses) in zip(axes, panels.items(), strict=True):
        style.lines(ax, losses, first=1, linewidth=2.5)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no epoch 1.5
        ax.set(title=backend, xlabel="epoch")
    axes[0].set_ylabel("cross-entropy in training")
    axes[0].legend()
    return figure


def losses_by_setting(losses: Mapping[str, Values]) -> Axes:
    """Losses {setting: loss of each step}, on a log axis; a setting begins with a precision."""
    figure, ax = style.subplots()
    # fp32 is a wide line, on which the others can be seen to lie.
    looks = {"fp32": ("-", 8, 0.35), "fp16": ("-", 2, 1), "bf16": (":", 3, 1)}
    seen = set()
    for setting, values in losses.items():
        precision = style.precision_of(setting)
        line, width, alpha = looks[precision]
        if precision in seen:
            line = "--"  # it would hide the first
        seen.add(precision)
        style.lines(ax, {setting: values}, [line], linewidth=width, alpha=alpha)
    ax.set_yscale("log")
    style.legend_beside(figure, "outside right upper")
    return style.label(ax, "step", "loss")


def training_curves(curves: Mapping[str, Values], what: str) -> Figure:
    """A measure {"train": [...], "test": [...]} of each epoch; `what` is its name."""
    figure, ax = style.subplots()
    for (part, values), line in zip(curves.items(), ["--o", "-o"], strict=True):
        ax.plot(range(1, len(values) + 1), values, line, color=COLOURS["fp32"], label=part)
    style.label(ax, "epoch", what, legend="best")
    return figure


def scores_by_seed(scores: Mapping[str, Values]) -> Axes:
    """Dots of a score in percent, `scores[precision]`, for each seed, and a bar at their mean."""
    _, ax = style.subplots(size=(6.0, 2.0))
    for y, (precision, values) in enumerate(scores.items()):
        mean = sum(values) / len(values)
        # One below the other, since equal scores would hide each other.
        middle = (len(values) - 1) / 2
        heights = [y + 0.06 * (seed - middle) for seed in range(len(values))]
        ax.plot(values, heights, "o", color=COLOURS[precision], alpha=0.6, markersize=7)
        ax.plot([mean, mean], [y - 0.3, y + 0.3], color="black", linewidth=2)
    ax.set_yticks(range(len(scores)), list(scores))
    ax.set(ylim=(len(scores) - 0.5, -0.5), xlabel="test accuracy; bar: mean of the seeds (%)")
    return ax


def _stairs(ax: Axes, scales: Values, skipped: Sequence[int], markersize: float) -> None:
    """The scale at each step, with a cross where the step was skipped."""
    ax.step(range(len(scales)), scales, where="mid", color=COLOURS["fp16"], label="loss scale")
    at_skips = [scales[step] for step in skipped]
    ax.plot(skipped, at_skips, "x", color="black", markersize=markersize, label="step skipped")
    ax.set_yscale("log", base=2)


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
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_locator(LogLocator(base=2**16))  # the scale may rise by a hundred powers
    return style.label(ax, "step", "loss scale", legend="center right")


def gradient_norm_in_step(norms: Mapping[str, float], scaled: Sequence[str]) -> Axes:
    """Length of the gradient after each stage {name: length} of a step; first come the `scaled`."""
    _, ax = style.subplots(size=(8.0, 3.2))
    ax.axvspan(-0.5, len(scaled) - 0.5, color=style.SCALED)
    ax.plot(range(len(norms)), norms.values(), ":", color=style.GUIDE, zorder=1)  # behind the dots
    ax.plot(range(len(norms)), norms.values(), "o", color=COLOURS["fp16"], markersize=10)
    for at, value in enumerate(norms.values()):
        text = f"{value:.2f}"
        if value > 100:
            text = f"{value:,.0f}"
        ax.annotate(text, (at, value), xytext=(12, 6), textcoords="offset points")  # off the line
    for at, text in ((0, "scaled: do not look"), (len(scaled), "true: clip, log, step")):
        ax.text(at - 0.45, 0.96, text, transform=ax.get_xaxis_transform(), va="top")
    ax.set_yscale("log", base=2)
    ax.margins(y=0.3)  # room for both texts above the highest value
    ax.set_xticks(range(len(norms)), norms)
    ax.set_xlim(-0.5, len(norms) - 0.5)
    return style.label(ax, "after this stage of the step", "length of the gradient")

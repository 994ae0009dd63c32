"""Losses, accuracies and scores of training runs."""

from collections.abc import Mapping, Sequence
from os import PathLike

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Values


def _mean_and_band(
    ax: Axes, runs: Mapping[str, Tensor], dashes: Sequence[str], markers: str = ""
) -> None:
    """Values {precision: (seeds, epochs)}: their mean, and a band from lowest to highest seed."""
    for precision, run in runs.items():
        low, high, epochs = run.amin(0), run.amax(0), range(1, run.shape[1] + 1)
        ax.fill_between(epochs, low, high, color=COLOURS[precision], alpha=0.2, linewidth=0)
    means = {precision: run.mean(0) for precision, run in runs.items()}
    style.lines(ax, means, dashes, markers, first=1, linewidth=2)


def loss_curves(losses: Mapping[str, Tensor]) -> Axes:
    """Losses {precision: (seeds, epochs)}: their mean, and a band from lowest to highest seed."""
    _, ax = style.subplots()
    _mean_and_band(ax, losses, ["-", "--", ":", "-."])
    ax.set_yscale("log")  # a loss falls by the same factor, not amount
    return style.label(ax, "epoch", "loss (mean squared error)", legend="best")


def loss_and_accuracy(losses: Mapping[str, Tensor], accuracies: Mapping[str, Tensor]) -> Figure:
    """Loss and accuracy {precision: (seeds, epochs)}: mean, and a band from lowest to highest."""
    figure, (left, right) = style.subplots(1, 2, size=(7.5, 2.9))
    for ax, curves in ((left, losses), (right, accuracies)):
        _mean_and_band(ax, curves, ["-", "--", "-.", ":"], markers="osd^")
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
    """Losses {setting: loss of each step}, on a log axis; a setting begins with a precision.

    fp32 is a wide line, on which the others can be seen to lie; the second setting of a precision
    is dashed.
    """
    figure, ax = style.subplots()
    looks = {"fp32": ("-", 8, 0.35), "fp16": ("-", 2, 1), "bf16": (":", 3, 1)}
    seen = set()
    for setting, values in losses.items():
        precision = style.precision_of(setting)
        line, width, alpha = looks[precision]
        line = "--" if precision in seen else line  # it would hide the first
        seen.add(precision)
        style.lines(ax, {setting: values}, [line], linewidth=width, alpha=alpha)
    ax.set_yscale("log")
    style.legend_beside(figure, "right upper")
    return style.label(ax, "step", "loss")


def training_curves(curves: Mapping[str, Values], what: str) -> Figure:
    """A measure {"train": [...], "test": [...]} of each epoch; `what` is its name."""
    figure, ax = style.subplots()
    for (part, values), line in zip(curves.items(), ["--o", "-o"], strict=True):
        ax.plot(range(1, len(values) + 1), values, line, color=COLOURS["fp32"], label=part)
    style.label(ax, "epoch", what, legend="best")
    return figure


def save_training_curves(
    path: str | PathLike[str], curves: Mapping[str, Values], what: str
) -> None:
    """Write `training_curves` to a PNG file; raises `OptionError` if it cannot be written."""
    style.save(path, training_curves, curves, what)


def scores_by_seed(scores: Mapping[str, Values]) -> Axes:
    """Dots of a score in percent, `scores[precision]`, for each seed, and a bar at their mean."""
    _, ax = style.subplots(size=(6.0, 2.0))
    for y, (precision, values) in enumerate(scores.items()):
        mean = sum(values) / len(values)
        # One below the other, since equal scores would hide each other.
        heights = [y + 0.06 * (seed - (len(values) - 1) / 2) for seed in range(len(values))]
        ax.plot(values, heights, "o", color=COLOURS[precision], alpha=0.6, markersize=7)
        ax.plot([mean, mean], [y - 0.3, y + 0.3], color="black", linewidth=2)
    ax.set_yticks(range(len(scores)), list(scores))
    ax.set(ylim=(len(scores) - 0.5, -0.5), xlabel="test accuracy; bar: mean of the seeds (%)")
    return ax

"""Training runs: losses, accuracies, and loss scales."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Options, Values

_DASHES = ["-", "--", "-.", ":"]
_SETTING_OPTIONS = {  # fp32 is a wide line, on which the others can be seen to lie
    "fp32": ("-", {"linewidth": 8, "alpha": 0.35}),
    "fp16": ("-", {"linewidth": 2, "alpha": 1}),
    "bf16": (":", {"linewidth": 3, "alpha": 1}),
}
_SCALE_OPTIONS = [("black", "-"), (style.SECOND, "--")]
_BAND: Options = {"alpha": 0.2, "linewidth": 0}
_DOT: Options = {
    "marker": "o",
    "linestyle": "none",
    "alpha": 0.6,
    "markersize": 7,
}
_MEAN: Options = {"color": "black", "linewidth": 2}
_UNIT_SCALE: Options = {
    "color": "black",
    "linestyle": ":",
    "linewidth": 1,
}
Losses = Mapping[str, Values]
"""{name of a run, such as its precision: loss of each step or epoch}."""
ScaleLog = tuple[Values, Sequence[int]]
"""(loss scale of each step, numbers of the steps that were skipped)."""
Runs = Mapping[str, Tensor]
"""{precision: values (seeds, epochs)}."""


def _mean_and_band(ax: Axes, runs: Runs, **options: Any) -> None:
    """Draw the mean over the seeds of each precision, and a band from lowest to highest seed."""
    means: dict[str, list[float]] = {}
    for precision, run in runs.items():
        low = run.amin(0)
        high = run.amax(0)
        mean = run.mean(0)
        means[precision] = mean.tolist()
        epochs = range(1, len(mean) + 1)
        colour = COLOURS[precision]
        ax.fill_between(epochs, low, high, color=colour, **_BAND)
    style.lines(ax, means, first=1, linewidth=2, **options)


def loss_curves(losses: Runs) -> Axes:
    """Mean loss over the epochs of each precision, and a band from lowest to highest seed."""
    _, ax = style.subplots()
    _mean_and_band(ax, losses)
    ax.set_yscale("log")  # a loss falls by the same factor, not amount
    return style.label(ax, "epoch", "loss (mean squared error)", legend="best")


def loss_and_accuracy(losses: Runs, accuracies: Runs) -> Figure:
    """Mean loss and accuracy over the epochs of each precision, and bands over the seeds."""
    figure, axes = style.columns(2, size=(7.5, 2.9))
    left, right = axes
    for ax, runs in zip(axes, (losses, accuracies), strict=True):
        _mean_and_band(ax, runs, dashes=_DASHES, markers="osd^")
        epoch_ticks = ax.xaxis.get_major_locator()
        epoch_ticks.set_params(integer=True)  # there is no epoch 1.5
    left.set_ylim(bottom=0)  # so that a small difference looks small
    style.label(left, "epoch", "training loss (cross-entropy)", legend="best")
    right.set_ylim(0, 1)  # the whole range of an accuracy
    style.label(right, "epoch", "held-out accuracy")
    right.yaxis.set_major_formatter("{x:.0%}")
    return figure


def loss_scales(histories: Mapping[str, Values]) -> Axes:
    """Two loss scales {name: scale after each step}, and a dotted line at 1.

    A name that begins with a precision has its colour.
    """
    _, ax = style.subplots()
    for (name, scales), scale_options in zip(histories.items(), _SCALE_OPTIONS, strict=True):
        default_colour, dash = scale_options
        precision = style.precision_of(name)
        colour = COLOURS.get(precision, default_colour)
        steps = range(1, len(scales) + 1)
        options: Options = {
            "where": "mid",
            "color": colour,
            "linewidth": 2,
            "label": name,
        }
        ax.step(steps, scales, dash, **options)
    ax.axhline(1, **_UNIT_SCALE)
    ax.set_yscale("log", base=2)
    far_apart = LogLocator(base=2**16)  # the scale may rise by a hundred powers
    ax.yaxis.set_major_locator(far_apart)
    return style.label(ax, "step", "loss scale", legend="center right")


def gradient_norm_in_step(norms: Mapping[str, float], scaled: Sequence[str]) -> Axes:
    """Norm of the gradient after each stage of a step, {stage: norm}.

    `scaled` are the first stages, in which the gradient is still multiplied by the loss scale.
    """
    _, ax = style.subplots(size=(8.0, 3.2))
    stages = range(len(norms))
    lengths = list(norms.values())
    first_true = len(scaled)
    border = first_true - 0.5  # between the last scaled stage and the first true one
    ax.axvspan(-0.5, border, color=style.SCALED)
    line: Options = {"color": style.GUIDE, "zorder": 1}  # behind the dots
    ax.plot(stages, lengths, ":", **line)
    dot: Options = {"color": COLOURS["fp16"], "markersize": 10}
    ax.plot(stages, lengths, "o", **dot)
    off_the_line: Options = {
        "xytext": (12, 6),
        "textcoords": "offset points",
    }
    for stage, length in enumerate(lengths):
        text = f"{length:.2f}"
        if length > 100:
            text = f"{length:,.0f}"
        ax.annotate(text, (stage, length), **off_the_line)
    at_top: Options = {"transform": ax.get_xaxis_transform(), "va": "top"}
    ax.text(-0.45, 0.96, "scaled: do not read", **at_top)
    right_of_border = first_true - 0.45
    ax.text(right_of_border, 0.96, "true: clip, log, step", **at_top)
    ax.set_yscale("log", base=2)
    ax.margins(y=0.3)  # room for both texts above the highest value
    ax.set_xticks(stages, norms)
    right_end = len(norms) - 0.5  # as much room as on the left
    ax.set_xlim(-0.5, right_end)
    x_label = "after this stage of the step"
    return style.label(ax, x_label, "length of the gradient")

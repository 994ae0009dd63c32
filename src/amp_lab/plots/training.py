"""Training runs: losses, accuracies and scores, and the loss scale with the skipped steps."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Options, Values


def training_curves(curves: Mapping[str, Values], metric: str) -> Figure:
    """Draw a metric over the epochs, from 1. `curves` is {"train": [...], "test": [...]}."""
    figure, ax = style.subplots()
    colour = COLOURS["fp32"]
    forms = ["--o", "-o"]  # dashed for training
    for (name, values), form in zip(curves.items(), forms, strict=True):
        epochs = range(1, len(values) + 1)
        options: Options = {"color": colour, "label": name}
        ax.plot(epochs, values, form, **options)
    style.label(ax, "epoch", metric, legend="best")
    return figure


def scale_over_time(scales: Values, skipped: Sequence[int]) -> Axes:
    """Draw the loss scale before each step, on a log2 axis, with crosses at the `skipped` steps."""
    _, ax = style.subplots()
    style.stairs(ax, scales, skipped, markersize=8)
    return style.label(ax, "step", "loss scale", legend="lower right")

"""Losses, accuracies and scores of training runs."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from amp_lab.plots.style import COLOURS, use_style


def loss_curves(losses) -> plt.Axes:
    """Losses {precision: (seeds, epochs)}: their mean, and a band from lowest to highest seed."""
    _, ax = plt.subplots()
    lines = ["-", "--", ":", "-."]
    for (precision, loss), line in zip(losses.items(), lines, strict=False):
        loss, colour = loss.numpy(), COLOURS[precision]
        epochs = range(1, loss.shape[1] + 1)
        ax.fill_between(epochs, loss.min(0), loss.max(0), color=colour, alpha=0.2, linewidth=0)
        ax.plot(epochs, loss.mean(0), line, color=colour, linewidth=2, label=precision)
    ax.set_yscale("log")
    ax.set_xlabel("epoch")
    ax.set_ylabel("loss (mean squared error)")
    ax.legend()
    return ax


def loss_and_accuracy(losses, accuracies) -> plt.Figure:
    """Loss and accuracy {precision: (seeds, epochs)}: mean, and a band from lowest to highest."""
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.9))
    lines, markers = ["-", "--", "-.", ":"], "osd^"
    for ax, curves in zip(axes, (losses, accuracies), strict=True):
        for (precision, values), line, marker in zip(curves.items(), lines, markers, strict=False):
            values, colour = values.numpy(), COLOURS[precision]
            epochs = range(1, values.shape[1] + 1)
            ax.fill_between(
                epochs, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0
            )
            ax.plot(
                epochs,
                values.mean(0),
                line,
                marker=marker,
                color=colour,
                linewidth=2,
                label=precision,
            )
        ax.set_xlabel("epoch")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("training loss (cross-entropy)")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    axes[1].set_ylabel("held-out accuracy")
    axes[1].set_ylim(0, 1)
    axes[1].yaxis.set_major_formatter("{x:.0%}")
    return figure


def losses_by_setting(losses) -> plt.Axes:
    """Losses {setting: loss of each step}, on a log axis; a setting begins with a precision.

    fp32 is a wide line, on which the others can be seen to lie; the second setting of a precision
    is dashed.
    """
    _, ax = plt.subplots()
    looks = {"fp32": ("-", 8, 0.35), "fp16": ("-", 2, 1), "bf16": (":", 3, 1)}
    seen = set()
    for setting, values in losses.items():
        precision = setting.split()[0].rstrip(",")
        line, width, alpha = looks[precision]
        line = "--" if precision in seen else line
        seen.add(precision)
        look = {"color": COLOURS[precision], "linewidth": width, "alpha": alpha}
        ax.plot(values, line, label=setting, **look)
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.figure.legend(loc="outside right upper")
    return ax


def loss_by_backend(panels) -> plt.Figure:
    """Loss over the epochs, a panel for each backend: `panels[backend][precision]` is a list."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.0 * len(panels), 3.0), sharey=True)
    for ax, (backend, losses) in zip(axes, panels.items(), strict=True):
        for (precision, loss), line in zip(losses.items(), ["-", "--", ":"], strict=True):
            epochs = range(1, len(loss) + 1)
            ax.plot(epochs, loss, line, color=COLOURS[precision], linewidth=2.5, label=precision)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title(backend)
        ax.set_xlabel("epoch")
    axes[0].set_ylabel("cross-entropy in training")
    axes[0].legend()
    return figure


def training_curves(ax, curves, what) -> None:
    """Into `ax`, a measure {"train": [...], "test": [...]} of each epoch; `what` is its name."""
    for (part, values), line in zip(curves.items(), ["--", "-"], strict=True):
        ax.plot(range(1, len(values) + 1), values, f"{line}o", color=COLOURS["fp32"], label=part)
    ax.set_xlabel("epoch")
    ax.set_ylabel(what)
    ax.legend()


def save_training_curves(path, curves, what) -> None:
    """Write `training_curves` to a PNG file, without a window and without pyplot's list of them."""
    use_style()
    figure = Figure()
    training_curves(figure.subplots(), curves, what)
    figure.savefig(path)


def scores_by_seed(scores) -> plt.Axes:
    """Dots of a score for each seed, one below the other, and a bar at their mean.

    `scores[precision]` is a list.
    """
    _, ax = plt.subplots(figsize=(6.0, 2.0))
    for y, (precision, values) in enumerate(scores.items()):
        middle = sum(values) / len(values)
        heights = [y + 0.06 * (seed - (len(values) - 1) / 2) for seed in range(len(values))]
        ax.plot(values, heights, "o", color=COLOURS[precision], alpha=0.6, markersize=7)
        ax.plot([middle, middle], [y - 0.3, y + 0.3], color="black", linewidth=2)
    ax.set_yticks(range(len(scores)), list(scores))
    ax.set_ylim(len(scores) - 0.5, -0.5)
    ax.set_xlabel("test accuracy; bar: mean of the seeds (%)")
    return ax

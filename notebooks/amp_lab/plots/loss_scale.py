"""The loss scale over the steps of a training run."""

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

from amp_lab.plots.style import COLOURS


def scale_over_time(scales, skipped) -> plt.Axes:
    """The loss scale before each step, on a log2 axis, and the steps that were skipped."""
    _, ax = plt.subplots()
    ax.step(range(len(scales)), scales, where="mid", color=COLOURS["fp16"], label="loss scale")
    ax.plot(
        skipped,
        [scales[step] for step in skipped],
        "x",
        color="black",
        markersize=8,
        label="step skipped",
    )
    ax.set_yscale("log", base=2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend(loc="lower right")
    return ax


def scales_by_setting(logs) -> plt.Figure:
    """Loss scales and skipped steps, one panel a setting: `logs[setting]` is (scales, skipped)."""
    figure, axes = plt.subplots(
        len(logs), sharex=True, sharey=True, figsize=(8.0, 1.35 * len(logs) + 0.5)
    )
    for ax, (setting, (scales, skipped)) in zip(axes, logs.items(), strict=True):
        ax.step(range(len(scales)), scales, where="mid", color=COLOURS["fp16"], linewidth=1.5)
        ax.plot(skipped, [scales[step] for step in skipped], "x", color="black")
        ax.set_yscale("log", base=2)
        ax.set_title(f"{setting}: {len(skipped)} skipped", loc="left", fontsize=10)
        ax.set_ylabel("loss scale")
    axes[-1].set_xlabel("step; x: skipped")
    return figure


def loss_scales(histories) -> plt.Axes:
    """Loss scales {name: scale after each step} on a log2 axis; at 1 a dotted line, if in sight.

    A name that begins with a precision has its colour.
    """
    _, ax = plt.subplots()
    for (name, scales), (colour, line) in zip(
        histories.items(), [("black", "-"), ("0.45", "--")], strict=True
    ):
        colour = COLOURS.get(name.split()[0], colour)
        steps = range(1, len(scales) + 1)
        ax.step(steps, scales, line, where="mid", color=colour, linewidth=2, label=name)
    ax.axhline(1, color="black", linestyle=":", linewidth=1)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_locator(LogLocator(base=2**16))
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend(loc="center right")
    return ax


def gradient_norm_in_step(norms, scaled) -> plt.Axes:
    """Length of the gradient after each stage {name: length} of a step, on a log2 axis.

    The stages named in `scaled` come first; they are set off by a grey background.
    """
    _, ax = plt.subplots(figsize=(8.0, 3.2))
    ax.axvspan(-0.5, len(scaled) - 0.5, color="0.85")
    ax.plot(range(len(norms)), norms.values(), ":", color="0.4", zorder=1)
    ax.plot(range(len(norms)), norms.values(), "o", color=COLOURS["fp16"], markersize=10)
    for at, value in enumerate(norms.values()):
        text = f"{value:,.0f}" if value > 100 else f"{value:.2f}"
        ax.annotate(text, (at, value), xytext=(12, 6), textcoords="offset points")
    for at, text in ((0, "scaled: do not look"), (len(scaled), "true: clip, log, step")):
        ax.text(at - 0.45, 0.96, text, transform=ax.get_xaxis_transform(), va="top")
    ax.set_yscale("log", base=2)
    ax.margins(y=0.3)
    ax.set_xlim(-0.5, len(norms) - 0.5)
    ax.set_xticks(range(len(norms)), norms)
    ax.set_xlabel("after this stage of the step")
    ax.set_ylabel("length of the gradient")
    return ax

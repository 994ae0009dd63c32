"""Errors of formats below 16 bits."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from amp_lab.plots import style
from amp_lab.plots.style import Options, Values

_HATCHES = ("", "//")


def sqnr_by_format(errors: Mapping[str, Mapping[str, float]]) -> Axes:
    """Bars of SQNR in dB (signal to quantisation noise): `errors[kind of values][format]`."""
    _, ax = style.subplots(size=(8.5, 3.6))
    for i, (kind, sqnr_of) in enumerate(errors.items()):
        colour = style.shade(i, 2)
        hatch = _HATCHES[i]
        options: Options = {
            "width": 0.38,
            "color": colour,
            "hatch": hatch,
            "label": kind,
            **style.EDGED,
        }
        offset = 0.4 * i - 0.2  # two bars side by side, around the tick of their format
        for n, sqnr in enumerate(sqnr_of.values()):
            text = f"{sqnr:.0f}"
            style.bar(ax, n + offset, sqnr, text, **options)
            options.pop("label", None)  # only the first bar goes into the legend
        formats = list(sqnr_of)
        ax.set_xticks(range(len(formats)), formats)
    ax.margins(y=0.35)
    return style.label(ax, "format", "SQNR (dB)", legend="upper left")


def loss_by_format(losses: Mapping[str, Sequence[Values]], window_steps: int = 10) -> Axes:
    """Mean loss of several seeds at each step: `losses[format][seed]` has the loss of each step.

    The curves are moving averages over `window_steps` steps.
    """
    _, ax = style.subplots(size=(8.5, 4.0))
    window = np.ones(window_steps) / window_steps
    for i, (name, runs) in enumerate(losses.items()):
        mean = np.mean(runs, 0)
        smooth = np.convolve(mean, window, "valid")
        steps = range(window_steps, window_steps + len(smooth))
        colour = style.shade(i, len(losses))
        dash = style.DASHES[i % len(style.DASHES)]
        options: Options = {"color": colour, "linestyle": dash}
        ax.plot(steps, smooth, label=name, **options)
    return style.label(ax, "step", "loss (cross-entropy)", legend="best")

"""Errors of formats below 16 bits."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from amp_lab.plots import style
from amp_lab.plots.style import Look, Values

_HATCHES = ("", "//")


def sqnr_by_format(errors: Mapping[str, Mapping[str, float]]) -> Axes:
    """Bars of signal to quantisation noise, by format, for each kind of values."""
    _, ax = style.subplots(size=(8.5, 3.6))
    for i, (kind, sqnr_of) in enumerate(errors.items()):
        colour = style.shade(i, 2)
        hatch = _HATCHES[i]
        look: Look = {
            "width": 0.38,
            "color": colour,
            "hatch": hatch,
            "label": kind,
            **style.EDGED,
        }
        offset = 0.4 * i - 0.2
        for n, sqnr in enumerate(sqnr_of.values()):
            text = f"{sqnr:.0f}"
            style.bar(ax, n + offset, sqnr, text, **look)
            look.pop("label", None)  # once in the legend
        formats = list(sqnr_of)
        ax.set_xticks(range(len(formats)), formats)
    ax.margins(y=0.35)
    return style.label(ax, "format", "SQNR (dB)", legend="upper left")


def loss_by_format(losses: Mapping[str, Sequence[Values]], over: int = 10) -> Axes:
    """The mean loss of several seeds over the steps, smoothed over so many, for each format."""
    _, ax = style.subplots(size=(8.5, 4.0))
    window = np.ones(over) / over
    for i, (name, runs) in enumerate(losses.items()):
        mean = np.mean(runs, 0)
        smooth = np.convolve(mean, window, "valid")
        steps = range(over, over + len(smooth))
        colour = style.shade(i, len(losses))
        dash = style.DASHES[i % len(style.DASHES)]
        look: Look = {"color": colour, "linestyle": dash}
        ax.plot(steps, smooth, label=name, **look)
    return style.label(ax, "step", "loss (cross-entropy)", legend="best")

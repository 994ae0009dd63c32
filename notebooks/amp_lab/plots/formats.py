"""Errors of formats below 16 bits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style

_MARKS = "osD^vPX<>"
_DASHES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1))]


def _shade(i: int, of: int) -> tuple[float, ...]:
    """Colours that differ in lightness, from dark to light."""
    return colormaps["viridis"](0.9 * i / max(1, of - 1))


def sqnr_by_format(errors: Mapping[str, Mapping[str, float]]) -> Axes:
    """Bars of signal to quantisation noise, by format, for each kind of values."""
    _, ax = style.subplots(size=(8.5, 3.6))
    for i, (kind, of_format) in enumerate(errors.items()):
        looks = {"width": 0.38, "color": _shade(i, 2), "hatch": ("", "//")[i], "edgecolor": "white"}
        for n, value in enumerate(of_format.values()):
            named = {"label": kind} if n == 0 else {}
            style.bar(ax, n + 0.4 * i - 0.2, value, f"{value:.0f}", **looks, **named)
        ax.set_xticks(range(len(of_format)), list(of_format))
    ax.margins(y=0.35)
    return style.label(ax, "format", "SQNR (dB)", legend="upper left")


def loss_by_format(losses: Mapping[str, Sequence[Sequence[float]]], over: int = 10) -> Axes:
    """The mean loss of several seeds over the steps, smoothed over so many, for each format."""
    _, ax = style.subplots(size=(8.5, 4.0))
    for i, (name, runs) in enumerate(losses.items()):
        mean = np.convolve(np.mean(runs, 0), np.ones(over) / over, "valid")
        steps = range(over, over + len(mean))
        dash = _DASHES[i % len(_DASHES)]
        ax.plot(steps, mean, color=_shade(i, len(losses)), linestyle=dash, label=name)
    return style.label(ax, "step", "loss (cross-entropy)", legend="best")


def errors_by_layer(reports: Sequence[Any]) -> Figure:
    """SQNR of each layer's worst product, a line for each format.

    `reports` are those of a `Rehearsal`. A layer that a format leaves in 16 bits has an open mark,
    and one that does not fit it has none.
    """
    names = list(dict.fromkeys(report.layer.name for report in reports))
    forms = list(dict.fromkeys(report.format for report in reports))
    figure, ax = style.subplots(size=(9.0, 4.2))
    for i, form in enumerate(forms):
        mark, colour = _MARKS[i % len(_MARKS)], _shade(i, len(forms))
        shown = [r for r in reports if r.format == form and r.decibels]
        at = [names.index(r.layer.name) for r in shown]
        values = [r.worst[1] for r in shown]
        ax.plot(at, values, color=colour, linewidth=1)
        ax.plot([], [], marker=mark, color=colour, linewidth=1, markersize=5, label=form)
        for kept, fill in ((True, "white"), (False, colour)):
            part = [n for n, r in enumerate(shown) if bool(r.left_out) is kept]
            points = [at[n] for n in part], [values[n] for n in part]
            ax.plot(*points, mark, color=colour, markerfacecolor=fill, markersize=5)
    step = -(-len(names) // 16)
    ax.set_xticks(range(0, len(names), step), names[::step], rotation=30, ha="right", fontsize=9)
    style.label(ax, "layer (open: left in 16 bits)", "SQNR of the worst product in dB")
    style.legend_beside(figure, "outside right upper")
    return figure

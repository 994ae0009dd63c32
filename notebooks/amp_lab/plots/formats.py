"""Errors of formats below 16 bits."""

import math
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
        hatch = ("", "//")[i]
        looks = {"width": 0.38, "color": _shade(i, 2), "hatch": hatch, "edgecolor": "white"}
        for n, value in enumerate(of_format.values()):
            named = {"label": kind} if n == 0 else {}  # once in the legend
            style.bar(ax, n + 0.4 * i - 0.2, value, f"{value:.0f}", **looks, **named)
        ax.set_xticks(range(len(of_format)), list(of_format))
    ax.margins(y=0.35)
    return style.label(ax, "format", "SQNR (dB)", legend="upper left")


def loss_by_format(losses: Mapping[str, Sequence[Sequence[float]]], over: int = 10) -> Axes:
    """The mean loss of several seeds over the steps, smoothed over so many, for each format."""
    _, ax = style.subplots(size=(8.5, 4.0))
    for i, (name, runs) in enumerate(losses.items()):
        window = np.ones(over) / over
        mean = np.convolve(np.mean(runs, 0), window, "valid")
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
        mark = _MARKS[i % len(_MARKS)]
        colour = _shade(i, len(forms))
        shown = [report for report in reports if report.format == form and report.decibels]
        ax.plot(*_points(shown, names), color=colour, linewidth=1)
        ax.plot([], [], marker=mark, color=colour, linewidth=1, markersize=5, label=form)
        left_out = [report for report in shown if report.left_out]
        converted = [report for report in shown if not report.left_out]
        for part, fill in ((left_out, "white"), (converted, colour)):
            points = _points(part, names)
            ax.plot(*points, mark, color=colour, markerfacecolor=fill, markersize=5)
    step = math.ceil(len(names) / 16)  # 16 names have room
    ax.set_xticks(range(0, len(names), step), names[::step], rotation=30, ha="right", fontsize=9)
    style.label(ax, "layer (open: left in 16 bits)", "SQNR of the worst product in dB")
    style.legend_beside(figure, "outside right upper")
    return figure


def _points(reports: Sequence[Any], names: list[str]) -> tuple[list[int], list[float]]:
    """Layers by their place among the names, and the SQNR of their worst product."""
    places = [names.index(report.layer.name) for report in reports]
    decibels = [report.worst[1] for report in reports]
    return places, decibels

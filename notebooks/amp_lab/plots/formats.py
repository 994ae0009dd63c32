"""Errors of formats below 16 bits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import Look, Values

_MARKS = "osD^vPX<>"
_HATCHES = ("", "//")
_Points = tuple[list[int], list[float]]
_MOST_NAMES = 16  # of layers, that have room below an axis


def _shade(i: int, of: int) -> tuple[float, ...]:
    """Colours that differ in lightness, from dark to light."""
    last = max(1, of - 1)
    return colormaps["viridis"](0.9 * i / last)


def sqnr_by_format(errors: Mapping[str, Mapping[str, float]]) -> Axes:
    """Bars of signal to quantisation noise, by format, for each kind of values."""
    _, ax = style.subplots(size=(8.5, 3.6))
    for i, (kind, sqnr_of) in enumerate(errors.items()):
        colour = _shade(i, 2)
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
        colour = _shade(i, len(losses))
        dash = style.DASHES[i % len(style.DASHES)]
        look: Look = {"color": colour, "linestyle": dash}
        ax.plot(steps, smooth, label=name, **look)
    return style.label(ax, "step", "loss (cross-entropy)", legend="best")


def errors_by_layer(reports: Sequence[Any]) -> Figure:
    """SQNR of each layer's worst product, a line for each format.

    `reports` are those of a `Rehearsal`. A layer that a format leaves in 16 bits has an open mark,
    and one that does not fit it has none.
    """
    layers = dict.fromkeys(report.layer.name for report in reports)
    names = list(layers)
    formats = dict.fromkeys(report.format for report in reports)
    count = len(formats)
    figure, ax = style.subplots(size=(9.0, 4.2))
    for i, name in enumerate(formats):
        of_format = [report for report in reports if report.format == name]
        fitting = [report for report in of_format if report.decibels]
        look: Look = {
            "color": _shade(i, count),
            "marker": _MARKS[i % len(_MARKS)],
            "markersize": 5,
        }
        ax.plot([], [], linewidth=1, label=name, **look)  # for the legend
        _format_line(ax, fitting, names, look)
    every = math.ceil(len(names) / _MOST_NAMES)
    ticks = range(0, len(names), every)
    shown = names[::every]
    ax.set_xticks(ticks, shown, **style.SLANTED)
    x_label = "layer (open: left in 16 bits)"
    style.label(ax, x_label, "SQNR of the worst product in dB")
    style.legend_beside(figure, "outside right upper")
    return figure


def _format_line(ax: Axes, reports: Sequence[Any], names: list[str], look: Look) -> None:
    """A line through the layers of one format, with a mark on each of them."""
    colour = look["color"]
    places, decibels = _points(reports, names)
    ax.plot(places, decibels, color=colour, linewidth=1)
    left_out = [report for report in reports if report.left_out]
    converted = [report for report in reports if not report.left_out]
    for marked, fill in ((left_out, "white"), (converted, colour)):
        places, decibels = _points(marked, names)
        marks: Look = {"linestyle": "none", "markerfacecolor": fill, **look}
        ax.plot(places, decibels, **marks)


def _points(reports: Sequence[Any], names: list[str]) -> _Points:
    """Layers by their place among the names, and the SQNR of their worst product."""
    places: list[int] = []
    decibels: list[float] = []
    for report in reports:
        place = names.index(report.layer.name)
        _, worst = report.worst
        places.append(place)
        decibels.append(worst)
    return places, decibels

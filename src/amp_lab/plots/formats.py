"""Errors of formats below 16 bits."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import Look

_MARKS = "osD^vPX<>"
_Points = tuple[list[int], list[float]]
_MOST_NAMES = 16  # of layers, that have room below an axis


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
            "color": style.shade(i, count),
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

"""Errors of formats below 16 bits."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import Options

_MARKS = "osD^vPX<>"
_Points = tuple[list[int], list[float]]
"""x and y of each point."""
_MAX_NAMES = 16  # of layers below the axis


def errors_by_layer(reports: Sequence[Any]) -> Figure:
    """Draw the SQNR (signal to quantisation noise) of each layer's worst matmul, a line per format.

    `reports` are the reports of a `Rehearsal`. An open marker is a layer that stays in 16 bits. A
    layer that cannot use the format has no marker.
    """
    # Both dicts are used as ordered sets.
    layers = dict.fromkeys(report.layer.name for report in reports)
    names = list(layers)
    formats = dict.fromkeys(report.format for report in reports)
    count = len(formats)
    figure, ax = style.subplots(size=(9.0, 4.2))
    for i, format_name in enumerate(formats):
        format_reports = [report for report in reports if report.format == format_name]
        # A layer that the format cannot be used for has no decibels.
        measured = [report for report in format_reports if report.decibels]
        options: Options = {
            "color": style.shade(i, count),
            "marker": _MARKS[i % len(_MARKS)],
            "markersize": 5,
        }
        ax.plot([], [], linewidth=1, label=format_name, **options)  # only for the legend
        _format_line(ax, measured, names, options)
    every = math.ceil(len(names) / _MAX_NAMES)
    ticks = range(0, len(names), every)
    tick_names = names[::every]
    ax.set_xticks(ticks, tick_names, **style.SLANTED)
    x_label = "layer (open marker: left in 16 bits)"
    style.label(ax, x_label, "SQNR of the worst matmul in dB")
    style.legend_beside(figure, "outside right upper")
    return figure


def _format_line(ax: Axes, reports: Sequence[Any], names: list[str], options: Options) -> None:
    """Draw a line through the layers of one format, and a marker on each: open if in 16 bits.

    `reports` are those of the format, and `names` the layers along the x axis. `options` is that of
    the markers.
    """
    colour = options["color"]
    positions, decibels = _points(reports, names)
    ax.plot(positions, decibels, color=colour, linewidth=1)
    left_out = [report for report in reports if report.left_out]
    converted = [report for report in reports if not report.left_out]
    for group, fill in ((left_out, "white"), (converted, colour)):
        positions, decibels = _points(group, names)
        markers: Options = {"linestyle": "none", "markerfacecolor": fill, **options}
        ax.plot(positions, decibels, **markers)


def _points(reports: Sequence[Any], names: list[str]) -> _Points:
    """The position of each report's layer on the x axis, and the SQNR in dB of its worst matmul.

    `names` are the layers along the axis.
    """
    positions: list[int] = []
    decibels: list[float] = []
    for report in reports:
        position = names.index(report.layer.name)
        _, worst_decibels = report.worst  # the matmul, and its SQNR
        positions.append(position)
        decibels.append(worst_decibels)
    return positions, decibels

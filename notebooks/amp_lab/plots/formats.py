"""Errors of formats below 16 bits."""

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from amp_lab.plots import style

_MARKS = "osD^vPX<>"


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
        colour = colormaps["viridis"](0.9 * i / max(1, len(forms) - 1))
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

"""How two runs of a model move away from the exact one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from amp_lab.plots import style


def error_growth(steps: Sequence[Any], parts_at: str | None = None) -> Figure:
    """Relative errors of both runs after each op, and the difference of their exact results.

    `steps` have ``module``, ``op``, ``a``, ``b`` and ``apart``; the first in the module `parts_at`
    is marked. Errors of exactly zero have no place on the logarithmic axis and are left out.
    """
    figure, ax = style.subplots(size=(9.0, 3.8))
    curves = {
        "A against fp64": ([step.a for step in steps], style.COLOURS["fp32"], "-"),
        "B against fp64": ([step.b for step in steps], style.COLOURS["bf16"], "--"),
        "A against B, both in fp64": ([step.apart for step in steps], style.SECOND, ":"),
    }
    for name, (values, colour, dash) in curves.items():
        shown = {n: value for n, value in enumerate(values) if 0 < value < math.inf}
        marker = "o" if len(shown) < 40 else None
        look: style.Look = {"linestyle": dash, "marker": marker, "color": colour}
        if shown:
            ax.plot(list(shown), list(shown.values()), markersize=3, label=name, **look)
    ax.set_yscale("log")
    marked = [n for n, step in enumerate(steps) if step.module == parts_at]
    if marked:
        at = marked[0]
        ax.axvline(at, color=style.GUIDE, linewidth=1)
        side = "right" if at > len(steps) / 2 else "left"
        place: style.Look = {"ha": side, "va": "bottom", "transform": ax.get_xaxis_transform()}
        ax.text(at, 1.01, f"part in {parts_at or 'the model itself'}", fontsize=9, **place)
    _name_modules(ax, steps)
    style.label(ax, "module", "relative error after each op")
    style.legend_beside(figure, "outside lower center", ncols=3)
    return figure


def gap_and_change(gap: Tensor, moved: Mapping[str, Tensor]) -> Axes:
    """How far runs moved the gap between each input's two best classes, over that gap.

    Above the dashed line a decision can change.
    """
    _, ax = style.subplots(size=(8.5, 4.0))
    for (name, change), mark in zip(moved.items(), "o+x", strict=False):
        ax.plot(gap, change, mark, markersize=4, alpha=0.6, label=name)
    ends = [float(gap.min()), float(gap.max())]
    ax.plot(ends, ends, "--", color=style.GUIDE, label="as far as the gap")
    ax.set(xscale="log", yscale="log")
    return style.label(ax, "gap between the two best classes in fp32", "moved by", legend="best")


def _name_modules(ax: Any, steps: Sequence[Any]) -> None:
    """A tick where a module begins, up to a dozen."""
    shown: list[int] = []
    for n, step in enumerate(steps):
        begins = not n or step.module != steps[n - 1].module
        has_room = not shown or n - shown[-1] >= len(steps) / 12
        if begins and has_room:
            shown.append(n)
    names = [steps[n].module or "(model)" for n in shown]
    ax.set_xticks(shown, names, rotation=30, ha="right", fontsize=9)

"""How two runs of a model move away from the exact one."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Look, Values


def error_growth(steps: Sequence[Any], parts_at: str | None = None) -> Figure:
    """Relative errors of both runs after each op, and the difference of their exact results.

    `steps` have ``module``, ``op``, ``a``, ``b`` and ``apart``; the first in the module `parts_at`
    is marked. Errors of exactly zero have no place on the logarithmic axis and are left out.
    """
    figure, ax = style.subplots(size=(9.0, 3.8))
    of_a = [step.a for step in steps]
    of_b = [step.b for step in steps]
    apart = [step.apart for step in steps]
    _error_curve(ax, "A against fp64", of_a, COLOURS["fp32"], "-")
    _error_curve(ax, "B against fp64", of_b, COLOURS["bf16"], "--")
    _error_curve(ax, "A against B, both in fp64", apart, style.SECOND, ":")
    ax.set_yscale("log")
    modules = [step.module for step in steps]
    if parts_at in modules:
        at = modules.index(parts_at)
        name = parts_at or "the model itself"
        _mark(ax, at, name, of=len(steps))
    _name_modules(ax, modules)
    style.label(ax, "module", "relative error after each op")
    style.legend_beside(figure, "outside lower center", ncols=3)
    return figure


def _error_curve(ax: Axes, name: str, errors: Values, colour: str, dash: str) -> None:
    """A line through the errors that a logarithmic axis has; nothing if there are none."""
    shown: dict[int, float] = {}
    for n, error in enumerate(errors):
        if 0 < error < math.inf:
            shown[n] = error
    if not shown:
        return
    marker = None
    if len(shown) < 40:  # more of them would run into each other
        marker = "o"
    at = list(shown)
    values = list(shown.values())
    look: Look = {
        "linestyle": dash,
        "marker": marker,
        "markersize": 3,
        "color": colour,
    }
    ax.plot(at, values, label=name, **look)


def _mark(ax: Axes, at: int, module: str, of: int) -> None:
    """A line where two runs part, and its name above, on the side that has more room."""
    ax.axvline(at, color=style.GUIDE, linewidth=1)
    side = "left"
    if at > of / 2:
        side = "right"
    above: Look = {
        "ha": side,
        "va": "bottom",
        "transform": ax.get_xaxis_transform(),
        "fontsize": 9,
    }
    text = f"part in {module}"
    ax.text(at, 1.01, text, **above)


def _name_modules(ax: Axes, modules: Sequence[str]) -> None:
    """A tick where a module begins, up to a dozen; `modules` has that of each op."""
    names: dict[int, str] = {}
    least_distance = len(modules) / 12
    before = None
    latest = -math.inf
    for n, module in enumerate(modules):
        begins = module != before
        before = module
        has_room = n - latest >= least_distance
        if begins and has_room:
            names[n] = module or "(model)"
            latest = n
    places = list(names)
    texts = list(names.values())
    ax.set_xticks(places, texts, **style.SLANTED)

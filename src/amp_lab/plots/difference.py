"""How the errors of two runs of a model grow from op to op."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import COLOURS, Options, Values


def error_growth(steps: Sequence[Any], parts_at: str | None = None) -> Figure:
    """Draw the relative errors of runs A and B after each op, and the gap between exact results.

    A step has ``module``, the errors ``a`` and ``b``, and ``apart``, the difference in fp64.
    `parts_at` is the module where the runs diverge, if they do; "" is the model itself. The figure
    marks the first step in this module. Errors of 0 are left out, because the axis is logarithmic.
    """
    figure, ax = style.subplots(size=(9.0, 3.8))
    errors_a = [step.a for step in steps]
    errors_b = [step.b for step in steps]
    differences = [step.apart for step in steps]
    _error_curve(ax, "A against fp64", errors_a, COLOURS["fp32"], "-")
    _error_curve(ax, "B against fp64", errors_b, COLOURS["bf16"], "--")
    _error_curve(ax, "A against B, both in fp64", differences, style.SECOND, ":")
    ax.set_yscale("log")
    modules = [step.module for step in steps]
    if parts_at in modules:
        first_step = modules.index(parts_at)
        name = parts_at or "the model itself"
        _mark_divergence(ax, first_step, name, steps=len(steps))
    _name_modules(ax, modules)
    style.label(ax, "module", "relative error after each op")
    style.legend_beside(figure, "outside lower center", ncols=3)
    return figure


def _error_curve(ax: Axes, name: str, errors: Values, colour: str, dash: str) -> None:
    """Draw a line through the errors that are positive and finite, if there are any.

    `errors` has one for each step; `dash` is a linestyle of matplotlib.
    """
    error_of: dict[int, float] = {}
    for step, error in enumerate(errors):
        if 0 < error < math.inf:
            error_of[step] = error
    if not error_of:
        return
    marker = None
    if len(error_of) < 40:  # more markers would overlap
        marker = "o"
    steps = list(error_of)
    values = list(error_of.values())
    options: Options = {
        "linestyle": dash,
        "marker": marker,
        "markersize": 3,
        "color": colour,
    }
    ax.plot(steps, values, label=name, **options)


def _mark_divergence(ax: Axes, step: int, module: str, steps: int) -> None:
    """Draw a vertical line at the step where two runs diverge, and the module's name above it.

    `steps` is the number of all steps.
    """
    ax.axvline(step, color=style.GUIDE, linewidth=1)
    side = "left"  # the side of the text that is at the line
    if step > steps / 2:  # the text goes where there is more room
        side = "right"
    above: Options = {
        "ha": side,
        "va": "bottom",
        "transform": ax.get_xaxis_transform(),
        "fontsize": 9,
    }
    text = f"diverge in {module}"
    ax.text(step, 1.01, text, **above)  # y = 1 is the top of the axes


def _name_modules(ax: Axes, modules: Sequence[str]) -> None:
    """Write names of modules below the x axis, at most a dozen, each where its module begins.

    `modules` has the name of the module of each step.
    """
    names: dict[int, str] = {}  # by step
    min_distance = len(modules) / 12  # in steps
    previous_module = None
    last_tick = -math.inf
    for step, module in enumerate(modules):
        is_begin = module != previous_module
        previous_module = module
        has_room = step - last_tick >= min_distance
        if is_begin and has_room:
            names[step] = module or "(model)"
            last_tick = step
    ticks = list(names)
    texts = list(names.values())
    ax.set_xticks(ticks, texts, **style.SLANTED)

"""How two runs of a model move away from the exact one."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from torch import Tensor

from amp_lab.plots import style
from amp_lab.plots.style import Look


def gap_and_change(gap: Tensor, moved: Mapping[str, Tensor]) -> Axes:
    """How far runs moved the gap between each input's two best classes, over that gap.

    Above the dashed line a decision can change.
    """
    _, ax = style.subplots(size=(8.5, 4.0))
    dots: Look = {"markersize": 4, "alpha": 0.6}
    for (name, change), mark in zip(moved.items(), "o+x", strict=False):
        ax.plot(gap, change, mark, label=name, **dots)
    smallest = float(gap.min())
    largest = float(gap.max())
    ends = [smallest, largest]
    ax.plot(ends, ends, "--", color=style.GUIDE, label="as far as the gap")
    ax.set_xscale("log")
    ax.set_yscale("log")
    x_label = "gap between the two best classes in fp32"
    return style.label(ax, x_label, "moved by", legend="best")

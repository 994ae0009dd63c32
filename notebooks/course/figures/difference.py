"""Differences between runs that are large enough to change decisions."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from torch import Tensor

from amp_lab.plots import style
from amp_lab.plots.style import Options


def gap_and_change(gap: Tensor, changes: Mapping[str, Tensor]) -> Axes:
    """Change of the gap between each input's two best classes, against the gap in fp32.

    `gap` (N,) is that of each input; `changes[name]` (N,) is by how much a run moved it. Above the
    dashed line a decision can change.
    """
    _, ax = style.subplots(size=(8.5, 4.0))
    dots: Options = {"markersize": 4, "alpha": 0.6}
    for (name, change), marker in zip(changes.items(), "o+x", strict=False):
        ax.plot(gap, change, marker, label=name, **dots)
    smallest = float(gap.min())
    largest = float(gap.max())
    ends = [smallest, largest]
    ax.plot(ends, ends, "--", color=style.GUIDE, label="change equal to the gap")
    ax.set_xscale("log")
    ax.set_yscale("log")
    x_label = "gap between the two best classes in fp32"
    return style.label(ax, x_label, "change of the gap", legend="best")

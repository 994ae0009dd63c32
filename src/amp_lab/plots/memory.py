"""Memory, and what ranks send each other."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from amp_lab.plots import style
from amp_lab.plots.style import Look, Values

_GIB = 2**30
_DASHES = {
    "fp32": "-",
    "tf32": style.LONG_DASH,
    "fp16": "--",
    "bf16": ":",
}
# Of a number: x is a share of the axes' width, and y a value; then so many points to the right.
_AT_LEFT_END: Look = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "xytext": (6, 3),
}


def memory_against_batch(
    curves: Mapping[str, tuple[Sequence[int], Values]], limit: float | None = None
) -> Axes:
    """Peak memory of a step, `curves[precision]` as (batches, bytes); `limit` is the card's."""
    _, ax = style.subplots(size=(7.0, 3.2))
    for precision, (batches, peaks) in curves.items():
        gib: dict[int, float] = {}
        for batch, peak in zip(batches, peaks, strict=True):
            gib[batch] = peak / _GIB
        curve = {precision: gib}
        style.lines(ax, curve, _DASHES, linewidth=2)
    if limit is not None:
        _limit_line(ax, limit / _GIB)
    ax.set_xlim(left=0)  # memory that no sample needs is where the lines meet the axis
    ax.set_ylim(bottom=0)
    y_label = "peak memory of a step (GiB)"
    return style.label(ax, "batch", y_label, legend="lower right")


def _limit_line(ax: Axes, gib: float) -> None:
    """A line where the memory of the card ends, with a text at its left end."""
    ax.axhline(gib, color="black", linewidth=1)
    text = f"the card: {gib:.3g} GiB"
    left_end = (0, gib)
    ax.annotate(text, left_end, **_AT_LEFT_END)

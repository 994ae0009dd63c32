"""Memory, and communication between ranks."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from amp_lab.plots import style
from amp_lab.plots.style import Options, Values

_GIB = 2**30
_DASHES = {
    "fp32": "-",
    "tf32": style.LONG_DASH,
    "fp16": "--",
    "bf16": ":",
}
# A text 6 points right of and 3 above (0, y), where y is a value and 0 the left end of the axes.
_AT_LEFT_END: Options = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "xytext": (6, 3),
}


def memory_against_batch(
    curves: Mapping[str, tuple[Sequence[int], Values]], limit: float | None = None
) -> Axes:
    """Draw the peak memory of a step against the batch: `curves[precision]` is (batches, bytes).

    `limit` is the memory of the GPU in bytes.
    """
    _, ax = style.subplots(size=(7.0, 3.2))
    for precision, (batches, peaks) in curves.items():
        gib_of: dict[int, float] = {}
        for batch, peak in zip(batches, peaks, strict=True):
            gib_of[batch] = peak / _GIB
        curve = {precision: gib_of}
        style.lines(ax, curve, _DASHES, linewidth=2)
    if limit is not None:
        _limit_line(ax, limit / _GIB)
    ax.set_xlim(left=0)  # at x = 0 a line shows the memory that does not depend on the batch
    ax.set_ylim(bottom=0)
    y_label = "peak memory of a step (GiB)"
    return style.label(ax, "batch", y_label, legend="lower right")


def _limit_line(ax: Axes, gib: float) -> None:
    """Draw a horizontal line at the memory of the GPU in GiB, with a text at its left end."""
    ax.axhline(gib, color="black", linewidth=1)
    text = f"memory of the GPU: {gib:.3g} GiB"
    left_end = (0, gib)
    ax.annotate(text, left_end, **_AT_LEFT_END)

"""Memory, and what ranks send each other."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import Bars, Options

_KIB = 2**10
_MIB = 2**20
_GIB = 2**30
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_BEHIND_LIMIT: Options = {"color": "white", "linewidth": 4}  # so that the line shows on a dark bar
_LIMIT: Options = {
    "color": "black",
    "linestyle": "--",
    "linewidth": 1.5,
}
_IN_A_BAR: Options = {
    "fontsize": 8,
    "linespacing": 0.9,
    # so that the hatch does not cross the letters
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1},
    **style.CENTRED,
}
BytesOf = Mapping[str, float]
"""{what the memory holds: bytes}."""
Sent = Sequence[tuple[str, str, int]]
"""(collective, dtype, bytes) of each kind of message."""


def memory_by_dtype(
    panels: Mapping[str, Mapping[str, Any]], limit: float, limit_label: str
) -> Figure:
    """Bars {panel: {name: tensors}} of memory, split by dtype, beside a limit in bytes.

    `tensors` has an attribute `peak`, a list of (shape, dtype, bytes).
    """
    count = len(panels)
    figure, axes = style.columns(count, size=(9.0, 2.9))
    limit_gib = limit / _GIB
    for ax, title, setups in style.by_panel(axes, panels):
        for row, tensors in enumerate(setups.values()):
            bars = _by_dtype(tensors.peak)
            style.stacked(ax, row, bars)
        # The line of the limit on a wider white one.
        ax.axvline(limit_gib, **_BEHIND_LIMIT)
        ax.axvline(limit_gib, **_LIMIT)
        rows = range(len(setups))
        names = list(setups)
        ax.set_yticks(rows, names)
        ax.invert_yaxis()
        ax.set_xlabel("peak memory of a step (GiB)")
        ax.set_title(title, fontsize=11, pad=20)  # room for the label of the limit
        above = ax.get_xaxis_transform()  # x in GiB, y as a share of the height
        ax.text(limit_gib, 1.02, limit_label, transform=above, ha="center")
    style.legend_beside(figure, "outside lower center", ncols=4)
    return figure


def _by_dtype(peak: Iterable[tuple[Any, Any, int]]) -> Bars:
    """GiB and options of tensors of each precision; `peak` has (shape, dtype, bytes) of each."""
    gib_of = dict.fromkeys(_PRECISIONS.values(), 0.0)
    gib_of["integers"] = 0.0
    for _, dtype, nbytes in peak:
        dtype_name = str(dtype).removeprefix("torch.")
        name = _PRECISIONS.get(dtype_name, "integers")
        gib_of[name] += nbytes / _GIB
    bars: Bars = []
    for name, gib in gib_of.items():
        if not gib:
            continue
        label = None
        if gib > 0.1:  # a smaller segment cannot be seen, so it is not in the legend
            label = name
        options = style.precision_options(name, height=0.6, label=label)
        bars.append((gib, options))
    return bars


def bytes_per_parameter(setups: Mapping[str, BytesOf]) -> Axes:
    """Stacked bars of what is held for one parameter: `setups[name][part]` in bytes."""
    height = 0.46 * len(setups) + 1.0
    figure, ax = style.subplots(size=(8.5, height))
    parts: dict[str, None] = {}  # used as an ordered set
    for bytes_of in setups.values():
        parts |= dict.fromkeys(bytes_of)
    greys = style.FIVE_PARTS[: len(parts)]
    segments = style.segment_options(parts, greys)
    for options in segments.values():
        options["height"] = 0.75  # leaves a gap between the rows
    for y, bytes_of in enumerate(setups.values()):
        bars: Bars = []
        for part, options in segments.items():
            nbytes = bytes_of.get(part, 0)  # not every set-up has all parts
            bars.append((nbytes, options))
        style.stacked(ax, y, bars, "{:.3g}", size=11)
    names = list(setups)
    style.name_rows(ax, names, room=0.08, fontsize=11)
    ticks = range(0, 21, 4)
    ax.set_xticks(ticks)
    ax.set_xlabel("held for each parameter when the optimizer steps (bytes)")
    style.legend_beside(figure, "outside right upper")
    return ax


def sent_bytes(setups: Mapping[str, Sent], ranks: int) -> Axes:
    """Stacked bars of what a rank sends a step: `setups[name]` has (collective, dtype, bytes)."""
    height = 0.48 * len(setups) + 1.0
    figure, ax = style.subplots(size=(8.5, height))
    longest = max(map(_total_kib, setups.values()))
    for y, sent in enumerate(setups.values()):
        bars: Bars = []
        for _, dtype, nbytes in sent:
            kib = nbytes / _KIB
            options = style.precision_options(dtype, height=0.75, linewidth=1.5, label=dtype)
            bars.append((kib, options))
        style.stacked(ax, y, bars, "{:,.0f}")
        _name_collectives(ax, y, sent, min_kib=longest / 8)  # a shorter one has no room for it
    names = list(setups)
    style.name_rows(ax, names, room=0.08)
    ax.set_xlabel(f"sent by each of {ranks} ranks in a step (KiB)")
    style.legend_beside(figure, "outside right upper")
    return ax


def _total_kib(sent: Sent) -> float:
    nbytes = sum(nbytes for _, _, nbytes in sent)
    return nbytes / _KIB


def _name_collectives(ax: Axes, y: float, sent: Sent, min_kib: float) -> None:
    """Write the name of the collective on each segment of a bar that is longer than `min_kib`."""
    end = 0.0
    for collective, _, nbytes in sent:
        kib = nbytes / _KIB
        end += kib
        if kib <= min_kib:
            continue
        name = collective.replace("_", "-\n")  # all-gather on two lines
        middle = end - kib / 2
        ax.text(middle, y, name, **_IN_A_BAR)

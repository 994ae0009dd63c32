"""Memory, and what ranks send each other."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_lab.plots import style
from amp_lab.plots.style import Look, Values


def memory_by_dtype(
    panels: Mapping[str, Mapping[str, Any]], limit: float, limit_label: str
) -> Figure:
    """Bars {panel: {name: tensors}} of memory, split by dtype, beside a limit in bytes.

    `tensors` has an attribute `peak`, a list of (shape, dtype, bytes).
    """
    figure, axes = style.subplots(1, len(panels), size=(9.0, 2.9), squeeze=False)
    for ax, (title, setups) in zip(axes[0], panels.items(), strict=True):
        for row, tensors in enumerate(setups.values()):
            style.stacked(ax, row, _by_dtype(tensors.peak))
        ax.axvline(limit / 2**30, color="white", linewidth=4)  # shows the line on a dark bar
        ax.axvline(limit / 2**30, color="black", linestyle="--", linewidth=1.5)
        ax.set_yticks(range(len(setups)), list(setups))
        ax.invert_yaxis()
        ax.set_xlabel("peak memory of a step (GiB)")
        ax.set_title(title, fontsize=11, pad=20)
        ax.text(limit / 2**30, 1.02, limit_label, transform=ax.get_xaxis_transform(), ha="center")
    style.legend_beside(figure, "outside lower center", ncols=4)
    return figure


def _by_dtype(peak: Iterable[tuple[Any, Any, int]]) -> list[tuple[float, Look]]:
    """GiB and look of each kind of tensors; too small to be seen, it stays out of the legend."""
    kinds = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    sizes = dict.fromkeys((*kinds.values(), "integers"), 0.0)
    for _, dtype, size in peak:
        name = str(dtype).removeprefix("torch.")
        sizes[kinds.get(name, "integers")] += size / 2**30
    bars = []
    for kind, size in sizes.items():
        label = kind if size > 0.1 else None
        if size:
            bars.append((size, style.look_of(kind, height=0.6, label=label)))
    return bars


def memory_against_batch(
    curves: Mapping[str, tuple[Sequence[int], Values]], limit: float | None = None
) -> Axes:
    """Peak memory of a step, `curves[precision]` as (batches, bytes); `limit` is the card's."""
    _, ax = style.subplots(size=(7.0, 3.2))
    dashes = {"fp32": "-", "tf32": (0, (5, 1)), "fp16": "--", "bf16": ":"}
    for precision, (batches, peaks) in curves.items():
        gib = {batch: peak / 2**30 for batch, peak in zip(batches, peaks, strict=True)}
        style.lines(ax, {precision: gib}, dashes, linewidth=2)
    if limit is not None:
        gib = limit / 2**30
        ax.axhline(gib, color="black", linewidth=1)
        where: Look = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        ax.annotate(f"the card: {gib:.3g} GiB", (0, gib), xytext=(6, 3), **where)
    ax.set_xlim(left=0)  # memory that no sample needs is where the lines meet the axis
    ax.set_ylim(bottom=0)
    return style.label(ax, "batch", "peak memory of a step (GiB)", legend="lower right")


def memory_per_rank(engines: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Figure:
    """Stacked bars of memory against the number of ranks: `engines[name][ranks][part]` in bytes."""
    figure, axes = style.subplots(1, len(engines), size=(8.0, 3.2), sharey=True, squeeze=False)
    for ax, (title, sizes) in zip(axes[0], engines.items(), strict=True):
        for x, parts in enumerate(sizes.values()):
            looks = style.part_looks(parts, style.THREE_PARTS)
            mib = [(parts[part] / 2**20, look | {"width": 0.6}) for part, look in looks.items()]
            style.stacked(ax, x, mib, "{:.3g}")
        ax.set_xticks(range(len(sizes)), list(sizes))
        ax.set_xlabel("ranks")
        ax.set_title(title, fontsize=11)
        ax.margins(y=0.15)  # room for the number above the highest bar
    axes[0, 0].set_ylabel("memory of a rank (MiB)")
    style.legend_beside(figure, "outside right upper", reverse=True)  # the last part is on top
    return figure


def bytes_per_parameter(setups: Mapping[str, Mapping[str, float]]) -> Axes:
    """Stacked bars of what is held for one parameter: `setups[name][part]` in bytes."""
    figure, ax = style.subplots(size=(8.5, 0.46 * len(setups) + 1.0))
    parts = dict.fromkeys(part for sizes in setups.values() for part in sizes)
    looks = style.part_looks(parts, style.FIVE_PARTS[: len(parts)])
    for y, sizes in enumerate(setups.values()):
        held = [(sizes.get(part, 0), look | {"height": 0.75}) for part, look in looks.items()]
        style.stacked(ax, y, held, "{:.3g}", size=11)
    style.name_rows(ax, list(setups), room=0.08, fontsize=11)
    ax.set_xticks(range(0, 21, 4))
    ax.set_xlabel("held for each parameter when the optimizer steps (bytes)")
    style.legend_beside(figure, "outside right upper")
    return ax


def _total(parts: Sequence[tuple[str, str, int]]) -> int:
    return sum(size for _, _, size in parts)


def sent_bytes(setups: Mapping[str, Sequence[tuple[str, str, int]]], ranks: int) -> Axes:
    """Stacked bars of what a rank sends a step: `setups[name]` has (collective, dtype, bytes)."""
    figure, ax = style.subplots(size=(8.5, 0.48 * len(setups) + 1.0))
    totals = [_total(parts) for parts in setups.values()]
    longest = max(totals) / 2**10
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # keeps the hatch off the letters
    inside: Look = {"ha": "center", "va": "center", "fontsize": 8, "linespacing": 0.9, "bbox": box}
    for y, parts in enumerate(setups.values()):
        looks = [style.look_of(d, height=0.75, linewidth=1.5, label=d) for _, d, _ in parts]
        kib = [size / 2**10 for *_, size in parts]
        style.stacked(ax, y, list(zip(kib, looks, strict=True)), "{:,.0f}")
        for end, size, (kind, *_) in zip(accumulate(kib), kib, parts, strict=True):
            if size > longest / 8:  # a shorter bar has no room for its name
                ax.text(end - size / 2, y, kind.replace("_", "-\n"), **inside)
    style.name_rows(ax, list(setups), room=0.08)
    ax.set_xlabel(f"sent by each of {ranks} ranks in a step (KiB)")
    style.legend_beside(figure, "outside right upper")
    return ax

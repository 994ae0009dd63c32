"""Memory, and what ranks send each other."""

import matplotlib.pyplot as plt

from amp_lab.plots.style import COLOURS, HATCHES


def memory_by_dtype(panels, limit, limit_label) -> plt.Figure:
    """Bars {panel: {name: tensors}} of memory, split by dtype, beside a limit in bytes.

    `tensors` has an attribute `peak`, a list of (shape, dtype, bytes). Each panel has its own axis.
    """
    looks = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    figure, axes = plt.subplots(1, len(panels), figsize=(9.0, 2.9), squeeze=False)
    for ax, (title, bars) in zip(axes[0], panels.items(), strict=True):
        for row, tensors in enumerate(bars.values()):
            sizes = {}
            for _, dtype, size in tensors.peak:
                look = looks.get(str(dtype).removeprefix("torch."), "integers")
                sizes[look] = sizes.get(look, 0) + size / 2**30
            left = 0
            for look in sorted(sizes, key=["fp32", "bf16", "fp16", "integers"].index):
                ax.barh(
                    row,
                    sizes[look],
                    left=left,
                    height=0.6,
                    color=COLOURS.get(look, "0.75"),
                    hatch=HATCHES.get(look, ".."),
                    edgecolor="white",
                    label=look if sizes[look] > 0.1 else None,
                )
                left += sizes[look]
        ax.axvline(limit / 2**30, color="white", linewidth=4)  # shows the line on a dark bar
        ax.axvline(limit / 2**30, color="black", linestyle="--", linewidth=1.5)
        ax.set_yticks(range(len(bars)), list(bars))
        ax.invert_yaxis()
        ax.set_xlabel("peak memory of a step (GiB)")
        ax.set_title(title, fontsize=11, pad=20)
        ax.text(limit / 2**30, 1.02, limit_label, transform=ax.get_xaxis_transform(), ha="center")
    labels = {}
    for ax in axes[0]:
        labels |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels))
    return figure


def memory_against_batch(curves, limit=None) -> plt.Axes:
    """Peak memory of a step against the batch; `curves[precision]` is (batches, bytes).

    `limit` is the memory of the card in bytes. What lies above it does not fit.
    """
    _, ax = plt.subplots(figsize=(7.0, 3.2))
    lines = {"fp32": "-", "tf32": (0, (5, 1)), "fp16": "--", "bf16": ":"}
    for precision, (batches, peaks) in curves.items():
        ax.plot(
            batches,
            [peak / 2**30 for peak in peaks],
            color=COLOURS[precision],
            linestyle=lines[precision],
            linewidth=2,
            label=precision,
        )
    if limit is not None:
        limit /= 2**30
        ax.axhline(limit, color="black", linewidth=1)
        ax.annotate(
            f"the card: {limit:.3g} GiB",
            (0, limit),
            xycoords=("axes fraction", "data"),
            xytext=(6, 3),
            textcoords="offset points",
        )
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("batch")
    ax.set_ylabel("peak memory of a step (GiB)")
    ax.legend(loc="lower right")
    return ax


def memory_per_rank(engines) -> plt.Figure:
    """Stacked bars of memory against the number of ranks: `engines[name][ranks][part]` in bytes."""
    figure, axes = plt.subplots(1, len(engines), figsize=(8.0, 3.2), sharey=True, squeeze=False)
    looks = [("0.15", ""), ("0.5", "//"), ("0.8", "..")]
    for ax, (title, sizes) in zip(axes[0], engines.items(), strict=True):
        for x, parts in enumerate(sizes.values()):
            bottom = 0
            for (part, size), (grey, hatch) in zip(parts.items(), looks, strict=True):
                ax.bar(
                    x,
                    size / 2**20,
                    0.6,
                    bottom=bottom / 2**20,
                    color=grey,
                    hatch=hatch,
                    edgecolor="white",
                    label=part if x == 0 else None,
                )
                bottom += size
            ax.annotate(
                f"{bottom / 2**20:.3g}",
                (x, bottom / 2**20),
                ha="center",
                va="bottom",
                xytext=(0, 3),
                textcoords="offset points",
            )
        ax.set_xticks(range(len(sizes)), list(sizes))
        ax.set_xlabel("ranks")
        ax.set_title(title, fontsize=11)
        ax.margins(y=0.15)
    axes[0, 0].set_ylabel("memory of a rank (MiB)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(reversed(handles), reversed(labels), loc="outside right upper")
    return figure


def bytes_per_parameter(setups) -> plt.Axes:
    """Stacked bars of what is held for one parameter: `setups[name][part]` in bytes."""
    _, ax = plt.subplots(figsize=(8.5, 0.46 * len(setups) + 1.0))
    looks = [("0.1", ""), ("0.45", "//"), ("0.65", "xx"), ("0.75", ""), ("0.9", "..")]
    parts = dict.fromkeys(part for sizes in setups.values() for part in sizes)
    for y, sizes in enumerate(setups.values()):
        left = 0
        for part, (grey, hatch) in zip(parts, looks, strict=True):
            size = sizes.get(part, 0)
            look = {"color": grey, "hatch": hatch, "edgecolor": "white"}
            ax.barh(y, size, 0.75, left=left, label=None if y else part, **look)
            left += size
        ax.annotate(f" {left:.0f}", (left, y), va="center")
    ax.set_yticks(range(len(setups)), list(setups))
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=0.08)
    ax.set_xticks(range(0, 21, 4))
    ax.set_xlabel("held for each parameter when Adam steps (bytes)")
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return ax


def sent_bytes(setups, ranks) -> plt.Axes:
    """Stacked bars of what a rank sends in a step; `setups[name]` lists (collective, dtype, bytes).

    A dtype is a key of `COLOURS`. The number of ranks stands on the axis.
    """
    _, ax = plt.subplots(figsize=(8.5, 0.48 * len(setups) + 1.0))
    seen = {}
    longest = max(sum(size for *_, size in parts) for parts in setups.values())
    for y, parts in enumerate(setups.values()):
        left = 0
        for kind, dtype, size in parts:
            look = {"color": COLOURS[dtype], "hatch": HATCHES[dtype], "edgecolor": "white"}
            seen[dtype] = ax.barh(y, size / 2**10, 0.75, left=left / 2**10, linewidth=1.5, **look)
            if size > longest / 8:
                ax.text(
                    (left + size / 2) / 2**10,
                    y,
                    kind.replace("_", "-\n"),
                    ha="center",
                    va="center",
                    fontsize=8,
                    linespacing=0.9,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )
            left += size
        ax.annotate(f" {left / 2**10:,.0f}", (left / 2**10, y), va="center", fontsize=9)
    ax.set_yticks(range(len(setups)), list(setups), fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=0.08)
    ax.set_xlabel(f"sent by each of {ranks} ranks in a step (KiB)")
    ax.figure.legend(seen.values(), seen.keys(), loc="outside right upper")
    return ax

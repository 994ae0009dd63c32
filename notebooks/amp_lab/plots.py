"""Every figure of the notebooks, in one style that also reads in greyscale."""

import math

import matplotlib.pyplot as plt

# One look per precision in every figure. The colours differ in lightness too, and bars are hatched.
COLOURS = {
    "fp32": "#1b1b3a",
    "tf32": "#4a4e9e",
    "bf16": "#d9822b",
    "fp16": "#b3446c",
    "fp8": "#8fbcbb",
}
HATCHES = {"fp32": "", "tf32": "..", "bf16": "//", "fp16": "xx", "fp8": "--"}


def use_style() -> None:
    """Set the collection's matplotlib style for this process; call it once, at the top."""
    plt.rcParams.update(
        {
            "figure.dpi": 80,
            "figure.figsize": (8.0, 3.5),
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": False,
            "legend.frameon": False,
        }
    )


def scale_over_time(scales, skipped) -> plt.Axes:
    """The loss scale before each step, on a log2 axis, and the steps that were skipped."""
    _, ax = plt.subplots()
    ax.step(range(len(scales)), scales, where="mid", color=COLOURS["fp16"], label="loss scale")
    ax.plot(
        skipped,
        [scales[step] for step in skipped],
        "x",
        color="black",
        markersize=8,
        label="step skipped",
    )
    ax.set_yscale("log", base=2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend(loc="lower right")
    return ax


def picture_problem(inputs, target) -> plt.Figure:
    """The inputs (1, 2, H, W) and the target (1, 1, H, W) of the quantized-sine problem."""
    return side_by_side({"input: x": inputs[:, :1], "input: y": inputs[:, 1:], "target": target})


def side_by_side(pictures) -> plt.Figure:
    """Pictures {title: (1, 1, H, W)} with values in [0, 1], on one grey scale."""
    figure, axes = plt.subplots(1, len(pictures), figsize=(2.6 * len(pictures) + 0.8, 3.0))
    for ax, (title, picture) in zip(axes, pictures.items(), strict=True):
        image = ax.imshow(picture[0, 0].cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        ax.set_title(title)
        ax.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8, label="brightness")
    return figure


def loss_curves(losses) -> plt.Axes:
    """Losses {precision: (seeds, epochs)}: their mean, and a band from lowest to highest seed."""
    _, ax = plt.subplots()
    lines = ["-", "--", ":", "-."]
    for (precision, loss), line in zip(losses.items(), lines, strict=False):
        loss, colour = loss.numpy(), COLOURS[precision]
        epochs = range(1, loss.shape[1] + 1)
        ax.fill_between(epochs, loss.min(0), loss.max(0), color=colour, alpha=0.2, linewidth=0)
        ax.plot(epochs, loss.mean(0), line, color=colour, linewidth=2, label=precision)
    ax.set_yscale("log")
    ax.set_xlabel("epoch")
    ax.set_ylabel("loss (mean squared error)")
    ax.legend()
    return ax


def time_and_memory(milliseconds, mebibytes, memory_label) -> plt.Figure:
    """Bars of time {precision: ms} and memory {precision: MiB}, with their ratio to the first."""
    figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.0))
    for ax, values, label, ratio in (
        (
            axes[0],
            milliseconds,
            "time of a step (ms)",
            lambda value, first: f"{first / value:.2f}x as fast",
        ),
        (
            axes[1],
            mebibytes,
            f"memory, {memory_label} (MiB)",
            lambda value, first: f"{value / first:.0%}",
        ),
    ):
        first = next(iter(values.values()))
        for name, value in values.items():
            ax.bar(
                name, value, color=COLOURS[name], hatch=HATCHES[name], edgecolor="white", width=0.6
            )
            text = f"{value:.3g}" if value == first else f"{value:.3g}\n{ratio(value, first)}"
            ax.annotate(
                text,
                (name, value),
                ha="center",
                va="bottom",
                xytext=(0, 3),
                textcoords="offset points",
            )
        ax.set_ylabel(label)
        ax.margins(y=0.25)
    return figure


def range_and_spacing(formats) -> list[plt.Axes]:
    """Range (above) and relative spacing (below) of number formats, over one magnitude axis.

    `formats` maps a name, whose first word is a key of `COLOURS`, to a tuple: exponents of two from
    the smallest subnormal number to the largest, the spacing at each divided by its magnitude, and
    the exponent of the smallest normal number.
    """
    _, (above, below) = plt.subplots(2, sharex=True, figsize=(8.5, 6.5), height_ratios=[1, 1.3])
    dashes = ["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))]
    aside = {
        "fp16": -12,
        "fp8 E5M2": 5,
        "fp8 E4M3": -5,
    }  # points up: labels that would meet another line
    for row, (name, (exponents, spacing, normal)) in enumerate(formats.items()):
        kind = name.split()[0]
        low, high = exponents[0], exponents[-1] + 1
        above.barh(
            row,
            normal - low,
            left=low,
            height=0.6,
            color="white",
            edgecolor=COLOURS[kind],
            hatch="////",
        )
        above.barh(row, high - normal, left=normal, height=0.6, color=COLOURS[kind])
        above.text(high + 3, row, name, va="center")
        below.plot(
            exponents,
            spacing,
            color=COLOURS[kind],
            linestyle=dashes[row % len(dashes)],
            linewidth=2.5,
        )
        offset = (6, aside.get(name, 0))
        below.annotate(
            name,
            (high, spacing[-1]),
            xytext=offset,
            textcoords="offset points",
            va="center_baseline",
        )
    above.invert_yaxis()
    above.set_yticks([])
    above.set_title(
        "range: solid = normal numbers, hatched = subnormal numbers", loc="left", fontsize=11
    )
    below.set_title("spacing of neighbours, relative to their size", loc="left", fontsize=11)
    below.set_yscale("log", base=2)
    below.set_ylabel("spacing / magnitude")
    below.set_xticks(range(-150, 151, 25))
    below.set_xlim(-155, 165)
    below.set_xlabel("log2 of the magnitude")
    for ax in (above, below):
        ax.axvline(0, color="grey", linewidth=0.8, zorder=0)
    return [above, below]


def weight_over_updates(weights) -> plt.Axes:
    """A weight after each of many small updates; `weights` maps a precision to its history."""
    _, ax = plt.subplots()
    dashes = {"fp32": "-", "bf16": "--", "fp16": ":"}
    for name, history in weights.items():
        kind = name.split()[0]
        ax.plot(history, color=COLOURS[kind], linestyle=dashes[kind], linewidth=3, label=name)
    ax.set_xlabel("updates so far")
    ax.set_ylabel("weight")
    ax.legend(loc="upper left")
    return ax


def gradients_against_fp16(log2_magnitudes, scales) -> list[plt.Axes]:
    """Histograms of log2|gradient|, multiplied by each of `scales`, over the range of fp16.

    `log2_magnitudes` holds one value for each gradient that is not zero. What lies at or below
    2^-25 is zero in fp16, from there to 2^-14 subnormal, and from 65520 on infinite. What lies
    below 2^-60 is not drawn.
    """
    zero, normal, top = -25, -14, 16
    left, right = -60, 20
    _, axes = plt.subplots(
        len(scales), sharex=True, sharey=True, figsize=(8.0, 2.2 * len(scales) + 0.6)
    )
    for ax, scale in zip(axes, scales, strict=True):
        ax.axvspan(left, zero, color="0.80")
        ax.axvspan(zero, normal, color="0.91")
        ax.axvspan(top, right, color="0.80")
        ax.hist(
            log2_magnitudes + math.log2(scale), bins=range(left, right + 1), color=COLOURS["fp16"]
        )
        ax.set_title(rf"loss scale $2^{{{math.log2(scale):.0f}}}$", loc="left", fontsize=11)
        ax.set_ylabel("number of values")
        ax.margins(y=0.2)  # room for the names of the ranges
    for x, text in (
        (-42, "zero in fp16"),
        ((zero + normal) / 2, "subnormal"),
        (1, "normal"),
        (18, "inf"),
    ):
        axes[0].text(
            x,
            0.97,
            text,
            transform=axes[0].get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=10,
        )
    axes[-1].set_xlim(left, right)
    axes[-1].set_xlabel("log2 of |gradient × loss scale|")
    return list(axes)


def dtype_track(steps) -> plt.Axes:
    """The dtype of the values after each step of a network; `steps` is a list of (name, precision).

    Precisions are keys of `COLOURS`. fp32 runs along an upper lane, what is narrower along a lower.
    """
    _, ax = plt.subplots(figsize=(8.0, 2.4))
    names, precisions = zip(*steps, strict=True)
    lanes = [int(precision == "fp32") for precision in precisions]
    ax.plot(range(len(steps)), lanes, color="0.6", linewidth=1.5, zorder=1)
    for precision, marker in {"fp32": "s", "fp16": "o", "bf16": "o"}.items():
        at = [i for i, found in enumerate(precisions) if found == precision]
        if at:
            lane = int(precision == "fp32")
            ax.scatter(
                at, [lane] * len(at), s=90, marker=marker, color=COLOURS[precision], zorder=2
            )
    ax.set_yticks([0, 1], [next((p for p in precisions if p != "fp32"), ""), "fp32"])
    ax.set_ylim(-0.4, 1.4)
    ax.set_ylabel("dtype")
    ax.set_xticks(range(len(steps)), names, rotation=20)
    ax.set_xlabel("step of the forward pass")
    return ax


def dtype_grid(outcomes) -> plt.Axes:
    """What ops return on backends: `outcomes[backend][op]` is a key of `COLOURS`, or "error"."""
    backends, ops = list(outcomes), list(next(iter(outcomes.values())))
    _, ax = plt.subplots(figsize=(8.0, 0.32 * len(ops) + 0.6))
    for column, backend in enumerate(backends):
        for row, op in enumerate(ops):
            found = outcomes[backend][op]
            face = COLOURS.get(found, "white")
            ax.add_patch(plt.Rectangle((column, row), 0.96, 0.9, facecolor=face, edgecolor="0.4"))
            ink = "white" if found in ("fp32", "fp16") else "black"
            ax.text(column + 0.48, row + 0.45, found, ha="center", va="center", color=ink)
    ax.set_xlim(0, len(backends))
    ax.set_ylim(len(ops), 0)
    ax.set_xticks([column + 0.48 for column in range(len(backends))], backends)
    ax.set_yticks([row + 0.45 for row in range(len(ops))], ops)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax

"""Every figure of the notebooks, in one style that also reads in greyscale."""

import math

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from amp_lab.errors import OptionError

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


def _set_grid(ax, backends, ops) -> None:
    """A column for each backend and a row for each op, named on top and at the left."""
    ax.set_xlim(0, len(backends))
    ax.set_ylim(len(ops), 0)
    ax.set_xticks([column + 0.48 for column in range(len(backends))], backends)
    ax.set_yticks([row + 0.45 for row in range(len(ops))], ops)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


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
    _set_grid(ax, backends, ops)
    return ax


def training_curves(ax, curves, what) -> None:
    """Into `ax`, a measure {"train": [...], "test": [...]} of each epoch; `what` is its name."""
    for (part, values), line in zip(curves.items(), ["--", "-"], strict=True):
        ax.plot(range(1, len(values) + 1), values, f"{line}o", color=COLOURS["fp32"], label=part)
    ax.set_xlabel("epoch")
    ax.set_ylabel(what)
    ax.legend()


def save_training_curves(path, curves, what) -> None:
    """Write `training_curves` to a PNG file, without a window and without pyplot's list of them."""
    use_style()
    figure = Figure()
    training_curves(figure.subplots(), curves, what)
    figure.savefig(path)


def save(path, draw, *arguments) -> None:
    """Draw a figure and write it as a PNG file, without a window and without pyplot's list of them.

    `draw` is one of the functions here that take a figure. Raises `OptionError` if it cannot be
    written.
    """
    use_style()
    figure = draw(*arguments, Figure())
    try:
        figure.savefig(path)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written ({error.strerror})") from error


def augmentation_grid(rows) -> plt.Figure:
    """Images {title: [(3, H, W) in epoch 0, …]} with values in [0, 1], a row for each title.

    Drawn in 16 levels a channel: noise in all 256 would fill a notebook's file.
    """
    columns = len(next(iter(rows.values())))
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(1.3 * columns, 1.3 * len(rows) + 0.3), squeeze=False
    )
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        for epoch, (ax, image) in enumerate(zip(line, images, strict=True)):
            levels = (image.permute(1, 2, 0).clip(0, 1) * 15).round() / 15
            ax.imshow(levels.numpy(), interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
            if ax in axes[0]:
                ax.set_title(f"epoch {epoch}", fontsize=11)
        line[0].set_ylabel(title, fontsize=9)
    return figure


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


def class_pictures(images, names) -> plt.Figure:
    """One picture (3, H, W) of any range of values for each class, with its name."""
    rows = 2
    columns = -(-len(images) // rows)
    figure, axes = plt.subplots(rows, columns, figsize=(1.3 * columns, 1.6 * rows))
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, image, name in zip(axes.flat, images, names, strict=False):
        low, high = image.min(), image.max()
        levels = ((image - low) / (high - low) * 15).round() / 15  # fewer make a smaller file
        ax.imshow(levels.permute(1, 2, 0).numpy(), interpolation="nearest")
        ax.set_title(name, fontsize=11)
    return figure


def loss_and_accuracy(losses, accuracies) -> plt.Figure:
    """Loss and accuracy {precision: (seeds, epochs)}: mean, and a band from lowest to highest."""
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.9))
    lines, markers = ["-", "--", "-.", ":"], "osd^"
    for ax, curves in zip(axes, (losses, accuracies), strict=True):
        for (precision, values), line, marker in zip(curves.items(), lines, markers, strict=False):
            values, colour = values.numpy(), COLOURS[precision]
            epochs = range(1, values.shape[1] + 1)
            ax.fill_between(
                epochs, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0
            )
            ax.plot(
                epochs,
                values.mean(0),
                line,
                marker=marker,
                color=colour,
                linewidth=2,
                label=precision,
            )
        ax.set_xlabel("epoch")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("training loss (cross-entropy)")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    axes[1].set_ylabel("held-out accuracy")
    axes[1].set_ylim(0, 1)
    axes[1].yaxis.set_major_formatter("{x:.0%}")
    return figure


def flops_per_byte(panels) -> plt.Figure:
    """FLOPs per byte of layers in their order: `panels[title]` is a list of (kind, value)."""
    figure, axes = plt.subplots(1, len(panels), figsize=(8.0, 3.4), sharey=True)
    kinds = list(dict.fromkeys(kind for layers in panels.values() for kind, _ in layers))
    looks = dict(
        zip(kinds, [("k", "*"), ("0.6", "^"), (COLOURS["bf16"], "o"), ("k", "v")], strict=False)
    )
    for ax, (title, layers) in zip(axes, panels.items(), strict=True):
        for kind, (colour, marker) in looks.items():
            at = [i for i, (found, _) in enumerate(layers) if found == kind]
            values = [layers[i][1] for i in at]
            ax.plot(
                at,
                values,
                marker,
                color=colour,
                markeredgecolor="black",
                markeredgewidth=0.6,
                markersize=7,
                label=kind,
            )
        ax.set_yscale("log")
        ax.set_yticks([1, 10, 100], ["1", "10", "100"])
        ax.set_title(title, fontsize=11)
        ax.set_xlabel("layer, from input to output")
        ax.grid(axis="y", color="0.9")
    axes[0].set_ylabel("FLOPs per byte, in fp32")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def time_by_kind(milliseconds) -> plt.Axes:
    """Bars `milliseconds[precision][kind]`, with their speed-up over the first precision."""
    _, ax = plt.subplots(figsize=(7.0, 3.2))
    first = next(iter(milliseconds.values()))
    width = 0.8 / len(milliseconds)
    for i, (precision, times) in enumerate(milliseconds.items()):
        at = [k + i * width for k in range(len(times))]
        ax.bar(
            at,
            list(times.values()),
            width,
            color=COLOURS[precision],
            hatch=HATCHES[precision],
            edgecolor="white",
            label=precision,
        )
        if i == 0:
            continue
        for x, (kind, value) in zip(at, times.items(), strict=True):
            text = f"{first[kind] / value:.2f}x"
            ax.annotate(text, (x, value), ha="center", xytext=(0, 3), textcoords="offset points")
    ax.set_xticks([k + 0.4 - width / 2 for k in range(len(first))], list(first))
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("forward and backward (ms)")
    ax.margins(y=0.15)
    ax.legend()
    return ax


def speedup_over_size(sizes, speedups) -> plt.Axes:
    """Speed-up over fp32 against the image size; `speedups[label]` has a value for each size.

    The first word of a label is a key of `COLOURS`.
    """
    _, ax = plt.subplots(figsize=(7.0, 3.2))
    ax.axhline(1, color="black", linewidth=1)
    for (label, values), line in zip(speedups.items(), ["-o", "--s"], strict=True):
        colour, face = COLOURS[label.split()[0]], None if line == "-o" else "white"
        ax.plot(sizes, values, line, color=colour, markerfacecolor=face, linewidth=2, label=label)
    ax.set_xticks(sizes)
    ax.set_xlabel("height and width of the images (pixels)")
    ax.set_ylabel("speed-up over fp32")
    ax.set_ylim(bottom=0)
    ax.legend(loc="lower right")
    return ax


def rate_over_size(panels, multiple) -> plt.Figure:
    """Rates against a size near a multiple of 8, each divided by the median of its line.

    `panels[what]` maps a precision to {size: rate}. Grid lines stand at multiples of `multiple`.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(8.5, 2.9), sharey=True)
    for ax, (what, rates) in zip(axes, panels.items(), strict=True):
        for (precision, found), line in zip(rates.items(), ["-", "--"], strict=True):
            values = sorted(found.values())
            middle = values[len(values) // 2]
            ax.plot(
                found.keys(),
                [rate / middle for rate in found.values()],
                line,
                marker="o",
                markersize=4,
                color=COLOURS[precision],
                label=precision,
            )
        ax.set_xticks([size for size in found if size % multiple == 0])
        ax.grid(axis="x", color="0.7")
        ax.set_xlabel(what)
    axes[0].set_ylabel("rate / median rate")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(loc="lower left")
    return figure


def gradient_norm_in_step(norms, scaled) -> plt.Axes:
    """Length of the gradient after each stage {name: length} of a step, on a log2 axis.

    The stages named in `scaled` come first; they are set off by a grey background.
    """
    _, ax = plt.subplots(figsize=(8.0, 3.2))
    ax.axvspan(-0.5, len(scaled) - 0.5, color="0.85")
    ax.plot(range(len(norms)), norms.values(), ":", color="0.4", zorder=1)
    ax.plot(range(len(norms)), norms.values(), "o", color=COLOURS["fp16"], markersize=10)
    for at, value in enumerate(norms.values()):
        text = f"{value:,.0f}" if value > 100 else f"{value:.2f}"
        ax.annotate(text, (at, value), xytext=(12, 6), textcoords="offset points")
    for at, text in ((0, "scaled: do not look"), (len(scaled), "true: clip, log, step")):
        ax.text(at - 0.45, 0.96, text, transform=ax.get_xaxis_transform(), va="top")
    ax.set_yscale("log", base=2)
    ax.margins(y=0.3)
    ax.set_xlim(-0.5, len(norms) - 0.5)
    ax.set_xticks(range(len(norms)), norms)
    ax.set_xlabel("after this stage of the step")
    ax.set_ylabel("length of the gradient")
    return ax


def exponents_against_fp16(histograms, scales) -> list[plt.Axes]:
    """Histograms of gradient exponents, moved by each of `scales`, over the range of fp16.

    `histograms` maps a name to {exponent k: number of values between 2^k and 2^(k+1)}; each is
    drawn as shares of its own values, since parameters and outputs differ in number. What lies
    at or below 2^-25 is zero in fp16, from there to 2^-14 subnormal, and from 65520 on infinite.
    """
    looks = [(COLOURS["fp16"], ""), (COLOURS["bf16"], "//"), (COLOURS["tf32"], "xx")]
    left, right = -60, 20
    for histogram in histograms.values():
        left = max(-130, min([left, *histogram]))
    _, axes = plt.subplots(
        len(scales), sharex=True, sharey=True, squeeze=False, figsize=(8.0, 2.2 * len(scales) + 0.6)
    )
    axes = list(axes[:, 0])
    for ax, scale in zip(axes, scales, strict=True):
        ax.axvspan(left, -25, color="0.80")
        ax.axvspan(-25, -14, color="0.91")
        ax.axvspan(16, right, color="0.80")
        shift = math.log2(scale)
        for (name, histogram), (colour, hatch) in zip(histograms.items(), looks, strict=False):
            total = max(1, sum(histogram.values()))
            ax.bar(
                [k + shift for k in histogram],
                [100 * count / total for count in histogram.values()],
                width=1.0,
                align="edge",
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.3,
                alpha=0.7,
                label=name,
            )
        ax.set_title(rf"loss scale $2^{{{shift:.0f}}}$", loc="left", fontsize=11)
        ax.set_ylabel("values (%)")
        ax.margins(y=0.25)  # room for the names of the ranges
    for x, text in ((-19.5, "subnormal"), (1, "normal"), (18, "inf"), (-31, "zero in fp16")):
        axes[0].text(
            x,
            0.97,
            text,
            transform=axes[0].get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=10,
        )
    axes[0].legend(loc="center left")
    axes[-1].set_xlim(left, right)
    axes[-1].set_xlabel("log2 of |gradient × loss scale|")
    return axes


def loss_scales(histories) -> plt.Axes:
    """Loss scales {name: scale after each step} on a log2 axis; at 1 a dotted line, if in sight.

    A name that begins with a precision has its colour.
    """
    _, ax = plt.subplots()
    for (name, scales), (colour, line) in zip(
        histories.items(), [("black", "-"), ("0.45", "--")], strict=True
    ):
        colour = COLOURS.get(name.split()[0], colour)
        steps = range(1, len(scales) + 1)
        ax.step(steps, scales, line, where="mid", color=colour, linewidth=2, label=name)
    ax.axhline(1, color="black", linestyle=":", linewidth=1)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_locator(LogLocator(base=2**16))
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend(loc="center right")
    return ax


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


def dtypes_by_model(outcomes) -> plt.Figure:
    """What the ops of models compute in on backends: `outcomes[model][backend][op]`.

    That is a key of `COLOURS`, or another word; a model without the op has an empty field.
    """
    ops = list(dict.fromkeys(op for m in outcomes.values() for b in m.values() for op in b))
    figure, axes = plt.subplots(
        1, len(outcomes), sharey=True, figsize=(9.0, 0.3 * len(ops) + 0.8), squeeze=False
    )
    for ax, (title, backends) in zip(axes[0], outcomes.items(), strict=True):
        for column, found in enumerate(backends.values()):
            for row, op in enumerate(ops):
                if op in found:
                    text = found[op]
                    ax.add_patch(
                        plt.Rectangle(
                            (column, row),
                            0.96,
                            0.9,
                            facecolor=COLOURS.get(text, "white"),
                            edgecolor="0.4",
                        )
                    )
                    ink = "white" if text in ("fp32", "fp16") else "black"
                    at = (column + 0.48, row + 0.45)
                    ax.text(*at, text, ha="center", va="center", color=ink, fontsize=9)
        _set_grid(ax, backends, ops)
        ax.set_title(title, fontsize=11)
    return figure


def speed_ladder(panels, figure=None) -> Figure:
    """Bars of time from the lowest rung to the highest, and a tick where the device's limit is.

    `panels[title]` is a list of (precision, rung, milliseconds, milliseconds at the limit or None,
    text beside the bar); without milliseconds there is the text alone. `figure` is one to draw in,
    in place of pyplot's next.
    """
    use_style()
    figure = figure or plt.figure()
    heights = [len(bars) + 1.5 for bars in panels.values()]
    figure.set_size_inches(8.0, 0.26 * sum(heights) + 0.6)
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, (title, bars) in zip(axes, panels.items(), strict=True):
        for y, (precision, _, milliseconds, limit, text) in enumerate(bars):
            ax.barh(
                y,
                milliseconds or 0,
                0.75,
                color=COLOURS[precision],
                hatch=HATCHES[precision],
                edgecolor="white",
            )
            if limit is not None:
                ax.plot([limit, limit], [y - 0.45, y + 0.45], color="black", linewidth=2)
            ax.annotate(f" {text}", (milliseconds or 0, y), va="center", fontsize=9)
        names = [f"{precision} {rung}" for precision, rung, *_ in bars]
        ax.set_yticks(range(len(bars)), names, fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_xlim(left=0)
        ax.set_title(title, fontsize=10, loc="left")
    axes[-1].set_xlabel("time of a step (ms); black: the limit of the device")
    return figure


def roofline(roofs, bytes_per_s, points, figure=None) -> Figure:
    """FLOP/s against FLOPs per byte, both logarithmic, below the roofs of each precision.

    `roofs` is {precision: FLOP/s}; `points` are (label, precision, FLOPs per byte, FLOP/s).
    `figure` is one to draw in, in place of pyplot's next.
    """
    use_style()
    figure = figure or plt.figure()
    figure.set_size_inches(8.0, 4.2)
    ax = figure.subplots()
    intensities = [x for _, _, x, _ in points]
    low, high = min([1.0, *intensities]) / 2, max([100.0, *intensities]) * 4
    lines = ["-", "--", ":", "-."]
    for (precision, flops_per_s), line in zip(roofs.items(), lines, strict=False):
        ridge = flops_per_s / bytes_per_s
        ax.plot(
            [low, ridge, high],
            [low * bytes_per_s, flops_per_s, flops_per_s],
            line,
            color=COLOURS[precision],
            label=f"limit in {precision}",
        )
    markers = dict(zip(dict.fromkeys(label for label, *_ in points), "osD^vP*X", strict=False))
    for label, precision, intensity, achieved in points:
        ax.plot(
            intensity,
            achieved,
            markers[label],
            color=COLOURS[precision],
            markeredgecolor="black",
            markersize=8,
        )
    for label, marker in markers.items():
        ax.plot([], [], marker, color="0.7", markeredgecolor="black", label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOPs per byte moved")
    ax.set_ylabel("FLOP/s")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def best_speedups(machines, figure=None) -> Figure:
    """Bars of the best speed-up of each workload, side by side: `machines[name][workload]`.

    `figure` is one to draw in, in place of pyplot's next.
    """
    use_style()
    figure = figure or plt.figure()
    names = list(dict.fromkeys(title for found in machines.values() for title in found))
    figure.set_size_inches(8.0, 0.3 * len(names) * len(machines) + 1.4)
    ax = figure.subplots()
    height = 0.8 / len(machines)
    greys = [str(0.15 + 0.6 * i / max(1, len(machines) - 1)) for i in range(len(machines))]
    for i, ((machine, found), grey) in enumerate(zip(machines.items(), greys, strict=True)):
        at = [names.index(title) + i * height for title in found]
        ax.barh(at, list(found.values()), height, color=grey, edgecolor="white", label=machine)
        for y, value in zip(at, found.values(), strict=True):
            ax.annotate(f" {value:.2f}x", (value, y), va="center", fontsize=9)
    middle = 0.4 - height / 2
    ax.set_yticks([k + middle for k in range(len(names))], names, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel("best speed-up over fp32 eager on the same device")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure


def growth(panels) -> plt.Figure:
    """Speed-up by AMP and its share of FP32's memory while something grows.

    `panels[what]` is (values, speed-ups, shares), each with one entry for each value.
    """
    figure, axes = plt.subplots(2, len(panels), figsize=(8.5, 4.4), sharey="row", sharex="col")
    for (upper, lower), (what, (values, speedups, shares)) in zip(
        axes.T, panels.items(), strict=True
    ):
        upper.plot(values, speedups, "-o", color=COLOURS["bf16"], linewidth=2)
        lower.plot(values, shares, "--s", color=COLOURS["fp32"], linewidth=2)
        for ax, level in ((upper, 1), (lower, 0.5)):
            ax.axhline(level, color="black", linewidth=1)
        lower.set_xscale("log", base=2)
        lower.set_xticks(values, [str(value) for value in values])
        lower.minorticks_off()
        lower.set_xlabel(what)
    for row in axes:
        highest = max(ax.dataLim.ymax for ax in row)
        row[0].set_ylim(0, 1.1 * highest)  # the others of the row share it
    axes[0, 0].set_ylabel("speed-up by AMP")
    axes[1, 0].set_ylabel("memory, share of FP32")
    return figure


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


def losses_by_setting(losses) -> plt.Axes:
    """Losses {setting: loss of each step}, on a log axis; a setting begins with a precision.

    fp32 is a wide line, on which the others can be seen to lie; the second setting of a precision
    is dashed.
    """
    _, ax = plt.subplots()
    looks = {"fp32": ("-", 8, 0.35), "fp16": ("-", 2, 1), "bf16": (":", 3, 1)}
    seen = set()
    for setting, values in losses.items():
        precision = setting.split()[0].rstrip(",")
        line, width, alpha = looks[precision]
        line = "--" if precision in seen else line
        seen.add(precision)
        look = {"color": COLOURS[precision], "linewidth": width, "alpha": alpha}
        ax.plot(values, line, label=setting, **look)
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.figure.legend(loc="outside right upper")
    return ax


def scales_by_setting(logs) -> plt.Figure:
    """Loss scales and skipped steps, one panel a setting: `logs[setting]` is (scales, skipped)."""
    figure, axes = plt.subplots(
        len(logs), sharex=True, sharey=True, figsize=(8.0, 1.35 * len(logs) + 0.5)
    )
    for ax, (setting, (scales, skipped)) in zip(axes, logs.items(), strict=True):
        ax.step(range(len(scales)), scales, where="mid", color=COLOURS["fp16"], linewidth=1.5)
        ax.plot(skipped, [scales[step] for step in skipped], "x", color="black")
        ax.set_yscale("log", base=2)
        ax.set_title(f"{setting}: {len(skipped)} skipped", loc="left", fontsize=10)
        ax.set_ylabel("loss scale")
    axes[-1].set_xlabel("step; x: skipped")
    return figure


def scores_by_seed(scores) -> plt.Axes:
    """Dots of a score for each seed, one below the other, and a bar at their mean.

    `scores[precision]` is a list.
    """
    _, ax = plt.subplots(figsize=(6.0, 2.0))
    for y, (precision, values) in enumerate(scores.items()):
        middle = sum(values) / len(values)
        heights = [y + 0.06 * (seed - (len(values) - 1) / 2) for seed in range(len(values))]
        ax.plot(values, heights, "o", color=COLOURS[precision], alpha=0.6, markersize=7)
        ax.plot([middle, middle], [y - 0.3, y + 0.3], color="black", linewidth=2)
    ax.set_yticks(range(len(scores)), list(scores))
    ax.set_ylim(len(scores) - 0.5, -0.5)
    ax.set_xlabel("test accuracy; bar: mean of the seeds (%)")
    return ax


def throughput_over_batch(rates) -> plt.Figure:
    """Samples per second against the batch, `rates[precision][batch]`, and their ratio."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 2.9))
    (first, base), (second, other) = rates.items()
    for precision, found, line in ((first, base, "-o"), (second, other, "--s")):
        left.plot(
            found.keys(), found.values(), line, color=COLOURS[precision], label=str(precision)
        )
    left.set_yscale("log")
    left.set_ylabel("samples per second")
    left.legend(loc="lower right")
    ratios = [rate / base[batch] for batch, rate in other.items()]
    right.plot(base.keys(), ratios, "-D", color="black")
    right.axhline(1, color="black", linewidth=1)
    right.set_ylim(bottom=0)
    right.set_ylabel(f"speed-up of {second} over {first}")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(base), [str(batch) for batch in base])
        ax.minorticks_off()
        ax.set_xlabel("batch")
    return figure


def loss_by_backend(panels) -> plt.Figure:
    """Loss over the epochs, a panel for each backend: `panels[backend][precision]` is a list."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.0 * len(panels), 3.0), sharey=True)
    for ax, (backend, losses) in zip(axes, panels.items(), strict=True):
        for (precision, loss), line in zip(losses.items(), ["-", "--", ":"], strict=True):
            epochs = range(1, len(loss) + 1)
            ax.plot(epochs, loss, line, color=COLOURS[precision], linewidth=2.5, label=precision)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title(backend)
        ax.set_xlabel("epoch")
    axes[0].set_ylabel("cross-entropy in training")
    axes[0].legend()
    return figure

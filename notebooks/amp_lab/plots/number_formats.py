"""What the formats of numbers can hold, and which of them ops compute in."""

import math

import matplotlib.pyplot as plt

from amp_lab.plots.style import COLOURS


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

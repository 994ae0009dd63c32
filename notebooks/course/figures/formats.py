"""Errors of formats below 16 bits."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from amp_lab.plots import style
from amp_lab.plots.style import Options, Values

_HATCHES = ("", "//")


def sqnr_by_format(errors: Mapping[str, Mapping[str, float]]) -> Axes:
    """Bars of SQNR in dB (signal to quantisation noise): `errors[kind of values][format]`."""
    _, ax = style.subplots(size=(8.5, 3.6))
    for i, (kind, sqnr_of) in enumerate(errors.items()):
        colour = style.shade(i, 2)
        hatch = _HATCHES[i]
        options: Options = {
            "width": 0.38,
            "color": colour,
            "hatch": hatch,
            "label": kind,
            **style.EDGED,
        }
        offset = 0.4 * i - 0.2  # two bars side by side, around the tick of their format
        for n, sqnr in enumerate(sqnr_of.values()):
            text = f"{sqnr:.0f}"
            style.bar(ax, n + offset, sqnr, text, **options)
            options.pop("label", None)  # only the first bar goes into the legend
        formats = list(sqnr_of)
        places = range(len(formats))
        ax.set_xticks(places, formats)
    ax.margins(y=0.35)
    return style.label(ax, "format", "SQNR (dB)", legend="upper left")


def loss_from_fp32(losses: Mapping[str, Sequence[Values]], window_steps: int = 10) -> Axes:
    """How far the loss of each format is from that of fp32 with the same seed, at each step.

    `losses[format][seed]` has the loss of each step; one format is "fp32". A line is the mean over
    the seeds, and the bars are their range, of moving averages over `window_steps` steps. The grey
    band is the range of the seeds of fp32 around their mean.
    """
    _, ax = style.subplots(size=(8.5, 4.0))
    exact = _smooth(losses["fp32"], window_steps)  # (seeds, steps)
    steps = window_steps + np.arange(exact.shape[1])
    spread = exact - exact.mean(0)
    low, high = _range(spread)
    ax.fill_between(steps, low, high, color=style.GRID, label="range of fp32's seeds")
    others = [name for name in losses if name != "fp32"]
    for i, name in enumerate(others):
        difference = _smooth(losses[name], window_steps) - exact
        colour = style.shade(i, len(others))
        dash = style.DASHES[i % len(style.DASHES)]
        look: Options = {"color": colour, "linestyle": dash}
        mean = difference.mean(0)
        low, high = _range(difference)
        ranges = [mean - low, high - mean]
        every = max(1, len(steps) // 8)  # a few ranges are enough, and do not hide the lines
        first = i * every // len(others)  # beside the ranges of the other formats
        look |= {"errorevery": (first, every), "capsize": 2, "elinewidth": 1}
        ax.errorbar(steps, mean, yerr=ranges, label=name, **look)
    return style.label(ax, "step", "loss, difference from fp32", legend="best")


def _smooth(runs: Sequence[Values], window_steps: int) -> np.ndarray:
    """The moving average of each run, (runs, steps - window_steps + 1)."""
    window = np.ones(window_steps) / window_steps
    smooth = [np.convolve(run, window, "valid") for run in runs]
    return np.array(smooth)


def _range(runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest of the runs at each step."""
    return runs.min(axis=0), runs.max(axis=0)

"""Every figure, drawn from small data: what stands on its axes, its colours, and its file."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer

from course import figures

from amp_lab import plots
from amp_lab.core.errors import OptionError
from amp_lab.core.estimates import Estimate, Ratio
from amp_lab.core.timing_result import Comparison
from amp_lab.plots import style

mpl.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

PAIR = {"fp32": [3.0, 2.0, 1.0], "bf16": [3.1, 2.1, 1.1]}
SEEDS = {name: torch.tensor([values, values]) for name, values in PAIR.items()}
SCALES = [2.0**16] * 3 + [2.0**15] * 3
GREY = torch.linspace(0, 1, 16).view(1, 1, 4, 4)
PEAK = SimpleNamespace(peak=[((9,), torch.float32, 2**31), ((9,), torch.int64, 2**30)])
EXPONENTS = {"outputs": {-30: 5, -20: 5}, "parameters": {-10: 1}}
FP16 = (range(-24, 16), [2.0 ** -min(10, k + 24) for k in range(-24, 16)], -14)
TIMES = Comparison({"fp32": (8e-3, 9e-3, 10e-3), "bf16": (4e-3, 4.5e-3, 5e-3)}, 0, "")
BUSY = Comparison(TIMES.samples_s, 3, "the machine was busy in 3 of 3 rounds")
TWICE, UNTOLD = Ratio(2.0, (1.9, 2.2)), Ratio(5.0, (0.1, 9.0), trusted=False)
TOOK = Estimate(9.0, (8.0, 11.0))
RUNGS = [("fp32", "eager", TOOK, 5.0, "9 ms"), ("bf16", "AMP", None, None, "failed")]
SENT = [("all_gather", "bf16", 9000), ("reduce_scatter", "fp32", 9000)]
OPS = {"cpu": {"conv": "bf16", "relu": "error"}, "cuda": {"conv": "fp16", "relu": "fp32"}}
ERRORS = [SimpleNamespace(module=m, op="mm", a=1e-7, b=1e-3, apart=0.0) for m in ("", "head")]
LAYERS = [
    SimpleNamespace(
        layer=SimpleNamespace(name=name), format=form, left_out=out, decibels=db, worst=("", 28.0)
    )
    for name, form, out, db in (("up", "fp8", "", {"": 28.0}), ("up", "mxfp4", "small", {}))
]
HELD = {"fp32": {"weights": 4, "gradients": 4, "Adam": 8}, "O1": {"half": 2, "unscaled": 4}}

FIGURES = {  # figure: its arguments, and what stands on its axes
    "best_speedups": (({"a GPU": {"CNN": TWICE}, "a CPU": {"CNN": TWICE}},), ["best speed-up"]),
    "bytes_per_parameter": ((HELD,), ["(bytes)"]),
    "dtype_grid": ((OPS,), []),
    "dtypes_by_model": (({"CNN": OPS, "MLP": {"cpu": {"mm": "bf16"}}},), []),
    "error_growth": ((ERRORS, "head"), ["relative error", "module"]),
    "errors_by_layer": ((LAYERS,), ["layer", "in dB"]),
    "exponents_against_fp16": ((EXPONENTS, (1.0, 256.0)), ["log2 of |gradient", "(%)"]),
    "gap_and_change": (
        (torch.rand(9) + 1, {"bf16": torch.rand(9) + 1}),
        ["gap", "change of the gap"],
    ),
    "gradient_norm_in_step": (({"backward": 9e4, "clip": 1.0}, ["backward"]), ["length", "stage"]),
    "gradients_against_fp16": ((torch.randn(99) * 8 - 25, (1, 256)), ["log2 of |gradient", "num"]),
    "loss_and_accuracy": ((SEEDS, SEEDS), ["epoch", "loss (cross-entropy)", "accuracy"]),
    "loss_from_fp32": (
        ({"fp32": [[2.0] * 12, [1.0] * 12], "fp8": [[2.5] * 12, [1.0] * 12]},),
        ["step", "loss"],
    ),
    "loss_curves": ((SEEDS,), ["epoch", "loss (mean squared error)"]),
    "loss_scales": (({"fp16": SCALES, "other": SCALES},), ["step", "loss scale"]),
    "memory_against_batch": (({"fp32": ([1, 2], [2e9, 4e9])}, 3e9), ["batch", "(GiB)"]),
    "memory_by_dtype": (({"CNN": {"fp32": PEAK}}, 2**31, "limit"), ["(GiB)"]),
    "range_and_spacing": (({"fp16": FP16, "fp8 E5M2": FP16},), ["log2 of the magnitude", "spac"]),
    "roofline": (({"fp32": 1e12}, 1e11, [("CNN", "fp32", 9.0, TOOK)]), ["FLOP/s", "per byte"]),
    "scale_over_time": ((SCALES, [2]), ["step", "loss scale"]),
    "sent_bytes": (({"FSDP": SENT}, 4), ["4 ranks", "(KiB)"]),
    "side_by_side": (({"target": GREY, "fp32": GREY},), ["brightness"]),
    "sqnr_by_format": (({"normal": {"fp8": 31.0}, "outlier": {"fp8": 9.0}},), ["format", "(dB)"]),
    "speed_ladder": (({"CNN": RUNGS},), ["(ms)"]),
    "speedup_over_size": (
        ([32, 64], {"bf16": [TWICE] * 2, "bf16, compiled": [TWICE] * 2}),
        ["pix"],
    ),
    "time_and_memory": ((TIMES, {"fp32": 80.0, "bf16": 60.0}, "peak"), ["(ms)", "(MiB)"]),
    "time_by_kind": (({"conv": TIMES},), ["(ms)"]),
    "training_curves": (({"train": [2.0, 1.0], "test": [2.0, 1.5]}, "loss"), ["epoch", "loss"]),
}


def figure_of(name):
    """The function that draws a figure, wherever it is: of the package, or of the notebooks."""
    return getattr(plots, name, None) or getattr(figures, name)


def test_no_figure_goes_untested():
    names = vars(plots) | vars(figures)
    exported = {name for name, value in names.items() if inspect.isfunction(value)}
    assert exported - set(FIGURES) == {"image", "save", "use_style"}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_and_says_what_its_axes_are(name):
    arguments, words = FIGURES[name]
    plots.use_style()
    drawn = figure_of(name)(*arguments)
    figure = plt.gcf()
    assert len(plt.get_fignums()) == 1
    figure.draw_without_rendering()  # finds what only fails when it is laid out
    axes = drawn if isinstance(drawn, list) else [drawn]
    assert all(part in (figure, *figure.axes) for part in axes)
    texts = [text for ax in figure.axes for text in (ax.get_xlabel(), ax.get_ylabel())]
    for word in words:
        assert any(word in text for text in texts), (word, texts)


def texts_of(ax):
    return [text.get_text() for text in ax.texts if text.get_text()]


def intervals_of(ax):
    """(low, high) of each error bar of the axes, in the order in which they were drawn."""
    bars = [found for found in ax.containers if isinstance(found, ErrorbarContainer)]
    segments = [one for found in bars for one in found.lines[2][0].get_segments()]
    return [tuple(ends.T[np.ptp(ends, axis=0).argmax()]) for ends in segments if len(ends)]


def test_bars_end_at_their_values_and_say_them():
    figure = figures.time_and_memory(TIMES, {"fp32": 80.0, "bf16": 60.0}, "peak")
    heights = [[bar.get_height() for bar in ax.patches] for ax in figure.axes]
    assert heights == [[9.0, 4.5], [80.0, 60.0]]
    texts = [texts_of(ax) for ax in figure.axes]
    faster = "4.5\n2.00x as fast\n(1.96x to 2.04x)"  # 2 % at least to either side
    assert texts == [["9", faster], ["80", "60\n75%"]]


def test_what_was_measured_has_its_interval():
    left, _ = figures.time_and_memory(TIMES, {"fp32": 80.0, "bf16": 60.0}, "peak").axes
    assert intervals_of(left) == [pytest.approx((8, 10)), pytest.approx((4, 5))]
    ladder = plots.speed_ladder({"CNN": RUNGS}).axes[0]
    assert intervals_of(ladder) == [pytest.approx((8, 11))]
    speedups = figures.speedup_over_size([8, 16], {"bf16": [TWICE, TWICE]})
    assert intervals_of(speedups) == [pytest.approx((1.9, 2.2))] * 2


NOT_TRUSTED = {  # figure: its arguments, and how often it says that the machine was busy
    "best_speedups": (({"a CPU": {"CNN": UNTOLD}},), 1),
    "speed_ladder": (({"CNN": [("fp32", "eager", replace(TOOK, trusted=False), 5.0, "1x")]},), 1),
    "speedup_over_size": (([32, 64], {"bf16": [TWICE, UNTOLD], "fp16": [UNTOLD, TWICE]}), 1),
    "time_and_memory": ((BUSY, {"fp32": 80.0, "bf16": 60.0}, "peak"), 2),
    "time_by_kind": (({"conv": BUSY, "linear": TIMES},), 1),
}


@pytest.mark.parametrize("name", NOT_TRUSTED)
def test_what_is_not_trusted_is_hatched_in_grey_and_says_why(name):
    arguments, times = NOT_TRUSTED[name]
    figure_of(name)(*arguments)
    axes = plt.gcf().axes
    texts = [" ".join(text.split()) for ax in axes for text in texts_of(ax)]
    assert texts.count("not reliable") == times
    grey = to_rgb(style.UNTRUSTED["color"])
    drawn = [part for ax in axes for part in (*ax.patches, *ax.collections)]
    boxes = [part for part in drawn if part.get_hatch() == style.UNTRUSTED["hatch"]]
    assert boxes
    assert all(to_rgb(np.ravel(part.get_facecolor())[:3]) == grey for part in boxes)


def test_a_line_does_not_go_through_what_is_not_trusted():
    ax = figures.speedup_over_size([32, 48, 64], {"bf16": [TWICE, UNTOLD, TWICE]})
    (line,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert line.get_ydata().tolist() == [2.0, pytest.approx(np.nan, nan_ok=True), 2.0]
    assert sorted(intervals_of(ax))[0] == pytest.approx((0.1, 9.0))


def test_parts_are_stacked_and_named_once():
    ax = figures.bytes_per_parameter(HELD)
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert bars[:3] == [(0, 4), (4, 4), (8, 8)]
    assert [text.get_text() for text in ax.texts] == [" 16", " 6"]
    legend = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert legend == ["weights", "gradients", "Adam", "half", "unscaled"]


def lightness(colour: str) -> float:
    """Relative luminance of sRGB, as WCAG 2 defines it, from 0 to 1."""
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_precisions_differ_in_greyscale():
    light = {name: lightness(colour) for name, colour in style.COLOURS.items()}
    assert set(style.HATCHES) == set(light)
    for first in light:
        for second in light:
            if first < second:
                ratio = (light[first] + 0.05) / (light[second] + 0.05)
                apart = max(ratio, 1 / ratio) > 1.3
                assert apart or style.HATCHES[first] != style.HATCHES[second], (first, second)
    assert len(set(style.HATCHES.values())) == len(style.HATCHES)


def test_colours_are_in_one_place():
    folders = [Path(part.__file__).parent for part in (plots, figures)]
    for path in [path for folder in folders for path in folder.glob("*.py")]:
        if path.name != "style.py":
            assert not re.search(r"\"(#[0-9a-f]{6}|0\.\d+)\"", path.read_text()), path


def test_a_figure_is_saved_without_pyplot(tmp_path):
    plots.save(tmp_path / "ladder.png", plots.speed_ladder, {"CNN": RUNGS})
    curves = {"train": [2.0], "test": [1.0]}
    plots.save(tmp_path / "loss.png", plots.training_curves, curves, "loss")
    for name in ("ladder.png", "loss.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    plots.scale_over_time(SCALES, [])
    assert len(plt.get_fignums()) == 1  # and after it, pyplot shows figures again


def test_a_path_that_cannot_be_written_is_told_in_a_line(tmp_path):
    path = tmp_path / "no such folder" / "ladder.png"
    with pytest.raises(OptionError) as caught:
        plots.save(path, plots.speed_ladder, {"CNN": RUNGS})
    assert str(caught.value).startswith(f"{path}: cannot be written (")
    plots.scale_over_time(SCALES, [])
    assert len(plt.get_fignums()) == 1

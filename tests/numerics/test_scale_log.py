"""ScaleLog, held against the scales that arithmetic predicts."""

import contextlib
import math
import random
import re
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from remedy_tests import says
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab import ScaleLog
from amp_lab.core.errors import NumericsError
from amp_lab.numerics import scale_log

mpl.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


def optimizer_of(*sizes, **options):
    return torch.optim.SGD([nn.Parameter(torch.zeros(size)) for size in sizes], lr=1.0, **options)


def set_gradients(optimizer, scaler, bad=False):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = scaler.scale(torch.full_like(p, math.inf if bad else 1.0))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_thousand_steps_with_random_overflows(fused, unscale):
    draw = random.Random(1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    optimizer = optimizer_of(3, 2, fused=fused)
    expected, skips, growths, good = [], [], 0, 0
    with ScaleLog(scaler) as log:
        for step in range(1000):
            expected.append(2.0**16 * 2.0**growths * 0.5 ** len(skips))
            bad = draw.random() < 0.1
            set_gradients(optimizer, scaler, bad)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if bad:
                skips.append(step)
                good = 0
            else:
                good += 1
                if good == 7:
                    growths, good = growths + 1, 0
    assert 50 < len(skips) < 150
    assert growths > 20
    assert log.scales == expected
    assert log.skipped == skips
    assert log.skipped_by == [skips]
    weight = optimizer.param_groups[0]["params"][0]
    assert weight[0].item() == len(skips) - 1000  # the optimizer stepped in all others


def test_each_of_several_optimizers_has_its_own_skips():
    scaler = torch.amp.GradScaler("cpu")
    first, second, third = (optimizer_of(2) for _ in range(3))
    log = ScaleLog(scaler)
    for step in range(6):
        for optimizer, bad in ((first, step == 1), (second, step in (1, 3)), (third, False)):
            if optimizer is third and step < 2:
                continue
            set_gradients(optimizer, scaler, bad)
            scaler.step(optimizer)
        scaler.update()
    log.close()
    assert log.skipped_by == [[1], [1, 3], []]
    assert log.skipped == [1, 3]
    assert log.scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**14]


def test_a_scale_that_is_set_by_hand_is_logged():
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), optimizer_of(1)
    with ScaleLog(scaler) as log:
        for new in (None, 32.0, None):
            set_gradients(optimizer, scaler)
            scaler.step(optimizer)
            scaler.update(new)
    assert log.scales == [8.0, 8.0, 32.0]


class Reads(TorchDispatchMode):
    """Counts how often a value is read from the device, for which the host has to wait."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_read_from_the_device_until_asked(fused, monkeypatch):
    monkeypatch.setattr(scale_log._Values, "PIECE", 16)
    counts = []
    for logged in (False, True):
        scaler, optimizer = torch.amp.GradScaler("cpu"), optimizer_of(2, fused=fused)
        with Reads() as reads, ScaleLog(scaler) if logged else contextlib.nullcontext():
            for step in range(40):  # past the point where what was kept is put together
                set_gradients(optimizer, scaler, bad=step % 9 == 0)
                scaler.step(optimizer)
                scaler.update()
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_a_disabled_scaler_has_scale_one_and_skips_nothing():
    scaler, optimizer = torch.amp.GradScaler("cpu", enabled=False), optimizer_of(1)
    with ScaleLog(scaler) as log:
        assert (log.scales, log.skipped, log.skipped_by) == ([], [], [])
        for _ in range(3):
            set_gradients(optimizer, scaler, bad=True)
            scaler.step(optimizer)
            scaler.update()
    assert (log.scales, log.skipped, log.skipped_by) == ([1.0] * 3, [], [[]])
    assert "The scaler is disabled" in repr(log)


def test_the_scaler_is_left_as_it_was_also_after_an_error():
    scaler, optimizer = torch.amp.GradScaler("cpu"), optimizer_of(1)
    before = dict(vars(scaler))
    with contextlib.suppress(ZeroDivisionError), ScaleLog(scaler) as log:
        set_gradients(optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()
        raise ZeroDivisionError
    assert vars(scaler).keys() == before.keys()
    assert scaler.step.__func__ is torch.amp.GradScaler.step
    log.close()
    set_gradients(optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert log.scales == [2.0**16]
    with ScaleLog(scaler) as second:
        set_gradients(optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()
    assert second.scales == [2.0**16]


def test_errors_of_the_scaler_pass_and_leave_no_trace():
    scaler, optimizer = torch.amp.GradScaler("cpu"), optimizer_of(1)
    with ScaleLog(scaler) as log:
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.update()
        set_gradients(optimizer, scaler)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        scaler.update()
    assert log.scales == [2.0**16]
    assert log.skipped_by == [[]]


@pytest.mark.parametrize("unscale", [False, True])
def test_refused_fp16_gradients_are_told_with_the_remedy(unscale):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    set_gradients(optimizer, scaler)
    step = scaler.unscale_ if unscale else scaler.step
    with pytest.raises(ValueError, match="unscale FP16") as raised, ScaleLog(scaler):
        step(optimizer)
    (note,) = raised.value.__notes__
    assert note.startswith("ScaleLog: ")
    assert says("nonfinite.half_weights", note)


def test_wrapping_again_on_top_is_respected():
    scaler, optimizer, calls = torch.amp.GradScaler("cpu"), optimizer_of(1), []
    log = ScaleLog(scaler)
    inner = scaler.update
    scaler.update = lambda *args: calls.append(1) or inner(*args)
    log.close()
    set_gradients(optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert (calls, log.scales) == ([1], [])
    assert scaler.step.__func__ is torch.amp.GradScaler.step


def test_a_second_log_and_what_is_no_scaler_are_refused():
    scaler = torch.amp.GradScaler("cpu")
    with ScaleLog(scaler), pytest.raises(NumericsError, match="already has an open ScaleLog"):
        ScaleLog(scaler)
    with pytest.raises(NumericsError, match=r"torch\.amp\.GradScaler, not float"):
        ScaleLog(65536.0)
    with pytest.raises(NumericsError, match="no step was logged"):
        ScaleLog(scaler).plot()


def test_the_log_can_be_read_and_drawn():
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1.0), optimizer_of(1)
    with ScaleLog(scaler) as log:
        assert repr(log) == "ScaleLog: no steps yet"
        for _ in range(2):
            set_gradients(optimizer, scaler, bad=True)
            scaler.step(optimizer)
            scaler.update()
    assert "2 steps, 2 skipped" in repr(log)
    assert "lowest 0.5. A step was skipped at a scale of 1 or less" in repr(log)
    small = torch.amp.GradScaler("cpu", init_scale=0.5)
    with ScaleLog(small) as log_of_small:
        set_gradients(optimizer, small)
        small.step(optimizer)
        small.update()
    assert repr(log_of_small).endswith("lowest 0.5")
    ax = log.plot()
    assert list(ax.lines[0].get_ydata()) == [1.0, 0.5]
    assert list(ax.lines[1].get_xdata()) == [0, 1]


def test_what_the_page_says_of_it_runs():
    page = Path(__file__).parents[2] / "docs" / "when_it_breaks.md"
    start, end = re.findall(r"`([^`]*ScaleLog\(.*?|log\.[^`]*)`", page.read_text())
    scaler, optimizer = torch.amp.GradScaler("cpu"), optimizer_of(2)
    step = "set_gradients(optimizer, scaler), scaler.step(optimizer), scaler.update()"
    exec(f"{start} {step}\n{end}", globals() | {"scaler": scaler, "optimizer": optimizer})

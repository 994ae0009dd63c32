"""Notebook 10: a rung that computes something else is refused; its AMP step is the plain one."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from definitions import definitions

import build_pairs
from amp_lab import Comparison, Precision
from amp_lab.bench.convmodel import quantized_sine
from amp_lab.core.timing import Ratio

SOURCE = build_pairs.FOLDER / "10_speed_ladder.py"


@pytest.fixture
def notebook() -> dict:
    """What the notebook defines, by name, at toy size."""
    inputs, target = quantized_sine(16)
    return definitions(
        SOURCE,
        device=torch.device("cpu"),
        inputs=inputs,
        target=target,
        hidden=16,
        low=Precision.BF16,
        config={"steps": 2},
    )


def plain(notebook):
    return notebook["recipe"](notebook["inputs"], notebook["target"])


def test_all_rungs_are_timed_so_many_steps_at_a_time(notebook):
    ladder = notebook["Ladder"]()
    assert ladder.add("ground", Precision.FP32, plain(notebook)) == 0
    amp = notebook["amp_step"](*notebook["new_model"](), notebook["inputs"], notebook["target"])
    assert 0 < ladder.add("AMP", Precision.BF16, amp) < 0.06
    called = []
    ladder.steps = {
        name: (p, partial(called.append, name)) for name, (p, _) in ladder.steps.items()
    }
    notebook["compare"] = lambda functions, **_: [run() for run in functions.values()]
    notebook["climb"](ladder)
    assert called == ["ground", "ground", "AMP", "AMP"]


def climbed(seconds, spread=0.0, reason=""):
    """A comparison of rungs whose times scatter by a share of them."""
    factors = [1 - spread, 1.0, 1 + spread] * 5
    samples = {name: tuple(t * f for f in factors) for name, t in seconds.items()}
    samples[min(seconds, key=seconds.get)] = (min(seconds.values()),) * len(factors)
    return Comparison(samples, 0, reason)


def test_one_climbs_to_the_lowest_rung_that_may_be_within_a_tenth(notebook):
    seconds = {"recipe": 5.0, "AMP": 1.3, "compiled": 1.09, "by hand": 1.0}
    find = notebook["rung_to_climb_to"]
    assert find(climbed(seconds)) == "compiled"
    assert find(climbed(seconds, spread=0.3)) == "AMP"  # whose interval reaches 1.1
    assert find(climbed(seconds, reason="busy")) == "cannot tell here"


def gain(low, high, trusted=True):
    return Ratio((low + high) / 2, (low, high), trusted)


UP, DOWN, UNSURE = gain(1.1, 1.3), gain(0.7, 0.9), gain(0.9, 1.2)
BUSY = gain(1.1, 1.3, trusted=False)


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ([DOWN, UP, UP], "AMP pays from 4 on"),
        ([UP, UNSURE, UP], "AMP pays from 16 on"),
        ([UP, UP, UP], "AMP pays from 1 on"),
        ([UP, UP, UNSURE], "cannot tell here"),
        ([UP, UP, DOWN], "cannot tell here"),
        ([DOWN, DOWN, DOWN], "AMP costs at all of these sizes"),
        ([BUSY, BUSY, BUSY], "cannot tell here"),
    ],
)
def test_amp_pays_only_where_all_larger_ones_gain_for_certain(notebook, speedups, words):
    assert notebook["pays"]((1, 4, 16), speedups) == words


def test_a_verdict_goes_by_the_interval(notebook):
    found = [notebook["verdict"](speedup).partition("), ")[2] for speedup in (UP, DOWN, UNSURE)]
    assert found == ["AMP pays", "AMP costs", "no difference seen"]
    assert notebook["verdict"](BUSY) == str(BUSY)


@pytest.mark.parametrize("speedup", [235.89, 14.86])  # as an early version of this notebook had
def test_a_gain_that_no_device_has_is_noticed(notebook, speedup):
    notebook |= {"promise": 8.2, "limits": SimpleNamespace(trusted=True)}
    assert not notebook["is_possible"](gain(0.9 * speedup, 1.1 * speedup))
    assert notebook["is_possible"](gain(0.9 * speedup, 1.1 * speedup, trusted=False))
    assert notebook["is_possible"](gain(2.0, 2.4))


def wrong_target(notebook):
    return notebook["recipe"](notebook["inputs"], 1 - notebook["target"])


def no_step(notebook):
    return lambda: 1.0


def not_a_number(notebook):
    return lambda: float("nan")


@pytest.mark.parametrize("rung", [wrong_target, no_step, not_a_number])
def test_a_rung_that_computes_something_else_is_refused(notebook, rung):
    ladder = notebook["Ladder"]()
    ladder.add("ground", Precision.FP32, plain(notebook))
    with pytest.raises(AssertionError, match="wrong"):
        ladder.add("wrong", Precision.FP32, rung(notebook))
    assert list(ladder.steps) == ["ground"]


def test_reading_the_loss_changes_nothing_but_its_type(notebook):
    losses = []
    for read_loss in (True, False):
        parts = *notebook["new_model"](), notebook["inputs"], notebook["target"]
        step = notebook["amp_step"](*parts, read_loss=read_loss)
        losses.append([step() for _ in range(3)])
    assert all(isinstance(loss, float) for loss in losses[0])
    assert losses[0] == [loss.item() for loss in losses[1]]
    assert losses[0][2] < losses[0][0]

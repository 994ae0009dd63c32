"""Notebook 10: a rung that computes something else is refused; its AMP step is the plain one."""

import pytest
import torch
from definitions import definitions

import build_pairs
from amp_lab import Precision
from amp_lab.bench.convmodel import quantized_sine

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
        config={"turns": 2},
    )


def test_all_rungs_are_timed_in_turns(notebook):
    ladder = notebook["Ladder"]()
    assert ladder.add("ground", Precision.FP32, notebook["recipe"]()) == 0
    amp = notebook["amp_step"](*notebook["new_model"](), notebook["inputs"], notebook["target"])
    assert 0 < ladder.add("AMP", Precision.BF16, amp) < 0.06
    milliseconds = notebook["climb"](ladder)
    assert {name: len(found) for name, found in ladder.seconds.items()} == {"ground": 2, "AMP": 2}
    for name, found in ladder.seconds.items():
        assert milliseconds[name] == pytest.approx(1e3 * sum(found) / 2)


def wrong_target(notebook):
    return notebook["recipe"](target=1 - notebook["target"])


def no_step(notebook):
    return lambda: 1.0


def not_a_number(notebook):
    return lambda: float("nan")


@pytest.mark.parametrize("rung", [wrong_target, no_step, not_a_number])
def test_a_rung_that_computes_something_else_is_refused(notebook, rung):
    ladder = notebook["Ladder"]()
    ladder.add("ground", Precision.FP32, notebook["recipe"]())
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

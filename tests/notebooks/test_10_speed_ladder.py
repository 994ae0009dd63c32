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
        config={"steps": 2},
        rungs={},
        losses={},
    )


def plain(notebook):
    return notebook["plain_step"](notebook["inputs"], notebook["target"])


def wrong_target(notebook):
    return notebook["plain_step"](notebook["inputs"], 1 - notebook["target"])


def no_step(notebook):
    return lambda: 1.0


def not_a_number(notebook):
    return lambda: float("nan")


@pytest.mark.parametrize("rung", [wrong_target, no_step, not_a_number])
def test_a_rung_that_computes_something_else_is_refused(notebook, rung):
    notebook["add"]("plain", Precision.FP32, plain(notebook))
    with pytest.raises(AssertionError, match="wrong"):
        notebook["add"]("wrong", Precision.FP32, rung(notebook))
    assert list(notebook["rungs"]) == ["plain"]


def test_a_rung_in_bf16_is_close_to_fp32(notebook):
    assert notebook["add"]("plain", Precision.FP32, plain(notebook)) == 0
    amp = notebook["amp_step"](*notebook["new_model"](), notebook["inputs"], notebook["target"])
    assert 0 < notebook["add"]("AMP", Precision.BF16, amp) < 0.06


def test_as_many_steps_are_timed_as_the_scale_has(notebook):
    called = []
    notebook["run_steps"](Precision.FP32, lambda: called.append("step"))
    assert called == ["step", "step"]


def test_reading_the_loss_changes_nothing_but_its_type(notebook):
    losses = []
    for read_loss in (True, False):
        parts = *notebook["new_model"](), notebook["inputs"], notebook["target"]
        step = notebook["amp_step"](*parts, read_loss=read_loss)
        losses.append([step() for _ in range(3)])
    assert all(isinstance(loss, float) for loss in losses[0])
    assert losses[0] == [loss.item() for loss in losses[1]]
    assert losses[0][2] < losses[0][0]

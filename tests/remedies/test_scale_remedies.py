"""Each remedy of gradient_underflow and ScaleLog, done as it says."""

import re

import pytest
import torch
from remedy_tests import does, says
from torch import nn

from amp_lab import ScaleLog, find_nonfinite, gradient_underflow

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


class Weights(nn.Module):
    """Weights whose gradients are these numbers."""

    def __init__(self, *gradients: float, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(gradients), dtype=dtype))
        self.gradients = torch.tensor(gradients)

    def forward(self):
        return (self.weight.float() * self.gradients).sum()


def in_fp16(model: Weights, scale: float) -> torch.Tensor:
    return (model.gradients * scale).half()


@does("underflow.scale")
def test_a_scale_of_the_range_keeps_all():
    model = Weights(*[1e-9] * 500, *[1e-3] * 500)
    text = str(gradient_underflow(model, model()))
    assert says("underflow.scale", text)
    assert not in_fp16(model, 1.0).all()
    low, high = re.search(r"Loss scales from (\S+) to (\S+) keep", text).groups()
    for power in (low, high):
        kept = in_fp16(model, eval(power.replace("^", "**")))
        assert kept.all()
        assert kept.isfinite().all()


@does("underflow.scale_below_one")
def test_gradients_beyond_fp16_are_kept_by_a_scale_below_1():
    model = Weights(1e6, 2e6)
    text = str(gradient_underflow(model, model()))
    assert says("underflow.scale_below_one", text)
    scale = eval(re.search(r"A loss scale of (\S+) keeps", text)[1].replace("^", "**"))
    assert in_fp16(model, scale).isfinite().all()
    assert not in_fp16(model, 2 * scale).isfinite().all()


@does("underflow.no_scale")
def test_where_no_scale_helps_bf16_does():
    model = Weights(*[1e-12] * 500, *[1e3] * 500)
    text = str(gradient_underflow(model, model()))
    assert says("underflow.no_scale", text)
    assert "Use bf16" in text
    for power in range(-20, 60):
        kept = in_fp16(model, 2.0**power)
        assert not (kept.all() and kept.isfinite().all())
    assert model.gradients.bfloat16().all()
    assert model.gradients.bfloat16().isfinite().all()


@does("underflow.nonfinite")
def test_gradients_that_are_not_finite_are_found():
    model = Weights(1.0, float("inf"))
    assert says("underflow.nonfinite", str(gradient_underflow(model, model())))
    with find_nonfinite(model) as finder:
        model().backward()
    assert finder.report is not None


@does("underflow.fp16_already")
def test_a_loss_in_fp32_or_bf16_shows_what_fp16_flushed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.full((8, 4), 1e-3)

    def report(dtype: torch.dtype | None):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x).float().mean() * 1e-6
        return gradient_underflow(model, loss)

    flushed = report(torch.float16)
    assert says("underflow.fp16_already", str(flushed))
    assert not says("underflow.scale", str(flushed))
    assert not says("underflow.no_scale", str(flushed))
    for dtype in (None, torch.bfloat16):
        seen = report(dtype)
        assert not says("underflow.fp16_already", str(seen))
        assert seen.total.zero < flushed.total.zero
        assert seen.total.lost(1.0) > 0


@does("scale_log.below_one")
def test_a_scale_below_one_has_a_reason_that_is_found():
    model = Weights(1.0, float("inf"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ScaleLog(scaler) as log:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert says("scale_log.below_one", repr(log))
    with find_nonfinite(model) as finder:
        model().backward()
    assert finder.report is not None

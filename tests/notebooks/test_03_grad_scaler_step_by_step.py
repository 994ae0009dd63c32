"""Notebook 03: what a scaler costs, as it says, and the scaler that it writes by hand."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from definitions import definitions
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import build_pairs

NOTEBOOK = build_pairs.FOLDER / "03_grad_scaler_step_by_step.py"


class OpNames(TorchDispatchMode):
    """While active, counts the ops that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "reads"), [(False, 1), (True, 0)])
def test_a_step_goes_over_the_gradients_once_and_reads_once_unless_fused(fused, reads):
    layer = nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 1)).sum()).backward()
    with OpNames() as ops:
        scaler.step(torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused))
    assert ops.counts["_amp_foreach_non_finite_check_and_unscale_"] == 1
    assert ops.counts["_local_scalar_dense"] == reads


def test_get_scale_reads_from_the_device_once_a_loss_was_scaled():
    scaler = torch.amp.GradScaler("cpu")
    with OpNames() as ops:
        scaler.get_scale()
    assert ops.counts["_local_scalar_dense"] == 0
    scaler.scale(torch.ones(()))
    with OpNames() as ops:
        scaler.get_scale()
    assert ops.counts["_local_scalar_dense"] == 1


def scales_and_parameters(scaler, steps=500):
    """Train a small network; return its scale and parameters after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for _ in range(steps):
        inputs, overflow = torch.randn(16, 8), torch.rand(()) < 0.1
        loss = model(inputs).square().mean() * (torch.inf if overflow else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        parameters = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        history.append((scaler.get_scale(), parameters))
    return history


def test_the_scaler_written_by_hand_does_what_pytorchs_does_to_the_last_bit():
    hand_scaler = definitions(NOTEBOOK)["HandScaler"]
    theirs = scales_and_parameters(torch.amp.GradScaler("cpu", 2.0**10, growth_interval=7))
    ours = scales_and_parameters(hand_scaler(2.0**10, growth_interval=7))
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in zip(theirs, ours, strict=True))
    falls = sum(after < now for now, after in pairwise(value for value, _ in theirs))
    assert 30 < falls < 70  # one step in ten of 500, give or take three standard deviations

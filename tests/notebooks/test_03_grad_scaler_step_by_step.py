"""Notebook 03: what a scaler costs, as it says."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


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

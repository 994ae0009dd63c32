"""The forecast of what an optimizer needs, held against real optimizers."""

import pytest
import torch
from memory_models import Meter
from torch import nn
from torch.utils import _pytree as pytree

from amp_lab.tracing.training_step import OPTIMIZERS, optimizer_bytes


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adam", "adamw"])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_state_and_temporaries_are_those_of_torch(name, foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 50))
    optimizer = OPTIMIZERS[name](model.parameters(), foreach=foreach)
    for _ in range(2):  # the first step makes the state
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        meter = Meter()
        for tensor in pytree.tree_leaves([list(model.parameters()), optimizer.state_dict()]):
            if isinstance(tensor, torch.Tensor):
                meter.see(tensor, count=False)
        for parameter in model.parameters():
            meter.see(parameter.grad, count=False)
        with meter:
            optimizer.step()
    state = [
        tensor
        for tensors in optimizer.state.values()
        for tensor in tensors.values()
        if isinstance(tensor, torch.Tensor)
    ]
    shapes = [(tuple(p.shape), p.dtype) for p in model.parameters()]
    steps = sum(t.nbytes for t in state if not t.dim())
    found_state, found_work = optimizer_bytes(name, shapes, "cuda" if foreach else "cpu")
    assert found_state == sum(t.nbytes for t in state) - (steps if foreach else 0)
    assert found_work == pytest.approx(meter.most, abs=64)  # scalars of the host

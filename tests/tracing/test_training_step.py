"""The forecast of what an optimizer needs, held against real optimizers."""

import itertools

import pytest
import torch
from memory_models import Meter
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as pytree

from amp_lab.tracing.training_step import OPTIMIZERS, QUANTIZED, optimizer_bytes

OF_TORCHAO = {"adamw-8bit": "AdamW8bit", "adamw-4bit": "AdamW4bit", "adamw-fp8": "AdamWFp8"}


@pytest.mark.parametrize(
    ("name", "foreach"),
    [
        *((name, each) for name in ("sgd", "sgd-momentum", "adam", "adamw") for each in (0, 1)),
        ("adafactor", False),
    ],
)
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


def test_muon_is_for_matrices_and_adamw_for_the_rest():
    given = [(128, 64), (128,), (64, 128), (128, 128)]
    parameters = [nn.Parameter(torch.rand(shape)) for shape in given]
    matrices, meter = [p for p in parameters if p.dim() == 2], Meter()
    optimizer = torch.optim.Muon(matrices)
    for parameter in matrices:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = [tensor for one in optimizer.state.values() for tensor in one.values()]
    for tensor in (*matrices, *(p.grad for p in matrices), *state):
        meter.see(tensor, count=False)
    with meter:
        optimizer.step()
    found_state, found_work = optimizer_bytes("muon", [(s, torch.float32) for s in given], "cpu")
    of_bias, _ = optimizer_bytes("adamw", [((128,), torch.float32)], "cpu")
    assert found_state == sum(tensor.nbytes for tensor in state) + of_bias
    assert found_work == meter.most


SHAPES = [(128, 64), (64, 65), (4095,), (4096,), (3, 4096)]  # small, of no multiple of a block, …


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantised_state_is_that_of_torchao(name, shape, dtype):
    optim = pytest.importorskip("torchao.optim")
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = getattr(optim, OF_TORCHAO[name])([parameter])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    tensors = [part for state in optimizer.state[parameter].values() for part in parts(state)]
    state, _ = optimizer_bytes(name, [(shape, dtype)], "cpu")
    assert state == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.weekly
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_step_with_quantised_state_takes_what_inductor_allocates(name):
    optim = pytest.importorskip("torchao.optim")
    parameter = nn.Parameter(torch.rand(512, 256))
    parameter.grad = torch.rand_like(parameter)
    optimizer = getattr(optim, OF_TORCHAO[name])([parameter])
    optimizer.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    events = seen.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    _, work = optimizer_bytes(name, [((512, 256), torch.float32)], "cpu")
    assert work == pytest.approx(max(itertools.accumulate(changes)), rel=0.05)


def parts(tensor):
    """The plain tensors that a tensor is made of."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [getattr(tensor, name) for name in names] or [tensor]

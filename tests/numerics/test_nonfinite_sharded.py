"""find_nonfinite and gradient_underflow on a model of FSDP2, whose parameters are DTensors."""

import pytest
import torch
import torch.distributed as dist
from rank_processes import values_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from amp_lab import ScaleLog, find_nonfinite, gradient_underflow
from amp_lab.core.errors import NumericsError

pytestmark = [pytest.mark.usefixtures("one_thread_and_seed")]


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Rooted(nn.Module):
    """A layer and a root, whose derivative at 0 is infinite."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.layer(x).sqrt()


def sharded(model, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def step(model, inputs, scaler):
    """Steps without foreach, whose ops on DTensors are looked at."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with find_nonfinite(model) as found, ScaleLog(scaler) as log:
        scaler.scale(model(inputs).float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return found.report, log


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_finite_step_has_no_report(dtype):
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    report, log = step(model, torch.ones(2, 4), scaler)
    assert report is None
    assert log.skipped == []


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_nan_that_only_the_backward_pass_makes(dtype, warm):
    """FSDP2 calls no hook of a sharded parameter; its gathered parameter has the gradient."""
    model = sharded(Rooted(), dtype)
    if warm:  # a root stays gathered after its first step
        model(torch.ones(2, 4))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    report, log = step(model, torch.zeros(2, 4), scaler)
    assert (report.phase, report.op) == ("backward", "SqrtBackward0")
    assert report.reached == "the gradient of layer.weight"
    assert log.skipped == ([0] if dtype is torch.float16 else [])


def test_a_broken_parameter_says_that_a_shard_was_read():
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, torch.nan)
    sharded(model, torch.bfloat16)
    with find_nonfinite(model) as found:
        model(torch.ones(2, 4))
    assert found.report.phase == "before"
    assert "float32 (4, 4), read on this rank only, 100 %" in str(found.report)


def test_underflow_names_the_remedy_for_a_sharded_model():
    model = sharded(nn.Sequential(nn.Linear(4, 4)), torch.bfloat16)
    loss = model(torch.ones(2, 4)).float().mean()
    with pytest.raises(NumericsError, match="Call gradient_underflow before fully_shard"):
        gradient_underflow(model, loss)


def of_two_ranks():
    """The report on each rank; only the batch of rank 1 has an inf."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.bfloat16)
    inputs = torch.full((2, 4), 3e38 if dist.get_rank() else 1.0)
    with find_nonfinite(model) as found:
        (model(inputs).float() * 100).mean().backward()
    dist.destroy_process_group()
    return str(found.report)


@pytest.mark.slow
def test_each_rank_has_a_report_on_its_own_values():
    """A rank without an inf does not wait for the one that has it."""
    fine, bad = values_of(of_two_ranks, 2)
    assert "made in forward by" in bad
    assert fine == "None"

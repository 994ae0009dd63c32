"""The forecast for a rank of FSDP2, held against two real processes."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from memory_models import loss_of
from rank_processes import free_port
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from amp_lab import forecast_memory
from amp_lab.core.errors import TraceError
from amp_lab.core.precision import Precision
from amp_lab.models.gpt import Gpt, Size
from amp_lab.parallel.ranks import Parallel, Ranks
from amp_lab.tracing import compare_memory

pytestmark = pytest.mark.slow

PRECISIONS = ("fp32", "bf16")
SIZE = Size(128, heads=4, depth=3)
STEPS = [f"step {n}" for n in range(1, 8)]


def peak_of_a_rank(precision):
    """The most that this rank has in use in a step.

    gloo frees what it has sent a little later, in a thread of its own, which the profiler does not
    see: what a step adds is counted from its beginning, and the least of the steps counts.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = Ranks(Parallel.FSDP).wrap(Gpt(SIZE, 512), Precision(precision))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.randint(0, 512, (8, 32))
        for step in range(8):
            with record_function(f"step {step}"):
                loss_of(model(tokens)).backward()
                optimizer.step()
            optimizer.zero_grad()
    held = [*model.parameters(), *pytree.tree_leaves(optimizer.state_dict()["state"])]
    parts = [part.to_local() if isinstance(part, DTensor) else part for part in held]
    there = sum(part.nbytes for part in parts) + tokens.nbytes
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = [(e.start_ns(), e.end_ns()) for e in events if e.name() in STEPS]
    assert len(spans) == len(STEPS)
    added = [[n for at, n in changes if begin <= at <= end] for begin, end in spans]
    return there + min(max(itertools.accumulate(of_step)) for of_step in added)


def test_it_is_what_a_rank_of_two_allocates():
    # Not forked, since torch's profiler ends a forked process with an error.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | address | {"PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, __file__]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(line, env=environment | {"RANK": str(n), "WORLD_SIZE": "2"}, **pipes)
        for n in range(2)
    ]
    (printed, errors), _ = (process.communicate(timeout=120) for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], errors
    tokens = torch.empty(8, 32, dtype=torch.int64, device="meta")
    options = {"device_type": "cpu", "optimizer": "adamw", "loss_fn": loss_of, "fsdp_ranks": 2}
    for precision, real in zip(PRECISIONS, printed.split(), strict=True):
        forecast = forecast_memory(Gpt(SIZE, 512), tokens, precision=precision, **options)
        assert forecast.peak == pytest.approx(int(real), rel=0.05)


def test_weights_gradients_and_state_are_divided_and_the_model_stays_as_it_is():
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.rand(8, 64)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    whole, parted = (forecast_memory(model, x, precision="fp32", fsdp_ranks=n) for n in (1, 4))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(whole, part) == 4 * getattr(parted, part)
    assert parted.peak < whole.peak
    assert "4 ranks of FSDP2" in str(parted)
    assert "DDP adds" in str(whole)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert type(model[0]) is nn.Linear
    assert not dist.is_initialized()


def test_a_frozen_model_has_weights_alone():
    model = nn.Linear(64, 64).requires_grad_(False)
    forecast = forecast_memory(model, torch.rand(8, 64), precision="fp32", fsdp_ranks=4)
    assert 4 * forecast.weights == sum(p.nbytes for p in model.parameters())
    assert (forecast.gradients, forecast.optimizer) == (0, 0)


def test_the_largest_batch_grows_with_the_ranks():
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
    one, eight = (
        compare_memory(model, (1, 64), memory_bytes="8MiB", precisions=["fp32"], fsdp_ranks=n)
        for n in (1, 8)
    )
    assert 0 < one.largest["fp32"] < eight.largest["fp32"]


def test_what_cannot_be_is_told():
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    for ranks in (0, -1, 1025):
        with pytest.raises(TraceError, match=f"fsdp_ranks={ranks}: give 1 to "):
            forecast_memory(model, x, precision="fp32", fsdp_ranks=ranks)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(TraceError, match="already in a process group"):
            forecast_memory(model, x, precision="fp32", fsdp_ranks=2)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(*map(peak_of_a_rank, PRECISIONS))
    dist.destroy_process_group()

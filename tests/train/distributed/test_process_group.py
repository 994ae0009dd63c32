"""Joining other processes: what is refused, who never comes, and who is lost."""

import gc
import os
import re
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks, values_of
from torch import nn

from amp_lab.core.errors import ParallelError
from amp_lab.core.precision import Precision
from amp_lab.train.distributed import process_group
from amp_lab.train.distributed.process_group import join

CPU = torch.device("cpu")


@pytest.fixture
def no_torchrun(monkeypatch):
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("fsdp", {}, "torchrun --nproc-per-node N"),
        ("horovod", {}, "'horovod' .*ddp, fsdp"),
        (None, {"reduce_dtype": "bf16"}, "a single process does not sum gradients"),
        ("ddp", {"reduce_dtype": "fp8"}, "use one of fp32, fp16, bf16"),
        ("ddp", {"timeout_s": 0}, "timeout .* 1,000,000 seconds, not 0"),
        ("ddp", {"timeout_s": float("nan")}, "timeout .* 1,000,000 seconds, not nan"),
        ("ddp", {"timeout_s": float("inf")}, "timeout .* 1,000,000 seconds, not inf"),
    ],
)
def test_what_cannot_be_is_refused(no_torchrun, kind, options, said):
    with pytest.raises(ParallelError, match=said), join(kind, CPU, **options):
        pass


def test_a_device_for_several_processes_has_no_index(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ParallelError, match=r"cuda:0: each process .* give only cuda$"):
        process_group._select_device(torch.device("cuda:0"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    cuda = torch.get_device_module("cuda")
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    assert process_group._select_device(torch.device("cuda")) == torch.device("cuda:1")


def test_without_the_means_the_processes_do_not_start(monkeypatch):
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", {"cpu": "gloo"})
    with pytest.raises(ParallelError, match="no backend for cuda: use --device cpu"):
        process_group._select_device(torch.device("cuda"))
    assert process_group._select_device(CPU) == CPU
    for name in process_group._TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(ParallelError, match=r"ddp needs torch\.distributed, which"):
        process_group._require_parallel_possible("ddp")


def test_one_of_several_without_a_way_to_train_together_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ParallelError, match="torchrun started 2 processes"), join(None, CPU):
        pass


def connect_with_one_late(late: int):
    """When this rank entered the block, or, if it is late, when it had not yet connected."""
    connect = dist.init_process_group
    not_yet = []

    def connect_late(*arguments, **options):
        connect(*arguments, **options)
        if os.environ["RANK"] == str(late):
            time.sleep(0.5)
            not_yet.append(time.monotonic())

    dist.init_process_group = connect_late
    with join("ddp", CPU, timeout_s=30):
        return (not_yet or [time.monotonic()])[0]


def test_no_rank_begins_before_all_are_connected():
    """Else one with little to do would leave while others still connect, and these would fail."""
    entered, not_connected = values_of(connect_with_one_late, 2, 1)
    assert entered >= not_connected


def wait_for_nobody():
    try:
        with join("ddp", CPU, timeout_s=2):
            pass
    except ParallelError as error:
        return str(error)


def test_a_rank_that_never_comes_is_given_up_after_the_timeout():
    ended = run_ranks(wait_for_nobody, 1, WORLD_SIZE=2)
    assert re.search(r"no connection .*127\.0\.0\.1:\d", ended[0].value)


def outlive(kind: str):
    with join(kind, CPU) as ranks:
        model = ranks.wrap(nn.Linear(2, 2), Precision.FP32)
        group = weakref.ref(dist.group.WORLD)
    assert not dist.is_initialized()
    del model
    gc.collect()
    return group() is not None


def test_a_model_is_never_the_last_to_let_go_of_the_group():
    assert values_of(outlive, 1, "ddp") == [True]


def lose(kind: str):
    try:
        with join(kind, CPU, timeout_s=30) as ranks:
            if ranks.rank == 1:
                os._exit(7)
            ranks.gather("anybody there?")
    except ParallelError as error:
        return str(error)


def test_a_lost_rank_is_told_by_the_others():
    ended = run_ranks(lose, 2, "ddp")
    assert ended[1].code == 7
    assert ended[0].value.startswith("rank 0: no answer")

"""Memory that ranks share: what each reads, that it sends little, and what is left of it."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks, values_of
from test_collectives import written_bytes
from torch import nn

from amp_lab.core.errors import ParallelError
from amp_lab.core.precision import Precision
from amp_lab.parallel import shared_memory
from amp_lab.parallel.collectives import count_communication
from amp_lab.parallel.shared_memory import share_memory
from amp_lab.train.distributed.process_group import join

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has such files"),
]

CPU = torch.device("cpu")
RANKS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(count: int, rank: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 * rank + count)
    return torch.randn(count, generator=generator).to(dtype)


def exchange_slowly():
    """In sizes that grow and shrink; one rank reads late, another hurries on and writes."""
    wrong = []
    with join("fsdp", CPU, timeout_s=30) as ranks:
        memory = share_memory(CPU)
        for turn, count in enumerate([5, 70_000, 3, 200_000, 200_001, 8, 8, 8]):
            dtype = DTYPES[turn % len(DTYPES)]
            rows = memory.exchange(numbers(count, ranks.rank, dtype), dtype)
            time.sleep(0.05 * ((ranks.rank + turn) % RANKS))
            expected = [numbers(count, rank, dtype) for rank in range(RANKS)]
            if not torch.equal(rows, torch.stack(expected)):
                wrong.append((turn, count))
    return wrong


def test_all_read_what_each_wrote_however_late():
    assert values_of(exchange_slowly, RANKS) == [[]] * RANKS


def collect(dtype):
    """All collectives of FSDP2, beside gloo's; 140,000 numbers are several chunks of the sum."""
    share, whole = 140_000, 140_000 * RANKS
    with join("fsdp", CPU, timeout_s=30) as ranks:
        memory = share_memory(CPU)
        gathered, expected = torch.empty(whole, dtype=dtype), torch.empty(whole, dtype=dtype)
        own = gathered[ranks.rank * share :][:share]  # where FSDP2 puts it
        own.copy_(numbers(share, ranks.rank))
        dist.all_gather_into_tensor(expected, own)
        given = numbers(whole, ranks.rank, dtype)
        scattered = torch.empty(share, dtype=dtype)
        with count_communication() as sent:
            memory.all_gather(gathered, own)
            memory.reduce_scatter(scattered, given, op=dist.ReduceOp.AVG)
    parts = [numbers(whole, rank, dtype) for rank in range(RANKS)]
    mean = ((parts[0] + parts[1] + parts[2]) / RANKS).view(RANKS, -1)[ranks.rank]
    return {
        "gathered": torch.equal(gathered, expected),
        "scattered": torch.equal(scattered, mean),
        "counted": [(call.kind, call.dtype, call.elements, call.ranks) for call in sent.calls],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_gather_and_scatter_as_the_collectives_do(dtype):
    whole = 140_000 * RANKS
    for found in values_of(collect, RANKS, dtype):
        assert found["gathered"]
        assert found["scattered"]  # bit for bit, in the order of the ranks
        assert found["counted"] == [
            ("all_gather", dtype, whole, RANKS),
            ("reduce_scatter", dtype, whole, RANKS),
        ]


def steps(kind: str, is_shared: bool):
    """The gradients of two steps, and what the second wrote."""
    if not is_shared:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each rank were on a machine of its own
    with join(kind, CPU, timeout_s=30) as ranks:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 300))
        trained = ranks.wrap(model, Precision("fp32"))
        for _ in range(2):
            before = written_bytes()
            with count_communication() as sent:
                trained(numbers(600, ranks.rank).view(2, 300)).square().sum().backward()
            written = written_bytes() - before
        gradients = [p.grad for p in model.parameters()]
        gradients = [g.full_tensor() if kind == "fsdp" else g for g in gradients]
        return {
            "gradients": torch.cat([g.flatten() for g in gradients]),
            "counted": {kind: part.sent_bytes for (kind, _), part in sent.totals().items()},
            "written": written,
        }


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_computes_and_counts_the_same_and_writes_hardly_anything(kind):
    by_memory, by_gloo = (values_of(steps, 2, kind, shared) for shared in (True, False))
    for one, other in zip(by_memory, by_gloo, strict=True):
        # With two ranks there is one order to add in.
        assert torch.equal(one["gradients"], other["gradients"])
        assert one["counted"] == other["counted"]
        assert one["written"] < 0.02 * sum(one["counted"].values()) < other["written"]


def offered_memory():
    with join("fsdp", CPU, timeout_s=30):
        return share_memory(CPU) is not None


def test_ranks_on_several_machines_share_none():
    assert values_of(offered_memory, 2) == [True] * 2
    ended = run_ranks(offered_memory, 2, LOCAL_WORLD_SIZE=1)
    assert [one.value for one in ended] == [False] * 2


def fail_to_open(wrong: int):
    with join("fsdp", CPU, timeout_s=30) as ranks:
        if ranks.rank == wrong:
            shared_memory._open = lambda *offered: []
        return share_memory(CPU)


def test_if_one_cannot_open_it_all_do_without():
    assert values_of(fail_to_open, 2, 1) == [None] * 2


def test_a_file_of_another_name_is_not_taken():
    number = os.memfd_create("amp-lab-this")
    path = f"/proc/self/fd/{number}"
    assert shared_memory._open("amp-lab-other", [path]) == []
    (file,) = shared_memory._open("amp-lab-this", [path])
    file.close()
    os.close(number)
    assert shared_memory._open("amp-lab-this", [path]) == []


def leave_behind():
    """What of the files is still to be seen while they are used, and afterwards."""

    def seen():
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return sum("amp-lab-" in link for link in links)

    with join("fsdp", CPU, timeout_s=30):
        memory = share_memory(CPU)
        memory.exchange(torch.ones(4), torch.float32)
        used = seen() > 0
        del memory
        return used, seen(), [p.name for p in Path("/dev/shm").iterdir() if "amp-lab" in p.name]


def test_the_files_have_no_name_and_end_with_the_memory():
    assert values_of(leave_behind, 2) == [(True, 0, [])] * 2


def lose(wrong: int):
    """A rank is killed within a backward pass; the other says what it found."""
    try:
        with join("fsdp", CPU, timeout_s=30) as ranks:
            model = nn.Linear(8, 8)
            loss = ranks.wrap(model, Precision("fp32"))(torch.ones(2, 8)).sum()
            if ranks.rank == wrong:
                os.kill(os.getpid(), 9)
            loss.backward()
    except ParallelError as error:
        return str(error)


def test_a_rank_that_is_killed_is_told_by_the_other():
    ended = run_ranks(lose, 2, 1)
    assert ended[1].code == -9
    assert ended[0].value.startswith("rank 0: no answer")

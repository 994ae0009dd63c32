"""Joining the processes that torchrun started: devices, backends, and a store of their own."""

from __future__ import annotations  # torch can be built without what some of them name

import contextlib
import datetime
import os
import time
import uuid
from collections.abc import Iterator

import torch
import torch.distributed as dist

from amp_lab.core.backends import backend
from amp_lab.core.errors import AmpLabError, OtherRankError, ParallelError, first_line
from amp_lab.parallel.ranks import REDUCE_DTYPES, Parallel, Ranks

_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun
_last_group: list[dist.ProcessGroup | None] = []


@contextlib.contextmanager
def join(
    kind: str | None, device: torch.device, *, reduce_dtype: str = "fp32", timeout_s: float = 300
) -> Iterator[Ranks]:
    """The processes that torchrun started, this one among them, as a group for the block.

    On an accelerator each takes the device of its number on its machine. Gradients are summed in
    `reduce_dtype`, "fp32", "bf16" or "fp16". No process waits for another longer than `timeout_s`.

    Raises `ParallelError` if there is no torchrun, too few devices, or no connection to the others,
    and from within the block if gloo finds one of them lost; NCCL ends the process then.
    """
    problem = next(_problems(kind, reduce_dtype, timeout_s), None)
    if problem is not None:
        raise ParallelError(problem)
    if kind is None:
        yield Ranks(device=device)
        return
    device = _select_device(device)
    _connect(device, timeout_s)
    is_agreed = backend(device).is_host  # NCCL would wait for those who still are in a collective
    try:
        yield Ranks(Parallel(kind), device, reduce_dtype)
        is_agreed = True
    except AmpLabError as error:
        if isinstance(error, OtherRankError):  # every rank has: none is in a collective any more
            is_agreed = True
        error.is_of_one_rank = True
        raise
    except RuntimeError as error:
        if not is_lost(error):
            raise
        reason = first_line(error).partition(". This is typically")[0]
        problem = f"rank {os.environ['RANK']}: no answer from another process ({reason})"
        raise ParallelError(problem) from error
    finally:
        if is_agreed:
            # A model under DDP that lets go of the group last waits for gloo's threads without
            # giving up the interpreter's lock, which they may need to free a tensor. So keep it.
            _last_group[:] = [dist.group.WORLD]
            dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process does not answer."""
    if not isinstance(error, RuntimeError) or not dist.is_available():
        return False
    if isinstance(error, dist.DistError):
        return True
    return "gloo" in str(error)  # its errors have no type of their own


def _problems(kind: str | None, reduce_dtype: str, timeout_s: float) -> Iterator[str]:
    if reduce_dtype not in REDUCE_DTYPES:
        yield f"no dtype {reduce_dtype!r} to sum gradients in; there are {', '.join(REDUCE_DTYPES)}"
    if not 1 <= timeout_s <= 1e6:  # a NaN fails this comparison too
        yield f"timeout must be 1 to 1,000,000 seconds, not {timeout_s:g}"
    if kind is not None:
        yield from _problems_together(kind)
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and size != "1":  # each would train the whole run by itself
        yield f"one of {size} processes of torchrun: add --parallel ddp or --parallel fsdp"
    if reduce_dtype != "fp32":
        yield f"reduce dtype {reduce_dtype}: one process sums nothing; it needs --parallel"


def _problems_together(kind: str) -> Iterator[str]:
    missing = ", ".join(name for name in _ENVIRONMENT if name not in os.environ)
    if kind not in list(Parallel):
        yield f"no way {kind!r} to train in parallel; there are {', '.join(Parallel)}"
    if missing:
        start = "torchrun --nproc-per-node N -m amp_lab train …"
        yield f"parallel {kind}: start it with {start}, which sets {missing}"
    if not dist.is_available():
        yield f"parallel {kind}: this torch was built without torch.distributed"


def _select_device(device: torch.device) -> torch.device:
    """Make the device of this process the current one, and return it; all share the CPU.

    It is the one with the number of this process on its machine, unless `device` has an index.
    """
    if backend(device).is_host:
        return device
    if device.type not in dist.Backend.default_device_backend_map:
        raise ParallelError(f"torch.distributed has no backend for {device.type}; use the cpu")
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.index is not None and processes_here > 1:
        raise ParallelError(f"device {device}: each process takes one; give {device.type} alone")
    index = device.index
    if index is None:
        index = int(os.environ["LOCAL_RANK"])
    count = torch.get_device_module(device.type).device_count()
    if index >= count:
        problem = f"more processes on this machine than its {count} {device.type} devices"
        raise ParallelError(f"{problem}: start one for each, torchrun --nproc-per-node {count}")
    torch.accelerator.set_device_index(index)  # otherwise NCCL uses the first one in every process
    return torch.device(device.type, index)


def _connect(device: torch.device, timeout_s: float) -> None:
    """Join the default process group, once all processes are there."""
    backends = _group_backends(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store = _unused_store(store, rank, size, timeout_s)
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)
        dist.all_reduce(torch.zeros(1))  # a rank must not leave while others still connect
    except ParallelError:  # of the store; it is a RuntimeError too
        raise
    except (RuntimeError, ValueError) as error:  # an unknown host, a timeout, a port out of range
        host = os.environ["MASTER_ADDR"]
        port = os.environ["MASTER_PORT"]
        problem = f"no connection to the other processes at {host}:{port}"
        raise ParallelError(f"{problem} ({first_line(error)})") from error


def _group_backends(device: torch.device) -> str:
    """The backends of the process group: gloo on the CPU, the device's own beside it."""
    if backend(device).is_host:
        return "gloo"
    device_backend = dist.Backend.default_device_backend_map[device.type]  # ROCm's is "nccl" too
    return f"cpu:gloo,{device.type}:{device_backend}"


def _unused_store(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """The store under a prefix that all ranks agree on, and no earlier start has used.

    torchrun gives processes that it starts anew the store of those before them, with addresses
    where nobody listens any more (pytorch issue 135712), and no number that is the same on all
    nodes. So rank 0 draws a name, and gives it to each of the others together with what that one
    has drawn, by which it sees that the name is of this time.
    """
    if rank == 0:
        name = _offer_name(store, size, timeout_s)
    else:
        name = _receive_name(store, rank, timeout_s)
    return dist.PrefixStore(name, store)


def _offer_name(store: dist.Store, size: int, timeout_s: float) -> str:
    """A new name, once every other rank has it."""
    end = time.monotonic() + timeout_s
    name = uuid.uuid4().hex
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            request = f"amp_lab/{rank}"
            if store.check([request]):
                # Offered in every turn, since what was read may be an earlier start's as well.
                receiver = store.get(request).decode()
                store.set(f"amp_lab/to/{rank}", f"{receiver} {name}")
            if store.check([f"amp_lab/{name}/{rank}"]):
                missing.remove(rank)
        ranks = ", ".join(map(str, sorted(missing)))
        _wait_until(end, f"rank {ranks} did not come", timeout_s)
    return name


def _receive_name(store: dist.Store, rank: int, timeout_s: float) -> str:
    """The name that rank 0 offers to this rank."""
    end = time.monotonic() + timeout_s
    drawn = uuid.uuid4().hex
    store.set(f"amp_lab/{rank}", drawn)
    offer = f"amp_lab/to/{rank}"
    name = None
    while name is None:
        if store.check([offer]):
            receiver, offered = store.get(offer).decode().split()
            if receiver == drawn:  # an offer to another name is left from an earlier start
                name = offered
        _wait_until(end, "rank 0 does not answer", timeout_s)
    store.set(f"amp_lab/{name}/{rank}", "here")
    return name


def _wait_until(end: float, problem: str, timeout_s: float) -> None:
    if time.monotonic() > end:
        raise ParallelError(f"{problem} within {timeout_s:g} s")
    time.sleep(0.01)

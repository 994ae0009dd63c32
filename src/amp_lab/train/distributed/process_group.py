"""Join the processes that torchrun started into a process group, and pick their devices."""

from __future__ import annotations  # torch may be built without the classes that some name

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

_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_last_group: list[dist.ProcessGroup | None] = []  # keeps a group alive: see `join`


@contextlib.contextmanager
def join(
    kind: str | None, device: torch.device, *, reduce_dtype: str = "fp32", timeout_s: float = 300
) -> Iterator[Ranks]:
    """Join the process group of torchrun's processes for a block; yield this process's `Ranks`.

    `kind` is "ddp", "fsdp", or None for a single process. Each process uses the accelerator with
    its local rank. Gradients are summed in `reduce_dtype`, "fp32", "bf16" or "fp16". No process
    waits for another longer than `timeout_s`.

    Raises `ParallelError` for a wrong argument, without torchrun, with too few devices, or if the
    other processes cannot be reached. If another process ends during the block, gloo raises
    `ParallelError` in the block, and NCCL ends this process.
    """
    _require_possible(kind, reduce_dtype, timeout_s)
    if kind is None:
        yield Ranks(device=device)
        return
    device = _select_device(device)
    _connect(device, timeout_s)
    # Whether the group may be destroyed. With NCCL that would hang while another rank is still in a
    # collective, so only if all ranks leave the block together.
    can_destroy_group = backend(device).is_host
    try:
        yield Ranks(Parallel(kind), device, reduce_dtype)
        can_destroy_group = True
    except AmpLabError as error:
        if isinstance(error, OtherRankError):  # all ranks raise it together
            can_destroy_group = True
        error.is_of_one_rank = True  # so that this process prints it at once
        raise
    except RuntimeError as error:
        if not is_lost(error):
            raise
        # gloo may add a guess at the cause, which is left out.
        reason = first_line(error).partition(". This is typically")[0]
        problem = f"rank {os.environ['RANK']}: no answer from another process ({reason})"
        raise ParallelError(problem) from error
    finally:
        if can_destroy_group:
            # Keep a reference to the group. If a DDP model had the last one, freeing the model
            # would wait for gloo's threads while holding the GIL, which they may need themselves.
            _last_group[:] = [dist.group.WORLD]
            dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether an error of torch.distributed means that another process does not respond."""
    if not isinstance(error, RuntimeError) or not dist.is_available():
        return False
    if isinstance(error, dist.DistError):
        return True
    return "gloo" in str(error)  # gloo raises a plain RuntimeError


def _require_possible(kind: str | None, reduce_dtype: str, timeout_s: float) -> None:
    """Raise `ParallelError` for a wrong argument of `join`, or a missing or unexpected torchrun."""
    if reduce_dtype not in REDUCE_DTYPES:
        raise ParallelError(
            f"gradients cannot be summed in {reduce_dtype!r}: use one of {', '.join(REDUCE_DTYPES)}"
        )
    if not 1 <= timeout_s <= 1e6:  # a NaN fails this comparison too
        raise ParallelError(f"timeout must be 1 to 1,000,000 seconds, not {timeout_s:g}")
    if kind is not None:
        _require_parallel_possible(kind)
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and size != "1":  # each process would train the whole run by itself
        raise ParallelError(
            f"torchrun started {size} processes: add --parallel ddp or --parallel fsdp"
        )
    if reduce_dtype != "fp32":
        raise ParallelError(
            f"reduce dtype {reduce_dtype} needs --parallel: a single process does not sum gradients"
        )


def _require_parallel_possible(kind: str) -> None:
    """Raise `ParallelError` unless several processes can train as `kind` says."""
    missing = ", ".join(name for name in _TORCHRUN_VARIABLES if name not in os.environ)
    if kind not in list(Parallel):
        raise ParallelError(
            f"unknown value {kind!r} of --parallel: use one of {', '.join(Parallel)}"
        )
    if missing:
        start = "torchrun --nproc-per-node N -m amp_lab train …"
        raise ParallelError(f"--parallel {kind} needs {missing}: start with {start}")
    if not dist.is_available():
        raise ParallelError(
            f"--parallel {kind} needs torch.distributed, which this torch does not have"
        )


def _select_device(device: torch.device) -> torch.device:
    """Make the accelerator with this process's local rank the current device, and return it.

    A `device` with an index is taken itself, and the CPU is returned as it is: all processes share
    it. Raises `ParallelError` if there are too few accelerators, torch.distributed has no backend
    for them, or several processes would use the same one.
    """
    if backend(device).is_host:
        return device
    if device.type not in dist.Backend.default_device_backend_map:
        raise ParallelError(f"torch.distributed has no backend for {device.type}: use --device cpu")
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.index is not None and processes_here > 1:
        raise ParallelError(
            f"device {device}: each process needs another device; give only {device.type}"
        )
    index = device.index
    if index is None:
        index = int(os.environ["LOCAL_RANK"])
    count = torch.get_device_module(device.type).device_count()
    if index >= count:
        problem = f"this machine has only {count} {device.type} devices, fewer than processes"
        raise ParallelError(f"{problem}: start {count} with torchrun --nproc-per-node {count}")
    torch.accelerator.set_device_index(index)  # otherwise NCCL in every process uses device 0
    return torch.device(device.type, index)


def _connect(device: torch.device, timeout_s: float) -> None:
    """Join the default process group, and wait until all processes have joined.

    Raises `ParallelError` if that fails or takes longer than `timeout_s`.
    """
    backends = _group_backends(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store = _fresh_store(store, rank, size, timeout_s)
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)
        dist.all_reduce(torch.zeros(1))  # so that no rank leaves while others still connect
    except ParallelError:  # from `_fresh_store`; it is a RuntimeError too
        raise
    except (RuntimeError, ValueError) as error:  # an unknown host, a timeout, a wrong port
        host = os.environ["MASTER_ADDR"]
        port = os.environ["MASTER_PORT"]
        problem = f"no connection to the other processes at {host}:{port}"
        raise ParallelError(f"{problem} ({first_line(error)})") from error


def _group_backends(device: torch.device) -> str:
    """The backends of the process group: ``gloo``, or with a GPU ``cpu:gloo,cuda:nccl``."""
    if backend(device).is_host:
        return "gloo"
    device_backend = dist.Backend.default_device_backend_map[device.type]
    return f"cpu:gloo,{device.type}:{device_backend}"


def _fresh_store(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """A view of the store whose keys get a new prefix, on which all ranks agree.

    When torchrun restarts the processes, they get the same store, which still has the addresses of
    the processes before them (pytorch issue 135712). torchrun gives no number of the restart that
    is the same on all nodes, so the ranks agree on a random prefix:

    - each rank > 0 draws a token, and writes it to amp_lab/RANK (`_receive_prefix`);
    - rank 0 draws the prefix, and answers in amp_lab/to/RANK with that token and the prefix;
    - a rank ignores an answer with another token than its own, which is left from an earlier
      start, and confirms the right one by writing to amp_lab/PREFIX/RANK.
    """
    if rank == 0:
        prefix = _offer_prefix(store, size, timeout_s)
    else:
        prefix = _receive_prefix(store, rank, timeout_s)
    return dist.PrefixStore(prefix, store)


def _offer_prefix(store: dist.Store, size: int, timeout_s: float) -> str:
    """Draw a new prefix on rank 0, and return it once every other rank has received it.

    Raises `ParallelError` if that takes longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    prefix = uuid.uuid4().hex
    missing = set(range(1, size))  # ranks that have not confirmed the prefix
    while missing:
        for rank in sorted(missing):
            request = f"amp_lab/{rank}"
            if store.check([request]):
                # Answered in every round, since the token may be that of an earlier start, and the
                # rank may not have written its new one yet.
                token = store.get(request).decode()
                store.set(f"amp_lab/to/{rank}", f"{token} {prefix}")
            if store.check([f"amp_lab/{prefix}/{rank}"]):
                missing.remove(rank)
        ranks = ", ".join(map(str, sorted(missing)))
        _sleep_or_time_out(deadline, f"rank {ranks} did not connect", timeout_s)
    return prefix


def _receive_prefix(store: dist.Store, rank: int, timeout_s: float) -> str:
    """Wait for the prefix that rank 0 offers to this rank, confirm it, and return it.

    Raises `ParallelError` if that takes longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    own_token = uuid.uuid4().hex
    store.set(f"amp_lab/{rank}", own_token)
    answer = f"amp_lab/to/{rank}"
    prefix = None
    while prefix is None:
        if store.check([answer]):
            token, offered_prefix = store.get(answer).decode().split()
            if token == own_token:  # other answers are left from an earlier start
                prefix = offered_prefix
        _sleep_or_time_out(deadline, "rank 0 does not answer", timeout_s)
    store.set(f"amp_lab/{prefix}/{rank}", "here")
    return prefix


def _sleep_or_time_out(deadline: float, problem: str, timeout_s: float) -> None:
    """Sleep for 10 ms; raise `ParallelError` if the `deadline` has passed.

    `deadline` is a time of `time.monotonic`; the error has `problem` and `timeout_s`.
    """
    if time.monotonic() > deadline:
        raise ParallelError(f"{problem} within {timeout_s:g} s")
    time.sleep(0.01)

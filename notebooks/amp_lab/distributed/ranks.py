"""One model trained by several processes: what DDP and FSDP2 need around the training loop."""

from __future__ import annotations  # torch can be built without what some of them name

import contextlib
import datetime
import enum
import inspect
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_lab.errors import AmpLabError, OtherRankError, ParallelError, first_line
from amp_lab.precision import Precision

TIMEOUT_S = 300.0
"""How long a process waits for the others, by default, before it gives them up."""
REDUCE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes in which gradients can be summed over the processes."""
_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun
_T = TypeVar("_T")


class Parallel(enum.StrEnum):
    """How the processes share the work on a model."""

    DDP = "ddp"
    """Each has the whole model; the gradients are averaged."""
    FSDP = "fsdp"
    """Each keeps a part of weights, gradients and optimizer state, and gathers weights as needed
    (FSDP2)."""


class Ranks:
    """This process among those that train a model together; by itself if `kind` is None.

    What is done alike by all of them (`each`, `first`, `total`, …) must be called by all.
    """

    def __init__(
        self,
        kind: Parallel | None = None,
        device: torch.device | None = None,
        reduce_dtype: str = "fp32",
    ):
        self.kind, self.device, self.reduce_dtype = kind, device, reduce_dtype
        self.rank = dist.get_rank() if kind else 0
        self.size = dist.get_world_size() if kind else 1
        self._asked: tuple[dist.Work, Tensor] | None = None

    def __str__(self) -> str:
        if self.kind is None:
            return "1 process"
        plural = "es" if self.size > 1 else ""
        return f"{self.size} {self.kind} process{plural}, gradients summed in {self.reduce_dtype}"

    def each(self, call: Callable[[], _T]) -> _T:
        """What `call` returns here, once it has returned on every rank.

        An error on any rank is raised on all: there as it is, elsewhere as `OtherRankError`, so
        that one rank tells it and none waits for another.
        """
        if self.kind is None:
            return call()
        value = error = None
        try:
            value = call()
        except Exception as caught:
            error = caught
        is_told_here = error is not None and not isinstance(error, OtherRankError)
        self._raise_first(self.gather(str(error) if is_told_here else None), error)
        return value

    def first(self, call: Callable[[], _T]) -> _T:
        """What `call` returns on rank 0, given to every rank; its error is raised as in `each`."""
        if self.kind is None:
            return call()
        value = self.each(call if self.rank == 0 else lambda: None)
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in their order. They must be picklable."""
        values = [value] * self.size
        if self.kind is not None:
            dist.all_gather_object(values, value)
        return values

    def require_same(self, settings: dict) -> None:
        """Raise `ParallelError` if another rank has other settings than rank 0."""
        gathered = self.gather(settings)

        def compare() -> None:
            for rank, others in enumerate(gathered):
                for name in sorted(settings.keys() | others.keys()):
                    here, there = (str(side.get(name)) for side in (gathered[0], others))
                    if here != there:
                        raise ParallelError(
                            f"rank {rank} was started with {name.replace('_', ' ')} {there}, "
                            f"rank 0 with {here}: give all the same"
                        )

        self.first(compare)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, as a new tensor."""
        if self.kind is None:
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    def largest_before(self, number: int) -> int:
        """The largest number that any rank gave in the call before this; 0 in the first call.

        Nobody waits: the numbers of this call travel while the next step is computed. A process by
        itself gets its number back at once.
        """
        if self.kind is None:
            return number
        before = self._asked
        mine = torch.tensor(number)
        self._asked = dist.all_reduce(mine, dist.ReduceOp.MAX, async_op=True), mine
        if before is None:
            return 0
        before[0].wait()
        return int(before[1])

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """The module to train in place of `model`, put on the device.

        With FSDP2 it is `model` itself, whose parameters become shards, so its optimizer is made
        afterwards; its weights are gathered and multiplied in the dtype of `precision`, which takes
        the place of autocast. Batch norms keep fp32 weights, like their statistics.
        """
        if self.kind is Parallel.FSDP:
            self._shard(model, precision)  # which moves each part as it is cut
            return model
        model.to(self.device)
        if self.kind is Parallel.DDP:
            from torch.nn.parallel import DistributedDataParallel

            # The buffers are those of rank 0 wherever it matters: see `share_buffers`.
            accepted = inspect.signature(DistributedDataParallel).parameters
            newer = "forward_sync_buffers" in accepted  # from torch 2.15 on
            wrapped = DistributedDataParallel(
                model,
                device_ids=None if self.device.type == "cpu" else [self.device],
                gradient_as_bucket_view=True,
                **{"forward_sync_buffers" if newer else "broadcast_buffers": False},
            )
            hook = _hook(self.reduce_dtype)
            if hook is not None:
                wrapped.register_comm_hook(None, hook)
            return wrapped
        return model

    def _shard(self, model: nn.Module, precision: Precision) -> None:
        # Takes a second to load, which those who train alone need not wait for.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # Of the group that there is: one that a mesh makes for itself has a timeout of its own.
        mesh = DeviceMesh.from_group(dist.group.WORLD, self.device.type)
        low = precision.dtype if precision in (Precision.FP16, Precision.BF16) else None
        reduce = REDUCE_DTYPES[self.reduce_dtype]
        inside = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)
        whole = MixedPrecisionPolicy(low, reduce, output_dtype=torch.float32)
        norms = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
        for block in [*_blocks(model), model]:
            inner = [
                module
                for module in block.modules()
                if isinstance(module, _BatchNorm) and not isinstance(module, FSDPModule)
            ]
            if low is not None and inner:
                fully_shard(inner, mesh=mesh, mp_policy=norms)
            fully_shard(block, mesh=mesh, mp_policy=whole if block is model else inside)

    @contextlib.contextmanager
    def gradient_sync(self, model: nn.Module, wanted: bool) -> Iterator[None]:
        """A forward and backward pass whose gradients are summed over the ranks only if `wanted`.

        While they are accumulated that need not be, and would be sent each time.
        """
        if self.kind is Parallel.DDP and not wanted:
            with model.no_sync():
                yield
            return
        if self.kind is Parallel.FSDP:
            model.set_requires_gradient_sync(wanted)
        yield

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, such as the statistics of batch norm.

        Each rank collects its own while it trains, and uses them only in evaluation.
        """
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def _raise_first(self, errors: list[str | None], mine: Exception | None) -> None:
        for rank, error in enumerate(errors):
            if error is None:
                continue
            if rank != self.rank:
                # torchrun ends all as soon as one has ended, and the other has a line to print.
                time.sleep(1)
                raise OtherRankError(f"rank {rank}: {error}")
            named = str(mine).startswith("rank ")
            if rank > 0 and isinstance(mine, AmpLabError) and not named:
                raise type(mine)(f"rank {rank}: {mine}") from mine
            raise mine


def _hook(reduce_dtype: str) -> Callable | None:
    """What DDP is to do with the gradients that it sends."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def to_bf16(group, bucket):
        # torch's own, which DDP refuses by its name where torch was built without CUDA.
        return default_hooks.bf16_compress_hook(group, bucket)

    return {"fp16": default_hooks.fp16_compress_hook, "bf16": to_bf16}.get(reduce_dtype)


ALONE = Ranks()


@contextlib.contextmanager
def join(
    kind: Parallel | str | None,
    device: torch.device,
    *,
    reduce_dtype: str = "fp32",
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Ranks]:
    """The processes that torchrun started, this one among them, as a group for the block.

    On an accelerator each takes the device of its number on its machine. Gradients are summed in
    `reduce_dtype`, "fp32", "bf16" or "fp16". No process waits for another longer than `timeout_s`.

    Raises `ParallelError` if there is no torchrun, too few devices, or no connection to the others,
    and from within the block if gloo finds one of them lost; NCCL ends the process then.
    """
    kind = _checked(kind, reduce_dtype, timeout_s)
    if kind is None:
        yield Ranks(device=device)
        return
    device = _own_device(device)
    _connect(_backend(device), timeout_s)
    agreed = device.type == "cpu"  # NCCL would wait for those who still are in a collective
    try:
        yield Ranks(kind, device, reduce_dtype)
        agreed = True
    except OtherRankError:
        agreed = True
        raise
    except AmpLabError as error:
        error.is_of_one_rank = True
        raise
    except RuntimeError as error:
        if not is_lost(error):
            raise
        reason = first_line(error).partition(". This is typically")[0]
        raise ParallelError(
            f"rank {os.environ['RANK']}: no answer from another process ({reason})"
        ) from error
    finally:
        if agreed:
            _leave()


_last_group: dist.ProcessGroup | None = None


def _leave() -> None:
    """End the group, and keep it from being freed by the model, which may live on.

    A model under DDP that lets go of the group last waits for gloo's threads without giving up the
    interpreter's lock, while one of them may need that to free a tensor: neither would ever end.
    """
    global _last_group
    _last_group = dist.group.WORLD
    dist.destroy_process_group()


def _checked(kind: Parallel | str | None, reduce_dtype: str, timeout_s: float) -> Parallel | None:
    if reduce_dtype not in REDUCE_DTYPES:
        raise ParallelError(
            f"no dtype {reduce_dtype!r} to sum gradients in; there are {', '.join(REDUCE_DTYPES)}"
        )
    if not 1 <= timeout_s <= 1e6:
        raise ParallelError(f"timeout must be 1 to 1,000,000 seconds, not {timeout_s:g}")
    if kind is None:
        size = os.environ.get("WORLD_SIZE", "1")
        if "RANK" in os.environ and size != "1":
            raise ParallelError(
                f"one of {size} processes of torchrun: add --parallel ddp or --parallel fsdp"
            )
        if reduce_dtype != "fp32":
            raise ParallelError(
                f"reduce dtype {reduce_dtype}: one process sums nothing; it needs --parallel"
            )
        return None
    if kind not in list(Parallel):
        raise ParallelError(
            f"no way {kind!r} to train in parallel; there are {', '.join(Parallel)}"
        )
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise ParallelError(
            f"parallel {kind}: start it with torchrun --nproc-per-node N -m amp_lab train …, "
            f"which sets {', '.join(missing)}"
        )
    if not dist.is_available():
        raise ParallelError(f"parallel {kind}: this torch was built without torch.distributed")
    return Parallel(kind)


def _connect(backend: str, timeout_s: float) -> None:
    """Make the process group."""
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            backend,
            store=_unused_part(store, rank, size, timeout_s),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # no such host, nobody there, a wrong number
        if isinstance(error, ParallelError):
            raise
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ParallelError(
            f"no connection to the other processes at {where} ({first_line(error)})"
        ) from error


def _unused_part(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """A part of the store that all ranks take, and none has ever used.

    torchrun gives processes that it starts anew the store of those before them, in which they would
    find addresses where nobody listens any more (pytorch issue 135712), and no number that is the
    same on all nodes. So rank 0 draws a name, and gives it to each of the others together with what
    that one has drawn, by which it sees that the name is of this time.
    """
    end = time.monotonic() + timeout_s
    drawn = uuid.uuid4().hex
    if rank > 0:
        store.set(f"amp_lab/{rank}", drawn)
        name = None
        while name is None:
            if store.check([f"amp_lab/to/{rank}"]):
                whose, offered = store.get(f"amp_lab/to/{rank}").decode().split()
                name = offered if whose == drawn else None
            _wait_until(end, "rank 0 does not answer", timeout_s)
        store.set(f"amp_lab/{name}/{rank}", "here")
        return dist.PrefixStore(name, store)
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"amp_lab/{other}"]):
                whose = store.get(f"amp_lab/{other}").decode()
                store.set(f"amp_lab/to/{other}", f"{whose} {drawn}")
            if store.check([f"amp_lab/{drawn}/{other}"]):
                missing.remove(other)
        _wait_until(end, f"rank {', '.join(map(str, sorted(missing)))} did not come", timeout_s)
    return dist.PrefixStore(drawn, store)


def _wait_until(end: float, complaint: str, timeout_s: float) -> None:
    if time.monotonic() > end:
        raise ParallelError(f"{complaint} within {timeout_s:g} s")
    time.sleep(0.01)


def _own_device(device: torch.device) -> torch.device:
    """The device of this process, among those of its machine."""
    if device.type == "cpu":
        return device
    if device.type not in dist.Backend.default_device_backend_map:
        raise ParallelError(f"torch.distributed has no backend for {device.type}; use the cpu")
    if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise ParallelError(f"device {device}: each process takes one; give {device.type} alone")
    index = int(os.environ["LOCAL_RANK"]) if device.index is None else device.index
    count = torch.get_device_module(device.type).device_count()
    if index >= count:
        raise ParallelError(
            f"more processes on this machine than its {count} {device.type} devices: start one for "
            f"each, torchrun --nproc-per-node {count}"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _backend(device: torch.device) -> str:
    """gloo for what lies on the CPU, and what the device has (nccl also stands for rccl)."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}"


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process does not answer; gloo's have no type of theirs."""
    if not dist.is_available():
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are gathered one at a time: the outermost in lists, if of several layers."""
    for child in model.children():
        if type(child) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            yield from _blocks(child)
        elif any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child

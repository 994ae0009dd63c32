"""One process among those that train a model together: agreeing, and wrapping the model."""

import contextlib
import enum
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_lab.core.backends import backend
from amp_lab.core.errors import AmpLabError, OtherRankError, ParallelError
from amp_lab.core.precision import Precision
from amp_lab.core.torch_versions import no_buffer_broadcast
from amp_lab.parallel.shared_memory import FsdpCollective, share_memory

# In which gradients can be summed over the processes.
REDUCE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CPU = torch.device("cpu")
_T = TypeVar("_T")


class Parallel(enum.StrEnum):
    """How the processes share the training of a model."""

    DDP = "ddp"  # each has the whole model; the gradients are averaged
    FSDP = "fsdp"  # FSDP2: each keeps a part of all state, and gathers weights as needed


class Ranks:
    """This process among those that train a model together; by itself if `kind` is None.

    What is done alike by all of them (`each`, `first`, `total`, …) must be called by all.
    """

    def __init__(
        self, kind: Parallel | None = None, device: torch.device = _CPU, reduce_dtype: str = "fp32"
    ):
        self.kind = kind
        self.device = device
        self.reduce_dtype = reduce_dtype
        self.rank = 0
        self.size = 1
        if kind is not None:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
        self._pending: tuple[dist.Work, Tensor] | None = None  # of `largest_before`

    def __str__(self) -> str:
        if self.kind is None:
            return "1 process"
        processes = "processes" if self.size > 1 else "process"
        return f"{self.size} {self.kind} {processes}, gradients summed in {self.reduce_dtype}"

    def each(self, call: Callable[[], _T]) -> _T:
        """What `call` returns here, once it has returned on every rank.

        An error on any rank is raised there as it is, elsewhere as `OtherRankError`, so that one
        rank reports it and none waits for another.
        """
        if self.kind is None:
            return call()
        value: Any = None
        error: Exception | None = None
        try:
            value = call()
        except Exception as caught:  # any: the others wait for this rank, whatever went wrong
            error = caught
        own_error = None
        if error is not None and not isinstance(error, OtherRankError):
            own_error = str(error)
        self._raise_first(self.gather(own_error), error)
        return value

    def first(self, call: Callable[[], _T]) -> _T:
        """What `call` returns on rank 0, given to every rank; its error is raised as in `each`."""
        if self.kind is None:
            return call()

        def call_on_rank_0() -> _T | None:
            return call() if self.rank == 0 else None

        objects: list[Any] = [self.each(call_on_rank_0)]
        dist.broadcast_object_list(objects, src=0)
        return objects[0]

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in their order. They must be picklable."""
        values = [value] * self.size
        if self.kind is not None:
            dist.all_gather_object(values, value)
        return values

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, as a new tensor."""
        if self.kind is None:
            return tensor
        tensor = tensor.clone()  # all_reduce writes into what it is given
        dist.all_reduce(tensor)
        return tensor

    def largest_before(self, number: int) -> int:
        """The largest number that any rank gave in the call before this; 0 in the first call.

        Its numbers travel while the next step is computed. A process alone gets its own at once.
        """
        if self.kind is None:
            return number
        pending = self._pending
        largest = torch.tensor(number)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
        self._pending = (work, largest)
        if pending is None:
            return 0
        work_before, largest_before = pending
        work_before.wait()
        return int(largest_before)

    def _raise_first(self, errors: list[str | None], own: Exception | None) -> None:
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        rank = failed[0]
        if rank != self.rank:
            # torchrun ends all as soon as one has ended, and the other has a line to print.
            time.sleep(1)
            raise OtherRankError(f"rank {rank}: {errors[rank]}")
        assert own is not None, "this rank has reported an error"
        is_named = str(own).startswith("rank ")
        if rank > 0 and isinstance(own, AmpLabError) and not is_named:
            raise type(own)(f"rank {rank}: {own}") from own
        raise own

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """The module to train in place of `model`, on the device; its optimizer is made afterwards.

        With FSDP2 it is `model` itself, whose weights are gathered and multiplied in the dtype of
        `precision`, in place of autocast. Batch norms keep fp32 weights, like their statistics.
        """
        if self.kind is Parallel.FSDP:
            self._shard(model, precision)  # it moves each part as it is cut
            return model
        model.to(self.device)
        if self.kind is None:
            return model
        options: dict[str, Any] = no_buffer_broadcast()  # all take rank 0's wherever it matters
        options["device_ids"] = None if backend(self.device).is_host else [self.device]
        options["gradient_as_bucket_view"] = True  # without it, gradients are kept twice
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        hook = self._gradient_hook()
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    def _gradient_hook(self) -> Callable | None:
        """What sums DDP's gradients in place of torch's own way, if anything does."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        memory = share_memory(self.device)
        if memory is not None:
            dtype = REDUCE_DTYPES[self.reduce_dtype]
            return lambda group, bucket: memory.average(bucket, dtype)
        if self.reduce_dtype != "fp32":
            compress = getattr(default_hooks, f"{self.reduce_dtype}_compress_hook")
            # Not itself: where torch was built without CUDA, DDP refuses the one for bf16 by name.
            return lambda group, bucket: compress(group, bucket)
        return None

    @functools.cached_property
    def mesh(self) -> Any:
        """The device mesh of all ranks, of the group that there is.

        One that a mesh makes for itself has a timeout of its own.
        """
        from torch.distributed.device_mesh import DeviceMesh  # takes a second to load

        assert dist.group.WORLD is not None, "`join` has made it"
        return DeviceMesh.from_group(dist.group.WORLD, self.device.type)

    def _shard(self, model: nn.Module, precision: Precision) -> None:
        # Takes a second to load, which those who train alone need not wait for.
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mesh = self.mesh
        low = precision.dtype if _is_16_bit(precision) else None
        reduce = REDUCE_DTYPES[self.reduce_dtype]
        block_policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)
        # The model's outputs go into the loss.
        model_policy = MixedPrecisionPolicy(low, reduce, output_dtype=torch.float32)
        # Batch norm's kernel takes 16-bit activations beside fp32 weights, as under autocast.
        norm_policy = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)

        def shard(block: nn.Module, policy: MixedPrecisionPolicy) -> None:
            norms: list[nn.Module] = [m for m in block.modules() if isinstance(m, _BatchNorm)]
            # Without those of a block that is sharded already.
            norms = [norm for norm in norms if not isinstance(norm, FSDPModule)]
            if low is not None and norms:
                fully_shard(norms, mesh=mesh, mp_policy=norm_policy)
            fully_shard(block, mesh=mesh, mp_policy=policy)

        for block in list(_blocks(model)):
            shard(block, block_policy)
        shard(model, model_policy)  # last: it takes what no block holds
        memory = share_memory(self.device)
        if memory is not None:
            # Without their type, which asks for torch's own classes, and not for what they do.
            units: Any = [m for m in model.modules() if isinstance(m, FSDPModule)]
            for unit in units:
                unit.set_custom_all_gather(FsdpCollective(memory.all_gather))
                unit.set_custom_reduce_scatter(FsdpCollective(memory.reduce_scatter))

    def set_memory_format(self, model: nn.Module, memory_format: torch.memory_format) -> None:
        """Put the weights into a memory format, unless they are shards, which have none."""
        if self.kind is not Parallel.FSDP:
            model.to(memory_format=memory_format)

    def autocast(self, precision: Precision, device_type: str) -> torch.autocast:
        """Autocast for a forward pass: it does nothing in fp32 and tf32, and under FSDP2."""
        is_sharded = self.kind is Parallel.FSDP  # its policy casts instead
        enabled = _is_16_bit(precision) and not is_sharded
        return torch.autocast(device_type, dtype=precision.dtype, enabled=enabled)

    def no_gradients(self) -> contextlib.AbstractContextManager:
        """The block of an evaluation."""
        if self.kind is Parallel.FSDP:
            # FSDP2 allocates once what it gathers weights into, and trains with it afterwards.
            # Autograd refuses tensors that were made in inference mode.
            return torch.no_grad()
        return torch.inference_mode()

    @contextlib.contextmanager
    def gradient_sync(self, model: nn.Module, wanted: bool) -> Iterator[None]:
        """A forward and backward pass; gradients are summed over the ranks only if `wanted`."""
        wrapped: Any = model  # by DDP or FSDP2, whose methods `nn.Module` does not have
        if self.kind is Parallel.FSDP:
            wrapped.set_requires_gradient_sync(wanted)
        if self.kind is Parallel.DDP and not wanted:
            with wrapped.no_sync():
                yield
        else:
            yield

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, such as the statistics that evaluation uses."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


ALONE = Ranks()


def require_same(settings: list[dict]) -> None:
    """Raise `ParallelError` if a rank has other settings than rank 0; given those of each rank."""
    first = settings[0]
    for rank, others in enumerate(settings):
        for name in sorted(first.keys() | others.keys()):
            on_rank_0 = str(first.get(name))
            on_rank = str(others.get(name))
            if on_rank != on_rank_0:
                difference = f"{name.replace('_', ' ')} {on_rank}, rank 0 with {on_rank_0}"
                raise ParallelError(f"rank {rank} was started with {difference}: give all the same")


def _is_16_bit(precision: Precision) -> bool:
    return precision in (Precision.FP16, Precision.BF16)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are gathered one at a time: the outermost in lists, if of several layers."""
    for child in model.children():
        # By type, not isinstance: a subclass has a forward of its own, and is a block itself.
        if type(child) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            yield from _blocks(child)
        elif any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child

"""The ranks that train a model together: how they communicate, and how they wrap the model."""

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

# The dtypes in which gradients can be summed over the processes.
REDUCE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CPU = torch.device("cpu")
_T = TypeVar("_T")


class Parallel(enum.StrEnum):
    """How the processes share the training of a model."""

    DDP = "ddp"  # each has the whole model; the gradients are averaged
    FSDP = "fsdp"  # FSDP2: each keeps a part of all state, and gathers weights as needed


class Ranks:
    """The processes that train a model together, as this one sees them.

    Without a `kind`, there is only this process. `device` is the device of this rank, and
    `reduce_dtype`, a key of `REDUCE_DTYPES`, is the dtype in which gradients are summed.

    Methods that communicate (`each`, `first`, `gather`, `total`, …) must be called on every rank.
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
        # In `largest_before`: the last call's reduction, and the tensor that it writes into.
        self._pending: tuple[dist.Work, Tensor] | None = None

    def __str__(self) -> str:
        if self.kind is None:
            return "1 process"
        processes = "processes" if self.size > 1 else "process"
        return f"{self.size} {self.kind} {processes}, gradients summed in {self.reduce_dtype}"

    def each(self, call: Callable[[], _T]) -> _T:
        """Run `call` on every rank; return the value of this rank when all ranks are done.

        If `call` fails on a rank, its error is raised on that rank, and an `OtherRankError` on the
        other ranks, so no rank waits for a rank that has failed.
        """
        if self.kind is None:
            return call()
        value: Any = None
        error: Exception | None = None
        try:
            value = call()
        except Exception as caught:  # of any type, since the other ranks wait for this one
            error = caught
        message = None
        if error is not None and not isinstance(error, OtherRankError):  # the other rank reports it
            message = str(error)
        self._raise_first(self.gather(message), error)  # returns if no rank has a message
        return value

    def first(self, call: Callable[[], _T]) -> _T:
        """Run `call` on rank 0; return its value on every rank. Errors are raised as in `each`."""
        if self.kind is None:
            return call()

        def call_on_rank_0() -> _T | None:
            return call() if self.rank == 0 else None

        objects: list[Any] = [self.each(call_on_rank_0)]
        dist.broadcast_object_list(objects, src=0)  # replaces the item on the other ranks
        return objects[0]

    def gather(self, value: _T) -> list[_T]:
        """The values that all ranks pass, in the order of the ranks. They must be picklable."""
        values = [value] * self.size
        if self.kind is not None:
            dist.all_gather_object(values, value)
        return values

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, as a new tensor; a single process gets `tensor`."""
        if self.kind is None:
            return tensor
        tensor = tensor.clone()  # all_reduce works in place
        dist.all_reduce(tensor)
        return tensor

    def largest_before(self, number: int) -> int:
        """The largest number that any rank passed to the previous call; 0 in the first call.

        The numbers are sent while the next step is computed, so no rank waits for them. A single
        process gets the number of this call.
        """
        if self.kind is None:
            return number
        previous = self._pending
        largest = torch.tensor(number)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
        self._pending = (work, largest)
        if previous is None:
            return 0
        previous_work, previous_largest = previous
        previous_work.wait()
        return int(previous_largest)

    def _raise_first(self, messages: list[str | None], own_error: Exception | None) -> None:
        """Raise the error of the first rank that failed, if any, as `each` says.

        `messages` has the error of each rank as a text, None for a rank that has not failed.
        """
        failed_ranks = [rank for rank, message in enumerate(messages) if message is not None]
        if not failed_ranks:
            return
        rank = failed_ranks[0]
        if rank != self.rank:
            # torchrun ends all processes as soon as one ends: let the failed one print its line.
            time.sleep(1)
            raise OtherRankError(f"rank {rank}: {messages[rank]}")
        assert own_error is not None, "this rank has reported an error"
        names_rank = str(own_error).startswith("rank ")  # as errors of `require_same` do
        if rank > 0 and isinstance(own_error, AmpLabError) and not names_rank:
            raise type(own_error)(f"rank {rank}: {own_error}") from own_error
        raise own_error

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """Move `model` to the device and return the module to train: itself, or wrapped by DDP.

        Create the optimizer afterwards, since FSDP2 replaces the parameters. FSDP2 gathers weights
        and computes in the dtype of `precision`, without autocast. The weights and statistics of
        batch norms stay in fp32.
        """
        if self.kind is Parallel.FSDP:
            self._shard(model, precision)  # it moves the shards to the device
            return model
        model.to(self.device)
        if self.kind is None:
            return model
        # DDP would copy the buffers of rank 0 before each forward pass. `share_buffers` does it
        # where they must be the same.
        options: dict[str, Any] = no_buffer_broadcast()
        options["device_ids"] = None if backend(self.device).is_host else [self.device]
        options["gradient_as_bucket_view"] = True  # without it, gradients are kept twice
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        if self.reduce_dtype != "fp32":
            _sum_gradients_in(wrapped, self.reduce_dtype)
        return wrapped

    @functools.cached_property
    def mesh(self) -> Any:
        """The `DeviceMesh` of all ranks, from the process group that `join` made.

        A mesh that creates its own group would not have our timeout.
        """
        from torch.distributed.device_mesh import DeviceMesh  # here, since it takes a second

        assert dist.group.WORLD is not None, "`join` has made it"
        return DeviceMesh.from_group(dist.group.WORLD, self.device.type)

    def _shard(self, model: nn.Module, precision: Precision) -> None:
        """Shard the model in place with FSDP2, block by block.

        In fp16 and bf16, the batch norms of a block are sharded apart from it, with fp32 weights.
        """
        # Imported here, since it takes a second, and training in one process does not need it.
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mesh = self.mesh
        low_dtype = precision.dtype if _is_16_bit(precision) else None
        reduce_dtype = REDUCE_DTYPES[self.reduce_dtype]
        block_policy = MixedPrecisionPolicy(param_dtype=low_dtype, reduce_dtype=reduce_dtype)
        # The model's outputs go into the loss, which is computed in fp32.
        model_policy = MixedPrecisionPolicy(low_dtype, reduce_dtype, output_dtype=torch.float32)
        # Batch norm's kernel takes 16-bit activations beside fp32 weights, as under autocast.
        norm_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)

        def shard(block: nn.Module, policy: MixedPrecisionPolicy) -> None:
            norms: list[nn.Module] = [m for m in block.modules() if isinstance(m, _BatchNorm)]
            # When the model itself is sharded, the batch norms of its blocks already are.
            norms = [norm for norm in norms if not isinstance(norm, FSDPModule)]
            if low_dtype is not None and norms:
                fully_shard(norms, mesh=mesh, mp_policy=norm_policy)
            fully_shard(block, mesh=mesh, mp_policy=policy)

        for block in list(_blocks(model)):
            shard(block, block_policy)
        shard(model, model_policy)  # last, since it takes the parameters outside of the blocks

    def set_memory_format(self, model: nn.Module, memory_format: torch.memory_format) -> None:
        """Put the weights into a memory format; with FSDP2 do nothing, since shards have none."""
        if self.kind is not Parallel.FSDP:
            model.to(memory_format=memory_format)

    def autocast(self, precision: Precision, device_type: str) -> torch.autocast:
        """Autocast, not entered, for a forward pass; disabled in fp32 and tf32, and with FSDP2."""
        is_sharded = self.kind is Parallel.FSDP  # then FSDP2's policy casts
        enabled = _is_16_bit(precision) and not is_sharded
        return torch.autocast(device_type, dtype=precision.dtype, enabled=enabled)

    def no_gradients(self) -> contextlib.AbstractContextManager:
        """The context for an evaluation: inference mode, or `no_grad` with FSDP2."""
        if self.kind is Parallel.FSDP:
            # FSDP2 gathers weights into buffers that it keeps, and also uses in training. If they
            # were made in inference mode, autograd would refuse them there.
            return torch.no_grad()
        return torch.inference_mode()

    @contextlib.contextmanager
    def gradient_sync(self, model: nn.Module, *, enabled: bool) -> Iterator[None]:
        """A context for a forward and backward pass; averages gradients over ranks if `enabled`.

        `model` is the module that `wrap` returned. For a single process, the context does nothing.
        """
        wrapped: Any = model  # by DDP or FSDP2, which add the methods below
        if self.kind is Parallel.FSDP:
            wrapped.set_requires_gradient_sync(enabled)
        if self.kind is Parallel.DDP and not enabled:
            with wrapped.no_sync():
                yield
        else:
            yield

    def share_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to every rank, such as batch norm's running statistics."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


ALONE = Ranks()


def require_same(settings: list[dict]) -> None:
    """Raise `ParallelError` if the settings of a rank, as text, differ from the settings of rank 0.

    `settings` has {name: value} for each rank, in order. A missing value counts as None.
    """
    first_settings = settings[0]
    for rank, rank_settings in enumerate(settings):
        for name in sorted(first_settings.keys() | rank_settings.keys()):
            first_value = str(first_settings.get(name))
            value = str(rank_settings.get(name))
            if value != first_value:
                difference = f"{name.replace('_', ' ')} {value}, but rank 0 with {first_value}"
                raise ParallelError(
                    f"rank {rank} was started with {difference}: give all ranks the same value"
                )


def _sum_gradients_in(wrapped: nn.parallel.DistributedDataParallel, reduce_dtype: str) -> None:
    """Make DDP sum the gradients in "fp16" or "bf16", in place of fp32."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compress = getattr(default_hooks, f"{reduce_dtype}_compress_hook")
    # In a lambda, since a torch without CUDA refuses the hook for bf16 by its name.
    wrapped.register_comm_hook(None, lambda group, bucket: compress(group, bucket))


def _is_16_bit(precision: Precision) -> bool:
    return precision in (Precision.FP16, Precision.BF16)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose weights FSDP2 gathers together, such as the layers of a transformer.

    They are the outermost modules that have children and parameters, except plain containers: of
    an ``nn.Sequential`` of layers, each layer is a block.
    """
    for child in model.children():
        # By type, not isinstance: a subclass may have a forward of its own, and is a block itself.
        if type(child) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
            yield from _blocks(child)
            continue
        has_children = any(True for _ in child.children())
        if has_children and any(True for _ in child.parameters()):
            yield child

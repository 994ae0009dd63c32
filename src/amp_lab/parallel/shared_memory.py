"""What ranks on one machine hand each other on the CPU: through memory that they share.

gloo sends through sockets there too, which costs time that training needs.
"""

from __future__ import annotations  # torch can be built without what some of them name

import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from amp_lab.core.backends import backend
from amp_lab.parallel.collectives import note_shared

_CHUNK = 2**16  # numbers at a time, so that they are still in the cache for the next operation
_FILES = 2


def share_memory(device: torch.device) -> SharedMemory | None:
    """Memory of all ranks, which all call; None unless all are on the CPU of one Linux machine.

    Its files have no name in any folder: they are gone with the last process that has them open.
    """
    size = dist.get_world_size()
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    if size == 1 or not is_one_machine or not backend(device).is_host:
        return None
    if not hasattr(os, "memfd_create"):
        return None
    name = f"amp-lab-{uuid.uuid4().hex}"
    created = []
    if dist.get_rank() == 0:
        created = [os.memfd_create(name) for _ in range(_FILES)]
    paths = [f"/proc/{os.getpid()}/fd/{number}" for number in created]
    offered: list[Any] = [name, paths]
    dist.broadcast_object_list(offered, src=0)
    memory = SharedMemory(_open(*offered))
    opened: list[Any] = [None] * size
    dist.all_gather_object(opened, len(memory.turns))
    for number in created:
        os.close(number)
    if min(opened) < _FILES:
        return None
    return memory


def _open(name: str, paths: list[str]) -> list[BinaryIO]:
    """The files at these paths; none if one has another name, or cannot be opened."""
    try:
        # In another container than rank 0's, the path may be of another file.
        if not all(name in os.readlink(path) for path in paths):
            return []
        return [open(path, "r+b", buffering=0) for path in paths]
    except OSError:  # no such file there, or not for this user
        return []


class SharedMemory:
    """Two files that take turns: while some still read from one, others may write the other."""

    def __init__(self, files: Sequence[BinaryIO]):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.turns = [(file, mmap.mmap(-1, 1)) for file in files]
        for file in files:
            weakref.finalize(self, file.close)

    def exchange(self, part: Tensor, dtype: torch.dtype, divisor: int = 1) -> Tensor:
        """``part / divisor`` of every rank in `dtype`: (ranks, elements), to be read at once.

        Who comes to a meeting has read what was exchanged before it, so a file is free again one
        meeting after its own. Raises gloo's error if a rank is lost.
        """
        file, memory = self.turns.pop(0)
        count = self.size * part.numel()
        needed_bytes = count * dtype.itemsize
        if needed_bytes > len(memory):
            os.ftruncate(file.fileno(), needed_bytes)
            memory = mmap.mmap(file.fileno(), needed_bytes)
        self.turns.append((file, memory))
        rows = torch.frombuffer(memory, dtype=dtype, count=count).view(self.size, -1)
        own_row = rows[self.rank]
        for to, numbers in zip(own_row.split(_CHUNK), part.split(_CHUNK), strict=True):
            if divisor > 1:
                numbers = numbers / divisor
            to.copy_(numbers)
        dist.barrier()
        return rows

    def average(self, bucket: dist.GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
        """For DDP, as a communication hook: the mean of the gradients, summed in `dtype`."""
        gradients = bucket.buffer()
        note_shared("all_reduce", dtype, gradients.numel(), self.size)
        # Divided first, as torch's hooks do it: a sum may be too large for fp16.
        parts = self.exchange(gradients, dtype, divisor=self.size)
        _add_up(parts, out=gradients)
        future = torch.futures.Future()
        future.set_result(gradients)
        return future

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        """For FSDP2: the parts of all ranks in their order; this rank's own is there already."""
        note_shared("all_gather", output_tensor.dtype, output_tensor.numel(), self.size)
        parts = self.exchange(input_tensor, output_tensor.dtype)
        for rank, to in enumerate(output_tensor.view(parts.shape)):
            if rank != self.rank:
                to.copy_(parts[rank])

    def reduce_scatter(
        self, output_tensor: Tensor, input_tensor: Tensor, op: object, **_: object
    ) -> None:
        """For FSDP2: this rank's part of the sum over the ranks, or of their mean."""
        note_shared("reduce_scatter", input_tensor.dtype, input_tensor.numel(), self.size)
        parts = self.exchange(input_tensor, input_tensor.dtype)
        to_this_rank = parts.view(self.size, self.size, -1)[:, self.rank]
        _add_up(to_this_rank, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= self.size


@dataclass
class FsdpCollective:
    """What FSDP2 takes in place of a collective of its own: it asks it for memory, and calls it."""

    call: Callable[..., None]

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:  # noqa: D102
        return torch.empty(size, **options)

    def __call__(self, **arguments: Any) -> None:  # noqa: D102
        self.call(**arguments)


def _add_up(parts: Tensor, out: Tensor) -> None:
    """The sum of the rows, in their dtype and order: bit for bit the same on every rank."""
    for chunk, to in zip(parts.split(_CHUNK, dim=1), out.split(_CHUNK), strict=True):
        total, *others = chunk
        for numbers in others:
            total = total + numbers
        to.copy_(total)

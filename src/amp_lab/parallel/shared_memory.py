"""Collectives through shared memory, for ranks on the CPU of one machine.

They replace gloo's, which sends through sockets even there and is slower.
"""

from __future__ import annotations  # torch may be built without the classes that some name

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

_CHUNK = 2**16  # numbers at a time, which stay in the cache from one operation to the next
_FILES = 2  # see `SharedMemory`


def share_memory(device: torch.device) -> SharedMemory | None:
    """Set up memory that all ranks share; None unless all are on the CPU of one Linux machine.

    Also None if a rank cannot open the files, as in another container.
    All ranks must call this together. The memory is in files without a name (`memfd_create`), which
    the system frees when the last process closes them.
    """
    size = dist.get_world_size()
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    if size == 1 or not is_one_machine or not backend(device).is_host:
        return None
    if not hasattr(os, "memfd_create"):
        return None
    name = f"amp-lab-{uuid.uuid4().hex}"
    descriptors = []
    if dist.get_rank() == 0:
        descriptors = [os.memfd_create(name) for _ in range(_FILES)]
    # The other ranks open rank 0's descriptors through /proc.
    paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
    name_and_paths: list[Any] = [name, paths]
    dist.broadcast_object_list(name_and_paths, src=0)
    memory = SharedMemory(_open(*name_and_paths))
    opened_files: list[Any] = [None] * size
    dist.all_gather_object(opened_files, len(memory.files_and_maps))
    for descriptor in descriptors:  # each rank has opened the files itself
        os.close(descriptor)
    if min(opened_files) < _FILES:  # a rank could not open them, so no rank uses them
        return None
    return memory


def _open(name: str, paths: list[str]) -> list[BinaryIO]:
    """Open the files at these paths; an empty list if one cannot be, or is not called `name`."""
    try:
        # In another container than rank 0's, the path may lead to an unrelated file.
        if not all(name in os.readlink(path) for path in paths):
            return []
        return [open(path, "r+b", buffering=0) for path in paths]
    except OSError:  # no such file there, or no permission
        return []


class SharedMemory:
    """Two files that are used in turn: a slow rank may still read one while others write the next.

    `files_and_maps` has each file with its memory map; the first is the next to be used.
    """

    def __init__(self, files: Sequence[BinaryIO]):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # The files are empty at first, which cannot be mapped, so each map is a byte without a
        # file. `exchange` makes a larger one when it needs more memory.
        self.files_and_maps = [(file, mmap.mmap(-1, 1)) for file in files]
        for file in files:
            weakref.finalize(self, file.close)

    def exchange(self, values: Tensor, dtype: torch.dtype, divisor: int = 1) -> Tensor:
        """Exchange ``values / divisor`` in `dtype`: returns those of all ranks, (ranks, elements).

        `values` is (elements,), and its dtype may be another.

        The result is a view of the shared memory: read it before the next exchange. Two files are
        enough, since a rank that reaches the next barrier has read this result: after that barrier,
        this file can be written again. Raises gloo's error if a rank is lost.
        """
        file, memory = self.files_and_maps.pop(0)
        count = self.size * values.numel()
        needed_bytes = count * dtype.itemsize
        if needed_bytes > len(memory):  # on all ranks alike, since their sizes are the same
            os.ftruncate(file.fileno(), needed_bytes)
            memory = mmap.mmap(file.fileno(), needed_bytes)
        self.files_and_maps.append((file, memory))
        rows = torch.frombuffer(memory, dtype=dtype, count=count).view(self.size, -1)
        own_row = rows[self.rank]
        for target, numbers in zip(own_row.split(_CHUNK), values.split(_CHUNK), strict=True):
            if divisor > 1:
                numbers = numbers / divisor
            target.copy_(numbers)
        dist.barrier()  # until every rank has written its row
        return rows

    def average(self, bucket: dist.GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
        """A communication hook for DDP: replaces the gradients by their mean, summed in `dtype`.

        Returns a future that is done, of the bucket's gradients (elements,), written in place.
        """
        gradients = bucket.buffer()
        note_shared("all_reduce", dtype, gradients.numel(), self.size)
        # Divided before they are summed, as by torch's hooks: the sum may be too large for fp16.
        rows = self.exchange(gradients, dtype, divisor=self.size)
        _sum_rows(rows, out=gradients)
        future = torch.futures.Future()
        future.set_result(gradients)
        return future

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        """FSDP2's all-gather: write the shards of all ranks into `output_tensor`, in rank order.

        Skips the shard of this rank, `input_tensor`, which FSDP2 has put there already.
        """
        note_shared("all_gather", output_tensor.dtype, output_tensor.numel(), self.size)
        rows = self.exchange(input_tensor, output_tensor.dtype)
        for rank, target in enumerate(output_tensor.view(rows.shape)):
            if rank != self.rank:
                target.copy_(rows[rank])

    def reduce_scatter(
        self, output_tensor: Tensor, input_tensor: Tensor, op: object, **_: object
    ) -> None:
        """FSDP2's reduce-scatter: write this rank's shard of the sum, or mean, over the ranks.

        `input_tensor` has the gradients of this rank for the shards of all, in rank order. `op` is
        `dist.ReduceOp.AVG` for the mean; any other gives the sum.
        """
        note_shared("reduce_scatter", input_tensor.dtype, input_tensor.numel(), self.size)
        rows = self.exchange(input_tensor, input_tensor.dtype)
        shards = rows.view(self.size, self.size, -1)  # (rank it is from, rank it is for, elements)
        for_this_rank = shards[:, self.rank]
        _sum_rows(for_this_rank, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= self.size


@dataclass
class FsdpCollective:
    """A custom collective for FSDP2, which calls `allocate` for its output, and then the object.

    The object passes the arguments on to the function `call`.
    """

    call: Callable[..., None]

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:  # noqa: D102
        return torch.empty(size, **options)

    def __call__(self, **arguments: Any) -> None:  # noqa: D102
        self.call(**arguments)


def _sum_rows(rows: Tensor, out: Tensor) -> None:
    """Write the sum of `rows` (ranks, elements) over the ranks into `out` (elements,).

    The rows are added in their dtype and in the order of the ranks, so the result is bitwise the
    same on every rank.
    """
    for chunk, target in zip(rows.split(_CHUNK, dim=1), out.split(_CHUNK), strict=True):
        total, *others = chunk
        for numbers in others:
            total = total + numbers
        target.copy_(total)

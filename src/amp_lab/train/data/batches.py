"""Batches of a data set: in the order of a seed, for one of several processes, and read ahead."""

import atexit
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from amp_lab.core.backends import backend
from amp_lab.core.errors import AmpLabError, DataError, first_line
from amp_lab.train.data.images import SHUFFLE, ImageSet, generator

# Forked workers start at once, and notice when this process dies; those of a fork server, which a
# newer Python would use, wait for ever. Elsewhere than on Linux forking is not safe.
_START_METHOD = "fork" if sys.platform == "linux" else None
_TO_STOP = {signal.SIGINT, signal.SIGTERM}
_FILES_OF_A_WORKER = 16  # its pipes, and the batches that it has read ahead, with room to spare


@dataclass
class Batches:
    """One pass over a data set: images float32 (B, 3, S, S) and targets int64 (B,), on `device`.

    It may be iterated over more than once. Raises `DataError` for a wrong value, and when iterated
    over for a file that cannot be read.
    """

    dataset: ImageSet
    batch_size: int
    _: KW_ONLY
    epoch: int = 0
    seed: int | None = None
    """The order is a permutation that depends on this and on `epoch` alone; None: as stored."""
    start: int = 0
    """Number of the batch to begin at; those before it are neither read nor counted."""
    drop_last: bool = False
    """Whether to leave out a last batch that is smaller than the others."""
    share: tuple[int, int] = (0, 1)
    """Rank of this process and number of processes n. Of each batch it gets every n-th image, as
    `torch.utils.data.DistributedSampler` would give it. All get as many batches, so a last one that
    has not an image for each is added to the one before it."""
    workers: int = 0
    """Processes that read ahead. Starting them takes a tenth of a second each pass on Linux and
    seconds elsewhere, so it pays for files that must be decoded, not for images in memory."""
    device: torch.device | str = "cpu"
    """Where the batches are. To a GPU they are copied while it works, from pinned memory."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size} must be at least 1")
        for name in ("epoch", "seed", "start", "workers"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise DataError(f"{name}={value} must not be negative")
        _require_files_for(self.workers)
        self._keys = self._keys_of_this_rank()

    def _keys_of_this_rank(self) -> list[list[int]]:
        """The keys of each batch; a key names the epoch too, see `ImageSet`."""
        length = len(self.dataset)
        rank, ranks = self.share
        order = torch.arange(length)
        if self.seed is not None:
            order = torch.randperm(length, generator=generator(self.seed, self.epoch, SHUFFLE))
        if self.drop_last:
            whole_batches = length // self.batch_size
            order = order[: whole_batches * self.batch_size]
        if len(order) < ranks and ranks > 1:
            raise DataError(f"{len(order)} images are too few for {ranks} processes")
        rest = order[self.start * self.batch_size :]
        keys = self.epoch * length + rest
        parts = list(keys.split(max(self.batch_size, ranks)))
        if len(parts) > 1 and len(parts[-1]) < ranks:
            parts[-2:] = [torch.cat(parts[-2:])]
        return [part[rank::ranks].tolist() for part in parts if len(part)]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        keys: Any = self._keys  # a list will do as the data set
        loader = DataLoader(
            keys,
            batch_size=None,  # an item is a whole batch already
            collate_fn=self._read,
            num_workers=self.workers,
            multiprocessing_context=_START_METHOD if self.workers else None,
            pin_memory=backend(torch.device(self.device).type).pins_memory,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else each pass draws a number from the global state
        )
        with _signals_blocked(), _all_or_none():
            iterator: Any = iter(loader)  # torch gives its ends no public name
        with ExitStack() as at_end:
            if self.workers:
                # Workers ignore SIGTERM, so torch and Python could not end them as they do by
                # default when a pass is left unfinished: here, or at exit if it still goes on.
                at_end.callback(iterator._shutdown_workers)
                at_end.callback(atexit.unregister, iterator._shutdown_workers)
                atexit.register(iterator._shutdown_workers)
            while (item := _next(iterator)) is not None:
                images, targets = (part.to(self.device, non_blocking=True) for part in item)
                yield self.dataset.finish(images), targets

    def _read(self, keys: list[int]) -> tuple[torch.Tensor, torch.Tensor] | AmpLabError:
        """A batch, or why there is none."""
        try:
            return self.dataset.read(keys)
        except AmpLabError as error:
            return error  # if raised, it would arrive with the worker's traceback in its message


batches = Batches  # called like a function, as `range` is


def _next(iterator: Iterator) -> Any:
    """The next item; None at the end. Raises `DataError` if a worker is no more."""
    try:
        item = next(iterator, None)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        problem = f"a process that loads images was killed ({first_line(error)})"
        raise DataError(f"{problem}; with fewer --workers they need less memory") from error
    if isinstance(item, AmpLabError):
        raise item
    return item


def _require_files_for(workers: int) -> None:
    """Raise `DataError` for workers who would wait for ever, since no more files can be opened."""
    if not workers or sys.platform == "win32":
        return
    import resource

    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max_files // _FILES_OF_A_WORKER
    if workers > limit:
        raise DataError(f"{workers:,} workers open more files than may be here: at most {limit}")


@contextmanager
def _all_or_none() -> Iterator[None]:
    """End the workers that were started where one more cannot be: they would be waited for."""
    before = multiprocessing.active_children()
    try:
        yield
    except OSError as error:
        for worker in multiprocessing.active_children():
            if worker not in before:
                worker.kill()
                worker.join()
        problem = f"a process that loads images cannot be started ({error.strerror})"
        raise DataError(f"{problem}; give fewer --workers") from error


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while workers start, until each has set what it does on one."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals(_: int) -> None:
    """Let the main process alone decide when to stop: Ctrl-C goes to its workers as well."""
    for number in _TO_STOP:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_STOP)

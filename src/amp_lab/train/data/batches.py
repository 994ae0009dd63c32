"""Batches of a data set: shuffled, shared out to several processes, and read ahead by workers."""

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
from amp_lab.train.data.samples import SHUFFLE, SampleSet, generator

# Forked workers start at once, and end when this process dies; those of a fork server, the default
# of newer Pythons, would wait for ever. Only on Linux is forking safe.
_START_METHOD = "fork" if sys.platform == "linux" else None
_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_FILES_OF_A_WORKER = 16  # file descriptors: pipes and batches read ahead, with room to spare


@dataclass
class Batches:
    """One pass over a data set: samples and targets, on `device`.

    Images are float32 (B, 3, S, S), and their targets int64 (B,). For a text both are int64 (B, T).
    You can iterate over a pass more than once. Raises `DataError` for a wrong value, and during the
    iteration for a file that cannot be read.
    """

    dataset: SampleSet
    batch_size: int
    _: KW_ONLY
    epoch: int = 0
    seed: int | None = None
    """Seed of the order, which depends only on this seed and on `epoch`; None: not shuffled."""
    start: int = 0
    """Number of the first batch, for example when a run is resumed. Earlier batches are neither
    read nor counted in the length."""
    drop_last: bool = False
    """Whether to leave out a last batch that is smaller than the others."""
    share: tuple[int, int] = (0, 1)
    """(rank of this process, number of processes n). The process gets every n-th sample of each
    batch, as with `torch.utils.data.DistributedSampler`. All processes get the same number of
    batches: a last batch with fewer than n samples is added to the batch before it."""
    workers: int = 0
    """Processes that read ahead. Starting them takes time in each pass, so use them for files
    that must be decoded, not for images in memory."""
    device: torch.device | str = "cpu"
    """The device of the batches. Copies to a GPU use pinned memory and overlap its computation."""

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
        """For each batch, the keys of the samples that this rank reads.

        The key of sample i in epoch e is e * N + i, for a data set of N samples. Raises `DataError`
        if there are fewer samples than ranks.
        """
        length = len(self.dataset)
        rank, ranks = self.share
        order = torch.arange(length)  # indices of the samples
        if self.seed is not None:
            order = torch.randperm(length, generator=generator(self.seed, self.epoch, SHUFFLE))
        if self.drop_last:
            full_batches = length // self.batch_size
            order = order[: full_batches * self.batch_size]
        if len(order) < ranks and ranks > 1:
            raise DataError(f"{len(order)} samples are too few for {ranks} processes: start fewer")
        remaining = order[self.start * self.batch_size :]
        keys = self.epoch * length + remaining
        if not len(keys):
            return []
        # A batch has at least one key for each rank. A last batch with fewer is added to the one
        # before it.
        batches_of_keys = list(keys.split(max(self.batch_size, ranks)))
        if len(batches_of_keys) > 1 and len(batches_of_keys[-1]) < ranks:
            last = batches_of_keys.pop()
            batches_of_keys[-1] = torch.cat([batches_of_keys[-1], last])
        return [batch[rank::ranks].tolist() for batch in batches_of_keys]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (inputs, targets) of each batch on `device`; the workers end with the iterator."""
        keys: Any = self._keys
        # The loader's data set is the list of batches of keys: one item is a batch, which
        # `collate_fn` reads in a worker.
        loader = DataLoader(
            keys,
            batch_size=None,
            collate_fn=self._read,
            num_workers=self.workers,
            multiprocessing_context=_START_METHOD if self.workers else None,
            pin_memory=backend(torch.device(self.device).type).pins_memory,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else each pass draws a number from the global state
        )
        with _signals_blocked(), _kill_workers_on_failure():
            iterator: Any = iter(loader)  # `_shutdown_workers` is in no public type
        with ExitStack() as cleanup:
            if self.workers:
                # A pass may be left unfinished: the workers are shut down when this generator is
                # closed, or at exit. By default torch and Python end them with SIGTERM, which
                # these workers ignore.
                cleanup.callback(iterator._shutdown_workers)
                cleanup.callback(atexit.unregister, iterator._shutdown_workers)
                atexit.register(iterator._shutdown_workers)
            batch = _next_batch(iterator)
            while batch is not None:
                inputs = batch[0].to(self.device, non_blocking=True)
                targets = batch[1].to(self.device, non_blocking=True)
                yield self.dataset.finish(inputs), targets
                batch = _next_batch(iterator)

    def _read(self, keys: list[int]) -> tuple[torch.Tensor, torch.Tensor] | AmpLabError:
        """Read the samples and targets of these keys, before `SampleSet.finish`.

        An error is returned, for `_next_batch` to raise in the main process.
        """
        try:
            return self.dataset.read(keys)
        except AmpLabError as error:
            return error  # if raised, it would arrive with the worker's traceback in its message


batches = Batches  # a class that is called like a function, as `range` is


def _next_batch(iterator: Iterator) -> Any:
    """The next batch (inputs, targets) of a loader; None at the end.

    Raises the error that a worker returned in place of a batch, and `DataError` if one was killed.
    """
    try:
        batch = next(iterator, None)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        problem = f"a process that loads images was killed ({first_line(error)})"
        raise DataError(f"{problem}; fewer --workers need less memory") from error
    if isinstance(batch, AmpLabError):
        raise batch
    return batch


def _require_files_for(workers: int) -> None:
    """Raise `DataError` for more workers than the limit on open files allows; they would hang."""
    if not workers or sys.platform == "win32":
        return
    import resource

    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max_files // _FILES_OF_A_WORKER
    if workers > limit:
        raise DataError(
            f"{workers:,} workers need more open files than the system allows: use at most {limit}"
        )


@contextmanager
def _kill_workers_on_failure() -> Iterator[None]:
    """If a worker cannot be started in the block, kill those that were, and raise `DataError`.

    Otherwise Python would wait for them at exit.
    """
    children_before = multiprocessing.active_children()
    try:
        yield
    except OSError as error:
        for child in multiprocessing.active_children():
            if child not in children_before:
                child.kill()
                child.join()
        problem = f"a process that loads images cannot be started ({error.strerror})"
        raise DataError(f"{problem}; use fewer --workers") from error


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back in the block.

    Workers that start in it inherit this, so no signal reaches one before `_ignore_signals` ran.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


def _ignore_signals(_worker: int) -> None:
    """Ignore SIGINT and SIGTERM in a worker: the main process decides when to stop.

    Ctrl-C in a terminal goes to workers too. torch calls this with the number of the worker.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

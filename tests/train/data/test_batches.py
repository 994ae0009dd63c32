"""Batches: their order, workers, signals, and random states left alone."""

import errno
import gc
import importlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkProcess

import numpy as np
import pytest
import torch
from data_sets import all_of, refusal

from amp_lab import load_dataset
from amp_lab.core.errors import DataError
from amp_lab.train.data import batches

pytest_plugins = ("data_sets",)
# From Python 3.12 on, a fork of a process with threads, as torch always has, is warned of.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_resumed_goes_on_with_the_same_batches(any_data, workers):
    whole = list(batches(any_data.train, 8, epoch=1, seed=7))
    rest = batches(any_data.train, 8, epoch=1, seed=7, start=3, workers=workers)
    assert len(rest) == len(whole) - 3
    for (images, targets), (same_images, same_targets) in zip(rest, whole[3:], strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(targets, same_targets)


def test_a_pass_does_not_read_the_batches_before_its_start(caltech256_copy):
    made = load_dataset("caltech256", caltech256_copy, image_size=16)
    for index in range(16):
        made.train._source[index].unlink()
    assert len(list(batches(made.train, 8, start=2))) == len(batches(made.train, 8)) - 2
    assert "cannot be read" in refusal(list, batches(made.train, 8, start=1))


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch(digits):
    def order(**options):
        keys = batches(digits.train, 100, **options)._keys
        return [key for part in keys for key in part]

    n = len(digits.train)
    assert order() == list(range(n))
    assert order(epoch=2) == list(range(2 * n, 3 * n))
    shuffled = [order(seed=0), order(seed=1), [key - n for key in order(seed=0, epoch=1)]]
    assert all(sorted(keys) == list(range(n)) for keys in shuffled)
    assert shuffled[0] != shuffled[1] != shuffled[2] != shuffled[0]
    assert order(seed=0) == shuffled[0]


def test_the_last_batch_has_the_rest_unless_it_is_dropped(digits):
    sizes = [len(targets) for _, targets in batches(digits.test, 100)]
    assert sizes == [100, 100, 100, 59]
    whole = batches(digits.test, 100, drop_last=True)
    assert len(whole) == len(list(whole)) == 3
    assert len(list(batches(digits.test, 1000, drop_last=True))) == 0
    assert len(list(batches(digits.test, 100, start=4))) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_states_are_neither_used_nor_changed(any_data, workers):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = all_of(any_data.train, seed=0, workers=workers)[0]
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(12345)
    assert torch.equal(all_of(any_data.train, seed=0, workers=workers)[0], first)


@pytest.mark.parametrize("still_starting", [False, True])
def test_workers_leave_signals_to_the_main_process(digits, monkeypatch, still_starting):
    module = importlib.import_module(
        "amp_lab.train.data.batches"
    )  # the package has a function of its name
    start = module._ignore_signals
    monkeypatch.setattr(
        module, "_ignore_signals", lambda n: time.sleep(0.3 * n * still_starting) or start(n)
    )
    passing = iter(batches(digits.train, 8, seed=0, workers=2))
    seen = [next(passing)]  # from worker 0; worker 1 may still be starting
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
    seen += passing
    assert torch.equal(torch.cat([t for _, t in seen]), all_of(digits.train, seed=0)[1])
    assert not multiprocessing.active_children()


def test_a_pass_that_was_left_ends_its_workers_however_it_was_left(digits):
    for _ in batches(digits.train, 8, workers=2):
        break
    passing = iter(batches(digits.train, 8, workers=2))
    next(passing)
    cycle = [passing]
    cycle.append(cycle)  # as in a traceback, which only the garbage collector takes apart
    del passing, cycle
    gc.collect()
    assert not multiprocessing.active_children()


@pytest.mark.weekly
def test_python_ends_at_once_although_a_pass_was_not_finished():
    code = (
        "import numpy as np\n"
        "from amp_lab.train import data\n"
        "from amp_lab.train.data import images\n"
        "pixels, targets = np.zeros((64, 1, 8, 8), np.uint8), np.zeros(64)\n"
        "dataset = images.ImagesInMemory(pixels, targets, 8, ((0.0,) * 3, (1.0,) * 3))\n"
        "passing = iter(data.batches(dataset, 8, workers=2)); next(passing)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_damaged_since_is_told_in_one_line_by_workers_too(caltech256_copy, workers):
    made = load_dataset("caltech256", caltech256_copy, image_size=16)
    path = made.train._source[5]
    path.write_text("no picture")
    said = refusal(list, batches(made.train, 8, workers=workers))
    assert said.startswith(f"{path} cannot be read")
    assert refusal(made.train.__getitem__, 5) == said


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"workers": -1},
        {"start": -1},
        {"epoch": -1},
        {"seed": -1},
    ],
)
def test_wrong_values_of_a_pass_are_refused(digits, options):
    ((name, value),) = options.items()
    assert f"{name}={value}" in refusal(batches, digits.train, **({"batch_size": 8} | options))


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")  # where cores are fewer
# torch's loader cannot delete itself when it was not made whole
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_cannot_be_started_ends_the_others(digits, monkeypatch):
    """As where a user may have no more processes. They ignore SIGTERM, and Python waits for all."""
    start, before = ForkProcess.start, multiprocessing.active_children()
    started = []

    def start_two(process):
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(process)
        start(process)

    monkeypatch.setattr(ForkProcess, "start", start_two)
    with pytest.raises(DataError, match=r"cannot be started .*--workers"):
        next(iter(batches(digits.train, 8, workers=3)))
    assert len(started) == 2
    assert multiprocessing.active_children() == before

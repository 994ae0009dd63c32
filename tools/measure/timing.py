"""Measure `compare` itself: `python tools/measure/timing.py --out data/results/timing-DEVICE.json`.

Each comparison is of the same work done a different number of times, so that its ratio is known:
1.0, 1.1 or 2.0. On an idle machine, please: what disturbs it is started here.

- quiet: how many comparisons are trusted, and how many of those are wrong (the ratio lies outside
  the interval);
- loaded: the same while other processes start and stop at random;
- speed: seconds until the ratio of two functions of 10 ms is known to 3 % to either side;
- overhead: what `compare` adds to a call of 1 ms.
"""

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from amp_lab import compare, pick_device
from recording import parser, record

RATIOS = ((10, 10), (10, 11), (10, 20))  # repetitions of the same work
PARTS = ("quiet", "loaded", "speed", "overhead")


def repeated(values: torch.Tensor, times: int) -> Callable[[], None]:
    """So many passes over the values."""

    def run() -> None:
        for _ in range(times):
            torch.tanh(values)

    return run


def burn(seed: int, stop) -> None:
    """Use a core for some tenths of a second, then none, until told to stop."""
    numbers = random.Random(seed)
    torch.set_num_threads(1)
    factor = torch.ones(300, 300)
    while not stop.is_set():
        end = time.monotonic() + numbers.uniform(0.05, 1.5)
        while time.monotonic() < end and not stop.is_set():
            factor @ factor
        stop.wait(numbers.uniform(0.05, 3.0))


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Other programs that start and stop, for the block."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    others = [context.Process(target=burn, args=(seed, stop)) for seed in range(processes)]
    for other in others:
        other.start()
    time.sleep(5)  # they load torch first
    try:
        yield
    finally:
        stop.set()
        for other in others:
            other.join()


def known_ratios(comparisons: int, device: torch.device) -> dict:
    """How many comparisons of known ratios are trusted, and how many of those are wrong."""
    values = torch.randn(200_000, device=device)
    numbers = random.Random(0)
    trusted = wrong = 0
    seconds = []
    for _ in range(comparisons):
        few, many = numbers.choice(RATIOS)
        started = time.perf_counter()
        found = compare(
            {"few": repeated(values, few), "many": repeated(values, many)},
            device=device,
            budget_s=4,
        )
        seconds.append(time.perf_counter() - started)
        low, high = found.ratio("many", "few").interval
        trusted += found.trusted
        wrong += found.trusted and not low <= many / few <= high
    return {
        "comparisons": comparisons,
        "trusted": trusted,
        "trusted and wrong": wrong,
        "median seconds": statistics.median(seconds),
    }


def speed(device: torch.device) -> dict:
    """Seconds and rounds until two functions of about 10 ms are known to 3 %."""
    values = torch.randn(200_000, device=device)
    times = 1
    while (took := _seconds(repeated(values, times))) < 0.01:
        times = max(times + 1, round(times * 0.01 / took))
    run = repeated(values, times)
    started = time.perf_counter()
    found = compare({"one": run, "same": run}, device=device)
    seconds = time.perf_counter() - started
    return {
        "function, ms": 1e3 * took,
        "seconds": seconds,
        "rounds": found.rounds,
        "trusted": found.trusted,
        "interval": found.ratio("same", "one").interval,
    }


def overhead(device: torch.device) -> dict:
    """A sleep that wakes at a set time takes as long as it says, so what is more is overhead."""

    def wait() -> None:
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass

    found = compare({"one": wait, "same": wait}, device=device)
    return {"share of a call of 1 ms": found.median_s("one") / 1e-3 - 1, "trusted": found.trusted}


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Measure what was asked for, and write it as JSON."""
    options_of = parser(__doc__, PARTS)
    options_of.add_argument("--comparisons", type=int, default=200)
    options = options_of.parse_args()
    device = pick_device()

    def loaded() -> dict:
        with load(2):
            return known_ratios(options.comparisons, device)

    measures = {
        "quiet": lambda: known_ratios(options.comparisons, device),
        "loaded": loaded,
        "speed": lambda: speed(device),
        "overhead": lambda: overhead(device),
    }
    record(measures, options, device)


if __name__ == "__main__":
    main()

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
    """A function that makes this many passes over the values."""

    def run() -> None:
        for _ in range(times):
            torch.tanh(values)

    return run


def burn(seed: int, stop) -> None:
    """Use a core for some tenths of a second, then none, and so on, until `stop` is set."""
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
    """The block in which other processes keep cores busy at random: see `burn`."""
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
    """How many comparisons of known ratios are trusted, and how many of those are wrong.

    A comparison is wrong if the known ratio is outside of its interval.
    """
    values = torch.randn(200_000, device=device)
    numbers = random.Random(0)
    trusted = 0
    wrong = 0
    seconds = []
    for _ in range(comparisons):
        few, many = numbers.choice(RATIOS)
        functions = {"few": repeated(values, few), "many": repeated(values, many)}
        started = time.perf_counter()
        compared = compare(functions, device=device, budget_s=4)
        seconds.append(time.perf_counter() - started)
        if not compared.trusted:
            continue
        trusted += 1
        low, high = compared.ratio("many", "few").interval
        if not low <= many / few <= high:
            wrong += 1
    return {
        "comparisons": comparisons,
        "trusted": trusted,
        "trusted and wrong": wrong,
        "median seconds": statistics.median(seconds),
    }


def speed(device: torch.device) -> dict:
    """Seconds and rounds until two functions of about 10 ms are known to 3 %."""
    values = torch.randn(200_000, device=device)
    # Find how many passes over the values take 10 ms.
    times = 1
    function_s = _seconds(repeated(values, times))
    while function_s < 0.01:
        times = max(times + 1, round(times * 0.01 / function_s))
        function_s = _seconds(repeated(values, times))
    function = repeated(values, times)
    started = time.perf_counter()
    compared = compare({"one": function, "same": function}, device=device)
    seconds = time.perf_counter() - started
    return {
        "function, ms": 1e3 * function_s,
        "seconds": seconds,
        "rounds": compared.rounds,
        "trusted": compared.trusted,
        "interval": compared.ratio("same", "one").interval,
    }


def overhead(device: torch.device) -> dict:
    """What `compare` adds to a function that waits for exactly 1 ms, as a share of that time."""

    def wait() -> None:
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass

    compared = compare({"one": wait, "same": wait}, device=device)
    share = compared.median_s("one") / 1e-3 - 1
    return {"share of a call of 1 ms": share, "trusted": compared.trusted}


def _seconds(function: Callable[[], None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    """Measure what was asked for, and write it as JSON."""
    options_parser = parser(__doc__, PARTS)
    options_parser.add_argument("--comparisons", type=int, default=200)
    options = options_parser.parse_args()
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

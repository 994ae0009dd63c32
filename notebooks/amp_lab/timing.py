"""Time and peak memory of a piece of code, measured so that the figures can be trusted."""

import contextlib
import gc
import glob
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from amp_lab.backends import backend


@dataclass(frozen=True)
class Measurement:
    """What `measure` found: seconds and bytes of one call of the function."""

    samples_s: tuple[float, ...]
    """Seconds of each repeat, in the order in which they ran."""
    peak_bytes: int | None
    """Largest number of bytes in tensors at any moment, whatever was there before included; None
    where the backend keeps no count, as on a CPU."""
    reserved_bytes: int | None
    """The same for what the caching allocator held back from the driver; at least `peak_bytes`."""

    @property
    def median_s(self) -> float:
        """Median of the samples, in seconds."""
        return statistics.median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the samples, in seconds: the spread of the middle half."""
        if len(self.samples_s) == 1:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return third - first

    def __str__(self) -> str:
        unit, factor = _unit(self.median_s)
        text = f"{self.median_s * factor:.3g} {unit} (IQR {self.iqr_s * factor:.2g} {unit}"
        text += f", {len(self.samples_s)} repeats)"
        return (
            text if self.peak_bytes is None else f"{text}, peak {self.peak_bytes / 2**20:.0f} MiB"
        )


def measure(
    fn: Callable[[], object], *, device: torch.device | str, warmup: int = 3, repeats: int = 10
) -> Measurement:
    """Time `fn()` on `device`, and read the peak memory it needed there.

    A device runs its work after the call that asked for it has returned, so the clock is read only
    when `torch.accelerator.synchronize` has returned. The first `warmup` calls are not counted:
    they load kernels, choose algorithms and fill caches. Peaks are reset after them.

    Raises `ValueError` for fewer than one repeat or a negative warm-up, and whatever `fn` raises.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"measure: repeats={repeats} must be at least 1 and warmup={warmup} at least 0"
        )
    device = torch.device(device)
    if not backend(device).is_host:  # where a collection may take longer than what is timed
        gc.collect()  # what earlier code left behind is not this function's memory
        torch.accelerator.empty_cache()
    for _ in range(warmup):
        fn()
    _synchronize(device)
    counted = _resets_peak(device)
    samples = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        fn()
        _synchronize(device)
        samples.append(time.perf_counter() - start)
    return Measurement(
        samples_s=tuple(samples),
        peak_bytes=torch.accelerator.max_memory_allocated(device) if counted else None,
        reserved_bytes=torch.accelerator.max_memory_reserved(device) if counted else None,
    )


def allocated_bytes(device: torch.device) -> int:
    """Bytes in tensors on a device now; 0 where the backend keeps no count, as on a CPU."""
    return torch.accelerator.memory_allocated(device) if _resets_peak(device) else 0


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch found no memory; the CPU's allocator has no type of error for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _synchronize(device: torch.device) -> None:
    if not backend(device).is_host:
        torch.accelerator.synchronize(device)


def _resets_peak(device: torch.device) -> bool:
    """Reset the device's peak memory; whether it keeps one."""
    if not backend(device).keeps_peak:
        return False
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, NotImplementedError):  # an allocator without statistics
        return False
    return True


@dataclass(frozen=True)
class Ratio:
    """How long one function takes as a multiple of another, measured side by side."""

    median: float
    interval: tuple[float, float]
    """95 % interval of the median; at least 1 % to either side, which no clock here can resolve."""

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.median:.3g} ({low:.3g} to {high:.3g})"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: seconds of one call of each function, round by round."""

    samples_s: dict[str, tuple[float, ...]]
    """By name, one value for each round; those of one round belong together. Disturbed rounds are
    left out of a result that is trusted; one that is not holds all rounds, with their spread.
    """
    disturbed: int
    """Rounds in which something else used the machine."""
    reason: str
    """Why the result is not to be trusted; empty if it is."""

    @property
    def trusted(self) -> bool:
        """Whether enough rounds were undisturbed."""
        return not self.reason

    @property
    def rounds(self) -> int:
        """How many rounds the samples are of."""
        return len(next(iter(self.samples_s.values())))

    def median_s(self, name: str) -> float:
        """Median of one function's samples, in seconds."""
        return statistics.median(self.samples_s[name])

    def ratio(self, name: str, to: str) -> Ratio:
        """Time of `name` over time of `to`: above 1, `name` is the slower one.

        The median of the ratios within each round, with a bootstrap interval (Efron and Tibshirani
        1993, percentile method, seeded). Raises `KeyError` for a name that was not compared.
        """
        ratios = np.array(self.samples_s[name]) / np.array(self.samples_s[to])
        median, low, high = _bootstrap(ratios)
        return Ratio(median, (min(low, median * (1 - _FLOOR)), max(high, median * (1 + _FLOOR))))

    def __str__(self) -> str:
        first = next(iter(self.samples_s))
        lines = []
        for name in self.samples_s:
            time_text = _time_text(self.median_s(name))
            beside = "" if name == first else f", {self.ratio(name, first)} of {first}"
            lines.append(f"{name}: {time_text}{beside}")
        left_out = " and left out" if self.trusted and self.disturbed else ""
        lines.append(f"{self.rounds} rounds; {self.disturbed} disturbed{left_out}")
        if self.reason:
            lines.append(f"not trusted: {self.reason}")
        return "\n".join(lines)


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    precision: float = 0.03,
    budget_s: float = 10.0,
    warmup: int = 1,
) -> Comparison:
    """Time functions against each other, in turns, so that their ratios can be trusted.

    A round runs all functions in their order and then in the reverse (A B B A), so that a drift of
    the machine meets all of them alike. Each turn lies between two synchronisations, and repeats a
    short function until the turn is long enough for the clock. After at least six rounds it ends
    when every ratio to the first function is known to within `precision` (0.03: 3 % to either
    side), or when `budget_s` seconds are spent, whichever comes first; the functions' own warm-up,
    `warmup` calls of each, is not counted.

    Between the turns a fixed matrix product is timed, and the operating system is asked how long
    threads of this process waited for a core and how much of it the host took away (Linux). A round
    in which another program took part of the machine is left out. If fewer than six rounds remain,
    or fewer than half, the result says that it is not trusted.

    Raises `ValueError` for fewer than two functions, and whatever they raise.
    """
    if len(functions) < 2:
        raise ValueError("compare: give at least two functions; measure times a single one")
    device = torch.device(device)
    for fn in functions.values():
        for _ in range(warmup):
            fn()
    calls = {name: _calls_for_a_turn(fn, device) for name, fn in functions.items()}
    watch = _Watch(device)
    rounds: list[dict[str, float]] = []  # seconds of a call by name
    quiet: list[dict[str, float]] = []  # those of them that nothing disturbed
    checked_at = _FEWEST_ROUNDS
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or not rounds:
        watch.start_round()
        rounds.append(_round(functions, calls, watch))
        if watch.was_disturbed():
            continue
        quiet.append(rounds[-1])
        if len(quiet) >= checked_at:
            # An interval takes a thousand draws, so it is not computed after every round.
            checked_at += max(1, len(quiet) // 4)
            if _narrow_enough(quiet, precision):
                break
    reason = _why_not(len(quiet), len(rounds))
    samples = rounds if reason else quiet
    return Comparison(
        {name: tuple(one[name] for one in samples) for name in functions},
        len(rounds) - len(quiet),
        reason,
    )


_FEWEST_ROUNDS = 6
_TURN_S = 5e-3
_FLOOR = 0.01
_SLOWER = 1.15  # the calibration product against its best: more is another program, or throttling
_WAITED = 0.03  # of a round's time, in which a thread was ready and another program had its core


def _round(
    functions: Mapping[str, Callable[[], object]], calls: dict[str, int], watch: "_Watch"
) -> dict[str, float]:
    """Seconds of one call of each function: the mean of a turn on the way up and one back down."""
    sums = dict.fromkeys(functions, 0.0)
    for order in (list(functions), list(functions)[::-1]):
        for name in order:
            sums[name] += _turn(functions[name], calls[name], watch.device)
        watch.calibrate()
    return {name: seconds / (2 * calls[name]) for name, seconds in sums.items()}


def _turn(fn: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of so many calls, between two synchronisations."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    _synchronize(device)
    return time.perf_counter() - start


def _calls_for_a_turn(fn: Callable[[], object], device: torch.device) -> int:
    calls = 1
    while (seconds := _turn(fn, calls, device)) < _TURN_S and calls < 2**20:
        # Towards the goal in few steps, but no further than tenfold on one short reading.
        calls = math.ceil(calls * min(10.0, 1.2 * _TURN_S / max(seconds, 1e-9)))
    return calls


def _narrow_enough(rounds: list[dict[str, float]], precision: float) -> bool:
    first, *others = rounds[0]
    for name in others:
        median, low, high = _bootstrap(np.array([one[name] / one[first] for one in rounds]))
        if high - low > 2 * precision * median:
            return False
    return True


def _bootstrap(values: np.ndarray) -> tuple[float, float, float]:
    """Median of `values` (n,), and the ends of its 95 % interval."""
    draws = np.random.default_rng(0).integers(len(values), size=(1000, len(values)))
    medians = np.median(values[draws], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def _why_not(quiet: int, rounds: int) -> str:
    """Why so many undisturbed rounds, among so many, are not enough; empty if they are."""
    if 2 * quiet < rounds:
        return f"the machine was busy in {rounds - quiet} of {rounds} rounds"
    if quiet < _FEWEST_ROUNDS:
        return f"only {quiet} undisturbed rounds in the time given, and {_FEWEST_ROUNDS} are needed"
    return ""


class _Watch:
    """Tells of each round whether something else used the machine."""

    best_s: ClassVar[dict[torch.device, float]] = {}
    """The calibration product's shortest time in this process, by device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.factor = torch.ones(192, 192, device=device)
        for _ in range(3):
            self.calibrate()

    def start_round(self) -> None:
        self.slowest_s = 0.0
        self.started = time.perf_counter()
        self.waited_s, self.stolen_s = _waited_s(), _stolen_s()
        self.calibrate()

    def calibrate(self) -> None:
        """Time a product that uses all threads, as the functions do: about a millisecond."""
        seconds = min(_turn(lambda: self.factor @ self.factor, 4, self.device) for _ in range(2))
        self.best_s[self.device] = min(seconds, self.best_s.get(self.device, seconds))
        self.slowest_s = max(seconds, getattr(self, "slowest_s", 0.0))

    def was_disturbed(self) -> bool:
        allowed_s = _WAITED * (time.perf_counter() - self.started)
        return (
            self.slowest_s > _SLOWER * self.best_s[self.device]
            or _waited_s() - self.waited_s > allowed_s
            or _stolen_s() - self.stolen_s > max(allowed_s, 0.02)  # counted in steps of 10 ms
        )


def _waited_s() -> float:
    """Seconds that threads of this process were ready to run and had no core; 0 if not told."""
    waited = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            waited += int(Path(path).read_text().split()[1])
    return waited / 1e9


def _stolen_s() -> float:
    """Seconds that the host of a virtual machine gave its cores to others; 0 if not told."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = file.readline().split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3)


def _time_text(seconds: float) -> str:
    unit, factor = _unit(seconds)
    return f"{seconds * factor:.3g} {unit}"

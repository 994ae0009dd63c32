"""Measure the time and the peak memory of a piece of code, with figures that you can trust."""

import contextlib
import gc
import glob
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from amp_lab.core.backends import backend
from amp_lab.core.estimates import bootstrap
from amp_lab.core.timing_result import Comparison, Measurement

_FEWEST_ROUNDS = 12
_LEAST_TOTAL_S = 0.7  # of measuring: a neighbour on the host comes and goes in tenths of a second
_TURN_S = 5e-3  # the least time of a turn, which is all calls of one function in one round
_PLANNED_TURN_S = 1.2 * _TURN_S  # a turn is planned to be longer than the least
_PAUSE_S = 3e-3  # before a turn: threads of a library that wait by spinning go to sleep meanwhile
# Limits beyond which a round counts as disturbed, or its cores as moved.
_SLOW_MATMUL = 1.5  # time of the calibration matmul, as a multiple of its median
_FAR_APART = 3.0  # time of an exchange between threads, as a multiple of the fastest or the median
_LONG_WAIT = 0.03  # share of a round in which a thread was ready to run and had no core


def measure(
    fn: Callable[[], object], *, device: torch.device | str, warmup: int = 3, repeats: int = 10
) -> Measurement:
    """Time a function on a device, and measure its peak memory there.

    Args:
        fn: The function. It is called without arguments.
        device: The device that `fn` uses. `measure` synchronizes the device before and after each
            repeat.
        warmup: The number of calls before the timed calls. The peak memory is reset after these
            calls.
        repeats: The number of timed calls.

    Returns:
        A `Measurement` with the seconds of each repeat, and the peak memory in bytes.

    Raises:
        ValueError: If `repeats` is less than 1 or `warmup` is negative.

    Example:
        print(measure(lambda: torch.randn(256, 256).square(), device="cpu"))
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"measure: repeats={repeats} must be at least 1 and warmup={warmup} at least 0"
        )
    device = torch.device(device)
    # On a CPU, whose peak is not measured, a collection may take longer than what is timed.
    if not backend(device).is_host:
        gc.collect()  # what earlier code left behind is not this function's memory
        torch.accelerator.empty_cache()
    for _ in range(warmup):
        fn()
    _synchronize(device)
    keeps_peak = _reset_peak(device)
    samples = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        fn()
        _synchronize(device)
        samples.append(time.perf_counter() - start)
    if not keeps_peak:
        return Measurement(tuple(samples), peak_bytes=None, reserved_bytes=None)
    return Measurement(
        samples_s=tuple(samples),
        peak_bytes=torch.accelerator.max_memory_allocated(device),
        reserved_bytes=torch.accelerator.max_memory_reserved(device),
    )


def allocated_bytes(device: torch.device) -> int:
    """Bytes in tensors on a device now; 0 where the backend keeps no count, as on a CPU."""
    if not _reset_peak(device):  # shows whether a count is kept; `measure` resets it in any case
        return 0
    return torch.accelerator.memory_allocated(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch means that memory ran out; on a CPU, the message decides."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _synchronize(device: torch.device) -> None:
    """Wait for the device's work; a CPU's is done when a call returns."""
    if not backend(device).is_host:
        torch.accelerator.synchronize(device)


def _reset_peak(device: torch.device) -> bool:
    """Reset the device's count of peak memory; return False if it keeps no such count."""
    if not backend(device).keeps_peak:
        return False
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, NotImplementedError):  # an allocator without statistics
        return False
    return True


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    precision: float = 0.03,
    budget_s: float = 10.0,
    warmup: int = 1,
) -> Comparison:
    """Time functions in turns, so that you can trust the ratios of their times.

    A round runs each function in turn, and fast functions several times. Every other round reverses
    the order, so that a drift affects all functions alike. Do not trust the result if fewer than
    twelve rounds, or fewer than half of the rounds, were undisturbed.

    Args:
        functions: The functions by name. They are called without arguments. Speed-ups are relative
            to the first function.
        device: The device that the functions use.
        precision: The precision of each ratio at which the measurement stops: 0.03 is ±3 %.
        budget_s: The time limit of the measurement in seconds, without the warm-up. The environment
            variable AMP_LAB_TIMING_S can lower this limit.
        warmup: The number of calls of each function before the measurement.

    Returns:
        A `Comparison`. Print it to see times and speed-ups, or call `ratio` for the median over the
        rounds with a bootstrap interval.

    Raises:
        ValueError: If there is no function.

    Example:
        a = torch.randn(256, 256)
        print(compare({"one": lambda: a @ a, "two": lambda: a @ a @ a}, device="cpu", budget_s=1))
    """
    if not functions:
        raise ValueError("compare: give at least one function")
    device = torch.device(device)
    budget_s = min(budget_s, float(os.environ.get("AMP_LAB_TIMING_S", "inf")))
    for fn in functions.values():
        for _ in range(warmup):
            fn()
    calls = {name: _count_calls_for_turn(fn, device) for name, fn in functions.items()}
    rounds = Rounds(device)
    stop_rule = _StopRule(precision, budget_s)
    order = list(functions)
    while not stop_rule.is_met(rounds):
        with rounds.next() as seconds:  # a dict to fill: the seconds of one call by name
            for name in order:
                time.sleep(_PAUSE_S)
                turn_s = _time_calls(functions[name], calls[name], device)
                seconds[name] = turn_s / calls[name]
        order.reverse()  # so that no function is always first
    return rounds.comparison(list(functions))


class Rounds:
    """The rounds of a comparison, sorted by whether something else disturbed them.

    A round is a dictionary with the seconds of one call of each function, by name.
    """

    def __init__(self, device: torch.device):
        self.watch = _Watch(device)
        self.all: list[dict[str, float]] = []
        self.quiet: list[dict[str, float]] = []
        """The rounds that no other program disturbed."""
        self.still: list[dict[str, float]] = []
        """The quiet rounds in which the host of a virtual machine did not move its cores."""

    @contextlib.contextmanager
    def next(self) -> Iterator[dict[str, float]]:
        """The block in which the caller times one round, and fills the dictionary with its seconds.

        At its end, the round is added to `all`, and to `quiet` and `still` unless disturbed.
        """
        self.watch.start_round()
        seconds: dict[str, float] = {}
        yield seconds
        self.watch.calibrate()
        self.all.append(seconds)
        if not self.watch.was_disturbed():
            self.quiet.append(seconds)
            if not self.watch.was_moved():
                self.still.append(seconds)

    def comparison(self, names: list[str]) -> Comparison:
        """The comparison of these functions, each of which was timed in every round."""
        undisturbed = self.still
        has_enough_still = len(self.still) >= _FEWEST_ROUNDS
        if not has_enough_still:  # take those with moved cores too: they widen the intervals
            undisturbed = self.quiet
        reason = _untrusted_reason(quiet=len(self.quiet), rounds=len(self.all))
        # A result that is not trusted has the samples of all rounds, to show their spread.
        rounds = self.all if reason else undisturbed
        samples_s = {}
        for name in names:
            samples_s[name] = tuple(seconds[name] for seconds in rounds)
        return Comparison(
            samples_s=samples_s,
            disturbed=len(self.all) - len(undisturbed),
            reason=reason,
            apart=self.watch.cores_were_apart() or not has_enough_still,
        )


class _StopRule:
    """Decides when a comparison has enough rounds."""

    def __init__(self, precision: float, budget_s: float):
        self.precision = precision
        self.budget_s = budget_s
        self.least_s = min(_LEAST_TOTAL_S, budget_s / 4)
        self.next_check = _FEWEST_ROUNDS  # how many still rounds the next check needs
        self.start = time.perf_counter()

    def is_met(self, rounds: Rounds) -> bool:
        """Whether to stop: the time is over, the machine too busy, or the ratios precise enough."""
        if not rounds.all:  # one round even if nothing was budgeted
            return False
        spent_s = time.perf_counter() - self.start
        if spent_s >= self.budget_s:
            return True
        # By half time, fewer than a quarter of the rounds were quiet; to be trusted, half must be.
        if spent_s > self.budget_s / 2 and 4 * len(rounds.quiet) < len(rounds.all):
            return True
        still_count = len(rounds.still)
        if spent_s <= self.least_s or still_count < self.next_check:
            return False
        # An interval takes a thousand draws, so it is not computed after every round.
        self.next_check += max(1, still_count // 4)
        return _is_narrow_enough(rounds.still, self.precision)


def _time_calls(fn: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of `calls` calls of `fn` one after the other, with the device's work."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    _synchronize(device)
    return time.perf_counter() - start


def _count_calls_for_turn(fn: Callable[[], object], device: torch.device) -> int:
    """How many calls of `fn` make one turn, so that it lasts at least `_TURN_S` seconds."""
    calls = 1
    seconds = _time_calls(fn, calls, device)
    while seconds < _TURN_S and calls < 2**20:  # a limit for a function that does nothing
        # At most tenfold at a time, since one short reading may be far off.
        growth = _PLANNED_TURN_S / max(seconds, 1e-9)  # a clock may return the same time twice
        calls = math.ceil(calls * min(10.0, growth))
        seconds = _time_calls(fn, calls, device)
    return calls


def _is_narrow_enough(rounds: list[dict[str, float]], precision: float) -> bool:
    """Whether every ratio to the first function is known to within `precision`.

    Each round has the seconds of each function, by its name.
    """
    first, *others = rounds[0].keys()
    for name in others:
        ratios = np.array([seconds[name] / seconds[first] for seconds in rounds])
        median, low, high = bootstrap(ratios)
        if high - low > 2 * precision * median:  # `precision` to either side
            return False
    return True


def turn_s(call_s: float) -> float:
    """Estimated seconds of a turn in `compare`, with the pause before it, for calls of `call_s`."""
    return max(call_s, _PLANNED_TURN_S) + _PAUSE_S


def _untrusted_reason(quiet: int, rounds: int) -> str:
    """Why `quiet` undisturbed ones of `rounds` rounds are too few; empty if they are enough."""
    if 2 * quiet < rounds:
        return f"the machine was busy in {rounds - quiet} of {rounds} rounds"
    if quiet < _FEWEST_ROUNDS:
        return f"undisturbed rounds: {quiet} of {rounds}, and {_FEWEST_ROUNDS} are needed"
    return ""


class _Watch:
    """Detects rounds in which another program used the machine, or the host moved the cores.

    `start_round`, before a round, and `calibrate`, after it, time a small matmul on all threads. On
    a CPU they also time an exchange: a copy in which each thread reads what another wrote. It is
    slow if their cores share no cache, as after the host of a virtual machine has moved them.
    """

    fastest_exchange_s: ClassVar[dict[int, float]] = {}
    """Seconds of the fastest exchange so far in this process, by the number of threads."""

    def __init__(self, device: torch.device):
        self.device = device
        self.matrix = torch.ones(192, 192, device=device)  # a few matmuls take a millisecond
        self.exchanged = torch.ones(2**18)  # 1 MiB in the memory of the CPU, for `exchange`
        # Two or more times for each round, in order; no exchanges on a GPU.
        self.calibrations_s: list[float] = []
        self.exchanges_s: list[float] = []
        self.start_round()  # a first calibration, which also warms up the matmul and the exchange

    def start_round(self) -> None:
        """Store when the round begins, and calibrate a first time."""
        self.first_of_round = len(self.calibrations_s)  # the index, also in `exchanges_s`
        self.round_start = time.perf_counter()
        self.waited_before_s = _waited_s()
        self.stolen_before_s = _stolen_s()
        self.calibrate()

    def calibrate(self) -> None:
        """Time a matmul of about a millisecond, and on a CPU an exchange between threads."""
        self.calibrations_s.append(self._faster_of_two(self.multiply, calls=4))
        if not backend(self.device).is_host:
            return
        exchange_s = self._faster_of_two(self.exchange, calls=1)
        self.exchanges_s.append(exchange_s)
        threads = torch.get_num_threads()
        fastest_s = self.fastest_exchange_s.get(threads, exchange_s)
        self.fastest_exchange_s[threads] = min(fastest_s, exchange_s)

    def _faster_of_two(self, fn: Callable[[], object], calls: int) -> float:
        """Seconds of `calls` calls: the faster of two tries."""
        return min(_time_calls(fn, calls, self.device), _time_calls(fn, calls, self.device))

    def multiply(self) -> torch.Tensor:
        """The matmul that `calibrate` times."""
        return self.matrix @ self.matrix

    def exchange(self) -> None:
        """Let each thread read what another wrote, which is slow if they share no cache."""
        for _ in range(3):
            self.exchanged = self.exchanged.flip(0)

    def was_disturbed(self) -> bool:
        """Whether the matmul was slow in this round, or threads or cores had to wait.

        The matmul is compared with its median time. The best time is too rare: it comes once in a
        hundred rounds, when a neighbour on the same core of the host sleeps.
        """
        slowest_s = max(self.calibrations_s[self.first_of_round :])
        allowed_s = _LONG_WAIT * (time.perf_counter() - self.round_start)
        if slowest_s > _SLOW_MATMUL * statistics.median(self.calibrations_s):
            return True
        if _waited_s() - self.waited_before_s > allowed_s:
            return True
        # The system counts stolen time in steps of 10 ms, so a limit below two steps is too strict.
        return _stolen_s() - self.stolen_before_s > max(allowed_s, 0.02)

    def was_moved(self) -> bool:
        """Whether an exchange of this round was far slower or faster than usual; False on GPUs."""
        if not self.exchanges_s:  # a GPU
            return False
        usual_s = statistics.median(self.exchanges_s)
        round_s = self.exchanges_s[self.first_of_round :]
        is_slower = max(round_s) > _FAR_APART * usual_s
        is_faster = usual_s > _FAR_APART * min(round_s)
        return is_slower or is_faster

    def cores_were_apart(self) -> bool:
        """Whether exchanges usually took much longer than this process's fastest; False on GPUs."""
        if not self.exchanges_s:  # a GPU
            return False
        usual_s = statistics.median(self.exchanges_s)
        fastest_s = self.fastest_exchange_s.get(torch.get_num_threads(), math.inf)
        return usual_s > _FAR_APART * fastest_s


def _waited_s() -> float:
    """Seconds that threads of this process were ready to run and had no core; 0 off Linux."""
    waited_ns = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):  # a file for each thread
        with contextlib.suppress(OSError):  # a thread that has just ended
            _running_ns, ready_ns, _slices = Path(path).read_text().split()
            waited_ns += int(ready_ns)
    return waited_ns / 1e9


def _stolen_s() -> float:
    """Seconds that the host of a virtual machine gave its cores to others; 0 off Linux."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = file.readline().split()
    except OSError:
        return 0.0
    if len(fields) <= 8:
        return 0.0
    stolen_ticks = int(fields[8])  # after cpu, user, nice, system, idle, iowait, irq and softirq
    return stolen_ticks / os.sysconf("SC_CLK_TCK")

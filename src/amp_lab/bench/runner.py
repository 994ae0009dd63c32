"""Runs the benchmark: tries and checks every rung of a workload, then times them all in turns."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from amp_lab.bench.limits import Ceilings, Count, count_step, measure_ceilings
from amp_lab.bench.result_row import Row, write_times
from amp_lab.bench.results import Results
from amp_lab.bench.rungs import EAGER, RUNGS, Ladder, Rung, RungStep, make_step, rungs_of
from amp_lab.bench.workloads import WORKLOADS, workloads
from amp_lab.core.allocator import keep_memory
from amp_lab.core.backends import backend
from amp_lab.core.device import DeviceReport, describe_device
from amp_lab.core.environment import environment_of
from amp_lab.core.errors import OptionError, first_line
from amp_lab.core.precision import Precision
from amp_lab.core.timing import Rounds, allocated_bytes, is_out_of_memory, measure

CHECKED_STEPS = 5  # the first training steps, whose losses are compared with those of fp32 eager
TOLERANCES = {  # by precision: (of the first loss or the output, of the fall of the loss)
    Precision.FP32: (1e-3, 0.05),
    Precision.TF32: (8e-3, 0.25),
    Precision.FP16: (8e-3, 0.25),
    Precision.BF16: (6e-2, 0.34),
}
"""How far a rung may be from fp32 eager.

- The first number is the relative difference of the first loss or of the output, in the Euclidean
  norm. For the low precisions it is about 16 times their rounding error (2^-11, 2^-8), since every
  layer adds to the error.
- The second number is how far from 1 the fall of the loss in `CHECKED_STEPS` may be, divided by the
  fall in fp32 eager. It is wide, since the first steps of Adam are as long for a gradient that is
  all rounding error as for any other. So the check finds a step that does not train, or trains a
  very different model, but not every mistake.
"""
_TURN_S = 0.25  # of a rung in a round: a fast step is called several times to fill it
_QUICK_TURN_S = 0.05
_MAX_ROUNDS = 24  # fewer are timed if enough of them are undisturbed
_MAX_QUICK_ROUNDS = 18
_QUICK_S = 150  # the rounds of a quick run end before, since it promises to end in 180 s
# An eager step this many times as slow as in fp32 is emulated: each step would take minutes.
_HOPELESS = 20


class _PlannedLadder(NamedTuple):
    """A workload in one precision (a `Ladder`), and those of its rungs that are tried."""

    ladder: Ladder
    rungs: list[Rung]


@dataclass
class _Configuration:
    """A rung after its first steps, ready to be timed, and the row for its results."""

    row: Row
    ladder: Ladder
    step: RungStep
    # What is compared with fp32: the losses of the first steps (steps,) or the output of inference,
    # in float64 on the CPU.
    check: Tensor
    seconds: float = 0.0  # of the latest step


@dataclass(frozen=True)
class _Pace:
    """How many rounds a workload is timed, and how long a turn is.

    In a round, every rung gets one turn. A turn is one or more steps of a rung, timed together.
    """

    rounds: int | None  # the exact number; None: until enough rounds were undisturbed
    max_rounds: int
    turn_s: float
    end: float = math.inf  # on the clock of `time.perf_counter`: no round may end after this

    def needs_round(self, rounds: Rounds, round_s: float) -> bool:
        """Whether to time one more round, which will take about `round_s` seconds."""
        done = len(rounds.all)
        if self.rounds is not None:
            return done < self.rounds
        if done and time.perf_counter() + round_s > self.end:  # one round is always timed
            return False
        # A comparison of no functions is trusted if enough rounds were undisturbed.
        return done < self.max_rounds and not rounds.comparison([]).trusted


def run_bench(
    device: torch.device,
    *,
    quick: bool = False,
    names: Sequence[str] = (),
    precisions: Sequence[str] = (),
    rungs: Sequence[str] = (),
    rounds: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    after_round: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Time workloads in every precision on every rung, and compare the times with the roofline.

    `names` selects the workloads; `precisions` and `rungs` select the rows. The default is all
    workloads and rungs, in the precisions that the device accelerates. fp32 and eager are always
    included, since the others are compared with them.

    First, every rung of a workload runs once. A rung gets a status instead of a time if its result
    is wrong (`TOLERANCES`), if it fails or runs out of memory, or if the hardware only emulates its
    precision. Then the rungs take turns for `rounds` rounds. By default, the timing continues until
    enough rounds were undisturbed, for at most 24 rounds (18 if `quick`). A `quick` run uses small
    sizes, leaves out rungs that compile slowly, and takes about three minutes. Rows with too few
    rounds are not trusted.

    `say` is called with a line before each measurement. `after_round` is called with the results so
    far. After a `KeyboardInterrupt`, the function returns these results, marked as incomplete. On a
    CPU, the process keeps freed memory after this call (`keep_memory`). Raises `OptionError` for an
    unknown name.
    """
    _check_names("workload", names, list(WORKLOADS))
    _check_names("precision", precisions, [str(p) for p in Precision])
    _check_names("rung", rungs, [rung.name for rung in RUNGS])
    if rounds is not None and rounds < 1:
        raise OptionError(f"rounds={rounds}: must be at least 1")
    pace = _Pace(rounds, max_rounds=_MAX_ROUNDS, turn_s=_TURN_S)
    if quick:
        end = time.perf_counter() + _QUICK_S
        pace = _Pace(rounds, max_rounds=_MAX_QUICK_ROUNDS, turn_s=_QUICK_TURN_S, end=end)
    report = describe_device(device)
    chosen_precisions = _choose_precisions(report, precisions)
    plan = _plan(device, chosen_precisions, names, rungs, quick=quick)
    # Without this, the system maps memory again in each step. That slows fp32 most, so that every
    # speed-up would be too large.
    memory_kept = keep_memory()
    say("measuring the limits of the device")
    ceilings = measure_ceilings(device)
    results = _new_results(report, ceilings, quick=quick, rounds=rounds or pace.max_rounds)
    results.environment["memory_kept"] = memory_kept
    try:
        for ladders in plan:
            say(ladders[0].ladder.workload.title)
            _run_workload(ladders, results, pace, after_round)
        results.complete = True
    except KeyboardInterrupt:  # rows that were not timed yet are no results
        results.rows = [row for row in results.rows if row.status != "ok" or row.samples_s]
    results.raise_limits()
    if results.complete:  # once more, since the limits changed after the last round
        after_round(results)
    return results


def _check_names(noun: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise `OptionError` for an unknown name; `noun` is what it names, such as ``rung``."""
    for name in names:
        if name not in known:
            raise OptionError(f"{noun} {name!r} is unknown; give one of {', '.join(known)}")


def _choose_precisions(report: DeviceReport, names: Sequence[str]) -> list[Precision]:
    """fp32, and the precisions with these names, or else those that the device accelerates."""
    for name in names:
        if report.rates[Precision(name)] is None:  # no rate: the device does not have it
            raise OptionError(f"precision {name!r}: {report.name} does not support this precision")
    chosen = {Precision(name) for name in names} or set(report.accelerated)
    chosen.add(Precision.FP32)
    return [precision for precision in Precision if precision in chosen]  # in a fixed order


def _plan(
    device: torch.device,
    precisions: list[Precision],
    names: Sequence[str],
    rungs: Sequence[str],
    *,
    quick: bool,
) -> list[list[_PlannedLadder]]:
    """The ladders of each workload, one for each precision, fp32 first.

    Raises `OptionError` for the name of a workload or a rung that this device or a quick run lacks.
    """
    where = "on this device"
    if quick:
        where = f"in a quick run {where}"
    available = workloads(device, quick=quick)
    for name in names:
        if all(workload.name != name for workload in available):
            raise OptionError(f"workload {name!r} is not available {where}")
    plan: list[list[_PlannedLadder]] = []
    planned_rungs: set[str] = set()
    for workload in available:
        if names and workload.name not in names:
            continue
        ladders: list[_PlannedLadder] = []
        for precision in precisions:
            ladder = Ladder(workload, precision, device)
            rungs_of_ladder = _choose_rungs(ladder, rungs, quick=quick)
            ladders.append(_PlannedLadder(ladder, rungs_of_ladder))
            planned_rungs.update(rung.name for rung in rungs_of_ladder)
        plan.append(ladders)
    for name in rungs:
        if name not in planned_rungs:
            raise OptionError(f"rung {name!r} exists for none of these workloads {where}")
    return plan


def _choose_rungs(ladder: Ladder, names: Sequence[str], *, quick: bool) -> list[Rung]:
    """The rungs with these names, or all without names, except slow ones in a quick run.

    Eager is always one of them: its step is counted, and in fp32 the others are compared with it.
    """
    chosen_rungs = []
    for rung in rungs_of(ladder):
        is_asked = not names or rung is EAGER or rung.name in names
        is_too_slow = quick and rung.takes_long(ladder)
        if is_asked and not is_too_slow:
            chosen_rungs.append(rung)
    return chosen_rungs


def _new_results(report: DeviceReport, ceilings: Ceilings, *, quick: bool, rounds: int) -> Results:
    """Results without rows: the limits of the device, and the environment of the run."""
    options: dict[str, str | int | bool] = {"quick": quick, "rounds": rounds}
    trusted = ceilings.trusted and report.trusted
    return Results(
        ceilings.flops_per_s,
        ceilings.stream_bytes_per_s,
        trusted,
        environment=environment_of(report) | options,
        rows=[],
        complete=False,
    )


def _run_workload(
    ladders: list[_PlannedLadder],
    results: Results,
    pace: _Pace,
    after_round: Callable[[Results], None],
) -> None:
    """Try and time the rungs of one workload, and add their rows to the results."""
    # Each rung compiles the same source again; by default torch stops after 8 times and runs the
    # function eagerly, which would be timed as if it were compiled.
    settings = {"recompile_limit": 1000, "fail_on_recompile_limit_hit": True}
    settings["automatic_dynamic_shapes"] = False  # since shapes never change within a workload
    with torch._dynamo.config.patch(settings):
        ready = _prepare(ladders, results)
        rounds = Rounds(ladders[0].ladder.device)
        round_s = 0.0
        while pace.needs_round(rounds, round_s):
            started = time.perf_counter()
            _time_round(ready, rounds, pace.turn_s)
            round_s = time.perf_counter() - started
            write_times([configuration.row for configuration in ready], rounds)
            after_round(results)
    # The next workload needs the memory of these models, graphs and compiled functions.
    ready.clear()
    torch._dynamo.reset()
    gc.collect()


def _time_round(ready: list[_Configuration], rounds: Rounds, turn_s: float) -> None:
    """Give each configuration that has not failed one turn, and add the round to `rounds`."""
    # Every other round goes backwards, so that no rung always follows the same one.
    is_backwards = len(rounds.all) % 2 == 1
    order = ready[::-1] if is_backwards else ready
    with rounds.next() as seconds:  # a dict to fill: the seconds of a step by `Row.setting`
        for configuration in order:
            row = configuration.row
            if row.status != "ok":
                continue
            with _failure_recorded(row, configuration.ladder.device):
                seconds[row.setting] = _time(configuration, turn_s)


def _prepare(ladders: list[_PlannedLadder], results: Results) -> list[_Configuration]:
    """Try the rungs of one workload in each precision, and return those that can be timed.

    Each rung that is tried gets a row in the results, whose status says why it cannot be timed. If
    the eager step is hopelessly slow, the other rungs of its precision are not tried.
    """
    ready: list[_Configuration] = []
    baseline = None  # fp32 eager, the first of all
    for ladder, rungs in ladders:
        count = None  # FLOPs and bytes of the eager step, the first of each precision
        for rung in rungs:
            row = _new_row(ladder, rung)
            results.rows.append(row)
            with _failure_recorded(row, ladder.device):
                configuration = _run_first_steps(row, ladder, rung, baseline)
                if rung is EAGER:
                    count = _count(configuration)
                    if ladder.precision is Precision.FP32:
                        baseline = configuration
                _judge(configuration, baseline)  # may set the status of the row to "failed"
                if count is not None and rung.has_limit:
                    _write_count(row, count, results)
                if row.status == "ok":
                    ready.append(configuration)
            if row.status == "not run" and rung is EAGER:  # `_refuse_hopeless` has raised
                break  # the other rungs of this precision would take as long
    return ready


def _new_row(ladder: Ladder, rung: Rung) -> Row:
    """A row without results, whose status is ``ok`` until something fails."""
    workload = ladder.workload
    row = Row(workload.name, workload.size, str(ladder.precision), rung.name, "ok")
    row.unit = workload.unit
    row.items = workload.items
    return row


def _count(configuration: _Configuration) -> Count:
    """Count FLOPs and bytes of a configuration's step, which is called twice for that."""
    step = configuration.step
    ladder = configuration.ladder
    with ladder.precision.float32_mode(ladder.device.type):
        return count_step(step.call, step.model, step.inputs, training=ladder.workload.trains)


def _write_count(row: Row, count: Count, results: Results) -> None:
    """Write FLOPs and bytes into a row, and the time that they take at the device's limits."""
    row.flops = count.flops
    row.moved_bytes = count.moved_bytes
    row.least_bytes = count.least_bytes
    row.floor_s = results.floor_s(row.precision, count.flops, count.least_bytes)


@contextlib.contextmanager
def _failure_recorded(row: Row, device: torch.device) -> Iterator[None]:
    """The block in which an error becomes the status of a row, so that the benchmark continues.

    An `OptionError`, such as for a step that takes too long, becomes "not run". A `RuntimeError`
    becomes "out of memory" or "failed". Other errors are raised.
    """
    try:
        yield
    except OptionError as error:
        row.stop("not run", str(error))
    except RuntimeError as error:
        if is_out_of_memory(error):
            row.stop("out of memory", _out_of_memory_reason(error, device))
        else:
            row.stop("failed", first_line(error))
    if row.status != "ok":  # free its memory for the next rung
        gc.collect()
        if not backend(device).is_host:
            torch.accelerator.empty_cache()


def _out_of_memory_reason(error: RuntimeError, device: torch.device) -> str:
    """The first line of torch's message, and the memory that earlier rungs hold."""
    reason = first_line(error)
    held_bytes = allocated_bytes(device)
    if held_bytes:
        reason += f"; earlier rungs hold {held_bytes / 2**20:.0f} MiB"
    return reason


def _run_first_steps(
    row: Row, ladder: Ladder, rung: Rung, baseline: _Configuration | None
) -> _Configuration:
    """Make a rung's step, call it `CHECKED_STEPS` times, and write its peak memory into the row.

    `baseline` is fp32 eager; it is None for fp32 eager itself. Raises `OptionError` for a precision
    whose eager step takes `_HOPELESS` times as long as in fp32, and `RuntimeError` where a rung
    needs a CUDA graph and torch recorded none. Returns the rung with its step, ready to be timed.
    """
    device = ladder.device
    trains = ladder.workload.trains
    baseline_s = None
    if rung is EAGER and baseline is not None:
        baseline_s = baseline.seconds
    bytes_before = allocated_bytes(device)  # in what earlier rungs hold
    counters = torch._dynamo.utils.counters["inductor"]
    skips_before = counters["cudagraph_skips"]
    step = make_step(ladder, rung)
    outputs: list[Tensor] = []  # the loss of each step, or only the last output of inference

    def call() -> None:
        if not trains:
            outputs.clear()  # so that the peak memory of a call has only one output in it
        outputs.append(step.call())

    with ladder.precision.float32_mode(device.type):
        first = measure(call, device=device, warmup=0, repeats=1)
        if backend(device).is_host:  # on an accelerator, the first call also loads kernels
            _refuse_hopeless(first.samples_s[0], baseline_s)
        others = measure(call, device=device, warmup=0, repeats=CHECKED_STEPS - 1)
        _refuse_hopeless(others.samples_s[-1], baseline_s)
    if rung.needs_graph and counters["cudagraph_skips"] > skips_before:
        raise RuntimeError("torch recorded no CUDA graph of this step")
    peaks = [measured.peak_bytes for measured in (first, others) if measured.peak_bytes is not None]
    if peaks:
        # A CUDA graph allocates its memory when it is recorded, and none when it is replayed.
        peak = max(peaks) if step.records_graph else peaks[-1]
        row.peak_bytes = peak - bytes_before
    check = torch.stack(outputs) if trains else outputs[-1]
    return _Configuration(row, ladder, step, check.cpu().double(), others.samples_s[-1])


def _refuse_hopeless(seconds: float, baseline_s: float | None) -> None:
    """Raise `OptionError` if a step takes over a second and over `_HOPELESS` times `baseline_s`.

    With None there is no baseline, and any time is accepted.
    """
    if baseline_s is None:
        return
    if seconds > max(1.0, _HOPELESS * baseline_s):
        times = f"{seconds / baseline_s:.0f} times as long as in fp32"
        raise OptionError(f"a step takes {seconds:.3g} s, {times}")


def _judge(configuration: _Configuration, baseline: _Configuration | None) -> None:
    """Compare losses or output with fp32 eager's; write `error` and `progress` into the row.

    `baseline` is fp32 eager. A row beyond the `TOLERANCES`, or without a baseline, gets the status
    ``failed``.
    """
    row = configuration.row
    if baseline is None:
        row.stop("failed", "there is no fp32 eager to compare with")
        return
    check = configuration.check
    reference = baseline.check
    reasons = []
    tolerance, fall_tolerance = TOLERANCES[configuration.ladder.precision]
    if configuration.ladder.workload.trains:
        fall = check[0] - check[-1]  # of the loss
        reference_fall = reference[0] - reference[-1]
        row.progress = _finite(fall / reference_fall)
        if row.progress is None or abs(row.progress - 1) > fall_tolerance:
            share = "not a number" if row.progress is None else f"{row.progress:.0%}"
            reasons.append(
                f"relative to fp32, the fall of its loss is {share}, where the check allows "
                f"100% ± {fall_tolerance:.0%}"
            )
        # Only the first loss is compared: rounding makes later ones diverge in a correct step too.
        check = check[:1]
        reference = reference[:1]
    row.error = _finite((check - reference).norm() / reference.norm())
    if row.error is None or row.error > tolerance:
        error = "not a number" if row.error is None else f"{row.error:.1e}"
        reasons.append(f"its error from fp32 is {error}, where the check allows {tolerance:.0e}")
    if reasons:
        row.stop("failed", "; ".join(reasons))


def _finite(number: Tensor) -> float | None:
    """The number of a scalar tensor; None for NaN and infinity, which JSON does not have."""
    return number.item() if number.isfinite() else None


def _time(configuration: _Configuration, turn_s: float) -> float:
    """Seconds of a step, the mean over one turn: 1 to 20 calls, to fill `turn_s` seconds.

    The calls are timed together, since the host of an accelerator must be free to run ahead from
    one step to the next. The mean is kept in `configuration.seconds` for the next turn.
    """
    step = configuration.step
    ladder = configuration.ladder
    calls_that_fit = round(turn_s / configuration.seconds)
    calls = max(1, min(20, calls_that_fit))

    def run() -> None:
        for _ in range(calls):
            step.call()

    with ladder.precision.float32_mode(ladder.device.type):
        # `measure` empties the memory cache of an accelerator, which the warm-up fills again.
        warmup = 0 if backend(ladder.device).is_host else 1
        measurement = measure(run, device=ladder.device, warmup=warmup, repeats=1)
    configuration.seconds = measurement.samples_s[0] / calls
    return configuration.seconds

"""The benchmark: every rung of a workload is tried and checked, then all are timed in turns."""

import contextlib
import datetime
import gc
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_lab.bench.limits import Ceilings, Count, count_step, measure_ceilings
from amp_lab.bench.results import BASELINE, Results, Row, ratio
from amp_lab.bench.rungs import EAGER, RUNGS, Case, Rung, Step, make_step, rungs_of
from amp_lab.bench.workloads import WORKLOADS, workloads
from amp_lab.core.allocator import keep_memory
from amp_lab.core.backends import backend
from amp_lab.core.device import DeviceReport, describe_device
from amp_lab.core.errors import OptionError, first_line
from amp_lab.core.precision import Precision
from amp_lab.core.timing import Measurement, Rounds, allocated_bytes, is_out_of_memory, measure

CHECKED_STEPS = 5  # losses of so many first training steps are held against those of fp32 eager
TOLERANCES = {  # precision: of the first loss, or the output; of the fall of the loss
    Precision.FP32: (1e-3, 0.05),
    Precision.TF32: (8e-3, 0.25),
    Precision.FP16: (8e-3, 0.25),
    Precision.BF16: (6e-2, 0.34),
}
"""How far a rung may be from fp32 eager.

The first loss, or the output: relative, in the Euclidean norm; for the low precisions about 16
times their rounding error (2^-11, 2^-8), which every layer adds to. The fall of the loss in
`CHECKED_STEPS`, over that in fp32 eager: how far from 1. It is wide, since the first steps of Adam
are as long for a gradient that is all rounding error as for any other. So this finds a step that
does not train, or trains something much different, and not every mistake.
"""
# Seconds of a turn: a fast step is called several times to fill it.
_TURN_S = 0.25
_QUICK_TURN_S = 0.05
_MAX_ROUNDS = 24  # unless enough were undisturbed before
_MAX_QUICK_ROUNDS = 18
_QUICK_S = 150  # of a whole quick run, in which a round is begun: it promises 180
_HOPELESS = 20  # times as long as fp32 eager: a format that is emulated; minutes for each step

Ladder = tuple[Case, list[Rung]]  # a case, and which of its rungs to climb


@dataclass
class _Configuration:
    """A rung that is ready to be timed, and the row that it fills."""

    row: Row
    case: Case
    step: Step
    check: Tensor  # losses of the first steps, or the output; in fp64, on the CPU
    seconds: float = 0.0  # of the last of those steps


@dataclass(frozen=True)
class _Pace:
    """How long the rungs of a workload are timed."""

    rounds: int | None  # exactly so many; None: until enough of them were undisturbed
    max_rounds: int
    turn_s: float
    end: float = math.inf  # of the clock: when no more rounds are begun

    def goes_on(self, timed: Rounds, round_s: float) -> bool:
        """Whether there is to be one more round, if the last one took so many seconds."""
        done = len(timed.all)
        if self.rounds is not None:
            return done < self.rounds
        if done and time.perf_counter() + round_s > self.end:
            return False
        return done < self.max_rounds and not timed.comparison([]).trusted


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
    """Time workloads in every precision on every rung, against fp32 eager and the device's limits.

    `names`, `precisions` and `rungs` choose; without, it is all of them, and the precisions that
    the device accelerates. fp32 and eager are always there, since the others are held against them.
    All rungs of a workload are tried first, and one that computes something else (`TOLERANCES`),
    fails or finds no memory is reported as such; so is a precision that the hardware only emulates.
    Then they take turns, `rounds` times; by default until enough rounds were undisturbed to trust
    them, up to 24 (18 if `quick`). A quick run has small sizes, leaves out what takes long to
    compile, and ends in three minutes; what had too few rounds by then says that it is not trusted.

    `after_round` gets the results so far. A `KeyboardInterrupt` returns them, marked not complete.
    On a CPU memory is kept from then on (`keep_memory`). Raises `OptionError` for an unknown name.
    """
    _check_names("workload", names, list(WORKLOADS))
    _check_names("precision", precisions, [str(p) for p in Precision])
    _check_names("rung", rungs, [rung.name for rung in RUNGS])
    if rounds is not None and rounds < 1:
        raise OptionError(f"rounds={rounds}: must be at least 1")
    pace = _Pace(rounds, _MAX_ROUNDS, _TURN_S)
    if quick:
        end = time.perf_counter() + _QUICK_S
        pace = _Pace(rounds, _MAX_QUICK_ROUNDS, _QUICK_TURN_S, end)
    report = describe_device(device)
    chosen = _choose_precisions(report, precisions)
    plan = _plan(device, chosen, names, rungs, quick)
    kept = keep_memory()  # or fp32 is slower by what the system does, and every speed-up larger
    say("measuring the limits of the device")
    ceilings = measure_ceilings(device)
    results = _new_results(report, ceilings, quick, rounds or pace.max_rounds)
    results.environment["memory_kept"] = kept
    try:
        for ladders in plan:
            case, _ = ladders[0]
            say(case.workload.title)
            _climb(ladders, results, pace, after_round)
        results.complete = True
    except KeyboardInterrupt:  # what has no time yet is no result
        results.rows = [row for row in results.rows if row.status != "ok" or row.samples_s]
    _raise_limits(results)
    if results.complete:
        after_round(results)
    return results


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise OptionError(f"no {what} is called {name!r}; there are {', '.join(known)}")


def _choose_precisions(report: DeviceReport, asked: Sequence[str]) -> list[Precision]:
    for name in asked:
        if report.rates[Precision(name)] is None:
            raise OptionError(f"precision {name!r}: {report.name} has none")
    chosen = {Precision(name) for name in asked} or set(report.accelerated)
    chosen.add(Precision.FP32)
    return [precision for precision in Precision if precision in chosen]


def _plan(
    device: torch.device,
    precisions: list[Precision],
    names: Sequence[str],
    rungs: Sequence[str],
    quick: bool,
) -> list[list[Ladder]]:
    """The ladders of each workload, fp32 first. Raises `OptionError` for what is not here."""
    where = "on this device"
    if quick:
        where = f"in a quick run {where}"
    here = workloads(device, quick=quick)
    for name in names:
        if all(workload.name != name for workload in here):
            raise OptionError(f"workload {name!r} is not {where}")
    plan: list[list[Ladder]] = []
    climbed: set[str] = set()
    for workload in here:
        if names and workload.name not in names:
            continue
        ladders: list[Ladder] = []
        for precision in precisions:
            case = Case(workload, precision, device)
            ladder = _ladder(case, rungs, quick)
            ladders.append((case, ladder))
            climbed.update(rung.name for rung in ladder)
        plan.append(ladders)
    for name in rungs:
        if name not in climbed:
            raise OptionError(f"rung {name!r}: none of these workloads has it {where}")
    return plan


def _ladder(case: Case, asked: Sequence[str], quick: bool) -> list[Rung]:
    """The rungs to climb; eager always, since all others of a precision stand on it."""
    ladder = []
    for rung in rungs_of(case):
        is_asked = not asked or rung is EAGER or rung.name in asked
        is_too_slow = quick and rung.takes_long(case)
        if is_asked and not is_too_slow:
            ladder.append(rung)
    return ladder


def _new_results(report: DeviceReport, ceilings: Ceilings, quick: bool, rounds: int) -> Results:
    """No rows yet, and where and how they are measured."""
    environment: dict[str, str | int | bool] = {
        "device": report.name,
        "backend": report.backend,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "quick": quick,
        "rounds": rounds,
    }
    trusted = ceilings.trusted and report.trusted
    return Results(
        ceilings.flops_per_s,
        ceilings.stream_bytes_per_s,
        trusted,
        environment,
        rows=[],
        complete=False,
    )


def _climb(
    ladders: list[Ladder], results: Results, pace: _Pace, after_round: Callable[[Results], None]
) -> None:
    """Add the rows of one workload to the results."""
    # A compiled function is compiled anew for each rung; torch stops at 8 of one source.
    limits = {"recompile_limit": 1000, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        ready = _prepare(ladders, results)
        timed = Rounds(ladders[0][0].device)
        round_s = 0.0
        while pace.goes_on(timed, round_s):
            started = time.perf_counter()
            _time_round(ready, timed, pace.turn_s)
            round_s = time.perf_counter() - started
            _fill([configuration.row for configuration in ready], timed)
            after_round(results)
    ready.clear()
    torch._dynamo.reset()
    gc.collect()


def _time_round(ready: list[_Configuration], timed: Rounds, turn_s: float) -> None:
    """One turn of each configuration that has not failed yet."""
    # Every other round goes backwards, so that none always comes after the same one.
    is_backwards = len(timed.all) % 2 == 1
    with timed.next() as seconds:
        for configuration in reversed(ready) if is_backwards else ready:
            row = configuration.row
            if row.status != "ok":
                continue
            with _failure_told_in(row, configuration.case.device):
                seconds[row.setting] = _time(configuration, turn_s)


def _prepare(ladders: list[Ladder], results: Results) -> list[_Configuration]:
    """The rungs that can be timed; each gets a row, whether it can or not."""
    ready: list[_Configuration] = []
    baseline = None  # fp32 eager, which comes first
    for case, ladder in ladders:
        count = None  # of the eager step, which comes first
        for rung in ladder:
            row = _new_row(case, rung)
            results.rows.append(row)
            with _failure_told_in(row, case.device):
                made = _first_calls(row, case, rung, baseline)
                if rung is EAGER:
                    count = _count(made)
                    if case.precision is Precision.FP32:
                        baseline = made
                _judge(made, baseline)
                if count is not None and rung.has_limit:
                    _write_count(row, count, results)
                if row.status == "ok":
                    ready.append(made)
            if row.status == "not run" and rung is EAGER:
                break  # the rungs above it would take as long
    return ready


def _new_row(case: Case, rung: Rung) -> Row:
    workload = case.workload
    row = Row(workload.name, workload.size, str(case.precision), rung.name, "ok")
    row.unit = workload.unit
    row.items = workload.items
    return row


def _count(made: _Configuration) -> Count:
    """FLOPs and bytes of a step."""
    step = made.step
    case = made.case
    with case.precision.float32_mode(case.device.type):
        return count_step(step.call, step.model, step.inputs, training=case.workload.trains)


def _write_count(row: Row, count: Count, results: Results) -> None:
    """Write FLOPs and bytes into a row, and how long they take at the device's limits."""
    row.flops = count.flops
    row.moved_bytes = count.moved_bytes
    row.least_bytes = count.least_bytes
    row.floor_s = results.floor_s(row.precision, count.flops, count.least_bytes)


@contextlib.contextmanager
def _failure_told_in(row: Row, device: torch.device) -> Iterator[None]:
    """Write what goes wrong in the block into the row, and go on after it."""
    try:
        yield
    except OptionError as error:
        row.stop("not run", str(error))
    except RuntimeError as error:
        if is_out_of_memory(error):
            row.stop("out of memory", _out_of_memory_reason(error, device))
        else:
            row.stop("failed", first_line(error))
    if row.status != "ok":  # what it left behind is not to be missing for the next
        gc.collect()
        if not backend(device).is_host:
            torch.accelerator.empty_cache()


def _out_of_memory_reason(error: RuntimeError, device: torch.device) -> str:
    reason = first_line(error)
    held = allocated_bytes(device)
    if held:
        reason += f"; {held / 2**20:.0f} MiB are held by the rungs before it"
    return reason


def _first_calls(
    row: Row, case: Case, rung: Rung, baseline: _Configuration | None
) -> _Configuration:
    """The step after its first calls.

    Raises `OptionError` for a precision whose eager step takes `_HOPELESS` times as long as fp32's.
    """
    held = allocated_bytes(case.device)
    counters = torch._dynamo.utils.counters["inductor"]
    skipped = counters["cudagraph_skips"]
    step = make_step(case, rung)
    seconds = 0.0
    outputs: list[Tensor] = []
    peaks: list[int | None] = []

    def call() -> None:
        if not case.workload.trains:
            outputs.clear()  # an output is no part of the next call's memory
        outputs.append(step.call())

    with case.precision.float32_mode(case.device.type):
        for calls in (1, CHECKED_STEPS - 1):
            m = measure(call, device=case.device, warmup=0, repeats=calls)
            seconds = m.samples_s[-1]
            peaks.append(m.peak_bytes)
            # An accelerator's first call loads kernels, which says nothing about the others.
            if rung is EAGER and baseline and (calls > 1 or backend(case.device).is_host):
                _refuse_hopeless(seconds, baseline.seconds)
    if rung.needs_graph and counters["cudagraph_skips"] > skipped:
        raise RuntimeError("torch recorded no graph of it")
    counted = [peak for peak in peaks if peak is not None]
    if counted:
        # A graph takes its memory when it is recorded, and none when it is replayed.
        peak = max(counted) if step.records_graph else counted[-1]
        row.peak_bytes = peak - held
    check = torch.stack(outputs) if case.workload.trains else outputs[-1]
    return _Configuration(row, case, step, check.cpu().double(), seconds)


def _refuse_hopeless(seconds: float, baseline_s: float) -> None:
    if seconds > max(1.0, _HOPELESS * baseline_s):
        times = f"{seconds / baseline_s:.0f} times as long as in fp32"
        raise OptionError(f"a step takes {seconds:.3g} s, {times}")


def _judge(made: _Configuration, baseline: _Configuration | None) -> None:
    """Hold the losses (steps,), or the output, against those of fp32 eager."""
    row = made.row
    if baseline is None:
        row.stop("failed", "there is no fp32 eager to hold it against")
        return
    check = made.check
    reference = baseline.check
    reasons = []
    tolerance, fall_tolerance = TOLERANCES[made.case.precision]
    if made.case.workload.trains:
        row.progress = _finite((check[0] - check[-1]) / (reference[0] - reference[-1]))
        if row.progress is None or abs(row.progress - 1) > fall_tolerance:
            fall = "not a number" if row.progress is None else f"{row.progress:.0%}"
            reasons.append(
                f"its loss falls by {fall} of what it does in fp32, where {fall_tolerance:.0%} "
                "more or less would pass"
            )
        # Later losses diverge by themselves.
        check = check[:1]
        reference = reference[:1]
    row.error = _finite((check - reference).norm() / reference.norm())
    if row.error is None or row.error > tolerance:
        error = "not a number" if row.error is None else f"{row.error:.1e} off fp32"
        reasons.append(f"{error}, where {tolerance:.0e} would pass")
    if reasons:
        row.stop("failed", "; ".join(reasons))


def _finite(number: Tensor) -> float | None:
    return number.item() if number.isfinite() else None


def _time(configuration: _Configuration, turn_s: float) -> float:
    """Seconds of a step in one turn, of as many calls as fill `turn_s` seconds.

    They are timed together: the host of an accelerator must be free to run ahead from one step to
    the next.
    """
    step = configuration.step
    case = configuration.case
    calls_that_fit = round(turn_s / configuration.seconds)
    calls = max(1, min(20, calls_that_fit))

    def run() -> None:
        for _ in range(calls):
            step.call()

    with case.precision.float32_mode(case.device.type):
        # On an accelerator `measure` empties its cache, which the first calls fill again.
        warmup = 0 if backend(case.device).is_host else 1
        measured = measure(run, device=case.device, warmup=warmup, repeats=1)
    configuration.seconds = measured.samples_s[0] / calls
    return configuration.seconds


def _fill(rows: Sequence[Row], timed: Rounds) -> None:
    """Write what the rounds say so far into the rows of a workload."""
    named = {row.setting: row for row in rows if row.status == "ok"}
    compared = timed.comparison(list(named))
    baseline = " ".join(BASELINE)
    for name, row in named.items():
        row.trusted = compared.trusted
        row.reason = compared.reason
        row.rounds = len(timed.all)
        row.disturbed = compared.disturbed
        _write_samples(row, compared.samples_s[name])
        if baseline in named:
            speedup = compared.ratio(baseline, name)
            row.speedup = speedup.median
            row.speedup_interval = list(speedup.interval)


def _write_samples(row: Row, samples_s: tuple[float, ...]) -> None:
    """Write the seconds of a step by round, and what follows from them."""
    measured = Measurement(samples_s, None, None)
    row.samples_s = list(measured.samples_s)
    row.median_s = measured.median_s
    row.iqr_s = measured.iqr_s
    row.items_per_s = row.items / measured.median_s
    row.flops_per_s = ratio(row.flops, row.median_s)
    row.share_of_limit = ratio(row.floor_s, row.median_s)


def _raise_limits(results: Results) -> None:
    """Take the highest rates of the whole run for the limits, and say them in each row.

    They are measured at its beginning; on a machine that others use too, a product may find it less
    busy later. What is much faster than the limits is not trusted, and raises nothing; nor do other
    workloads, so that a wrong count would show.
    """
    results.distrust_impossible()
    # What has a floor has rates and counts, so none of these is really 0.
    counted = [row for row in results.rows if row.status == "ok" and row.floor_s is not None]
    products = [row for row in counted if row.workload == "product"]
    rates = results.flops_per_s
    for row in [row for row in products if not results.why_impossible(row)]:
        rates[row.precision] = max(rates[row.precision] or 0.0, row.flops_per_s or 0.0)
        least_bytes = row.least_bytes or 0
        results.raise_stream_rate(least_bytes, ratio(least_bytes, row.median_s) or 0.0)
    for row in counted:
        row.floor_s = results.floor_s(row.precision, row.flops, row.least_bytes)
        row.share_of_limit = ratio(row.floor_s, row.median_s)

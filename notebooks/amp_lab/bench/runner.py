"""The benchmark: every configuration of a workload made ready, then timed in turns."""

import contextlib
import dataclasses
import datetime
import gc
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from amp_lab.bench.limits import Ceilings, Count, count_step, measure_ceilings
from amp_lab.bench.results import Results, Row
from amp_lab.bench.rungs import COMPILED, RUNGS, Step, make_step, rungs_of
from amp_lab.bench.workloads import NAMES, Workload, workloads
from amp_lab.device import DeviceReport, describe_device
from amp_lab.errors import OptionError, first_line
from amp_lab.precision import Precision
from amp_lab.timing import allocated_bytes, is_out_of_memory, measure

CHECKED_STEPS = 5
"""Losses of so many first training steps are held against those of fp32 eager."""
TOLERANCES = {
    Precision.FP32: 1e-3,
    Precision.TF32: 8e-3,
    Precision.FP16: 8e-3,
    Precision.BF16: 6e-2,
}
"""How far the first loss, or the output, may be from that of fp32 eager: relative, in the Euclidean
norm. For the low precisions about 16 times their rounding error (2^-11, 2^-8), which every layer
adds to."""
PROGRESS = {
    Precision.FP32: 0.05,
    Precision.TF32: 0.25,
    Precision.FP16: 0.25,
    Precision.BF16: 0.34,
}
"""How far from 1 the fall of the loss in these steps may be, over that in fp32 eager.

The first steps of Adam are as long for a gradient that is all rounding error as for any other, so
low precision learns another amount in them. On few random images, which have little in common to
be learned, that is a fifth. This finds a step that does not train, or trains something much
different, and not every mistake.
"""
# Seconds of a turn: a fast step is called several times to fill it.
_TURN_S, _QUICK_TURN_S = 0.25, 0.1
_HOPELESS = 20  # times as long as fp32 eager: a format that is emulated; minutes for each step


@dataclass
class _Configuration:
    row: Row
    precision: Precision
    step: Step
    check: torch.Tensor | None = None
    """Losses of the first steps, or the output."""
    seconds: float = 0.0
    """Of the last of those steps."""


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
    All configurations of a workload are made ready first: each is checked (see `TOLERANCES` and
    `PROGRESS`), and one that computes something else, fails or finds no memory is reported as such.
    Then they take turns, `rounds` times (default 10, and 5 if `quick`). A precision in which the
    plain step takes far longer than in fp32, since the hardware does not have it, is told and left
    alone. A quick run has small sizes, and leaves out what takes long to compile.

    `after_round` gets the results so far. A `KeyboardInterrupt` ends the run, and what was timed is
    returned, marked as not complete. Raises `OptionError` for an unknown name.
    """
    _check_names("workload", names, NAMES)
    _check_names("precision", precisions, [str(p) for p in Precision])
    _check_names("rung", rungs, list(RUNGS))
    if rounds is None:
        rounds = 5 if quick else 10
    if rounds < 1:
        raise OptionError(f"rounds={rounds}: must be at least 1")
    report = describe_device(device)
    chosen = _precisions(report, precisions)
    turn_s = _QUICK_TURN_S if quick else _TURN_S
    plan = _planned(device, chosen, names, rungs, quick)
    say("measuring the limits of the device")
    ceilings = measure_ceilings(device)
    results = Results(
        environment=_environment(report, device, quick, rounds),
        flops_per_s=ceilings.flops_per_s,
        stream_bytes_per_s={str(size): rate for size, rate in ceilings.stream_bytes_per_s.items()},
        trusted=ceilings.trusted and report.trusted,
        rows=[],
        complete=False,
    )
    try:
        for workload, ladders in plan:
            say(workload.title)
            _run(workload, ladders, rounds, turn_s, device, ceilings, results, after_round)
        results.complete = True
    except KeyboardInterrupt:
        results.rows = [row for row in results.rows if row.status != "ok" or row.samples_s]
    raise_limits(results)
    if results.complete:
        after_round(results)
    return results


_Ladders = dict[Precision, list[str]]  # the rungs to climb in each precision


def _planned(
    device: torch.device,
    precisions: list[Precision],
    names: Sequence[str],
    rungs: Sequence[str],
    quick: bool,
) -> list[tuple[Workload, _Ladders]]:
    """What there is to run. Raises `OptionError` if nothing of what was asked for is."""
    plan = []
    for workload in workloads(device, quick=quick):
        if names and workload.name not in names:
            continue
        ladders = {
            precision: [
                rung
                for rung in rungs_of(workload, precision, device)
                if (rung == "eager" or not rungs or rung in rungs)
                and not (quick and _takes_long(workload, precision, rung))
            ]
            for precision in precisions
        }
        plan.append((workload, ladders))
    here = {rung for _, ladders in plan for ladder in ladders.values() for rung in ladder}
    why = "in a quick run on this device" if quick else "on this device"
    for name in names:
        if not any(workload.name == name for workload, _ in plan):
            raise OptionError(f"workload {name!r} is not {why}")
    for rung in rungs:
        if rung not in here:
            raise OptionError(f"rung {rung!r}: none of these workloads has it {why}")
    return plan


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise OptionError(f"no {what} is called {name!r}; there are {', '.join(known)}")


def _precisions(report: DeviceReport, asked: Sequence[str]) -> list[Precision]:
    for name in asked:
        if report.rates[Precision(name)] is None:
            raise OptionError(f"precision {name!r}: {report.name} has none")
    chosen = {Precision.FP32, *(map(Precision, asked) if asked else report.accelerated)}
    return [precision for precision in Precision if precision in chosen]


def _environment(
    report: DeviceReport, device: torch.device, quick: bool, rounds: int
) -> dict[str, str | int | bool]:
    return {
        "device": report.name,
        "backend": report.backend,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "quick": quick,
        "rounds": rounds,
    }


def _run(
    workload: Workload,
    ladders: _Ladders,
    rounds: int,
    turn_s: float,
    device: torch.device,
    ceilings: Ceilings,
    results: Results,
    after_round: Callable[[Results], None],
) -> None:
    """Add the rows of one workload to the results."""
    ready: list[_Configuration] = []
    ground = None  # fp32 eager
    # A compiled function is compiled anew for each configuration; torch stops at 8 of one source.
    limits = {"recompile_limit": 1000, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        for precision, ladder in ladders.items():
            count = None
            for rung in ladder:
                row = Row(workload.name, workload.size, str(precision), rung, "ok",
                          unit=workload.unit, items=workload.items)  # fmt: skip
                results.rows.append(row)
                with _told_in(row, device):
                    made = _made_ready(workload, row, precision, device, ground)
                    if rung == "eager":
                        count = _counted(workload, made, device)
                        if precision is Precision.FP32:
                            ground = made
                    _judge(row, made.check, ground, precision, workload.kind == "training")
                    if count is not None and rung != "fp8":  # whose limit nothing here measures
                        _set_count(row, count, ceilings)
                    if row.status == "ok":
                        ready.append(made)
                if row.status == "not run" and rung == "eager":
                    break
        for turn in range(rounds):
            for configuration in ready if turn % 2 == 0 else reversed(ready):
                if configuration.row.status == "ok":
                    with _told_in(configuration.row, device):
                        _time(configuration, device, turn_s)
            _set_speedups(ready)
            after_round(results)
    ready.clear()
    torch._dynamo.reset()
    gc.collect()


@contextlib.contextmanager
def _told_in(row: Row, device: torch.device) -> Iterator[None]:
    """Write what goes wrong in the block into the row, and go on after it."""
    try:
        yield
    except OptionError as error:
        row.status, row.reason = "not run", str(error)
    except RuntimeError as error:
        row.status, row.reason = "failed", first_line(error)
        if is_out_of_memory(error):
            row.status = "out of memory"
            held = allocated_bytes(device)
            if held:
                row.reason += f"; {held / 2**20:.0f} MiB are held by the rungs before it"
    if row.status != "ok":
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()


def _takes_long(workload: Workload, precision: Precision, rung: str) -> bool:
    """Whether a rung has so much to compile that a quick run leaves it out."""
    compiles = rung in COMPILED or rung == "by-hand"
    return compiles and (
        rung == "max-autotune" or workload.many_layers or precision.dtype is torch.float32
    )


def _made_ready(
    workload: Workload,
    row: Row,
    precision: Precision,
    device: torch.device,
    ground: _Configuration | None,
) -> _Configuration:
    """The step after its first calls.

    Raises `OptionError` for a precision whose eager step takes `_HOPELESS` times as long as fp32's.
    """
    held = allocated_bytes(device)
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    made = _Configuration(row, precision, make_step(workload, precision, row.rung, device))
    training = workload.kind == "training"
    found, peaks = [], []

    def call() -> None:
        if not training:
            found.clear()  # an output is no part of the next call's memory
        found.append(made.step.call())

    with precision.float32_mode(device.type):
        for calls in (1, CHECKED_STEPS - 1):
            m = measure(call, device=device, warmup=0, repeats=calls)
            made.seconds = m.samples_s[-1]
            peaks.append(m.peak_bytes)
            warm = calls > 1 or device.type == "cpu"
            if row.rung == "eager" and ground and warm and _is_hopeless(made, ground):
                raise OptionError(
                    f"a step takes {made.seconds:.3g} s, {made.seconds / ground.seconds:.0f} "
                    "times as long as in fp32"
                )
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] - skipped
    if skips and row.rung == "cuda-graphs":
        raise RuntimeError("torch recorded no graph of it")
    if peaks[-1] is not None:
        # A graph takes its memory when it is recorded, and none when it is replayed.
        graphs = row.rung in ("cuda-graphs", "max-autotune", "fp8")
        row.peak_bytes = (max(peaks) if graphs else peaks[-1]) - held
    made.check = (torch.stack(found) if training else found[-1]).cpu().double()
    return made


def _is_hopeless(made: _Configuration, ground: _Configuration) -> bool:
    return made.seconds > max(1.0, _HOPELESS * ground.seconds)


def _counted(workload: Workload, made: _Configuration, device: torch.device) -> Count:
    step, training = made.step, workload.kind == "training"
    with made.precision.float32_mode(device.type):
        return count_step(step.call, step.model, step.inputs, training=training)


def _judge(
    row: Row,
    check: torch.Tensor,
    ground: _Configuration | None,
    precision: Precision,
    training: bool,
) -> None:
    """Hold the losses, or the output, against those of fp32 eager."""
    if ground is None:
        row.status, row.reason = "failed", "there is no fp32 eager to hold it against"
        return
    tolerance, reasons = TOLERANCES[precision], []
    if training:  # (steps,) losses
        mine, its = check[0] - check[-1], ground.check[0] - ground.check[-1]
        row.progress = _finite(mine / its)
        if row.progress is None or abs(row.progress - 1) > PROGRESS[precision]:
            learned = "not a number" if row.progress is None else f"{row.progress:.0%}"
            reasons.append(
                f"its loss falls by {learned} of what it does in fp32, where "
                f"{PROGRESS[precision]:.0%} more or less would pass"
            )
        check, reference = check[:1], ground.check[:1]
    else:
        reference = ground.check
    row.error = _finite((check - reference).norm() / reference.norm())
    if row.error is None or row.error > tolerance:
        off = "not a number" if row.error is None else f"{row.error:.1e} off fp32"
        reasons.append(f"{off}, where {tolerance:.0e} would pass")
    if reasons:
        row.status, row.reason = "failed", "; ".join(reasons)


def _finite(number: torch.Tensor) -> float | None:
    return number.item() if number.isfinite() else None


def _set_count(row: Row, count: Count, ceilings: Ceilings) -> None:
    row.flops, row.moved_bytes, row.least_bytes = count.flops, count.moved_bytes, count.least_bytes
    row.floor_s = count.floor_s(ceilings, row.precision)


def _time(configuration: _Configuration, device: torch.device, turn_s: float) -> None:
    """One turn: as many calls as fill `turn_s` seconds.

    On a CPU each is a sample. On an accelerator the host must be free to run ahead from one step to
    the next, so there is one sample for all, their mean.
    """
    row, step = configuration.row, configuration.step
    known = row.median_s or configuration.seconds
    calls = max(1, min(20, round(turn_s / known)))

    def run() -> None:
        for _ in range(calls):
            step.call()

    with configuration.precision.float32_mode(device.type):
        if device.type == "cpu":
            m = measure(step.call, device=device, warmup=0, repeats=calls)
        else:  # `measure` empties its cache, which the first calls fill again
            m = measure(run, device=device, warmup=1, repeats=1)
            m = dataclasses.replace(m, samples_s=(m.samples_s[0] / calls,))
    row.samples_s += m.samples_s
    whole = dataclasses.replace(m, samples_s=tuple(row.samples_s))
    row.median_s, row.iqr_s = whole.median_s, whole.iqr_s
    row.items_per_s = row.items / row.median_s
    if row.flops is not None:
        row.flops_per_s = row.flops / row.median_s
        row.bytes_per_s = row.moved_bytes / row.median_s
        row.share_of_limit = None if row.floor_s is None else row.floor_s / row.median_s


def raise_limits(results: Results) -> None:
    """Take the highest rates of the whole run for the limits, and say them in each row.

    They are measured at its beginning; on a machine that others use too, a product may find it less
    busy later. Other workloads raise nothing, so that a wrong count would show.
    """
    timed = [row for row in results.rows if row.status == "ok" and row.floor_s is not None]
    ceilings = Ceilings(
        flops_per_s=results.flops_per_s,
        stream_bytes_per_s={int(size): rate for size, rate in results.stream_bytes_per_s.items()},
        trusted=results.trusted,
    )
    for row in timed:
        if row.workload != "product":
            continue
        fastest, rates = min(row.samples_s), ceilings.flops_per_s
        rates[row.precision] = max(rates[row.precision], row.flops / fastest)
        ceilings.raise_stream_rate(row.least_bytes, row.least_bytes / fastest)
    results.stream_bytes_per_s = {str(size): r for size, r in ceilings.stream_bytes_per_s.items()}
    for row in timed:
        count = Count(row.flops, row.moved_bytes, row.least_bytes)
        row.floor_s = count.floor_s(ceilings, row.precision)
        row.share_of_limit = row.floor_s / row.median_s


def _set_speedups(ready: list[_Configuration]) -> None:
    timed = [configuration.row for configuration in ready if configuration.row.median_s]
    base = next((row for row in timed if (row.precision, row.rung) == ("fp32", "eager")), None)
    if base is not None:
        for row in timed:
            row.speedup = base.median_s / row.median_s

"""The benchmark: every configuration of a workload made ready, then timed in turns."""

import dataclasses
import datetime
import gc
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from amp_lab.bench.against import run_peers
from amp_lab.bench.limits import Ceilings, Count, count_step, measure_ceilings
from amp_lab.bench.results import Results, Row
from amp_lab.bench.rungs import COMPILED, RUNGS, Step, float32_mode, make_step, rungs_of
from amp_lab.bench.workloads import NAMES, Workload, workloads
from amp_lab.device import DeviceReport, describe_device
from amp_lab.errors import BenchError, first_line
from amp_lab.measure import allocated_bytes, measure
from amp_lab.precision import Precision

CHECKED_STEPS = 5
"""Losses of so many first training steps are held against those of fp32 eager."""
TOLERANCES = {
    Precision.FP32: 1e-2,
    Precision.TF32: 2e-2,
    Precision.FP16: 2e-2,
    Precision.BF16: 6e-2,
}
"""How far losses, or an output, may be from those of fp32 eager: relative, in the Euclidean norm.

For the low precisions about 16 times their rounding error (2^-11, 2^-8), which every layer adds to.
For fp32 not zero: another order of summation is enough for Adam, whose first steps are as long
for a gradient that is all rounding error as for any other. Training on something else, or not at
all, is off by more."""
_TURN_S = 0.25  # a turn of a fast step has several calls, that together take so long


@dataclass
class _Configuration:
    row: Row
    precision: Precision
    step: Step


def run_bench(
    device: torch.device,
    *,
    quick: bool = False,
    names: Sequence[str] = (),
    precisions: Sequence[str] = (),
    rungs: Sequence[str] = (),
    rounds: int | None = None,
    peers: bool = False,
    say: Callable[[str], None] = lambda line: None,
    after_round: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Time workloads in every precision on every rung, against fp32 eager and the device's limits.

    `names`, `precisions` and `rungs` choose; without, it is all of them, and the precisions that
    the device accelerates. fp32 and eager are always there, since the others are held against them.
    All configurations of a workload are made ready first: each is checked (see `TOLERANCES`), and
    one that computes something else, fails or finds no memory is reported as such. Then they take
    turns, `rounds` times (default 10, and 5 if `quick`). A quick run has small sizes, and leaves
    out what takes long to compile. With `peers`, `run_peers` follows in the same precisions.

    `after_round` gets the results so far. A `KeyboardInterrupt` ends the run, and what was timed is
    returned, marked as not complete. Raises `BenchError` for an unknown name.
    """
    _check_names("workload", names, NAMES)
    _check_names("precision", precisions, [str(p) for p in Precision])
    _check_names("rung", rungs, list(RUNGS))
    if rounds is None:
        rounds = 5 if quick else 10
    if rounds < 1:
        raise BenchError(f"rounds={rounds}: must be at least 1")
    report = describe_device(device)
    chosen = _precisions(report, precisions)
    say("measuring the limits of the device")
    ceilings = measure_ceilings(device)
    results = Results(
        environment=_environment(report, device, quick),
        flops_per_s=ceilings.flops_per_s,
        copy_bytes_per_s={str(size): rate for size, rate in ceilings.copy_bytes_per_s.items()},
        trusted=ceilings.trusted and report.trusted,
        rows=[],
        complete=False,
    )
    try:
        for workload in workloads(device, quick=quick):
            if not names or workload.name in names:
                say(workload.title)
                _run(workload, chosen, rungs, quick, rounds, device, ceilings, results, after_round)
        if peers:
            results.peers = run_peers(device, chosen, quick=quick, rounds=rounds, say=say)
    except KeyboardInterrupt:
        results.rows = [row for row in results.rows if row.status != "ok" or row.samples_s]
        return results
    results.complete = True
    after_round(results)
    return results


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise BenchError(f"no {what} is called {name!r}; there are {', '.join(known)}")


def _precisions(report: DeviceReport, asked: Sequence[str]) -> list[Precision]:
    for name in asked:
        if report.rates[Precision(name)] is None:
            raise BenchError(f"precision {name!r}: {report.name} has none")
    chosen = {Precision.FP32, *(map(Precision, asked) if asked else report.accelerated)}
    return [precision for precision in Precision if precision in chosen]


def _environment(
    report: DeviceReport, device: torch.device, quick: bool
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
    }


def _run(
    workload: Workload,
    precisions: list[Precision],
    rungs: Sequence[str],
    quick: bool,
    rounds: int,
    device: torch.device,
    ceilings: Ceilings,
    results: Results,
    after_round: Callable[[Results], None],
) -> None:
    """Add the rows of one workload to the results."""
    ready: list[_Configuration] = []
    reference = None
    # A compiled function is compiled anew for each configuration; torch stops at 8 of one source.
    limits = {"recompile_limit": 1000, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        for precision in precisions:
            count = None
            for rung in rungs_of(workload, precision, device):
                if rung != "eager" and rungs and rung not in rungs:
                    continue
                if quick and _takes_long(workload, precision, rung):
                    continue
                row = Row(workload.name, workload.size, str(precision), rung, "ok",
                          unit=workload.unit, items=workload.items)  # fmt: skip
                results.rows.append(row)
                made = _made_ready(workload, row, precision, device)
                if made is None:
                    continue
                step, check, row.peak_bytes = made
                if rung == "eager":
                    with float32_mode(precision, device):
                        count = count_step(
                            step.call, step.model, step.inputs, training=workload.kind == "training"
                        )
                    if precision is Precision.FP32:
                        reference = check
                _judge(row, check, reference, precision)
                if count is not None:
                    _set_count(row, count, ceilings)
                if row.status == "ok":
                    ready.append(_Configuration(row, precision, step))
        for turn in range(rounds):
            for configuration in ready if turn % 2 == 0 else reversed(ready):
                _time(configuration, device)
            _set_speedups(ready)
            after_round(results)
    ready.clear()
    torch._dynamo.reset()
    gc.collect()


def _takes_long(workload: Workload, precision: Precision, rung: str) -> bool:
    """Whether a rung has so much to compile that a quick run leaves it out."""
    compiles = rung in COMPILED or rung == "by-hand"
    return compiles and (
        rung == "max-autotune" or workload.many_layers or precision.dtype is torch.float32
    )


def _made_ready(
    workload: Workload, row: Row, precision: Precision, device: torch.device
) -> tuple[Step, torch.Tensor, int | None] | None:
    """The step, its losses or output, and its peak memory; or None, and the row says why."""
    held = allocated_bytes(device)
    try:
        step = make_step(workload, precision, row.rung, device)
        with float32_mode(precision, device):
            if workload.kind == "training":
                check = torch.stack([step.call() for _ in range(CHECKED_STEPS)]).double().cpu()
            else:
                check = step.call().double().cpu()
            if device.type == "cpu":  # which keeps no count of its memory
                return step, check, None
            peak = measure(step.call, device=device, warmup=2, repeats=1).peak_bytes
        return step, check, None if peak is None else peak - held
    except RuntimeError as error:
        if _is_out_of_memory(error):
            row.status = "out of memory"
            row.reason = f"{first_line(error)}; {held / 2**20:.0f} MiB were held by other rungs"
        else:
            row.status, row.reason = "failed", first_line(error)
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    return None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch found no memory; a CPU's allocator has no type of error for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _judge(
    row: Row, check: torch.Tensor, reference: torch.Tensor | None, precision: Precision
) -> None:
    """Hold the losses, or the output, against those of fp32 eager."""
    if reference is None:
        row.status, row.reason = "failed", "there is no fp32 eager to hold it against"
        return
    row.error = ((check - reference).norm() / reference.norm()).item()
    if not row.error <= TOLERANCES[precision]:  # NaN too
        row.status = "failed"
        row.reason = f"{row.error:.1e} off fp32 eager, more than {TOLERANCES[precision]:.0e}"
        row.error = row.error if math.isfinite(row.error) else None


def _set_count(row: Row, count: Count, ceilings: Ceilings) -> None:
    row.flops, row.moved_bytes, row.least_bytes = count.flops, count.moved_bytes, count.least_bytes
    row.floor_s = count.floor_s(ceilings, row.precision)


def _time(configuration: _Configuration, device: torch.device) -> None:
    """One turn: enough calls to fill `_TURN_S`, all of them samples."""
    row, step = configuration.row, configuration.step
    known = row.median_s
    repeats = 1 if known is None else max(1, min(20, round(_TURN_S / known)))
    with float32_mode(configuration.precision, device):
        # `measure` empties an accelerator's cache, which the first call fills again.
        warmup = int(device.type != "cpu")
        m = measure(step.call, device=device, warmup=warmup, repeats=repeats)
    row.samples_s += m.samples_s
    whole = dataclasses.replace(m, samples_s=tuple(row.samples_s))
    row.median_s, row.iqr_s = whole.median_s, whole.iqr_s
    row.items_per_s = row.items / row.median_s
    if row.flops is not None:
        row.flops_per_s = row.flops / row.median_s
        row.bytes_per_s = row.moved_bytes / row.median_s
        row.share_of_limit = None if row.floor_s is None else row.floor_s / row.median_s


def _set_speedups(ready: list[_Configuration]) -> None:
    base = next((c.row for c in ready if (c.row.precision, c.row.rung) == ("fp32", "eager")), None)
    if base is not None:
        for configuration in ready:
            configuration.row.speedup = base.median_s / configuration.row.median_s

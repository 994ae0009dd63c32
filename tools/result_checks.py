"""Checks a recorded result before it goes into data/results/: its fields, and possible figures.

A result that is refused is an `OptionError` of one line: the file, the field, and why.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amp_lab.bench import load_results
from amp_lab.bench.results import Results
from amp_lab.core.errors import OptionError
from amp_lab.core.files import read_json
from amp_lab.core.gpus import Gpu, gpu_of
from device_run import STATUSES

_FEWEST_ROUNDS = 3  # a rehearsal has one
# No data sheet gives 16-bit matmuls more than 40 times the rate of fp32 ones. A step can gain more
# than a matmul, since a rung also saves memory traffic; no measured one has come near this.
_HIGHEST_RATIO = 40.0
_HIGHEST_SPEEDUP = 100.0
# A GPU may clock a little higher than its data sheet says. Variants under one name differ more in
# memory: an H100 is sold with 2.0 to 3.35 TB/s.
_ABOVE_PEAK_RATE = 1.1
_ABOVE_BANDWIDTH = 1.5
_LOWEST_SHARE = 0.01  # of the peak rate that the fastest matmul reaches; less is a wrong unit


def check_result(path: Path) -> None:
    """Raise `OptionError` for a recorded result that cannot be right.

    Args:
        path: A file as `amp-lab bench` or a tool of ``tools/measure/`` writes it. The first word of
            its name says which.

    Raises:
        OptionError: With the file's name, the field and the reason, in one line.
    """
    if path.name.startswith("bench"):
        results = load_results(path)  # its fields, and that all figures are finite and positive
        refusals = _of_bench(results)
    elif path.name.startswith("first-gpu"):
        refusals = _of_outcomes(read_content(path))
    else:
        content = read_content(path)
        refusals = _of_measurement(content)
        if path.name.startswith("latency"):
            refusals = _in_turn(refusals, _of_latency(content))
    for field, reason in refusals:
        raise OptionError(f"{path.name}: {field}: {reason}")


def gpu_of_result(device: str, backend: str) -> Gpu | None:
    """The row of the table of GPUs for a device of a result; None for a CPU.

    Raises `OptionError` for a GPU that is not in the table.
    """
    if backend.startswith("CPU"):
        return None
    return gpu_of(device)


_Refusals = Iterator[tuple[str, str]]  # the field, and why it is refused


def read_content(path: Path) -> dict:
    """The content of a file of ``tools/measure/``: numbers are finite, or it cannot be read."""
    try:
        content = read_json(path)
    except OSError as error:
        raise OptionError(f"{path.name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise OptionError(f"{path.name}: damaged, it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise OptionError(f"{path.name}: damaged, it is no result")
    return content


def _in_turn(first: _Refusals, second: _Refusals) -> _Refusals:
    yield from first
    yield from second


def _of_bench(results: Results) -> _Refusals:
    """What is wrong with a result of `amp-lab bench`."""
    if not results.complete:
        yield "complete", "the run was interrupted; measure again"
    rounds = results.environment["rounds"]
    if not (isinstance(rounds, int) and rounds >= _FEWEST_ROUNDS):
        yield "environment.rounds", f"{rounds} is a rehearsal; measure without --tiny"
    if not results.trusted:
        yield "trusted", "the machine was busy; measure again when nothing else runs"
    if not any(row.workload == "convmodel" and row.status == "ok" for row in results.rows):
        yield "rows", "the ConvModel was not timed, which the gallery shows"
    yield from _of_rates(results)
    try:
        gpu = gpu_of_result(str(results.environment["device"]), str(results.environment["backend"]))
    except OptionError as error:
        yield "environment.device", f"{error}; add a row to src/amp_lab/core/gpus.py"
        return
    if gpu is not None:
        yield from _beside_the_table(results, gpu)
    for row in results.rows:
        if row.status == "ok":
            yield from _of_row(row, f"{row.title}, {row.setting}")


def _of_rates(results: Results) -> _Refusals:
    """What is wrong with the ratios of the rates of matmuls."""
    fp32 = results.flops_per_s.get("fp32")
    if fp32 is None:
        yield "flops_per_s.fp32", "is missing, and every device has fp32"
        return
    for precision, rate in results.flops_per_s.items():
        if rate is not None and rate > _HIGHEST_RATIO * fp32:
            ratio = rate / fp32
            yield f"flops_per_s.{precision}", f"{ratio:.3g}x fp32, and no device has over 40x"


def _beside_the_table(results: Results, gpu: Gpu) -> _Refusals:
    """What the table of GPUs rules out."""
    rates = {name: rate for name, rate in results.flops_per_s.items() if rate is not None}
    if "tf32" in rates and "tf32" not in gpu.architecture.matmuls:
        yield "flops_per_s.tf32", f"{gpu.name} has no TF32"
    peak = gpu.rates.get(16)  # of matmuls in 16 bits, in FLOP/s
    if peak is not None:
        for name, rate in rates.items():
            if rate > _ABOVE_PEAK_RATE * peak:
                yield (
                    f"flops_per_s.{name}",
                    f"{_tera(rate)}, and the peak of {gpu.name} is {_tera(peak)}",
                )
        fastest = max(rates, key=rates.__getitem__)
        if rates[fastest] < _LOWEST_SHARE * peak:
            reason = f"{_tera(rates[fastest])} is less than 1 % of {gpu.name}'s {_tera(peak)}"
            yield f"flops_per_s.{fastest}", reason
    largest = max(results.stream_bytes_per_s)  # the other sizes may lie in a cache
    stream = results.stream_bytes_per_s[largest]
    if gpu.bandwidth is not None and stream > _ABOVE_BANDWIDTH * gpu.bandwidth:
        reason = f"{stream / 1e9:.0f} GB/s, and {gpu.name} has {gpu.bandwidth / 1e9:.0f} GB/s"
        yield f"stream_bytes_per_s.{largest}", reason


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"


def _of_row(row: Any, where: str) -> _Refusals:
    """What is wrong with a timed row of `amp-lab bench`."""
    if row.speedup is not None and row.speedup > _HIGHEST_SPEEDUP:
        yield f"{where}: speedup", f"{row.speedup:.3g}x is more than any device gains"
    if row.speedup is not None and row.speedup_interval is not None:
        low, high = row.speedup_interval
        if not low <= row.speedup <= high:
            reason = f"{row.speedup:.3g} lies outside of its interval, {low:.3g} to {high:.3g}"
            yield f"{where}: speedup", reason
    if row.median_s is not None and not min(row.samples_s) <= row.median_s <= max(row.samples_s):
        yield f"{where}: median_s", f"{row.median_s:.3g} lies outside of its samples"


def _of_measurement(content: dict) -> _Refusals:
    """What is wrong with the fields that all tools of ``tools/measure/`` write."""
    for name in ("device", "torch", "date"):
        if not isinstance(content.get(name), str):
            yield name, "is missing, or no text"
    threads = content.get("threads")
    if not isinstance(threads, int) or threads < 1:
        yield "threads", f"{threads!r} is no number of threads"
    yield from _of_figures(content, "")


def _of_outcomes(content: dict) -> _Refusals:
    """What is wrong with a file of ``tools/first_gpu.py``: it has no parts, or another outcome."""
    parts = content.get("parts")
    if not isinstance(parts, list) or not parts:
        yield "parts", "is missing, or empty"
        return
    for index, part in enumerate(parts):
        if part.get("status") not in STATUSES:
            yield f"parts[{index}].status", f"{part.get('status')!r} is none of {STATUSES}"
    yield from _of_figures(content, "")


def _of_figures(value: Any, where: str) -> _Refusals:
    """What is wrong with times and intervals, wherever they are."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _of_figures(item, f"{where}[{index}]")
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        place = f"{where}.{key}".lstrip(".")
        if key == "samples_s":
            yield from _of_samples(item, place)
        elif key == "interval" and item is not None:
            yield from _of_interval(item, value, place)
        else:
            yield from _of_figures(item, place)


def _of_samples(samples: Any, where: str) -> _Refusals:
    """What is wrong with the seconds of each call: a list, or lists by name."""
    if isinstance(samples, dict):
        for name, seconds in samples.items():
            yield from _of_samples(seconds, f"{where}.{name}")
    elif not isinstance(samples, list) or not all(_is_positive(one) for one in samples):
        yield where, "has a time that is not above 0 s"
    if not samples:
        yield where, "has no times"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _of_interval(interval: Any, entry: dict, where: str) -> _Refusals:
    """What is wrong with an interval, and the figure that it is for."""
    is_pair = isinstance(interval, list) and len(interval) == 2
    if not is_pair or not all(isinstance(end, int | float) for end in interval):
        yield where, f"{interval!r} is not a lower and an upper end"
        return
    low, high = interval
    median = entry.get("median", entry.get("ratio"))
    if not low <= high:
        yield where, f"{low:.3g} to {high:.3g} runs backwards"
    elif isinstance(median, int | float) and not low <= median <= high:
        yield where, f"{low:.3g} to {high:.3g} does not contain {median:.3g}"


def _of_latency(content: dict) -> _Refusals:
    """What is wrong with the rows of ``tools/measure/latency.py``."""
    rows = content.get("latency")
    if not isinstance(rows, list) or not rows:
        yield "latency", "has no rows"
        return
    for row in rows:
        if not isinstance(row, dict):
            yield "latency", "has a row that is not an object"
            continue
        where = f"latency, {row.get('model')}"
        missing = [name for name in _LATENCY_FIELDS if name not in row]
        if missing:
            yield where, f"{missing[0]!r} is missing"
            continue
        # The name of a way to run the model: the fastest of torch's own, without "recommended".
        fastest_way = row["fastest of the others of torch"]
        if fastest_way not in row["samples_s"]:  # seconds by the name of the way
            yield f"{where}: fastest of the others of torch", "was not timed"
        for way, speedup in row["times as fast as fp32"].items():
            if not 1 / _HIGHEST_SPEEDUP < speedup["median"] < _HIGHEST_SPEEDUP:
                reason = f"{speedup['median']:.3g}x is more than any device gains or loses"
                yield f"{where}: {way}", reason


_LATENCY_FIELDS = (
    "model",
    "samples_s",
    "trusted",
    "fastest of the others of torch",
    "times as fast as fp32",
)

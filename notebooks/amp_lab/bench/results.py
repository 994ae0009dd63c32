"""What a benchmark found: rows, their table and their file."""

import dataclasses
import itertools
import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amp_lab.bench.limits import Ceilings
from amp_lab.errors import OptionError
from amp_lab.files import read_json, require_types, save
from amp_lab.report import Printed, Table, listed, plural, rate_text
from amp_lab.timing import Comparison, Estimate, Ratio, time_text

SCHEMA = "amp-lab bench 2"  # written into each file; another number means other fields
STATES = ("ok", "failed", "out of memory", "not run")
BASELINE = ("fp32", "eager")  # what all others of a workload are held against
_SIZE = re.compile("[1-9][0-9]{0,17}", re.ASCII)  # in bytes
# What no step of any device is beyond: seconds and ratios, and FLOPs, bytes and their rates.
_SMALLEST, _LARGEST, _LARGEST_RATE = 1e-12, 1e12, 1e30
_POSITIVE = ("median_s", "samples_s", "speedup", "speedup_interval")
_ABOVE = 1.1  # of a measured limit: nothing is faster, so a time that says so is wrong


@dataclass
class Row:
    """One workload in one precision on one rung."""

    workload: str
    size: str
    precision: str
    rung: str
    status: str  # one of `STATES`; only ``ok`` has figures that may be compared
    trusted: bool = False  # whether the machine was quiet, and the figures are possible
    reason: str = ""  # why it is not ok, or not trusted
    unit: str = ""
    items: int = 0  # how many of `unit` a step has
    samples_s: list[float] = field(default_factory=list)  # seconds of a step, by round
    rounds: int = 0  # in which all rungs of the workload took turns
    disturbed: int = 0  # those in which something else used the machine
    median_s: float | None = None
    iqr_s: float | None = None  # interquartile range of the samples
    speedup: float | None = None  # over fp32 eager: median of the ratios within each round
    speedup_interval: list[float] | None = None  # 95 % interval of it
    items_per_s: float | None = None
    peak_bytes: int | None = None  # most bytes in tensors; None where the device keeps no count
    flops: int | None = None  # counted for one eager step
    flops_per_s: float | None = None
    moved_bytes: int | None = None  # what the ops of the eager step read and write, counted
    least_bytes: int | None = None
    floor_s: float | None = None  # the longer of FLOPs and least bytes at the measured limits
    share_of_limit: float | None = None  # `floor_s` over the median: 1 is as fast as the device can
    # Of the first loss, or the output, against fp32 eager: relative, in the Euclidean norm.
    error: float | None = None
    progress: float | None = None  # fall of the loss in the first steps, over that in fp32 eager

    @property
    def title(self) -> str:
        """Workload and size."""
        return f"{self.workload} {self.size}"

    @property
    def setting(self) -> str:
        """Precision and rung."""
        return f"{self.precision} {self.rung}"

    @property
    def key(self) -> tuple[str, ...]:
        """What must be equal for two rows to be compared."""
        return self.workload, self.size, self.precision, self.rung

    @property
    def milliseconds(self) -> Estimate:
        """The median with its interval; for a row that has samples."""
        seconds = Comparison({"": tuple(self.samples_s)}, self.disturbed, "").time_s("")
        return replace(seconds.times(1e3), trusted=self.trusted)

    @property
    def ratio(self) -> Ratio | None:
        """The speed-up with its interval; None if there is no fp32 eager."""
        if self.speedup is None or self.speedup_interval is None:
            return None
        low, high = self.speedup_interval
        return Ratio(self.speedup, (low, high), self.trusted)

    def distrust(self, reason: str) -> None:
        """Mark the figures as not to be trusted, if they are not already."""
        if self.trusted:
            self.trusted, self.reason = False, reason


def _speedup(row: Row) -> str:
    return "1.00x" if (row.precision, row.rung) == BASELINE else _text(row.ratio, "{}")


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "": lambda row: f"  {row.setting}" + (" ?" if not row.trusted else ""),
    "time": lambda row: time_text(row.median_s or float("nan")),
    "spread": lambda row: _text(ratio(row.iqr_s, row.median_s), "{:.0%}"),
    "speed-up": _speedup,
    "per second": lambda row: f"{_figure(row.items_per_s)} {row.unit}",
    "memory": lambda row: _text(ratio(row.peak_bytes, 2**20), "{:,.0f} MiB"),
    "FLOP/s": lambda row: rate_text(row.flops_per_s, "FLOP/s"),
    "of limit": lambda row: _text(row.share_of_limit, "{:.0%}"),
    "off fp32": lambda row: _text(row.error, "{:.1e}"),
    "learns": lambda row: _text(row.progress, "{:.0%}"),
}


@dataclass(repr=False)
class Results(Printed, Ceilings):
    """All that one run found, the device's limits too; `str` of it is made to be read."""

    environment: dict[str, str | int | bool]  # the machine, the date, what was asked for
    rows: list[Row]
    complete: bool = True  # false for a run that was stopped before its end

    def _contents(self) -> dict[str, Any]:
        return {"schema": SCHEMA} | vars(self)

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON, whole or not at all. Raises `OptionError` if that fails."""
        save(Path(path), [self.to_json().encode() + b"\n"])

    def ladder(self) -> dict[str, list[tuple]]:
        """For `plots.speed_ladder`: the rows by workload, with their state where it is not ok."""
        panels: dict[str, list[tuple]] = {}
        for row in self.rows:
            bars = panels.setdefault(row.title, [])
            if row.status == "ok":
                remark = f"{row.speedup:.2f}x" if row.speedup else "no fp32 eager"
                milliseconds = row.milliseconds, ratio(row.floor_s, 1e-3)
            else:  # it may have been timed before it failed, which is no result
                remark, milliseconds = row.status, (None, None)
            bars.append((row.precision, row.rung, *milliseconds, remark))
        return panels

    def roofline(self) -> tuple[dict[str, float], float, list[tuple]]:
        """For `plots.roofline`: fp32 eager, and the fastest rung of each other precision.

        Without what is not trusted.
        """
        points: dict[tuple[str, str], tuple[float, Estimate]] = {}
        for row in self.rows:
            intensity = ratio(row.flops, row.moved_bytes)
            other_fp32 = row.precision == BASELINE[0] and row.rung != BASELINE[1]
            if row.trusted and intensity and row.flops and not other_fp32:
                what = row.workload, row.precision
                place = intensity, row.milliseconds.rate(1e3 * row.flops)
                points[what] = max(points.get(what, place), place, key=lambda p: p[1].median)
        used = {precision for _, precision in points}
        limits = {name: rate for name, rate in self.flops_per_s.items() if rate is not None}
        roofs = {name: rate for name, rate in limits.items() if name in used or not used}
        return roofs, self.memory_bytes_per_s, [(*what, *place) for what, place in points.items()]

    def distrust_impossible(self) -> None:
        """Mark what is faster than this device: it is not trusted, nor a speed-up over it."""
        for _, same in itertools.groupby(self.rows, key=lambda row: row.title):
            rows = [row for row in same if row.status == "ok"]
            for row in rows:
                if reason := self.why_impossible(row):
                    row.distrust(reason)
                    if (row.precision, row.rung) == BASELINE:
                        for other in rows:
                            other.distrust(f"fp32 eager, which it is held against: {reason}")

    def why_impossible(self, row: Row) -> str:
        """Which of its rates is above what was measured of this device; empty if none is."""
        rate, limit = row.flops_per_s, self.flops_per_s.get(row.precision)
        if rate is not None and limit is not None and rate > _ABOVE * limit:
            rates = rate_text(rate, "FLOP/s"), rate_text(limit, "FLOP/s")
            return "it computes {}, where the limit is {}".format(*rates)
        rate, limit = ratio(row.least_bytes, row.median_s), max(self.stream_bytes_per_s.values())
        if rate is not None and rate > _ABOVE * limit:
            rates = rate_text(rate, "B/s"), rate_text(limit, "B/s")
            return "it moves at least {}, where the limit is {}".format(*rates)
        return ""

    def _table(self) -> Table:
        columns = dict(_COLUMNS)
        if all(row.peak_bytes is None for row in self.rows):  # as on a CPU
            del columns["memory"]
        blank, lines = [""] * (len(columns) - 2), []
        for row in self.rows:
            cells = [cell(row) for cell in columns.values() if row.status == "ok"]
            lines.append((row.title, cells or [f"  {row.setting}", row.status, *blank]))
        right = range(1, len(columns))  # figures
        return Table(list(columns), _with_titles(lines), self.title(), self._facts(), right=right)

    def title(self) -> str:
        """Where and when it was measured."""
        return "{device}, torch {torch}, {threads} threads, {date}".format(**self.environment)

    def _facts(self) -> list[str]:
        found = {name: value for name, value in self.flops_per_s.items() if value is not None}
        rates = ", ".join(f"{name} {rate_text(value, 'FLOP/s')}" for name, value in found.items())
        memory = rate_text(self.memory_bytes_per_s, "B/s")
        facts = [
            f"The device's limits, measured: {rates}; memory {memory}.",
            "Speed-up: over fp32 eager in the same rounds, with its 95 % interval. Of limit: the "
            "time that the counted FLOPs, or the least bytes, take at those rates, over the time "
            "measured.",
            "Off fp32: how far the first loss, or the output, is from that of fp32 eager. Learns: "
            "how far the loss falls in five steps, over how far it does there.",
        ]
        for row in [row for row in self.rows if row.status != "ok"]:
            facts.append(f"{row.title}, {row.setting}: {row.status}, {row.reason}.")
        facts += self._doubts()
        if self.environment.get("quick"):
            facts.append("A quick run: small sizes, and nothing that takes long to compile.")
        if not self.trusted:
            facts.append("The limits did not repeat: this machine is busy, measure again.")
        if not self.complete:
            facts.append("The run was stopped before its end.")
        return facts

    def _doubts(self) -> list[str]:
        """In how many rounds the machine was busy, and which rows are not trusted, and why."""
        timed = {row.title: row for row in self.rows if row.rounds}.values()
        disturbed, rounds = sum(r.disturbed for r in timed), sum(r.rounds for r in timed)
        said = [f"Something else used this machine in {disturbed} of {plural(rounds, 'round')}."]
        doubts: dict[tuple[str, str], list[str]] = {}
        for row in [row for row in self.rows if row.status == "ok" and not row.trusted]:
            doubts.setdefault((row.title, row.reason), []).append(row.setting)
        for (title, reason), rungs in doubts.items():
            said.append(f"Not trusted, marked with ?: {title}, {listed(rungs)}: {reason}.")
        return said


def _with_titles(rows: list[tuple[str, list[str]]]) -> list[list[str]]:
    """Cells of rows, each under the title that it shares with others, which is a row of its own."""
    lines: list[list[str]] = []
    for title, same in itertools.groupby(rows, key=lambda row: row[0]):
        found = [cells for _, cells in same]
        lines += [[title, *[""] * (len(found[0]) - 1)], *found]
    return lines


def load_results(path: str | os.PathLike) -> Results:
    """The results in a file. Raises `OptionError`, which says what is wrong with which file."""
    try:
        content = read_json(Path(path))
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # no JSON, or no text
        raise OptionError(f"{path}: damaged, it is no JSON ({error})") from error
    schema = str(content.get("schema")) if isinstance(content, dict) else ""
    if not schema.startswith(SCHEMA.rpartition(" ")[0]):
        raise OptionError(f"{path}: no results of amp-lab bench")
    if schema != SCHEMA:
        raise OptionError(
            f"{path}: written as {reprlib.repr(schema)}, and this amp_lab reads {SCHEMA!r}"
        )
    del content["schema"]
    try:
        content["rows"] = [_made(Row, row) for row in content["rows"]]
        results = _made(Results, content)
        _check_values(results)
    except (KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise OptionError(f"{path}: damaged, {what}") from error
    return results


def _check_values(results: Results) -> None:
    """Raise `TypeError` or `KeyError` for what was not measured, or cannot be."""
    for name in ("device", "torch", "date"):
        _require(isinstance(results.environment[name], str), name, results.environment[name])
    threads = results.environment["threads"]
    _require(isinstance(threads, int) and threads > 0, "threads", threads)
    for row in results.rows:
        _check_row(row)
    rates = results.stream_bytes_per_s
    is_sized = bool(rates) and all(_SIZE.fullmatch(str(size)) for size in rates)
    _require(is_sized, "stream_bytes_per_s", rates)
    results.stream_bytes_per_s = {int(size): rate for size, rate in rates.items()}  # JSON has text
    for rate in (*rates.values(), *results.flops_per_s.values()):
        _check_figure("a rate per_s", rate)


def _check_row(row: Row) -> None:
    _require(row.status in STATES, "status", row.status)
    times = row.median_s, row.iqr_s, row.items_per_s, *(row.samples_s or [None])
    if row.status == "ok" and None in times:
        raise TypeError(f"{row.title}, {row.setting} is ok, but has no time")
    interval = row.speedup_interval
    _require(interval is None or len(interval) == 2, "speedup_interval", interval)
    for name, value in vars(row).items():
        _check_figure(name, value)


def _require(is_right: bool, name: str, value: object) -> None:
    if not is_right:
        raise TypeError(f"{name!r} is {reprlib.repr(value)}")


def _check_figure(name: str, value: object) -> None:
    """Raise `TypeError` for a number, or a list of some, that nothing measured can be."""
    least = _SMALLEST if name in _POSITIVE or name.endswith("per_s") else 0.0
    if name == "progress":  # a loss may rise
        least = -_LARGEST
    most = _LARGEST_RATE if name.endswith(("per_s", "flops", "bytes")) else _LARGEST
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, (int, float)) and not least <= number <= most:
            raise TypeError(f"{name!r} is {number:.3g}")


def _made(kind: type, values: object) -> Any:
    """A dataclass of values. Raises `TypeError` for a field too many, or of another type."""
    if not isinstance(values, dict):
        raise TypeError(f"a {kind.__name__.lower()} is {reprlib.repr(values)}")
    known = {field.name for field in dataclasses.fields(kind)}
    for name in values.keys() - known:
        raise TypeError(f"{reprlib.repr(name)} is no field of a {kind.__name__.lower()}")
    made = kind(**values)
    require_types(made)
    return made


@dataclass(repr=False)
class Compared(Printed):
    """Several results side by side, by what they have in common.

    Raises `OptionError` if nothing was measured in all of them.
    """

    results: list[Results]
    names: list[str]

    def __post_init__(self):
        if not self.common():
            raise OptionError(
                f"{', '.join(self.names)} have nothing in common: no workload of one size, in one "
                "precision, on one rung (was one of them measured with --quick?)"
            )

    def common(self) -> list[tuple[Row, ...]]:
        """The rows of each result that all of them have, in the order of the first."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in [row for result in self.results for row in result.rows if row.status == "ok"]:
            found.setdefault(row.key, []).append(row)
        return [tuple(rows) for rows in found.values() if len(rows) == len(self.results)]

    def _contents(self) -> dict[str, Any]:
        rows = []
        for same in self.common():
            names = ("median_s", "speedup", "speedup_interval", "trusted")
            figures = {name: [getattr(row, name) for row in same] for name in names}
            rows.append({"key": same[0].key} | figures)
        return {"names": self.names, "rows": rows}

    def best_speedups(self) -> dict[str, dict[str, Ratio]]:
        """For `plots.best_speedups`: among what all have, the best of each workload.

        One that is not trusted is only taken where there is no other.
        """
        best: list[dict[str, Ratio]] = [{} for _ in self.results]
        for rows in self.common():
            for found, row in zip(best, rows, strict=True):
                if row.ratio is not None:
                    candidates = found.get(row.title, row.ratio), row.ratio
                    found[row.title] = max(candidates, key=lambda one: (one.trusted, one.median))
        return dict(zip(self.names, best, strict=True))

    def _table(self) -> Table:
        lines = []
        for rows in self.common():
            cells = [f"  {rows[0].setting}"]
            for row in rows:
                cells += [time_text(row.median_s or float("nan")), _speedup(row)]
            lines.append((rows[0].title, cells))
        named = zip(self.names, self.results, strict=True)
        head = ["", *(cell for name in self.names for cell in (name, "speed-up"))]
        caption = "Time of a step, and speed-up over fp32 eager on the same device"
        facts = [f"{name}: {result.title()}" for name, result in named]
        return Table(head, _with_titles(lines), caption, facts, right=range(1, len(head)))


def ratio(part: float | None, whole: float | None) -> float | None:
    """The quotient of two figures; None where one of them is not known, or the second is 0."""
    return None if part is None or not whole else part / whole


def _figure(value: float | None) -> str:
    return _text(value, "{:.3g}" if value is None or value < 100 else "{:,.0f}")


def _text(value: float | Ratio | None, form: str) -> str:
    return "-" if value is None else form.format(value)

"""What a benchmark found: rows, their table and their file."""

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amp_lab.bench.limits import Ceilings
from amp_lab.core.errors import OptionError
from amp_lab.core.files import save
from amp_lab.core.report import Printed, Table, listed, plural, rate_text
from amp_lab.core.timing import Comparison, Estimate, Ratio, time_text

SCHEMA = "amp-lab bench 2"  # written into each file; another number means other fields
STATES = ("ok", "failed", "out of memory", "not run")
BASELINE = ("fp32", "eager")  # what all others of a workload are held against
# Times a measured limit: nothing is faster, so a time that says so is wrong.
_TOLERANCE = 1.1

_Points = dict[tuple[str, str], tuple[float, Estimate]]
"""FLOPs per byte and FLOP/s, by workload and precision."""
_Titled = list[tuple[str, list[str]]]
"""Titles and cells of rows."""


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
    def is_baseline(self) -> bool:
        """Whether it is fp32 eager, which all others of a workload are held against."""
        return (self.precision, self.rung) == BASELINE

    @property
    def milliseconds(self) -> Estimate:
        """The median with its interval; for a row that has samples."""
        samples = {"": tuple(self.samples_s)}
        compared = Comparison(samples, self.disturbed, "")
        milliseconds = compared.time_s("").times(1e3)
        return replace(milliseconds, trusted=self.trusted)

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
            self.trusted = False
            self.reason = reason

    def stop(self, status: str, reason: str) -> None:
        """Mark the row as one without a result: a status other than ``ok``, and why."""
        self.status = status
        self.reason = reason


def _setting(row: Row) -> str:
    if row.trusted:
        return f"  {row.setting}"
    return f"  {row.setting} ?"


def _time(row: Row) -> str:
    median_s = row.median_s or math.nan
    return time_text(median_s)


def _spread(row: Row) -> str:
    share = ratio(row.iqr_s, row.median_s)
    return _text(share, "{:.0%}")


def _speedup(row: Row) -> str:
    if row.is_baseline:
        return "1.00x"
    return _text(row.ratio, "{}")


def _memory(row: Row) -> str:
    mebibytes = ratio(row.peak_bytes, 2**20)
    return _text(mebibytes, "{:,.0f} MiB")


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "": _setting,
    "time": _time,
    "spread": _spread,
    "speed-up": _speedup,
    "per second": lambda row: f"{_figure(row.items_per_s)} {row.unit}",
    "memory": _memory,
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
        text = self.to_json() + "\n"
        save(Path(path), [text.encode()])

    def ladder(self) -> dict[str, list[tuple]]:
        """For `plots.speed_ladder`: the rows by workload, with their state where it is not ok."""
        panels: dict[str, list[tuple]] = {}
        for row in self.rows:
            bars = panels.setdefault(row.title, [])
            bars.append(_ladder_bar(row))
        return panels

    def roofline(self) -> tuple[dict[str, float], float, list[tuple]]:
        """For `plots.roofline`: fp32 eager, and the fastest rung of each other precision.

        Without what is not trusted.
        """
        fastest = self._fastest()
        roofs: dict[str, float] = {}
        used = {precision for _, precision in fastest}
        for precision, rate in self.flops_per_s.items():
            is_shown = precision in used or not used
            if is_shown and rate is not None:
                roofs[precision] = rate
        points = [(*names, *point) for names, point in fastest.items()]
        return roofs, self.memory_bytes_per_s, points

    def _fastest(self) -> _Points:
        """FLOPs per byte and FLOP/s of the fastest rung, by workload and precision."""
        fastest: _Points = {}
        for row in self.rows:
            is_other_fp32 = row.precision == BASELINE[0] and not row.is_baseline
            intensity = ratio(row.flops, row.moved_bytes)
            if is_other_fp32 or not row.trusted or not intensity or not row.flops:
                continue
            rate = row.milliseconds.rate(1e3 * row.flops)
            names = (row.workload, row.precision)
            point = (intensity, rate)
            _, best = fastest.setdefault(names, point)
            if rate.median > best.median:
                fastest[names] = point
        return fastest

    def distrust_impossible(self) -> None:
        """Mark what is faster than this device: it is not trusted, nor a speed-up over it."""
        for _, same in itertools.groupby(self.rows, key=lambda row: row.title):
            rows = [row for row in same if row.status == "ok"]
            for row in rows:
                reason = self.why_impossible(row)
                if not reason:
                    continue
                row.distrust(reason)
                if row.is_baseline:
                    for other in rows:
                        other.distrust(f"fp32 eager, which it is held against: {reason}")

    def why_impossible(self, row: Row) -> str:
        """Which of its rates is above what was measured of this device; empty if none is."""
        flops_per_s = row.flops_per_s
        most_flops_per_s = self.flops_per_s.get(row.precision)
        if _is_above(flops_per_s, most_flops_per_s):
            found = rate_text(flops_per_s, "FLOP/s")
            limit = rate_text(most_flops_per_s, "FLOP/s")
            return f"it computes {found}, where the limit is {limit}"
        bytes_per_s = ratio(row.least_bytes, row.median_s)
        most_bytes_per_s = max(self.stream_bytes_per_s.values())
        if _is_above(bytes_per_s, most_bytes_per_s):
            found = rate_text(bytes_per_s, "B/s")
            limit = rate_text(most_bytes_per_s, "B/s")
            return f"it moves at least {found}, where the limit is {limit}"
        return ""

    def _table(self) -> Table:
        columns = dict(_COLUMNS)
        if all(row.peak_bytes is None for row in self.rows):  # as on a CPU
            del columns["memory"]
        rows: _Titled = []
        for row in self.rows:
            if row.status == "ok":
                cells = [cell(row) for cell in columns.values()]
            else:
                blank = [""] * (len(columns) - 2)
                cells = [f"  {row.setting}", row.status, *blank]
            rows.append((row.title, cells))
        head = list(columns)
        lines = _with_titles(rows)
        figures = range(1, len(columns))
        return Table(head, lines, self.title(), self._facts(), right=figures)

    def title(self) -> str:
        """Where and when it was measured."""
        return "{device}, torch {torch}, {threads} threads, {date}".format(**self.environment)

    def _facts(self) -> list[str]:
        rates: list[str] = []
        for name, rate in self.flops_per_s.items():
            if rate is not None:
                text = rate_text(rate, "FLOP/s")
                rates.append(f"{name} {text}")
        memory = rate_text(self.memory_bytes_per_s, "B/s")
        facts = [
            f"The device's limits, measured: {', '.join(rates)}; memory {memory}.",
            "Speed-up: over fp32 eager in the same rounds, with its 95 % interval. Of limit: the "
            "time that the counted FLOPs, or the least bytes, take at those rates, over the time "
            "measured.",
            "Off fp32: how far the first loss, or the output, is from that of fp32 eager. Learns: "
            "how far the loss falls in five steps, over how far it does there.",
        ]
        for row in self.rows:
            if row.status != "ok":
                name = f"{row.title}, {row.setting}"
                facts.append(f"{name}: {row.status}, {row.reason}.")
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
        timed = {row.title: row for row in self.rows if row.rounds}
        disturbed = sum(row.disturbed for row in timed.values())
        rounds = sum(row.rounds for row in timed.values())
        of_rounds = f"{disturbed} of {plural(rounds, 'round')}"
        doubts = [f"Something else used this machine in {of_rounds}."]
        distrusted: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.status == "ok" and not row.trusted:
                same = distrusted.setdefault((row.title, row.reason), [])
                same.append(row.setting)
        for (title, reason), rungs in distrusted.items():
            names = f"{title}, {listed(rungs)}"
            doubts.append(f"Not trusted, marked with ?: {names}: {reason}.")
        return doubts


def _ladder_bar(row: Row) -> tuple:
    """Precision, rung, milliseconds, those at the limit, and a text: its speed-up, or its state."""
    if row.status != "ok":  # it may have been timed before it failed, which is no result
        return row.precision, row.rung, None, None, row.status
    remark = "no fp32 eager"
    if row.speedup:
        remark = f"{row.speedup:.2f}x"
    floor_ms = ratio(row.floor_s, 1e-3)
    return row.precision, row.rung, row.milliseconds, floor_ms, remark


def _with_titles(rows: _Titled) -> list[list[str]]:
    """Cells of rows, each under the title that it shares with others, which is a row of its own."""
    lines: list[list[str]] = []
    for title, same in itertools.groupby(rows, key=lambda row: row[0]):
        below = [cells for _, cells in same]
        blank = [""] * (len(below[0]) - 1)
        lines.append([title, *blank])
        lines.extend(below)
    return lines


@dataclass(repr=False)
class Compared(Printed):
    """Several results side by side, by what they have in common.

    Raises `OptionError` if nothing was measured in all of them.
    """

    results: list[Results]
    names: list[str]

    def __post_init__(self):
        if self.common():
            return
        names = ", ".join(self.names)
        raise OptionError(
            f"{names} have nothing in common: no workload of one size, in one precision, on one "
            "rung (was one of them measured with --quick?)"
        )

    def common(self) -> list[tuple[Row, ...]]:
        """The rows of each result that all of them have, in the order of the first."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for result in self.results:
            for row in result.rows:
                if row.status == "ok":
                    same = found.setdefault(row.key, [])
                    same.append(row)
        count = len(self.results)
        return [tuple(rows) for rows in found.values() if len(rows) == count]

    def _contents(self) -> dict[str, Any]:
        rows = []
        for same in self.common():
            contents: dict[str, Any] = {"key": same[0].key}
            for name in ("median_s", "speedup", "speedup_interval", "trusted"):
                contents[name] = [getattr(row, name) for row in same]
            rows.append(contents)
        return {"names": self.names, "rows": rows}

    def best_speedups(self) -> dict[str, dict[str, Ratio]]:
        """For `plots.best_speedups`: among what all have, the best of each workload.

        One that is not trusted is only taken where there is no other.
        """
        best: list[dict[str, Ratio]] = [{} for _ in self.results]
        for rows in self.common():
            for found, row in zip(best, rows, strict=True):
                speedup = row.ratio
                if speedup is None:
                    continue
                so_far = found.setdefault(row.title, speedup)
                if (speedup.trusted, speedup.median) > (so_far.trusted, so_far.median):
                    found[row.title] = speedup
        return dict(zip(self.names, best, strict=True))

    def _table(self) -> Table:
        rows: _Titled = []
        for same in self.common():
            first = same[0]
            cells = [f"  {first.setting}"]
            for row in same:
                cells.append(_time(row))
                cells.append(_speedup(row))
            rows.append((first.title, cells))
        head = [""]
        for name in self.names:
            head += [name, "speed-up"]
        caption = "Time of a step, and speed-up over fp32 eager on the same device"
        facts: list[str] = []
        for name, result in zip(self.names, self.results, strict=True):
            facts.append(f"{name}: {result.title()}")
        lines = _with_titles(rows)
        figures = range(1, len(head))
        return Table(head, lines, caption, facts, right=figures)


def _is_above(rate: float | None, limit: float | None) -> bool:
    """Whether a rate is above what was measured of the device; not if one of them is unknown."""
    if rate is None or limit is None:
        return False
    return rate > _TOLERANCE * limit


def ratio(part: float | None, whole: float | None) -> float | None:
    """The quotient of two figures; None where one of them is not known, or the second is 0."""
    if part is None or not whole:
        return None
    return part / whole


def _figure(value: float | None) -> str:
    if value is None or value < 100:
        return _text(value, "{:.3g}")
    return f"{value:,.0f}"


def _text(value: float | Ratio | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value)

"""The results of a benchmark: one row per measurement, their table, their figures, their file."""

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from amp_lab.bench.limits import Ceilings
from amp_lab.core.errors import OptionError
from amp_lab.core.files import save
from amp_lab.core.report import Printed, Table, listed, plural, rate_text
from amp_lab.core.timing import Comparison, Estimate, Ratio, time_text

SCHEMA = "amp-lab bench 2"  # written into each file; another number means other fields
STATES = ("ok", "failed", "out of memory", "not run")
BASELINE = ("fp32", "eager")  # precision and rung that every row of a workload is compared with
# A rate above 1.1 times the measured limit is impossible, so its time or its count is wrong. Up to
# there, the limit itself may have been measured too low.
_TOLERANCE = 1.1

_TitledCells = tuple[str, list[str]]
"""A title such as ``gpt 4x128``, and the cells of one row of the table below it."""


class _Point(NamedTuple):
    """A point of the roofline figure."""

    intensity: float  # FLOPs per byte
    rate: Estimate  # FLOP/s


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
    least_bytes: int | None = None  # inputs, weights and optimizer state, see `limits.Count`
    floor_s: float | None = None  # the longer of FLOPs and least bytes at the measured limits
    share_of_limit: float | None = None  # `floor_s` over the median: 1 is as fast as the device can
    # Relative difference from fp32 eager, in the Euclidean norm: of the first loss when the
    # workload trains, else of the output.
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
        """Workload, size, precision and rung: rows of two results are compared if these agree."""
        return self.workload, self.size, self.precision, self.rung

    @property
    def is_baseline(self) -> bool:
        """Whether this row is fp32 eager, which the rows of its workload are compared with."""
        return (self.precision, self.rung) == BASELINE

    @property
    def milliseconds(self) -> Estimate:
        """The median time of a step in ms with its interval, for a row that has samples."""
        # `Comparison` computes the bootstrap interval; its only function gets the name "".
        samples = {"": tuple(self.samples_s)}
        comparison = Comparison(samples, self.disturbed, reason="")
        milliseconds = comparison.time_s("").times(1e3)
        return replace(milliseconds, trusted=self.trusted)

    @property
    def speedup_estimate(self) -> Ratio | None:
        """The speed-up over fp32 eager with its interval; None if fp32 eager was not timed."""
        if self.speedup is None or self.speedup_interval is None:
            return None
        low, high = self.speedup_interval
        return Ratio(self.speedup, (low, high), self.trusted)

    def distrust(self, reason: str) -> None:
        """Mark the figures as not to be trusted; an earlier reason is kept."""
        if self.trusted:
            self.trusted = False
            self.reason = reason

    def stop(self, status: str, reason: str) -> None:
        """Mark the row as one without a result: a status other than ``ok``, and the reason."""
        self.status = status
        self.reason = reason


# The cells of a row in the table.


def _setting(row: Row) -> str:
    """Precision and rung, indented below the title, with a ``?`` if the row is not trusted."""
    if row.trusted:
        return f"  {row.setting}"
    return f"  {row.setting} ?"


def _time(row: Row) -> str:
    """The median time of a step, such as ``12.3 ms``."""
    median_s = row.median_s or math.nan  # a row whose status is ok has a time
    return time_text(median_s)


def _spread(row: Row) -> str:
    """The interquartile range as a share of the median, such as ``3%``."""
    share = quotient(row.iqr_s, row.median_s)
    return _text(share, "{:.0%}")


def _speedup(row: Row) -> str:
    """The speed-up with its interval; ``-`` if unknown, and ``1.00x`` for fp32 eager itself."""
    if row.is_baseline:
        return "1.00x"
    return _text(row.speedup_estimate, "{}")


def _memory(row: Row) -> str:
    """The peak memory, such as ``1,024 MiB``; ``-`` if it is unknown."""
    mebibytes = quotient(row.peak_bytes, 2**20)
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
"""The columns of the table: heading, and the function that writes a row's cell."""


@dataclass(repr=False)
class Results(Printed, Ceilings):
    """All results of one run, with the device's limits; `str` of it is the table."""

    environment: dict[str, str | int | bool]  # such as "device", "torch", "date", "quick", "rounds"
    rows: list[Row]
    complete: bool = True  # false for a run that was stopped before its end

    def _contents(self) -> dict[str, Any]:
        """All fields for the JSON file, after the schema."""
        return {"schema": SCHEMA} | vars(self)

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON file, whole or not at all. Raises `OptionError` if that fails."""
        text = self.to_json() + "\n"
        save(Path(path), [text.encode()])

    def ladder(self) -> dict[str, list[tuple]]:
        """Return the bars of `plots.speed_ladder` by title, a panel for each; see `_ladder_bar`."""
        panels: dict[str, list[tuple]] = {}
        for row in self.rows:
            bars = panels.setdefault(row.title, [])
            bars.append(_ladder_bar(row))
        return panels

    def roofline(self) -> tuple[dict[str, float], float, list[tuple]]:
        """Return the arguments of `plots.roofline`, from rows that are trusted.

        These are the limits in FLOP/s by precision, for those that have a point (for all if there
        is no point), the limit of memory in bytes/s, and the points:
        ``(workload, precision, FLOPs per byte, FLOP/s as an Estimate)``. A point is the fastest
        rung of a workload in a precision; in fp32 it is eager, the baseline.
        """
        fastest = self._fastest()
        roofs: dict[str, float] = {}
        plotted = {precision for _, precision in fastest}  # from its keys
        for precision, rate in self.flops_per_s.items():
            # Without any point the figure shows every roof.
            is_shown = precision in plotted or not plotted
            if is_shown and rate is not None:
                roofs[precision] = rate
        points = [(*names, *point) for names, point in fastest.items()]
        return roofs, self.memory_bytes_per_s, points

    def _fastest(self) -> dict[tuple[str, str], _Point]:
        """The point of the fastest rung, by workload and precision; of eager for fp32."""
        fastest: dict[tuple[str, str], _Point] = {}
        for row in self.rows:
            is_other_fp32 = row.precision == BASELINE[0] and not row.is_baseline
            intensity = quotient(row.flops, row.moved_bytes)
            if is_other_fp32 or not row.trusted or not intensity or not row.flops:
                continue
            rate = row.milliseconds.rate(1e3 * row.flops)  # 1e3, since the time is in ms
            names = (row.workload, row.precision)
            best = fastest.get(names)
            if best is None or rate.median > best.rate.median:
                fastest[names] = _Point(intensity, rate)
        return fastest

    def raise_limits(self) -> None:
        """Raise the limits to the highest rates of the run, and update each row's share of them.

        The limits are measured before the rows. On a machine that others use too, a matmul of the
        workload ``product`` may find the machine less busy later. Only that workload raises limits:
        in another one, a rate above the limit shows that its FLOPs are counted wrong. Rows that are
        faster than the device can be are distrusted first, and raise no limit.
        """
        self.distrust_impossible()
        # A row with a floor has counts and a time, so `or 0` below is only for the type checker.
        counted = [row for row in self.rows if row.status == "ok" and row.floor_s is not None]
        matmuls = [row for row in counted if row.workload == "product"]
        # The list is made first: a limit that one row raises must not make another row possible.
        for row in [row for row in matmuls if not self.impossible_reason(row)]:
            highest = max(self.flops_per_s[row.precision] or 0.0, row.flops_per_s or 0.0)
            self.flops_per_s[row.precision] = highest
            least_bytes = row.least_bytes or 0
            self.raise_stream_rate(least_bytes, quotient(least_bytes, row.median_s) or 0.0)
        for row in counted:
            row.floor_s = self.floor_s(row.precision, row.flops, row.least_bytes)
            row.share_of_limit = quotient(row.floor_s, row.median_s)

    def distrust_impossible(self) -> None:
        """Distrust the rows that are faster than the device can be.

        If fp32 eager is one of them, all rows of its workload are, for their speed-ups are wrong.
        """
        # The rows of a workload follow each other, as `groupby` needs.
        for _, rows_of_title in itertools.groupby(self.rows, key=lambda row: row.title):
            rows = [row for row in rows_of_title if row.status == "ok"]
            for row in rows:
                reason = self.impossible_reason(row)
                if not reason:
                    continue
                row.distrust(reason)
                if row.is_baseline:
                    for other in rows:
                        other.distrust(f"the baseline, fp32 eager, is not trusted: {reason}")

    def impossible_reason(self, row: Row) -> str:
        """The rate of a row that is above the device's limit, in words; empty if none is."""
        flops_per_s = row.flops_per_s
        flops_limit = self.flops_per_s.get(row.precision)
        if _is_above(flops_per_s, flops_limit):
            rate = rate_text(flops_per_s, "FLOP/s")
            limit = rate_text(flops_limit, "FLOP/s")
            return f"it computes {rate}, where the limit is {limit}"
        bytes_per_s = quotient(row.least_bytes, row.median_s)
        bytes_limit = max(self.stream_bytes_per_s.values())  # the highest of any size, caches too
        if _is_above(bytes_per_s, bytes_limit):
            rate = rate_text(bytes_per_s, "B/s")
            limit = rate_text(bytes_limit, "B/s")
            return f"it moves at least {rate}, where the limit is {limit}"
        return ""

    def _table(self) -> Table:
        """One line for each row, below its title; a row without a result has only its status."""
        columns = dict(_COLUMNS)
        if all(row.peak_bytes is None for row in self.rows):  # as on a CPU
            del columns["memory"]
        titled: list[_TitledCells] = []
        for row in self.rows:
            if row.status == "ok":
                cells = [write_cell(row) for write_cell in columns.values()]
            else:
                blank = [""] * (len(columns) - 2)  # behind the setting and the status
                cells = [f"  {row.setting}", row.status, *blank]
            titled.append((row.title, cells))
        head = list(columns)
        lines = _with_titles(titled)
        number_columns = range(1, len(columns))
        return Table(head, lines, self.title(), self._facts(), right=number_columns)

    def title(self) -> str:
        """The device, the version of torch, the threads and the date, as a heading."""
        return "{device}, torch {torch}, {threads} threads, {date}".format(**self.environment)

    def _facts(self) -> list[str]:
        """The sentences below the table: limits, what the columns are, and what to be wary of."""
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
        """Sentences: in how many rounds the machine was busy, and why rows are not trusted."""
        # All rows of a workload share its rounds, so one row of each title is counted.
        timed = {row.title: row for row in self.rows if row.rounds}
        disturbed = sum(row.disturbed for row in timed.values())
        rounds = sum(row.rounds for row in timed.values())
        busy_rounds = f"{disturbed} of {plural(rounds, 'round')}"
        doubts = [f"Something else used this machine in {busy_rounds}."]
        settings: dict[tuple[str, str], list[str]] = {}  # by title and reason
        for row in self.rows:
            if row.status == "ok" and not row.trusted:
                title_and_reason = (row.title, row.reason)
                settings.setdefault(title_and_reason, []).append(row.setting)
        for (title, reason), distrusted in settings.items():
            names = f"{title}, {listed(distrusted)}"
            doubts.append(f"Not trusted, marked with ?: {names}: {reason}.")
        return doubts


def _ladder_bar(row: Row) -> tuple:
    """Return ``(precision, rung, milliseconds, floor in ms, text)`` for `plots.speed_ladder`.

    The milliseconds are an `Estimate`. The floor is the time at the device's limits, None if it is
    unknown. The text is the speed-up, such as ``1.62x``, or ``no fp32 eager`` without one, or
    the status of a row without a result, whose times are None.
    """
    if row.status != "ok":  # it may have been timed before it failed, which is no result
        return row.precision, row.rung, None, None, row.status
    text = "no fp32 eager"
    if row.speedup:
        text = f"{row.speedup:.2f}x"
    floor_ms = quotient(row.floor_s, 1e-3)
    return row.precision, row.rung, row.milliseconds, floor_ms, text


def _with_titles(titled: list[_TitledCells]) -> list[list[str]]:
    """The rows of a table: each title on a row of its own, above the rows that share it."""
    lines: list[list[str]] = []
    for title, group in itertools.groupby(titled, key=lambda pair: pair[0]):
        rows = [cells for _, cells in group]
        blank = [""] * (len(rows[0]) - 1)
        lines.append([title, *blank])
        lines.extend(rows)
    return lines


@dataclass(repr=False)
class BenchComparison(Printed):
    """Several results side by side: the rows that all of them have.

    Raises `OptionError` if there is no such row.
    """

    results: list[Results]
    names: list[str]

    def __post_init__(self):
        """Raise `OptionError` if no row is in all results."""
        if self.common():
            return
        names = ", ".join(self.names)
        raise OptionError(
            f"{names} have nothing in common: no workload of one size, in one precision, on one "
            "rung (was one of them measured with --quick?)"
        )

    def common(self) -> list[tuple[Row, ...]]:
        """The rows with a result in all results; each tuple has one row of each result.

        They are in the order of the first result.
        """
        by_key: dict[tuple[str, ...], list[Row]] = {}
        for result in self.results:
            for row in result.rows:
                if row.status == "ok":
                    by_key.setdefault(row.key, []).append(row)
        count = len(self.results)
        return [tuple(rows) for rows in by_key.values() if len(rows) == count]

    def _contents(self) -> dict[str, Any]:
        """For JSON, the figures of the common rows, a list with one value of each result."""
        contents = []
        for rows in self.common():
            figures: dict[str, Any] = {"key": rows[0].key}
            for name in ("median_s", "speedup", "speedup_interval", "trusted"):
                figures[name] = [getattr(row, name) for row in rows]  # one of each result
            contents.append(figures)
        return {"names": self.names, "rows": contents}

    def best_speedups(self) -> dict[str, dict[str, Ratio]]:
        """Return the best speed-up by name of the result and title, for `plots.best_speedups`.

        Only rows that all results have are considered. A speed-up that is not trusted is taken only
        if none of its title is.
        """
        best: list[dict[str, Ratio]] = [{} for _ in self.results]
        for rows in self.common():
            for best_of_result, row in zip(best, rows, strict=True):
                speedup = row.speedup_estimate
                if speedup is None:
                    continue
                so_far = best_of_result.get(row.title)
                if so_far is None or _rank(speedup) > _rank(so_far):
                    best_of_result[row.title] = speedup
        return dict(zip(self.names, best, strict=True))

    def _table(self) -> Table:
        """One line for each common row, with time and speed-up of each result."""
        titled: list[_TitledCells] = []
        for rows in self.common():
            first = rows[0]
            cells = [f"  {first.setting}"]
            for row in rows:
                cells.append(_time(row))
                cells.append(_speedup(row))
            titled.append((first.title, cells))
        head = [""]
        for name in self.names:
            head += [name, "speed-up"]
        caption = "Time of a step, and speed-up over fp32 eager on the same device"
        facts: list[str] = []
        for name, result in zip(self.names, self.results, strict=True):
            facts.append(f"{name}: {result.title()}")
        lines = _with_titles(titled)
        number_columns = range(1, len(head))
        return Table(head, lines, caption, facts, right=number_columns)


def _rank(speedup: Ratio) -> tuple[bool, float]:
    """A key that sorts trusted speed-ups above the others, and then by size."""
    return speedup.trusted, speedup.median


def _is_above(rate: float | None, limit: float | None) -> bool:
    """Whether a rate is impossible at this limit; False if one of the two is unknown."""
    if rate is None or limit is None:
        return False
    return rate > _TOLERANCE * limit


def quotient(dividend: float | None, divisor: float | None) -> float | None:
    """The quotient of two figures; None if one of them is unknown or the divisor is 0."""
    if dividend is None or not divisor:
        return None
    return dividend / divisor


def _figure(value: float | None) -> str:
    """Three digits, or the whole integer part: ``12.3``, ``4,567``; ``-`` for None."""
    if value is None or value < 100:
        return _text(value, "{:.3g}")
    return f"{value:,.0f}"


def _text(value: float | Ratio | None, form: str) -> str:
    """A value in a format such as ``{:.0%}``; ``-`` for None."""
    if value is None:
        return "-"
    return form.format(value)

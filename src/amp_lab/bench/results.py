"""The results of a benchmark: its rows with the device's limits, its figures, and its file."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from amp_lab.bench.limits import Ceilings
from amp_lab.bench.result_row import BASELINE, Row, quotient
from amp_lab.bench.results_table import LEGEND, head_and_lines
from amp_lab.core.estimates import Estimate
from amp_lab.core.files import save
from amp_lab.core.report import Printed, Table, listed, plural, rate_text

SCHEMA = "amp-lab bench 2"  # written into each file; another number means other fields
# A rate above 1.1 times the measured limit is impossible, so its time or its count is wrong. Up to
# there, the limit itself may have been measured too low.
_TOLERANCE = 1.1


class _Point(NamedTuple):
    """A point of the roofline figure."""

    intensity: float  # FLOPs per byte
    rate: Estimate  # FLOP/s


@dataclass(repr=False)
class Results(Printed, Ceilings):
    """All results of one run, with the device's limits as `Ceilings`; it prints as a table."""

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
        plotted = {precision for _workload, precision in fastest}
        for precision, rate in self.flops_per_s.items():
            # Without any point the figure shows every roof.
            is_shown = precision in plotted or not plotted
            if is_shown and rate is not None:
                roofs[precision] = rate
        points = []
        for (workload, precision), point in fastest.items():
            points.append((workload, precision, point.intensity, point.rate))
        return roofs, self.memory_bytes_per_s, points

    def _fastest(self) -> dict[tuple[str, str], _Point]:
        """The point of the fastest rung, by workload and precision; of eager for fp32."""
        fastest: dict[tuple[str, str], _Point] = {}
        fp32, _ = BASELINE
        for row in self.rows:
            is_other_fp32 = row.precision == fp32 and not row.is_baseline
            if is_other_fp32 or not row.trusted:
                continue
            intensity = quotient(row.flops, row.moved_bytes)
            if not intensity or not row.flops:  # the work of the step was not counted
                continue
            seconds = row.milliseconds.times(1e-3)
            rate = seconds.rate(row.flops)
            key = (row.workload, row.precision)
            best = fastest.get(key)
            if best is None or rate.median > best.rate.median:
                fastest[key] = _Point(intensity, rate)
        return fastest

    def raise_limits(self) -> None:
        """Raise the limits to the highest rates of the run, and update each row's share of them.

        The limits are measured before the rows. On a machine that others use too, a matmul of the
        workload ``matmul`` may run later, when the machine is less busy. Only that workload raises
        limits: in another one, a rate above the limit shows that its FLOPs are counted wrong. Rows
        that are faster than the device can be are distrusted first, and raise no limit.
        """
        self.distrust_impossible()
        counted = [row for row in self.rows if row.status == "ok" and row.floor_s is not None]
        matmuls = [row for row in counted if row.workload == "matmul"]
        # Chosen before any limit changes: a higher limit must not make another row possible.
        possible = [row for row in matmuls if not self.impossible_reason(row)]
        for row in possible:
            # A row with a floor has counts and a time, so `or 0` is only for the type checker.
            limit = self.flops_per_s[row.precision] or 0.0
            self.flops_per_s[row.precision] = max(limit, row.flops_per_s or 0.0)
            least_bytes = row.least_bytes or 0
            bytes_per_s = quotient(least_bytes, row.median_s) or 0.0
            self.raise_stream_rate(least_bytes, bytes_per_s)
        for row in counted:
            row.floor_s = self.floor_s(row.precision, row.flops, row.least_bytes)
            row.share_of_limit = quotient(row.floor_s, row.median_s)

    def distrust_impossible(self) -> None:
        """Distrust the rows that are faster than the device can be.

        If fp32 eager is one of these rows, all rows of the workload are distrusted, because their
        speed-ups are wrong.
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
        """The rate of a row that exceeds the device's limit, in words; empty if no rate does."""
        flops_per_s = row.flops_per_s
        flops_limit = self.flops_per_s.get(row.precision)
        if _is_above(flops_per_s, flops_limit):
            rate = rate_text(flops_per_s, "FLOP/s")
            limit = rate_text(flops_limit, "FLOP/s")
            return f"it computes {rate}, above the measured limit of {limit}"
        bytes_per_s = quotient(row.least_bytes, row.median_s)
        bytes_limit = max(self.stream_bytes_per_s.values())  # the highest of any size, caches too
        if _is_above(bytes_per_s, bytes_limit):
            rate = rate_text(bytes_per_s, "B/s")
            limit = rate_text(bytes_limit, "B/s")
            return f"it moves at least {rate}, above the measured limit of {limit}"
        return ""

    def _table(self) -> Table:
        """One line for each row, below its title; a row without a result has only its status."""
        head, lines = head_and_lines(self.rows)
        number_columns = range(1, len(head))
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
            f"Measured limits of the device: {', '.join(rates)}; memory {memory}.",
            *LEGEND,
        ]
        for row in self.rows:
            if row.status != "ok":
                name = f"{row.title}, {row.setting}"
                facts.append(f"{name}: {row.status}, {row.reason}.")
        facts += self._doubts()
        if self.environment.get("quick"):
            facts.append(
                "This was a quick run, with small sizes and without rungs that take long to "
                "compile."
            )
        if not self.trusted:
            facts.append(
                "Repeated measurements of the limits differ, so this machine is busy. Measure "
                "again."
            )
        if not self.complete:
            facts.append("The run was stopped before its end.")
        return facts

    def _doubts(self) -> list[str]:
        """Sentences: in how many rounds the machine was busy, and why rows are not trusted."""
        # All rows of a workload share its rounds, so one row of each title is counted.
        row_of_title = {row.title: row for row in self.rows if row.rounds}
        disturbed = sum(row.disturbed for row in row_of_title.values())
        rounds = sum(row.rounds for row in row_of_title.values())
        busy_rounds = f"{disturbed} of {plural(rounds, 'round')}"
        doubts = [f"Something else used this machine in {busy_rounds}."]
        settings_by_doubt: dict[tuple[str, str], list[str]] = {}  # by title and reason
        for row in self.rows:
            if row.status == "ok" and not row.trusted:
                title_and_reason = (row.title, row.reason)
                settings_by_doubt.setdefault(title_and_reason, []).append(row.setting)
        for (title, reason), settings in settings_by_doubt.items():
            names = f"{title}, {listed(settings)}"
            doubts.append(f"Not trusted (marked with ?): {names}. Reason: {reason}.")
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


def _is_above(rate: float | None, limit: float | None) -> bool:
    """Whether a rate is impossible at this limit; False if one of the two is unknown."""
    if rate is None or limit is None:
        return False
    return rate > _TOLERANCE * limit

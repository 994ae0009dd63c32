"""Several benchmarks side by side, for example on two devices."""

from dataclasses import dataclass
from typing import Any

from amp_lab.bench.result_row import Row
from amp_lab.bench.results import Results
from amp_lab.bench.results_table import TitledCells, speedup_cell, time_cell, with_titles
from amp_lab.core.errors import OptionError
from amp_lab.core.estimates import Ratio
from amp_lab.core.report import Printed, Table


@dataclass(repr=False)
class BenchComparison(Printed):
    """Several results side by side. Only rows that all results have are compared.

    Raises `OptionError` if the results have no row in common.
    """

    results: list[Results]
    names: list[str]

    def __post_init__(self):
        """Raise `OptionError` if no row is in all results."""
        if self.common():
            return
        names = ", ".join(self.names)
        raise OptionError(
            f"{names} cannot be compared: they have no row with the same workload, size, "
            "precision and rung. Was one of them measured with --quick?"
        )

    def common(self) -> list[tuple[Row, ...]]:
        """The rows that have figures in all results, in the order of the first result.

        Each tuple contains one row from each result, all with the same workload, precision and
        rung.
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
        """Return the best speed-up of each result and title, for `plots.best_speedups`.

        Rows that not all results have are ignored. An untrusted speed-up is used only for a title
        without a trusted one.
        """
        best: list[dict[str, Ratio]] = [{} for _ in self.results]
        for rows in self.common():
            for best_of_result, row in zip(best, rows, strict=True):
                speedup = row.speedup_estimate
                if speedup is None:
                    continue
                so_far = best_of_result.get(row.title)
                # `_rank` places each trusted speed-up above all others.
                if so_far is None or _rank(speedup) > _rank(so_far):
                    best_of_result[row.title] = speedup
        return dict(zip(self.names, best, strict=True))

    def _table(self) -> Table:
        """One line for each common row, with time and speed-up of each result."""
        titled: list[TitledCells] = []
        for rows in self.common():
            first = rows[0]
            cells = [f"  {first.setting}"]
            for row in rows:
                cells.append(time_cell(row))
                cells.append(speedup_cell(row))
            titled.append((first.title, cells))
        head = [""]
        for name in self.names:
            head += [name, "speed-up"]
        caption = "Time of a step and speed-up over fp32 eager on the same device"
        facts: list[str] = []
        for name, result in zip(self.names, self.results, strict=True):
            facts.append(f"{name}: {result.title()}")
        lines = with_titles(titled)
        number_columns = range(1, len(head))
        return Table(head, lines, caption, facts, right=number_columns)


def _rank(speedup: Ratio) -> tuple[bool, float]:
    """A key that sorts trusted speed-ups above the others, and then by size."""
    return speedup.trusted, speedup.median

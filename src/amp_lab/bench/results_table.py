"""The table of a benchmark: its columns and its cells."""

import itertools
import math
from collections.abc import Callable

from amp_lab.bench.result_row import Row, quotient
from amp_lab.core.estimates import Ratio
from amp_lab.core.report import rate_text
from amp_lab.core.timing_result import time_text

TitledCells = tuple[str, list[str]]
"""A title such as ``gpt 4x128``, and the cells of one row of the table below it."""


def head_and_lines(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The head of the table, and one line for each row, below its title.

    A row without a result has only its status.
    """
    columns = dict(_COLUMNS)
    if all(row.peak_bytes is None for row in rows):  # as on a CPU
        del columns["memory"]
    titled: list[TitledCells] = []
    for row in rows:
        if row.status == "ok":
            cells = [write_cell(row) for write_cell in columns.values()]
        else:
            blank = [""] * (len(columns) - 2)  # behind the setting and the status
            cells = [f"  {row.setting}", row.status, *blank]
        titled.append((row.title, cells))
    return list(columns), with_titles(titled)


# The cells of a row.


def _setting(row: Row) -> str:
    """Precision and rung, indented below the title, with a ``?`` if the row is not trusted."""
    if row.trusted:
        return f"  {row.setting}"
    return f"  {row.setting} ?"


def time_cell(row: Row) -> str:
    """The median time of a step, such as ``12.3 ms``."""
    median_s = row.median_s or math.nan  # a row whose status is ok has a time
    return time_text(median_s)


def _spread(row: Row) -> str:
    """The interquartile range as a share of the median, such as ``3%``."""
    share = quotient(row.iqr_s, row.median_s)
    return _text(share, "{:.0%}")


def speedup_cell(row: Row) -> str:
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
    "time": time_cell,
    "spread": _spread,
    "speed-up": speedup_cell,
    "per second": lambda row: f"{_figure(row.items_per_s)} {row.unit}",
    "memory": _memory,
    "FLOP/s": lambda row: rate_text(row.flops_per_s, "FLOP/s"),
    "of limit": lambda row: _text(row.share_of_limit, "{:.0%}"),
    "off fp32": lambda row: _text(row.error, "{:.1e}"),
    "learns": lambda row: _text(row.progress, "{:.0%}"),
}
"""The columns of the table: heading, and the function that writes a row's cell."""

LEGEND = (
    "Speed-up: over fp32 eager in the same rounds, with the 95 % interval. Of limit: the shortest "
    "possible time for the counted FLOPs and bytes at these limits, divided by the measured time.",
    (
        "Off fp32: the relative error of the first loss, or of the output, from fp32 eager. "
        "Learns: the fall of the loss in five steps, relative to the fall in fp32 eager."
    ),
)
"""What the columns mean: sentences below the table, after the limits of the device."""


def with_titles(titled: list[TitledCells]) -> list[list[str]]:
    """The rows of a table: each title on a row of its own, above the rows that share it."""
    lines: list[list[str]] = []
    for title, group in itertools.groupby(titled, key=lambda pair: pair[0]):
        rows = [cells for _, cells in group]
        blank = [""] * (len(rows[0]) - 1)
        lines.append([title, *blank])
        lines.extend(rows)
    return lines


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

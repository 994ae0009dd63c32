"""Reads the file of a benchmark, and refuses what was not measured."""

import dataclasses
import os
import re
import reprlib
from pathlib import Path
from typing import Any

from amp_lab.bench.results import SCHEMA, STATES, Results, Row
from amp_lab.core.errors import OptionError
from amp_lab.core.files import read_json, require_types

_SIZE = re.compile("[1-9][0-9]{0,17}", re.ASCII)  # in bytes
# What no step of any device is beyond: seconds and ratios, and FLOPs, bytes and their rates.
_SMALLEST = 1e-12
_LARGEST = 1e12
_LARGEST_RATE = 1e30
_POSITIVE = ("median_s", "samples_s", "speedup", "speedup_interval")


def load_results(path: str | os.PathLike) -> Results:
    """The results in a file. Raises `OptionError`, which says what is wrong with which file."""
    try:
        content = read_json(Path(path))
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # no JSON, or no text
        raise OptionError(f"{path}: damaged, it is no JSON ({error})") from error
    schema = ""
    if isinstance(content, dict):
        schema = str(content.get("schema"))
    any_version, _, _ = SCHEMA.rpartition(" ")
    if not schema.startswith(any_version):
        raise OptionError(f"{path}: no results of amp-lab bench")
    if schema != SCHEMA:
        written = reprlib.repr(schema)
        raise OptionError(f"{path}: written as {written}, and this amp_lab reads {SCHEMA!r}")
    del content["schema"]
    try:
        content["rows"] = [_made(Row, row) for row in content["rows"]]
        results = _made(Results, content)
        _check_values(results)
    except KeyError as error:
        raise OptionError(f"{path}: damaged, {error} is missing") from error
    except TypeError as error:
        raise OptionError(f"{path}: damaged, {error}") from error
    return results


def _check_values(results: Results) -> None:
    """Raise `TypeError` or `KeyError` for what was not measured, or cannot be."""
    for name in ("device", "torch", "date"):
        text = results.environment[name]
        _require(isinstance(text, str), name, text)
    threads = results.environment["threads"]
    is_count = isinstance(threads, int) and threads > 0
    _require(is_count, "threads", threads)
    for row in results.rows:
        _check_row(row)
    rates = results.stream_bytes_per_s
    are_sizes = all(_SIZE.fullmatch(str(size)) for size in rates)
    _require(bool(rates) and are_sizes, "stream_bytes_per_s", rates)
    results.stream_bytes_per_s = {int(size): rate for size, rate in rates.items()}  # JSON has text
    for rate in (*rates.values(), *results.flops_per_s.values()):
        _check_figure("a rate per_s", rate)


def _check_row(row: Row) -> None:
    _require(row.status in STATES, "status", row.status)
    times = [row.median_s, row.iqr_s, row.items_per_s, *row.samples_s]
    is_timed = bool(row.samples_s) and None not in times
    if row.status == "ok" and not is_timed:
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
    least = 0.0
    if name in _POSITIVE or name.endswith("per_s"):
        least = _SMALLEST
    if name == "progress":  # a loss may rise
        least = -_LARGEST
    most = _LARGEST
    if name.endswith(("per_s", "flops", "bytes")):
        most = _LARGEST_RATE
    numbers = [value]
    if isinstance(value, list):
        numbers = value
    for number in numbers:
        if isinstance(number, (int, float)) and not least <= number <= most:
            raise TypeError(f"{name!r} is {number:.3g}")


def _made(kind: type, values: object) -> Any:
    """A dataclass of values. Raises `TypeError` for a field too many, or of another type."""
    kind_name = kind.__name__.lower()
    if not isinstance(values, dict):
        raise TypeError(f"a {kind_name} is {reprlib.repr(values)}")
    known = {field.name for field in dataclasses.fields(kind)}
    for name in values.keys() - known:
        raise TypeError(f"{reprlib.repr(name)} is no field of a {kind_name}")
    made = kind(**values)
    require_types(made)
    return made

"""Reads the file of a benchmark, and refuses values that no benchmark measures."""

import dataclasses
import os
import re
import reprlib
from pathlib import Path
from typing import Any

from amp_lab.bench.result_row import STATES, Row
from amp_lab.bench.results import SCHEMA, Results
from amp_lab.core.errors import OptionError
from amp_lab.core.files import read_json, require_types

_SIZE = re.compile("[1-9][0-9]{0,17}", re.ASCII)  # a size in bytes, such as "65536"
# Bounds that no step of any device exceeds.
_SMALLEST = 1e-12  # of what is positive
_LARGEST = 1e12  # of seconds and ratios
_LARGEST_COUNT = 1e30  # of FLOPs, bytes and their rates
_POSITIVE = ("median_s", "samples_s", "speedup", "speedup_interval")  # fields that are never 0


def load_results(path: str | os.PathLike) -> Results:
    """Read the results in a file. Raises `OptionError` if the file is missing or wrong."""
    try:
        content = read_json(Path(path))
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise OptionError(f"{path}: damaged, not valid JSON ({error})") from error
    schema = ""
    if isinstance(content, dict):
        schema = str(content.get("schema"))
    schema_name, _, _ = SCHEMA.rpartition(" ")  # without the version
    if not schema.startswith(schema_name):
        raise OptionError(f"{path}: the file has no results of amp-lab bench")
    if schema != SCHEMA:
        written = reprlib.repr(schema)
        raise OptionError(
            f"{path}: the file has the format {written}, but this amp_lab reads {SCHEMA!r}"
        )
    del content["schema"]
    try:
        content["rows"] = [_from_json(Row, row) for row in content["rows"]]
        results = _from_json(Results, content)
        _check_values(results)
    except KeyError as error:
        raise OptionError(f"{path}: damaged, {error} is missing") from error
    except TypeError as error:
        raise OptionError(f"{path}: damaged, {error}") from error
    return results


def _check_values(results: Results) -> None:
    """Raise `TypeError` for an impossible value, `KeyError` for one missing in `environment`.

    The keys of ``stream_bytes_per_s`` become integers.
    """
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
    # In JSON the keys are text.
    results.stream_bytes_per_s = {int(size): rate for size, rate in rates.items()}
    for rate in (*rates.values(), *results.flops_per_s.values()):
        _check_figure("a rate per_s", rate)  # a name with this ending has the bounds of a rate


def _check_row(row: Row) -> None:
    """Raise `TypeError` for a row whose figures cannot be measured, or that lacks its time."""
    _require(row.status in STATES, "status", row.status)
    times = [row.median_s, row.iqr_s, row.items_per_s, *row.samples_s]
    is_timed = bool(row.samples_s) and None not in times
    if row.status == "ok" and not is_timed:
        raise TypeError(f"{row.title}, {row.setting} is ok, but has no time")
    interval = row.speedup_interval
    _require(interval is None or len(interval) == 2, "speedup_interval", interval)
    for name, value in vars(row).items():
        _check_figure(name, value)


def _require(is_valid: bool, name: str, value: object) -> None:
    """Raise `TypeError` with the name and the value of a field, unless it is valid."""
    if not is_valid:
        raise TypeError(f"{name!r} is {reprlib.repr(value)}")


def _check_figure(name: str, value: object) -> None:
    """Raise `TypeError` for a number out of the bounds of the field `name`, also in a list.

    Any value that is neither a number nor a list passes.
    """
    least = 0.0
    if name in _POSITIVE or name.endswith("per_s"):
        least = _SMALLEST
    if name == "progress":  # negative where the loss rose
        least = -_LARGEST
    most = _LARGEST
    if name.endswith(("per_s", "flops", "bytes")):
        most = _LARGEST_COUNT
    numbers = [value]
    if isinstance(value, list):
        numbers = value
    for number in numbers:
        if isinstance(number, (int, float)) and not least <= number <= most:
            raise TypeError(f"{name!r} is {number:.3g}")


def _from_json(cls: type, values: object) -> Any:
    """Make an instance of the dataclass `cls` from a dict of its fields.

    Raises `TypeError` if `values` is no dict, and for a field that is unknown, missing, or of
    another type than the dataclass declares.
    """
    name_of_class = cls.__name__.lower()
    if not isinstance(values, dict):
        raise TypeError(f"a {name_of_class} is {reprlib.repr(values)}")
    known_fields = {field.name for field in dataclasses.fields(cls)}
    for name in values.keys() - known_fields:
        raise TypeError(f"a {name_of_class} has no field {reprlib.repr(name)}")
    instance = cls(**values)  # raises `TypeError` if a field is missing
    require_types(instance)
    return instance

"""What a benchmark found: rows, their table and their file."""

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

from amp_lab.errors import OptionError
from amp_lab.files import write_whole
from amp_lab.report import Printed, Table

SCHEMA = "amp-lab bench 1"
"""Written into each file; another number means other fields."""
STATES = ("ok", "failed", "out of memory", "not run")


@dataclass
class Row:
    """One workload in one precision on one rung."""

    workload: str
    size: str
    precision: str
    rung: str
    status: str
    """One of `STATES`; only ``ok`` has figures that may be compared."""
    reason: str = ""
    unit: str = ""
    items: int = 0
    """How many of `unit` a step has."""
    samples_s: list[float] = field(default_factory=list)
    """Seconds of each step that was timed."""
    median_s: float | None = None
    iqr_s: float | None = None
    """Interquartile range of the samples."""
    speedup: float | None = None
    """Of the medians, over fp32 eager in the same run."""
    items_per_s: float | None = None
    peak_bytes: int | None = None
    """Largest number of bytes in tensors; None where the device keeps no count."""
    flops: int | None = None
    """Counted for one eager step."""
    flops_per_s: float | None = None
    moved_bytes: int | None = None
    """What the ops of the eager step in this precision read and write, counted."""
    bytes_per_s: float | None = None
    """`moved_bytes` over the time: more than the device can copy, where a rung moves less."""
    least_bytes: int | None = None
    floor_s: float | None = None
    """The longer of FLOPs at the measured matrix rate and least bytes at the measured copy rate."""
    share_of_limit: float | None = None
    """`floor_s` over the median: 1 is as fast as the device can."""
    error: float | None = None
    """Difference of the first loss, or the output, from fp32 eager's: relative, Euclidean norm."""
    progress: float | None = None
    """How far the loss falls in the first training steps, over how far it does in fp32 eager."""

    @property
    def title(self) -> str:
        """Workload and size."""
        return f"{self.workload} {self.size}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What must be equal for two rows to be compared."""
        return self.workload, self.size, self.precision, self.rung


@dataclass
class PeerRow:
    """One library's training step, on the same model, data and precision."""

    peer: str
    workload: str
    precision: str
    status: str
    reason: str = ""
    samples_s: list[float] = field(default_factory=list)
    """Seconds of each step."""
    ratio: float | None = None
    """Median of this step's time over that of the bare torch loop in the same turn."""
    peak_bytes: int | None = None


@dataclass(repr=False)
class Results(Printed):
    """All that one run found; `str` of it is made to be read."""

    environment: dict[str, str | int | bool]
    """Device, backend, torch, threads, date, and how the run was asked for."""
    flops_per_s: dict[str, float | None]
    """Measured limit by precision; None for one that the device lacks."""
    stream_bytes_per_s: dict[str, float]
    """Measured limit of a copy, by the bytes that it reads and writes."""
    trusted: bool
    """Whether the ceilings repeated; if not, the machine was busy."""
    rows: list[Row]
    peers: list[PeerRow] = field(default_factory=list)
    complete: bool = True
    """False for a run that was stopped before its end."""

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps({"schema": SCHEMA} | dataclasses.asdict(self), indent=1)

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON, whole or not at all. Raises `OptionError` if that fails."""
        try:
            write_whole(Path(path), [self.to_json().encode() + b"\n"])
        except OSError as error:
            raise OptionError(f"{path}: cannot be written ({error.strerror})") from error

    def ladder(self) -> dict[str, list[tuple]]:
        """For `plots.speed_ladder`: the rows by workload, with their state where it is not ok."""
        panels: dict[str, list[tuple]] = {}
        for row in self.rows:
            bars = panels.setdefault(row.title, [])
            if row.status != "ok":
                bars.append((row.precision, row.rung, None, None, row.status))
                continue
            limit = None if row.floor_s is None else 1e3 * row.floor_s
            speedup = f"{row.speedup:.2f}x" if row.speedup else ""
            bars.append((row.precision, row.rung, 1e3 * row.median_s, limit, speedup))
        return panels

    def roofline(self) -> tuple[dict[str, float], float, list[tuple]]:
        """For `plots.roofline`: fp32 eager, and the fastest rung of each other precision."""
        found: dict[tuple[str, str], Row] = {}
        for row in self.rows:
            wanted = row.precision != "fp32" or row.rung == "eager"
            if row.status == "ok" and row.flops_per_s and wanted:
                best = found.setdefault((row.workload, row.precision), row)
                if row.flops_per_s > best.flops_per_s:
                    found[row.workload, row.precision] = row
        points = [
            (row.workload, row.precision, row.flops / row.moved_bytes, row.flops_per_s)
            for row in found.values()
        ]
        used = {precision for _, precision, *_ in points}
        roofs = {name: value for name, value in self.flops_per_s.items() if name in used}
        return roofs, self.memory_bytes_per_s, points

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes/s of what fits in no cache."""
        return self.stream_bytes_per_s[max(self.stream_bytes_per_s, key=int)]

    def _table(self) -> Table:
        head = [
            "",
            "time",
            "spread",
            "speed-up",
            "per second",
            "memory",
            "FLOP/s",
            "of limit",
            "off fp32",
            "learns",
        ]
        rows, before = [], None
        for row in self.rows:
            if row.title != before:
                rows.append([row.title, *[""] * (len(head) - 1)])
                before = row.title
            first = f"  {row.precision} {row.rung}"
            if row.status != "ok":
                rows.append([first, row.status, *[""] * (len(head) - 2)])
                continue
            rows.append(
                [
                    first,
                    duration(row.median_s),
                    f"{row.iqr_s / row.median_s:.0%}",
                    f"{row.speedup:.2f}x" if row.speedup else "-",
                    f"{_figure(row.items_per_s)} {row.unit}",
                    f"{row.peak_bytes / 2**20:,.0f} MiB" if row.peak_bytes is not None else "-",
                    rate(row.flops_per_s, "FLOP/s"),
                    f"{row.share_of_limit:.0%}" if row.share_of_limit is not None else "-",
                    f"{row.error:.1e}" if row.error is not None else "-",
                    f"{row.progress:.0%}" if row.progress is not None else "-",
                ]
            )
        if all(row.peak_bytes is None for row in self.rows):  # as on a CPU
            head, *rows = ([*line[:5], *line[6:]] for line in (head, *rows))
        return Table(
            head, rows, caption=self._title(), facts=self._facts(), right=range(1, len(head))
        )

    def _title(self) -> str:
        e = self.environment
        return f"{e['device']}, torch {e['torch']}, {e['threads']} threads, {e['date']}"

    def _facts(self) -> list[str]:
        rates = ", ".join(
            f"{name} {rate(value, 'FLOP/s')}"
            for name, value in self.flops_per_s.items()
            if value is not None
        )
        memory = rate(self.memory_bytes_per_s, "B/s")
        facts = [
            f"The device's limits, measured: {rates}; memory {memory}.",
            "Speed-up: over fp32 eager in the same run. Of limit: the time that the counted FLOPs, "
            "or the least bytes, take at those rates, over the time measured.",
            "Off fp32: how far the first loss, or the output, is from that of fp32 eager. Learns: "
            "how far the loss falls in five steps, over how far it does there.",
        ]
        facts += [
            f"{row.title}, {row.precision} {row.rung}: {row.status}, {row.reason}."
            for row in self.rows
            if row.status != "ok"
        ]
        if self.environment.get("quick"):
            facts.append("A quick run: small sizes, and nothing that takes long to compile.")
        if not self.trusted:
            facts.append("The limits did not repeat: this machine is busy, measure again.")
        if not self.complete:
            facts.append("The run was stopped before its end.")
        for peer in self.peers:
            if peer.ratio is not None and peer.peer != "torch":
                facts.append(
                    f"{peer.workload} through {peer.peer} in {peer.precision}: {peer.ratio:.2f} of "
                    f"the time of a bare loop{self._memory_ratio(peer)}."
                )
            elif peer.status != "ok":
                facts.append(f"{peer.peer} in {peer.precision}: {peer.status}, {peer.reason}.")
        return facts

    def _memory_ratio(self, peer: PeerRow) -> str:
        for bare in self.peers:
            if (bare.peer, bare.precision) == ("torch", peer.precision) and bare.peak_bytes:
                return f", {peer.peak_bytes / bare.peak_bytes:.2f} of its memory"
        return ""


def load_results(path: str | os.PathLike) -> Results:
    """The results in a file. Raises `OptionError`, which says what is wrong with which file."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # no JSON, or no text
        raise OptionError(f"{path}: damaged, it is no JSON ({error})") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, str) or not schema.startswith(SCHEMA.rpartition(" ")[0]):
        raise OptionError(f"{path}: no results of amp-lab bench")
    if schema != SCHEMA:
        raise OptionError(f"{path}: written as {schema!r}, and this amp_lab reads {SCHEMA!r}")
    content.pop("schema")
    try:
        rows = [_checked(Row, row) for row in content.pop("rows")]
        peers = [_checked(PeerRow, row) for row in content.pop("peers")]
        results = _checked(Results, content | {"rows": [], "peers": []})
        results = dataclasses.replace(results, rows=rows, peers=peers)
        _check_values(results)
    except (KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise OptionError(f"{path}: damaged, {what}") from error
    return results


def _check_values(results: Results) -> None:
    for name in ("device", "torch", "threads", "date"):
        results.environment[name]
    for row in results.rows:
        if row.status not in STATES:
            raise TypeError(f"'status' is {row.status!r}")
        if row.status == "ok" and None in (row.median_s, row.iqr_s, row.items_per_s):
            raise TypeError(f"{row.title}, {row.precision} {row.rung} is ok, but has no time")
    if not results.stream_bytes_per_s or not all(map(str.isdigit, results.stream_bytes_per_s)):
        raise TypeError(f"'stream_bytes_per_s' is {results.stream_bytes_per_s!r}")


def _checked(kind: type, values: object):
    """An instance of a dataclass. Raises `TypeError` for a field too many, or of another type."""
    if not isinstance(values, dict):
        raise TypeError(f"a {kind.__name__.lower()} is {values!r}")
    types_of = typing.get_type_hints(kind)
    for name, value in values.items():
        if name not in types_of:
            raise TypeError(f"{name!r} is no field of a {kind.__name__.lower()}")
        if not _is(value, types_of[name]):
            raise TypeError(f"{name!r} is {value!r}")
    return kind(**values)


def _is(value: object, kind: object) -> bool:
    """Whether a value of JSON has a type, such as ``list[float]`` or ``int | None``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_is(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_is(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(v, arguments[1]) for v in value.values())
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


@dataclass(repr=False)
class Compared(Printed):
    """Several results side by side, by what they have in common."""

    results: list[Results]
    names: list[str]

    def common(self) -> list[tuple[str, str, str, str]]:
        """Workload, size, precision and rung that all have, in the order of the first."""
        keys = [{row.key for row in r.rows if row.status == "ok"} for r in self.results]
        return [row.key for row in self.results[0].rows if all(row.key in k for k in keys)]

    def to_json(self) -> str:
        """What all have, as JSON."""
        by_key = [{row.key: row for row in r.rows} for r in self.results]
        rows = [
            {
                "key": key,
                "median_s": [rows_of[key].median_s for rows_of in by_key],
                "speedup": [rows_of[key].speedup for rows_of in by_key],
            }
            for key in self.common()
        ]
        return json.dumps({"names": self.names, "rows": rows}, indent=1)

    def best_speedups(self) -> dict[str, dict[str, float]]:
        """For `plots.best_speedups`: among what all have, the best of each workload."""
        common, found = set(self.common()), {}
        for name, result in zip(self.names, self.results, strict=True):
            best: dict[str, float] = {}
            for row in result.rows:
                if row.key in common and row.speedup is not None:
                    best[row.title] = max(row.speedup, best.get(row.title, 0.0))
            found[name] = best
        return found

    def _table(self) -> Table:
        by_key = [{row.key: row for row in r.rows} for r in self.results]
        heads = [cell for name in self.names for cell in (name, "speed-up")]
        rows, before = [], None
        for key in self.common():
            found = [rows_of[key] for rows_of in by_key]
            if found[0].title != before:
                before = found[0].title
                rows.append([before, *[""] * len(heads)])
            cells = [f"  {found[0].precision} {found[0].rung}"]
            for row in found:
                cells += [duration(row.median_s), f"{row.speedup:.2f}x" if row.speedup else "-"]
            rows.append(cells)
        return Table(
            ["", *heads],
            rows,
            caption="Time of a step, and speed-up over fp32 eager on the same device",
            facts=[
                f"{name}: {r._title()}" for name, r in zip(self.names, self.results, strict=True)
            ],
            right=range(1, 1 + len(heads)),
        )


def compare_results(results: list[Results], names: list[str]) -> Compared:
    """Results side by side. Raises `OptionError` if nothing was measured in all of them."""
    compared = Compared(results, names)
    if not compared.common():
        raise OptionError(
            f"{', '.join(names)} have nothing in common: no workload of one size, in one "
            "precision, on one rung (was one of them measured with --quick?)"
        )
    return compared


def duration(seconds: float) -> str:
    """Seconds with three digits, in s, ms or us."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(per_second: float | None, unit: str) -> str:
    """A rate with three digits, in the prefix that suits it."""
    if per_second is None:
        return "-"
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if per_second >= factor:
            return f"{per_second / factor:.3g} {prefix}{unit}"
    return f"{per_second:.3g} {unit}"

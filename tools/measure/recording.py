"""What the measuring tools share: their options, and where and when a run took place, as JSON."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from amp_lab.core.allocator import keep_memory
from amp_lab.core.device import describe_device
from amp_lab.core.environment import environment_of
from amp_lab.core.estimates import Estimate
from amp_lab.core.files import atomic_write
from amp_lab.core.timing_result import Comparison


def parser(
    description: str, parts: Iterable[str], *, budget_s: float | None = None
) -> argparse.ArgumentParser:
    """The options that every measuring tool has: which parts to measure, and the file to write.

    One that compares says how long it may at most.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=parts, action="append", help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    if budget_s is not None:
        text = f"seconds of a comparison at most (default: {budget_s:g})"
        parser.add_argument("--budget", type=float, default=budget_s, help=text)
    return parser


def record(
    measures: dict[str, Callable[[], Any]],
    options: argparse.Namespace,
    device: torch.device,
    **circumstances: Any,
) -> None:
    """Measure the parts asked for, print each, and write them to ``options.out``.

    A measure returns its figures, or yields them row by row. The file is written after each part
    and each row, so that a run that is cut short leaves what it had. Random numbers begin anew
    with each part. Memory is kept, so that what the system does counts for none.
    """
    kept = keep_memory()
    result: dict[str, Any] = dict(environment_of(describe_device(device)))
    result["memory kept"] = kept
    result |= circumstances
    for part in options.part or measures:
        torch.manual_seed(0)
        figures = measures[part]()
        if not isinstance(figures, Iterator):
            result[part] = figures
            _say({part: figures})
            _write(options.out, result)
            continue
        result[part] = []
        for row in figures:
            result[part].append(row)
            _say(row)
            _write(options.out, result)


def plain(estimate: Estimate) -> dict[str, Any]:
    """An estimate and its interval, for JSON."""
    return {"median": estimate.median, "interval": list(estimate.interval)}


def times_as_fast(compared: Comparison) -> dict[str, Any]:
    """Samples, whether to trust them, and the speed-up of each function over the first."""
    first, *others = compared.samples_s
    speedups = {name: plain(compared.ratio(first, name)) for name in others}
    return compared.to_json() | {f"times as fast as {first}": speedups}


def times_as_long(compared: Comparison, as_what: str) -> dict[str, Any]:
    """Samples, whether to trust them, and what each takes as a multiple of one of them."""
    others = [name for name in compared.samples_s if name != as_what]
    ratios = {name: plain(compared.ratio(name, as_what)) for name in others}
    return compared.to_json() | {f"times as long as {as_what}": ratios}


def _say(figures: object) -> None:
    print(json.dumps(figures, indent=1, ensure_ascii=False), flush=True)


def _write(path: Path, result: dict) -> None:
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    atomic_write(path, [text.encode()])

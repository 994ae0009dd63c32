"""What the measuring tools share: their options, and where and when a run took place, as JSON."""

import argparse
import datetime
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from amp_lab.device import describe_device
from amp_lab.files import write_whole


def parser(description: str, parts: Iterable[str]) -> argparse.ArgumentParser:
    """The options that every measuring tool has: which parts to measure, and the file to write."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=parts, action="append", help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
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
    with each part.
    """
    result: dict[str, Any] = {
        "device": describe_device(device).name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    } | circumstances
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


def _say(figures: object) -> None:
    print(json.dumps(figures, indent=1, ensure_ascii=False), flush=True)


def _write(path: Path, result: dict) -> None:
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, [text.encode()])

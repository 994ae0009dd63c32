"""Measure this device for the gallery, in about ten minutes, and print what to do with the result.

    pdm run record               # measures, and writes recorded-DEVICE.json
    pdm run record --all         # with the other measuring tools: half an hour on two idle cores
    pdm run record --list        # what is in data/results/, as the table of its README
    pdm run record --write FILE  # checks FILE, and puts its results into data/results/

Nothing else may run meanwhile. A part that fails is said, and the others still run. `--write`
without a file writes the tables of data/results/README.md again. `--tiny` rehearses it.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import gallery
from amp_lab.core.device import pick_device
from amp_lab.core.device_facts import backend_name, device_name
from amp_lab.core.errors import AmpLabError, OptionError
from amp_lab.core.files import read_json, save, try_to_write
from device_run import Part, Settings, missing_packages, run_parts
from result_checks import check_result, gpu_of_result, read_content

SCHEMA = "amp-lab recording 1"


def _tool(name: str) -> list[str]:
    return [f"tools/measure/{name}.py"]


def _part(name: str, limit_s: float, command: list[str], tiny: list[str], full: list[str]) -> Part:
    """A part that writes one file: ``NAME-DEVICE.json``, of which the device is added later."""

    def commands(settings: Settings) -> list[list[str]]:
        out = ["--out", str(settings.out / f"{name}.json")]
        return [[*command, *(tiny if settings.tiny else full), *out]]

    return Part(name, limit_s, commands)


_ONE_ROUND = [
    "--quick",
    "--rounds",
    "1",
    "--workload",
    "convmodel",
    "--precision",
    "fp32",
    "--rung",
    "eager",
]
_ONE_MODEL = ["--model", "resnet18", "--minutes", "1"]
QUICK = (  # by the first word of the file's name
    _part("bench-quick", 270, ["-m", "amp_lab", "bench"], _ONE_ROUND, ["--quick"]),
    _part("latency", 300, _tool("latency"), ["--tiny"], _ONE_MODEL),
)
FULL = (
    QUICK[0],
    *(
        _part(name, 1800, _tool(name), [], [])
        for name in ("latency", "memory", "xray", "numerics", "training")
    ),
)
_NAME = re.compile(r"[a-z-]+-[a-z0-9-]+\.json", re.ASCII)  # of a result in a recording


def record_device(
    *,
    device: str | None = None,
    out: Path | None = None,
    name: str | None = None,
    minutes: float = 10,
    parts: tuple[Part, ...] = QUICK,
    tiny: bool = False,
) -> Path:
    """Measure a device, print it beside the gallery, and print what to do with the result.

    Args:
        device: As for `pick_device`.
        out: The file to write. By default it is ``recorded-NAME.json`` in the current folder.
        name: What the device is called in the names of files. By default its own name is used.
        minutes: The most minutes that all parts together may take.
        parts: What to measure.
        tiny: Whether to rehearse with small sizes. Such a result is refused by `add_recording`.

    Returns:
        The path of the file, which has all results.

    Raises:
        OptionError: If the file cannot be written, or if every part failed.
        DeviceError: If the device is not in this machine.
    """
    torch_device = pick_device(device)
    name = name or slug(torch_device)
    out = (out or Path(f"recorded-{name}.json")).resolve()
    try:
        try_to_write(out)
    except OSError as error:
        raise OptionError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        # Only to see if the GPU is known.
        gpu_of_result(device_name(torch_device), backend_name(torch_device))
    except OptionError as error:
        print(f"{error}: its rates cannot be checked; add a row to src/amp_lab/core/gpus.py")
    folder = Path(tempfile.mkdtemp(prefix="amp-lab-record-"))  # removed only after success
    outcomes = run_parts(list(parts), Settings(str(torch_device), tiny, folder), 60 * minutes)
    results = {}
    for outcome in outcomes:
        path = folder / f"{outcome.part}.json"
        if outcome.status == "held" and path.exists():
            path = path.rename(folder / f"{outcome.part}-{name}.json")
            results[path.name] = read_json(path)
    if not results:
        raise OptionError(f"nothing was measured; the output of each part is in {folder}")
    content = {"schema": SCHEMA, "results": results}
    try:
        save(out, [json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"])
    except OptionError as error:
        raise OptionError(f"{error}; the results are kept in {folder}") from error
    _show([folder / file for file in results], out, name)
    shutil.rmtree(folder)
    return out


def slug(device: Any) -> str:
    """The name that this device's files have: ``nvidia-h200``, ``epyc-2-cores``."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    if device.type == "cpu":
        name += f"-{os.cpu_count()}-cores"
    return name


def _show(files: list[Path], out: Path, name: str) -> None:
    """Print the gallery with this device as its last row, the verdict, and the lines to type."""
    benches = [path for path in files if path.name.startswith("bench")]
    print(f"\n{gallery.gallery(benches)}\n")
    if benches:
        print("The last row is this device.")
    print(f"Written: {out}")
    for path in files:
        try:
            check_result(path)
        except OptionError as error:
            print(f"This result cannot go into the gallery: {error}")
            return
    print(f"{REQUEST.format(file=out.name, branch=f'record-{name}', name=name)}")


REQUEST = """To add it, put the file into a checkout of your fork, and type there:

git switch -c {branch}
pdm run record --write {file}
git add data/results
git commit -m "Record {name}"
git push -u origin {branch}

GitHub answers with the address at which you open the pull request."""


def add_recording(path: Path) -> list[Path]:
    """Put the results of a recording into data/results/, if all of them pass `check_result`.

    Args:
        path: A file that `record_device` wrote.

    Returns:
        The files that were written.

    Raises:
        OptionError: If a result is refused, with its file, field and reason. Then none is written.
    """
    content = read_content(path)
    if content.get("schema") != SCHEMA:
        raise OptionError(f"{path}: schema: is not {SCHEMA!r}, which `pdm run record` writes")
    results = content.get("results")
    if not isinstance(results, dict) or not results:
        raise OptionError(f"{path}: results: there are none")
    copies = []
    with tempfile.TemporaryDirectory() as folder:
        for name, result in results.items():
            if not _NAME.fullmatch(name):
                raise OptionError(f"{path}: results: {name!r} is no name of a result")
            copy = Path(folder) / name
            copy.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")
            check_result(copy)
            copies.append(copy)
        for copy in copies:
            save(gallery.RESULTS / copy.name, [copy.read_bytes()])
    return [gallery.RESULTS / copy.name for copy in copies]


def write_tables() -> None:
    """Check what is in data/results/, and write the tables of its README."""
    for path in sorted(gallery.RESULTS.glob("*.json")):
        if not path.name.startswith("first-gpu"):  # which has no times
            check_result(path)
    readme = gallery.RESULTS / "README.md"
    save(readme, [gallery.with_tables(readme.read_text(encoding="utf-8")).encode()])


def main(arguments: list[str] | None = None) -> int:
    """Measure, list or write.

    Returns 0; 1 if a part failed; 2, with one line on stderr, for what a user can mend.
    """
    parser = argparse.ArgumentParser(
        prog="record", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", help="default: AMP_LAB_DEVICE, else accelerator, else cpu")
    parser.add_argument("--name", help="what the device is called in the files' names")
    parser.add_argument("--minutes", type=float, help="for all parts together (default: 10)")
    parser.add_argument("--all", action="store_true", help="run every measuring tool")
    parser.add_argument("--tiny", action="store_true", help="small sizes: a rehearsal")
    parser.add_argument("--out", type=Path, help="file to write (default: recorded-DEVICE.json)")
    parser.add_argument("--list", action="store_true", help="print the table of all devices")
    parser.add_argument("--write", nargs="*", type=Path, metavar="FILE", help="add recordings")
    options = parser.parse_args(arguments)
    try:
        return _do(options)
    except AmpLabError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # such as a full disk, on which no part can write
        print(f"record: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _do(options: argparse.Namespace) -> int:
    """Do what the options ask for; returns 1 if a part of a measurement failed, else 0."""
    if options.list:
        print(gallery.gallery())
        return 0
    if options.write is not None:
        for path in options.write:
            for written in add_recording(path):
                print(f"Written: {written}")
        write_tables()
        print(gallery.gallery())
        return 0
    missing = missing_packages()
    if missing:
        raise OptionError(f"not installed here: {', '.join(missing)}")
    minutes = options.minutes
    if minutes is None:
        minutes = 60 if options.all else 10
    if not minutes > 0:
        raise OptionError(f"--minutes {minutes:g} leaves no time")
    parts = FULL if options.all else QUICK
    written = record_device(
        device=options.device,
        out=options.out,
        name=options.name,
        minutes=minutes,
        parts=parts,
        tiny=options.tiny,
    )
    return int(len(read_json(written)["results"]) < len(parts))


if __name__ == "__main__":
    sys.exit(main())

"""Try everything on this machine's GPU in one go: `python3 tools/first_gpu.py --minutes 25`.

For a bare machine: it needs Python, torch 2.11 or later, torchvision, numpy, matplotlib,
scikit-learn and tqdm, nothing installed and no network. The parts run in the order of their worth,
each in a process of its own with a limit of its own, and one that fails does not stop the next.
What is found is written as it comes, to `--out`: `first-gpu.json`, for data/results/, and the
output of each part. The table that is printed last says what held, what failed, with the error's
line, and what there was no time for.

`--jobs 8` is for a machine that is lent for minutes. `--tiny` rehearses it with small sizes, on any
device, a CPU too.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from device_run import ROOT, Outcome, Settings, missing_packages, run_parts, table
from first_gpu_parts import PARTS

sys.path.append(str(ROOT / "src"))


def main(argv: list[str] | None = None) -> int:
    """Run the parts; return 0 if all held, 1 if some did not, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(
        prog="first_gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25, help="for all parts together")
    parser.add_argument("--device", default=os.environ.get("AMP_LAB_DEVICE") or "cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes: a rehearsal")
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many parts that time nothing run at a time"
    )
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS])
    parser.add_argument("--out", type=Path, default=Path("first-gpu"), help="folder to write into")
    options = parser.parse_args(argv)
    settings = Settings(options.device, options.tiny, options.out, options.jobs)
    missing = missing_packages()
    if missing:
        print(f"first_gpu: not installed here: {', '.join(missing)}", file=sys.stderr)
        return 2
    if not options.minutes > 0:
        print(f"first_gpu: --minutes {options.minutes:g} leaves no time", file=sys.stderr)
        return 2
    if options.jobs < 1:
        print(f"first_gpu: --jobs {options.jobs} runs nothing", file=sys.stderr)
        return 2
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        outcomes = _run(options, settings)
    except OSError as error:  # a full disk, or a folder that cannot be written
        print(f"first_gpu: {error.filename or options.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(table(outcomes))
    print(f"\nWritten: {options.out / 'first-gpu.json'}")
    return 0 if all(outcome.status == "held" for outcome in outcomes) else 1


def _run(options: argparse.Namespace, settings: Settings) -> list[Outcome]:
    """Run the parts that were asked for, and write what is known after each."""
    chosen = [part for part in PARTS if not options.part or part.name in options.part]

    def write_so_far(outcomes: list[Outcome]) -> None:
        write(outcomes, settings)

    return run_parts(chosen, settings, options.minutes * 60, write_so_far)


@functools.cache
def machine(device: str) -> str:
    """What the figures come from: the device, torch, and the commit of this checkout."""
    import torch

    from amp_lab.core.device_facts import device_name

    command = ["git", "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git, as in the image
        commit = ""
    commit = commit or "no commit known"
    here = torch.device(device)
    is_here = torch.get_device_module(here).is_available()
    name = device_name(here) if is_here else f"no {device}"
    return f"{name}, torch {torch.__version__}, {commit}"


def write(outcomes: list[Outcome], settings: Settings) -> None:
    """Write what is known so far, whole or not at all."""
    record = {
        "schema": "amp-lab first gpu 1",
        "device": settings.device,
        "machine": machine(settings.device),
        "tiny": settings.tiny,
        "date": datetime.date.today().isoformat(),
        "parts": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    path = settings.out / "first-gpu.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())

"""Record this device for the gallery: run the measuring tools, and print what to paste.

    pdm run record            # the parts below, about 20 minutes on two idle cores
    pdm run record --list     # what is in data/results/, as the table of its README

A part that fails is said, and the others still run. Nothing else may run meanwhile, and a file says
of its own times whether they are to be trusted. The files go into data/results/, called after the
device; add them with a pull request, and `python tools/record.py --write` puts them into the table.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from amp_lab.device import device_name, pick_device
from amp_lab.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results"
PARTS = {  # what writes a file, by the first word of its name
    "bench-quick": ["-m", "amp_lab", "bench", "--quick"],
    "latency": ["tools/measure_latency.py"],
    "memory": ["tools/measure_memory.py"],
    "xray": ["tools/measure_xray.py"],
    "numerics": ["tools/measure_numerics.py"],
    "training": ["tools/measure_training.py"],
}
BEGIN, END = "<!-- gallery: made by tools/record.py --write -->", "<!-- end of the gallery -->"


def slug() -> str:
    """The name that this device's files have: ``nvidia-h200``, ``epyc-2-cores``."""
    device = pick_device()
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return f"{name}-{os.cpu_count()}-cores" if device.type == "cpu" else name


def run(name: str, parts: list[str]) -> list[str]:
    """Run the parts in turn; returns those that failed."""
    failed = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(("notebooks", "tools"))}
    for part in parts:
        start = time.monotonic()
        file = RESULTS / f"{part}-{name}.json"
        line = [sys.executable, *PARTS[part], "--out", str(file)]
        code = subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode
        if code:
            failed.append(part)
        ended = f"failed with {code}" if code else f"wrote {file.relative_to(ROOT)}"
        print(f"{part}: {ended}, after {(time.monotonic() - start) / 60:.0f} min", flush=True)
    return failed


def ratio(value: float | None) -> str:
    """A speed-up for the table; a dash where there is none."""
    return "–" if value is None else f"{value:.3g}x"


def row(bench: Path) -> list[str]:
    """A row of the gallery, of a device's file of `amp-lab bench` and its others beside it."""
    found = json.loads(bench.read_text())
    about, rates = found["environment"], found["flops_per_s"]
    speed = {p: rates[p] and rates[p] / rates["fp32"] for p in ("tf32", "fp16", "bf16")}
    rows = [r for r in found["rows"] if r["status"] == "ok" and r["workload"] == "convmodel"]
    best = max((r for r in rows if r["trusted"]), key=lambda r: r["speedup"], default=None)
    top = "–" if best is None else f"{ratio(best['speedup'])} ({best['precision']}, {best['rung']})"
    latency = bench.with_name(re.sub("^bench(-quick)?", "latency", bench.name))
    one = "–"
    if latency.exists():
        of = {r["model"]: r for r in json.loads(latency.read_text())["latency"]}
        if "resnet18" in of and of["resnet18"]["trusted"]:
            fastest = of["resnet18"]["fastest of the others of torch"]
            speeds = of["resnet18"]["times as fast as fp32"]
            one = f"{ratio(speeds[fastest]['median'])} ({fastest})" if fastest in speeds else "fp32"
    device = f"{about['device']}, {about['threads']} threads" if "CPU" in about["backend"] else ""
    return [
        device or about["device"],
        about["torch"],
        about["date"],
        *(ratio(speed[p]) for p in ("tf32", "fp16", "bf16")),
        top,
        one,
    ]


def gallery() -> str:
    """The table of all devices, in Markdown."""
    head = ["device", "torch", "date", "TF32", "fp16", "bf16", "ConvModel", "one image"]
    rows = [head, ["---"] * len(head), *map(row, sorted(RESULTS.glob("bench-*.json")))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def written(text: str) -> str:
    """A README whose table is that of the files."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{gallery()}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, print the row to paste; return 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--name", help="what the device is called in the files' names")
    parser.add_argument("--list", action="store_true", help="print the table of all devices")
    parser.add_argument("--write", action="store_true", help="write it into data/results/README.md")
    options = parser.parse_args(arguments)
    failed = []
    if not (options.list or options.write):
        name = options.name or slug()
        failed = run(name, options.part or list(PARTS))
        print(f"\nAdd data/results/*-{name}.json, run `pdm run record --write`, and paste this:\n")
    if options.write:
        readme = RESULTS / "README.md"
        write_whole(readme, [written(readme.read_text()).encode()])
    print(gallery())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

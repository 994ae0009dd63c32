"""How long `xray`, `memory`, `fit` and `migrate` take in one checkout against another, in turns.

    python tools/measure/checkouts.py OLD --out speed.json

OLD is the folder of another checkout; the other one is that of this file. Each turn is a process of
its own, first of one and then of the other, so that a drift of the machine meets both. Of its calls
the fastest counts. A ratio above 1 says that this checkout is slower. Nothing else may run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
SNIPPETS = ROOT / "tests" / "migrate" / "snippets"
TASKS = ("xray", "memory", "fit", "migrate")
CALLS = 5  # in a process, of which the fastest counts
TURNS = 15


def main() -> int:
    """Measure each task, print the ratios with their intervals, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    results = {}
    for task in options.task or TASKS:
        results[task] = compare(task, options.old.resolve(), options.turns)
        median, (low, high) = results[task]["ratio"], results[task]["interval"]
        print(f"{task:<8} {median:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


def compare(task: str, old: Path, turns: int) -> dict:
    """Time a task in the old checkout and in this one, in turns.

    Returns the ``seconds`` of each by turn, and the median ``ratio`` of this checkout's to the old
    one's with its ``interval``.
    """
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    for turn in range(turns):
        order = [("old", old), ("new", ROOT)]
        if turn % 2:
            order.reverse()
        for name, checkout in order:
            seconds[name].append(in_process(task, checkout))
    ratios = np.array(seconds["new"]) / np.array(seconds["old"])  # (turns,)
    # Bootstrap: the 95 % interval of the medians of turns that are drawn with replacement.
    draws = np.random.default_rng(0).integers(turns, size=(10_000, turns))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return {
        "ratio": float(np.median(ratios)),
        "interval": [float(low), float(high)],
        "seconds": seconds,
    }


def in_process(task: str, checkout: Path) -> float:
    """Seconds of the fastest call of a task, in a new process with the package of a checkout."""
    folder = checkout / "src"
    if not folder.exists():
        folder = checkout / "notebooks"
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--inside", task],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(process.stdout.splitlines()[-1])


def fastest_call(task: str) -> float:
    """Seconds of the fastest of `CALLS` calls, after one that loads what the task needs."""
    makers = {"xray": xray_call, "memory": memory_call, "fit": fit_call, "migrate": migrate_call}
    run = makers[task]()
    times = []
    for _ in range(CALLS + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])  # without the first call


def xray_call():
    """An X-ray of a ResNet-18."""
    import torch
    import torchvision

    from amp_lab import xray

    model = torchvision.models.resnet18()
    x = torch.randn(2, 3, 64, 64)
    return lambda: xray(model, x)


def memory_call():
    """A forecast of a transformer."""
    import torch

    from amp_lab import forecast_memory

    model = torch.nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    x = torch.randn(2, 16, 64)
    return lambda: forecast_memory(model, x, x, precision="bf16")


def fit_call():
    """An epoch of a small network, most of whose time is the loop's."""
    import torch

    from amp_lab import Precision, fit

    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))] * 400
    how = {"precision": Precision.FP32, "device": torch.device("cpu"), "optimizer": optimizer}
    return lambda: fit(model, lambda epoch, batch: batches, epochs=1, **how)


def migrate_call():
    """Every example of old code, one after another."""
    import re

    from amp_lab.migrate import migrate_source

    programs: list[str] = []
    for name in ("torch", "right", "wrong"):
        text = (SNIPPETS / f"{name}.txt").read_text(encoding="utf-8")
        programs += re.split(r"^===.*\n", text, flags=re.MULTILINE)[1:]

    def run() -> None:
        for program in programs:
            migrate_source(program.partition("--- becomes\n")[0])

    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        print(fastest_call(sys.argv[2]))
        sys.exit(0)
    sys.exit(main())

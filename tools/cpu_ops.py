"""What torch refuses or computes slowly in 16 bits on each instruction set of x86-64 CPUs.

`cpu_ops.py --out FILE` runs a training step of single layers in fp32, and in bf16 and fp16 under
autocast, in a process for each instruction set that this CPU can emulate (those of `cpu_matrix`).
The file has the time of each as a multiple of fp32's in the same process, or the error. The limits
hold for fp32 too, so that a ratio compares like with like. `--table` prints the file as the table
of docs/hardware.md.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from amp_lab.core.cpu import matrix_instructions
from amp_lab.core.device_facts import device_name
from amp_lab.core.errors import first_line
from amp_lab.core.files import atomic_write
from amp_lab.core.timing import measure
from cpu_matrix import RUNS, Run, can_do

CPU = torch.device("cpu")
SETS = ("sse41", "avx2", "avx512", "avx512-bf16", "native")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cases() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Layers by name, each with an input; small, since some are slow."""
    torch.manual_seed(0)
    image, sequence = torch.randn(4, 32, 16, 16), torch.randn(8, 4, 64)  # (N, C, H, W), (T, B, C)
    return {
        "linear": (nn.Linear(256, 256), torch.randn(256, 256)),
        "conv1d": (nn.Conv1d(32, 32, 3), torch.randn(4, 32, 64)),
        "conv2d": (nn.Conv2d(32, 32, 3), image),
        "conv2d, depthwise": (nn.Conv2d(32, 32, 3, groups=32), image),
        "conv3d": (nn.Conv3d(16, 16, 3), torch.randn(2, 16, 8, 8, 8)),
        "conv_transpose2d": (nn.ConvTranspose2d(32, 32, 3), image),
        "attention": (_Attention(), torch.randn(3, 4, 4, 64, 32)),
        "LSTM": (nn.LSTM(64, 64), sequence),
        "GRU": (nn.GRU(64, 64), sequence),
        "layer_norm": (nn.LayerNorm(256), torch.randn(256, 256)),
        "softmax": (nn.Softmax(-1), torch.randn(256, 256)),
    }


class _Attention(nn.Module):
    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv  # (3, B, H, T, D)
        return F.scaled_dot_product_attention(query, key, value)


def step(layer: nn.Module, data: torch.Tensor, dtype: torch.dtype | None) -> Callable[[], None]:
    """A function that runs the layer under autocast to `dtype`, or in fp32 if `dtype` is None.

    It runs the forward and the backward pass.
    """
    is_enabled = dtype is not None

    def run() -> None:
        inputs = data.clone().requires_grad_()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=is_enabled):
            output = layer(inputs)
        if isinstance(output, tuple):  # of an LSTM: the output and the last states
            output = output[0]
        output.float().sum().backward()

    return run


def measured_here() -> dict[str, Any]:
    """Measure each case in each of `DTYPES` in this process.

    Returns the instructions that the process uses and, by case and dtype, the time as a multiple of
    fp32's, or the error of a layer that raises.
    """
    times: dict[str, dict[str, Any]] = {}
    for name, (layer, data) in cases().items():
        fp32_s = measure(step(layer, data, None), device=CPU, repeats=15).median_s
        times[name] = {}
        for label, dtype in DTYPES.items():
            try:
                seconds = measure(step(layer, data, dtype), device=CPU, repeats=15).median_s
            except RuntimeError as error:
                times[name][label] = first_line(error)
            else:
                times[name][label] = round(seconds / fp32_s, 2)
    return {"instructions": matrix_instructions(), "times as long as fp32": times}


def table(results: dict[str, Any], dtype: str) -> list[str]:
    """The file as a Markdown table, a column for each instruction set."""
    sets = results["instruction sets"]
    heading = " | ".join(sets)
    rule = "---:|" * len(sets)
    lines = [f"| layer | {heading} |", f"|---|{rule}"]
    times_of_sets = [result["times as long as fp32"] for result in sets.values()]
    for name in times_of_sets[0]:
        values = [times[name][dtype] for times in times_of_sets]
        cells = ["raises" if isinstance(value, str) else f"{value:.2g}" for value in values]
        row = " | ".join(cells)
        lines.append(f"| {name} | {row} |")
    return lines


def print_tables(file: Path) -> None:
    """Print the tables of a file that this tool has written."""
    results = json.loads(file.read_text())
    for dtype in DTYPES:
        print(f"{dtype}, times as long as fp32:\n")
        for line in table(results, dtype):
            print(line)
        print()


def measured_as(run: Run) -> dict[str, Any]:
    """What `measured_here` returns with the instructions of a run.

    It is measured in a process of its own, since torch reads the limits only when it starts.
    """
    command = [sys.executable, __file__, "--here"]
    environment = os.environ | run.settings
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    last_line = process.stdout.splitlines()[-1]
    return json.loads(last_line)


def measure_to(file: Path) -> None:
    """Measure each instruction set that this CPU can emulate, and write a file."""
    runs = {run.name: run for run in RUNS}
    sets = {}
    for name in SETS:
        if can_do(runs[name]):
            print(name, flush=True)
            sets[name] = measured_as(runs[name])
    results = {
        "device": device_name(CPU),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "instruction sets": sets,
    }
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    atomic_write(file, [text.encode()])


def main() -> int:
    """Measure, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a file as tables")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured_here()))
    elif options.table:
        print_tables(options.table)
    elif options.out:
        measure_to(options.out)
    else:
        parser.error("give --out or --table")
    return 0


if __name__ == "__main__":
    sys.exit(main())

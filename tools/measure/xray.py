"""Measure what an X-ray and a memory forecast cost: `python tools/measure/xray.py --out FILE`.

Each figure is of a Python of its own, which computes nothing before: "first" is the first call
after the imports, as a command makes it, "again" a second one, "peak" the most memory that the
process ever held. The fastest of `--turns` processes counts, since what else the machine does can
only slow one down. Beside them stand limits, which a machine of two cores should keep.

- xray: ResNet-50, batch 8, on each kind of device;
- ops: the op table of each;
- memory: for ResNet-50 the forecast in three precisions with the largest batch, and that batch
  alone;
- transformer: the same for a transformer of 6.6 billion parameters, built on `meta`, and its X-ray.
"""

import functools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Required, TypedDict

import torch
import torchvision

from amp_lab.core.backends import BACKENDS
from amp_lab.core.device import pick_device
from amp_lab.models.gpt import Gpt, Size
from amp_lab.tracing.memory import compare_memory, largest_batch
from amp_lab.tracing.op_table import op_table
from amp_lab.tracing.xray import xray
from recording import parser, record

PARTS = ("xray", "ops", "memory", "transformer")
IMAGE = (3, 224, 224)
LIMITS = {  # seconds of the first call, bytes of the process
    "xray": {"seconds": 3},
    "ops": {"seconds": 10},
    "memory": {"seconds": 3},
    "transformer": {"seconds": 60, "bytes": 3 * 10**9},
}


class Settings(TypedDict, total=False):
    """What a forecast is asked for."""

    memory_bytes: Required[str]
    optimizer: str
    input_dtype: torch.dtype


def resnet50():
    """The model, without memory for its weights."""
    with torch.device("meta"):
        return torchvision.models.resnet50()


def transformer():
    """A language model of 6.6 billion parameters, without memory for them."""
    with torch.device("meta"):
        return Gpt(Size(4096, heads=32, depth=32), 32000)


def work(part, what):
    """Build the model of a task, and return the function to measure: see `TASKS`."""
    if part == "xray":
        resnet = resnet50()
        images = torch.empty(8, *IMAGE, device="meta")
        return lambda: str(xray(resnet, images, device_type=what))
    if part == "ops":
        return lambda: str(op_table(what))
    if part == "transformer":
        model = transformer()
        shape = (1, 2048)
        settings = Settings(memory_bytes="141GB", optimizer="adamw", input_dtype=torch.int64)
    else:
        model = resnet50()
        shape = (1, *IMAGE)
        settings = Settings(memory_bytes="24GiB")
    if what == "largest_batch":
        return lambda: largest_batch(model, shape, precision="fp16", **settings)
    if what == "three precisions":
        return lambda: str(compare_memory(model, shape, **settings))
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    return lambda: str(xray(model, tokens))


# The tasks of each part: a kind of device, or what is forecast.
TASKS = {
    "xray": BACKENDS,
    "ops": BACKENDS,
    "memory": ("largest_batch", "three precisions"),
    "transformer": ("largest_batch", "three precisions", "xray"),
}


def run_alone(part, what):
    """Do one task in this process, which is new, and print what it took as JSON."""
    start = time.perf_counter()
    call = work(part, what)
    built = time.perf_counter()
    call()
    called = time.perf_counter()
    call()
    called_again = time.perf_counter()
    figures = {
        "built": built - start,
        "first": called - built,
        "again": called_again - called,
        "peak": peak_bytes(),
    }
    print(json.dumps(figures))


def peak_bytes():
    """The most memory that this process ever held."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, where it is in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux getrusage would count the process that started this one too.
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM"):  # such as ``VmHWM:  123456 kB``
            _, kibibytes, _ = line.split()
            return 1024 * int(kibibytes)
    raise RuntimeError(f"{status}: has no VmHWM")


def measure(part, turns):
    """The fastest of some processes for each task of a part."""
    for what in TASKS[part]:
        code = f"import xray; xray.run_alone({part!r}, {what!r})"
        figures = []
        for _ in range(turns):
            alone = subprocess.run(
                [sys.executable, "-c", code],
                cwd=Path(__file__).parent,
                check=True,
                stdout=subprocess.PIPE,
            )
            figures.append(json.loads(alone.stdout))
        fastest = min(figures, key=lambda figures_of_process: figures_of_process["first"])
        limit = LIMITS[part]
        is_fast = fastest["built"] + fastest["first"] <= limit["seconds"]
        is_small = "bytes" not in limit or fastest["peak"] <= limit["bytes"]
        yield {"what": what, **fastest, "limit": limit, "within": is_fast and is_small}


def main():
    """Measure the parts asked for, print each figure, and write them all as JSON."""
    options_parser = parser(__doc__, PARTS)
    options_parser.add_argument("--turns", type=int, default=3, help="processes for each figure")
    options = options_parser.parse_args()
    measures = {part: functools.partial(measure, part, options.turns) for part in PARTS}
    record(measures, options, pick_device())


if __name__ == "__main__":
    main()

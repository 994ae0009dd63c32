"""Measure what several processes buy and send: `python tools/measure/scale.py --out FILE`.

Everything is ResNet-18 on digits at 64x64, with 32 images and one thread for each process. Speed is
that of `amp-lab train` itself, in ratios of runs that took turns, with intervals. The parts are

- speed: images per second in 2 processes against 1, with DDP and FSDP2, in each reduce dtype,
  and the limit: 2 processes that train side by side and exchange nothing;
- sent: what a step of each sends, counted.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from amp_lab.core.device import pick_device
from amp_lab.core.precision import Precision
from amp_lab.core.timing import Rounds
from amp_lab.models.build import build_model
from amp_lab.parallel.collectives import count_communication
from amp_lab.train.distributed.process_group import join
from amp_lab.train.run_folder import METRICS
from recording import parser, plain, record

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"  # where `course` is
PRECISIONS = ["fp32", "bf16"]
BATCH = 32  # images of each process
WAYS = {  # what is measured: processes and options
    "1 process": (1, []),
    "2 processes apart": (2, []),  # the limit: they sum nothing, but share caches and memory
    "1 process, ddp": (1, ["--parallel", "ddp"]),
    "2 processes, ddp": (2, ["--parallel", "ddp"]),
    "2 processes, ddp, bf16 sums": (2, ["--parallel", "ddp", "--reduce-dtype", "bf16"]),
    "2 processes, fsdp": (2, ["--parallel", "fsdp"]),
    "2 processes, fsdp, bf16 sums": (2, ["--parallel", "fsdp", "--reduce-dtype", "bf16"]),
}


def images_per_s(processes: int, options: list[str], precision: str, device: torch.device) -> float:
    """Images per second of all processes together, in an epoch after the first.

    With ``--parallel`` in `options`, the processes train one model. Else each trains its own, on as
    many images as its share would be.
    """
    command = [sys.executable, "-m"]
    runs = processes
    batch = BATCH
    if "--parallel" in options:  # one run, in all processes
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        runs = 1
        batch = BATCH * processes
    command += ["amp_lab", "train", "--dataset", "digits", "--model", "resnet18"]
    command += ["--image-size", "64", "--batch-size", str(batch), "--limit", str(8 * batch)]
    command += ["--epochs", "3", "--precision", precision, "--device", device.type, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / str(number) for number in range(runs)]
        started = []
        for out in outs:
            process = subprocess.Popen(
                [*command, "--out", str(out)], env=environment, stdout=subprocess.DEVNULL
            )
            started.append(process)
        codes = [process.wait() for process in started]  # of all, before their folder is removed
        if any(codes):
            raise RuntimeError(f"a run failed: {' '.join(command)}")
        rates = [_rates(out) for out in outs]
    if runs == 1:
        return max(rates[0])  # of the faster epoch
    # Of several runs, the second of three epochs: during the last one, another may have ended.
    return sum(second for second, _ in rates)


def _rates(out: Path) -> list[float]:
    """Images per second in each epoch after the first, which sets everything up."""
    names, *rows = (out / METRICS).read_text().splitlines()
    column = names.split(",").index("images_per_s")
    return [float(row.split(",")[column]) for row in rows[1:]]


def measure_speed(device: torch.device, turns: int, precisions: list[str]) -> Iterator[dict]:
    """Images per second, and as a multiple of those of 1 process in the same turn."""
    for precision in precisions:
        rounds = Rounds(device)
        order = list(WAYS)
        for _ in range(turns):
            with rounds.next() as seconds:  # a dict to fill: the seconds of an image by way
                for way in order:
                    processes, options = WAYS[way]
                    seconds[way] = 1 / images_per_s(processes, options, precision, device)
                    rounds.watch.calibrate()  # a round takes minutes
            order.reverse()  # so that no way is always first
        compared = rounds.comparison(list(WAYS))
        for way in WAYS:
            yield {
                "precision": precision,
                "way": way,
                "images_per_s": plain(compared.time_s(way).rate(1)),
                "times_1_process": plain(compared.ratio("1 process", way)),
                "samples_s": list(compared.samples_s[way]),  # of one image
                "disturbed": compared.disturbed,
                "trusted": compared.trusted,
                "reason": compared.reason,
            }


def sent(kind: str, reduce_dtype: str, precision: str, device_type: str, batch: int) -> dict:
    """Bytes that a rank sends in one step, after a first one, by collective and dtype."""
    with join(kind, torch.device(device_type), reduce_dtype=reduce_dtype) as ranks:
        torch.manual_seed(0)
        model = build_model("resnet18", 10).to(ranks.device)
        trained = ranks.wrap(model, Precision(precision))
        images = torch.randn(batch, 3, 64, 64, device=ranks.device)
        for _ in range(2):
            with count_communication() as communication:
                trained(images).float().square().mean().backward()
        rows = {}
        for (operation, dtype), total in communication.totals().items():
            name = f"{operation} {dtype}".replace("torch.", "")  # such as ``all_reduce float32``
            rows[name] = total.sent_bytes
        return {"sent_bytes": communication.sent_bytes, "of": rows}


def measure_sent(device: torch.device) -> Iterator[dict]:
    """Yield what a step sends with DDP and FSDP2, beside the bytes of all parameters in fp32."""
    sys.path.append(str(NOTEBOOKS))
    from course.processes import run_workers

    parameter_bytes = 4 * sum(p.numel() for p in build_model("resnet18", 10).parameters())
    # DDP sends gradients of fp32 weights, whatever autocast does.
    precisions_of = {"ddp": ["fp32"], "fsdp": ["fp32", "bf16"]}
    for kind, precisions in precisions_of.items():
        for reduce_dtype in ("fp32", "bf16"):
            for precision in precisions:
                first, second = run_workers(
                    sent,
                    processes=2,
                    kind=kind,
                    reduce_dtype=reduce_dtype,
                    precision=precision,
                    device_type=device.type,
                    batch=BATCH,
                )
                assert first == second, "both ranks send the same"
                yield {
                    "parallel": kind,
                    "reduce_dtype": reduce_dtype,
                    "precision": precision,
                    "parameter_bytes": parameter_bytes,
                    **first,
                }


def main() -> None:
    """Measure the parts asked for, print each, and write them all."""
    options_parser = parser(__doc__, ("speed", "sent"))
    turns = "of speed (default: 16; fewer than 12 undisturbed ones are not trusted)"
    options_parser.add_argument("--turns", type=int, default=16, help=turns)
    options_parser.add_argument(
        "--precision", choices=PRECISIONS, action="append", help="default: both"
    )
    options = options_parser.parse_args()
    device = pick_device()
    precisions = options.precision or PRECISIONS
    measures = {
        "speed": lambda: measure_speed(device, options.turns, precisions),
        "sent": lambda: measure_sent(device),
    }
    record(measures, options, device, batch_of_a_process=BATCH, threads_of_a_process=1)


if __name__ == "__main__":
    main()

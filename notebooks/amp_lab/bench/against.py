"""Our loop and those of other libraries against a bare one: same model, data and precision."""

import copy
import functools
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_lab.bench.results import PeerRow
from amp_lab.errors import OptionError, first_line
from amp_lab.peers import PEERS
from amp_lab.precision import Precision
from amp_lab.timing import allocated_bytes, is_out_of_memory, measure
from amp_lab.training.models import build_model


def run_peers(
    device: torch.device,
    precisions: Sequence[Precision],
    rows: list[PeerRow],
    *,
    quick: bool = False,
    rounds: int = 10,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Time a training step of ResNet-18 through each library of `amp_lab.peers`; add to `rows`.

    They take turns. A ratio is the median over the turns of its time over that of the bare loop in
    the same turn, so that a machine that slows down slows both. A library that is not installed, or
    refuses the precision, is reported as not run, and one that fails as failed.
    """
    accelerator = device.type != "cpu"
    batch, size = (256, 224) if accelerator and not quick else (64, 32)
    steps = 10 if accelerator else 2  # of one sample
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size).to(device)
    labels = (torch.arange(batch) % 10).to(device)
    model = build_model("resnet18", 10).to(device)
    title = f"resnet18 {batch}x3x{size}x{size}"
    for precision in precisions:
        say(f"{title} through {', '.join(PEERS)} in {precision}")
        here = {}
        for name, build in PEERS.items():
            row = PeerRow(name, title, str(precision), "ok")
            rows.append(row)
            held = allocated_bytes(device)
            own = copy.deepcopy(model)  # each trains its own
            optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True)
            try:
                run = build(own, optimizer, _loss, (images, labels), precision, device)
                m = measure(functools.partial(run, steps), device=device, warmup=1, repeats=1)
            except OptionError as error:
                row.status, row.reason = "not run", str(error)
                continue
            except RuntimeError as error:
                row.status = "out of memory" if is_out_of_memory(error) else "failed"
                row.reason = first_line(error)
                continue
            row.peak_bytes = None if m.peak_bytes is None else m.peak_bytes - held
            here[name] = row, run
        for turn in range(rounds):
            order = list(here.values())
            for row, run in order if turn % 2 == 0 else reversed(order):
                m = measure(
                    functools.partial(run, steps),
                    device=device,
                    warmup=int(accelerator),  # `measure` empties the cache, which this fills again
                    repeats=1,
                )
                row.samples_s.append(m.samples_s[0] / steps)
        if "torch" not in here:
            continue
        bare = here["torch"][0].samples_s
        for row, _ in here.values():
            row.ratio = statistics.median(a / b for a, b in zip(row.samples_s, bare, strict=True))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets)

"""Measure what the numerics tools cost: `python tools/measure_numerics.py --out FILE`.

Ratios are of figures from the same run, taken in turns. The parts are

- underflow: `gradient_underflow` against a plain backward pass of ResNet-18 and of a transformer;
- scale: a small training step with and without `ScaleLog`;
- nonfinite: a step of ResNet-18 with and without `find_nonfinite`, and after it, when it is off.

With `--cpu-time` the clock counts what this process ran, not what it waited for: on a CPU that is
shared, with one thread (OMP_NUM_THREADS=1).
"""

import contextlib
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from amp_lab.device import pick_device
from amp_lab.numerics import ScaleLog, find_nonfinite, gradient_underflow
from amp_lab.training.models import build_model
from recording import parser, record

PARTS = ("underflow", "scale", "nonfinite")


def in_turns(kinds, device, turns, clock):
    """Seconds of each of `kinds` {name: function}; the first turn, a warm-up, is not counted."""
    times = {kind: [] for kind in kinds}
    for turn in range(turns + 1):
        for kind, function in kinds.items():
            seconds = function(lambda: (synchronize(device), clock())[1])
            if turn:
                times[kind].append(seconds)
    return times


def synchronize(device):
    """Wait for the device, so that the clock is read when its work is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def compare(times, against):
    """Median and fastest of each kind in ms, and the median of its paired ratios to one of them."""
    return {
        kind: {
            "median ms": 1e3 * statistics.median(samples),
            "fastest ms": 1e3 * min(samples),
            f"of {against}": statistics.median(
                a / b for a, b in zip(samples, times[against], strict=True)
            ),
        }
        for kind, samples in times.items()
    }


def problems(device):
    """Models, each with a function that computes its loss."""
    for batch, size in ((32, 224), (8, 224), (64, 32)):
        model = build_model("resnet18", 10).to(device)
        images = torch.randn(batch, 3, size, size, device=device)
        targets = torch.zeros(batch, dtype=torch.long, device=device)
        yield (
            f"resnet18 {batch}x{size}x{size}",
            model,
            lambda m=model, x=images, y=targets: F.cross_entropy(m(x), y),
        )
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    tokens = torch.randn(8, 256, 256, device=device)
    yield "transformer 4x256, 8x256 tokens", model, lambda: model(tokens).square().mean()


def measure_underflow(device, turns, clock):
    """A backward pass with and without counting; both keep the graph and return the gradients."""
    result = {}
    for name, model, loss_of in problems(device):
        parameters, values = list(model.parameters()), []

        def backward(now, loss_of=loss_of, parameters=parameters):
            loss = loss_of()
            start = now()
            torch.autograd.grad(loss, parameters, retain_graph=True)
            return now() - start

        def counted(now, loss_of=loss_of, model=model, values=values):
            loss = loss_of()
            start = now()
            report = gradient_underflow(model, loss)
            seconds = now() - start
            values.append(report.total.values)
            return seconds

        kinds = {"backward": backward, "gradient_underflow": counted}
        times = in_turns(kinds, device, turns, clock)
        result[name] = compare(times, "backward") | {"values": values[-1]}
    return result


def measure_scale(device, turns, clock):
    """Microseconds that `ScaleLog` adds to a step, and their share of a step of a small model.

    They are measured on a scaler with next to nothing to do, since they would drown in the noise of
    a real step: two linear layers, 256 wide, batch 256.
    """

    def block(logged):
        parameter = nn.Parameter(torch.zeros(1, device=device))
        parameter.grad = torch.ones(1, device=device)
        optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)

        def run(now):
            scaler = torch.amp.GradScaler(device.type)
            scaler.scale(parameter)
            with ScaleLog(scaler) if logged else contextlib.nullcontext():
                start = now()
                for _ in range(1000):
                    scaler.step(optimizer)
                    scaler.update()
                return now() - start

        return run

    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(256, 256, device=device)

    def steps(now):
        scaler = torch.amp.GradScaler(device.type)
        start = now()
        for _ in range(100):
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return now() - start

    kinds = {"scaler alone": block(False), "with ScaleLog": block(True), "100 steps": steps}
    times = in_turns(kinds, device, turns, clock)
    added = statistics.median(times["with ScaleLog"]) - statistics.median(times["scaler alone"])
    step = statistics.median(times["100 steps"]) / 100
    return compare(times, "scaler alone") | {
        "added µs per step": 1e3 * added,
        "step ms": 1e3 * step,
        "share of a step": added / 1000 / step,
    }


def measure_nonfinite(device, turns, clock):
    """A training step as it is, watched, and again after all has been removed."""
    result = {}
    for name, model, loss_of in problems(device):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def step(context, now, loss_of=loss_of, optimizer=optimizer):
            start = now()
            with context as finder:
                loss_of().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert finder is None or finder.report is None, finder.report
            return now() - start

        kinds = {
            "plain": lambda now, step=step: step(contextlib.nullcontext(), now),
            "find_nonfinite": lambda now, step=step, m=model: step(find_nonfinite(m), now),
            "off again": lambda now, step=step: step(contextlib.nullcontext(), now),
        }
        result[name] = compare(in_turns(kinds, device, turns, clock), "plain")
    return result


def main():
    """Measure the parts asked for, print each, and write them all as JSON."""
    options_of = parser(__doc__, PARTS)
    options_of.add_argument("--turns", type=int, default=7)
    options_of.add_argument("--cpu-time", action="store_true", help="see above")
    options = options_of.parse_args()
    device = pick_device()
    clock = time.process_time if options.cpu_time else time.perf_counter
    measures = {
        "underflow": lambda: measure_underflow(device, options.turns, clock),
        "scale": lambda: measure_scale(device, options.turns, clock),
        "nonfinite": lambda: measure_nonfinite(device, options.turns, clock),
    }
    record(measures, options, device, clock=clock.__name__)


if __name__ == "__main__":
    main()

"""Measure what training costs and keeps: `python tools/measure/training.py --out FILE`.

Each ratio is of functions that took turns, with its interval. The parts are

- speed: a training step of ResNet-50 and MobileNetV2 in fp32 and bf16, with and without
  channels_last;
- loop: `amp_lab.fit` against a bare loop of the same model, and what loading the data takes of it;
- added: what `amp_lab.fit` adds to a step of a bare loop, and its share of a step of three models;
- checkpoint: saving MobileNetV2 with its optimizer;
- accuracy: held-out digits with three seeds, in fp32 and what the device accelerates.
"""

import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from amp_lab.core.device import describe_device, pick_device
from amp_lab.core.precision import Precision
from amp_lab.core.timing import compare
from amp_lab.models.build import build_model
from amp_lab.train.checkpoint import save_checkpoint
from amp_lab.train.data import batches, load_dataset
from amp_lab.train.loop import fit
from amp_lab.train.run import train
from amp_lab.train.train_options import RunConfig, RunOptions
from recording import parser, plain, record, times_as_fast, times_as_long

PARTS = ("speed", "loop", "added", "checkpoint", "accuracy")
TRAINED = {  # for what is added: model, its classes, and a batch of it
    "resnet18": (10, lambda: torch.randn(64, 3, 32, 32)),
    "mobilenet_v2": (10, lambda: torch.randn(64, 3, 32, 32)),
    "gpt-nano": (105, lambda: torch.randint(105, (8, 256))),
}


def make_step(model, optimizer, images, targets, precision, device, channels_last=False):
    """A training step, written as one would without amp_lab."""
    if channels_last:
        model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    scaler = precision.grad_scaler(device.type)
    enabled = precision in (Precision.FP16, Precision.BF16)

    def step():
        with torch.autocast(device.type, dtype=precision.dtype, enabled=enabled):
            logits = model(images).float().flatten(0, -2)  # of tokens (N, T, V) too
            loss = F.cross_entropy(logits, targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def adamw(model):
    """The optimizer of `amp-lab train`."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measure_speed(device, budget_s):
    """A step of each model and size in each precision, as many times as fast as in fp32."""
    low = [Precision.BF16] if device.type == "cpu" else [p for p in Precision if p != "fp32"]
    result = {}
    for name, size, batch in (
        ("resnet50", 224, 16),
        ("mobilenet_v2", 224, 16),
        ("mobilenet_v2", 32, 64),
    ):
        batch *= 1 if device.type == "cpu" else 8
        images = torch.randn(batch, 3, size, size, device=device)
        targets = torch.zeros(batch, dtype=torch.long, device=device)
        steps = {}
        for precision, last in itertools.product([Precision.FP32, *low], (False, True)):
            model = build_model(name, 10).to(device)
            step = make_step(model, adamw(model), images, targets, precision, device, last)
            kind = f"{precision}{' channels_last' if last else ''}"
            steps[kind] = functools.partial(in_mode, precision, step, device)
        compared = compare(steps, device=device, budget_s=budget_s)
        result[f"{name} {batch}x{size}x{size}"] = times_as_fast(compared)
    return result


def in_mode(precision, step, device):
    """One step, with TF32 on for that precision alone, in the backward pass too."""
    with precision.float32_mode(device.type):
        step()


def measure_loop(device, budget_s):
    """An epoch on digits: a bare loop over tensors, `fit` on them, `fit` with data, data alone."""
    data = load_dataset("digits").train
    loaded = list(batches(data, 64, seed=0, drop_last=True))
    load = functools.partial(batches, data, 64, seed=0, drop_last=True)

    def bare(model, optimizer):
        with Precision.FP32.autocast(device.type):
            for images, targets in loaded:
                images, targets = images.to(device), targets.to(device)
                F.cross_entropy(model(images).float(), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    def fitted(source, model, optimizer):
        fit(model, source, optimizer=optimizer, precision="fp32", device=device, epochs=1)

    epochs = {
        "bare loop": bare,
        "fit": functools.partial(fitted, lambda epoch, start: loaded),
        "fit and data": functools.partial(fitted, lambda epoch, start: load(epoch=epoch)),
    }
    kinds: dict[str, Callable[[], object]] = {"data": lambda: list(load())}
    for kind, epoch in epochs.items():
        torch.manual_seed(0)
        model = build_model("mobilenet_v2", 10).to(device).train()
        kinds[kind] = functools.partial(epoch, model, adamw(model))
    compared = compare(kinds, device=device, budget_s=budget_s)
    return times_as_long(compared, "bare loop") | {
        "share of loading": plain(compared.ratio("data", "fit and data"))
    }


class Outputs(nn.Module):
    """A model that computes nothing: its outputs are its parameter."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, inputs):
        """The parameter, whatever the inputs."""
        return self.outputs


def bare_steps(model, batch, precision, device, count):
    """A function that trains so many steps in a bare loop."""
    step = make_step(model, adamw(model), batch[0], batch[1], precision, device)
    return lambda: in_mode(precision, lambda: [step() for _ in range(count)], device)


def fit_steps(model, batch, precision, device, count):
    """The same with `fit`, in an epoch."""
    settings = {"optimizer": adamw(model), "precision": precision, "device": device}
    return lambda: fit(model, lambda *start: itertools.repeat(batch, count), epochs=1, **settings)


def measure_added(device, budget_s, steps=50):
    """Microseconds that `fit` adds to a step of a bare loop, and their share of a model's step.

    They would drown in the noise of that step. So both loops train a model that computes nothing
    and has outputs of the same shape; what they differ by is then held against the real step.
    """
    result = {}
    for (name, (classes, make)), precision in itertools.product(
        TRAINED.items(), [Precision.FP32, *describe_device(device).accelerated]
    ):
        model, inputs = build_model(name, classes).to(device), make().to(device)
        outputs = model(inputs).detach()  # (N, C), or (N, T, C) of tokens
        targets = torch.zeros(outputs.shape[:-1], dtype=torch.long, device=device)
        how = (inputs, targets), precision, device
        kinds = {
            "bare loop": bare_steps(Outputs(outputs), *how, steps),
            "fit": fit_steps(Outputs(outputs.clone()), *how, steps),
            "step of the model": bare_steps(model, *how, 1),
        }
        compared = compare(kinds, device=device, budget_s=budget_s)
        result[f"{name} {precision}"] = added_to(compared, steps)
    return result


def added_to(compared, steps):
    """What `fit` took more than a bare loop in each round, for one of so many steps."""
    loops = zip(compared.samples_s["fit"], compared.samples_s["bare loop"], strict=True)
    added_s = tuple((fit - bare) / steps for fit, bare in loops)
    added = replace(compared, samples_s={"added": added_s}).time_s("added")
    step_s = compared.median_s("step of the model")
    return compared.to_json() | {
        "added µs per step": plain(added.times(1e6)),
        "share of a step": plain(added.times(1 / step_s)),
    }


def measure_checkpoint(device, budget_s):
    """Seconds to save MobileNetV2 and its optimizer, safely on the disk."""
    model = build_model("mobilenet_v2", 10).to(device)
    optimizer = adamw(model)
    model(torch.randn(2, 3, 32, 32, device=device)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder, "checkpoint.pt")
        save = functools.partial(save_checkpoint, path, model=model, optimizer=optimizer)
        compared = compare({"save": save}, device=device, budget_s=budget_s)
        return compared.to_json() | {"bytes": path.stat().st_size}


def measure_accuracy(device, model, precisions):
    """Held-out accuracy of `amp-lab train` with its defaults, three seeds in each precision."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in precisions:
            accuracies = []
            for seed in range(3):
                out = Path(folder, f"{precision}-{seed}")
                train(
                    RunConfig(model=model, precision=precision, seed=seed),
                    RunOptions(str(out), device=device.type),
                    say=lambda line: None,
                )
                last = (out / "metrics.csv").read_text().splitlines()[-1]
                accuracies.append(float(last.split(",")[4]))
            result[precision] = {"each": accuracies, "mean": statistics.mean(accuracies)}
            print(precision, result[precision], flush=True)
    return {"model": model, **result}


def main():
    """Measure the parts asked for, print each, and write them all as JSON."""
    options_of = parser(__doc__, PARTS, budget_s=300)
    options_of.add_argument("--model", default="mobilenet_v2", help="for the accuracy")
    default = "for the accuracy (default: fp32 and what the device accelerates)"
    options_of.add_argument("--precision", action="append", help=default)
    options = options_of.parse_args()
    device = pick_device()
    precisions = options.precision or [Precision.FP32, *describe_device(device).accelerated]
    measures = {
        "speed": lambda: measure_speed(device, options.budget),
        "loop": lambda: measure_loop(device, options.budget),
        "added": lambda: measure_added(device, options.budget),
        "checkpoint": lambda: measure_checkpoint(device, options.budget),
        "accuracy": lambda: measure_accuracy(device, options.model, precisions),
    }
    record(measures, options, device)


if __name__ == "__main__":
    main()

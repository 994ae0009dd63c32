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
TRAINED = {  # for `measure_added`, by model: its number of classes, and a function for a batch
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
    """Times of a step of each model and image size, in each precision and memory format."""
    precisions = list(Precision)
    times_batch = 8
    if device.type == "cpu":
        precisions = [Precision.FP32, Precision.BF16]
        times_batch = 1
    result = {}
    for name, size, batch in (
        ("resnet50", 224, 16),
        ("mobilenet_v2", 224, 16),
        ("mobilenet_v2", 32, 64),
    ):
        batch *= times_batch
        images = torch.randn(batch, 3, size, size, device=device)
        targets = torch.zeros(batch, dtype=torch.long, device=device)
        steps = {}
        for precision, channels_last in itertools.product(precisions, (False, True)):
            model = build_model(name, 10).to(device)
            step = make_step(model, adamw(model), images, targets, precision, device, channels_last)
            kind = f"{precision} channels_last" if channels_last else str(precision)
            steps[kind] = functools.partial(in_mode, precision, step, device)
        compared = compare(steps, device=device, budget_s=budget_s)
        result[f"{name} {batch}x{size}x{size}"] = times_as_fast(compared)
    return result


def in_mode(precision, step, device):
    """Run one step; TF32 is on only for that precision, and in the backward pass too."""
    with precision.float32_mode(device.type):
        step()


def measure_loop(device, budget_s):
    """Times of an epoch of MobileNetV2 on digits, with `fit` and without.

    "bare loop" and "fit" train on batches that are in memory, "fit and data" loads them as well,
    and "data" only loads them.
    """
    data = load_dataset("digits").train
    load = functools.partial(batches, data, 64, seed=0, drop_last=True)
    loaded = list(load())

    def bare_epoch(model, optimizer):
        with Precision.FP32.autocast(device.type):
            for images, targets in loaded:
                images = images.to(device)
                targets = targets.to(device)
                F.cross_entropy(model(images).float(), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

    def fit_epoch(model, optimizer, epoch_batches):
        fit(model, epoch_batches, optimizer=optimizer, precision="fp32", device=device, epochs=1)

    epochs = {
        "bare loop": bare_epoch,
        "fit": functools.partial(fit_epoch, epoch_batches=lambda epoch, start: loaded),
        "fit and data": functools.partial(
            fit_epoch, epoch_batches=lambda epoch, start: load(epoch=epoch)
        ),
    }
    functions: dict[str, Callable[[], object]] = {"data": lambda: list(load())}
    for name, epoch in epochs.items():
        torch.manual_seed(0)
        model = build_model("mobilenet_v2", 10).to(device).train()
        functions[name] = functools.partial(epoch, model, adamw(model))
    compared = compare(functions, device=device, budget_s=budget_s)
    share_of_loading = compared.ratio("data", "fit and data")
    return times_as_long(compared, "bare loop") | {"share of loading": plain(share_of_loading)}


class Outputs(nn.Module):
    """A model that computes nothing: its outputs are its parameter."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, inputs):
        """The parameter, whatever the inputs."""
        return self.outputs


def bare_steps(model, batch, precision, device, count):
    """A function that trains `count` steps in a bare loop."""
    inputs, targets = batch
    step = make_step(model, adamw(model), inputs, targets, precision, device)

    def steps():
        for _ in range(count):
            step()

    return lambda: in_mode(precision, steps, device)


def fit_steps(model, batch, precision, device, count):
    """A function that trains `count` steps with `fit`, in one epoch."""
    optimizer = adamw(model)

    def same_batch(epoch, start):
        return itertools.repeat(batch, count)

    return lambda: fit(
        model, same_batch, epochs=1, optimizer=optimizer, precision=precision, device=device
    )


def measure_added(device, budget_s, steps=50):
    """Microseconds that `fit` adds to a step of a bare loop, and their share of a model's step.

    The noise of a real step is larger than this difference. So it is measured with a model that
    computes nothing and has outputs of the same shape, and then divided by the time of a real step.
    """
    precisions = [Precision.FP32, *describe_device(device).accelerated]
    result = {}
    for name, precision in itertools.product(TRAINED, precisions):
        classes, make_inputs = TRAINED[name]
        model = build_model(name, classes).to(device)
        inputs = make_inputs().to(device)
        outputs = model(inputs).detach()  # (N, C), or (N, T, C) of tokens
        targets = torch.zeros(outputs.shape[:-1], dtype=torch.long, device=device)
        batch = (inputs, targets)
        functions = {
            "bare loop": bare_steps(Outputs(outputs), batch, precision, device, steps),
            "fit": fit_steps(Outputs(outputs.clone()), batch, precision, device, steps),
            "step of the model": bare_steps(model, batch, precision, device, 1),
        }
        compared = compare(functions, device=device, budget_s=budget_s)
        result[f"{name} {precision}"] = added_to(compared, steps)
    return result


def added_to(compared, steps):
    """The time that `fit` adds to a step; `compared` has both loops with this many steps."""
    added_s = []  # by round
    fit_s = compared.samples_s["fit"]
    bare_s = compared.samples_s["bare loop"]
    for fit_of_round, bare_of_round in zip(fit_s, bare_s, strict=True):
        added_s.append((fit_of_round - bare_of_round) / steps)
    added = replace(compared, samples_s={"added": tuple(added_s)}).time_s("added")
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
                names, *_, last_epoch = (out / "metrics.csv").read_text().splitlines()
                column = names.split(",").index("test_accuracy")
                accuracies.append(float(last_epoch.split(",")[column]))
            result[precision] = {"each": accuracies, "mean": statistics.mean(accuracies)}
            print(precision, result[precision], flush=True)
    return {"model": model, **result}


def main():
    """Measure the parts asked for, print each, and write them all as JSON."""
    options_parser = parser(__doc__, PARTS, budget_s=300)
    options_parser.add_argument("--model", default="mobilenet_v2", help="for the accuracy")
    default = "for the accuracy (default: fp32 and what the device accelerates)"
    options_parser.add_argument("--precision", action="append", help=default)
    options = options_parser.parse_args()
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

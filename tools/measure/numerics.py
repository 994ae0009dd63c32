"""Measure what the numerics tools cost: `python tools/measure/numerics.py --out FILE`.

Each ratio is of functions that took turns, with its interval. The parts are

- underflow: `gradient_underflow` against a plain backward pass of ResNet-18 and of a transformer,
  and what the counting adds to a whole training step;
- scale: a small training step with and without `ScaleLog`;
- nonfinite: a step of each with and without `find_nonfinite`, and after it, when it is off; beside
  it the least that it can add: a dispatch mode that does nothing, and the looks alone.
"""

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.device import pick_device
from amp_lab.core.timing import compare
from amp_lab.models.build import build_model
from amp_lab.numerics import ScaleLog, find_nonfinite, gradient_underflow
from amp_lab.numerics.tensor_summary import is_finite
from recording import parser, record, times_as_long

PARTS = ("underflow", "scale", "nonfinite")


def problems(device):
    """Models, each with a function that computes the loss of it, or of a copy."""
    for batch, size in ((32, 224), (8, 224), (64, 32)):
        model = build_model("resnet18", 10).to(device)
        images = torch.randn(batch, 3, size, size, device=device)
        targets = torch.zeros(batch, dtype=torch.long, device=device)
        yield (
            f"resnet18 {batch}x{size}x{size}",
            model,
            lambda m, x=images, y=targets: F.cross_entropy(m(x), y),
        )
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    tokens = torch.randn(8, 256, 256, device=device)
    yield "transformer 4x256, 8x256 tokens", model, lambda m: m(tokens).square().mean()


def measure_underflow(device, budget_s):
    """A backward pass with and without counting; both keep the graph and return the gradients.

    A step is measured in the same rounds, on a copy, since an optimizer breaks a graph that is
    kept. What counting added to the backward pass of a round is added to the step of that round.
    """
    result = {}
    for name, model, loss_of in problems(device):
        parameters, loss, values = list(model.parameters()), loss_of(model), []

        def backward(loss=loss, parameters=parameters):
            torch.autograd.grad(loss, parameters, retain_graph=True)

        def counted(loss=loss, model=model, values=values):
            values[:] = [gradient_underflow(model, loss).total.values]

        kinds = {
            "backward": backward,
            "gradient_underflow": counted,
            "step": step_of(model, loss_of),
        }
        compared = compare(kinds, device=device, budget_s=budget_s)
        result[name] = of_backward_and_of_step(compared) | {"values": values[0]}
    return result


def step_of(model, loss_of):
    """A training step of a copy of the model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step():
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_backward_and_of_step(compared):
    """How much longer counting takes than a backward pass, and a step with it than one without."""
    taken = [compared.samples_s[n] for n in ("step", "gradient_underflow", "backward")]
    with_counting = tuple(step + more - less for step, more, less in zip(*taken, strict=True))
    samples_s = {"step": taken[0], "step with counting": with_counting}
    backward = times_as_long(compared, "backward")
    key = "times as long as step"
    return backward | {key: times_as_long(replace(compared, samples_s=samples_s), "step")[key]}


def measure_scale(device, budget_s):
    """Microseconds that `ScaleLog` adds to a step, and their share of a step of a small model.

    They are measured on a scaler with next to nothing to do, since they would drown in the noise of
    a real step: two linear layers, 256 wide, batch 256.
    """

    def block(logged):
        parameter = nn.Parameter(torch.zeros(1, device=device))
        parameter.grad = torch.ones(1, device=device)
        optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)

        def run():
            scaler = torch.amp.GradScaler(device.type)
            scaler.scale(parameter)
            with ScaleLog(scaler) if logged else contextlib.nullcontext():
                for _ in range(1000):
                    scaler.step(optimizer)
                    scaler.update()

        return run

    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(256, 256, device=device)

    def steps():
        scaler = torch.amp.GradScaler(device.type)
        for _ in range(100):
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    kinds = {"scaler alone": block(False), "with ScaleLog": block(True), "100 steps": steps}
    compared = compare(kinds, device=device, budget_s=budget_s)
    longer = compared.ratio("with ScaleLog", "scaler alone")
    alone_us = 1e6 * compared.median_s("scaler alone") / 1000
    step_us = 1e6 * compared.median_s("100 steps") / 100
    added_us, low_us, high_us = (alone_us * (x - 1) for x in (longer.median, *longer.interval))
    return times_as_long(compared, "scaler alone") | {
        "added µs per step": {"median": added_us, "interval": [low_us, high_us]},
        "step ms": step_us / 1e3,
        "share of a step": added_us / step_us,
    }


def measure_nonfinite(device, budget_s):
    """A training step as it is, watched, and again after all has been removed; the looks alone."""
    result = {}
    for name, model, loss_of in problems(device):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def step(context, model=model, loss_of=loss_of, optimizer=optimizer):
            with context as finder:
                loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert finder is None or finder.report is None, finder.report

        tensors = looked_at(step, model)
        kinds = {
            "plain": lambda step=step: step(contextlib.nullcontext()),
            "find_nonfinite": lambda step=step, m=model: step(find_nonfinite(m)),
            "off again": lambda step=step: step(contextlib.nullcontext()),
            "empty mode": lambda step=step: step(EmptyMode()),
            "looks alone": lambda tensors=tensors: [is_finite(tensor) for tensor in tensors],
        }
        compared = compare(kinds, device=device, budget_s=budget_s)
        count = {"looks": len(tensors), "values": sum(tensor.numel() for tensor in tensors)}
        result[name] = times_as_long(compared, "plain") | count
    return result


class EmptyMode(TorchDispatchMode):
    """Python between torch and every op, which does nothing there."""

    report = None  # as `find_nonfinite` has one, which a step asks for

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """What the op returns."""
        return func(*args, **(kwargs or {}))


def looked_at(step, model):
    """Copies of the tensors that `find_nonfinite` looks at in a step."""
    copies = []

    def keep(tensor):
        copies.append(tensor.detach().clone())
        return True

    with mock.patch("amp_lab.numerics.nonfinite.is_finite", keep):
        step(find_nonfinite(model))
    return copies


def main():
    """Measure the parts asked for, print each, and write them all as JSON."""
    options = parser(__doc__, PARTS, budget_s=240).parse_args()
    device = pick_device()
    measures = {
        "underflow": lambda: measure_underflow(device, options.budget),
        "scale": lambda: measure_scale(device, options.budget),
        "nonfinite": lambda: measure_nonfinite(device, options.budget),
    }
    record(measures, options, device)


if __name__ == "__main__":
    main()

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
import functools
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
    """Yield (name, model, function): the function computes the loss of the model or of a copy."""
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
    """Times of a backward pass with and without counting; both keep the graph.

    A training step is measured in the same rounds. It trains a copy, since an optimizer breaks a
    graph that is kept.
    """
    result = {}
    for name, model, loss_of in problems(device):
        parameters = list(model.parameters())
        loss = loss_of(model)
        functions = {
            "backward": functools.partial(torch.autograd.grad, loss, parameters, retain_graph=True),
            "gradient_underflow": functools.partial(gradient_underflow, model, loss),
            "step": step_of(model, loss_of),
        }
        compared = compare(functions, device=device, budget_s=budget_s)
        values = gradient_underflow(model, loss).total.values
        result[name] = of_backward_and_of_step(compared) | {"values": values}
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
    """How many times as long a backward pass and a step take with counting as without.

    A step with counting is not run: it is the step of the same round, plus what counting added to
    the backward pass of that round.
    """
    step_s = compared.samples_s["step"]
    counted_s = compared.samples_s["gradient_underflow"]
    backward_s = compared.samples_s["backward"]
    step_with_counting_s = []
    for step, counted, backward in zip(step_s, counted_s, backward_s, strict=True):
        step_with_counting_s.append(step + counted - backward)
    samples_s = {"step": step_s, "step with counting": tuple(step_with_counting_s)}
    of_step = times_as_long(replace(compared, samples_s=samples_s), "step")
    key = "times as long as step"
    return times_as_long(compared, "backward") | {key: of_step[key]}


def measure_scale(device, budget_s):
    """Microseconds that `ScaleLog` adds to a step, and their share of a step of a small model.

    The noise of a real step is larger than this difference, so it is measured on a scaler whose
    optimizer has a single number. The real step is that of two linear layers, 256 wide, batch 256.
    """

    def scaler_steps(log):
        """A function that makes 1000 steps of a scaler, in a block of `log(scaler)`."""
        parameter = nn.Parameter(torch.zeros(1, device=device))
        parameter.grad = torch.ones(1, device=device)
        optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)

        def run():
            scaler = torch.amp.GradScaler(device.type)
            scaler.scale(parameter)
            with log(scaler):
                for _ in range(1000):
                    scaler.step(optimizer)
                    scaler.update()

        return run

    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(256, 256, device=device)

    def real_steps():
        scaler = torch.amp.GradScaler(device.type)
        for _ in range(100):
            loss = model(inputs).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    functions = {
        "scaler alone": scaler_steps(contextlib.nullcontext),
        "with ScaleLog": scaler_steps(ScaleLog),
        "100 steps": real_steps,
    }
    compared = compare(functions, device=device, budget_s=budget_s)
    alone_us = 1e6 * compared.median_s("scaler alone") / 1000
    step_us = 1e6 * compared.median_s("100 steps") / 100
    ratio = compared.ratio("with ScaleLog", "scaler alone")
    low, high = ratio.interval
    added_us = alone_us * (ratio.median - 1)
    low_us = alone_us * (low - 1)
    high_us = alone_us * (high - 1)
    return times_as_long(compared, "scaler alone") | {
        "added µs per step": {"median": added_us, "interval": [low_us, high_us]},
        "step ms": step_us / 1e3,
        "share of a step": added_us / step_us,
    }


def measure_nonfinite(device, budget_s):
    """Times of a training step with and without `find_nonfinite`.

    - "plain" and "off again": without it, before and after a step that is watched,
    - "find_nonfinite": in its block,
    - "empty mode": in a dispatch mode that does nothing,
    - "looks alone": without the step, only what looks for inf and NaN in its tensors.
    """
    result = {}
    for name, model, loss_of in problems(device):
        functions, tensors = watched_steps(model, loss_of)
        compared = compare(functions, device=device, budget_s=budget_s)
        count = {"looks": len(tensors), "values": sum(tensor.numel() for tensor in tensors)}
        result[name] = times_as_long(compared, "plain") | count
    return result


def watched_steps(model, loss_of):
    """The functions of `measure_nonfinite` by name, and the tensors of "looks alone"."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(context):
        with context as finder:
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert finder is None or finder.report is None, finder.report

    tensors = copies_of_checked_tensors(step, model)

    def look():
        for tensor in tensors:
            is_finite(tensor)

    functions = {
        "plain": lambda: step(contextlib.nullcontext()),
        "find_nonfinite": lambda: step(find_nonfinite(model)),
        "off again": lambda: step(contextlib.nullcontext()),
        "empty mode": lambda: step(EmptyMode()),
        "looks alone": look,
    }
    return functions, tensors


class EmptyMode(TorchDispatchMode):
    """Python between torch and every op, which does nothing there."""

    report = None  # as `find_nonfinite` has one, which a step asks for

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """What the op returns."""
        return func(*args, **(kwargs or {}))


def copies_of_checked_tensors(step, model):
    """Copies of the tensors in which `find_nonfinite` looks for inf and NaN during a step."""
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

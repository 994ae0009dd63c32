"""The rungs of the speed ladder.

Each is a change to the step, on top of all before it; a mode of torch.compile takes the place of
the one before, and the step written by hand that of everything.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.bench.workloads import Problem, Workload
from amp_lab.errors import OptionError
from amp_lab.precision import Precision

RUNGS = {
    "eager": "as most recipes have it; reads the loss after every step",
    "channels-last": "images as N, H, W, C in memory",
    "fused-adam": "Adam in one kernel; the scaler's check moves into it",
    "no-sync": "the host never waits: the loss is not read",
    "fold-norm": "batch normalisation folded into the convolution before it",
    "cast-once": "weights and input kept in the low precision, without autocast",
    "compile": "torch.compile: elementwise ops in one kernel, fewer calls",
    "cuda-graphs": "forward and backward recorded once and replayed, without the host",
    "max-autotune": "torch.compile tries several kernels for each matrix product",
    "fp8": "linear layers in float8, through torchao",
    "by-hand": "the step written anew, see convmodel_fused.py",
}
"""Every rung, from the lowest, and what it is."""

COMPILED = {"compile": None, "cuda-graphs": "reduce-overhead", "max-autotune": "max-autotune"}
"""Rungs that compile, and the mode of torch.compile."""
# Small enough that no step of these workloads overflows: a skipped one has no loss to compare.
_INITIAL_SCALE = 2.0**12


def rungs_of(workload: Workload, precision: Precision, device: torch.device) -> list[str]:
    """The rungs that a workload has in this precision on this device, from the lowest."""
    accelerator = device.type != "cpu"
    low = precision.dtype is not torch.float32
    exists = {
        "eager": True,
        "channels-last": "channels-last" in workload.takes,
        "fused-adam": workload.kind == "training",
        "no-sync": workload.kind == "training" and accelerator,  # a CPU has nothing to wait for
        "fold-norm": "fold-norm" in workload.takes,
        "cast-once": workload.kind == "inference" and low,
        "compile": workload.kind != "product",
        "cuda-graphs": workload.kind != "product" and device.type == "cuda",
        "max-autotune": workload.kind != "product",
        "fp8": "fp8" in workload.takes and precision is Precision.BF16 and has_fp8(device),
        # Its gradients are not scaled, so fp16 would lose them.
        "by-hand": "by-hand" in workload.takes and precision is not Precision.FP16,
    }
    return [rung for rung in RUNGS if exists[rung]]


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies matrices in float8: NVIDIA's, from Ada and Hopper on."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def use_fp8(model: nn.Module, *, emulate: bool = False) -> None:
    """Let linear layers compute in float8, scaled for each tensor; weights stay float32.

    Layers whose sizes are no multiples of 16, which the kernels need, stay as they are. `emulate`
    rounds to float8, and multiplies in the precision around. Raises `OptionError` without torchao.
    """
    try:
        float8 = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise OptionError(
            "float8 needs torchao, of the dependency group bench: pdm sync"
        ) from error
    float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda layer, name: (
            layer.weight.shape[0] % 16 == layer.weight.shape[1] % 16 == 0
        ),
        config=float8.Float8LinearConfig(emulate=emulate),
    )


@dataclass
class Step:
    """One configuration, ready to run."""

    call: Callable[[], Tensor]
    """Runs one step; returns the loss, or for inference and products the output."""
    model: nn.Module
    inputs: Tensor


def make_step(workload: Workload, precision: Precision, rung: str, device: torch.device) -> Step:
    """The step of a workload with all rungs up to this one; each call of this starts anew."""
    torch.manual_seed(0)
    problem = workload.build(device)
    below = rungs_of(workload, precision, device)
    taken = set(below[: below.index(rung) + 1])
    mode = None
    for name in COMPILED:  # each of these takes the place of the one before
        if name in taken:
            mode = name
    if "channels-last" in taken:
        problem.model.to(memory_format=torch.channels_last)
        problem.inputs = problem.inputs.to(memory_format=torch.channels_last)
    if "fp8" in taken:
        use_fp8(problem.model)
    if workload.kind == "training":
        if "by-hand" in taken:
            return _by_hand(problem, precision)
        return _training(problem, precision, taken, mode, device)
    return _inference(problem, precision, taken, mode, device, workload.kind == "product")


def _training(
    problem: Problem, precision: Precision, taken: set[str], mode: str | None, device: torch.device
) -> Step:
    model, inputs = problem.model.train(), problem.inputs
    optimizer = torch.optim.Adam(
        model.parameters(), lr=problem.lr, fused=True if "fused-adam" in taken else None
    )
    scaler = precision.grad_scaler(device.type, init_scale=_INITIAL_SCALE)
    enabled = precision.dtype is not torch.float32
    reads_loss = "no-sync" not in taken

    def forward(inputs: Tensor) -> Tensor:
        return problem.loss_fn(model(inputs))

    graphs = mode in ("cuda-graphs", "max-autotune") and device.type == "cuda"
    if mode is not None:
        forward = torch.compile(forward, mode=COMPILED[mode], dynamic=False)

    def step() -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=precision.dtype, enabled=enabled):
            loss = forward(inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss = loss.detach().clone()  # a graph's own memory is written anew in its next run
        if reads_loss:
            loss.item()
        return loss

    return Step(step, model, inputs)


def _by_hand(problem: Problem, precision: Precision) -> Step:
    model = problem.model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.lr, fused=True)
    forward_backward = FusedStep(model, precision.dtype)

    def step() -> Tensor:
        loss = forward_backward(problem.inputs, problem.target)
        optimizer.step()
        return loss

    return Step(step, model, problem.inputs)


def _inference(
    problem: Problem,
    precision: Precision,
    taken: set[str],
    mode: str | None,
    device: torch.device,
    product: bool,
) -> Step:
    model, inputs = problem.model.eval(), problem.inputs
    autocast = precision.dtype is not torch.float32
    if "fold-norm" in taken:
        model = _folded(model)
    if "cast-once" in taken or product:
        model, inputs, autocast = model.to(precision.dtype), inputs.to(precision.dtype), False
    forward = model
    graphs = mode in ("cuda-graphs", "max-autotune") and device.type == "cuda"
    if mode is not None:
        forward = torch.compile(model, mode=COMPILED[mode], dynamic=False)

    @torch.no_grad()
    def step() -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, dtype=precision.dtype, enabled=autocast):
            out = forward(inputs)
        return out.clone() if graphs else out

    return Step(step, model, inputs)


def _folded(model: nn.Sequential) -> nn.Sequential:
    """The same function without batch normalisation: it is linear in evaluation mode."""
    layers: list[nn.Module] = []
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    return nn.Sequential(*layers)

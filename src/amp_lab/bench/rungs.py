"""The rungs of the speed ladder. To add a rung, add an object to `RUNGS`.

A rung is an optimization of a step, on top of all rungs below it. Two kinds of rungs replace others
instead: a mode of torch.compile replaces the mode before it, and the step written by hand replaces
the whole step.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from amp_lab.bench.workloads import Problem, StepByHand, Workload
from amp_lab.core.backends import backend
from amp_lab.core.errors import OptionError
from amp_lab.core.precision import Precision
from amp_lab.recipes import INFERENCE, TRAINING, Recipe, Step

# The loss scale of fp16. It is small enough that no step of these workloads overflows: GradScaler
# would skip that step, and its losses could not be compared with those of fp32.
_INITIAL_SCALE = 2.0**12


@dataclass(frozen=True)
class Ladder:
    """A workload in one precision on one device. Its rungs are optimizations of the same step."""

    workload: Workload
    precision: Precision
    device: torch.device

    @property
    def is_low(self) -> bool:
        """Whether matmuls get operands of fewer than 32 bits."""
        return self.precision.dtype is not torch.float32


@dataclass
class RungStep:
    """The step of a rung, ready to run."""

    call: Callable[[], Tensor]  # returns the loss if the workload trains, else the output
    model: nn.Module
    inputs: Tensor
    records_graph: bool = False  # whether the first calls record CUDA graphs for later ones


@dataclass(frozen=True)
class Rung:
    """An optimization of a step, the ladders that have it, and how the benchmark treats it."""

    name: str
    description: str  # in one line, for the command line
    exists: Callable[[Ladder], bool] = lambda ladder: True
    # What the rung changes: the recipe of the step, or the model before it moves to the device.
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe
    convert: Callable[[nn.Module], nn.Module] = lambda model: model
    reads_loss: bool = True  # whether the host still waits for the loss of every step
    # The workload's step written by hand, for a rung that replaces the complete step.
    by_hand: Callable[[Workload], StepByHand | None] = lambda workload: None
    # Whether it compiles for so long that a quick run leaves it out.
    takes_long: Callable[[Ladder], bool] = lambda ladder: False
    needs_graph: bool = False  # fails if torch records no CUDA graph, the only gain of the rung
    has_limit: bool = True  # whether the rates of `measure_ceilings` are an upper limit for it


def _fold_norm(model: nn.Module) -> nn.Module:
    """Fold each batch normalisation, linear in evaluation mode, into the convolution before it."""
    layers: list[nn.Module] = []
    for layer in model.children():
        if isinstance(layer, nn.BatchNorm2d) and isinstance(layers[-1], nn.Conv2d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    return nn.Sequential(*layers)


# --- Conditions on a ladder: whether a rung exists in it, and whether it takes long to compile.


def _compiles_long(ladder: Ladder) -> bool:
    """Whether compiled rungs take too long for a quick run: many layers, or fp32 or tf32."""
    return ladder.workload.many_layers or not ladder.is_low


def _can_use_fp8(ladder: Ladder) -> bool:
    """Whether the ladder is in bf16, with large linear layers, on a device with float8."""
    if ladder.precision is not Precision.BF16 or "large linear" not in ladder.workload.layers:
        return False
    return has_fp8(ladder.device)


def _has_fused_step(ladder: Ladder) -> bool:
    """Whether the workload has a step by hand, and the precision is not fp16."""
    # The step by hand has no loss scale, so fp16 would lose small gradients.
    return bool(ladder.workload.fused_step) and ladder.precision is not Precision.FP16


def _has_tiled_step(ladder: Ladder) -> bool:
    """Whether the ladder is in bf16, and the workload has kernels for the device."""
    if ladder.precision is not Precision.BF16 or not ladder.workload.tiled_step:
        return False
    device_backend = backend(ladder.device)
    return device_backend.is_host or device_backend.has_triton


def _has_several_ops(ladder: Ladder) -> bool:
    """Whether torch.compile can fuse ops: a matmul alone has none to fuse."""
    return ladder.workload.kind != "matmul"


RUNGS = (
    Rung("eager", "the usual recipe, which reads the loss after every step"),
    Rung(
        "channels-last",
        "images as N, H, W, C in memory",
        exists=lambda ladder: "convolution" in ladder.workload.layers,
        change=lambda recipe: replace(recipe, channels_last=True),
    ),
    Rung(
        "fused-adam",
        "Adam in one kernel, which also unscales the gradients and skips a step with inf or NaN",
        exists=lambda ladder: ladder.workload.trains,
        change=lambda recipe: replace(recipe, fused=True),
    ),
    Rung(
        "no-sync",
        "the loss is not read, so the host never waits",
        # On a CPU the host computes the loss itself, so there is nothing to wait for.
        exists=lambda ladder: ladder.workload.trains and not backend(ladder.device).is_host,
        reads_loss=False,
    ),
    Rung(
        "fold-norm",
        "batch normalisation folded into the convolution before it",
        exists=lambda ladder: (
            ladder.workload.kind == "inference" and "norm" in ladder.workload.layers
        ),
        convert=_fold_norm,
    ),
    Rung(
        "cast-once",
        "weights and input kept in the low precision, without autocast",
        exists=lambda ladder: ladder.workload.kind == "inference" and ladder.is_low,
        change=lambda recipe: replace(recipe, cast=True),
    ),
    Rung(
        "compile",
        "torch.compile, which fuses elementwise ops into fewer kernels",
        exists=_has_several_ops,
        change=lambda recipe: replace(recipe, compiled=True),
        takes_long=_compiles_long,
    ),
    Rung(
        "cuda-graphs",
        "a CUDA graph: forward and backward are recorded once and then replayed",
        exists=lambda ladder: _has_several_ops(ladder) and backend(ladder.device).has_graphs,
        change=lambda recipe: replace(recipe, compile_mode="reduce-overhead"),
        takes_long=_compiles_long,
        needs_graph=True,
    ),
    Rung(
        "max-autotune",
        "torch.compile tries several kernels for each matmul",
        exists=_has_several_ops,
        change=lambda recipe: replace(recipe, compile_mode="max-autotune"),
        takes_long=lambda ladder: True,
    ),
    Rung(
        "fp8",
        "linear layers in float8, with torchao",
        exists=_can_use_fp8,
        convert=lambda model: use_fp8(model),
        takes_long=_compiles_long,
        has_limit=False,  # `measure_ceilings` times no matmul in float8
    ),
    Rung(
        "by-hand",
        "the training step written by hand, see fused_convmodel.py",
        exists=_has_fused_step,
        change=lambda recipe: replace(recipe, compiled=False),
        by_hand=lambda workload: workload.fused_step,
        takes_long=_compiles_long,
    ),
    Rung(
        "tiles",
        "the step by hand, with one kernel for each pass over the pixels, see tiled_convmodel.py",
        exists=_has_tiled_step,
        by_hand=lambda workload: workload.tiled_step,
    ),
)
"""Every rung, from the lowest."""
EAGER = RUNGS[0]


def rungs_of(ladder: Ladder) -> list[Rung]:
    """The rungs that exist in a ladder, from the lowest."""
    return [rung for rung in RUNGS if rung.exists(ladder)]


def has_fp8(device: torch.device) -> bool:
    """Whether torchao has float8 for a device in this machine.

    torchao has float8 for NVIDIA GPUs from Ada on, AMD GPUs from MI300 on (type ``cuda`` too), and
    XPUs.
    """
    if device.type == "xpu":
        return torch.xpu.is_available()
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return architecture.startswith(("gfx94", "gfx95"))  # MI300 and MI350
    return torch.cuda.get_device_capability(device) >= (8, 9)  # Ada


def use_fp8(model: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Convert a model's large linear layers to float8, scaled for each row; return the model.

    Weights stay float32. This is torchao's recipe ``rowwise`` with its filter: only layers that
    become faster, and whose sizes are multiples of 16 as the kernels need, are converted. With
    `emulate`, operands are rounded to float8 and multiplied in the precision around, which runs on
    any device. Raises `OptionError` without torchao.
    """
    try:
        float8 = importlib.import_module("torchao.float8")
    except ImportError as error:
        message = "float8 needs torchao: pip install torchao (in a checkout: pdm run sync)"
        raise OptionError(message) from error
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    return float8.convert_to_float8_training(
        model,
        # torchao calls it for linear layers alone. A weight is (out, in).
        module_filter_fn=lambda layer, name: gains_from_fp8(*layer.weight.shape),
        config=replace(config, emulate=emulate),
    )


def gains_from_fp8(outer: int, inner: int) -> bool:
    """Whether torchao's filter for ``rowwise`` converts a linear layer of these sizes.

    `outer` is the number of output features, `inner` the number of input features.
    """
    if outer % 16 or inner % 16:  # the float8 kernels need multiples of 16
        return False
    # torchao chose these sizes from times on an H100.
    is_large = outer > 2048 and inner > 1024
    return is_large and (outer > 4096 or inner > 2048)


class _WithLoss(nn.Module):
    """A model whose output is its loss, so that torch.compile gets both."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Tensor], Tensor]):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, inputs: Tensor) -> Tensor:
        return self.loss_fn(self.model(inputs))


def make_step(ladder: Ladder, rung: Rung) -> RungStep:
    """Make the step with all rungs up to `rung`, with a new model and new data from one seed.

    Raises `OptionError` if a rung needs a package, a compiler or instructions that are missing.
    """
    torch.manual_seed(0)
    workload = ladder.workload
    problem = workload.build(ladder.device)
    call = problem.call
    model = call.model.train(workload.trains)
    use = TRAINING if workload.trains else INFERENCE
    # The operands of a matmul are in the precision, so that no cast is timed.
    recipe = Recipe(use, ladder.precision, cast=workload.kind == "matmul")
    reads_loss = workload.trains
    for lower in rungs_of(ladder):
        recipe = lower.change(recipe)
        model = lower.convert(model)
        reads_loss = reads_loss and lower.reads_loss
        if lower is rung:
            break
    if call.loss_fn is not None and workload.trains:
        model = _WithLoss(model, call.loss_fn)
    # The output of the model is the loss already. Inference never calls `loss_fn`.
    call = replace(call, model=model, loss_fn=lambda output: output)
    step = Step(call, recipe, ladder.device, _INITIAL_SCALE, problem.lr, "Adam")
    by_hand = rung.by_hand(workload)
    if by_hand:
        return _step_by_hand(step, by_hand, problem, ladder.precision)
    return _step_by_recipe(step, recipe, reads_loss=reads_loss)


def _step_by_recipe(step: Step, recipe: Recipe, *, reads_loss: bool) -> RungStep:
    """A step that follows its recipe; with `reads_loss`, the host waits for the loss."""
    (inputs,) = step.call.args
    # These two modes of torch.compile record CUDA graphs.
    is_graph_mode = recipe.compiled and recipe.compile_mode in ("reduce-overhead", "max-autotune")
    records_graph = is_graph_mode and backend(inputs.device).has_graphs
    is_overwritten = recipe.use == TRAINING or records_graph  # the output, by the next call

    def call() -> Tensor:
        if records_graph:
            # Tells torch that the output of the last step is no longer needed.
            torch.compiler.cudagraph_mark_step_begin()
        out = step.run()
        if is_overwritten:
            out = out.clone()
        if reads_loss:
            out.item()  # makes the host wait for the device
        return out

    return RungStep(call, step.model, inputs, records_graph)


def _step_by_hand(
    step: Step, by_hand: StepByHand, problem: Problem, precision: Precision
) -> RungStep:
    """A training step by hand, with the model, the inputs and the optimizer of another step."""
    optimizer = step.names["optimizer"]
    (inputs,) = step.call.args
    model_without_loss = step.model.model  # the model inside `_WithLoss`
    forward_backward = by_hand(model_without_loss, precision.dtype)

    def call() -> Tensor:
        loss = forward_backward(inputs, problem.target)
        optimizer.step()  # without `zero_grad`, since `forward_backward` replaces the gradients
        return loss

    return RungStep(call, step.model, inputs)

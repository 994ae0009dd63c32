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

from amp_lab.bench.workloads import Problem, Workload
from amp_lab.core.backends import backend
from amp_lab.core.errors import OptionError
from amp_lab.core.precision import Precision

# The loss scale of fp16. It is small enough that no step of these workloads overflows: GradScaler
# would skip that step, and its losses could not be compared with those of fp32.
_INITIAL_SCALE = 2.0**12


@dataclass(frozen=True)
class Case:
    """A workload in one precision on one device."""

    workload: Workload
    precision: Precision
    device: torch.device

    @property
    def is_low(self) -> bool:
        """Whether matmuls get operands of fewer than 32 bits."""
        return self.precision.dtype is not torch.float32


@dataclass
class Step:
    """The step of a case on a rung, ready to run."""

    call: Callable[[], Tensor]  # returns the loss if the workload trains, else the output
    model: nn.Module
    inputs: Tensor
    records_graph: bool = False  # whether the first calls record CUDA graphs for later ones


@dataclass(frozen=True)
class Recipe:
    """The settings of a step. Each rung up to the requested one returns a changed recipe."""

    case: Case
    problem: Problem
    make: Callable[["Recipe"], Callable[[], Tensor]]  # makes the function `Step.call`
    autocast: bool
    fused_adam: bool = False
    reads_loss: bool = True  # whether the host waits for the loss of every step
    compile_mode: str | None = None  # of torch.compile; None: eager mode
    step_class: Callable[..., Callable] | None = None  # of the step by hand, such as `FusedStep`

    @property
    def records_graph(self) -> bool:
        """Whether torch.compile records CUDA graphs in this mode on this device."""
        is_graph_mode = self.compile_mode in ("reduce-overhead", "max-autotune")
        return is_graph_mode and backend(self.case.device).has_graphs

    def compiled(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The function through torch.compile, or itself if the recipe has no compile mode."""
        if self.compile_mode is None:
            return function
        # Shapes never change here, so torch.compile need not prepare for other ones.
        return torch.compile(function, mode=self.compile_mode, dynamic=False)


@dataclass(frozen=True)
class Rung:
    """An optimization of a step, the cases that have it, and how the benchmark treats it."""

    name: str
    description: str  # in one line, for the command line
    exists: Callable[[Case], bool] = lambda case: True
    apply: Callable[[Recipe], Recipe] = lambda recipe: recipe
    # Whether it compiles for so long that a quick run leaves it out.
    takes_long: Callable[[Case], bool] = lambda case: False
    needs_graph: bool = False  # fails if torch records no CUDA graph, the only gain of the rung
    has_limit: bool = True  # whether the rates of `measure_ceilings` are an upper limit for it


# --- Changes that a rung makes: each takes a recipe and returns it changed. Some change the model
# or the inputs of its problem in place.


def _to_channels_last(recipe: Recipe) -> Recipe:
    """Store images and weights of convolutions as N, H, W, C."""
    problem = recipe.problem
    problem.model.to(memory_format=torch.channels_last)
    problem.inputs = problem.inputs.to(memory_format=torch.channels_last)
    return recipe


def _fold_norm(recipe: Recipe) -> Recipe:
    """Fold each batch normalisation, linear in evaluation mode, into the convolution before it."""
    layers: list[nn.Module] = []
    for layer in recipe.problem.model.children():
        if isinstance(layer, nn.BatchNorm2d) and isinstance(layers[-1], nn.Conv2d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    recipe.problem.model = nn.Sequential(*layers)
    return recipe


def _cast_once(recipe: Recipe) -> Recipe:
    """Cast model and inputs to the precision, in place of autocast."""
    dtype = recipe.case.precision.dtype
    problem = recipe.problem
    problem.model = problem.model.to(dtype)
    problem.inputs = problem.inputs.to(dtype)
    return replace(recipe, autocast=False)


def _to_fp8(recipe: Recipe) -> Recipe:
    """Convert large linear layers to float8, see `use_fp8`."""
    use_fp8(recipe.problem.model)
    return recipe


def _use_fused_step(recipe: Recipe) -> Recipe:
    """Replace the whole step by the one written by hand, see fused_convmodel.py."""
    step_class = recipe.case.workload.fused_step
    return replace(recipe, make=_step_by_hand, step_class=step_class, compile_mode=None)


def _use_tiled_step(recipe: Recipe) -> Recipe:
    """Replace the step by hand by the one with a kernel for each pass, see tiled_convmodel.py."""
    return replace(recipe, step_class=recipe.case.workload.tiled_step)


# --- Conditions on a case: whether a rung exists in it, and whether it takes long to compile.


def _compiles_long(case: Case) -> bool:
    """Whether compiled rungs take too long for a quick run: many layers, or fp32 or tf32."""
    return case.workload.many_layers or not case.is_low


def _can_use_fp8(case: Case) -> bool:
    """Whether the case is in bf16, with large linear layers, on a device with float8."""
    if case.precision is not Precision.BF16 or "large linear" not in case.workload.layers:
        return False
    return has_fp8(case.device)


def _has_fused_step(case: Case) -> bool:
    """Whether the workload has a step by hand, and the precision is not fp16."""
    # The step by hand has no loss scale, so fp16 would lose small gradients.
    return bool(case.workload.fused_step) and case.precision is not Precision.FP16


def _has_tiled_step(case: Case) -> bool:
    """Whether the case is in bf16, and the workload has kernels for the device."""
    if case.precision is not Precision.BF16 or not case.workload.tiled_step:
        return False
    device_backend = backend(case.device)
    return device_backend.is_host or device_backend.has_triton


def _has_several_ops(case: Case) -> bool:
    """Whether torch.compile can fuse ops: a matmul alone has none to fuse."""
    return case.workload.kind != "product"


RUNGS = (
    Rung("eager", "as most recipes have it; reads the loss after every step"),
    Rung(
        "channels-last",
        "images as N, H, W, C in memory",
        exists=lambda case: "convolution" in case.workload.layers,
        apply=_to_channels_last,
    ),
    Rung(
        "fused-adam",
        "Adam in one kernel; it unscales, and skips a step that the scaler's check fails",
        exists=lambda case: case.workload.trains,
        apply=lambda recipe: replace(recipe, fused_adam=True),
    ),
    Rung(
        "no-sync",
        "the host never waits: the loss is not read",
        # On a CPU the host computes the loss itself, so there is nothing to wait for.
        exists=lambda case: case.workload.trains and not backend(case.device).is_host,
        apply=lambda recipe: replace(recipe, reads_loss=False),
    ),
    Rung(
        "fold-norm",
        "batch normalisation folded into the convolution before it",
        exists=lambda case: case.workload.kind == "inference" and "norm" in case.workload.layers,
        apply=_fold_norm,
    ),
    Rung(
        "cast-once",
        "weights and input kept in the low precision, without autocast",
        exists=lambda case: case.workload.kind == "inference" and case.is_low,
        apply=_cast_once,
    ),
    Rung(
        "compile",
        "torch.compile: elementwise ops in one kernel, fewer calls",
        exists=_has_several_ops,
        apply=lambda recipe: replace(recipe, compile_mode="default"),
        takes_long=_compiles_long,
    ),
    Rung(
        "cuda-graphs",
        "forward and backward recorded once and replayed, without the host",
        exists=lambda case: _has_several_ops(case) and backend(case.device).has_graphs,
        apply=lambda recipe: replace(recipe, compile_mode="reduce-overhead"),
        takes_long=_compiles_long,
        needs_graph=True,
    ),
    Rung(
        "max-autotune",
        "torch.compile tries several kernels for each matrix product",
        exists=_has_several_ops,
        apply=lambda recipe: replace(recipe, compile_mode="max-autotune"),
        takes_long=lambda case: True,
    ),
    Rung(
        "fp8",
        "linear layers in float8, through torchao",
        exists=_can_use_fp8,
        apply=_to_fp8,
        takes_long=_compiles_long,
        has_limit=False,  # `measure_ceilings` times no matmul in float8
    ),
    Rung(
        "by-hand",
        "the step written anew, see fused_convmodel.py",
        exists=_has_fused_step,
        apply=_use_fused_step,
        takes_long=_compiles_long,
    ),
    Rung(
        "tiles",
        "the step by hand, a kernel for each pass over the pixels, see tiled_convmodel.py",
        exists=_has_tiled_step,
        apply=_use_tiled_step,
    ),
)
"""Every rung, from the lowest."""
EAGER = RUNGS[0]


def rungs_of(case: Case) -> list[Rung]:
    """The rungs that exist in a case, from the lowest."""
    return [rung for rung in RUNGS if rung.exists(case)]


def has_fp8(device: torch.device) -> bool:
    """Whether torchao has float8 for a device that is here.

    It has float8 for NVIDIA's GPUs from Ada on, AMD's from MI300 on (type ``cuda`` too), and XPUs.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type == "xpu" and torch.xpu.is_available()
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return architecture.startswith(("gfx94", "gfx95"))  # MI300 and MI350
    return torch.cuda.get_device_capability(device) >= (8, 9)  # Ada


def use_fp8(model: nn.Module, *, emulate: bool = False) -> None:
    """Convert large linear layers to float8, scaled for each row; weights stay float32.

    This is torchao's recipe ``rowwise`` with its filter: only layers that become faster, and whose
    sizes are multiples of 16 as the kernels need, are converted. With `emulate`, operands are
    rounded to float8 and multiplied in the precision around, which runs on any device. Raises
    `OptionError` without torchao.
    """
    try:
        float8 = importlib.import_module("torchao.float8")
    except ImportError as error:
        message = "float8 needs torchao, of the dependency group bench: pdm sync"
        raise OptionError(message) from error
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(
        model,
        # torchao calls it for linear layers alone. A weight is (out, in).
        module_filter_fn=lambda layer, name: gains_from_fp8(*layer.weight.shape),
        config=replace(config, emulate=emulate),
    )


def gains_from_fp8(outer: int, inner: int) -> bool:
    """Whether torchao's filter for ``rowwise`` converts a linear layer of these sizes.

    `outer` is the number of output features, `inner` that of input features.
    """
    if outer % 16 or inner % 16:  # the float8 kernels need multiples of 16
        return False
    # torchao chose these sizes from times on an H100.
    is_large = outer > 2048 and inner > 1024
    return is_large and (outer > 4096 or inner > 2048)


def make_step(case: Case, rung: Rung) -> Step:
    """Make the step with all rungs up to `rung`, with a new model and new data from one seed.

    Raises `OptionError` where a rung needs a package, a compiler or instructions that are not here.
    """
    torch.manual_seed(0)
    problem = case.workload.build(case.device)
    problem.model.train(case.workload.trains)
    make = _training_step if case.workload.trains else _inference_step
    recipe = Recipe(case, problem, make, autocast=case.is_low)
    if case.workload.kind == "product":  # operands are in the precision, so no cast is timed
        recipe = _cast_once(recipe)
    ladder = rungs_of(case)
    top = ladder.index(rung)
    for applied in ladder[: top + 1]:
        recipe = applied.apply(recipe)  # may replace `recipe.make`, and the problem's model
    return Step(recipe.make(recipe), problem.model, problem.inputs, recipe.records_graph)


def _training_step(recipe: Recipe) -> Callable[[], Tensor]:
    """Return a function that takes a training step as the recipe says and returns its loss."""
    problem = recipe.problem
    precision = recipe.case.precision
    device_type = recipe.case.device.type
    model = problem.model
    inputs = problem.inputs
    fused = True if recipe.fused_adam else None  # None lets torch choose, as in most recipes
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.lr, fused=fused)
    scaler = precision.grad_scaler(device_type, init_scale=_INITIAL_SCALE)
    forward = recipe.compiled(lambda inputs: problem.loss_fn(model(inputs)))  # returns the loss

    def step() -> Tensor:
        # Tells the graphs that the last step's outputs are no longer needed.
        if recipe.records_graph:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=precision.dtype, enabled=recipe.autocast):
            loss = forward(inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss = loss.detach().clone()  # the next replay of a graph overwrites its outputs
        if recipe.reads_loss:
            loss.item()  # makes the host wait for the device
        return loss

    return step


def _inference_step(recipe: Recipe) -> Callable[[], Tensor]:
    """Return a function that runs the model once without gradients and returns its output."""
    inputs = recipe.problem.inputs
    forward = recipe.compiled(recipe.problem.model)
    dtype = recipe.case.precision.dtype
    device_type = recipe.case.device.type

    @torch.no_grad()
    def step() -> Tensor:
        if recipe.records_graph:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device_type, dtype=dtype, enabled=recipe.autocast):
            out = forward(inputs)
        if recipe.records_graph:
            return out.clone()  # the next replay overwrites it
        return out

    return step


def _step_by_hand(recipe: Recipe) -> Callable[[], Tensor]:
    """Return a function that takes a training step by `recipe.step_class` and returns its loss."""
    problem = recipe.problem
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=problem.lr, fused=True)
    assert recipe.step_class is not None  # the rung exists only for workloads that have one
    forward_backward = recipe.step_class(problem.model, recipe.case.precision.dtype)

    def step() -> Tensor:
        loss = forward_backward(problem.inputs, problem.target)
        optimizer.step()  # without `zero_grad`, since `forward_backward` replaces the gradients
        return loss

    return step

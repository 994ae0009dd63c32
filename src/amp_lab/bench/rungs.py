"""The rungs of the speed ladder: each is one object, so to add a rung, add it to `RUNGS`.

A rung changes the step on top of all rungs before it. A mode of torch.compile takes the place of
the one before, and the step written by hand that of everything.
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

# Small enough that no step of these workloads overflows: a skipped one has no loss to compare.
_INITIAL_SCALE = 2.0**12


@dataclass(frozen=True)
class Case:
    """A workload in one precision on one device: a ladder to climb."""

    workload: Workload
    precision: Precision
    device: torch.device

    @property
    def is_low(self) -> bool:
        """Whether matrix products get numbers of fewer than 32 bits."""
        return self.precision.dtype is not torch.float32


@dataclass
class Step:
    """One configuration, ready to run."""

    call: Callable[[], Tensor]  # returns the loss, or the output of inference and products
    model: nn.Module
    inputs: Tensor
    records_graph: bool = False  # whether the first calls record CUDA graphs for the others


@dataclass(frozen=True)
class Recipe:
    """How a step is made. Each rung returns it changed, from the lowest to the one asked for."""

    case: Case
    problem: Problem
    make: Callable[["Recipe"], Callable[[], Tensor]]  # what returns the loss, or the output
    autocast: bool
    fused_adam: bool = False
    reads_loss: bool = True  # whether the host waits for the loss of every step
    compile_mode: str | None = None  # of torch.compile; None: without it
    by_hand: Callable[..., Callable] | None = None  # which of the workload's steps written by hand

    @property
    def records_graph(self) -> bool:
        """Whether torch.compile records CUDA graphs in this mode on this device."""
        records = self.compile_mode in ("reduce-overhead", "max-autotune")
        return records and backend(self.case.device).has_graphs

    def compiled(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`function`, through torch.compile if the recipe says so."""
        if self.compile_mode is None:
            return function
        return torch.compile(function, mode=self.compile_mode, dynamic=False)


@dataclass(frozen=True)
class Rung:
    """A change to the step, where there is one, and what else the benchmark has to know of it."""

    name: str
    what: str  # for the command line, in a line
    exists: Callable[[Case], bool] = lambda case: True
    apply: Callable[[Recipe], Recipe] = lambda recipe: recipe
    # Whether it has so much to compile that a quick run leaves it out.
    takes_long: Callable[[Case], bool] = lambda case: False
    needs_graph: bool = False  # has failed where torch records no CUDA graph: it is nothing else
    has_limit: bool = True  # whether the rates that `measure_ceilings` finds bound it too


def _compiles_long(case: Case) -> bool:
    return case.workload.many_layers or not case.is_low


def _to_channels_last(recipe: Recipe) -> Recipe:
    problem = recipe.problem
    problem.model.to(memory_format=torch.channels_last)
    problem.inputs = problem.inputs.to(memory_format=torch.channels_last)
    return recipe


def _fold_norm(recipe: Recipe) -> Recipe:
    """The same function without batch normalisation, which is linear in evaluation mode."""
    layers: list[nn.Module] = []
    for layer in recipe.problem.model.children():
        if isinstance(layer, nn.BatchNorm2d) and isinstance(layers[-1], nn.Conv2d):
            layers[-1] = fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    recipe.problem.model = nn.Sequential(*layers)
    return recipe


def _cast_once(recipe: Recipe) -> Recipe:
    dtype = recipe.case.precision.dtype
    problem = recipe.problem
    problem.model = problem.model.to(dtype)
    problem.inputs = problem.inputs.to(dtype)
    return replace(recipe, autocast=False)


def _to_fp8(recipe: Recipe) -> Recipe:
    use_fp8(recipe.problem.model)
    return recipe


def _written_by_hand(recipe: Recipe) -> Recipe:
    by_hand = recipe.case.workload.by_hand
    return replace(recipe, make=_step_by_hand, by_hand=by_hand, compile_mode=None)


def _in_tiles(recipe: Recipe) -> Recipe:
    return replace(recipe, by_hand=recipe.case.workload.in_tiles)


def _can_use_fp8(case: Case) -> bool:
    if case.precision is not Precision.BF16 or "large linear" not in case.workload.layers:
        return False
    return has_fp8(case.device)


def _can_be_written_by_hand(case: Case) -> bool:
    # Its gradients are not scaled, so fp16 would lose them.
    return bool(case.workload.by_hand) and case.precision is not Precision.FP16


def _can_be_in_tiles(case: Case) -> bool:
    if case.precision is not Precision.BF16 or not case.workload.in_tiles:
        return False
    here = backend(case.device)
    return here.is_host or here.has_triton


def _has_several_ops(case: Case) -> bool:
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
        # A CPU is the host itself, and has nothing to wait for.
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
        has_limit=False,  # no product is timed in float8
    ),
    Rung(
        "by-hand",
        "the step written anew, see fused_convmodel.py",
        exists=_can_be_written_by_hand,
        apply=_written_by_hand,
        takes_long=_compiles_long,
    ),
    Rung(
        "tiles",
        "the step by hand, a kernel for each pass over the pixels, see tiled_convmodel.py",
        exists=_can_be_in_tiles,
        apply=_in_tiles,
    ),
)
"""Every rung, from the lowest."""
EAGER = RUNGS[0]


def rungs_of(case: Case) -> list[Rung]:
    """The rungs of a ladder, from the lowest."""
    return [rung for rung in RUNGS if rung.exists(case)]


def has_fp8(device: torch.device) -> bool:
    """Whether torchao has float8 for a device: NVIDIA's from Ada on, AMD's from MI300 on, XPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type == "xpu" and torch.xpu.is_available()
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return architecture.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


def use_fp8(model: nn.Module, *, emulate: bool = False) -> None:
    """Let large linear layers compute in float8, scaled for each row; weights stay float32.

    It is torchao's recipe ``rowwise`` with its filter: layers that would be no faster, or whose
    sizes are no multiples of 16, which the kernels need, stay as they are. `emulate` rounds to
    float8, and multiplies in the precision around. Raises `OptionError` without torchao.
    """
    try:
        float8 = importlib.import_module("torchao.float8")
    except ImportError as error:
        message = "float8 needs torchao, of the dependency group bench: pdm sync"
        raise OptionError(message) from error
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda layer, name: gains_from_fp8(*layer.weight.shape),
        config=replace(config, emulate=emulate),
    )


def gains_from_fp8(outer: int, inner: int) -> bool:
    """Whether torchao's filter for ``rowwise``, from times on an H100, converts such a layer."""
    if outer % 16 or inner % 16:
        return False
    is_large = outer > 2048 and inner > 1024
    return is_large and (outer > 4096 or inner > 2048)


def make_step(case: Case, rung: Rung) -> Step:
    """The step with all rungs up to this one; each call makes model and data anew, from one seed.

    Raises `OptionError` where a rung needs what is not here: a package, a compiler, instructions.
    """
    torch.manual_seed(0)
    problem = case.workload.build(case.device)
    problem.model.train(case.workload.trains)
    make = _training_step if case.workload.trains else _inference_step
    recipe = Recipe(case, problem, make, autocast=case.is_low)
    if case.workload.kind == "product":  # of tensors in the precision itself, without any casts
        recipe = _cast_once(recipe)
    ladder = rungs_of(case)
    top = ladder.index(rung)
    for lower in ladder[: top + 1]:
        recipe = lower.apply(recipe)
    return Step(recipe.make(recipe), problem.model, problem.inputs, recipe.records_graph)


def _training_step(recipe: Recipe) -> Callable[[], Tensor]:
    problem = recipe.problem
    precision = recipe.case.precision
    device_type = recipe.case.device.type
    model = problem.model
    inputs = problem.inputs
    fused = True if recipe.fused_adam else None  # None lets torch choose, as in most recipes
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.lr, fused=fused)
    scaler = precision.grad_scaler(device_type, init_scale=_INITIAL_SCALE)
    forward = recipe.compiled(lambda inputs: problem.loss_fn(model(inputs)))

    def step() -> Tensor:
        if recipe.records_graph:  # else a graph could take the last step's memory for this one's
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype=precision.dtype, enabled=recipe.autocast):
            loss = forward(inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss = loss.detach().clone()  # a graph's own memory is written anew in its next run
        if recipe.reads_loss:
            loss.item()
        return loss

    return step


def _inference_step(recipe: Recipe) -> Callable[[], Tensor]:
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
            return out.clone()
        return out

    return step


def _step_by_hand(recipe: Recipe) -> Callable[[], Tensor]:
    problem = recipe.problem
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=problem.lr, fused=True)
    assert recipe.by_hand is not None  # or there is no such rung
    forward_backward = recipe.by_hand(problem.model, recipe.case.precision.dtype)

    def step() -> Tensor:
        loss = forward_backward(problem.inputs, problem.target)
        optimizer.step()  # without zero_grad: the gradients are replaced, and not added to
        return loss

    return step

"""Recipes for a step, and their code: the same lines are timed, checked and printed."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.core.timing import Estimate, Ratio
from amp_lab.tracing.copies import copied

TRAINING = "training"
INFERENCE = "inference"
YOURS = "# model, args, kwargs and loss_fn are yours: loss_fn(model(*args, **kwargs)) is the loss"

OWN_LOSS = remedy(
    "advise.own_loss",
    "a model is to be trained, and no loss was given",
    "No loss was given, so {loss} is used here: pass yours.",
)


@dataclass(frozen=True)
class Recipe:
    """How a step runs. `str(recipe)` is its name, which begins with the precision."""

    use: str  # TRAINING or INFERENCE
    precision: Precision = Precision.FP32
    cast: bool = False  # whether weights and inputs are cast, in place of autocast
    channels_last: bool = False
    fused: bool = False
    compiled: bool = False

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under `torch.autocast`."""
        return self.precision.dtype is not torch.float32 and not self.cast

    def __str__(self) -> str:
        name = str(self.precision)
        if self.cast:
            name += " weights"
        if self.autocasts:
            name += " autocast"
        if self.channels_last:
            name += ", channels-last"
        if self.fused:
            name += ", fused AdamW"
        if self.compiled:
            name += ", torch.compile"
        return name


@dataclass(frozen=True)
class Case:
    """A model with its inputs, its loss and a device. Steps work on copies, so none is changed."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], Any] | None = None  # takes the output
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def uses(self) -> tuple[str, ...]:
        """TRAINING and INFERENCE; INFERENCE alone if no weight requires a gradient."""
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            return TRAINING, INFERENCE
        return (INFERENCE,)

    def dtype_of(self, recipe: Recipe) -> torch.dtype | None:
        """The dtype to which weights and inputs are cast; None if they need no cast."""
        if recipe.cast:
            return recipe.precision.dtype
        if any(parameter.dtype in LOWER_DTYPES for parameter in self.model.parameters()):
            return torch.float32
        return None

    def random_numbers_kept(self) -> AbstractContextManager:
        """A context after which the random state of CPU and device is what it was before."""
        # `fork_rng` keeps the CPU's state in any case, and that of the listed devices.
        if self.device.type == "cpu":
            return torch.random.fork_rng([], device_type="cuda")
        index = torch.accelerator.current_device_index()
        return torch.random.fork_rng([index], device_type=self.device.type)

    def copied(self, recipe: Recipe) -> "Case":
        """The case with copies of model and inputs, in the dtype of the recipe."""
        dtype = self.dtype_of(recipe)
        model = copied(self.model)

        if dtype is not None:
            model = model.to(dtype)

        def copied_input(x: torch.Tensor) -> torch.Tensor:
            x = x.detach().clone()
            if dtype is not None and x.is_floating_point():
                return x.to(dtype)
            return x

        args, kwargs = tree_map_only(torch.Tensor, copied_input, (self.args, self.kwargs))
        return replace(self, model=model, args=args, kwargs=kwargs)


def recipes(use: str, precisions: list[Precision]) -> list[Recipe]:
    """The recipes to try first: each precision under autocast and, where it can be, cast."""
    castable = {Precision.BF16}
    if use == INFERENCE:  # fp16 weights cannot be trained: GradScaler refuses their gradients
        castable.add(Precision.FP16)
    first = []
    for precision in precisions:
        first.append(Recipe(use, precision))
        if precision in castable:
            first.append(Recipe(use, precision, cast=True))
    return first


def loss_of(output: Any) -> str | None:
    """A loss for an output, as Python code: its own loss, or the mean square of a tensor.

    The code is an expression such as ``output['loss']``. None if no tensor in the output has a
    gradient.
    """
    parts = {"output": output}
    if isinstance(output, Mapping):
        parts = {f"output[{name!r}]": part for name, part in output.items()}
    elif isinstance(output, (list, tuple)):
        parts = {f"output[{i}]": part for i, part in enumerate(output)}
    differentiable = [code for code, part in parts.items() if _has_gradient(part)]
    for code in differentiable:
        is_loss = "loss" in code or code == "output"
        if is_loss and not parts[code].dim():  # a scalar
            return code
    if not differentiable:
        return None
    return f"{differentiable[0]}.float().square().mean()"


def _has_gradient(part: Any) -> bool:
    """Whether a part of an output is a tensor that autograd can differentiate."""
    return isinstance(part, torch.Tensor) and part.requires_grad


_CHANNELS_LAST = "memory_format=torch.channels_last"
_MOVE_FUNCTION = """

def moved(x):  # for your own batches too
    if isinstance(x, dict):
        return {k: moved(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(moved, x))
    if not torch.is_tensor(x):
        return x"""
_MOVE_CALL = """\
    return x.to(device)


args, kwargs = moved(args), moved(kwargs)"""
_FP16_BACKWARD = """\
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()"""


def step_code(case: Case, recipe: Recipe, scale: float, lr: float = 1e-4) -> str:
    """The lines that move model and inputs to the device, and define ``step``.

    `scale` is the first loss scale, which only training in fp16 has; `lr` is the learning rate.
    """
    code = []
    if recipe.precision is Precision.TF32:
        code.append('torch.set_float32_matmul_precision("high")')
    code += _moving_lines(case, recipe)
    if recipe.use == TRAINING:
        code += _optimizer_lines(recipe, scale, lr)
    if recipe.compiled:
        code.append("model = torch.compile(model)")
    if recipe.use == TRAINING:
        code += _training_step_lines(recipe)
    else:
        code += _inference_step_lines(recipe)
    return "\n".join(code)


def _moving_lines(case: Case, recipe: Recipe) -> list[str]:
    """Lines that move model, ``args`` and ``kwargs`` to the device and the dtype."""
    dtype = case.dtype_of(recipe)
    arguments = "device"
    if dtype is not None:
        arguments += f", dtype={dtype}"
    if recipe.channels_last:
        arguments += f", {_CHANNELS_LAST}"
    model_line = f"model = model.to({arguments})"
    if recipe.use == INFERENCE:
        model_line += ".eval()"
    code = [f'device = torch.device("{case.device}")', model_line, _MOVE_FUNCTION]
    # Lines inside the function `moved`, which `_MOVE_CALL` ends.
    if dtype is not None:
        code.append(f"    x = x.to({dtype}) if x.is_floating_point() else x")
    if recipe.channels_last:
        code.append(f"    x = x.contiguous({_CHANNELS_LAST}) if x.dim() == 4 else x")
    return [*code, _MOVE_CALL]


def _optimizer_lines(recipe: Recipe, scale: float, lr: float) -> list[str]:
    """Lines that make the optimizer, and the scaler in fp16."""
    options = f"lr={lr}"
    if recipe.fused:
        options += ", fused=True"
    code = [f"optimizer = torch.optim.AdamW(model.parameters(), {options})"]
    if recipe.precision is Precision.FP16:
        code.append(f"scaler = torch.amp.GradScaler(device.type, init_scale={scale})")
    return code


def _training_step_lines(recipe: Recipe) -> list[str]:
    """Lines that define ``step``, which trains once and returns the loss."""
    forward = _under_autocast(recipe, "loss = loss_fn(model(*args, **kwargs))")
    backward = "    loss.backward()\n    optimizer.step()"
    if recipe.precision is Precision.FP16:
        backward = _FP16_BACKWARD
    begin = "\n\ndef step():\n    optimizer.zero_grad()"
    return [begin, forward, backward, "    return loss.detach()"]


def _inference_step_lines(recipe: Recipe) -> list[str]:
    """Lines that define ``step``, which returns the output of the model."""
    forward = _under_autocast(recipe, "return model(*args, **kwargs)")
    return ["\n\n@torch.inference_mode()\ndef step():", forward]


def _under_autocast(recipe: Recipe, line: str) -> str:
    """A line of ``step``, indented, in a block of autocast if the recipe has one."""
    if not recipe.autocasts:
        return f"    {line}"
    dtype = recipe.precision.dtype
    return f"    with torch.autocast(device.type, dtype={dtype}):\n        {line}"


def program(case: Case, recipe: Recipe, scale: float, beginning: str = YOURS) -> str:
    """A program of `beginning` (makes the names in `YOURS`), `step_code`, and calls of ``step``."""
    end = "step()"
    if recipe.use == TRAINING:
        end = "for i in range(3):  # your own loop\n    print(i, step().item())"
    return f"import torch\n\n{beginning.strip()}\n\n{step_code(case, recipe, scale)}\n\n\n{end}\n"


def setup_code(beginning: str, use: str, loss: str | None) -> str:
    """The code before the step: `beginning`, or `YOURS`; for training with `loss`, if given."""
    if not beginning:
        return YOURS
    if not loss or use != TRAINING:
        return beginning
    return f"{beginning}\n\n\ndef loss_fn(output):  # yours\n    return {loss}\n"


def error_of(text: str, timeout: float) -> str:
    """Run a program in another process; return the last line of its error, empty if it succeeds."""
    command = [sys.executable, "-c", text]
    try:
        done = subprocess.run(command, timeout=timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"it did not end in {timeout:.0f} s"
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines() or ["it failed"]
    return lines[-1]


class Step:
    """The code of a recipe on a copy of a model: each call is one step, or one inference."""

    def __init__(self, case: Case, recipe: Recipe, scale: float = 2.0**16, lr: float = 1e-4):
        self._recipe = recipe
        self._type = case.device.type
        # The globals of the code, with model, args, kwargs and loss_fn, which it reads.
        self.names: dict[str, Any] = vars(case.copied(recipe)) | {"torch": torch}
        self.model = self.names["model"]  # before the code compiles it
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        with Precision.FP32.autocast(self._type):  # at its end TF32 is set as before
            exec(step_code(case, recipe, scale, lr), self.names)

    def __call__(self) -> Any:
        """Run one step; return the loss in training, else the output. tf32 recipes use TF32."""
        with self._recipe.precision.float32_mode(self._type):
            return self.names["step"]()

    def output(self) -> Any:
        """The model's output without autocast and TF32: in the dtype of its weights."""
        with Precision.FP32.autocast(self._type):
            return self.call_model()

    def call_model(self) -> Any:
        """The model's output, under the autocast that the caller has set, if any."""
        return self.model(*self.names["args"], **self.names["kwargs"])


@dataclass(eq=False)
class Candidate:
    """A recipe with its forecast, its measurements and its verdict."""

    recipe: Recipe
    verdict: str = ""  # such as "recommended", "slower", "unlike fp32", "raises", "does not fit"
    reason: str = ""
    peak_bytes: int | None = None  # forecast
    largest_batch: int | None = None  # forecast
    against_fp32: str = ""  # difference of its gradients and learning, or of its output
    losses: tuple[float, ...] = ()  # of its first steps
    time_s: Estimate | None = None  # of a step
    speedup: Ratio | None = None  # time of the baseline over its own, measured in turns
    seconds: float = 0.0  # of a step, from the check: fastest in training, median in inference

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return str(self.recipe)

"""A step of a recipe: this module runs the same lines that it prints."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_lab.core.precision import Precision
from amp_lab.model_call import ModelCall
from amp_lab.recipes.recipe import INFERENCE, TRAINING, Recipe

DEFAULT_SCALE = 2.0**16  # of `GradScaler`
_NOISE = 2.0**-9  # relative, as large as bf16's rounding error
_CHANNELS_LAST = "memory_format=torch.channels_last"
_MOVED_BEGIN = """

def moved(x):  # call it on your batches too
    if isinstance(x, dict):
        return {k: moved(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(moved, x))
    if not torch.is_tensor(x):
        return x"""
_MOVED_END = "    return x.to(device)"
_MOVE_ARGUMENTS = """

args, kwargs = moved(args), moved(kwargs)"""
_FP16_BACKWARD = """\
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()"""


def step_code(
    model: nn.Module,
    recipe: Recipe,
    device: torch.device,
    scale: float,
    lr: float = 1e-4,
    optimizer: str = "AdamW",
) -> str:
    """The lines that move model and inputs to the device, and define ``step``.

    For training, `optimizer` is the name of a class in `torch.optim`, `lr` its learning rate, and
    `scale` the first loss scale, only for fp16.
    """
    code = []
    if recipe.precision is Precision.TF32:
        code.append('torch.set_float32_matmul_precision("high")')
    code += _moving_lines(recipe, device, recipe.dtype_for(model))
    if recipe.use == TRAINING:
        code += _optimizer_lines(recipe, scale, lr, optimizer)
    if recipe.compiled:
        mode = ""
        if recipe.compile_mode != "default":
            mode = f', mode="{recipe.compile_mode}"'
        code.append(f"model = torch.compile(model{mode})")
    if recipe.use == TRAINING:
        code += _training_step_lines(recipe)
    else:
        code += _inference_step_lines(recipe)
    return "\n".join(code)


def _moving_lines(recipe: Recipe, device: torch.device, dtype: torch.dtype | None) -> list[str]:
    """Lines that move model, ``args`` and ``kwargs`` to the device and, if given, the dtype.

    They also define ``moved``, the function that moves a batch.
    """
    arguments = "device"
    if dtype is not None:
        arguments += f", dtype={dtype}"
    if recipe.channels_last:
        arguments += f", {_CHANNELS_LAST}"
    model_line = f"model = model.to({arguments})"
    if recipe.use == INFERENCE:
        model_line += ".eval()"
    code = [f'device = torch.device("{device}")', model_line, _MOVED_BEGIN]
    if dtype is not None:
        code.append(f"    x = x.to({dtype}) if x.is_floating_point() else x")
    if recipe.channels_last:
        code.append(f"    x = x.contiguous({_CHANNELS_LAST}) if x.dim() == 4 else x")
    code += [_MOVED_END, _MOVE_ARGUMENTS]
    return code


def _optimizer_lines(recipe: Recipe, scale: float, lr: float, optimizer: str) -> list[str]:
    """Lines that make the optimizer, and the scaler in fp16."""
    options = f"lr={lr}"
    if recipe.fused:
        options += ", fused=True"
    code = [f"optimizer = torch.optim.{optimizer}(model.parameters(), {options})"]
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


class Step:
    """Runs a recipe on a copy of a model: each call is one training step or one inference.

    The step runs on `device`; the default is the device of the model.
    """

    def __init__(
        self,
        call: ModelCall,
        recipe: Recipe,
        device: torch.device | None = None,
        scale: float = DEFAULT_SCALE,
        lr: float = 1e-4,
        optimizer: str = "AdamW",
    ):
        self.device = device or call.device
        self._recipe = recipe
        # The globals of the code, with model, args, kwargs and loss_fn, which it reads.
        copies = call.copy()
        self.names: dict[str, Any] = vars(copies) | {"torch": torch}
        self.model = copies.model  # before the code compiles it
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        with Precision.FP32.autocast(self.device.type):  # at its end TF32 is set as before
            exec(step_code(self.model, recipe, self.device, scale, lr, optimizer), self.names)
        self.run: Callable[[], Any] = self.names["step"]  # in the float32 mode around it
        args = self.names["args"]
        self.call = ModelCall(self.model, args, self.names["kwargs"], call.loss_fn)
        """The call of the model that the step runs, for the autocast that its user sets."""

    def __call__(self) -> Any:
        """Run one step; return the loss in training, else the output. tf32 recipes use TF32."""
        with self._recipe.precision.float32_mode(self.device.type):
            return self.run()

    def output(self) -> Any:
        """The model's output in the dtype of the weights, without autocast and TF32."""
        with Precision.FP32.autocast(self.device.type):
            return self.call.output()

    @torch.no_grad()
    def add_noise(self) -> None:
        """Multiply each weight by a random factor that differs from 1 by bf16's rounding error."""
        for weight in self.trained:
            weight.mul_(1 + _NOISE * torch.randn_like(weight))

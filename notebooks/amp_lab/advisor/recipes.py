"""What can be tried: recipes for a step, as the very lines that are timed, checked and printed."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from amp_lab.precision import Precision
from amp_lab.remedies import remedy
from amp_lab.timing import Estimate, Ratio
from amp_lab.tracing.copies import copied
from amp_lab.tracing.ops_seen import LOWER_DTYPES

TRAINING, INFERENCE = "training", "inference"
YOURS = "# model, args, kwargs and loss_fn are yours: loss_fn(model(*args, **kwargs)) is the loss"

OWN_LOSS = remedy(
    "advise.own_loss",
    "a model is to be trained, and no loss was given",
    "No loss was given, so {loss} is used here: pass yours.",
)


@dataclass(frozen=True)
class Recipe:
    """How a step runs; `str` of it is its name, which begins with the precision."""

    use: str  # TRAINING or INFERENCE
    precision: Precision = Precision.FP32
    cast: bool = False  # weights and inputs cast to the precision, in place of autocast
    channels_last: bool = False
    fused: bool = False
    compiled: bool = False

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under `torch.autocast`."""
        return self.precision.dtype is not torch.float32 and not self.cast

    def __str__(self) -> str:
        name = f"{self.precision}{' weights' * self.cast}{' autocast' * self.autocasts}"
        name += ", channels-last" * self.channels_last
        return name + ", fused AdamW" * self.fused + ", torch.compile" * self.compiled


@dataclass(frozen=True)
class Case:
    """A model, and what a call and a loss of it take. None is changed: steps work on copies."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], Any] | None = None  # gets the output
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def uses(self) -> tuple[str, ...]:
        """What it can be used for: a model without a weight to be trained, for inference alone."""
        trains = any(parameter.requires_grad for parameter in self.model.parameters())
        return (TRAINING, INFERENCE) if trains else (INFERENCE,)

    def dtype_of(self, recipe: Recipe) -> torch.dtype | None:
        """What the recipe casts weights and inputs to; None: they have the right dtype already."""
        if recipe.cast:
            return recipe.precision.dtype
        half = any(parameter.dtype in LOWER_DTYPES for parameter in self.model.parameters())
        return torch.float32 if half else None

    def copied(self, recipe: Recipe) -> "Case":
        """The same with copies of model and inputs, in the dtype of the recipe."""
        dtype = self.dtype_of(recipe)
        model = copied(self.model)

        def cast(x: torch.Tensor) -> torch.Tensor:
            x = x.detach().clone()
            return x.to(dtype) if dtype and x.is_floating_point() else x

        args, kwargs = tree_map_only(torch.Tensor, cast, (self.args, self.kwargs))
        return replace(self, model=model.to(dtype) if dtype else model, args=args, kwargs=kwargs)


def recipes(use: str, precisions: list[Precision]) -> list[Recipe]:
    """What to try first; the best then get what else can be switched on."""
    # fp16 weights cannot be trained: GradScaler refuses their gradients.
    cast = {Precision.BF16, Precision.FP16} if use == INFERENCE else {Precision.BF16}
    pairs = itertools.product(precisions, (False, True))
    return [Recipe(use, p, cast=casts) for p, casts in pairs if not casts or p in cast]


def loss_of(output: Any) -> str | None:
    """A loss of an output, as Python: its own or a mean square; None if no gradient leads there."""
    parts = {"output": output}
    if isinstance(output, Mapping):
        parts = {f"output[{name!r}]": part for name, part in output.items()}
    elif isinstance(output, (list, tuple)):
        parts = {f"output[{i}]": part for i, part in enumerate(output)}
    found = [p for p, t in parts.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    scalars = [place for place in found if not parts[place].dim()]
    own = [place for place in scalars if "loss" in place or place == "output"]
    return next(iter(own + [f"{place}.float().square().mean()" for place in found]), None)


def lines(case: Case, recipe: Recipe, scale: float, lr: float = 1e-4) -> str:
    """The lines that put model and inputs in place, and define ``step``."""
    dtype, image = case.dtype_of(recipe), "memory_format=torch.channels_last"
    to = "device" + f", dtype={dtype}" * (dtype is not None) + f", {image}" * recipe.channels_last
    trains, low = recipe.use == TRAINING, recipe.autocasts
    fp16 = trains and recipe.precision is Precision.FP16
    fused, tab = ", fused=True" * recipe.fused, "    " * (1 + low)
    found = [
        (recipe.precision is Precision.TF32, 'torch.set_float32_matmul_precision("high")'),
        (True, f'device = torch.device("{case.device}")'),
        (True, f"model = model.to({to}){'' if trains else '.eval()'}"),
        (True, "\n\ndef moved(x):  # for your own batches too"),
        (True, "    if isinstance(x, dict):\n        return {k: moved(v) for k, v in x.items()}"),
        (True, "    if isinstance(x, (list, tuple)):\n        return type(x)(map(moved, x))"),
        (True, "    if not torch.is_tensor(x):\n        return x"),
        (dtype is not None, f"    x = x.to({dtype}) if x.is_floating_point() else x"),
        (recipe.channels_last, f"    x = x.contiguous({image}) if x.dim() == 4 else x"),
        (True, "    return x.to(device)\n\n\nargs, kwargs = moved(args), moved(kwargs)"),
        (trains, f"optimizer = torch.optim.AdamW(model.parameters(), lr={lr}{fused})"),
        (fp16, f"scaler = torch.amp.GradScaler(device.type, init_scale={scale})"),
        (recipe.compiled, "model = torch.compile(model)"),
        (True, "\n" if trains else "\n\n@torch.inference_mode()"),
        (True, "def step():"),
        (trains, "    optimizer.zero_grad()"),
        (low, f"    with torch.autocast(device.type, dtype={recipe.precision.dtype}):"),
        (not trains, f"{tab}return model(*args, **kwargs)"),
        (trains, f"{tab}loss = loss_fn(model(*args, **kwargs))"),
        (fp16, "    scaler.scale(loss).backward()\n    scaler.step(optimizer)"),
        (fp16, "    scaler.update()"),
        (trains and not fp16, "    loss.backward()\n    optimizer.step()"),
        (trains, "    return loss.detach()"),
    ]
    return "\n".join(line for there, line in found if there)


def program(case: Case, recipe: Recipe, scale: float, beginning: str = YOURS) -> str:
    """A program with these lines, after a `beginning` that makes the names in `YOURS`."""
    trains = recipe.use == TRAINING
    end = "for i in range(3):  # your own loop\n    print(i, step().item())" if trains else "step()"
    return f"import torch\n\n{beginning.strip()}\n\n{lines(case, recipe, scale)}\n\n\n{end}\n"


class Step:
    """The lines of a recipe on a copy of a model: a call trains, or infers, once."""

    def __init__(self, case: Case, recipe: Recipe, scale: float = 2.0**16, lr: float = 1e-4):
        self._recipe, self._type = recipe, case.device.type
        self.names: dict[str, Any] = vars(case.copied(recipe)) | {"torch": torch}
        self.model = self.names["model"]  # itself, also if the lines compile it
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        with Precision.FP32.autocast(self._type):  # puts back what the lines may say of TF32
            exec(lines(case, recipe, scale, lr), self.names)

    def __call__(self) -> Any:
        """Run it once, without TF32 but for tf32."""
        with self._recipe.precision.float32_mode(self._type):
            return self.names["step"]()

    def output(self) -> Any:
        """What the model returns in fp32."""
        with Precision.FP32.autocast(self._type):
            return self.call_model()

    def call_model(self) -> Any:
        """What the model itself returns for its inputs, in whatever precision is around."""
        return self.model(*self.names["args"], **self.names["kwargs"])


@dataclass(eq=False)
class Candidate:
    """A recipe, and what is found of it."""

    recipe: Recipe
    verdict: str = ""  # such as "recommended", "slower", "unlike fp32", "raises", "does not fit"
    reason: str = ""
    peak_bytes: int | None = None  # forecast, as is the largest batch that fits
    largest_batch: int | None = None
    against_fp32: str = ""  # how far its gradients and its learning, or its output, are off
    losses: tuple[float, ...] = ()  # of its first steps
    time_s: Estimate | None = None  # of a step
    speedup: Ratio | None = None  # time of the baseline over its own, in turns with it
    seconds: float = 0.0  # of the fastest of its first steps

    @property
    def name(self) -> str:
        """What it is, in words."""
        return str(self.recipe)

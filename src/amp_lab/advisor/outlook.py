"""X-rays and memory forecasts of a model, before anything runs, for any device."""

import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from amp_lab.advisor.candidates import Candidate, first_recipes
from amp_lab.advisor.result import Advice
from amp_lab.core.device import describe_device
from amp_lab.core.errors import TraceError
from amp_lab.core.gpus import Gpu
from amp_lab.core.precision import Precision
from amp_lab.core.report import bytes_text
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, TRAINING, Recipe, uses_of
from amp_lab.tracing.memory import memory_table
from amp_lab.tracing.memory_arguments import parse_bytes
from amp_lab.tracing.xray import xray_call
from amp_lab.tracing.xray_result import Xray

_RESERVE = 0.1  # share of the memory that is left to the driver and to fragmentation


class MemoryForecast(NamedTuple):
    """The memory forecast of a recipe; each figure is None if it is unknown."""

    peak_bytes: int | None = None
    largest_batch: int | None = None  # that fits into the memory budget


@dataclass
class Outlook:
    """What is known of a model on a device without running it: X-rays and memory forecasts.

    An X-ray lists the ops of a step with their dtypes under autocast.
    """

    device: torch.device
    memory_bytes: int | None = None  # the budget; None if it is not known
    raises: dict[tuple[str, Precision], str] = field(default_factory=dict)
    """By use (``training`` or ``inference``) and precision: the error that autocast raises."""
    xrays: dict[Precision, Xray] = field(default_factory=dict)
    memory: dict[tuple[str, bool, bool], MemoryForecast] = field(default_factory=dict)
    """By the recipe's `use`, `autocasts` and `cast`."""
    problem: TraceError | None = None  # why there is no forecast

    @property
    def decisions(self) -> list[str]:
        """Sentences for models that branch on the values of tensors, each once.

        X-rays have no values, so they take the branches that a real run on the CPU took.
        """
        sentences = [report.decisions for report in self.xrays.values() if report.decisions]
        return list(dict.fromkeys(sentences))

    def memory_of(self, recipe: Recipe) -> MemoryForecast:
        """The memory forecast of a recipe, which ignores layout, fusion and compilation."""
        return self.memory.get((recipe.use, recipe.autocasts, recipe.cast), MemoryForecast())

    def rejection(self, recipe: Recipe) -> tuple[str, str]:
        """A verdict, such as ``raises``, and its reason, if the forecast rules a recipe out.

        Both texts are empty if the recipe may run.
        """
        raised = self.raises.get((recipe.use, recipe.precision))
        if raised and recipe.autocasts:
            return "raises", raised
        # Where the forecast or the memory of the device is unknown, every recipe fits.
        peak = self.memory_of(recipe).peak_bytes or 0
        usable = (1 - _RESERVE) * (self.memory_bytes or math.inf)
        excess = peak - usable
        if excess > 0:
            return "does not fit", f"{bytes_text(excess)} too much"
        return "", ""

    def candidate(self, recipe: Recipe) -> Candidate:
        """The candidate of a recipe: its forecast, and a verdict if the forecast rules it out."""
        verdict, reason = self.rejection(recipe)
        memory = self.memory_of(recipe)
        return Candidate(recipe, verdict, reason, memory.peak_bytes, memory.largest_batch)


def trace_and_forecast(
    call: ModelCall,
    device: torch.device,
    memory: int | str | None = None,
    gpu: Gpu | None = None,
) -> Outlook:
    """X-ray a model in bf16 and fp16, and forecast its memory.

    Give `gpu` if the device is not in this machine. `memory`, such as ``"24GiB"``, is the memory
    budget. The default is the memory of the device. If the model cannot be traced and the device is
    absent, the function raises `TraceError`. If the device is in this machine, the model may still
    run, so the function stores the error as `problem`.
    """
    outlook = Outlook(device)
    if memory is not None:
        outlook.memory_bytes = parse_bytes(memory)
    elif gpu is not None:
        outlook.memory_bytes = gpu.memory_bytes
    else:
        outlook.memory_bytes = describe_device(device).memory_bytes
    try:
        for precision in (Precision.BF16, Precision.FP16):
            _xray_step(call, precision, outlook)
        for use in uses_of(call.model):
            _forecast_memory(call, use, outlook)
    except TraceError as error:
        if gpu is not None:
            raise
        outlook.problem = error
    return outlook


def forecast(call: ModelCall, outlook: Outlook, gpu: Gpu) -> Advice:
    """Return the advice for a GPU that is not in this machine: dtypes and memory, but no times."""
    matmuls = gpu.architecture.matmuls
    precisions = [Precision.FP32]
    if Precision.TF32 in matmuls:
        precisions.append(Precision.TF32)
    # Of bf16 and fp16, those with fast matmuls on this GPU come first: False sorts before True.
    precisions += sorted(outlook.xrays, key=lambda precision: precision not in matmuls)
    candidates = []
    for use in uses_of(call.model):
        for recipe in first_recipes(use, precisions):
            candidate = outlook.candidate(recipe)
            may_be_faster = recipe.precision in (Precision.FP32, *matmuls)
            if not candidate.verdict and not may_be_faster:
                candidate.verdict = "not faster"
                candidate.reason = f"matmuls in {recipe.precision} are no faster on {gpu.name}"
            if not candidate.verdict:
                candidate.verdict = "not timed"
            candidates.append(candidate)
    watch = [f"Nothing was timed: only a run on {gpu.name} can show which recipe is the fastest."]
    if gpu.source:
        faster = ", ".join(matmuls) or "none"
        watch.append(f"On {gpu.name}, matmuls in these formats are faster than in fp32: {faster}.")
    watch += outlook.decisions
    for precision, report in outlook.xrays.items():
        watch += [f"{precision}: {line}" for line in report.advice]
    title = f"{type(call.model).__name__} on {gpu.name}: a forecast, without a run on this GPU"
    return Advice(title, candidates, chosen={}, programs={}, watch=watch)


def _xray_step(call: ModelCall, precision: Precision, outlook: Outlook) -> None:
    """X-ray a step under autocast, and write the X-ray and its errors to `outlook`."""
    report = xray_call(call, outlook.device.type, precision.dtype)
    outlook.xrays[precision] = report
    if not report.raised:
        return
    outlook.raises[TRAINING, precision] = report.raised
    # The loss or the backward pass may have raised. Inference has neither, so it may still run.
    inference_call = replace(call.copy(), loss_fn=None)
    inference_call.model.requires_grad_(False).eval()
    inference_report = xray_call(inference_call, outlook.device.type, precision.dtype)
    if inference_report.raised:
        outlook.raises[INFERENCE, precision] = inference_report.raised


def _forecast_memory(call: ModelCall, use: str, outlook: Outlook) -> None:
    """Forecast the memory of a step in fp32, under autocast, and with weights cast to bf16.

    `use` is ``training`` or ``inference``. The forecasts are written to `outlook`.
    """
    _forecast_recipe_memory(call, Recipe(use), outlook)
    # Autocast to bf16 and to fp16 needs the same memory, so one that does not raise is enough.
    for precision in outlook.xrays:
        if (use, precision) not in outlook.raises:
            _forecast_recipe_memory(call, Recipe(use, precision), outlook)
            break
    # A model that cannot be traced with cast weights may still run, and is tried later.
    with contextlib.suppress(TraceError):
        _forecast_recipe_memory(call, Recipe(use, Precision.BF16, cast=True), outlook)


def _forecast_recipe_memory(call: ModelCall, recipe: Recipe, outlook: Outlook) -> None:
    """Write the memory forecast of a recipe to `outlook.memory`."""
    copies = call.copy().to(dtype=recipe.dtype_for(call.model))
    if recipe.use == INFERENCE:  # without gradients a step is a forward pass
        copies.model.requires_grad_(False).eval()
        copies = replace(copies, loss_fn=None)
    table = memory_table(
        copies,
        memory_bytes=outlook.memory_bytes,
        reserve=_RESERVE,
        # Cast weights run without autocast, as fp32 does.
        precisions=[Precision.FP32 if recipe.cast else recipe.precision],
        device_type=outlook.device.type,
        optimizer="adamw",
    )
    peak = table.forecasts[0].peak  # of the only precision
    # `largest` has one item too, or none if the memory of the device is unknown.
    largest_batch = next(iter(table.largest.values()), None)
    key = (recipe.use, recipe.autocasts, recipe.cast)
    outlook.memory[key] = MemoryForecast(peak, largest_batch)

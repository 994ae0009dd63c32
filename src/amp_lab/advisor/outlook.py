"""X-rays and memory forecasts of a model, before anything runs, for any device."""

import contextlib
import math
from dataclasses import dataclass, field, replace

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


@dataclass
class Outlook:
    """The X-rays and the memory forecasts of a model on a device."""

    device: torch.device
    memory_bytes: int | None = None  # the budget; None if it is not known
    raises: dict[tuple[str, Precision], str] = field(default_factory=dict)
    """By use and precision: the error that autocast raises."""
    xrays: dict[Precision, Xray] = field(default_factory=dict)
    memory: dict[tuple, tuple[int, int | None]] = field(default_factory=dict)
    """Peak bytes and largest batch by the recipe's `use`, `autocasts` and `cast`."""
    problem: TraceError | None = None  # why there is no forecast

    @property
    def decisions(self) -> list[str]:
        """Remarks of X-rays that followed the decisions of a real run on the CPU, each once."""
        decisions = [report.decisions for report in self.xrays.values() if report.decisions]
        return list(dict.fromkeys(decisions))

    def memory_of(self, recipe: Recipe) -> tuple[int | None, int | None]:
        """Peak bytes and largest batch of a recipe, each None if it was not forecast.

        The forecast ignores layout, fusion and compilation.
        """
        return self.memory.get((recipe.use, recipe.autocasts, recipe.cast), (None, None))

    def rejection(self, recipe: Recipe) -> tuple[str, str]:
        """A verdict, such as ``raises``, and its reason, if the forecast rules a recipe out.

        Both texts are empty if the recipe may run.
        """
        raised = self.raises.get((recipe.use, recipe.precision))
        if raised and recipe.autocasts:
            return "raises", raised
        peak, _ = self.memory_of(recipe)
        usable = (1 - _RESERVE) * (self.memory_bytes or math.inf)
        too_much = (peak or 0) - usable
        if too_much > 0:
            return "does not fit", f"{bytes_text(too_much)} too much"
        return "", ""

    def candidate(self, recipe: Recipe) -> Candidate:
        """The candidate of a recipe: its forecast, and a verdict if the forecast rules it out."""
        verdict, reason = self.rejection(recipe)
        peak_bytes, largest_batch = self.memory_of(recipe)
        return Candidate(recipe, verdict, reason, peak_bytes, largest_batch)


def trace_and_forecast(
    call: ModelCall,
    device: torch.device,
    memory: int | str | None = None,
    gpu: Gpu | None = None,
) -> Outlook:
    """X-ray a model in bf16 and fp16, and forecast its memory.

    Give `gpu` if the device is not in this machine. `memory`, such as ``"24GiB"``, is the budget;
    by default it is the memory of the device. If the model cannot be traced, the function raises
    `TraceError` for an absent device. If the device is in this machine, the model may still run, so
    the error is stored as `problem`.
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
            _take_xrays(call, precision, outlook)
        for use in uses_of(call.model):
            _forecast(call, use, outlook)
    except TraceError as error:
        if gpu is not None:
            raise
        outlook.problem = error
    return outlook


def forecast(call: ModelCall, outlook: Outlook, gpu: Gpu) -> Advice:
    """Advice for a GPU that is not in this machine: X-rays and forecasts, without times."""
    matmuls = gpu.architecture.matmuls
    precisions = [Precision.FP32]
    if Precision.TF32 in matmuls:
        precisions.append(Precision.TF32)
    # Those that it has come first. X-rays are by precision.
    precisions += sorted(outlook.xrays, key=lambda precision: precision not in matmuls)
    candidates = []
    for use in uses_of(call.model):
        for recipe in first_recipes(use, precisions):
            candidate = outlook.candidate(recipe)
            if not candidate.verdict and recipe.precision not in (Precision.FP32, *matmuls):
                candidate.verdict = "not faster"
                candidate.reason = f"matmuls in {recipe.precision} are no faster on {gpu.name}"
            candidate.verdict = candidate.verdict or "not timed"
            candidates.append(candidate)
    watch = [f"Nothing was timed: only a run on {gpu.name} can tell which is the fastest."]
    if gpu.source:
        faster = ", ".join(matmuls) or "none"
        watch.append(f"Formats whose matmuls are faster than fp32's on {gpu.name}: {faster}.")
    watch += outlook.decisions
    for precision, report in outlook.xrays.items():
        watch += [f"{precision}: {line}" for line in report.advice]
    title = f"{type(call.model).__name__} on {gpu.name}, which is not here: a forecast"
    return Advice(title, candidates, {}, {}, watch)


def _take_xrays(call: ModelCall, precision: Precision, outlook: Outlook) -> None:
    """X-ray a step, and a forward pass alone if the step raises; write the results to `outlook`."""
    report = xray_call(call, outlook.device.type, precision.dtype)
    outlook.xrays[precision] = report
    if not report.raised:
        return
    # The loss or the backward pass may have raised, which inference does not have.
    forward = replace(call.copy(), loss_fn=None)
    forward.model.requires_grad_(False).eval()
    alone = xray_call(forward, outlook.device.type, precision.dtype)
    outlook.raises[TRAINING, precision] = report.raised
    if alone.raised:
        outlook.raises[INFERENCE, precision] = alone.raised


def _forecast(call: ModelCall, use: str, outlook: Outlook) -> None:
    """Forecast in `outlook` the memory of a step in fp32, under autocast, and with cast weights."""
    _forecast_recipe(call, Recipe(use), outlook)
    for precision in outlook.xrays:  # the first that does not raise: both need the same memory
        if (use, precision) not in outlook.raises:
            _forecast_recipe(call, Recipe(use, precision), outlook)
            break
    # A model that cannot be traced with cast weights may still run, and is tried later.
    with contextlib.suppress(TraceError):
        _forecast_recipe(call, Recipe(use, Precision.BF16, cast=True), outlook)


def _forecast_recipe(call: ModelCall, recipe: Recipe, outlook: Outlook) -> None:
    """Write peak bytes and largest batch of a recipe to `outlook.memory`."""
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
    peak = table.forecasts[0].peak
    # Of the only precision; without a known memory there is none.
    largest_batch = next(iter(table.largest.values()), None)
    outlook.memory[recipe.use, recipe.autocasts, recipe.cast] = (peak, largest_batch)

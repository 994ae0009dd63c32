"""What can be said before anything runs: dtypes, and memory, on a device that need not be here."""

import contextlib
import functools
import math
from dataclasses import dataclass, field

from amp_lab.advisor.recipes import INFERENCE, TRAINING, Case, Recipe
from amp_lab.backends import backend
from amp_lab.device import describe_device
from amp_lab.errors import TraceError
from amp_lab.precision import Precision
from amp_lab.report import bytes_text
from amp_lab.tracing.copies import copied
from amp_lab.tracing.memory import BatchedInputs, memory_table, parse_bytes
from amp_lab.tracing.xray import xray
from amp_lab.tracing.xray_result import Xray

_RESERVE = 0.1  # share of the memory that is left to the driver and to fragmentation


@dataclass
class Outlook:
    """What X-ray and forecast say of a case."""

    memory_bytes: int | None = None
    raises: dict[tuple[str, Precision], str] = field(default_factory=dict)  # under autocast
    xrays: dict[Precision, Xray] = field(default_factory=dict)
    memory: dict[tuple, tuple[int, int | None]] = field(default_factory=dict)
    """Peak and largest batch by use, and by whether autocast or a cast makes it low precision."""
    problem: TraceError | None = None  # why there is no forecast

    @property
    def decisions(self) -> list[str]:
        """What to say if the X-rays took decisions of a run on the CPU."""
        said = [seen.decisions for seen in self.xrays.values() if seen.decisions]
        return list(dict.fromkeys(said))

    def memory_of(self, recipe: Recipe) -> tuple[int | None, int | None]:
        """Peak and largest batch: layouts and fused kernels change little of them."""
        return self.memory.get((recipe.use, recipe.autocasts, recipe.cast), (None, None))

    def why_not(self, recipe: Recipe) -> tuple[str, str]:
        """Why a recipe need not be tried, as a verdict and its reason; empty if it may run."""
        raised = self.raises.get((recipe.use, recipe.precision))
        if raised and recipe.autocasts:
            return "raises", raised
        peak, usable = self.memory_of(recipe)[0], (1 - _RESERVE) * (self.memory_bytes or math.inf)
        over = (peak or 0) - usable
        return ("does not fit", f"{bytes_text(over)} too much") if over > 0 else ("", "")


def first_look(case: Case, memory: int | str | None = None) -> Outlook:
    """X-ray a case in each low precision, and forecast its memory.

    `memory`, such as ``"24GiB"``, has to be enough; without it, that of the device, if it is here.
    Raises `TraceError` for a model that cannot be traced; where the device is here and it may run
    all the same, the error is kept as the outlook's `problem`.
    """
    kind, is_here = case.device.type, backend(case.device).is_available()
    own = describe_device(case.device).memory_bytes if is_here else None
    look = Outlook(own if memory is None else parse_bytes(memory))
    try:
        for precision in (Precision.BF16, Precision.FP16):
            see = functools.partial(xray, dtype=precision.dtype, device_type=kind, **case.kwargs)
            seen = look.xrays[precision] = see(case.model, *case.args, loss_fn=case.loss_fn)
            if seen.raised:  # perhaps in what inference has not: the loss, or a backward pass
                alone = copied(case.model).requires_grad_(False).eval()
                found = {TRAINING: seen.raised, INFERENCE: see(alone, *case.args).raised}
                look.raises |= {(use, precision): why for use, why in found.items() if why}
        for use in case.uses:
            _forecast(case, use, look)
    except TraceError as error:
        if not is_here:
            raise
        look.problem = error
    return look


def _forecast(case: Case, use: str, look: Outlook) -> None:
    """The memory of a step in fp32, under autocast, and with weights that are cast."""
    low = [Recipe(use, p) for p in look.xrays if (use, p) not in look.raises][:1]
    for recipe in (Recipe(use), *low, Recipe(use, Precision.BF16, cast=True)):
        made, trains = case.copied(recipe), use == TRAINING
        if not trains:  # without gradients a step is a forward pass
            made.model.requires_grad_(False).eval()
        # Whether a model runs with its weights cast is for a real run to show.
        with contextlib.suppress(TraceError) if recipe.cast else contextlib.nullcontext():
            table = memory_table(
                made.model,
                BatchedInputs(made.args, made.kwargs),
                memory_bytes=look.memory_bytes,
                reserve=_RESERVE,
                precisions=[Precision.FP32 if recipe.cast else recipe.precision],
                device_type=case.device.type,
                optimizer="adamw",
                loss_fn=case.loss_fn if trains else None,
            )
            peak, batch = table.forecasts[0].peak, next(iter(table.largest.values()), None)
            look.memory[use, recipe.autocasts, recipe.cast] = peak, batch

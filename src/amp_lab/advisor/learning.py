"""Compare the gradients, the losses or the output of a recipe with fp32's; choose a loss scale."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from amp_lab.advisor.candidates import Candidate
from amp_lab.core.errors import NumericsError
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.core.timing import measure
from amp_lab.model_call import ModelCall
from amp_lab.numerics import gradient_underflow, largest_values
from amp_lab.numerics.gradient_histogram import KEEP, GradientCount, together
from amp_lab.recipes import (
    DEFAULT_SCALE,
    INFERENCE,
    TRAINING,
    Recipe,
    Step,
    distance,
    floats,
    norm,
)

_STEPS = 10  # of a run at most
_RATE = 1e-3  # learning rate of the runs
_LOW_RATE = 1e-4  # learning rate of the step that shows which updates rounding loses
_LEARNS = 0.05  # fp32 learns if its loss falls by more than this share of the first loss
CHAOTIC = 0.7
"""If `Step.add_noise` changes fp32's gradients by more than this, relative to their norm, their
direction is random."""
_SLOWEST = 3  # time of a step, as a multiple of fp32's, after which it is given up
_MOST_SKIPPED = 8  # steps in which a loss scale that begins too high may be halved
_MOST_UNCHANGED = 0.02  # share of the weights that a step may leave unchanged by rounding
TOLERANCE = {Precision.FP32: 1e-3, Precision.TF32: 0.02, Precision.FP16: 0.02, Precision.BF16: 0.1}
"""How far the output of inference may be from fp32's, in the Euclidean norm, relative."""

_NO_LOSS_SCALE = remedy(
    "advise.no_loss_scale",
    "no loss scale keeps the model's gradients in fp16's range",
    "No loss scale keeps these gradients in the range of fp16. Use bf16, which has nearly the "
    "range of fp32.",
    failure="AMP0003",
)
_FIRST_LOSS_SCALE = remedy(
    "advise.first_loss_scale",
    "some loss scale keeps the model's gradients in fp16's range",
    "First loss scale for fp16: {scale:g}.",
)


class TooSlow(Exception):
    """A step took too long and was given up."""


class _Run(NamedTuple):
    """The result of a short training run."""

    step: Step
    gradients: list[Tensor]  # of the first step that the scaler did not skip


class Learning:
    """Short training runs in fp32, as the baseline for other recipes.

    A second run in fp32, with a little noise in the weights and another seed for dropout, shows
    how far two correct runs may differ. All runs, those of `check` included, may take `seconds`
    together. `scale` is the first loss scale for fp16.

    Attributes:
        noise: Distance between the gradients of the two runs in fp32, relative to their norm.
        learns: Whether the loss falls in fp32.
    """

    def __init__(self, call: ModelCall, device: torch.device, seconds: float, scale: float):
        self._call = call
        self._device = device
        self._scale = scale
        self._fp32 = Candidate(Recipe(TRAINING))
        self._noisy = Candidate(Recipe(TRAINING))
        self._run(self._fp32, steps=2)  # only to time a step
        run_s = seconds / 8  # for each of about eight runs; a slow model gets fewer steps
        step_s = max(self._fp32.seconds, 1e-4)  # never zero, whatever the clock says
        steps_in_time = int(run_s / step_s)
        self._steps = max(3, min(_STEPS, steps_in_time))
        self._gradients = self._run(self._fp32, steps=self._steps).gradients
        noisy_gradients = self._run(self._noisy, steps=self._steps, noisy=True).gradients
        self.noise = distance(noisy_gradients, self._gradients)
        self._step_limit_s = max(1.0, run_s, _SLOWEST * self._fp32.seconds)
        first_loss = abs(self._fp32.losses[0])
        self.learns = math.isfinite(first_loss) and _fall(self._fp32) > _LEARNS * first_loss

    def check(self, candidate: Candidate) -> Step:
        """Train with a recipe, record in the candidate how it differs from fp32; return the step.

        If the difference is too large, it becomes the `reason` of the candidate. Raises `TooSlow`
        if a step takes much longer than a step in fp32.
        """
        step_limit_s = self._step_limit_s
        if candidate.recipe.compiled:  # its first step compiles, which takes long
            step_limit_s = math.inf
        run = self._run(candidate, steps=self._steps, step_limit_s=step_limit_s)
        self._judge(candidate, run.gradients)
        if candidate.recipe.cast and not candidate.reason:
            # In 16 bits, rounding loses small updates of the weights. The learning rate of the run
            # is too high to show this, so one more step has a lower rate.
            optimizer = run.step.names["optimizer"]
            optimizer.param_groups[0]["lr"] = _LOW_RATE
            unchanged = _share_unchanged(run.step)
            if unchanged > _MOST_UNCHANGED:
                candidate.reason = (
                    f"at a learning rate of {_LOW_RATE}, rounding leaves {unchanged:.0%} of the "
                    "weights unchanged"
                )
        return run.step

    def _run(
        self,
        candidate: Candidate,
        *,
        steps: int,
        noisy: bool = False,
        step_limit_s: float = math.inf,
    ) -> _Run:
        """Train for a number of steps, and record the losses and the fastest step's time.

        The run ends early at a loss that is not finite. Steps that the scaler skips are repeated,
        up to `_MOST_SKIPPED` times. If all steps were skipped, there are no losses and no
        gradients. Raises `TooSlow` if a step takes longer than `step_limit_s`.
        """
        torch.manual_seed(1 if noisy else 0)  # a noisy run draws other dropout masks
        step = Step(self._call, candidate.recipe, self._device, self._scale, _RATE)
        if noisy:
            step.add_noise()
        scaler = step.names.get("scaler")  # None in a recipe without a loss scale
        losses: list[float] = []
        gradients: list[Tensor] = []
        seconds: list[float] = []
        for _ in range(steps + _MOST_SKIPPED):
            scale_before = scaler.get_scale() if scaler else 1.0
            start = time.perf_counter()
            with _time_limit(step_limit_s, step):
                loss = step().item()
            seconds.append(time.perf_counter() - start)
            # The scaler lowers its scale if the gradients overflowed, and then skips the step.
            was_skipped = scaler and scaler.get_scale() < scale_before
            if was_skipped and math.isfinite(loss):
                continue  # with a lower scale, the same step may succeed
            losses.append(loss)
            if not gradients:
                gradients = [p.grad.clone() for p in step.trained if p.grad is not None]
            if not math.isfinite(loss) or len(losses) == steps:
                break
        candidate.losses = tuple(losses)
        candidate.seconds = min(seconds)
        return _Run(step, gradients)

    def _judge(self, candidate: Candidate, gradients: list[Tensor]) -> None:
        """Record in a trained candidate how far it is from fp32, and a reason if it is too far."""
        losses = candidate.losses
        if not losses:
            candidate.reason = "some gradients are inf or NaN at each loss scale that was tried"
            return
        if not math.isfinite(losses[-1]):
            candidate.reason = f"the loss is {losses[-1]} in step {len(losses)}"
            return
        self._compare_gradients(candidate, gradients)
        if candidate.reason:
            return
        if self.learns:
            self._compare_falls(candidate)
        else:  # fp32's loss does not fall, so only the first losses can be compared
            self._compare_first_losses(candidate)

    def _compare_gradients(self, candidate: Candidate, gradients: list[Tensor]) -> None:
        """Record how far the gradients are from fp32's, and a reason if they are too far.

        If they are close enough, the reason becomes empty.
        """
        difference = distance(gradients, self._gradients)
        candidate.against_fp32 = f"gradients {difference:.1%} off"
        candidate.reason = ""
        if self.noise > CHAOTIC:
            candidate.against_fp32 += f" (noise alone: {self.noise:.0%})"
            # The direction of fp32's gradients is random too, so only their size is compared.
            fp32_norm = norm(self._gradients) or 1.0  # 1.0 avoids a division by zero
            size = norm(gradients) / fp32_norm
            if not 0.5 <= size <= 2:
                candidate.reason = f"the gradients are {size:.2g} times as large as in fp32"
            return
        # 50 %, and more where noise changes fp32's own gradients; zeros would be 100 % off.
        allowed = min(0.9, 0.5 + 2 * self.noise)
        if not difference <= allowed:  # also for NaN
            candidate.reason = f"the gradients are off by more than {allowed:.0%}"

    def _compare_first_losses(self, candidate: Candidate) -> None:
        """Record a reason if the first loss differs from fp32's by 5 % or more."""
        fp32_loss = self._fp32.losses[0]
        difference = abs(candidate.losses[0] - fp32_loss) / (abs(fp32_loss) or 1.0)
        if not difference < 0.05:  # also for NaN
            candidate.reason = f"the first loss is off by {difference:.1%}"

    def _compare_falls(self, candidate: Candidate) -> None:
        """Record the fall of the loss as a share of fp32's, and a reason if it is too different."""
        fp32_fall = _fall(self._fp32)
        share = _fall(candidate) / fp32_fall
        noisy_share = _fall(self._noisy) / fp32_fall
        # 20 %, and more where noise changes fp32's own fall, but at most 50 %.
        allowed = min(0.5, 0.2 + 2 * abs(noisy_share - 1))
        candidate.against_fp32 += f", learns {share:.0%}"
        if not abs(share - 1) <= allowed:  # also for NaN
            candidate.reason = f"the fall of the loss differs from fp32 by more than {allowed:.0%}"


class Fp32Outputs:
    """The output of inference in fp32, as the baseline for other recipes."""

    def __init__(self, call: ModelCall, device: torch.device):
        self._call = call
        self._device = device
        step = Step(call, Recipe(INFERENCE), device)
        self._output = floats(step())

    def check(self, candidate: Candidate) -> Step:
        """Infer with a recipe, record the error of its output in the candidate; return the step.

        If the error is too large, it becomes the `reason` of the candidate.
        """
        step = Step(self._call, candidate.recipe, self._device)
        difference = distance(floats(step()), self._output)
        candidate.against_fp32 = "output not finite"
        if difference < math.inf:
            candidate.against_fp32 = f"output {difference:.2%} off"
        allowed = TOLERANCE[candidate.recipe.precision]
        candidate.reason = ""
        if not difference <= allowed:  # also for NaN
            candidate.reason = f"the output is off by more than {allowed:.1%}"
        timing = measure(step, device=self._device, warmup=0, repeats=3)
        candidate.seconds = timing.median_s
        return step


@contextmanager
def _time_limit(seconds: float, step: Step) -> Iterator[None]:
    """The block in which `step` raises `TooSlow` if it takes longer than `seconds`.

    Hooks check the clock after each module of the forward pass, and at each gradient of a weight.
    """
    end = time.perf_counter() + seconds

    def check_clock(*_: object) -> None:
        if time.perf_counter() > end:
            raise TooSlow

    with ExitStack() as hooks:
        if seconds < math.inf:  # no hooks for a compiled step, which would compile them too
            hooks.enter_context(torch.nn.modules.module.register_module_forward_hook(check_clock))
            for weight in step.trained:
                hooks.enter_context(weight.register_hook(check_clock))
        yield


def _share_unchanged(step: Step) -> float:
    """Run one more step; return the share of the weights that it leaves unchanged."""
    # `cat` copies the weights, so the step does not change `before`.
    before = torch.cat([weight.detach().flatten() for weight in step.trained])
    step()
    after = torch.cat([weight.detach().flatten() for weight in step.trained])
    return (before == after).float().mean().item()


def _fall(candidate: Candidate) -> float:
    """How far the loss fell from the first step to the last."""
    return candidate.losses[0] - candidate.losses[-1]


_ROUNDED = 20
"""Powers of two below the largest gradient from which on a gradient may be rounding error alone:
fp32 has 24 bits, and sums of many values lose some of them."""


class Fp16Scaling(NamedTuple):
    """The result of `choose_loss_scale`."""

    scale: float  # the first loss scale
    remarks: list[str]  # sentences for the user: which values fp16 cannot represent


def choose_loss_scale(call: ModelCall, device: torch.device) -> Fp16Scaling:
    """Choose the first loss scale for fp16 from the gradients of one step in fp32.

    The scale is the default of `GradScaler` if no scale keeps the gradients in fp16's range, or if
    the gradient values that fp16 would lose cannot be counted.
    """
    step = Step(call, Recipe(TRAINING), device)
    with Precision.FP32.autocast(device.type):
        remarks = _overflow_remarks(step)
        loss = step.call.result()
    try:
        report = gradient_underflow(step.model, loss)
    except NumericsError:  # the graph cannot be followed, but steps may still run
        return Fp16Scaling(DEFAULT_SCALE, remarks)
    if report.half:  # some gradients are fp16 in fp32's step already
        unknown = (
            "Part of the model computes in fp16 even without autocast, so we cannot count "
            "what fp16 loses there."
        )
        return Fp16Scaling(DEFAULT_SCALE, [*remarks, unknown])
    rows = _above_rounding(report.rows)
    remarks += _underflow_remarks(rows)
    total = together("", rows)
    smallest = total.smallest_scale
    largest = total.largest_scale
    if largest is None:  # all gradients are zero
        return Fp16Scaling(DEFAULT_SCALE, remarks)
    if smallest is None or smallest > largest:
        if total.lost(largest) > 1 - KEEP:
            return Fp16Scaling(DEFAULT_SCALE, [*remarks, _NO_LOSS_SCALE.text])
        smallest = largest  # the gradients need a scale below 1
    # An eighth of the largest scale, so that the gradients may grow eightfold in training.
    scale = max(smallest, min(DEFAULT_SCALE, largest / 8))
    return Fp16Scaling(scale, [*remarks, _FIRST_LOSS_SCALE.sentence(scale=scale)])


def _overflow_remarks(step: Step) -> list[str]:
    """Remarks on the first three modules that compute larger values than fp16's 65504."""
    largest = largest_values(step.model, *step.call.args, **step.call.kwargs)
    limit = torch.finfo(torch.float16).max
    remarks = []
    for name, value in largest.items():
        if value > limit:
            remarks.append(
                f"fp16 ends at {limit:g}, but values in {name or 'the model'} reach {value:.3g}."
            )
    return remarks[:3]


def _underflow_remarks(rows: Sequence[GradientCount]) -> list[str]:
    """Remarks on the three gradients of which fp16 would lose most, if more than 1 %."""

    def lost_share(row: GradientCount) -> float:
        return row.lost(1.0)  # with a loss scale of 1, which is none

    remarks = []
    for row in sorted(rows, key=lost_share, reverse=True)[:3]:
        lost = lost_share(row)
        if lost > 0.01:
            share = f"{lost:.0%} of the nonzero gradient values of {row.layer or 'the model'}"
            remarks.append(f"Without a loss scale, fp16 loses {share} ({row.what}).")
    return remarks


def _above_rounding(rows: Sequence[GradientCount]) -> list[GradientCount]:
    """The gradients that are more than rounding errors of fp32.

    Some gradients would be zero in exact arithmetic, such as those of the key biases in attention,
    which cancel in softmax. It does not matter that fp16 loses these.
    """
    # The keys of a histogram are exponents of two, so the largest key is that of the largest value.
    exponents = {row: max(row.histogram) for row in rows if row.nonzero}
    lowest = max(exponents.values(), default=0) - _ROUNDED
    return [row for row, exponent in exponents.items() if exponent > lowest]

"""Compare a recipe with fp32: its gradients, its learning, its output; and fp16's losses."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from amp_lab.advisor.candidates import Candidate
from amp_lab.core.errors import NumericsError
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.core.timing import measure
from amp_lab.model_call import ModelCall
from amp_lab.numerics import gradient_underflow, largest_values
from amp_lab.numerics.gradient_histogram import GradientCount, together
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
_LEARNS = 0.05  # fall of the loss, as a share of the first one, from which on fp32 learns
CHAOTIC = 0.7  # relative change of fp32's gradients by `Step.add_noise`: no direction is right
_SLOWEST = 3  # time of a step, as a multiple of fp32's, after which it is given up
_MOST_SKIPPED = 8  # steps in which a loss scale that begins too high may be halved
_MOST_UNCHANGED = 0.02  # share of the weights that a step may leave unchanged by rounding
TOLERANCE = {Precision.FP32: 1e-3, Precision.TF32: 0.02, Precision.FP16: 0.02, Precision.BF16: 0.1}
"""How far the output of inference may be from fp32's, in the Euclidean norm, relative."""

_NO_LOSS_SCALE = remedy(
    "advise.no_loss_scale",
    "no loss scale keeps the model's gradients in fp16's range",
    "These gradients do not fit into fp16 at any loss scale. Use bf16, which has the range of "
    "fp32.",
    failure="AMP0003",
)
_FIRST_LOSS_SCALE = remedy(
    "advise.first_loss_scale",
    "some loss scale keeps the model's gradients in fp16's range",
    "First loss scale for fp16: {scale:g}.",
)


class TooSlow(Exception):
    """A step took too long and was given up."""


class Learning:
    """How fp32 learns from these inputs, as the baseline for other recipes.

    A second run in fp32, with a little noise in the weights and another seed for dropout, shows
    how far two correct runs may differ. All runs together may take `seconds`. `scale` is the first
    loss scale, for fp16.
    """

    def __init__(self, call: ModelCall, device: torch.device, seconds: float, scale: float):
        self._call = call
        self._device = device
        self._scale = scale
        self._steps = 2  # of the first run; a longer one follows
        self._plain = Candidate(Recipe(TRAINING))
        self._noisy = Candidate(Recipe(TRAINING))
        self._step_limit_s = math.inf
        self._run(self._plain)  # for the time of a step alone
        share = seconds / 8  # for each of about eight runs; a slow model gets fewer steps
        steps = share / max(self._plain.seconds, 1e-4)
        self._steps = max(3, min(_STEPS, int(steps)))
        _, self._gradients = self._run(self._plain)
        _, noisy = self._run(self._noisy, noisy=True)
        self.noise = distance(noisy, self._gradients)
        self._step_limit_s = max(1.0, share, _SLOWEST * self._plain.seconds)
        first = abs(self._plain.losses[0])
        least = _LEARNS * first
        self.learns = math.isfinite(first) and _fall(self._plain) > least

    def check(self, candidate: Candidate) -> Step:
        """Train with a recipe, record in the candidate how it differs from fp32; return the step.

        If the difference is too large, it becomes the `reason` of the candidate. Raises `TooSlow`
        if a step takes much longer than a step in fp32.
        """
        step, gradients = self._run(candidate)
        self._judge(candidate, gradients)
        if candidate.recipe.cast and not candidate.reason:
            # Rounding loses small updates, which the few steps above, at a high rate, do not show.
            step.names["optimizer"].param_groups[0]["lr"] = _LOW_RATE
            unchanged = _share_unchanged(step)
            if unchanged > _MOST_UNCHANGED:
                kept = f"{unchanged:.0%} of the weights as they are"
                candidate.reason = f"rounding keeps {kept} at a learning rate of {_LOW_RATE}"
        return step

    def _run(self, candidate: Candidate, *, noisy: bool = False) -> tuple[Step, list[Tensor]]:
        """Train for `_steps` steps, and record losses and time in the candidate.

        A loss that is not finite is the last. Steps that the scaler skips are not counted, up to
        `_MOST_SKIPPED`. Returns the step, and the gradients of the first call that was not skipped;
        no gradients and no losses if all were.
        """
        torch.manual_seed(int(noisy))
        step = Step(self._call, candidate.recipe, self._device, self._scale, _RATE)
        if noisy:
            step.add_noise()
        scaler = step.names.get("scaler")
        limit_s = math.inf if candidate.recipe.compiled else self._step_limit_s
        losses: list[float] = []
        gradients: list[Tensor] = []
        seconds: list[float] = []
        for _ in range(self._steps + _MOST_SKIPPED):
            before = scaler.get_scale() if scaler else 1.0
            start = time.perf_counter()
            with _time_limit(limit_s, step):
                loss = step().item()
            seconds.append(time.perf_counter() - start)
            overflowed = scaler and scaler.get_scale() < before
            if overflowed and math.isfinite(loss):
                continue  # the scaler skipped the step
            losses.append(loss)
            if not gradients:
                gradients = [p.grad.clone() for p in step.trained if p.grad is not None]
            if not math.isfinite(loss) or len(losses) == self._steps:
                break
        candidate.losses = tuple(losses)
        candidate.seconds = min(seconds)
        return step, gradients

    def _judge(self, run: Candidate, gradients: list[Tensor]) -> None:
        """Record in a trained candidate how far it is from fp32, and a reason if it is too far."""
        if not run.losses:
            run.reason = "all its gradients overflow in step 1"
            return
        if not math.isfinite(run.losses[-1]):
            run.reason = f"its loss is {run.losses[-1]} in step {len(run.losses)}"
            return
        self._compare_gradients(run, gradients)
        if run.reason:
            return
        if self.learns:
            self._compare_falls(run)
        else:  # fp32's loss does not fall, so only the first losses can be compared
            self._compare_first_losses(run)

    def _compare_gradients(self, run: Candidate, gradients: list[Tensor]) -> None:
        """Record how far the gradients are off; a reason if it is too far, else an empty one."""
        off = distance(gradients, self._gradients)
        run.against_fp32 = f"gradients {off:.1%} off"
        run.reason = ""
        if self.noise <= CHAOTIC:
            # 50 %, and more where noise changes fp32's own gradients; zeros would be 100 % off.
            allowed = min(0.9, 0.5 + 2 * self.noise)
            if not off <= allowed:  # also for NaN
                run.reason = f"its gradients are more than {allowed:.0%} off"
            return
        run.against_fp32 += f" (fp32's own, with noise: {self.noise:.0%})"
        # Their direction tells nothing, so only their size is compared.
        size = norm(gradients) / (norm(self._gradients) or 1.0)
        if not 0.5 <= size <= 2:
            run.reason = f"its gradients are {size:.2g} times as large as fp32's"

    def _compare_first_losses(self, run: Candidate) -> None:
        """Record a reason if the first loss is 5 % or more from fp32's."""
        first = self._plain.losses[0]
        off = abs(run.losses[0] - first) / (abs(first) or 1.0)
        if not off < 0.05:  # also for NaN
            run.reason = f"its first loss is {off:.1%} off"

    def _compare_falls(self, run: Candidate) -> None:
        """Record the fall of the loss as a share of fp32's, and a reason if it is too different."""
        learned = _fall(run) / _fall(self._plain)
        noisy = _fall(self._noisy) / _fall(self._plain)
        # 20 %, and more where noise changes fp32's own fall, but at most 50 %.
        allowed = min(0.5, 0.2 + 2 * abs(noisy - 1))
        run.against_fp32 += f", learns {learned:.0%}"
        if not abs(learned - 1) <= allowed:
            run.reason = f"it does not learn 100% ± {allowed:.0%} of what fp32 does"


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
        off = distance(floats(step()), self._output)
        candidate.against_fp32 = "output not finite"
        if off < math.inf:
            candidate.against_fp32 = f"output {off:.2%} off"
        allowed = TOLERANCE[candidate.recipe.precision]
        candidate.reason = ""
        if not off <= allowed:  # also for NaN
            candidate.reason = f"its output is more than {allowed:.1%} off"
        timing = measure(step, device=self._device, warmup=0, repeats=3)
        candidate.seconds = timing.median_s
        return step


@contextmanager
def _time_limit(seconds: float, step: Step) -> Iterator[None]:
    """In the block, a step that takes longer raises `TooSlow` at its next module or gradient."""
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
    before = torch.cat([weight.detach().flatten() for weight in step.trained])  # copied
    step()
    after = torch.cat([weight.detach().flatten() for weight in step.trained])
    return (before == after).float().mean().item()


def _fall(run: Candidate) -> float:
    """How far the loss fell from the first step to the last."""
    return run.losses[0] - run.losses[-1]


_ROUNDED = 20
"""Powers of two below the largest gradient from which on a gradient may be rounding error alone:
fp32 has 24 bits, and sums of many values lose some of them."""


def fp16_remarks(call: ModelCall, device: torch.device) -> tuple[float, list[str]]:
    """A first loss scale for fp16, and remarks for the user.

    The scale is the default of `GradScaler` if no scale keeps the gradients, or if the values that
    fp16 would lose cannot be counted.
    """
    step = Step(call, Recipe(TRAINING), device)
    with Precision.FP32.autocast(device.type):
        remarks = _overflow_remarks(step)
        loss = step.call.result()
    try:
        report = gradient_underflow(step.model, loss)
    except NumericsError:  # the graph cannot be followed, but steps may still run
        return DEFAULT_SCALE, remarks
    if report.half:  # some gradients are fp16 in fp32's step already
        unknown = "Part of the model computes in fp16 by itself: what that loses is not known."
        return DEFAULT_SCALE, [*remarks, unknown]
    rows = _above_rounding(report.rows)
    remarks += _underflow_remarks(rows)
    total = together("", rows)
    low = total.smallest_scale
    high = total.largest_scale
    if low is None or high is None or low > high:
        return DEFAULT_SCALE, [*remarks, _NO_LOSS_SCALE.text]
    scale = max(low, min(DEFAULT_SCALE, high / 8))  # the gradients may grow eightfold
    return scale, [*remarks, _FIRST_LOSS_SCALE.sentence(scale=scale)]


def _overflow_remarks(step: Step) -> list[str]:
    """Remarks on the first three modules that compute larger values than fp16's 65504."""
    largest = largest_values(step.model, *step.call.args, **step.call.kwargs)
    limit = torch.finfo(torch.float16).max
    remarks = []
    for name, value in largest.items():
        if value > limit:
            remarks.append(f"fp16 overflows: {name or 'the model'} reaches {value:.3g}.")
    return remarks[:3]


def _underflow_remarks(rows: Sequence[GradientCount]) -> list[str]:
    """Remarks on the three gradients of which fp16 would lose most, if more than 1 %."""
    remarks = []
    for row in sorted(rows, key=lambda row: -row.lost(1.0))[:3]:
        lost = row.lost(1.0)  # with a loss scale of 1, which is none
        if lost > 0.01:
            share = f"{lost:.0%} of the gradient values of {row.layer or 'the model'}"
            remarks.append(f"Without a loss scale fp16 loses {share} ({row.what}).")
    return remarks


def _above_rounding(rows: Sequence[GradientCount]) -> list[GradientCount]:
    """The gradients that are more than rounding errors of fp32.

    Some gradients would be zero in exact arithmetic, such as those of the key biases in attention,
    which cancel in softmax. It does not matter that fp16 loses these.
    """
    # The keys of a histogram are exponents of two.
    largest_powers = {row: max(row.histogram) for row in rows if row.nonzero}
    floor = max(largest_powers.values(), default=0) - _ROUNDED
    return [row for row, power in largest_powers.items() if power > floor]

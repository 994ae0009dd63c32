"""Numbers: does a recipe learn, and answer, as fp32 does, and what would fp16 lose?"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from amp_lab.advisor.recipes import INFERENCE, TRAINING, Candidate, Case, Recipe, Step
from amp_lab.core.errors import NumericsError
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.core.timing import measure
from amp_lab.numerics import gradient_underflow
from amp_lab.numerics.gradient_histogram import GradientCount, together
from amp_lab.tracing.structures import named_tensors

_STEPS = 10
_RATE = 1e-3
_LOW_RATE = 1e-4
_LEARNS = 0.05  # by so much of the first loss, at least
_JITTER = 2.0**-9  # bf16's rounding error: what fp32 itself makes of it is no fault
CHAOTIC = 0.7  # gradients that this noise turns so far tell nothing by where they point
_PATIENCE = 3  # times a step of fp32: what takes longer is not waited for
_MOST_SKIPPED = 8  # a scale that begins too high is halved in these
_LOST = 0.02  # of the weights may stay as they are in a step that changes all of them in fp32
TOLERANCE = {Precision.FP32: 1e-3, Precision.TF32: 0.02, Precision.FP16: 0.02, Precision.BF16: 0.1}
"""How far the output of inference may be from fp32's, in the Euclidean norm, relative."""

_NO_LOSS_SCALE = remedy(
    "advise.no_loss_scale",
    "no loss scale keeps the model's gradients in fp16's range",
    "No loss scale keeps fp16's gradients: use bf16, which has fp32's range.",
)
_FIRST_LOSS_SCALE = remedy(
    "advise.first_loss_scale",
    "some loss scale keeps the model's gradients in fp16's range",
    "First loss scale for fp16: {scale:g}.",
)


class TooSlow(Exception):
    """A step was left before its end."""


class Learning:
    """How fp32 learns from these inputs, which the other recipes are held against.

    A second run in fp32, with a little noise in the weights and another seed for dropout, shows
    what two runs may differ in without a fault. `seconds` is what all the runs together may take.
    """

    def __init__(self, case: Case, seconds: float):
        self._case = case
        self._steps = 2
        self._plain = Candidate(Recipe(TRAINING))
        self._noisy = Candidate(Recipe(TRAINING))
        self._most_seconds = math.inf  # of a step
        self._run(self._plain)
        share = seconds / 8  # each of some eight runs gets its share; a slow model gets fewer steps
        steps = share / max(self._plain.seconds, 1e-4)
        self._steps = max(3, min(_STEPS, int(steps)))
        _, self._gradients = self._run(self._plain)
        _, noisy = self._run(self._noisy, noisy=True)
        self.noise = distance(noisy, self._gradients)
        self._most_seconds = max(1.0, share, _PATIENCE * self._plain.seconds)
        first = abs(self._plain.losses[0])
        least = _LEARNS * first
        self.learns = math.isfinite(first) and _fall(self._plain) > least

    def check(self, candidate: Candidate, scale: float) -> Step:
        """Train with a recipe as fp32 was trained, and note how far off it is, and if too far.

        Raises `TooSlow` within a step that takes much longer than fp32's.
        """
        step, gradients = self._run(candidate, scale=scale)
        self._judge(candidate, gradients)
        if candidate.recipe.cast and not candidate.reason:
            # A few steps at a high rate learn all the same: rounding swallows small updates.
            step.names["optimizer"].param_groups[0]["lr"] = _LOW_RATE
            lost = _unmoved(step)
            if lost > _LOST:
                rate = f"at a learning rate of {_LOW_RATE}"
                candidate.reason = f"rounding keeps {lost:.0%} of the weights as they are {rate}"
        return step

    def _run(
        self, candidate: Candidate, *, scale: float = 2.0**16, noisy: bool = False
    ) -> tuple[Step, list[Tensor]]:
        """The step after some calls, and the gradients of the first."""
        torch.manual_seed(int(noisy))
        step = Step(self._case, candidate.recipe, scale, _RATE)
        if noisy:
            _add_noise(step)
        scaler = step.names.get("scaler")
        most_seconds = math.inf if candidate.recipe.compiled else self._most_seconds
        losses: list[float] = []
        gradients: list[Tensor] = []
        took: list[float] = []
        for _ in range(self._steps + _MOST_SKIPPED):
            before = scaler.get_scale() if scaler else 1.0
            start = time.perf_counter()
            with _left_after(most_seconds, step):
                loss = step().item()
            took.append(time.perf_counter() - start)
            overflowed = scaler and scaler.get_scale() < before
            if overflowed and math.isfinite(loss):
                continue  # the weights are what they were
            losses.append(loss)
            if not gradients:
                gradients = [p.grad.clone() for p in step.trained if p.grad is not None]
            if not math.isfinite(loss) or len(losses) == self._steps:
                break
        candidate.losses = tuple(losses)
        candidate.seconds = min(took)
        return step, gradients

    def _judge(self, run: Candidate, gradients: list[Tensor]) -> None:
        """Note how far a run is from fp32's, and why it is not alike, if it is not."""
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
        else:  # nothing to hold the fall against, so the first loss has to do
            self._compare_first_losses(run)

    def _compare_gradients(self, run: Candidate, gradients: list[Tensor]) -> None:
        off = distance(gradients, self._gradients)
        run.against_fp32 = f"gradients {off:.1%} off"
        run.reason = ""
        if self.noise <= CHAOTIC:
            allowed = min(0.9, 0.5 + 2 * self.noise)
            if not off <= allowed:  # nor if it is NaN
                run.reason = f"its gradients may be {allowed:.0%} off at most"
            return
        run.against_fp32 += f" (fp32's own, with noise: {self.noise:.0%})"
        size = _norm(gradients) / (_norm(self._gradients) or 1.0)
        if not 0.5 <= size <= 2:
            run.reason = f"its gradients are {size:.2g} times as large as fp32's"

    def _compare_first_losses(self, run: Candidate) -> None:
        first = self._plain.losses[0]
        off = abs(run.losses[0] - first) / (abs(first) or 1.0)
        if not off < 0.05:  # nor if it is NaN
            run.reason = f"its first loss is {off:.1%} off"

    def _compare_falls(self, run: Candidate) -> None:
        learned = _fall(run) / _fall(self._plain)
        noisy = _fall(self._noisy) / _fall(self._plain)
        # Noise excuses much, but never half of what was to be learnt.
        allowed = min(0.5, 0.2 + 2 * abs(noisy - 1))
        run.against_fp32 += f", learns {learned:.0%}"
        if not abs(learned - 1) <= allowed:
            run.reason = f"it has to learn 100% ± {allowed:.0%}"


class Answers:
    """What fp32 answers, which the other recipes of inference are held against."""

    def __init__(self, case: Case):
        self._case = case
        step = Step(case, Recipe(INFERENCE))
        self._output = _floats(step())

    def check(self, candidate: Candidate, scale: float) -> Step:
        """Infer with a recipe, which needs no loss scale, and note how far off it is."""
        step = Step(self._case, candidate.recipe)
        off = distance(_floats(step()), self._output)
        candidate.against_fp32 = "output not finite"
        if off < math.inf:
            candidate.against_fp32 = f"output {off:.2%} off"
        allowed = TOLERANCE[candidate.recipe.precision]
        candidate.reason = ""
        if not off <= allowed:  # nor if it is NaN
            candidate.reason = f"its output may be {allowed:.1%} off at most"
        timing = measure(step, device=self._case.device, warmup=0, repeats=3)
        candidate.seconds = timing.median_s
        return step


@contextmanager
def _left_after(seconds: float, step: Step) -> Iterator[None]:
    """Leave a step that takes longer, between two of its modules or of its weights' gradients."""
    end = time.perf_counter() + seconds

    def check_clock(*_: object) -> None:
        if time.perf_counter() > end:
            raise TooSlow

    with ExitStack() as hooks:
        if seconds < math.inf:  # else they would be in the way of what is compiled
            hooks.enter_context(torch.nn.modules.module.register_module_forward_hook(check_clock))
            for weight in step.trained:
                hooks.enter_context(weight.register_hook(check_clock))
        yield


@torch.no_grad()
def _add_noise(step: Step) -> None:
    for weight in step.trained:
        weight.mul_(1 + _JITTER * torch.randn_like(weight))


def _unmoved(step: Step) -> float:
    """The share of the weights that are the same after one more step."""
    before = [weight.detach().clone() for weight in step.trained]
    step()
    same = []
    for old, new in zip(before, step.trained, strict=True):
        same.append((old == new).flatten())
    return torch.cat(same).float().mean().item()


def _fall(run: Candidate) -> float:
    return run.losses[0] - run.losses[-1]


def _floats(output: object) -> list[Tensor]:
    return [tensor for _, tensor in named_tensors(output) if tensor.is_floating_point()]


def _norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of them all."""
    squares = [float(tensor.double().square().sum()) for tensor in tensors]
    return math.sqrt(sum(squares))


def distance(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """How far tensors are from the right ones, relative, in the Euclidean norm of them all."""
    errors = []
    for tensor, right_tensor in zip(found, right, strict=True):
        errors.append(tensor.double() - right_tensor.double())
    return _norm(errors) / (_norm(right) or 1.0)


def _loss_and_large_outputs(case: Case, step: Step) -> tuple[Tensor, dict[str, float]]:
    """The loss in fp32; and by module, the largest value of outputs that exceed fp16's range."""
    assert case.loss_fn is not None
    names = {module: name or "the model" for name, module in step.model.named_modules()}
    large: dict[str, float] = {}

    def note(module: torch.nn.Module, args: object, output: object) -> None:
        magnitudes = [float(tensor.detach().abs().max()) for tensor in _floats(output)]
        largest = max(magnitudes, default=0.0)
        if largest > torch.finfo(torch.float16).max and module in names:
            large[names[module]] = largest

    with torch.nn.modules.module.register_module_forward_hook(note):
        loss = case.loss_fn(step.output())
    return loss, large


_ROUNDED = 20
"""Powers of two below the largest gradient. fp32 has 24 bits, and sums of many values lose some."""


def fp16_remarks(case: Case) -> tuple[float | None, list[str]]:
    """A first loss scale for fp16, if any keeps the gradients, and where fp16 would lose what."""
    step = Step(case, Recipe(TRAINING))
    loss, large = _loss_and_large_outputs(case, step)
    remarks = []
    for name, largest in list(large.items())[:3]:
        remarks.append(f"fp16 overflows: the output of {name} reaches {largest:.3g}.")
    try:
        report = gradient_underflow(step.model, loss)
    except NumericsError:  # a graph that cannot be followed; the steps themselves still can run
        return 2.0**16, remarks
    if report.half:
        unknown = "Part of the model computes in fp16 by itself: what that loses is not known."
        return 2.0**16, [*remarks, unknown]
    rows = _above_rounding(report.rows)
    remarks += _underflow_remarks(rows)
    total = together("", rows)
    low = total.smallest_scale
    high = total.largest_scale
    if low is None or high is None or low > high:
        return None, [*remarks, _NO_LOSS_SCALE.text]
    scale = max(low, min(2.0**16, high / 8))  # with room for them to grow eightfold
    return scale, [*remarks, _FIRST_LOSS_SCALE.said(scale=scale)]


def _underflow_remarks(rows: Sequence[GradientCount]) -> list[str]:
    """The three gradients of which fp16 would lose most, if that is more than 1 %."""
    remarks = []
    for row in sorted(rows, key=lambda row: -row.lost(1.0))[:3]:
        lost = row.lost(1.0)
        if lost > 0.01:
            share = f"{lost:.0%} of the gradient values of {row.layer or 'the model'}"
            remarks.append(f"Without a loss scale fp16 loses {share} ({row.what}).")
    return remarks


def _above_rounding(rows: Sequence[GradientCount]) -> list[GradientCount]:
    """The gradients that are more than rounding errors of those beside them.

    Some gradients are zero but for the rounding of fp32, such as those of the biases of attention's
    keys, which softmax takes out again. It does not matter that fp16 loses these.
    """
    largest = {row: max(row.histogram) for row in rows if row.nonzero}  # as a power of two
    floor = max(largest.values(), default=0) - _ROUNDED
    return [row for row, power in largest.items() if power > floor]

"""Numbers: does a recipe learn, and answer, as fp32 does, and what would fp16 lose?"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from amp_lab.advisor.recipes import INFERENCE, TRAINING, Candidate, Case, Recipe, Step
from amp_lab.errors import NumericsError
from amp_lab.numerics import gradient_underflow
from amp_lab.numerics.gradient_histogram import GradientCount, together
from amp_lab.precision import Precision
from amp_lab.remedies import remedy
from amp_lab.timing import measure
from amp_lab.tracing.structures import named_tensors

_STEPS, _RATE, _LOW_RATE = 10, 1e-3, 1e-4
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
        # Each of some eight runs gets its share of the time; a slow model gets fewer steps.
        steps = seconds / 8 / max(self._plain.seconds, 1e-4)
        self._steps = max(3, min(_STEPS, int(steps)))
        _, self._gradients = self._run(self._plain)
        _, noisy = self._run(self._noisy, noisy=True)
        self.noise = distance(noisy, self._gradients)
        self._most_seconds = max(1.0, seconds / 8, _PATIENCE * self._plain.seconds)
        first = abs(self._plain.losses[0])
        self.learns = math.isfinite(first) and _fall(self._plain) > _LEARNS * first

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
            if scaler and scaler.get_scale() < before and math.isfinite(loss):
                continue  # the gradients overflowed, and the weights are what they were
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
        if not run.losses or not math.isfinite(run.losses[-1]):
            what = f"its loss is {run.losses[-1]}" if run.losses else "all its gradients overflow"
            run.reason = f"{what} in step {max(1, len(run.losses))}"
            return
        run.against_fp32, run.reason = self._compared(gradients)
        if run.reason:
            return
        if not self.learns:  # nothing to hold the fall against, so the first loss has to do
            first = self._plain.losses[0]
            away = abs(run.losses[0] - first) / (abs(first) or 1.0)
            if not away < 0.05:  # nor if it is NaN
                run.reason = f"its first loss is {away:.1%} off"
            return
        learned = _fall(run) / _fall(self._plain)
        noisy = _fall(self._noisy) / _fall(self._plain)
        # Noise excuses much, but never half of what was to be learnt.
        most = min(0.5, 0.2 + 2 * abs(noisy - 1))
        run.against_fp32 += f", learns {learned:.0%}"
        if not abs(learned - 1) <= most:
            run.reason = f"it has to learn 100% ± {most:.0%}"

    def _compared(self, gradients: list[Tensor]) -> tuple[str, str]:
        """How far gradients are from fp32's, and why they are not alike, if they are not."""
        off = distance(gradients, self._gradients)
        said = f"gradients {off:.1%} off"
        if self.noise <= CHAOTIC:
            most = min(0.9, 0.5 + 2 * self.noise)
            if off <= most:
                return said, ""
            return said, f"its gradients may be {most:.0%} off at most"
        said = f"{said} (fp32's own, with noise: {self.noise:.0%})"
        size = _size(gradients) / (_size(self._gradients) or 1.0)
        if 0.5 <= size <= 2:
            return said, ""
        return said, f"its gradients are {size:.2g} times as large as fp32's"


class Answers:
    """What fp32 answers, which the other recipes of inference are held against."""

    def __init__(self, case: Case):
        self._case = case
        self._right = _floats(Step(case, Recipe(INFERENCE))())

    def check(self, candidate: Candidate, scale: float) -> Step:
        """Infer with a recipe, which needs no loss scale, and note how far off it is."""
        step = Step(self._case, candidate.recipe)
        off = distance(_floats(step()), self._right)
        candidate.against_fp32 = f"output {off:.2%} off" if off < math.inf else "output not finite"
        most = TOLERANCE[candidate.recipe.precision]
        candidate.reason = "" if off <= most else f"its output may be {most:.1%} off at most"
        candidate.seconds = measure(step, device=self._case.device, warmup=0, repeats=3).median_s
        return step


@contextmanager
def _left_after(seconds: float, step: Step) -> Iterator[None]:
    """Leave a step that takes longer, between two of its modules or of its weights' gradients."""
    end = time.perf_counter() + seconds

    def look(*_: object) -> None:
        if time.perf_counter() > end:
            raise TooSlow

    with ExitStack() as hooks:
        if seconds < math.inf:  # else they would be in the way of what is compiled
            hooks.enter_context(torch.nn.modules.module.register_module_forward_hook(look))
            for weight in step.trained:
                hooks.enter_context(weight.register_hook(look))
        yield


@torch.no_grad()
def _add_noise(step: Step) -> None:
    for weight in step.trained:
        weight.mul_(1 + _JITTER * torch.randn_like(weight))


def _unmoved(step: Step) -> float:
    """The share of the weights that are the same after one more step."""
    before = [weight.detach().clone() for weight in step.trained]
    step()
    same = [a == b for a, b in zip(before, step.trained, strict=True)]
    return torch.cat([weight.flatten() for weight in same]).float().mean().item()


def _fall(run: Candidate) -> float:
    return run.losses[0] - run.losses[-1]


def _floats(output: object) -> list[Tensor]:
    return [tensor for _, tensor in named_tensors(output) if tensor.is_floating_point()]


def _size(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def distance(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """How far tensors are from the right ones, relative, in the Euclidean norm of them all."""
    apart = [a.double() - b.double() for a, b in zip(found, right, strict=True)]
    return _size(apart) / (_size(right) or 1.0)


def _loss_and_large_outputs(case: Case, step: Step) -> tuple[Tensor, dict[str, float]]:
    """The loss in fp32; and by module, the largest value of outputs that exceed fp16's range."""
    assert case.loss_fn is not None
    names = {module: name or "the model" for name, module in step.model.named_modules()}
    large: dict[str, float] = {}

    def note(module: torch.nn.Module, args: object, output: object) -> None:
        reached = max((float(t.detach().abs().max()) for t in _floats(output)), default=0.0)
        if reached > torch.finfo(torch.float16).max and module in names:
            large[names[module]] = reached

    with torch.nn.modules.module.register_module_forward_hook(note):
        loss = case.loss_fn(step.output())
    return loss, large


_ROUNDED = 20
"""Powers of two below the largest gradient. fp32 has 24 bits, and sums of many values lose some."""


def fp16_remarks(case: Case) -> tuple[float | None, list[str]]:
    """A first loss scale for fp16, if any keeps the gradients, and where fp16 would lose what."""
    step = Step(case, Recipe(TRAINING))
    loss, large = _loss_and_large_outputs(case, step)
    said = [f"fp16 overflows: the output of {n} reaches {x:.3g}." for n, x in large.items()][:3]
    try:
        report = gradient_underflow(step.model, loss)
    except NumericsError:  # a graph that cannot be followed; the steps themselves still can run
        return 2.0**16, said
    if report.half:
        unknown = "Part of the model computes in fp16 by itself: what that loses is not known."
        return 2.0**16, [*said, unknown]
    rows = _above_rounding(report.rows)
    for row in sorted(rows, key=lambda row: -row.lost(1.0))[:3]:
        if row.lost(1.0) > 0.01:
            share = f"{row.lost(1.0):.0%} of the gradient values of {row.layer or 'the model'}"
            said.append(f"Without a loss scale fp16 loses {share} ({row.what}).")
    counted = together("", rows)
    low, high = counted.smallest_scale, counted.largest_scale
    if low is None or high is None or low > high:
        return None, [*said, _NO_LOSS_SCALE.text]
    scale = max(low, min(2.0**16, high / 8))  # with room for them to grow eightfold
    return scale, [*said, _FIRST_LOSS_SCALE.said(scale=scale)]


def _above_rounding(rows: Sequence[GradientCount]) -> list[GradientCount]:
    """The gradients that are more than rounding errors of those beside them.

    Some gradients are zero but for the rounding of fp32, such as those of the biases of attention's
    keys, which softmax takes out again. It does not matter that fp16 loses these.
    """
    largest = {row: max(row.histogram) for row in rows if row.nonzero}  # as a power of two
    floor = max(largest.values(), default=0) - _ROUNDED
    return [row for row, power in largest.items() if power > floor]

"""`advise`: forecast, check against fp32, time and rank the recipes for a model."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from amp_lab.advisor.candidates import Candidate, first_recipes
from amp_lab.advisor.learning import CHAOTIC, Fp32Outputs, Learning, TooSlow, fp16_remarks
from amp_lab.advisor.outlook import Outlook, forecast, trace_and_forecast
from amp_lab.advisor.result import Advice
from amp_lab.core.allocator import ENVIRONMENT, memory_taken
from amp_lab.core.backends import BACKENDS, backend
from amp_lab.core.device import describe_device, pick_device, preserve_random_state
from amp_lab.core.errors import OptionError, TraceError, with_type
from amp_lab.core.gpus import Gpu, gpu_of, unknown_gpu
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.core.report import bytes_text, dtype_name
from amp_lab.core.timing import Comparison, Estimate, compare, turn_s
from amp_lab.model_call import ModelCall
from amp_lab.recipes import (
    DEFAULT_SCALE,
    INFERENCE,
    OWN_LOSS,
    TRAINING,
    Recipe,
    Step,
    error_of,
    loss_of,
    program,
    uses_of,
)
from amp_lab.tracing.fake_device import tip_for

_FROM_SIMPLE = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)  # simplest first
_EMULATED = 0.25  # share of fp32's rate in a matmul below which a precision is not tried
_HOPELESS = 2  # time of a step, as a multiple of the fastest, from which it is not compared
_FEWEST_ROUNDS = 14  # of a comparison: 12 are needed to trust it, and some are disturbed
_ROUNDS = 24  # of a comparison, which are enough
_TOO_SLOW = "left out early"
_SUCH_STEPS = "such steps take too long"
_TOO_BUSY = "too busy to tell"
_WORTHWHILE = 0.97  # time of a step over the best one's, from which its changes are worth it
# Shares of the whole time.
_SHARE_OF_CHECKS = 0.2  # for all checks against fp32
_SHARE_OF_COMPARISON = 0.08  # for one comparison of times
_SHARE_TO_COMPILE = {TRAINING: 0.3, INFERENCE: 0.2}  # that must be left to try torch.compile
_SMALLER_BATCH = remedy(
    "advise.smaller_batch",
    "a step in fp32 does not fit into the device's memory",
    "the fp32 baseline needs {sizes}: use a smaller batch",
    failure="AMP0045",
)
_MORE_MINUTES = remedy(
    "advise.more_minutes",
    "the time was not enough to try everything",
    "give more minutes",
)
_KEEP_MEMORY = remedy(
    "advise.keep_memory",
    "a step on the CPU takes so much new memory that it costs time",
    "{use}: {name} takes {size} from the operating system each time: set {settings} (or call "
    "amp_lab.core.allocator.keep_memory) and rerun.",
)
_MADE_INSIDE = remedy(
    "advise.made_inside",
    "weights and inputs are cast, and the model raises because it creates fp32 tensors",
    "weights and inputs are in {dtype} here, but a tensor inside the model is not, such as one "
    "that the model creates or casts itself: cast this tensor, x.to(torch.{dtype})",
    failure="AMP0060",
)
_SAYS_DTYPES = re.compile(r"\bd?type\b")  # as errors do where fp32 meets 16 bits
_NEW_BYTES_PER_S = 2e9  # rate of new memory from the operating system: 1 to 5 µs for 4 KiB


def advise(
    model: nn.Module,
    *inputs: Any,
    device: torch.device | str | None = None,
    loss_fn: Callable[[Any], Any] | None = None,
    minutes: float = 2.0,
    memory: int | str | None = None,
    gpu: str | None = None,
    **kwargs: Any,
) -> Advice:
    """Recommend a precision for a model on a device, with the lines to write for it.

    A recipe is a precision with options: cast weights, memory format, compilation. For each recipe,
    `advise` forecasts the memory, compares copies of the model with fp32, and times them.

    Args:
        model: The model. It is neither changed nor moved.
        *inputs: A batch, as the model takes it.
        device: The device. None is the choice of `pick_device`. For a device that is not in this
            machine, `advise` forecasts dtypes and memory, and times nothing.
        loss_fn: A function that computes the loss from the output. None is the loss in the output,
            or the mean square of the output.
        minutes: About how many minutes the measurement takes.
        memory: The memory budget in bytes, or with a unit: ``"24GiB"``. None is the memory of the
            device.
        gpu: A GPU to forecast for, such as ``"rtx-4090"``: a name in `core.gpus.GPUS`. Give either
            `gpu` or `device`.
        **kwargs: The keyword arguments of the call.

    Returns:
        An `Advice`. Print it to see the ranking, the remarks and the programs.

    Raises:
        OptionError: If both `device` and `gpu` are given, or if `gpu` is unknown.
        DeviceError: If torch cannot use the device.
        TraceError: If the model fails in fp32, or if a step in fp32 does not fit into the memory.

    Example:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        print(advise(model, torch.randn(32, 64), gpu="rtx-4090"))
    """
    end = time.perf_counter() + 60 * minutes
    if gpu is not None and device is not None:
        raise OptionError("advise: device is measured and gpu is forecast: give one of them")
    absent = _absent_gpu(device, gpu)
    call = ModelCall(model, inputs, kwargs, loss_fn)
    if absent is not None:
        absent_device = torch.device(absent.architecture.device_type)
        return forecast(call, trace_and_forecast(call, absent_device, memory, absent), absent)
    outlook = trace_and_forecast(call, pick_device(str(device) if device else None), memory)
    return measured(call, outlook, end - time.perf_counter())


def _absent_gpu(device: torch.device | str | None, gpu: str | None) -> Gpu | None:
    """The GPU to forecast for; None for a device that is here, and for a name that is no device."""
    if gpu is not None:
        return gpu_of(gpu)
    device_type = str(device).partition(":")[0]  # "cuda" of "cuda:0"
    if device_type not in BACKENDS or backend(device_type).is_available():
        return None
    return unknown_gpu(device_type)


def measured(call: ModelCall, outlook: Outlook, seconds: float, beginning: str = "") -> Advice:
    """Check, time and rank the recipes on the device of `outlook`, in about `seconds`.

    `beginning` is code that makes model and inputs. With it, each program is run as a whole before
    it is printed.
    """
    end = time.perf_counter() + seconds
    report = describe_device(outlook.device)
    _require_memory(outlook, report.memory_bytes)
    stages = tqdm(total=4, unit="stage", leave=False, disable=None)  # shown on a terminal alone
    watch: list[str] = []
    if outlook.problem:
        watch.append(f"No forecast: {outlook.problem}.")
    watch += [f"The forecast: {line}" for line in outlook.decisions]
    rankings: dict[str, _Ranking] = {}
    with stages, preserve_random_state(outlook.device.type), torch.enable_grad():
        try:
            call, checks, scale = _fp32_checks(
                call, outlook.device, _SHARE_OF_CHECKS * seconds, watch
            )
        except Exception as error:  # the user's model and loss may raise anything
            name = type(call.model).__name__
            failed = TraceError(f"{name} fails in an fp32 step: {with_type(error)}")
            raise (outlook.problem or failed) from error
        *_, last_use = checks  # the keys: inference, then training if there is a loss
        for use, check in checks.items():
            stages.update()
            stages.set_description(use)
            until = end
            if use != last_use:  # half of the time that is left
                until = (time.perf_counter() + end) / 2
            rankings[use] = _Ranking(use, call, outlook, check, until, seconds)
            rankings[use].run()
            watch += rankings[use].memory_remarks()
        # Reversed, since training comes first in the advice.
        chosen = {use: r.best for use, r in reversed(rankings.items()) if r.best is not None}
        stages.set_description("programs")
        programs = {}
        for use, best in chosen.items():
            text = program(call, best.recipe, outlook.device, scale, beginning)
            # Without a beginning there is nothing to run but the step, which has been timed. The
            # program gets two minutes more than all steps above, to load and to compile.
            failure = error_of(text, 120 + seconds) if beginning else ""
            if failure:
                watch.append(f"The program for {use} is left out, since it fails: {failure}.")
            else:
                programs[use] = text
    watch += [f"Nothing can be recommended for {use}." for use in rankings if use not in chosen]
    recipes = [best.recipe for best in chosen.values()]
    for precision in dict.fromkeys(recipe.precision for recipe in recipes if recipe.autocasts):
        if precision in outlook.xrays:
            watch += outlook.xrays[precision].advice
    title = f"{type(call.model).__name__} on {report.name}, {outlook.device}"
    ranked = []
    for ranking in reversed(rankings.values()):
        ranked += ranking.ranked()
    return Advice(title, ranked, chosen, programs, watch)


def _require_memory(outlook: Outlook, memory_bytes: int | None) -> None:
    """Raise `TraceError` if a step in fp32 needs more memory than the device has.

    Otherwise Linux would kill the process.
    """
    needed = 0
    for use in (TRAINING, INFERENCE):
        peak, _ = outlook.memory_of(Recipe(use))
        needed = max(needed, peak or 0)
    if memory_bytes and needed > memory_bytes:
        sizes = f"{bytes_text(needed)}, and {outlook.device} has {bytes_text(memory_bytes)}"
        raise TraceError(_SMALLER_BATCH.sentence(sizes=sizes))


_Check = Callable[[Candidate], Step]  # `Learning.check` or `Fp32Outputs.check`


def _fp32_checks(
    call: ModelCall, device: torch.device, seconds: float, watch: list[str]
) -> tuple[ModelCall, dict[str, _Check], float]:
    """Run fp32 as the baseline of each use; all runs that train may take `seconds`, later ones too.

    Returns the call with a loss, a check of candidates for each use, and a loss scale for fp16.
    Adds remarks to `watch`. Without a loss that can be differentiated there is no check for
    training.
    """
    checks: dict[str, _Check] = {INFERENCE: Fp32Outputs(call, device).check}
    if TRAINING not in uses_of(call.model):
        return call, checks, DEFAULT_SCALE
    if call.loss_fn is None:
        loss = loss_of(Step(call, Recipe(TRAINING), device).output())
        if loss is None:
            watch.append("No output has a gradient to make a loss of: training is left out.")
            return call, checks, DEFAULT_SCALE
        call = replace(call, loss_fn=loss)
        watch.append(OWN_LOSS.sentence(loss=loss))
    scale, remarks = fp16_remarks(call, device)
    watch += remarks
    learning = Learning(call, device, seconds, scale)
    checks[TRAINING] = learning.check
    if not learning.learns:
        watch.append("fp32 does not learn here in a few steps: only first losses are compared.")
    if learning.noise > CHAOTIC:
        watch.append(
            f"A little noise in the weights puts fp32's own gradients {learning.noise:.0%} off, so "
            "only their size is compared."
        )
    return call, checks, scale


@dataclass
class _Ranking:
    """Checks, times and ranks the recipes of one use."""

    use: str
    call: ModelCall
    outlook: Outlook
    check: _Check
    end: float  # when its time ends, on the clock of `time.perf_counter`
    seconds: float  # the whole time of `measured`, of which comparisons get a share
    candidates: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None  # so far
    _baseline: Candidate | None = None  # the first recipe that ran
    # Of `_baseline`, of `best`, and of the candidates that are timed next.
    _steps: dict[Candidate, Step] = field(default_factory=dict)

    def run(self) -> None:
        """Check and time the precisions, then fusion, and then compilation."""
        report = describe_device(self.outlook.device)
        rates = {p: report.speedup(p) for p in _FROM_SIMPLE if report.rates.get(p)}
        # Rates that are not trusted may be several times too low.
        least = _EMULATED if report.trusted else _EMULATED / 5
        fast = [p for p, rate in rates.items() if rate >= least]
        convolves = any(isinstance(module, nn.Conv2d) for module in self.call.model.modules())
        new = self._check_recipes(first_recipes(self.use, fast))
        if convolves:
            new += self._check_recipes([replace(c.recipe, channels_last=True) for c in new])
        self._time_candidates(new)
        for precision, rate in rates.items():
            if rate < least:
                self._skip_emulated(precision, rate, report.trusted)
        if self.use == TRAINING and self.best:
            self._try_if_time_is_left(replace(self.best.recipe, fused=True), share=0.1)
        if self.best:
            for recipe in self._recipes_to_compile(self.best.recipe, channels_last=convolves):
                self._try_if_time_is_left(recipe, share=_SHARE_TO_COMPILE[self.use])

    def _skip_emulated(self, precision: Precision, rate: float, trusted: bool) -> None:
        """Record a precision that is not tried, since `rate` times fp32's is too slow."""
        verdict = "emulated"
        reason = f"its matmul runs at {rate:.2g} of fp32's rate"
        if not trusted:
            verdict = "not tried"
            reason += ", measured while the machine was busy"
        self.candidates.append(Candidate(Recipe(self.use, precision), verdict, reason))

    def _recipes_to_compile(self, best: Recipe, channels_last: bool) -> list[Recipe]:
        """What to compile: `best`, then `best` and fp32 with `channels_last`, each once."""
        fp32 = Recipe(self.use, fused=best.fused)
        recipes = [best]
        for recipe in (best, fp32):
            recipes.append(replace(recipe, channels_last=channels_last))
        return [replace(recipe, compiled=True) for recipe in dict.fromkeys(recipes)]

    def _try_if_time_is_left(self, recipe: Recipe, share: float) -> None:
        """Check and time a recipe if that share of the whole time is left; else record why not."""
        left = self.end - time.perf_counter()
        if left > share * self.seconds:
            self._time_candidates(self._check_recipes([recipe]))
            return
        reason = f"{max(0, left):.0f} s were left: {_MORE_MINUTES.text}"
        self.candidates.append(Candidate(recipe, "not tried", reason))

    def memory_remarks(self) -> list[str]:
        """A remark if the baseline spends a tenth of its time on new memory from the system."""
        if self._baseline is None or self.outlook.device.type != "cpu":
            return []
        taken = memory_taken(self._steps[self._baseline])  # bytes, of one more step
        if taken < 0.1 * _NEW_BYTES_PER_S * self._baseline.seconds:
            return []
        name = self._baseline.name
        size = bytes_text(taken)
        return [_KEEP_MEMORY.sentence(use=self.use, name=name, size=size, settings=ENVIRONMENT)]

    def ranked(self) -> list[Candidate]:
        """The candidates: the best first, then by speed, then those that were not timed."""

        def rank(candidate: Candidate) -> tuple[bool, float]:
            speedup = 0.0  # below all that were timed
            if candidate.speedup and candidate.speedup.trusted:
                speedup = candidate.speedup.median
            return candidate is not self.best, -speedup

        return sorted(self.candidates, key=rank)

    def _check_recipes(self, recipes: list[Recipe]) -> list[Candidate]:
        """Check recipes, and add them to the candidates; return those that are to be timed."""
        candidates = [self._check_recipe(recipe) for recipe in recipes]
        return [candidate for candidate in candidates if not candidate.verdict]

    def _check_recipe(self, recipe: Recipe) -> Candidate:
        """Check a recipe as a new candidate, which has a verdict if it is not to be timed.

        Otherwise its step is kept in `_steps`.
        """
        candidate = self.outlook.candidate(recipe)
        self.candidates.append(candidate)
        if candidate.verdict:
            return candidate
        try:
            step = self.check(candidate)
        except TooSlow:
            candidate.verdict = _TOO_SLOW
            candidate.reason = _SUCH_STEPS
            return candidate
        except Exception as error:  # the model may raise anything in this precision
            tip = tip_for(error, self.call.model, verb="try", device_type=self.outlook.device.type)
            candidate.verdict = "raises"
            candidate.reason = f"{with_type(error)}{tip}"
            if recipe.cast and _SAYS_DTYPES.search(str(error)):
                made_inside = _MADE_INSIDE.sentence(dtype=dtype_name(recipe.precision.dtype))
                candidate.reason += f"; {made_inside}"
            return candidate
        if candidate.reason:
            candidate.verdict = "unlike fp32"
        else:
            self._steps[candidate] = step
        return candidate

    def _time_candidates(self, new: list[Candidate]) -> None:
        """Time new candidates, the simplest first, in turns with baseline and best.

        A recipe becomes the best if it is surely faster, and by so much that its changes are worth
        it.
        """
        if not new:
            return
        self._baseline = self._baseline or new[0]
        best_before = self.best or new[0]
        speedup_before = best_before.speedup
        new = self._drop_slow(new)
        timed = self._compare_times()
        best = best_before
        for candidate in new:
            ratio = timed.ratio(candidate.name, best.name)  # of times: below 1 is faster
            if ratio.is_below(1.0) and ratio.median <= _WORTHWHILE:
                best = candidate
        self._record_times(timed, self._baseline, best)
        if timed.trusted and speedup_before and best_before.speedup:
            # `_record_times` has replaced the speed-up of the candidate that was the best before.
            change = best_before.speedup.median / speedup_before.median
            baseline_time = timed.time_s(self._baseline.name)
            self._rescale_earlier(change, baseline_time, timed)
        self.best = best
        best.verdict = "recommended"
        if not timed.trusted and best is self._baseline:
            best.reason = f"the simplest; {_busy_reason(timed)}"

    def _drop_slow(self, new: list[Candidate]) -> list[Candidate]:
        """Drop new candidates that are hopelessly slow, or too slow for the time that is left.

        The baseline is always kept, and the fastest of the others unless it is hopelessly slow.
        Returns the candidates that are left.
        """
        fastest_s = min(candidate.seconds for candidate in self._steps)
        allowed_s = max(_HOPELESS * fastest_s, _SHARE_OF_COMPARISON * self.seconds / _ROUNDS)
        # Seconds of a round that are left; below 0, there are too many candidates.
        left_s = self._time_to_compare() / _FEWEST_ROUNDS - self._round_s()
        others = [candidate for candidate in new if candidate is not self._baseline]
        others.sort(key=lambda candidate: -candidate.seconds)  # the slowest first
        for candidate in others:
            if candidate.seconds > allowed_s:
                reason = _SUCH_STEPS
            elif left_s < 0 and candidate is not others[-1]:
                reason = _MORE_MINUTES.text
            else:
                continue
            candidate.verdict = _TOO_SLOW
            candidate.reason = reason
            left_s += turn_s(candidate.seconds)
            del self._steps[candidate]
        return [candidate for candidate in new if not candidate.verdict]

    def _time_to_compare(self) -> float:
        """Seconds for the next comparison: a fifth of the time left is for what follows it."""
        return 0.8 * (self.end - time.perf_counter())

    def _round_s(self) -> float:
        """Estimated seconds of a round: one turn of each candidate."""
        return sum(turn_s(candidate.seconds) for candidate in self._steps)

    def _compare_times(self) -> Comparison:
        """Time `_steps` in turns, for `_ROUNDS` rounds or the time left, whichever is shorter.

        Even if less is left, it gets a second or its share of the whole time, whichever is longer.
        """
        wanted_s = min(_ROUNDS * self._round_s(), self._time_to_compare())
        budget_s = max(_SHARE_OF_COMPARISON * self.seconds, 1.0, wanted_s)
        steps = {candidate.name: step for candidate, step in self._steps.items()}
        return compare(steps, device=self.outlook.device, budget_s=budget_s, warmup=0)

    def _record_times(self, timed: Comparison, first: Candidate, best: Candidate) -> None:
        """Record times, speed-ups over `first` (the baseline) and verdicts in the candidates.

        Only the steps of `first` and `best` are kept for the next comparison.
        """
        for candidate in self._steps:
            if not timed.trusted and candidate.speedup:  # keep an earlier trusted result
                continue
            name = candidate.name
            candidate.time_s = timed.time_s(name)
            candidate.speedup = timed.ratio(first.name, name)
            candidate.verdict = "not worth its changes"
            if timed.ratio(name, best.name).is_above(1.0):
                candidate.verdict = "slower"
            if not timed.trusted:
                candidate.verdict = _TOO_BUSY
                candidate.reason = _busy_reason(timed)
        # Frees the copies of the model that the other steps have.
        self._steps = {candidate: self._steps[candidate] for candidate in (first, best)}

    def _rescale_earlier(self, change: float, baseline_time: Estimate, timed: Comparison) -> None:
        """Rescale results from before the comparison `timed`: the machine's speed may change.

        By `change`, the factor by which the speed-up of the earlier best recipe, which was timed
        then and in `timed`, has changed. `baseline_time` is the baseline's time in `timed`.
        """
        for c in self.candidates:
            if c.speedup and c.name not in timed.samples_s:
                c.speedup = c.speedup.times(change)
                c.time_s = baseline_time.times(1 / c.speedup.median)


def _busy_reason(timed: Comparison) -> str:
    """Why times are not trusted, as the reason of a candidate."""
    return f"its times cannot be trusted ({timed.reason})"

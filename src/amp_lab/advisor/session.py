"""`advise`: forecast, check against fp32, time and rank the recipes for a model."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from amp_lab.advisor.baseline import Baseline, Check, run_baseline
from amp_lab.advisor.candidates import Candidate, first_recipes, mixes_dtypes
from amp_lab.advisor.learning import TooSlow
from amp_lab.advisor.outlook import Outlook, forecast, trace_and_forecast
from amp_lab.advisor.result import Advice
from amp_lab.core.allocator import ENVIRONMENT, memory_taken
from amp_lab.core.backends import BACKENDS, backend
from amp_lab.core.device import describe_device, pick_device, preserve_random_state
from amp_lab.core.errors import OptionError, TraceError, with_type
from amp_lab.core.estimates import Estimate
from amp_lab.core.gpus import Gpu, gpu_of, unknown_gpu
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import remedy
from amp_lab.core.report import bytes_text, dtype_name
from amp_lab.core.timing import compare, turn_s
from amp_lab.core.timing_result import Comparison
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, TRAINING, Recipe, Step, error_of, program
from amp_lab.tracing.fake_device import tip_for

_FROM_SIMPLE = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)  # simplest first
_EMULATED = 0.25  # share of fp32's rate in a matmul below which a precision is not tried
_HOPELESS = 2  # time of a step, as a multiple of the fastest, from which it is not compared
_FEWEST_ROUNDS = 14  # of a comparison: 12 are needed to trust it, and some are disturbed
_ROUNDS = 24  # of a comparison, which are enough
_TOO_SLOW = "left out early"
_SUCH_STEPS = "its steps take too long"
_TOO_BUSY = "not reliable"
_WORTHWHILE = 0.97  # time of a step over the best one's, from which its changes are worth it
# Shares of the whole time.
_SHARE_OF_CHECKS = 0.2  # for all checks against fp32
_SHARE_OF_COMPARISON = 0.08  # for one comparison of times
_SHARE_TO_COMPILE = {TRAINING: 0.3, INFERENCE: 0.2}  # that must be left to try torch.compile
_SMALLER_BATCH = remedy(
    "advise.smaller_batch",
    "a step in fp32 does not fit into the device's memory",
    "the fp32 baseline needs {sizes}. Use a smaller batch",
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
    "{use}: {name} allocates {size} from the operating system in each step, which takes time. Set "
    "{settings} (or call amp_lab.core.allocator.keep_memory) and run advise again.",
)
_MADE_INSIDE = remedy(
    "advise.made_inside",
    "weights and inputs are cast, and the model raises because it creates fp32 tensors",
    "weights and inputs are in {dtype} here, but a tensor inside the model has another dtype. "
    "If the model creates or casts this tensor, add x.to(torch.{dtype})",
    failure="AMP0060",
)
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
    """Recommend a precision for a model on a device, with the code to write for it.

    A recipe is a precision with options, such as cast weights, a memory format or compilation. For
    each recipe, `advise` forecasts the memory, compares a copy of the model with fp32, and times
    that copy.

    Args:
        model: The model. It is neither changed nor moved.
        *inputs: A batch, as the model takes it.
        device: The device. If None, `pick_device` chooses it. If the device is not in this machine,
            `advise` forecasts dtypes and memory, and measures no times.
        loss_fn: A function that computes the loss from the output. If None, the loss is the one in
            the output or, without one, the mean square of the output.
        minutes: About how many minutes the measurement takes.
        memory: The memory budget in bytes, or with a unit: ``"24GiB"``. If None, the budget is the
            memory of the device.
        gpu: A GPU to forecast for, such as ``"rtx-4090"``: a name in `core.gpus.GPUS`. Give either
            `gpu` or `device`.
        **kwargs: The keyword arguments of the call.

    Returns:
        An `Advice`. Print it to see the ranking, the remarks and the code.

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
        raise OptionError(
            "advise: give device, which is measured, or gpu, which is forecast, not both"
        )
    absent = _absent_gpu(device, gpu)
    call = ModelCall(model, inputs, kwargs, loss_fn)
    if absent is not None:
        absent_device = torch.device(absent.architecture.device_type)
        outlook = trace_and_forecast(call, absent_device, memory, absent)
        return forecast(call, outlook, absent)
    name = str(device) if device else None
    outlook = trace_and_forecast(call, pick_device(name), memory)
    seconds_left = end - time.perf_counter()
    return measured(call, outlook, seconds_left)


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

    `beginning` is code that creates the model and the inputs. If you give it, each program runs as
    a whole before it is printed.
    """
    end = time.perf_counter() + seconds
    report = describe_device(outlook.device)
    _require_memory(outlook, report.memory_bytes)
    stages = tqdm(total=4, unit="stage", leave=False, disable=None)  # shown on a terminal alone
    watch: list[str] = []  # remarks for the user; `run_baseline` and `_write_programs` add to it
    if outlook.problem:
        watch.append(f"No forecast: {outlook.problem}.")
    watch += [f"The forecast: {line}" for line in outlook.decisions]
    rankings: list[_Ranking] = []
    with stages, preserve_random_state(outlook.device.type), torch.enable_grad():
        try:
            baseline = run_baseline(call, outlook.device, _SHARE_OF_CHECKS * seconds, watch)
        except Exception as error:  # the user's model and loss may raise anything
            name = type(call.model).__name__
            failed = TraceError(f"{name} fails in an fp32 step: {with_type(error)}")
            raise (outlook.problem or failed) from error
        last_use = list(baseline.checks)[-1]
        for use, check in baseline.checks.items():
            stages.update()
            stages.set_description(use)
            ranking_end = end
            if use != last_use:  # half of the time that is left
                ranking_end = (time.perf_counter() + end) / 2
            ranking = _Ranking(use, baseline.call, outlook, check, ranking_end, seconds)
            ranking.run()
            watch += ranking.memory_remarks()
            rankings.append(ranking)
        rankings.reverse()  # training comes first in the advice
        chosen = {ranking.use: ranking.best for ranking in rankings if ranking.best is not None}
        stages.set_description("programs")
        # Two minutes more than all steps above, to load and to compile.
        programs = _write_programs(
            baseline, chosen, outlook.device, beginning, 120 + seconds, watch
        )
    for use in baseline.checks:
        if use not in chosen:
            watch.append(f"advise cannot recommend a recipe for {use}.")
    watch += _autocast_advice(chosen, outlook)
    candidates = []
    for ranking in rankings:
        candidates += ranking.ranked()
    title = f"{type(call.model).__name__} on {report.name}, {outlook.device}"
    return Advice(title, candidates, chosen, programs, watch)


def _write_programs(
    baseline: Baseline,
    chosen: dict[str, Candidate],
    device: torch.device,
    beginning: str,
    limit_s: float,
    watch: list[str],
) -> dict[str, str]:
    """Write the program of each chosen recipe, and return the programs by use.

    With the code in `beginning`, which makes model and inputs, each program is run for at most
    `limit_s` seconds. One that fails is left out, with a remark in `watch`. Without it, only the
    step could run, which has been timed already.
    """
    programs = {}
    for use, best in chosen.items():
        code = program(baseline.call, best.recipe, device, baseline.loss_scale, beginning)
        failure = error_of(code, limit_s) if beginning else ""
        if failure:
            watch.append(f"The program for {use} is left out, because it fails: {failure}.")
        else:
            programs[use] = code
    return programs


def _autocast_advice(chosen: dict[str, Candidate], outlook: Outlook) -> list[str]:
    """The advice of the X-rays in the precisions of the chosen recipes that use autocast."""
    recipes = [candidate.recipe for candidate in chosen.values()]
    precisions = [recipe.precision for recipe in recipes if recipe.autocasts]
    advice = []
    for precision in dict.fromkeys(precisions):  # each once
        if precision in outlook.xrays:
            advice += outlook.xrays[precision].advice
    return advice


def _require_memory(outlook: Outlook, memory_bytes: int | None) -> None:
    """Raise `TraceError` if a step in fp32 needs more memory than the device has.

    Otherwise Linux would kill the process.
    """
    peaks = [outlook.memory_of(Recipe(use)).peak_bytes for use in (TRAINING, INFERENCE)]
    needed = max(peak or 0 for peak in peaks)
    if memory_bytes and needed > memory_bytes:
        sizes = f"{bytes_text(needed)}, and {outlook.device} has {bytes_text(memory_bytes)}"
        raise TraceError(_SMALLER_BATCH.sentence(sizes=sizes))


@dataclass
class _Ranking:
    """Checks, times and ranks the recipes for one use, ``training`` or ``inference``.

    A check compares a recipe with fp32. Recipes that pass are timed side by side. A candidate is a
    recipe with its results; its verdict is empty until it is rejected or timed.
    """

    use: str
    call: ModelCall
    outlook: Outlook
    check: Check
    end: float  # when its time ends, on the clock of `time.perf_counter`
    seconds: float  # the total time of `measured`, of which comparisons get a share
    candidates: list[Candidate] = field(default_factory=list)  # all recipes so far
    best: Candidate | None = None  # the best so far; None if nothing was timed
    _baseline: Candidate | None = None  # the first recipe that ran; speed-ups are relative to it
    # Steps that are ready to run: of `_baseline`, `best`, and the candidates that are timed next.
    _steps: dict[Candidate, Step] = field(default_factory=dict)

    def run(self) -> None:
        """Check and time each precision, then a fused optimizer, and then compilation.

        Each stage changes the best recipe of the stage before.
        """
        report = describe_device(self.outlook.device)
        # Matmul rates as multiples of fp32's.
        rates = {p: report.speedup(p) for p in _FROM_SIMPLE if report.rates.get(p)}
        # Rates that are not trusted may be several times too low.
        least_rate = _EMULATED if report.trusted else _EMULATED / 5
        native = [precision for precision, rate in rates.items() if rate >= least_rate]
        convolves = any(isinstance(module, nn.Conv2d) for module in self.call.model.modules())
        new = self._check_recipes(first_recipes(self.use, native))
        if convolves:
            new += self._check_recipes([replace(c.recipe, channels_last=True) for c in new])
        self._time_candidates(new)
        for precision, rate in rates.items():
            if rate < least_rate:
                self._skip_emulated(precision, rate, report.trusted)
        if self.best is None:
            return
        if self.use == TRAINING:
            # A fused optimizer compiles nothing, so a tenth of the time is enough.
            self._try_if_time_is_left(replace(self.best.recipe, fused=True), share=0.1)
        for recipe in self._recipes_to_compile(self.best.recipe, channels_last=convolves):
            self._try_if_time_is_left(recipe, share=_SHARE_TO_COMPILE[self.use])

    def _skip_emulated(self, precision: Precision, rate: float, trusted: bool) -> None:
        """Record a precision that is not tried, since `rate` times fp32's is too slow."""
        verdict = "emulated"
        reason = f"its matmuls run at only {rate:.2g} times the fp32 rate"
        if not trusted:
            verdict = "not tried"
            reason += ", measured while the machine was busy"
        self.candidates.append(Candidate(Recipe(self.use, precision), verdict, reason))

    def _recipes_to_compile(self, best: Recipe, channels_last: bool) -> list[Recipe]:
        """The recipes to try with torch.compile, without duplicates.

        These are `best`, and then `best` and fp32 with the memory format `channels_last`.
        """
        fp32 = Recipe(self.use, fused=best.fused)
        recipes = [
            best,
            replace(best, channels_last=channels_last),
            replace(fp32, channels_last=channels_last),
        ]
        return [replace(recipe, compiled=True) for recipe in dict.fromkeys(recipes)]

    def _try_if_time_is_left(self, recipe: Recipe, share: float) -> None:
        """Check and time a recipe if that share of the total time is left; else record why not."""
        left_s = self.end - time.perf_counter()
        if left_s > share * self.seconds:
            self._time_candidates(self._check_recipes([recipe]))
            return
        reason = f"only {max(0, left_s):.0f} s were left: {_MORE_MINUTES.text}"
        self.candidates.append(Candidate(recipe, "not tried", reason))

    def memory_remarks(self) -> list[str]:
        """A remark if the baseline spends a tenth of its time on new memory from the system."""
        if self._baseline is None or self.outlook.device.type != "cpu":
            return []
        new_bytes = memory_taken(self._steps[self._baseline])  # by one more step
        new_memory_s = new_bytes / _NEW_BYTES_PER_S
        if new_memory_s < 0.1 * self._baseline.seconds:
            return []
        name = self._baseline.name
        size = bytes_text(new_bytes)
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
        """Check recipes, and add them to the candidates; return those that were not rejected."""
        candidates = [self._check_recipe(recipe) for recipe in recipes]
        return [candidate for candidate in candidates if not candidate.verdict]

    def _check_recipe(self, recipe: Recipe) -> Candidate:
        """Forecast and check a recipe, and add it to the candidates.

        A candidate that is rejected gets a verdict and a reason. The step of any other candidate is
        added to `_steps`, to be timed.
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
            if recipe.cast and mixes_dtypes(error):
                made_inside = _MADE_INSIDE.sentence(dtype=dtype_name(recipe.precision.dtype))
                candidate.reason += f"; {made_inside}"
            return candidate
        if candidate.reason:
            candidate.verdict = "unlike fp32"
        else:
            self._steps[candidate] = step
        return candidate

    def _time_candidates(self, new: list[Candidate]) -> None:
        """Time new candidates in turns with the baseline and the best so far, and set `best`.

        `new` has the simplest candidate first. All steps in `_steps` are timed.
        """
        if not new:
            return
        if self._baseline is None or self.best is None:  # the first comparison
            self._baseline = new[0]
            self.best = new[0]
        baseline = self._baseline
        previous_best = self.best
        earlier_speedup = previous_best.speedup  # None in the first comparison
        new = self._drop_slow(new)
        timed = self._compare_times()
        best = _choose_best(timed, previous_best, new)
        # This gives the previous best, which was timed again, a new speed-up.
        self._record_times(timed, baseline, best)
        if timed.trusted and earlier_speedup is not None:
            new_speedup = timed.ratio(baseline.name, previous_best.name)
            change = new_speedup.median / earlier_speedup.median
            self._rescale_earlier(change, timed.time_s(baseline.name), timed)
        self.best = best
        best.verdict = "recommended"
        if not timed.trusted and best is baseline:
            best.reason = f"this is the simplest recipe; {_busy_reason(timed)}"

    def _drop_slow(self, new: list[Candidate]) -> list[Candidate]:
        """Reject new candidates that are hopelessly slow, or too slow for the time that is left.

        The baseline is never rejected, and the fastest of the others only if it is hopelessly slow.
        Returns the candidates that were not rejected.
        """
        fastest_s = min(candidate.seconds for candidate in self._steps)
        # A slow step is harmless if a comparison has time for it in every round.
        harmless_s = _SHARE_OF_COMPARISON * self.seconds / _ROUNDS
        allowed_s = max(_HOPELESS * fastest_s, harmless_s)
        # Seconds by which a round may become longer; below 0, there are too many candidates.
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
        """Seconds for the next comparison: all that are left, but a fifth for what follows it."""
        return 0.8 * (self.end - time.perf_counter())

    def _round_s(self) -> float:
        """Estimated seconds of a round: one turn of each candidate."""
        return sum(turn_s(candidate.seconds) for candidate in self._steps)

    def _compare_times(self) -> Comparison:
        """Time the steps in `_steps` in turns, for about `_ROUNDS` rounds if the time allows them.

        A comparison may take at least a second, and at least its share of the total time.
        """
        planned_s = min(_ROUNDS * self._round_s(), self._time_to_compare())
        budget_s = max(_SHARE_OF_COMPARISON * self.seconds, 1.0, planned_s)
        steps = {candidate.name: step for candidate, step in self._steps.items()}
        return compare(steps, device=self.outlook.device, budget_s=budget_s, warmup=0)

    def _record_times(self, timed: Comparison, baseline: Candidate, best: Candidate) -> None:
        """Record times, speed-ups over `baseline` and verdicts in the candidates that were timed.

        Only the steps of `baseline` and `best` stay in `_steps`, for the next comparison.
        """
        for candidate in self._steps:
            if not timed.trusted and candidate.speedup:  # keep the result of an earlier comparison
                continue
            name = candidate.name
            candidate.time_s = timed.time_s(name)
            candidate.speedup = timed.ratio(baseline.name, name)
            candidate.verdict = "gain too small"
            if timed.ratio(name, best.name).is_above(1.0):
                candidate.verdict = "slower"
            if not timed.trusted:
                candidate.verdict = _TOO_BUSY
                candidate.reason = _busy_reason(timed)
        # Frees the copies of the model that the other steps have.
        self._steps = {candidate: self._steps[candidate] for candidate in (baseline, best)}

    def _rescale_earlier(self, change: float, baseline_time: Estimate, timed: Comparison) -> None:
        """Rescale the results of candidates that were timed earlier, but not in `timed`.

        The speed of the machine may have changed since then. `change` is the factor by which the
        speed-up of a recipe that was timed both times has changed, and `baseline_time` the time of
        the baseline in `timed`, in seconds.
        """
        for c in self.candidates:
            if c.speedup and c.name not in timed.samples_s:
                c.speedup = c.speedup.times(change)
                c.time_s = baseline_time.times(1 / c.speedup.median)


def _choose_best(timed: Comparison, best: Candidate, new: list[Candidate]) -> Candidate:
    """The best candidate after `best` has been compared with each new one, in order.

    A new candidate replaces the best before it if it is faster beyond the uncertainty of both
    times, and by so much that its changes are worth it.
    """
    for candidate in new:
        ratio = timed.ratio(candidate.name, best.name)  # of times: below 1 is faster
        if ratio.is_below(1.0) and ratio.median <= _WORTHWHILE:
            best = candidate
    return best


def _busy_reason(timed: Comparison) -> str:
    """Why times are not trusted, as the reason of a candidate."""
    return f"the times are not reliable ({timed.reason})"

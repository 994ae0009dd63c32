"""`advise`: what a model can run in is forecast, tried, held against fp32, timed and ranked."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from amp_lab.advisor import recipes as r
from amp_lab.advisor.learning import CHAOTIC, Answers, Learning, TooSlow, fp16_remarks
from amp_lab.advisor.outlook import Outlook, first_look
from amp_lab.advisor.recipes import INFERENCE, TRAINING, Candidate, Case, Recipe, Step
from amp_lab.advisor.result import Advice
from amp_lab.allocator import ENVIRONMENT, memory_taken
from amp_lab.backends import BACKENDS, backend
from amp_lab.device import describe_device, pick_device
from amp_lab.errors import TraceError, with_type
from amp_lab.precision import Precision
from amp_lab.remedies import remedy
from amp_lab.report import bytes_text
from amp_lab.timing import Estimate, compare, turn_s
from amp_lab.tracing.fake_device import tip_for

_FROM_SIMPLE = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)
_EMULATED = 0.25  # of fp32's rate in a matrix product: a step might take minutes
_HOPELESS = 2  # times the fastest step: not worth a comparison, where steps are long
_FEWEST_ROUNDS, _ROUNDS = 14, 24  # of a comparison: to be trusted (12, and some to spare); enough
_TOO_SLOW = "left out early"
_SUCH_STEPS = "such steps take too long"
_TOO_BUSY = "too busy to tell"
_WORTH = 0.97  # of the time of the best so far: more changes to a program have to save so much
_CHECKS, _HEAT = 0.2, 0.08  # shares of the time
_COMPILING = {TRAINING: 0.3, INFERENCE: 0.2}  # what must be left of it
_SMALLER_BATCH = remedy(
    "advise.smaller_batch",
    "a step in fp32 does not fit into the device's memory",
    "the fp32 baseline needs {sizes}: use a smaller batch",
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
    "amp_lab.allocator.keep_memory) and rerun.",
)
_NEW_BYTES_PER_S = 2e9  # that an operating system makes of new pages: 1 to 5 µs for 4 KiB


def advise(
    model: nn.Module,
    *inputs: Any,
    device: torch.device | str | None = None,
    loss_fn: Callable[[Any], Any] | None = None,
    minutes: float = 2.0,
    memory: int | str | None = None,
    **kwargs: Any,
) -> Advice:
    """Which precision to use for this model on this device, and the lines to write for it.

    `inputs` and `kwargs` are a batch as the model takes it; `loss_fn` makes a loss of the output,
    which is else its own or its mean square. It takes about so many `minutes`, on copies. On a
    `device` that is not here dtypes and memory are forecast, and nothing is timed. `memory`, such
    as ``"24GiB"``, has to be enough; without it, the device's own. Raises an `AmpLabError`.
    """
    end, kind = time.perf_counter() + 60 * minutes, str(device).partition(":")[0]
    is_here = kind not in BACKENDS or backend(kind).is_available()
    place = pick_device(str(device) if device else None) if is_here else torch.device(kind)
    case = Case(model, inputs, kwargs, loss_fn, place)
    look = first_look(case, memory)
    return measured(case, look, end - time.perf_counter()) if is_here else forecast(case, look)


def forecast(case: Case, look: Outlook) -> Advice:
    """What can be said for a device that is not here."""
    kind, found = case.device.type, []
    for use in case.uses:
        for recipe in r.recipes(use, [Precision.FP32, *look.xrays]):
            verdict, reason = look.why_not(recipe)
            found.append(Candidate(recipe, verdict or "not timed", reason, *look.memory_of(recipe)))
    watch = [f"Nothing was timed: which is the fastest cannot be known without a {kind} to run on."]
    watch += look.decisions
    watch += [f"{p}: {line}" for p, seen in look.xrays.items() for line in seen.advice]
    title = f"{type(case.model).__name__} on {kind}, which is not here: a forecast"
    return Advice(title, found, {}, {}, watch)


def measured(case: Case, look: Outlook, seconds: float, beginning: str = "") -> Advice:
    """Try, check, time and rank on the device of the case, in about so many seconds.

    `beginning` makes model and inputs in a program of its own, which is run before it is shown.
    """
    end, kind = time.perf_counter() + seconds, case.device.type
    report = describe_device(case.device)
    needed = max(look.memory_of(Recipe(use))[0] or 0 for use in (TRAINING, INFERENCE))
    if report.memory_bytes and needed > report.memory_bytes:  # the system would end this process
        sizes = f"{bytes_text(needed)}, and {case.device} has {bytes_text(report.memory_bytes)}"
        raise TraceError(_SMALLER_BATCH.said(sizes=sizes))
    devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    kept = torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind)
    stages = tqdm(total=4, unit="stage", leave=False, disable=None)  # None: but on a terminal
    watch: list[str] = [f"No forecast: {look.problem}."] if look.problem else []
    watch += [f"The forecast: {line}" for line in look.decisions]
    contests: dict[str, _Contest] = {}
    with stages, kept, torch.enable_grad():
        try:
            case, loss, checks, scale = _references(case, _CHECKS * seconds, watch)
        except Exception as error:  # the user's model and loss raise what they like
            name = type(case.model).__name__
            failed = TraceError(f"{name} fails in an fp32 step: {with_type(error)}")
            raise (look.problem or failed) from error
        for use, check in checks.items():
            stages.update()
            stages.set_description(use)
            now = time.perf_counter()
            until = (now + end) / 2 if use != [*checks][-1] else end  # half of what is left
            contests[use] = _Contest(use, case, look, check, scale, until, seconds)
            contests[use].run()
            watch += contests[use].memory_remarks()
        chosen = {use: c.best for use, c in reversed(contests.items()) if c.best is not None}
        stages.set_description("programs")
        programs = {}
        for use, best in chosen.items():
            start = beginning or r.YOURS
            if loss and beginning and use == TRAINING:
                start += f"\n\n\ndef loss_fn(output):  # yours\n    return {loss}\n"
            programs[use] = r.program(case, best.recipe, scale, start)
            # Without a beginning there is no more to run than the lines, which ran for the times.
            why = _why_it_fails(programs[use], 120 + seconds) if beginning else ""
            if why:
                watch.append(f"The program for {use} is left out, since it fails: {why}.")
                del programs[use]
    watch += [f"Nothing can be recommended for {use}." for use in contests if use not in chosen]
    for precision in {best.recipe.precision for best in chosen.values() if best.recipe.autocasts}:
        watch += look.xrays[precision].advice if precision in look.xrays else []
    title = f"{type(case.model).__name__} on {report.name}, {case.device}"
    found = [c for contest in reversed(contests.values()) for c in contest.ranked()]
    return Advice(title, found, chosen, programs, watch)


def _why_it_fails(text: str, timeout: float) -> str:
    """Run a program in a process of its own, in this folder; empty if it runs to its end."""
    command = [sys.executable, "-c", text]
    try:
        done = subprocess.run(command, timeout=timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"it did not end in {timeout:.0f} s"
    return (done.stderr.strip().splitlines() or ["it failed"])[-1] if done.returncode else ""


_Check = Callable[[Candidate, float], Step]


def _references(
    case: Case, seconds: float, watch: list[str]
) -> tuple[Case, str | None, dict[str, _Check], float]:
    """The case with a loss, that loss in Python, what to hold recipes against, and a loss scale."""
    checks: dict[str, _Check] = {INFERENCE: Answers(case).check}
    loss, scale = None, None
    if TRAINING in case.uses and case.loss_fn is None:
        loss = r.loss_of(Step(case, Recipe(TRAINING)).output())
        case = replace(case, loss_fn=eval(f"lambda output: {loss}") if loss else None)
        watch.append(r.OWN_LOSS.said(loss=loss))
    if TRAINING in case.uses and case.loss_fn is not None:
        scale, said = fp16_remarks(case)
        learning = Learning(case, seconds)
        checks[TRAINING] = learning.check
        watch += said
        if not learning.learns:
            watch.append("fp32 does not learn here in a few steps: only first losses are compared.")
        if learning.noise > CHAOTIC:
            watch.append(
                f"A little noise in the weights puts fp32's own gradients {learning.noise:.0%} off,"
                " so only their size is compared."
            )
    return case, loss, checks, scale or 2.0**16


@dataclass
class _Contest:
    """The recipes of one use: which of them are sound, and which is the best."""

    use: str
    case: Case
    look: Outlook
    check: _Check
    scale: float
    end: float  # of the clock
    seconds: float  # in all
    found: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None  # as far as is known
    _first: Candidate | None = None  # the baseline
    _steps: dict[str, Step] = field(default_factory=dict)  # of these two, and of new ones

    def run(self) -> None:
        """Check and time the precisions, and then what else can be switched on."""
        report = describe_device(self.case.device)
        rates = {p: report.speedup(p) for p in _FROM_SIMPLE if report.rates.get(p)}
        least = _EMULATED if report.trusted else _EMULATED / 5
        convolves = any(isinstance(module, nn.Conv2d) for module in self.case.model.modules())
        sound = [p for p, rate in rates.items() if rate >= least]
        self._heat(r.recipes(self.use, sound), layouts=convolves)
        for p, rate in rates.items():
            if rate < least:
                why = f"its matrix product has {rate:.2g} of fp32's rate"
                busy = "" if report.trusted else ", measured while the machine was busy"
                verdict = "not tried" if busy else "emulated"
                self.found.append(Candidate(Recipe(self.use, p), verdict, why + busy))
        if self.use == TRAINING and self.best:
            self._switch([replace(self.best.recipe, fused=True)], 0.1)
        if self.best:  # compiled, a layout or a precision may win that lost before
            best, last = self.best.recipe, {"channels_last": convolves}
            new = [best, replace(best, **last), Recipe(self.use, fused=best.fused, **last)]
            for recipe in dict.fromkeys(new):
                self._switch([replace(recipe, compiled=True)], _COMPILING[self.use])

    def _switch(self, recipes: list[Recipe], share: float) -> None:
        """Try what can be switched on, if that share of the time is left."""
        left = self.end - time.perf_counter()
        if left > share * self.seconds:
            self._heat(recipes)
        else:
            why = f"{max(0, left):.0f} s were left: {_MORE_MINUTES.text}"
            self.found += [Candidate(recipe, "not tried", why) for recipe in recipes]

    def memory_remarks(self) -> list[str]:
        """What a step of the first takes anew from the system, where it may cost a tenth."""
        if self._first is None or self.case.device.type != "cpu":
            return []
        taken = memory_taken(self._steps[self._first.name])
        if taken < 0.1 * _NEW_BYTES_PER_S * self._first.seconds:
            return []
        name, size = self._first.name, bytes_text(taken)
        return [_KEEP_MEMORY.said(use=self.use, name=name, size=size, settings=ENVIRONMENT)]

    def ranked(self) -> list[Candidate]:
        """The best first, then the fastest, then what was not timed."""
        sure = {id(c): c.speedup.median for c in self.found if c.speedup and c.speedup.trusted}
        return sorted(self.found, key=lambda c: (c is not self.best, -sure.get(id(c), 0.0)))

    def _heat(self, recipes: list[Recipe], layouts: bool = False) -> None:
        """Check recipes, the simplest first, and time them in turns with the first and the best.

        With `layouts` those that are sound are tried with channels-last too. One takes the place
        of the best only if it surely saves time, and as much as is worth it.
        """
        new = [candidate for candidate in map(self._entered, recipes) if not candidate.verdict]
        again = [replace(candidate.recipe, channels_last=True) for candidate in new if layouts]
        new += [candidate for candidate in map(self._entered, again) if not candidate.verdict]
        if not new:
            return
        self._first, best = self._first or new[0], self.best or new[0]
        new = self._without_the_slow(new)
        last, before = best, best.speedup
        most = _ROUNDS * sum(turn_s(c.seconds) for c in self.found if c.name in self._steps)
        budget_s = max(_HEAT * self.seconds, 1.0, min(most, self._time_to_compare()))
        timed = compare(self._steps, device=self.case.device, budget_s=budget_s, warmup=0)
        for candidate in new:
            ratio = timed.ratio(candidate.name, best.name)
            if ratio.is_below(1.0) and ratio.median <= _WORTH:
                best = candidate
        busy = "" if timed.trusted else f"its times cannot be trusted ({timed.reason})"
        for name, candidate in [(c.name, c) for c in self.found if c.name in timed.samples_s]:
            if timed.trusted or candidate.speedup is None:  # what was sure stays so
                candidate.time_s = timed.time_s(name)
                candidate.speedup = timed.ratio(self._first.name, name)
                slower = timed.ratio(name, best.name).is_above(1.0)
                candidate.verdict = "slower" if slower else "not worth its changes"
                if busy:
                    candidate.verdict = _TOO_BUSY
                    candidate.reason = busy
            if candidate not in (self._first, best):
                del self._steps[name]  # and its copy of the model
        if timed.trusted and before and last.speedup:
            change = last.speedup.median / before.median
            self._move_others(change, timed.time_s(self._first.name), [*timed.samples_s])
        self.best, best.verdict = best, "recommended"
        if busy and best is self._first:
            best.reason = f"the simplest; {busy}"

    def _move_others(self, change: float, first: Estimate, names: list[str]) -> None:
        """Put those that lost in earlier heats behind what beat them, which was timed again now.

        A minute later the machine may be faster: by `change` for the best until now.
        """
        for c in self.found:
            if c.speedup and c.name not in names:
                c.speedup = c.speedup.times(change)
                c.time_s = first.times(1 / c.speedup.median)

    def _entered(self, recipe: Recipe) -> Candidate:
        """A recipe that was checked; it has a verdict if it is not to be timed."""
        found = Candidate(recipe, *self.look.why_not(recipe), *self.look.memory_of(recipe))
        self.found.append(found)
        if found.verdict:
            return found
        try:
            step = self.check(found, self.scale)
        except TooSlow:
            found.verdict = _TOO_SLOW
            found.reason = _SUCH_STEPS
            return found
        except Exception as error:  # whatever a model raises in this precision
            tip = tip_for(error, self.case.model, "try", self.case.device.type)
            found.verdict, found.reason = "raises", f"{with_type(error)}{tip}"
            return found
        if found.reason:
            found.verdict = "unlike fp32"
        else:
            self._steps[found.name] = step
        return found

    def _time_to_compare(self) -> float:
        return 0.8 * (self.end - time.perf_counter())

    def _without_the_slow(self, new: list[Candidate]) -> list[Candidate]:
        """The fastest of new recipes, as many as there is time to compare; and always the first."""
        seconds = {c.name: c.seconds for c in self.found if c.name in self._steps}
        most = max(_HOPELESS * min(seconds.values()), _HEAT * self.seconds / _ROUNDS)
        others = sorted((c for c in new if c is not self._first), key=lambda c: -c.seconds)
        left = self._time_to_compare() / _FEWEST_ROUNDS - sum(map(turn_s, seconds.values()))
        for candidate in others:
            if candidate.seconds > most or (left < 0 and candidate is not others[-1]):
                candidate.verdict = _TOO_SLOW
                candidate.reason = _SUCH_STEPS
                if candidate.seconds <= most:
                    candidate.reason = _MORE_MINUTES.text
                left += turn_s(candidate.seconds)
                del self._steps[candidate.name]
        return [candidate for candidate in new if not candidate.verdict]

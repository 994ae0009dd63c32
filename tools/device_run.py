"""Runs parts of a measurement, each in a process of its own.

A part that fails, or takes too long, does not stop the next one. `first_gpu` and `record` use it.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "torchvision", "numpy", "matplotlib", "sklearn", "tqdm")
STATUSES = ("held", "failed", "too long", "no time left")  # what can become of a part
MARK = "first-gpu result: "  # begins the line in which a part's process hands its figures over


@dataclass(frozen=True)
class Settings:
    """What the parts are told."""

    device: str
    tiny: bool
    out: Path
    """The folder for what the parts write, and for the output of each: ``PART.log``."""
    jobs: int = 1
    """How many parts that are not timed run at the same time."""

    @property
    def scale(self) -> str:
        """AMP_LAB_SCALE for the notebooks."""
        return "quick" if self.tiny else "full"


@dataclass(frozen=True)
class Part:
    """One thing to try."""

    name: str
    limit_s: float
    commands: Callable[[Settings], list[list[str]]]
    """Arguments of Python, run one after another; each must end with 0."""
    is_timed: bool = True
    """Whether its figures would change if other parts ran beside it."""


@dataclass
class Outcome:
    """What became of a part."""

    part: str
    status: str
    """One of `STATUSES`."""
    seconds: float = 0.0
    error: str = ""
    """Its first line, of what failed or did not hold."""
    figures: dict = dataclasses.field(default_factory=dict)


def missing_packages() -> list[str]:
    """The packages that the parts need and that are not installed here."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def run_parts(
    parts: list[Part],
    settings: Settings,
    seconds: float,
    after_part: Callable[[list[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Run each part within its limit and what is left of `seconds`.

    With more than one job, the parts that are not timed run first, so many at a time. After each
    part, `after_part` gets the outcomes so far.
    """
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []

    def run_within_the_time(part: Part) -> Outcome:
        left = end - time.monotonic()
        if left < min(5.0, part.limit_s):  # in 5 s a part does little more than import torch
            return Outcome(part.name, "no time left")
        print(f"{part.name} …", flush=True)
        return run_part(part, settings, min(part.limit_s, left))

    def run_at_once(parts: list[Part], count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            for outcome in pool.map(run_within_the_time, parts):
                outcomes.append(outcome)
                line = f"    {outcome.part}: {outcome.status} {outcome.error}"
                print(line.rstrip(), flush=True)
                after_part(outcomes)

    if settings.jobs > 1:
        run_at_once([part for part in parts if not part.is_timed], settings.jobs)
        parts = [part for part in parts if part.is_timed]
    run_at_once(parts, 1)
    return outcomes


def run_part(part: Part, settings: Settings, limit_s: float) -> Outcome:
    """Run the commands of a part, each with what is left of its limit; return the outcome."""
    started = time.monotonic()
    log = settings.out / f"{part.name}.log"
    log.unlink(missing_ok=True)
    outcome = Outcome(part.name, "held")
    for command in part.commands(settings):
        left = limit_s - (time.monotonic() - started)
        code = _run(command, settings, log, left)
        if code is None:
            outcome.status = "too long"
            outcome.error = f"stopped after {limit_s:.0f} s"
            break
        if code != 0:
            outcome.status = "failed"
            outcome.error = _last_line(log, code)
            break
    outcome.seconds = time.monotonic() - started
    outcome.figures, unmet = _figures(log)
    if outcome.status == "held" and unmet:
        outcome.status = "failed"
        outcome.error = "; ".join(unmet)
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as text, a line each, with how many held."""
    width = max((len(outcome.part) for outcome in outcomes), default=0)
    lines = []
    for outcome in outcomes:
        part_and_status = f"{outcome.part:<{width}}  {outcome.status:<12}"
        line = f"{part_and_status} {outcome.seconds:>6.0f} s  {outcome.error[:120]}"
        lines.append(line.rstrip())
    held_count = sum(outcome.status == "held" for outcome in outcomes)
    return "\n".join(["", *lines, f"{held_count} of {len(outcomes)} held"])


def _run(command: list[str], settings: Settings, log: Path, limit_s: float) -> int | None:
    """The exit code of Python with these arguments, None if it took too long; output to `log`."""
    python_path = [str(ROOT / folder) for folder in ("src", "notebooks", "tools")]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    environment = os.environ | {
        "AMP_LAB_DEVICE": settings.device,
        "AMP_LAB_SCALE": settings.scale,
        "MPLBACKEND": "Agg",  # draws without a display
        "PYTHONPATH": os.pathsep.join(python_path),
    }
    if settings.jobs > 1:  # threads of several parts that share a core slow all of them down
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // settings.jobs))
    with open(log, "a", encoding="utf-8") as file:
        # A session of its own, so that what a part has started ends with it.
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            return process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_line(log: Path, code: int) -> str:
    """The last line that a failed process printed: the error, at the end of a traceback."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    printed = [line for line in lines if line and not line.startswith(MARK)]
    return printed[-1] if printed else f"exit code {code}"


def _figures(log: Path) -> tuple[dict, list[str]]:
    """The figures that the part's processes printed, and which of their limits were not met."""
    figures: dict = {}
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(MARK):
            figures |= json.loads(line.removeprefix(MARK))
    unmet = [name for name, met in figures.get("limits", {}).items() if not met]
    return figures, unmet

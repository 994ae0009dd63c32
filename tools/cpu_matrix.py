"""Run the tests as on other CPUs: `pdm run cpu-matrix [--only NAME …] [PATH …]`.

A limit on the instructions that ATen, oneDNN and MKL choose makes one x86-64 machine behave like an
older one. Each run is a whole run of pytest, over the paths given or over all tests and notebooks,
with an empty cache of compiled kernels: those compiled for other instructions return garbage. At
the end a table says which tests failed where. Exit code 1 if any did, 2 for a wrong argument.

    pdm run cpu-matrix --list              # the runs, and which of them this CPU can do
    pdm run cpu-matrix --only avx2 tests/tracing
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from amp_lab.core.cpu import LIMITS

ROOT = Path(__file__).resolve().parent.parent
REVERSED = "AMP_LAB_REVERSED"
"""The environment variable with which the tests run the last file first, see tests/conftest.py."""


@dataclass(frozen=True)
class Run:
    """One run of the tests: what is set for it, and what the CPU has to have."""

    name: str
    settings: dict[str, str]
    needs: str = ""  # an instruction set, by its name in `torch.cpu`
    processes: int = 2


def _limited(aten: str, onednn: str) -> dict[str, str]:
    # MKL, which multiplies in fp32, follows neither of the other two.
    mkl = {"default": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512"}[aten]
    limits = dict(zip(LIMITS, (aten, onednn), strict=True))
    return limits | {"MKL_ENABLE_INSTRUCTIONS": mkl}


RUNS = (
    Run("native", {}),
    Run("sse41", _limited("default", "SSE41")),
    Run("avx2", _limited("avx2", "AVX2"), needs="avx2"),
    Run("avx512", _limited("avx512", "AVX512_CORE"), needs="avx512"),
    Run("avx512-bf16", _limited("avx512", "AVX512_CORE_BF16"), needs="avx512_bf16"),
    Run("1-thread", {"OMP_NUM_THREADS": "1"}),
    Run("4-threads", {"OMP_NUM_THREADS": "4"}, processes=1),  # two would wait for each other
    Run("reversed", {REVERSED: "1"}),
    Run("avx2-reversed", _limited("avx2", "AVX2") | {REVERSED: "1"}, needs="avx2"),
)
"""The last is the one that `.ci/run` has time for: two in one, and so not part of the matrix."""
MATRIX = [run.name for run in RUNS[:-1]]


@dataclass
class Outcome:
    """What a run of pytest came to."""

    run: Run
    code: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The row of the table."""
        if not self.counts:
            return f"{self.run.name:<14} ended with exit code {self.code} before its report"
        numbers = [self.counts[kind] for kind in ("passed", "failed", "skipped")]
        counts = "".join(f"{number:>9,}" for number in numbers)
        minutes = self.seconds / 60
        return f"{self.run.name:<14}{counts}{minutes:>8.1f} min"


def main(argv: list[str] | None = None) -> int:
    """Do the runs; return 0, 1 if a test failed, or 2 for what the user can put right."""
    parser = argparse.ArgumentParser(prog="cpu-matrix", description=__doc__.splitlines()[0])
    names = [run.name for run in RUNS]
    parser.add_argument("--only", action="append", choices=names, help="may be given twice")
    parser.add_argument("--list", action="store_true", help="say which runs this CPU can do")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="of tests (default: all)")
    options = parser.parse_args(argv)
    for name in (*LIMITS, "MKL_ENABLE_INSTRUCTIONS"):
        if os.environ.get(name):
            print(f"cpu-matrix: {name} is set, which the runs set themselves", file=sys.stderr)
            return 2
    for path in options.paths:
        file = path.partition("::")[0]
        if not (ROOT / file).exists():
            print(f"cpu-matrix: there is no {path}", file=sys.stderr)
            return 2
    chosen_names = options.only or MATRIX
    chosen = [run for run in RUNS if run.name in chosen_names]
    impossible = {}  # the reason by name
    for run in chosen:
        if not can_do(run):
            impossible[run.name] = f"this CPU has no {run.needs}"
    if options.list:
        for run in RUNS:
            reason = impossible.get(run.name, "can run")
            print(f"{run.name:<14} {reason}  {_as_text(run.settings)}")
        return 0
    outcomes = [outcome_of(run, options.paths) for run in chosen if run.name not in impossible]
    print(table(outcomes, impossible))
    has_failed = any(outcome.code != 0 for outcome in outcomes)
    return 1 if has_failed else 0


def can_do(run: Run) -> bool:
    """Whether this CPU has what the run needs; a limit above what it has would limit nothing."""
    return not run.needs or getattr(torch.cpu, f"_is_{run.needs}_supported")()


def outcome_of(run: Run, paths: Iterable[str] = ()) -> Outcome:
    """Run pytest as `run` says; return its exit code, its seconds and what its report counts."""
    print(f"\n=== {run.name}: {_as_text(run.settings)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = _pytest(run, report, paths)
        environment = os.environ | _settings(run, Path(folder, "kernels"))
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        outcome = Outcome(run, code, time.monotonic() - start)
        if report.exists():
            read_report(report, outcome)
    return outcome


def _pytest(run: Run, report: Path, paths: Iterable[str]) -> list[str]:
    """The command line of pytest, which writes a report."""
    command = [sys.executable, "-m", "pytest", "--junitxml", str(report), "--quiet"]
    command += ["--numprocesses", str(run.processes)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["--durations", "5"]
    return [*command, *paths]


def _settings(run: Run, kernels: Path) -> dict[str, str]:
    """The environment variables of a run, with an empty folder for compiled kernels."""
    cores = os.cpu_count() or 1
    threads = max(1, cores // run.processes)
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(kernels),
        # As tests/conftest.py sets them, which pytest does not load for a path in notebooks/ alone.
        "OMP_NUM_THREADS": str(threads),
        "AMP_LAB_DEVICE": "cpu",
        "AMP_LAB_SCALE": "quick",
    }
    return settings | run.settings


def read_report(report: Path, outcome: Outcome) -> None:
    """Put the counts and the failing tests of pytest's report into an outcome."""
    passed = skipped = 0
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcome.failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    outcome.counts = {"passed": passed, "failed": len(outcome.failed), "skipped": skipped}


def table(outcomes: list[Outcome], cannot: dict[str, str]) -> str:
    """What ran, and which tests failed where."""
    lines = ["", f"{'run':<14}{'passed':>9}{'failed':>9}{'skipped':>9}"]
    lines += [outcome.line() for outcome in outcomes]
    lines += [f"{name:<14} not run: {reason}" for name, reason in cannot.items()]
    where: dict[str, list[str]] = {}
    for outcome in outcomes:
        for test in outcome.failed:
            where.setdefault(_without_addresses(test), []).append(outcome.run.name)
    for test, runs in sorted(where.items()):
        names = ", ".join(runs)
        lines.append(f"FAILED {test} on {names}")
    return "\n".join(lines)


def _without_addresses(test: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x…", test)


def _as_text(settings: dict[str, str]) -> str:
    if not settings:
        return "nothing set"
    return " ".join(f"{name}={value}" for name, value in settings.items())


if __name__ == "__main__":
    sys.exit(main())

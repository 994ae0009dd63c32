"""The matrix of instruction sets: its runs, its table, and that CI catches a test of one CPU."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import conftest
import cpu_matrix
import cpu_ops

ROOT = cpu_matrix.ROOT
needs_checkout = pytest.mark.skipif(
    not (ROOT / ".ci").exists(), reason="a whole checkout: an image has no .ci and no .github"
)


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    """As if these tests did not run in the matrix themselves."""
    for name in (*cpu_matrix.LIMITS, "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_a_test_of_one_cpu_is_caught(tmp_path):
    """As `.ci/run` would: it passes on some CPUs and fails in the run with a limit."""
    planted = tmp_path / "test_planted.py"
    planted.write_text(
        "import torch\n\n\ndef test_it():\n"
        "    assert torch.backends.cpu.get_cpu_capability() == 'AVX512'\n"
    )
    run = next(run for run in cpu_matrix.RUNS if run.name == "avx2-reversed")
    run = dataclasses.replace(run, processes=1)
    if not cpu_matrix.can_do(run):
        pytest.skip("a CPU with AVX2")
    outcome = cpu_matrix.outcome_of(run, [str(planted)])
    assert outcome.code == 1
    assert outcome.counts == {"passed": 0, "failed": 1, "skipped": 0}
    (failed,) = outcome.failed
    assert failed.endswith("test_planted::test_it")


@pytest.mark.weekly  # `.ci/run` runs all files so
def test_the_last_file_can_be_run_first():
    files = ["tests/core/test_backends.py", "tests/core/test_cpu.py"]
    orders = []
    for value in ("0", "1"):
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q", *files]
        settings = os.environ | {cpu_matrix.REVERSED: value}
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
        ids = [line for line in done.stdout.splitlines() if "::" in line]
        orders.append([*dict.fromkeys(line.partition("::")[0] for line in ids)])
        in_file = [line for line in ids if line.startswith(files[0])]
        assert next(_tests_of(ROOT / files[0])) in in_file[0]  # in a file the order stays
    assert orders == [files, files[::-1]]


def test_a_run_ends_with_what_this_machine_could_not_check():
    reason = "Skipped: a browser test: install Chromium"
    skipped = SimpleNamespace(skipped=True, longrepr=("a.py", 1, reason))
    lines, count = [], conftest.SkipCount()
    terminal = SimpleNamespace(write_line=lines.append)
    count.pytest_terminal_summary(terminal)
    assert lines == []  # nothing was skipped
    count.pytest_runtest_logreport(skipped)
    count.pytest_collectreport(skipped)
    count.pytest_runtest_logreport(SimpleNamespace(skipped=False, longrepr=None))
    count.pytest_terminal_summary(terminal)
    (line,) = lines
    assert re.match(r"not checked .*: 2 \(.*install Chromium\)$", line)


def _tests_of(path):
    return iter(re.findall(r"^def (test_\w+)\(", path.read_text(), re.M))


@needs_checkout
def test_ci_runs_the_tests_as_on_avx2_and_in_reverse_order():
    (command,) = re.findall(r"^pdm run cpu-matrix (.+)$", (ROOT / ".ci/run").read_text(), re.M)
    assert command == "--only avx2-reversed tests"
    (run,) = (run for run in cpu_matrix.RUNS if run.name == "avx2-reversed")
    assert run.settings[cpu_matrix.REVERSED] == "1"
    assert run.settings["ATEN_CPU_CAPABILITY"] == "avx2"


@needs_checkout
def test_the_workflow_has_a_job_for_each_run_of_the_matrix():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (runs,) = re.findall(r"^ +run: \[(.+)\]$", workflow, re.M)
    assert ["native", *runs.split(", ")] == cpu_matrix.MATRIX  # the first is the job `test`


def test_each_run_limits_what_it_names_with_values_that_are_known():
    for run in cpu_matrix.RUNS:
        for name, values in cpu_matrix.LIMITS.items():
            assert run.settings.get(name, values[0]).lower() in values


def test_a_limit_reaches_torch(tmp_path):
    (run,) = (run for run in cpu_matrix.RUNS if run.name == "sse41")
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | run.settings, capture_output=True, text=True)
    assert done.stdout.strip() in ("DEFAULT", "NO AVX")


def test_the_table_says_which_tests_failed_where():
    native, avx2 = cpu_matrix.RUNS[0], cpu_matrix.RUNS[2]
    counts = {"passed": 1_234, "failed": 1, "skipped": 2}
    outcomes = [
        cpu_matrix.Outcome(native, 1, 90, counts, ["tests.test_a::test_it[0x7f00]"]),
        cpu_matrix.Outcome(avx2, 1, 90, counts, ["tests.test_a::test_it[0x7fff]"]),
        cpu_matrix.Outcome(cpu_matrix.RUNS[1], 137, 5),
    ]
    text = cpu_matrix.table(outcomes, {"avx512": "this CPU has no avx512"})
    assert re.search(r"^native +1,234 +1 +2 +1\.5 min$", text, re.M)
    assert re.search(r"^sse41 +.*exit code 137", text, re.M)
    assert re.search(r"^avx512 +not run: .*no avx512$", text, re.M)
    assert "FAILED tests.test_a::test_it[0x…] on native, avx2" in text


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["tests/no_such_file.py"], {}, "no tests/no_such_file.py"),
        ([], {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "ONEDNN_MAX_CPU_ISA is set"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(arguments, environment, said, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cpu_matrix.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_cpu_without_an_instruction_set_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: False)
    assert cpu_matrix.main(["--list"]) == 0
    assert re.search(r"^avx512 +.*no avx512", capsys.readouterr().out, re.M)


def test_the_page_on_hardware_has_the_recorded_table():
    (file,) = (ROOT / "data" / "results").glob("cpu-ops-*.json")
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    results = json.loads(file.read_text(encoding="utf-8"))
    assert "\n".join(cpu_ops.table(results, "bf16")) in page
    assert Path(file).name in page

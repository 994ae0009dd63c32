"""The command for the first GPU, with parts that fail in every way; its measures on the CPU."""

import dataclasses
import json
import re
import time

import pytest
from cases import some_of

import device_run
import first_gpu
from device_run import MARK, Part, Settings, run_parts
from first_gpu_parts import PARTS

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings("cpu", True, tmp_path)


def part(name: str, *codes: str, limit_s: float = 60) -> Part:
    return Part(name, limit_s, lambda settings: [["-c", code] for code in codes])


def figure(value: dict) -> str:
    return f"print({MARK + json.dumps(value)!r})"


def test_one_part_that_fails_does_not_stop_the_next(settings, capsys):
    parts = [
        part("sound", "print('fine')"),
        part("raises", "1 / 0"),
        part("silent", "raise SystemExit(3)"),
        part("sleeps", "import time; time.sleep(60)", limit_s=1.5),
        part("misses", figure({"ratio": 1.3, "limits": {"ratio: 1.3": False}})),
        part("meets", figure({"ratio": 1.0, "limits": {"ratio: 1.0": True}}), figure({"more": 2})),
    ]
    outcomes = run_parts(parts, settings, 600, lambda outcomes: first_gpu.write(outcomes, settings))
    assert [(one.status, one.error) for one in outcomes] == [
        ("held", ""),
        ("failed", "ZeroDivisionError: division by zero"),
        ("failed", "exit code 3"),
        ("too long", "stopped after 2 s"),
        ("failed", "ratio: 1.3"),
        ("held", ""),
    ]
    assert outcomes[-1].figures["more"] == 2
    written = json.loads((settings.out / "first-gpu.json").read_text())
    assert [one["status"] for one in written["parts"]] == [one.status for one in outcomes]
    assert "2 of 6 held" in device_run.table(outcomes)
    assert "ZeroDivisionError" in (settings.out / "raises.log").read_text()


def test_what_a_part_has_started_ends_with_it(settings, tmp_path):
    """A grandchild that would write a file later is gone."""
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "time.sleep(60)"
    )
    (outcome,) = run_parts([part("parent", code, limit_s=1)], settings, 600)
    assert outcome.status == "too long"
    time.sleep(2.5)
    assert not late.exists()


def test_parts_that_are_not_timed_can_run_at_the_same_time(settings, tmp_path):
    """Each of two parts waits for the file of the other; the timed one runs after both."""
    first, second = tmp_path / "first", tmp_path / "second"

    def meets(own, other):
        return (
            f"import pathlib, time\npathlib.Path({str(own)!r}).touch()\n"
            f"while not pathlib.Path({str(other)!r}).exists(): time.sleep(0.01)"
        )

    parts = [
        part("timed", f"import os; os.rename({str(first)!r}, {str(second)!r})"),
        dataclasses.replace(part("one", meets(first, second)), is_timed=False),
        dataclasses.replace(part("two", meets(second, first)), is_timed=False),
    ]
    outcomes = run_parts(parts, dataclasses.replace(settings, jobs=2), 60)
    assert [(one.part, one.status) for one in outcomes] == [
        ("one", "held"),
        ("two", "held"),
        ("timed", "held"),
    ]


def test_a_machine_without_git_is_described_too(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert first_gpu.machine.__wrapped__("cpu").endswith("no commit known")


def test_what_there_is_no_time_for_is_said(settings):
    outcomes = run_parts([part("one", "pass"), part("two", "pass")], settings, 0)
    assert [one.status for one in outcomes] == ["no time left", "no time left"]


def test_every_part_has_its_order_and_commands(settings):
    names = [one.name for one in PARTS]
    assert names[:2] == ["doctor", "notebook-01"]
    assert len(set(names)) == len(names)
    for one in PARTS:
        assert one.commands(settings)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0"], "--minutes 0 leaves no time"),
        (["--minutes", "-1"], "leaves no time"),
        (["--jobs", "0"], "--jobs 0 runs nothing"),
    ],
)
def test_a_wrong_argument_is_said_in_one_line(capsys, arguments, said):
    assert first_gpu.main(arguments) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.splitlines()) == 1


def test_a_missing_package_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(device_run, "NEEDED", ("torch", "no_such_package"))
    assert first_gpu.main([]) == 2
    assert re.search("not installed.*: no_such_package", capsys.readouterr().err)


@pytest.mark.parametrize("where", ["a file", "a file/folder"])
def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path, capsys, where):
    (tmp_path / "a file").touch()
    assert first_gpu.main(["--tiny", "--device", "cpu", "--out", str(tmp_path / where)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a file" in line


@pytest.mark.parametrize(
    "name", some_of("doctor", "memory", "xray", "tiles", "article", "train", "latency")
)
def test_a_part_runs_on_the_cpu_in_small(name, settings):
    """The whole rehearsal, notebooks and bench included, runs weekly."""
    (outcome,) = run_parts([one for one in PARTS if one.name == name], settings, 300)
    assert (outcome.status, outcome.error) == ("held", "")

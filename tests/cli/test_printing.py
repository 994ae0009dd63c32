"""What is printed, where it cannot be: a full disk, a closed stdout, a terminal of ASCII."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cases import some_of

from amp_lab import load_checkpoint
from amp_lab.cli import doctor, main

RECORDED = Path(__file__).parents[2] / "data" / "results"
OLD = "from torch.cuda.amp import autocast  # ×\nautocast()\n"


def amp_lab(
    folder: Path, redirected: str, *arguments: str, variables: str = ""
) -> subprocess.CompletedProcess:
    """A command with its streams redirected by a shell."""
    command = f'exec env {variables} "$0" -m amp_lab {" ".join(arguments)} {redirected}'
    return subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, cwd=folder)


def migrate(folder: Path, redirected: str, *arguments: str) -> subprocess.CompletedProcess:
    """The one command that needs no torch."""
    return amp_lab(folder, redirected, "migrate", *arguments)


@pytest.fixture
def old(tmp_path) -> Path:
    (tmp_path / "old.py").write_text(OLD, encoding="utf-8")
    return tmp_path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full")
def test_a_full_disk_is_told_in_a_line(old):
    done = migrate(old, "> /dev/full", ".")
    assert done.returncode == 2
    (said,) = done.stderr.decode().splitlines()
    assert said.startswith("amp-lab migrate: ")
    assert os.strerror(errno.ENOSPC) in said


def test_a_closed_stdout_is_no_error(old):
    done = migrate(old, ">&-", "--write", ".")
    assert (done.returncode, done.stderr) == (0, b"")
    assert "torch.amp" in (old / "old.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("streams", some_of("<&- >&- 2>&-", ">&-"))
def test_a_model_is_looked_at_without_streams(tmp_path, streams):
    (tmp_path / "model.py").write_text(MODEL)
    done = amp_lab(tmp_path, streams, "xray", "model.py:make", "--input", "2,3")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr in (b"", b"said")  # by the model, where that stream is open
    assert (tmp_path / "seen.txt").read_text() == "whole"  # no file of the model's became a stream


MODEL = """
import os, torch
def make():
    with open("seen.txt", "w") as file:
        file.write("whole")
        file.flush()
        for stream in (1, 2):
            os.write(stream, b"said")
    return torch.nn.Linear(3, 2)
"""


@pytest.mark.weekly
@pytest.mark.parametrize("streams", some_of("2>&-", "<&- >&- 2>&-"))
def test_a_run_is_trained_without_streams(tmp_path, streams):
    (tmp_path / "x.txt").write_text("7 times 7 is 49.\n" * 200)
    size = ["--context", "8", "--batch-size", "2", "--limit", "2", "--epochs", "1"]
    given = ["--dataset", "text", "--data", "x.txt", "--model", "gpt-nano", *size]
    done = amp_lab(tmp_path, streams, "train", "--out", "run", *given)
    assert (done.returncode, done.stderr) == (0, b"")
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["ranks"]


@pytest.mark.weekly
@pytest.mark.parametrize("backend", ["banana", "module://banana", "tkagg", "agg"])
def test_a_backend_of_matplotlib_that_is_not_there_is_told_or_not_needed(old, backend):
    results = shlex.quote(str(max(RECORDED.glob("bench*.json"))))
    shown = "--results", results, "--compare", results
    bench = amp_lab(old, "", "bench", *shown, variables=f"MPLBACKEND={backend}")
    assert bench.returncode == (2 if backend == "banana" else 0), bench.stderr
    picture = old / "bench-compared.png"
    assert picture.exists() == (backend != "banana")
    if backend == "banana":
        (said,) = bench.stderr.decode().splitlines()
        assert said.startswith("amp-lab bench: matplotlib cannot be imported: ")


@pytest.mark.weekly
@pytest.mark.parametrize("content", [b"backend: banana\n", b"\xff\xfe", b"font.size: x\n", b"[[["])
def test_a_damaged_matplotlibrc_is_at_most_a_line(old, content):
    (old / "matplotlibrc").write_bytes(content)  # of the current folder
    results = shlex.quote(str(max(RECORDED.glob("bench*.json"))))
    shown = "--results", results, "--compare", results
    bench = amp_lab(old, "", "bench", *shown)
    assert bench.returncode in (0, 2)
    said = bench.stderr.decode().strip().splitlines()
    assert len(said) == 1, said
    assert ("Written: " in said[0]) == (bench.returncode == 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full")
def test_an_error_that_cannot_be_printed_is_still_a_code(old):
    assert migrate(old, "2> /dev/full", "none.py").returncode == 2
    assert migrate(old, "2> /dev/full", "--banana").returncode == 2
    assert migrate(old, "2>&-", "none.py").returncode == 2
    assert migrate(old, "> /dev/full 2> /dev/full", ".").returncode == 2


def test_a_terminal_of_ascii_shows_a_question_mark(old, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = migrate(old, "", ".")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"# ?" in done.stdout


def test_all_is_written_although_nobody_reads_to_the_end(old):
    for number in range(200):  # more than a pipe holds
        (old / f"{number:03}.py").write_text(OLD + "# long\n" * 50, encoding="utf-8")
    migrate(old, "| head -1", "--write", ".")
    assert not any("cuda.amp" in path.read_text(encoding="utf-8") for path in old.iterdir())


def test_a_path_cannot_fake_a_second_line(old):
    done = migrate(old, "", '"$(printf "a\\nb")"')
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"a\\nb" in done.stderr


def test_an_error_that_is_not_of_the_output_leaves_it_alone(monkeypatch, capfd):
    """In a notebook, what the next cells print is still read."""

    def out_of_files(options):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(doctor, "run", out_of_files)
    assert main(["doctor"]) == 2
    print("the next cell", flush=True)
    said = capfd.readouterr()
    assert said.out == "the next cell\n"
    assert said.err == "amp-lab doctor: [Errno 24] Too many open files\n"

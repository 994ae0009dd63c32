"""What is printed, where it cannot be: a full disk, a closed stdout, a terminal of ASCII."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_lab.cli import doctor, main

OLD = "from torch.cuda.amp import autocast  # ×\nautocast()\n"


def migrate(folder: Path, redirected: str, *arguments: str) -> subprocess.CompletedProcess:
    """The one command that needs no torch, with its output redirected by a shell."""
    command = f'exec "$0" -m amp_lab migrate {" ".join(arguments)} {redirected}'
    return subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, cwd=folder)


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

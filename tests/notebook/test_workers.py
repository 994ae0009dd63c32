"""Workers: functions reach the processes whole, results come back by rank, nothing hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD as Descent

from amp_lab.errors import AmpLabError, ParallelError
from amp_lab.notebook.workers import run_workers

FACTOR = 3


def rank() -> int:
    return int(os.environ["RANK"])


@torch.no_grad()
def tripled(x: torch.Tensor, factor: int) -> torch.Tensor:
    return factor * F.relu(x)


def report(x, dtype, factor):
    """Uses a module, renamed modules and classes, another function, and a nested one."""
    optimizer = Descent([torch.ones(1, requires_grad=True)], lr=0.1)
    names = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]

    def inner():
        return type(optimizer).__name__

    return {
        "rank": rank(),
        "tensor": tripled(x, factor).to(dtype) + rank(),
        "threads": torch.get_num_threads(),
        "names": tuple(names),
        "inner": inner(),
        dtype: None,
    }


def test_each_rank_returns_what_it_computed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = torch.tensor([-1.0, 2.0])
    found = run_workers(
        report, rank, tripled, processes=2, x=x, dtype=torch.bfloat16, factor=FACTOR
    )
    assert [answer["rank"] for answer in found] == [0, 1]
    for number, answer in enumerate(found):
        assert answer["tensor"].dtype is torch.bfloat16
        assert answer["tensor"].tolist() == [number, 6 + number]
        assert answer["threads"] == 1
        assert answer["names"] == ("RANK", "WORLD_SIZE")
        assert answer["inner"] == "SGD"
        assert torch.bfloat16 in answer
    assert list(tmp_path.iterdir()) == []  # nothing is written where the notebook is


def fails_on_one_rank(how):
    """Rank 1 fails; rank 0 waits for it in a collective."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the disk is on fire")
        if how == "kill":
            print("my last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return print  # no plain data
    dist.all_reduce(torch.ones(1))
    return None


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "raise",
            ["rank 1 of 2 failed", "ValueError: the disk is on fire"],
        ),
        ("kill", ["rank 1 of 2 was ended by signal 9", "my last words"]),
        ("return", ["rank 1 of 2 failed", "the result is not plain data", "print"]),
    ],
)
def test_a_worker_that_fails_is_told_with_its_last_lines(how, says):
    with pytest.raises(ParallelError) as caught:
        run_workers(fails_on_one_rank, processes=2, timeout_s=60, how=how)
    text = str(caught.value)
    assert text.startswith("fails_on_one_rank: rank 1 of 2")
    assert all(part in text for part in says), text
    assert len(text.splitlines()) < 20


def waits(mark):
    """Rank 0 waits for rank 1, which sleeps."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
    return mark


def processes_with(text: str) -> list[str]:
    """Command lines of running processes in which `text` occurs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended
            continue
        if text in line:
            found.append(line)
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_workers_that_do_not_end_are_stopped_and_it_is_told_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # forget the folder it has found before
    start = time.monotonic()
    with pytest.raises(ParallelError) as caught:
        run_workers(waits, processes=2, timeout_s=20, mark=1)
    assert time.monotonic() - start < 60
    lines = str(caught.value).splitlines()
    assert lines[0] == "waits: 2 processes did not end within 20 s"
    assert lines[1:] == [
        "  rank 0 was in waits: dist.all_reduce(torch.ones(1))",
        "  rank 1 was in waits: time.sleep(600)",
    ]
    assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def uses_data():
    return FACTOR


def uses_a_neighbour():
    return rank()


def takes_one(x):
    return x


def without_source():
    namespace = {}
    exec("def ghost(): return 1", namespace)
    return namespace["ghost"]


def with_a_closure():
    local = 1

    def inner():
        return local

    return inner


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (uses_data, {}, "uses_data uses FACTOR, which is data; make it an argument"),
        (uses_a_neighbour, {}, "uses_a_neighbour uses rank, which is defined beside it"),
        (lambda: 1, {}, "give a function that is defined with def"),
        (torch.relu, {"input": 1}, "give a function that is defined with def"),
        (without_source(), {}, "ghost has no source to be sent"),
        (with_a_closure(), {}, "inner uses local of the function around it"),
        (takes_one, {"x": os.getpid}, "an argument is not plain data"),
        (takes_one, {"x": lambda: 1}, "an argument is not plain data"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_starts(function, arguments, says):
    start = time.monotonic()
    with pytest.raises(ParallelError, match=says):
        run_workers(function, processes=1, **arguments)
    assert time.monotonic() - start < 2  # a launch takes longer than that


def test_wrong_calls_are_refused():
    with pytest.raises(ParallelError, match="processes=0 must be at least 1"):
        run_workers(takes_one, processes=0, x=1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        run_workers(takes_one, processes=1)
    assert issubclass(ParallelError, AmpLabError)


def test_works_in_a_plain_script(tmp_path):
    """Its functions are those of ``__main__``, as in a notebook."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "from amp_lab.notebook.workers import run_workers\n"
        "def one():\n    return 1\n"
        "def add(x):\n    return x + one() + int(os.environ['RANK'])\n"
        "if __name__ == '__main__':\n"
        "    print(run_workers(add, one, processes=2, x=10))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "[11, 12]\n", done.stderr
    assert done.stderr == ""

"""Functions reach other processes whole, results come back, failures are told, nothing is left."""

import importlib.util
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import some_of
from torch.optim import SGD as Descent

from course import processes
from course.processes import run_on_backends, run_workers

from amp_lab.core.errors import AmpLabError, ParallelError

pytestmark = pytest.mark.slow

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
    assert [result["rank"] for result in found] == [0, 1]
    for number, result in enumerate(found):
        assert result["tensor"].dtype is torch.bfloat16
        assert result["tensor"].tolist() == [number, 6 + number]
        assert result["threads"] == 1
        assert result["names"] == ("RANK", "WORLD_SIZE")
        assert result["inner"] == "SGD"
        assert torch.bfloat16 in result
    assert list(tmp_path.iterdir()) == []  # nothing is written where the notebook is


def fails_on_one_rank(how):
    """Rank 1 fails; rank 0 waits for it in a collective."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the disk is on fire")
        print("my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("how", "says"),
    some_of(
        ("raise", ["failed", "ValueError: the disk is on fire"]),
        ("kill", ["ended by signal 9", "my last words"]),
    ),
)
def test_a_worker_that_fails_is_told_with_its_last_lines(how, says):
    with pytest.raises(ParallelError) as caught:
        run_workers(fails_on_one_rank, processes=2, timeout_s=60, how=how)
    text = str(caught.value)
    assert text.startswith("fails_on_one_rank: rank 1 of 2")
    assert all(part in text for part in says), text
    assert len(text.splitlines()) < 20


def waits(folder):
    """Rank 0 waits for rank 1, which sleeps; both leave a file just before."""
    dist.init_process_group("gloo")
    (Path(folder) / f"{dist.get_rank()}.ready").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


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


@pytest.fixture
def too_late(monkeypatch):
    """A function: from then on, a process is late once there are so many files of this name."""

    def become_late(folder: Path, pattern: str, count: int) -> None:
        wait = processes._exit_code

        def exit_code(process, timeout_s):
            monkeypatch.setattr(processes, "_exit_code", wait)  # for the one that it is ended with
            deadline = time.monotonic() + 120
            while len(list(folder.glob(pattern))) < count:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(0.5)  # from the file to the call in which it waits
            return wait(process, 0)

        monkeypatch.setattr(processes, "_exit_code", exit_code)

    return become_late


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_workers_that_do_not_end_are_stopped_and_it_is_told_where_they_were(
    tmp_path, monkeypatch, too_late
):
    ready, temporary = tmp_path / "ready", tmp_path / "temporary"
    ready.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    too_late(ready, "*.ready", 2)
    with pytest.raises(ParallelError) as caught:
        run_workers(waits, processes=2, timeout_s=20, folder=str(ready))
    lines = str(caught.value).splitlines()
    assert re.match("waits: 2 processes .* 20 s", lines[0])
    assert re.match(r"  rank 0 .*waits: dist\.all_reduce\(torch\.ones\(1\)\)$", lines[1])
    assert re.match(r"  rank 1 .*waits: time\.sleep\(600\)$", lines[2])
    assert len(lines) == 3
    assert processes_with(str(temporary)) == []
    assert list(temporary.iterdir()) == []


def environment(names):
    """What a process has of these; needs no Keras, which takes long to load."""
    return {name: os.environ.get(name) for name in names} | {"process": os.getpid()}


def test_each_backend_has_a_process_and_an_environment_of_its_own(tmp_path, monkeypatch):
    """That Keras runs in it, notebook 12 and its test show."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))  # a user's settings, which are not read
    monkeypatch.setenv("KERAS_BACKEND", "numpy")
    names = ["KERAS_BACKEND", "KERAS_HOME", "KERAS_TORCH_DEVICE", "CUDA_VISIBLE_DEVICES"]
    found = run_on_backends(environment, names=names)
    assert [result["KERAS_BACKEND"] for result in found.values()] == list(found)
    assert list(found) == list(processes.BACKENDS) == ["torch", "tensorflow"]
    for result in found.values():
        assert (result["KERAS_TORCH_DEVICE"], result["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert len({str(tmp_path), *(result["KERAS_HOME"] for result in found.values())}) == 3
    assert len({os.getpid(), *(result["process"] for result in found.values())}) == 3
    assert os.environ["KERAS_BACKEND"] == "numpy"


def test_without_tensorflow_the_torch_backend_runs_alone_and_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", {"tensorflow": None}.get)
    assert list(run_on_backends(environment, names=[])) == ["torch"]
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match("TensorFlow .*not installed.*torch backend", line)


def fails(how):
    print("my last words", file=sys.stderr, flush=True)
    if how["do"] == "raise":
        raise ValueError("no such layer")
    if how["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    Path(how["folder"], "it.ready").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.parametrize(
    ("do", "says"),
    some_of(
        ("kill", ["ended by signal 9", "my last words"]),
        ("raise", ["failed", "ValueError: no such layer"]),
    ),
)
def test_a_backend_that_fails_is_told_with_its_last_lines(do, says):
    with pytest.raises(ParallelError) as caught:
        run_on_backends(fails, backends=["tensorflow"], how={"do": do})
    text = str(caught.value)
    assert text.startswith(f"fails on tensorflow: {says[0]}\n")
    assert all(part in text for part in says), text
    assert len(text.splitlines()) < 20


def test_a_backend_that_does_not_end_is_ended(tmp_path, too_late):
    too_late(tmp_path, "*.ready", 1)
    how = {"do": "wait", "folder": str(tmp_path)}
    with pytest.raises(ParallelError, match=r"fails on torch: .* 20 s"):
        run_on_backends(fails, backends=["torch"], timeout_s=20, how=how)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "it.ready").read_text()), 0)


def test_a_process_that_takes_too_long_is_noticed_and_ended(tmp_path):
    """What the tests above replace, with a process that loads nothing."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with processes._started(command, {}, tmp_path / "log") as process:
        assert processes._exit_code(process, 0.1) is None
    assert process.returncode == -signal.SIGTERM


def returns_no_data():
    return print


def test_a_result_that_is_no_plain_data_is_told(tmp_path, monkeypatch):
    processes._save_plain({}, tmp_path / "arguments.pt", "an argument")
    monkeypatch.setattr(sys, "argv", ["script.py", str(tmp_path)])
    monkeypatch.setattr(processes.faulthandler, "register", lambda *_, **__: None)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ParallelError, match=r"result is not plain.*print"):
        processes.run_here(returns_no_data, "RANK")
    text = (tmp_path / "error-1.txt").read_text()
    assert "result is not plain" in text


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
        (uses_data, {}, "uses_data .*FACTOR, .*is data"),
        (uses_a_neighbour, {}, "uses_a_neighbour .*rank, .*beside it"),
        (lambda: 1, {}, "defined with def"),
        (torch.relu, {"input": 1}, "defined with def"),
        (without_source(), {}, "ghost has no source"),
        (with_a_closure(), {}, "inner .*local .*enclosing function"),
        (takes_one, {"x": os.getpid}, "argument is not plain"),
        (takes_one, {"x": lambda: 1}, "argument is not plain"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_starts(
    function, arguments, says, monkeypatch
):
    monkeypatch.setattr(processes.subprocess, "Popen", None)
    with pytest.raises(ParallelError, match=says):
        run_workers(function, processes=1, **arguments)


def test_wrong_calls_are_refused():
    with pytest.raises(ParallelError, match="processes=0 must be at least 1"):
        run_workers(takes_one, processes=0, x=1)
    for call in (lambda: run_workers(takes_one, processes=1), lambda: run_on_backends(takes_one)):
        with pytest.raises(TypeError, match="missing a required argument: 'x'"):
            call()
    assert issubclass(ParallelError, AmpLabError)


def test_functions_of_a_plain_script_are_sent_too(tmp_path):
    """They are those of ``__main__``, as in a notebook."""
    path = tmp_path / "plain.py"
    path.write_text(
        "import os\n"
        "def one():\n    return 1\n"
        "def add(x):\n    return x + one() + int(os.environ['NUMBER'])\n"
    )
    names = runpy.run_path(str(path), run_name="__main__")
    call = "os.environ['NUMBER'] = '5'\nresult = add(10)\n"
    script = processes.script_of(names["add"], (names["one"],), call)
    there = {}
    exec(script, there)
    assert there["result"] == 16
    with pytest.raises(ParallelError, match=r"add .*one, .*beside it"):
        processes.script_of(names["add"], (), call)

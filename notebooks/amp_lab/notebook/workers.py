"""Functions of a notebook, run by several processes under torchrun, and what they return."""

import faulthandler
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from amp_lab.errors import ParallelError
from amp_lab.notebook.scripts import answer, end_of, load_plain, save_plain, script_of

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_CALL = "import amp_lab.notebook.workers\n\namp_lab.notebook.workers.work({})\n"
_GRACE_S = 40  # torchrun gives its workers 30 s to end before it kills them


def run_workers(
    function: Callable[..., object],
    *needed: Callable[..., object],
    processes: int,
    timeout_s: float = 300,
    **arguments: object,
) -> list:
    """What `function(**arguments)` returns in each of so many processes, by rank.

        def rank_and_size(offset): ...
        run_workers(rank_and_size, processes=2, offset=10)

    The processes run under ``torchrun --standalone`` on this machine, a script each, which is made
    of the source of `function` and of the functions that it needs, and of imports: a name of
    another module is imported as it was here; a function of the same notebook must be in `needed`;
    data must come as an argument. Arguments and results are plain data: numbers, text, dtypes,
    tensors, and dicts, lists and tuples of them. Each process has one thread, and joins a process
    group by itself, if it wants one. What it prints is kept for errors only.

    Raises `ParallelError` for a function without source or with a name that cannot be had there,
    for data that is not plain, and for a process that fails, with its last lines; and if they
    have not all ended after `timeout_s` seconds, where each one was. None of
    them is left running then.
    """
    if processes < 1:
        raise ParallelError(f"processes={processes} must be at least 1")
    script = script_of(function, needed, _CALL.format(function.__name__))
    inspect.signature(function).bind(**arguments)  # TypeError here rather than in a process
    with tempfile.TemporaryDirectory(prefix="amp-lab-") as name:
        folder = Path(name)
        (folder / "worker.py").write_text(script, encoding="utf-8")
        save_plain(arguments, folder / "arguments.pt", "an argument")
        _launch(function.__name__, folder, processes, timeout_s)
        return [load_plain(folder / f"result-{rank}.pt") for rank in range(processes)]


# ------------------------------------------------------------------------------- the processes


def _launch(name: str, folder: Path, processes: int, timeout_s: float) -> None:
    """Run the script in `folder`; raise `ParallelError` unless every process ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1"]  # the machine's own name may not be known to itself
    command += ["--nproc-per-node", str(processes)]
    command += ["--redirects", "3", "--log-dir", str(folder / "logs")]
    command += [str(folder / "worker.py"), str(folder)]
    package = Path(__file__).resolve().parent.parent
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if sys.platform in _LOOPBACK:  # gloo would look up the machine's name too
        settings["GLOO_SOCKET_IFNAME"] = _LOOPBACK[sys.platform]
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | settings,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            _stop(process)
            raise ParallelError(
                f"{name}: {processes} processes did not end within {timeout_s:g} s"
                + _where_each_was(folder)
            ) from error
        finally:  # a reader may interrupt the cell
            _stop(process)
    if process.returncode != 0:
        raise ParallelError(f"{name}: {_what_went_wrong(folder, processes)}")


def _stop(process: subprocess.Popen) -> None:
    """End torchrun, which ends its workers: they are in process groups of their own."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _logs(folder: Path) -> dict[int, str]:
    """What each rank wrote to stderr."""
    files = sorted((folder / "logs").glob("*/attempt_0/*/stderr.log"))
    return {int(f.parent.name): f.read_text(encoding="utf-8", errors="replace") for f in files}


def _where_each_was(folder: Path) -> str:
    """A line for each rank, from the stack that it wrote when it was told to end."""
    script = (folder / "worker.py").read_text(encoding="utf-8").splitlines()
    frame = re.compile(re.escape(f'File "{folder / "worker.py"}", line ') + r"(\d+) in (\w+)")
    lines = []
    for rank, text in _logs(folder).items():
        found = frame.search(text)  # the innermost comes first
        place = f"{found[2]}: {script[int(found[1]) - 1].strip()}" if found else "unknown"
        lines.append(f"rank {rank} was in {place}")
    return "".join(f"\n  {line}" for line in lines)


def _what_went_wrong(folder: Path, processes: int) -> str:
    """Which rank failed first, and its last lines."""
    said = (folder / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    ends = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", said)
    for rank, code in ends:  # killed, but not by torchrun, which ends those that are left
        if int(code) < 0 and int(code) != -signal.SIGTERM:
            last = end_of(_logs(folder).get(int(rank), ""))
            return f"rank {rank} of {processes} was ended by signal {-int(code)}\n{last}".rstrip()
    errors = sorted(folder.glob("error-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if errors:  # the first; others fail because of it
        rank, text = errors[0].stem.removeprefix("error-"), errors[0].read_text(encoding="utf-8")
        return f"rank {rank} of {processes} failed\n{end_of(text)}"
    return f"torchrun failed\n{end_of(said)}"


# ------------------------------------------------------------------------- inside of a process


def work(function: Callable[..., object]) -> None:
    """Run `function` in a process that `run_workers` has started; called by its script."""
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGTERM, chain=True)  # where it was, if it is told to end
    torch.set_num_threads(1)
    answer(function, Path(sys.argv[1]), suffix=f"-{os.environ['RANK']}")

"""Functions of a notebook, run by several processes under torchrun, and what they return."""

import builtins
import dis
import faulthandler
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from amp_lab.errors import WorkersError, first_line

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_LAST_LINES = 12  # of what a worker said, in an error
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

    Raises `WorkersError` for a function without source or with a name that cannot be had there, for
    data that is not plain, and for a process that fails, with its last lines; and if they have not
    all ended after `timeout_s` seconds, where each one was. None of them is left running then.
    """
    if processes < 1:
        raise WorkersError(f"processes={processes} must be at least 1")
    script = _script(function, needed)
    inspect.signature(function).bind(**arguments)  # TypeError here rather than in a process
    with tempfile.TemporaryDirectory(prefix="amp-lab-") as name:
        folder = Path(name)
        (folder / "worker.py").write_text(script, encoding="utf-8")
        _save(arguments, folder / "arguments.pt", "an argument")
        _launch(function.__name__, folder, processes, timeout_s)
        return [_load(folder / f"result-{rank}.pt") for rank in range(processes)]


# --------------------------------------------------------------------------------- the script


def _script(function: Callable, needed: tuple[Callable, ...]) -> str:
    functions = [*needed, function]
    known = {each.__name__ for each in functions}
    sources, imports = [], {}
    for each in functions:
        source = _source(each)
        code = compile(source, each.__name__, "exec")
        namespace = inspect.unwrap(each).__globals__
        names = set(_global_names(code)) - known - vars(builtins).keys()  # IPython has its own open
        for name in sorted(names & namespace.keys()):
            imports[name] = _import_line(name, namespace[name], each)
        sources.append(source)
    call = f"import amp_lab.workers\n\namp_lab.workers.work({function.__name__})\n"
    return "\n\n".join(["\n".join(imports.values()), *sources, call])


def _source(function: Callable) -> str:
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType) or plain.__name__ == "<lambda>":
        raise WorkersError(f"{function!r}: give a function that is defined with def")
    if plain.__code__.co_freevars:
        names = ", ".join(plain.__code__.co_freevars)
        raise WorkersError(
            f"{plain.__name__} uses {names} of the function around it; make it an argument"
        )
    try:
        return textwrap.dedent(inspect.getsource(plain))
    except (OSError, TypeError) as error:
        raise WorkersError(
            f"{plain.__name__} has no source to be sent ({first_line(error)}); define it in a cell "
            "or a file"
        ) from error


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that a piece of code, and the functions in it, look up outside of themselves."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _import_line(name: str, value: object, user: Callable) -> str:
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if qualified is None or module is None:
        raise WorkersError(f"{user.__name__} uses {name}, which is data; make it an argument")
    if module in ("__main__", user.__module__):
        raise WorkersError(
            f"{user.__name__} uses {name}, which is defined beside it; give it to run_workers too, "
            "after the function that is to run"
        )
    if getattr(sys.modules.get(module), qualified, None) is not value:
        raise WorkersError(
            f"{user.__name__} uses {name}, which cannot be imported from {module}; import it "
            "inside of the function"
        )
    return f"from {module} import {qualified} as {name}"


# ------------------------------------------------------------------------------- the processes


def _launch(name: str, folder: Path, processes: int, timeout_s: float) -> None:
    """Run the script in `folder`; raise `WorkersError` unless every process ended well."""
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
            raise WorkersError(
                f"{name}: {processes} processes did not end within {timeout_s:g} s"
                + _where_each_was(folder)
            ) from error
        finally:  # a reader may interrupt the cell
            _stop(process)
    if process.returncode != 0:
        raise WorkersError(f"{name}: {_what_went_wrong(folder, processes)}")


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
            last = _end_of(_logs(folder).get(int(rank), ""))
            return f"rank {rank} of {processes} was ended by signal {-int(code)}\n{last}".rstrip()
    errors = sorted(folder.glob("error-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if errors:  # the first; others fail because of it
        rank, text = errors[0].stem.removeprefix("error-"), errors[0].read_text(encoding="utf-8")
        return f"rank {rank} of {processes} failed\n{_end_of(text)}"
    return f"torchrun failed\n{_end_of(said)}"


def _end_of(text: str) -> str:
    return textwrap.indent("\n".join(text.strip().splitlines()[-_LAST_LINES:]), "  ")


# ------------------------------------------------------------------------- inside of a process


def work(function: Callable[..., object]) -> None:
    """Run `function` in a process that `run_workers` has started; called by its script."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGTERM, chain=True)  # where it was, if it is told to end
    torch.set_num_threads(1)
    try:
        arguments = _load(folder / "arguments.pt")
        _save(function(**arguments), folder / f"result-{rank}.pt", "the result")
    except BaseException as error:
        frames = error.__traceback__.tb_next  # without this one
        text = "".join(traceback.format_exception(error.with_traceback(frames)))
        (folder / f"error-{rank}.txt").write_text(text, encoding="utf-8")
        raise


def _save(value: object, path: Path, what: str) -> None:
    try:
        torch.save(value, path)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise WorkersError(f"{what} is not plain data: {first_line(error)}") from error
    if unsafe:
        raise WorkersError(f"{what} is not plain data: {', '.join(unsafe)}")


def _load(path: Path) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)

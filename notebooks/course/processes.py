"""A notebook's functions in other processes: under torchrun, or on each backend of Keras.

Each process runs a script, which is made of the source of the function, of the functions that it
needs, and of imports: a name of another module is imported as it was here; a function of the same
notebook must be in `needed`; data must come as an argument. Arguments and results are plain data:
numbers, text, dtypes, tensors, and dicts, lists and tuples of them. What a process prints is kept
for errors only, and none of them is left running.
"""

import builtins
import dis
import faulthandler
import importlib.util
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from amp_lab.core.errors import ParallelError, first_line

BACKENDS = ("torch", "tensorflow")
_NOTEBOOKS = str(Path(__file__).resolve().parents[1])  # the folder that holds `course`
_IMPORT = "from course import processes"  # first: TensorFlow is best loaded after torch
_CALL = "processes.run_here({}, {!r})\nprocesses.leave()\n"
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_GRACE_S = 40  # torchrun gives its workers 30 s to end before it kills them
_LAST_LINES = 12  # of what a process printed, in an error
_EXIT_CODE = r"rank +: (\d+) .*\n +exitcode +: (-?\d+)"  # as torchrun reports it


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

    They run under ``torchrun --standalone`` with one thread each, and join a process group if they
    want one. The top of this file says what can be sent to them, and come back.

    Raises `ParallelError` for anything else; for a process that fails, with its last lines; and if
    not all have ended after `timeout_s` seconds, with the line at which each one was.
    """
    if processes < 1:
        raise ParallelError(f"processes={processes} must be at least 1")
    name = function.__name__
    settings = _settings(threads=1)
    if sys.platform in _LOOPBACK:  # gloo would look up the machine's name too
        settings["GLOO_SOCKET_IFNAME"] = _LOOPBACK[sys.platform]
    with _folder_for(function, needed, arguments, "RANK") as folder:
        command = _torchrun(folder, processes)
        with _started(command, settings, folder / "torchrun.log") as launcher:
            code = _exit_code(launcher, timeout_s)
        if code is None:
            problem = f"{name}: {processes} processes did not end within {timeout_s:g} s"
            raise ParallelError(problem + _where_each_was(folder, processes))
        if code != 0:
            raise ParallelError(f"{name}: {_first_failure(folder, processes)}")
        return [_load_plain(folder / f"result-{rank}.pt") for rank in range(processes)]


def _torchrun(folder: Path, processes: int) -> list[str]:
    """The command that runs the script in the folder in so many processes."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--local-addr", "127.0.0.1",  # the machine's own name may not be known to itself
        "--nproc-per-node", str(processes),
        "--redirects", "3",
        "--log-dir", str(folder / "logs"),
        str(folder / "script.py"), str(folder),
    ]  # fmt: skip


def run_on_backends(
    function: Callable[..., object],
    *needed: Callable[..., object],
    backends: Iterable[str] | None = None,
    device: torch.device | str = "cpu",
    timeout_s: float = 900,
    **arguments: object,
) -> dict[str, object]:
    """What `function(**arguments)` returns on each backend of Keras, by the backend's name.

        def sum_of_squares(x): return float(keras.ops.sum(x * x))
        run_on_backends(sum_of_squares, x=torch.ones(3))

    Keras has one backend in a process, so each gets one; the top of this file says what can be sent
    to it, and come back. On a CPU they run at the same time and share its cores, else one after the
    other. `device` is that of the torch backend, and if it is ``cpu``, TensorFlow sees no GPU
    either. No settings file of Keras is read. Without `backends` it is both, or torch alone where
    TensorFlow is not installed, which is then printed.

    Raises `ParallelError` for anything else; for a process that fails, with its last lines; and for
    one that has not ended after `timeout_s` seconds.
    """
    if backends is None:
        backends = _installed_backends()
    backends = tuple(backends)
    device = torch.device(device)
    groups = [backends]
    if device.type != "cpu":
        groups = [(backend,) for backend in backends]
    at_once = max(map(len, groups), default=1)
    threads = max(1, torch.get_num_threads() // at_once)
    with _folder_for(function, needed, arguments, "KERAS_BACKEND") as folder:
        settings = {
            backend: _keras_settings(backend, device, folder, threads) for backend in backends
        }
        for group in groups:
            _run_group(function.__name__, group, settings, folder, timeout_s)
        return {backend: _load_plain(folder / f"result-{backend}.pt") for backend in backends}


def _run_group(
    name: str,
    backends: tuple[str, ...],
    settings: dict[str, dict[str, str]],
    folder: Path,
    timeout_s: float,
) -> None:
    """Run the script in the folder on these backends, all at the same time."""
    command = [sys.executable, str(folder / "script.py"), str(folder)]
    deadline = time.monotonic() + timeout_s
    with ExitStack() as running:
        processes = {}
        for backend in backends:
            process = _started(command, settings[backend], folder / f"{backend}.log")
            processes[backend] = running.enter_context(process)
        for backend, process in processes.items():
            code = _exit_code(process, deadline - time.monotonic())
            if code is None:
                raise ParallelError(f"{name} on {backend}: did not end within {timeout_s:g} s")
            if code != 0:
                problem = f"ended by signal {-code}" if code < 0 else "failed"
                last = _last_lines(folder / f"error-{backend}.txt", folder / f"{backend}.log")
                raise ParallelError(f"{name} on {backend}: {problem}\n{last}".rstrip())


def _installed_backends() -> tuple[str, ...]:
    if importlib.util.find_spec("tensorflow") is None:
        print("TensorFlow is not installed here, so this runs on the torch backend alone")
        return ("torch",)
    return BACKENDS


def _settings(threads: int) -> dict[str, str]:
    """Environment of a process that finds `course`, and computes with so many threads."""
    paths = _NOTEBOOKS
    paths_here = os.environ.get("PYTHONPATH")
    if paths_here:
        paths += os.pathsep + paths_here
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": paths,
    }


def _keras_settings(
    backend: str, device: torch.device, folder: Path, threads: int
) -> dict[str, str]:
    settings = _settings(threads) | {
        "KERAS_BACKEND": backend,
        "KERAS_HOME": str(folder / f"keras-{backend}"),  # it would read, or write, settings at home
        "KERAS_TORCH_DEVICE": str(device),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "1",  # ops run one after another
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # it would take all of the memory
    }
    if backend == "tensorflow":
        # Its oneDNN would follow a limit to other instructions, and its choice of kernels not.
        settings["ONEDNN_MAX_CPU_ISA"] = ""
    if device.type == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""
    return settings


@contextmanager
def _started(
    command: list[str], settings: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that prints into `log`, and that is ended if it still runs afterwards."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | settings,
            start_new_session=True,  # so that all that it starts can be killed with it
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        try:
            yield process
        finally:  # a reader may interrupt the cell
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may still run, and all that it has started."""
    if process.poll() is not None:
        return
    process.terminate()  # torchrun then ends its workers
    if _exit_code(process, _GRACE_S) is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _exit_code(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code of a process, once it has ended; None if that takes too long."""
    try:
        return process.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        return None


def _read_first(*paths: Path) -> str:
    """What is in the first of these files that is there."""
    for path in paths:
        if path.exists():
            return path.read_text("utf-8", errors="replace")
    return ""


def _last_lines(*paths: Path) -> str:
    """The last lines of that, indented, for an error."""
    lines = _read_first(*paths).strip().splitlines()
    return textwrap.indent("\n".join(lines[-_LAST_LINES:]), "  ")


def _where_each_was(folder: Path, processes: int) -> str:
    """A line for each rank, from the stack that it wrote when it was told to end."""
    script = folder / "script.py"
    lines = script.read_text(encoding="utf-8").splitlines()
    frame = re.compile(re.escape(f'File "{script}", line ') + r"(\d+) in (\w+)")
    places = ""
    for rank in range(processes):
        innermost = frame.search(_read_first(*_logs(folder, rank)))  # it comes first
        place = "unknown"
        if innermost is not None:
            number, called = innermost.groups()
            place = f"{called}: {lines[int(number) - 1].strip()}"
        places += f"\n  rank {rank} was in {place}"
    return places


def _logs(folder: Path, rank: int | str) -> Iterator[Path]:
    """The file of what a rank printed on stderr, if it is there."""
    return folder.glob(f"logs/*/attempt_0/{rank}/stderr.log")


def _first_failure(folder: Path, processes: int) -> str:
    """Which rank failed first, and its last lines."""
    log = folder / "torchrun.log"
    for rank, exit_code in re.findall(_EXIT_CODE, _read_first(log)):
        code = int(exit_code)
        # Killed, and not by torchrun, which ends those that are left with SIGTERM.
        if code < 0 and code != -signal.SIGTERM:
            last = _last_lines(*_logs(folder, rank))
            return f"rank {rank} of {processes} was ended by signal {-code}\n{last}".rstrip()
    errors = sorted(folder.glob("error-*.txt"), key=_modified_ns)
    if not errors:
        return f"torchrun failed\n{_last_lines(log)}"
    first = errors[0]  # others fail because of it
    rank = first.stem.removeprefix("error-")
    return f"rank {rank} of {processes} failed\n{_last_lines(first)}"


def _modified_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def run_here(function: Callable[..., object], variable: str) -> None:
    """Run `function` in a process that was started for it; the last line of its script.

    The arguments lie in the folder that the command line names; the result, or the error, is left
    there under a name with the value that `variable` has in the environment of this process alone.
    """
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGTERM, chain=True)  # where it was, if it is told to end
    folder = Path(sys.argv[1])
    suffix = os.environ[variable]
    try:
        arguments = _load_plain(folder / "arguments.pt")
        result = function(**arguments)
        _save_plain(result, folder / f"result-{suffix}.pt", "the result")
    except BaseException as error:
        frames = error.__traceback__
        if frames is not None:
            frames = frames.tb_next  # without this function
        text = "".join(traceback.format_exception(error.with_traceback(frames)))
        (folder / f"error-{suffix}.txt").write_text(text, encoding="utf-8")
        raise


def leave() -> None:
    """End the process, without taking apart what is in it.

    A process group that a DDP model still holds would be freed only then, and may end the process
    by a signal: gloo's threads still run, and may want the interpreter's lock.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _folder_for(
    function: Callable, needed: tuple[Callable, ...], arguments: dict, variable: str
) -> Iterator[Path]:
    """A temporary folder with the script that calls `function`, and its arguments."""
    script = script_of(function, needed, _CALL.format(function.__name__, variable))
    inspect.signature(function).bind(**arguments)  # TypeError here rather than in a process
    with tempfile.TemporaryDirectory(prefix="amp-lab-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(script, encoding="utf-8")
        _save_plain(arguments, folder / "arguments.pt", "an argument")
        yield folder


def script_of(function: Callable, needed: tuple[Callable, ...], call: str) -> str:
    """A script that imports and defines what `function` needs, and ends with `call`."""
    functions = [*needed, function]
    # Builtins too, although a notebook may have another `open`: IPython has its own.
    known = {each.__name__ for each in functions} | vars(builtins).keys()
    sources = []
    imports = {}
    for each in functions:
        source = _source(each)
        sources.append(source)
        namespace = inspect.unwrap(each).__globals__
        code = compile(source, each.__name__, "exec")
        unknown = set(_global_names(code)) - known
        for name in sorted(unknown & namespace.keys()):
            imports[name] = _import_line(name, namespace[name], each)
    import_lines = "\n".join([_IMPORT, *imports.values()])
    return "\n\n".join([import_lines, *sources, call])


def _source(function: Callable) -> str:
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType) or plain.__name__ == "<lambda>":
        raise ParallelError(f"{function!r}: give a function that is defined with def")
    name = plain.__name__
    outer = ", ".join(plain.__code__.co_freevars)
    if outer:
        raise ParallelError(f"{name} uses {outer} of the function around it; make it an argument")
    try:
        return textwrap.dedent(inspect.getsource(plain))
    except (OSError, TypeError) as error:
        reason = f"has no source to be sent ({first_line(error)}); define it in a cell or a file"
        raise ParallelError(f"{name} {reason}") from error


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that a piece of code, and the functions in it, look up outside of themselves."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _import_line(name: str, value: object, user: Callable) -> str:
    """The statement that gives another process what `name` is for the function `user`."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module = getattr(value, "__module__", None)
    qualified = getattr(value, "__qualname__", None)
    if qualified is None or module is None:
        problem = "is data; make it an argument"
    elif module in ("__main__", user.__module__):
        problem = "is defined beside it; give it too, after the function that is to run"
    elif getattr(sys.modules.get(module), qualified, None) is value:
        return f"from {module} import {qualified} as {name}"
    else:
        problem = f"cannot be imported from {module}; import it inside of the function"
    raise ParallelError(f"{user.__name__} uses {name}, which {problem}")


def _save_plain(value: object, path: Path, what: str) -> None:
    """Write plain data; raises `ParallelError` for anything else, which `what` names."""
    try:
        torch.save(value, path)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ParallelError(f"{what} is not plain data: {first_line(error)}") from error
    if unsafe:
        raise ParallelError(f"{what} is not plain data: {', '.join(unsafe)}")


def _load_plain(path: Path) -> object:
    """What `_save_plain` wrote."""
    return torch.load(path, map_location="cpu", weights_only=True)

"""Runs a notebook's functions in other processes: under torchrun, or on each backend of Keras.

Each process runs a script with the source of the function, and of the functions that it needs:

- a name from another module is imported as in the notebook;
- a function of the same notebook must be passed as one of `needed`;
- data must be passed as an argument.

Arguments and results are plain data: numbers, text, dtypes, tensors, and dicts, lists and tuples of
them. The output of a process is shown only in errors. All processes are ended, even after an error.
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
_IMPORT = "from course import processes"  # the first import: it loads torch before TensorFlow
_CALL = "processes.run_here({}, {!r})\nprocesses.leave()\n"  # the end of a script
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_GRACE_S = 40  # torchrun gives its workers 30 s to end before it kills them
_MAX_LINES = 12  # of a process's output in an error
# Matches rank and exit code in torchrun's report:
#     rank      : 1 (local_rank: 1)
#     exitcode  : -9 (pid: 4711)
_EXIT_CODE = r"rank +: (\d+) .*\n +exitcode +: (-?\d+)"


def run_workers(
    function: Callable[..., object],
    *needed: Callable[..., object],
    processes: int,
    timeout_s: float = 300,
    **arguments: object,
) -> list:
    """Run `function(**arguments)` in several processes; return the results in the order of ranks.

        def rank_and_size(offset): ...
        run_workers(rank_and_size, processes=2, offset=10)

    They run under ``torchrun --standalone`` with one thread each, so the function may join a
    process group. The top of this file says which functions and data can be passed.

    Raises `ParallelError` for other functions and data; for a process that fails, with the last
    lines of its output; and if not all have ended after `timeout_s` seconds, with the line of code
    that each was at.
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
            raise ParallelError(problem + _current_lines(folder, processes))
        if code != 0:
            raise ParallelError(f"{name}: {_describe_first_failure(folder, processes)}")
        return [_load_plain(folder / f"result-{rank}.pt") for rank in range(processes)]


def _torchrun(folder: Path, processes: int) -> list[str]:
    """The command that runs the script in the folder in this number of processes."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--local-addr", "127.0.0.1",  # by default it looks up the machine's name, which may fail
        "--nproc-per-node", str(processes),
        "--redirects", "3",  # stdout and stderr of each process go to files
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
    """Run `function(**arguments)` on each backend of Keras; return {backend: result}.

        def sum_of_squares(x): return float(keras.ops.sum(x * x))
        run_on_backends(sum_of_squares, x=torch.ones(3))

    A process can have only one backend of Keras, so there is a process for each. The top of this
    file says which functions and data can be passed. On a CPU the processes run at the same time
    and share its cores, otherwise one after the other. `device` is for the torch backend; if it is
    ``cpu``, TensorFlow sees no GPU either. Settings files of Keras are not read. By default
    `backends` are both, or only torch if TensorFlow is not installed, which is then printed.

    Raises `ParallelError` for other functions and data; for a process that fails, with the last
    lines of its output; and for one that has not ended after `timeout_s` seconds.
    """
    if backends is None:
        backends = _installed_backends()
    backends = tuple(backends)
    device = torch.device(device)
    groups = [backends]  # the processes of a group run at the same time
    if device.type != "cpu":
        groups = [(backend,) for backend in backends]
    largest_group = max(map(len, groups), default=1)
    threads = max(1, torch.get_num_threads() // largest_group)
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
    """Run the script in the folder on these backends, all at the same time, in at most `timeout_s`.

    `settings[backend]` is the environment of its process.
    """
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
                output = _last_lines(folder / f"error-{backend}.txt", folder / f"{backend}.log")
                raise ParallelError(f"{name} on {backend}: {problem}\n{output}".rstrip())


def _installed_backends() -> tuple[str, ...]:
    """Both backends; without TensorFlow only torch, which is printed."""
    if importlib.util.find_spec("tensorflow") is None:
        print(
            "TensorFlow is not installed, so this runs only on the torch backend. To install "
            "TensorFlow, run `pdm run sync --with tensorflow`."
        )
        return ("torch",)
    return BACKENDS


def _settings(threads: int) -> dict[str, str]:
    """Environment variables of a process that can import `course`, with this number of threads."""
    paths = _NOTEBOOKS
    own_paths = os.environ.get("PYTHONPATH")
    if own_paths:
        paths += os.pathsep + own_paths
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": paths,
    }


def _keras_settings(
    backend: str, device: torch.device, folder: Path, threads: int
) -> dict[str, str]:
    """Environment variables of a process for a backend of Keras; see `run_on_backends`."""
    settings = _settings(threads) | {
        "KERAS_BACKEND": backend,
        "KERAS_HOME": str(folder / f"keras-{backend}"),  # not the user's ~/.keras
        "KERAS_TORCH_DEVICE": str(device),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "1",  # ops run one after another
        "TF_CPP_MIN_LOG_LEVEL": "3",  # only fatal errors
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # by default TensorFlow takes all of the GPU's memory
    }
    if backend == "tensorflow":
        # A limit on instructions would reach its oneDNN, but not its choice of kernels.
        settings["ONEDNN_MAX_CPU_ISA"] = ""
    if device.type == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""
    return settings


@contextmanager
def _started(
    command: list[str], settings: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with these environment variables and its output in the file `log`.

    It is ended if it still runs after the block.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | settings,
            start_new_session=True,  # so that the processes that it starts can be killed with it
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        try:
            yield process
        finally:  # also if the reader interrupts the cell
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it still runs, and the processes that it has started."""
    if process.poll() is not None:
        return
    process.terminate()  # torchrun ends its workers on SIGTERM
    if _exit_code(process, _GRACE_S) is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _exit_code(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Wait for a process to end and return its exit code; None after `timeout_s`."""
    try:
        return process.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        return None


def _read_first(*paths: Path) -> str:
    """The text of the first of these files that exists; empty if none does."""
    for path in paths:
        if path.exists():
            return path.read_text("utf-8", errors="replace")
    return ""


def _last_lines(*paths: Path) -> str:
    """The last lines of the first of these files that exists, indented, for an error."""
    lines = _read_first(*paths).strip().splitlines()
    return textwrap.indent("\n".join(lines[-_MAX_LINES:]), "  ")


def _current_lines(folder: Path, processes: int) -> str:
    """The line of the script that each rank was at: ``rank 0 was in wait: time.sleep(60)``.

    When torchrun ends a rank, `faulthandler` writes its stack to stderr, the innermost frame first:
    ``File "script.py", line 12 in wait``.
    """
    script = folder / "script.py"
    lines = script.read_text(encoding="utf-8").splitlines()
    frame_pattern = re.compile(re.escape(f'File "{script}", line ') + r"(\d+) in (\w+)")
    text = ""
    for rank in range(processes):
        innermost = frame_pattern.search(_read_first(*_stderr_files(folder, rank)))
        description = "unknown"
        if innermost is not None:
            number, function_name = innermost.groups()
            description = f"{function_name}: {lines[int(number) - 1].strip()}"
        text += f"\n  rank {rank} was in {description}"
    return text


def _stderr_files(folder: Path, rank: int | str) -> Iterator[Path]:
    """The file with a rank's output on stderr, if it exists."""
    return folder.glob(f"logs/*/attempt_0/{rank}/stderr.log")


def _describe_first_failure(folder: Path, processes: int) -> str:
    """Which rank failed first, and the last lines of its output."""
    log = folder / "torchrun.log"
    for rank, exit_code in re.findall(_EXIT_CODE, _read_first(log)):
        code = int(exit_code)
        # After a failure, torchrun ends the other ranks with SIGTERM: they did not fail.
        if code < 0 and code != -signal.SIGTERM:
            output = _last_lines(*_stderr_files(folder, rank))
            return f"rank {rank} of {processes} was ended by signal {-code}\n{output}".rstrip()
    errors = sorted(folder.glob("error-*.txt"), key=_modified_ns)
    if not errors:
        return f"torchrun failed\n{_last_lines(log)}"
    first = errors[0]  # later ones may fail because of it
    rank = first.stem.removeprefix("error-")
    return f"rank {rank} of {processes} failed\n{_last_lines(first)}"


def _modified_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def run_here(function: Callable[..., object], variable: str) -> None:
    """Run `function` with the arguments in the folder that the command line names.

    Scripts call this in the processes that were started for them. The result, or the error, goes to
    a file in the folder, whose name ends with the value of the environment variable `variable`:
    RANK or KERAS_BACKEND.
    """
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGTERM, chain=True)  # write the stack: see `_current_lines`
    folder = Path(sys.argv[1])
    suffix = os.environ[variable]
    try:
        arguments = _load_plain(folder / "arguments.pt")
        result = function(**arguments)
        _save_plain(result, folder / f"result-{suffix}.pt", "the result")
    except BaseException as error:
        frames = error.__traceback__
        if frames is not None:
            frames = frames.tb_next  # leaves out the frame of this function
        text = "".join(traceback.format_exception(error.with_traceback(frames)))
        (folder / f"error-{suffix}.txt").write_text(text, encoding="utf-8")
        raise


def leave() -> None:
    """End the process at once, without freeing its objects.

    Freeing a process group that a DDP model still holds may crash the process, since gloo's threads
    still run and may need the GIL.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _folder_for(
    function: Callable, needed: tuple[Callable, ...], arguments: dict, variable: str
) -> Iterator[Path]:
    """A temporary folder for a block, with the script that calls `function`, and its arguments.

    For `variable`, see `run_here`.
    """
    script = script_of(function, needed, _CALL.format(function.__name__, variable))
    inspect.signature(function).bind(**arguments)  # raise a TypeError here, not in a process
    with tempfile.TemporaryDirectory(prefix="amp-lab-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(script, encoding="utf-8")
        _save_plain(arguments, folder / "arguments.pt", "an argument")
        yield folder


def script_of(function: Callable, needed: tuple[Callable, ...], call: str) -> str:
    """A script that imports and defines everything that `function` needs, and ends with `call`."""
    functions = [*needed, function]
    # Builtins need no import, even where IPython has replaced one in the notebook, as it does open.
    defined = {each.__name__ for each in functions} | vars(builtins).keys()
    sources = []
    imports = {}
    for each in functions:
        source = _source(each)
        sources.append(source)
        namespace = inspect.unwrap(each).__globals__
        code = compile(source, each.__name__, "exec")
        undefined = set(_global_names(code)) - defined
        # A name that the notebook lacks too is left out, and raises NameError when it is used.
        for name in sorted(undefined & namespace.keys()):
            imports[name] = _import_line(name, namespace[name], each)
    import_lines = "\n".join([_IMPORT, *imports.values()])
    return "\n\n".join([import_lines, *sources, call])


def _source(function: Callable) -> str:
    """The source of a function without indentation; `ParallelError` if it cannot run elsewhere."""
    undecorated = inspect.unwrap(function)
    is_function = isinstance(undecorated, types.FunctionType)
    if not is_function or undecorated.__name__ == "<lambda>":
        raise ParallelError(f"{function!r}: give a function defined with def")
    name = undecorated.__name__
    outer_names = ", ".join(undecorated.__code__.co_freevars)
    if outer_names:
        problem = f"{name} uses {outer_names} from the enclosing function"
        raise ParallelError(f"{problem}; make it an argument")
    try:
        return textwrap.dedent(inspect.getsource(undecorated))
    except (OSError, TypeError) as error:
        reason = f"has no source code ({first_line(error)}); define it in a cell or a file"
        raise ParallelError(f"{name} {reason}") from error


def _global_names(code: types.CodeType) -> Iterator[str]:
    """The global names that a piece of code and the functions defined in it use."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _import_line(name: str, value: object, function: Callable) -> str:
    """The import statement for the global `name` of a function, such as ``import torch as torch``.

    `value` is what the name stands for. Raises `ParallelError` if it cannot be imported.
    """
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module_name = getattr(value, "__module__", None)
    qualified_name = getattr(value, "__qualname__", None)
    if qualified_name is None or module_name is None:
        problem = "is data; make it an argument"
    elif module_name in ("__main__", function.__module__):
        problem = "is defined beside it; give it too, after the function that is to run"
    elif getattr(sys.modules.get(module_name), qualified_name, None) is value:
        return f"from {module_name} import {qualified_name} as {name}"
    else:
        problem = f"cannot be imported from {module_name}; import it inside the function"
    raise ParallelError(f"{function.__name__} uses {name}, which {problem}")


def _save_plain(value: object, path: Path, description: str) -> None:
    """Save plain data; raises `ParallelError` for other data, named by `description`."""
    try:
        torch.save(value, path)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ParallelError(f"{description} is not plain data: {first_line(error)}") from error
    if unsafe:
        raise ParallelError(f"{description} is not plain data: {', '.join(unsafe)}")


def _load_plain(path: Path) -> object:
    """Load the data that `_save_plain` saved."""
    return torch.load(path, map_location="cpu", weights_only=True)

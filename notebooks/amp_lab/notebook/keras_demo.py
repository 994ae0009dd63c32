"""One function on several backends of Keras, each in a process of its own."""

import functools
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from amp_lab.errors import ParallelError
from amp_lab.notebook.scripts import answer, end_of, load_plain, save_plain, script_of

BACKENDS = ("torch", "tensorflow")
_CALL = "import amp_lab.notebook.keras_demo\n\namp_lab.notebook.keras_demo.work({})\n"


def run_on_backends(
    function: Callable[..., object],
    *needed: Callable[..., object],
    backends: Iterable[str] = BACKENDS,
    device: torch.device | str = "cpu",
    timeout_s: float = 900,
    **arguments: object,
) -> dict[str, object]:
    """What `function(**arguments)` returns on each backend of Keras, by the backend's name.

        def sum_of_squares(x): return float(keras.ops.sum(x * x))
        run_on_backends(sum_of_squares, x=torch.ones(3))

    Keras has one backend in a process, that which KERAS_BACKEND names when it is imported. So each
    gets a process, with a script made of the source of `function` and of the functions that it
    needs, and of imports: a name of another module is imported as it was here; a function of the
    same notebook must be in `needed`; data must come as an argument. Arguments and results are
    plain data: numbers, text, dtypes, tensors, and dicts, lists and tuples of them. On a CPU the
    processes run at the same time and share its cores, elsewhere one after another; `device` is
    that of the torch backend, and if it is ``cpu``, TensorFlow sees no GPU either. What a process
    prints is kept for errors only, and a settings file of Keras is not read.

    Raises `ParallelError` for a function without source or with a name that cannot be had there,
    for data that is not plain, and for a process that fails, with its last lines, or has not ended
    after `timeout_s` seconds. None of them is left running then.
    """
    backends, device = tuple(backends), torch.device(device)
    script = script_of(function, needed, _CALL.format(function.__name__))
    inspect.signature(function).bind(**arguments)  # TypeError here rather than in a process
    at_once = len(backends) if device.type == "cpu" else 1
    run = functools.partial(_run, function.__name__, script, arguments, device, at_once, timeout_s)
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(backends, pool.map(run, backends), strict=True))


def _run(
    name: str,
    script: str,
    arguments: dict,
    device: torch.device,
    at_once: int,
    timeout_s: float,
    backend: str,
) -> object:
    with tempfile.TemporaryDirectory(prefix="amp-lab-") as folder_name:
        folder = Path(folder_name)
        (folder / "worker.py").write_text(script, encoding="utf-8")
        save_plain(arguments, folder / "arguments.pt", "an argument")
        with (folder / "said.txt").open("wb") as said:
            try:
                done = subprocess.run(
                    [sys.executable, str(folder / "worker.py"), str(folder)],
                    env=os.environ | _settings(backend, device, at_once, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired as error:
                raise ParallelError(
                    f"{name} on {backend}: did not end within {timeout_s:g} s"
                ) from error
        if done.returncode != 0:
            told = folder / "error.txt"
            text = (told if told.exists() else folder / "said.txt").read_text(errors="replace")
            how = f"ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
            raise ParallelError(f"{name} on {backend}: {how}\n{end_of(text)}".rstrip())
        return load_plain(folder / "result.pt")


def _settings(backend: str, device: torch.device, at_once: int, folder: Path) -> dict[str, str]:
    """The environment of a process, but for what it has from this one."""
    package = Path(__file__).resolve().parent.parent
    threads = str(max(1, torch.get_num_threads() // at_once))
    settings = {
        "KERAS_BACKEND": backend,
        "KERAS_HOME": str(folder / "keras"),  # it would read, or write, its settings at home
        "KERAS_TORCH_DEVICE": str(device),
        "PYTHONPATH": os.pathsep.join(
            [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # it would take all of the memory
    }
    if device.type == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""
    return settings


def work(function: Callable[..., object]) -> None:
    """Run `function` in a process that `run_on_backends` has started; called by its script."""
    answer(function, Path(sys.argv[1]))

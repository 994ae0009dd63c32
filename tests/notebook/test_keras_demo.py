"""Functions on several backends of Keras: what they return, and what is said when one fails."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from amp_lab.errors import ParallelError
from amp_lab.notebook.keras_demo import BACKENDS, run_on_backends
from conftest import needs_keras


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def report(x, dtype):
    """Which Keras this process has, and what it and torch make of the argument."""
    import keras

    policy = keras.config.dtype_policy().name
    total = float(keras.ops.sum(keras.ops.convert_to_tensor(doubled(x).numpy())))
    return {"backend": keras.backend.backend(), "sum": total, "policy": policy, dtype: os.getpid()}


@needs_keras
def test_each_backend_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "keras.json").write_text('{"floatx": "float16", "backend": "jax"}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))  # a user's settings, which are not read
    monkeypatch.setenv("KERAS_BACKEND", "numpy")
    found = run_on_backends(report, doubled, x=torch.ones(3), dtype=torch.float16)
    assert [answer["backend"] for answer in found.values()] == list(found) == list(BACKENDS)
    assert {answer["sum"] for answer in found.values()} == {6.0}
    assert {answer["policy"] for answer in found.values()} == {"float32"}
    assert len({os.getpid(), *(answer[torch.float16] for answer in found.values())}) == 3
    assert os.environ["KERAS_BACKEND"] == "numpy"


def tell_backend(how):
    """Needs no Keras; fails on one backend."""
    backend = os.environ["KERAS_BACKEND"]
    if backend == how.get("on"):
        print("my last words", file=sys.stderr, flush=True)
        if how["do"] == "raise":
            raise ValueError("no such layer")
        if how["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how["do"] == "sleep":
            Path(how["pid"]).write_text(str(os.getpid()))
            time.sleep(600)
        return print  # no plain data
    return backend


def test_the_backends_that_were_asked_for():
    assert run_on_backends(tell_backend, backends=["jax"], how={}) == {"jax": "jax"}


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("raise", ["failed", "ValueError: no such layer"]),
        ("kill", ["ended by signal 9", "my last words"]),
        ("return", ["failed", "the result is not plain data"]),
    ],
)
def test_one_that_fails_is_told_with_its_last_lines(do, says):
    with pytest.raises(ParallelError) as caught:
        run_on_backends(tell_backend, how={"on": "tensorflow", "do": do})
    text = str(caught.value)
    assert text.startswith(f"tell_backend on tensorflow: {says[0]}\n")
    assert all(part in text for part in says), text
    assert len(text.splitlines()) < 20


def test_one_that_does_not_end_is_ended(tmp_path):
    how = {"on": "torch", "do": "sleep", "pid": str(tmp_path / "pid")}
    with pytest.raises(ParallelError, match=r"tell_backend on torch: did not end within 20 s"):
        run_on_backends(tell_backend, timeout_s=20, how=how)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_wrong_argument_is_told_at_once():
    with pytest.raises(TypeError, match="missing a required argument: 'how'"):
        run_on_backends(tell_backend)

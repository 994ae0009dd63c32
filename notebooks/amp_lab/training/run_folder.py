"""The folder of a run: its lock, its settings, its metrics and its curves."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from amp_lab.checkpoint.run_state import CHECKPOINT
from amp_lab.errors import RunError
from amp_lab.files import write_whole
from amp_lab.training.loop import EpochMetrics
from amp_lab.training.run_config import RunConfig

CONFIG, METRICS = "config.json", "metrics.csv"


@dataclass(frozen=True)
class SavedRun:
    """What config.json holds of a run."""

    config: RunConfig
    images: str  # fingerprint of those that it was started with
    environment: str  # what else its result depends on, if only in its last bits


@contextlib.contextmanager
def lock(out: Path) -> Iterator[None]:
    """Make the folder; keep any other run out of it for the block. Raises `RunError`."""
    folder_lock = filelock.FileLock(out / ".lock")  # of the system, so no kill -9 leaves it held
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder_lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RunError(f"{out}: another run is at work in this folder") from None
    except OSError as error:
        raise RunError(f"{out}: nothing can be written there ({error.strerror})") from error
    try:
        yield
    finally:
        folder_lock.release()


def read_saved(out: Path, settings: dict, resume: bool) -> SavedRun | None:
    """The run in the folder, or None if there is none yet.

    Raises `RunError` if it is damaged, not to be resumed, or has others than these settings.
    """
    path = out / CONFIG
    if not path.exists():
        if (out / CHECKPOINT).exists():
            raise RunError(f"{out}: has a checkpoint but no {CONFIG}; choose another folder")
        return None
    try:
        content = json.loads(path.read_text())
        config = RunConfig(**content["config"])  # what is not there has its default
        saved = SavedRun(config, content["images"], content["environment"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: not the settings of a run ({error})") from error
    # A torchrun that has lost a process starts the same command again.
    if not resume and (_starter() is None or content.get("started_by") != _starter()):
        raise RunError(f"{out}: holds a run already; --resume goes on with it, or choose another")
    for name, value in settings.items():
        before = getattr(config, name)
        if value != before:
            start = f"the run was started with {name.replace('_', ' ')} {before}"
            raise RunError(f"{out}: {start}, and cannot go on with {value}")
    return saved


def write_config(out: Path, run: SavedRun) -> None:
    """Write the settings of a new run; raises `RunError` if that fails."""
    content = dataclasses.asdict(run) | {"started_by": _starter()}
    _write(out / CONFIG, json.dumps(content, indent=2) + "\n")


def _starter() -> str | None:
    """What tells one torchrun, on the machine of rank 0, from another; None without."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return run and f"{run} {socket.gethostname()} {os.getppid()}"


def write_metrics(out: Path, epochs: list[EpochMetrics]) -> None:
    """Write the file with the epochs that the checkpoint knows of: a kill may have come between."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(field.name for field in dataclasses.fields(EpochMetrics))
    writer.writerows(dataclasses.astuple(epoch) for epoch in epochs)
    _write(out / METRICS, text.getvalue())


def append_metrics(out: Path, metrics: EpochMetrics) -> None:
    """Add a row to the file; raises `RunError` if that fails."""
    try:
        with open(out / METRICS, "a", newline="") as file:
            csv.writer(file).writerow(dataclasses.astuple(metrics))
            file.flush()
            os.fsync(file.fileno())  # before the checkpoint that counts the epoch as done
    except OSError as error:
        raise RunError(f"{out / METRICS}: cannot be written ({error.strerror})") from error


def _write(path: Path, text: str) -> None:
    """Write a small file so that it is never there in part."""
    try:
        write_whole(path, [text.encode()])
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def draw_curves(out: Path, epochs: list[EpochMetrics]) -> None:
    """Draw loss.png and accuracy.png."""
    from amp_lab import plots  # matplotlib takes a second to load

    for what in ("loss", "accuracy"):
        curves = {}
        for part in ("train", "test"):
            curves[part] = [getattr(epoch, f"{part}_{what}") for epoch in epochs]
        plots.save(out / f"{what}.png", plots.training_curves, curves, what)

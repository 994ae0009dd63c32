"""The folder of a run: its lock, its settings, its metrics and its curves."""

import csv
import dataclasses
import io
import json
import os
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import filelock

from amp_lab.core.errors import RunError
from amp_lab.core.files import read_json, require_types, save
from amp_lab.train.checkpoint.run_state import CHECKPOINT
from amp_lab.train.loop import EpochMetrics
from amp_lab.train.train_options import RunConfig

CONFIG = "config.json"
METRICS = "metrics.csv"


@dataclass(frozen=True)
class SavedRun:
    """What config.json holds of a run."""

    config: RunConfig
    images: str  # fingerprint of those that it was started with
    environment: str  # what else its result depends on, if only in its last bits
    data: str | None = None
    """The path of its data, from the root; None if they come with a library, and for runs that an
    older version began."""


def lock(out: Path) -> AbstractContextManager:
    """Make the folder; keep any other run out of it until the block ends. Raises `RunError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A lock of the system's, so no kill -9 leaves it held.
        return filelock.FileLock(out / ".lock").acquire(timeout=0)
    except filelock.Timeout:
        raise RunError(f"{out}: another run is at work in this folder") from None
    except OSError as error:
        raise RunError(f"{out}: nothing can be written there ({error.strerror})") from error


def read_saved(out: Path, settings: dict, resume: bool) -> SavedRun | None:
    """The run in the folder, or None if there is none yet.

    Raises `RunError` if it is damaged, not to be resumed, or has others than these settings, of
    which only `epochs` may be more.
    """
    path = out / CONFIG
    if not path.exists():
        for name in (CHECKPOINT, METRICS, "loss.png", "accuracy.png"):  # nobody's are replaced
            if (out / name).exists():
                raise RunError(f"{out}: has {name} but no {CONFIG}; choose another folder")
        return None
    saved, started_by = _read_config(path)
    # A torchrun that has lost a process starts the same command again.
    starter = _starter()
    is_restarted = starter is not None and started_by == starter
    if not resume and not is_restarted:
        raise RunError(f"{out}: holds a run already; --resume goes on with it, or choose another")
    _require_same_settings(out, settings, saved.config)
    return saved


def _read_config(path: Path) -> tuple[SavedRun, object]:
    """What config.json holds, and which torchrun has started the run."""
    try:
        content = read_json(path)
        saved = SavedRun(
            config=RunConfig(**content["config"]),  # what is not there has its default
            images=content["images"],
            environment=content["environment"],
            data=content.get("data"),
        )
        require_types(saved)
        return saved, content.get("started_by")
    except (OSError, ValueError, TypeError, KeyError) as error:  # a RunError is a ValueError
        raise RunError(f"{path}: not the settings of a run ({error})") from error


def _require_same_settings(out: Path, settings: dict, config: RunConfig) -> None:
    """Raise `RunError` for a setting that the run was not started with."""
    for name, value in settings.items():
        saved_value = getattr(config, name)
        is_more = name == "epochs" and value > config.epochs  # with which it can go on
        is_same = value == saved_value or _is_same_file(name, value, config)
        if not is_same and not is_more:
            start = f"the run was started with {name.replace('_', ' ')} {saved_value}"
            raise RunError(f"{out}: {start}, and cannot go on with {value}")


def _is_same_file(name: str, value: object, config: RunConfig) -> bool:
    """Whether the tokenizer of an older run, whose path may be relative, is the one given."""
    if name != "tokenizer" or config.tokenizer is None:
        return False
    return os.path.abspath(config.tokenizer) == value


def place_of_data(out: Path) -> str | None:
    """Where the data of the run in this folder are, if that is known; `RunError` if damaged."""
    path = out / CONFIG
    if not path.exists():
        return None
    saved, _ = _read_config(path)
    return saved.data


def write_config(out: Path, run: SavedRun) -> None:
    """Write the settings of a new run; raises `RunError` if that fails."""
    content = dataclasses.asdict(run)
    content["started_by"] = _starter()
    text = json.dumps(content, indent=2) + "\n"
    save(out / CONFIG, [text.encode()], RunError)


def _starter() -> str | None:
    """What tells one torchrun, on the machine of rank 0, from another; None without."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if not run_id:
        return run_id
    return f"{run_id} {socket.gethostname()} {os.getppid()}"


def write_metrics(out: Path, epochs: list[EpochMetrics]) -> None:
    """Write a row for each finished epoch; raises `RunError` if that fails."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(field.name for field in dataclasses.fields(EpochMetrics))
    writer.writerows(dataclasses.astuple(epoch) for epoch in epochs)
    save(out / METRICS, [text.getvalue().encode()], RunError)


def draw_curves(out: Path, epochs: list[EpochMetrics]) -> None:
    """Draw loss.png and accuracy.png."""
    from amp_lab import plots  # matplotlib takes a second to load

    for metric in ("loss", "accuracy"):
        train = [getattr(epoch, f"train_{metric}") for epoch in epochs]
        test = [getattr(epoch, f"test_{metric}") for epoch in epochs]
        curves = {"train": train, "test": test}
        plots.save(out / f"{metric}.png", plots.training_curves, curves, metric)

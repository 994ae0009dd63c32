"""The folder of a run: its lock, its settings, its metrics and its curves."""

import csv
import dataclasses
import io
import json
import os
import socket
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import filelock

from amp_lab.core.errors import RunError
from amp_lab.core.files import read_json, require_types, save
from amp_lab.train.loop import EpochMetrics
from amp_lab.train.run_state import CHECKPOINT
from amp_lab.train.train_options import RunConfig

CONFIG = "config.json"
METRICS = "metrics.csv"


@dataclass(frozen=True)
class SavedRun:
    """The content of config.json."""

    config: RunConfig
    fingerprint: str  # of the data that the run was started with; "images" in the file
    environment: str  # versions, threads and processes, which change the last bits of the result
    data: str | None = None
    """Absolute path of the data; None if they come with a library, and for runs of older versions,
    which did not save it."""
    started_by: str | None = None  # the `_torchrun_id` of the process that wrote the file


def lock(out: Path) -> AbstractContextManager:
    """Create the folder and lock it against other runs, for a `with` block.

    Raises `RunError` if another run has locked the folder, or if the folder is not writable.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        # The system releases this lock when the process ends, even by kill -9.
        return filelock.FileLock(out / ".lock").acquire(timeout=0)
    except filelock.Timeout:
        raise RunError(f"{out}: another run is using this folder") from None
    except OSError as error:
        raise RunError(f"the folder {out} cannot be written to ({error.strerror})") from error


def read_saved(
    out: Path, config: RunConfig, given: Collection[str], *, resume: bool
) -> SavedRun | None:
    """Read the run in the folder that is to be resumed; None if the folder has no run yet.

    `given` has the names of the settings in `config` that the user gave now. The run is resumed
    with `resume`, or if torchrun has restarted the processes. Raises `RunError`

    - if the folder has a run that is not resumed,
    - if config.json is damaged,
    - if a setting differs from the saved run, except a larger `epochs`,
    - if the folder has other files of a run, but no config.json.
    """
    path = out / CONFIG
    if not path.exists():
        # Files of these names would be overwritten, and may be someone's work.
        for name in (CHECKPOINT, METRICS, "loss.png", "accuracy.png"):
            if (out / name).exists():
                raise RunError(f"{out} contains {name} but no {CONFIG}; choose another folder")
        return None
    saved = _read_config(path)
    # A torchrun that has lost a process runs the same command again, without `resume`.
    starter = _torchrun_id()
    is_restarted = starter is not None and saved.started_by == starter
    if not resume and not is_restarted:
        raise RunError(
            f"{out} already contains a run; resume it with --resume, or choose another folder"
        )
    _require_same_settings(out, config, given, saved.config)
    return saved


def _read_config(path: Path) -> SavedRun:
    """Read config.json. Raises `RunError` if it is damaged."""
    try:
        content = read_json(path)
        saved = SavedRun(
            config=RunConfig(**content["config"]),  # settings added since then get their defaults
            fingerprint=content["images"],
            environment=content["environment"],
            data=content.get("data"),
            started_by=content.get("started_by"),
        )
        require_types(saved)
        return saved
    except (OSError, ValueError, TypeError, KeyError) as error:  # a RunError is a ValueError
        raise RunError(f"{path}: does not contain the settings of a run ({error})") from error


def _require_same_settings(
    out: Path, config: RunConfig, given: Collection[str], saved: RunConfig
) -> None:
    """Raise `RunError` for a given setting that differs from the `saved` one of the run."""
    for name in given:
        value = getattr(config, name)
        saved_value = getattr(saved, name)
        is_more_epochs = name == "epochs" and value > saved_value
        is_same = value == saved_value or _is_same_tokenizer(name, value, saved)
        if not is_same and not is_more_epochs:
            problem = f"the run was started with {name.replace('_', ' ')} {saved_value}"
            raise RunError(f"{out}: {problem}, so it cannot be resumed with {value}")


def _is_same_tokenizer(name: str, value: object, saved: RunConfig) -> bool:
    """Whether the setting is the path of the run's tokenizer; older runs saved a relative path."""
    if name != "tokenizer" or saved.tokenizer is None:
        return False
    return os.path.abspath(saved.tokenizer) == value


def saved_data_path(out: Path) -> str | None:
    """The path of the data of the run in this folder, None if unknown; `RunError` if damaged."""
    path = out / CONFIG
    if not path.exists():
        return None
    return _read_config(path).data


def write_config(out: Path, run: SavedRun) -> None:
    """Write `run` into config.json, with the current `_torchrun_id`; `RunError` if this fails."""
    content = {
        "config": dataclasses.asdict(run.config),
        "images": run.fingerprint,
        "environment": run.environment,
        "data": run.data,
        "started_by": _torchrun_id(),
    }
    text = json.dumps(content, indent=2) + "\n"
    save(out / CONFIG, [text.encode()], RunError)


def _torchrun_id() -> str | None:
    """A text that identifies the torchrun that started this process; None or empty without one.

    It is the same after torchrun has restarted its processes.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if not run_id:
        return run_id
    # The id of a run may be the same in two runs, as "none"; host and process id are not.
    return f"{run_id} {socket.gethostname()} {os.getppid()}"


def write_metrics(out: Path, epochs: list[EpochMetrics]) -> None:
    """Write metrics.csv, a row for each finished epoch; raises `RunError` if this fails."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(field.name for field in dataclasses.fields(EpochMetrics))
    writer.writerows(dataclasses.astuple(epoch) for epoch in epochs)
    save(out / METRICS, [text.getvalue().encode()], RunError)


def draw_curves(out: Path, epochs: list[EpochMetrics]) -> None:
    """Draw loss.png and accuracy.png: training and test over the epochs."""
    from amp_lab import plots  # here, since matplotlib takes a second to load

    for metric in ("loss", "accuracy"):
        train = [getattr(epoch, f"train_{metric}") for epoch in epochs]
        test = [getattr(epoch, f"test_{metric}") for epoch in epochs]
        curves = {"train": train, "test": test}
        plots.save(out / f"{metric}.png", plots.training_curves, curves, metric)

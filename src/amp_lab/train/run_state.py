"""Saves and restores the state of a run. Its checkpoint is a dict with these entries:

config, classes      the run's settings and its number of classes, to build the model again
scheduler, scaler    state dicts
ranks                a list with the progress and the random states of each rank
model, optimizer     state dicts; a sharded run has "shards" instead of these two
shards               the name of the folder beside the file, and the SHA-256 of each file in it
"""

import reprlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amp_lab.core.errors import CheckpointError, RunError, first_line
from amp_lab.parallel.ranks import Parallel, Ranks
from amp_lab.train.checkpoint.file import load_checkpoint, save_checkpoint
from amp_lab.train.checkpoint.random_state import random_states, restore_random_states
from amp_lab.train.distributed.process_group import is_lost
from amp_lab.train.loop import Progress
from amp_lab.train.train_options import RunConfig

CHECKPOINT = "checkpoint.pt"
SHARDS = "shards"
WRONG_CONTENT = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors from restoring an undamaged checkpoint that is from another model or not from a run."""
_MAX_CLASSES = 2**18  # the largest vocabulary of a tokenizer


@dataclass(frozen=True)
class TrainingObjects:
    """The objects of a run with a state; each has an entry with its name in the checkpoint."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.OneCycleLR
    scaler: torch.amp.GradScaler


def save_run(
    out: Path, ranks: Ranks, parts: TrainingObjects, progress: dict, description: dict
) -> None:
    """Save the state of a run into its folder; at any moment the old or the new file is complete.

    `progress` is the state dict of this rank's `Progress`; `description` has the entries ``config``
    and ``classes``, and for a text its tokens. All ranks must call this together. Raises
    `CheckpointError` on every rank if one rank cannot write.
    """
    # The checkpoint has the buffers of rank 0. All ranks continue with them, as after a resume.
    ranks.share_buffers(parts.model)
    rank_state = {"progress": progress, "random": random_states(ranks.device)}
    # The objects themselves, by name: `save_checkpoint` takes their state dicts.
    state = description | vars(parts)
    state["ranks"] = ranks.gather(rank_state)
    folder_name = None  # of the shards
    if ranks.kind is Parallel.FSDP:
        from amp_lab.train.checkpoint.shards import save_shards

        # A new folder each time: the old checkpoint.pt still refers to the old folder.
        epochs = len(progress["epochs"])
        folder_name = f"{SHARDS}-{epochs}-{progress['batch']}"
        model = state.pop("model")
        optimizer = state.pop("optimizer")
        state["shards"] = save_shards(out / folder_name, model, optimizer, ranks)
    ranks.first(lambda: save_checkpoint(out / CHECKPOINT, **state))
    if ranks.rank == 0:
        _remove_shards(out, keep=folder_name)


def _remove_shards(out: Path, keep: str | None) -> None:
    """Remove the folders of shards, such as shards-3-120, except the one called `keep`."""
    for folder in out.glob(f"{SHARDS}-[0-9]*-[0-9]*"):
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)  # a folder that remains does no harm


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """The optimizer of a run, for the parameters of the model that require gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # A fused optimizer skips a step on the device; the others make `GradScaler` wait for it.
    return torch.optim.AdamW(trained, lr=config.lr, fused=True)


def load_run(out: Path, config: RunConfig) -> dict | None:
    """Load the checkpoint of the run with these settings; None if there is none yet.

    The docstring of the module lists the entries of the result. Raises `CheckpointError` if the
    checkpoint is damaged, or if its settings, except `epochs`, differ.
    """
    path = out / CHECKPOINT
    if not path.exists():
        return None
    state = load_checkpoint(path)
    saved_config = require_run(path, state)
    if replace(saved_config, epochs=config.epochs) != config:
        raise CheckpointError(
            f"{path}: this file and the config.json next to it are from different runs"
        )
    return state


def require_run(path: Path, state: dict) -> RunConfig:
    """The settings of the run in `state`, which was read from the file `path`.

    Raises `CheckpointError` if `state` lacks settings, a possible number of classes, or ranks.
    """
    for name, expected in {"config": dict, "classes": int, "ranks": list}.items():
        if not isinstance(state.get(name), expected):
            kind = expected.__name__
            raise CheckpointError(
                f"{path}: this file is not from a run ({name!r} must be of type {kind})"
            )
    classes = state["classes"]
    if not 1 <= classes <= _MAX_CLASSES:
        raise CheckpointError(f"{path}: this file is not from a run ({classes} classes)")
    try:
        return RunConfig(**state["config"])  # settings added since then get their defaults
    except (TypeError, RunError) as error:
        raise CheckpointError(f"{path}: this file is not from a run ({error})") from error


def restore_run(
    out: Path,
    state: dict,
    ranks: Ranks,
    parts: TrainingObjects,
    make_progress: Callable[[dict], Progress],
) -> Progress:
    """Load the state of `load_run` into the parts of a run; return the progress of this rank.

    The state may be from another number of ranks, sharded or not. `make_progress` turns the saved
    state dict of a `Progress` into the object to return. Raises `CheckpointError` for the state of
    another model; the error of a lost process stays as it is.
    """
    settings = _settings(parts)  # before restoring, to compare with those after it
    try:
        _restore_tensors(out, state, ranks, parts)
        parts.scheduler.load_state_dict(state["scheduler"])
        parts.scaler.load_state_dict(state["scaler"])
        _require_usable(parts, settings)
        return make_progress(_restore_rank(state["ranks"], ranks))
    except WRONG_CONTENT as error:
        if is_lost(error):  # another process has ended: no fault of the checkpoint
            raise
        problem = f"does not fit this run ({first_line(error)})"
        raise CheckpointError(f"{out / CHECKPOINT}: {problem}") from error


def _restore_tensors(out: Path, state: dict, ranks: Ranks, parts: TrainingObjects) -> None:
    """Load the state of `load_run` into model and optimizer.

    The saved state may be sharded, and so may the model and the optimizer of this run.
    """
    # shards is imported where it is needed, since it takes a second to load.
    if "shards" in state:
        from amp_lab.train.checkpoint.shards import load_shards

        load_shards(out, state["shards"], parts.model, parts.optimizer, ranks)
    elif ranks.kind is Parallel.FSDP:
        from amp_lab.train.checkpoint.shards import load_unsharded

        load_unsharded(state["model"], state["optimizer"], parts.model, parts.optimizer)
    else:
        parts.model.load_state_dict(state["model"])
        parts.optimizer.load_state_dict(state["optimizer"])


def _settings(parts: TrainingObjects) -> dict:
    """The state of scheduler and scaler, and the parameter groups of the optimizer, by name."""
    return {
        "scheduler": parts.scheduler.state_dict(),
        "scaler": parts.scaler.state_dict(),
        "optimizer": parts.optimizer.state_dict()["param_groups"],
    }


def _require_usable(parts: TrainingObjects, new_settings: dict) -> None:
    """Raise `ValueError` for restored parts with which the next step would fail.

    `new_settings` are the `_settings` of the parts before they were restored.
    """
    restored = _settings(parts)
    for name in new_settings:
        _require_same_types(restored[name], new_settings[name], name)
    done = restored["scheduler"]["last_epoch"]  # steps, despite its name
    total = new_settings["scheduler"]["total_steps"]
    if not 0 <= done <= total:
        raise ValueError(f"the scheduler has finished {done} of {total} steps")
    for group in restored["optimizer"]:
        betas = group["betas"]
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"the optimizer's betas are {betas}")
    for parameter, values in parts.optimizer.state.items():
        if values != {}:  # a parameter that has had no gradient has no state
            _require_adam_state(values, parameter.shape)


def _require_adam_state(values: dict, shape: torch.Size) -> None:
    """Raise `ValueError` unless `values` is the state of AdamW for a parameter of this shape."""
    shapes = {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}
    if values.keys() != shapes.keys():
        names = ", ".join(map(str, values))
        raise ValueError(f"the optimizer stores {names}")
    for name, value in values.items():
        has_shape = isinstance(value, torch.Tensor) and value.shape == shapes[name]
        if not has_shape:
            raise ValueError(f"{name} of the optimizer has another shape")
    steps = values["step"]
    if not steps >= 0:  # true for NaN as well
        raise ValueError(f"the optimizer has finished {steps.item()} steps")


def _require_same_types(value: Any, original: Any, name: str) -> None:
    """Raise `ValueError` unless nested `value` has the keys, lengths and types of `original`."""
    if isinstance(original, dict):
        if not isinstance(value, dict) or value.keys() != original.keys():
            raise ValueError(f"{name} has other entries")
        for key, original_entry in original.items():
            _require_same_types(value[key], original_entry, f"{name}: {key}")
    elif isinstance(original, list | tuple):
        for entry, original_entry in zip(value, original, strict=True):
            _require_same_types(entry, original_entry, name)
    elif not _may_replace(value, original):
        raise ValueError(f"{name} is {reprlib.repr(value)}")


def _may_replace(value: object, original: object) -> bool:
    """Whether a restored value may replace the original one.

    None, a string or a bool must be equal. An integer may replace any number, a float only a float.
    """
    if original is None or isinstance(original, str | bool):
        return value == original
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63  # torch takes no larger one
    return isinstance(value, float) and isinstance(original, float)


def _restore_rank(states: list[dict], ranks: Ranks) -> dict:
    """Restore the random state of this rank, and return the state dict of its progress.

    `states` has {"progress": …, "random": …} of each rank that saved them. If the number of ranks
    has changed, their progress is shared out again.
    """
    rank = ranks.rank
    if rank < len(states):  # a rank that was not there keeps the random state from its seed
        restore_random_states(states[rank]["random"], ranks.device)
    progress_of_ranks = [state["progress"] for state in states]
    if ranks.size == len(states):
        return progress_of_ranks[rank]
    progress = dict(progress_of_ranks[0])  # most entries are the same on all ranks
    samples = sum(saved["samples"] for saved in progress_of_ranks)
    progress["samples"] = samples // ranks.size  # all ranks have the same number
    for name in ("loss_sum", "correct"):
        total = sum(saved[name] for saved in progress_of_ranks)
        # The end of the epoch adds up these sums over the ranks, so only rank 0 takes the total.
        progress[name] = total if rank == 0 else 0 * total  # a tensor 0 of the same dtype
    return progress

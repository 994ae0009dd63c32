"""Checkpoints of a sharded training: a folder that every rank writes its part of."""

import contextlib
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from amp_lab.distributed.ranks import Ranks, is_lost
from amp_lab.errors import CheckpointError, first_line
from amp_lab.files import sync_folder

Digests = dict[str, str]
"""The SHA-256 of each file of a folder, by its name."""


def save_shards(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> Digests:
    """Write model and optimizer into a new folder; each rank writes what it holds.

    `torch.distributed.checkpoint` writes it. A folder counts only once the digests that this
    returns are saved elsewhere: then `load_shards` takes it, on any number of ranks. All ranks must
    see the same folder. Raises `CheckpointError` on every rank if one cannot write.
    """
    folder = Path(folder)

    def write() -> None:
        # What a killed process left under this name is in the way.
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be made ({error.strerror})") from error

    def save() -> None:
        with _told(folder, "could not be saved"):
            dcp.save(_states(model, optimizer), checkpoint_id=folder)

    def synchronise() -> None:
        try:
            sync_folder(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: could not be saved ({error.strerror})") from error

    def look() -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not there; FSDP needs a folder that all nodes share")

    ranks.first(write)
    ranks.each(look)
    ranks.each(save)
    digests = _digests(folder, ranks)
    ranks.first(synchronise)
    return digests


def load_shards(
    folder: str | os.PathLike,
    digests: Digests,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> None:
    """Read what `save_shards` wrote into a model and its optimizer, sharded in any way or not.

    Every byte is held against the digests first. Raises `CheckpointError` on every rank if a file
    is missing, altered, or of another model. torch unpickles parts of such files, so, unlike a
    checkpoint in one file, load only one that you trust.
    """
    folder = Path(folder)

    def compare() -> None:
        for name, digest in digests.items():
            if name not in found:
                raise CheckpointError(f"{folder / name}: missing")
            if found[name] != digest:
                raise CheckpointError(f"{folder / name}: altered since it was saved")

    def load() -> None:
        states = _states(model, optimizer)
        with _told(folder, "does not fit this run"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: right
            dcp.load(states, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
            )

    found = _digests(folder, ranks)
    ranks.each(compare)
    ranks.each(load)


def load_whole(
    model_state: dict, optimizer_state: dict, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the state dicts of a model and an optimizer that were not sharded into ones that are."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    # An optimizer numbers its parameters; `set_state_dict` wants their names.
    by_name = {
        "state": {names[number]: state for number, state in optimizer_state["state"].items()},
        "param_groups": [
            group | {"params": [names[number] for number in group["params"]]}
            for group in optimizer_state["param_groups"]
        ],
    }
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=by_name,
        options=StateDictOptions(full_state_dict=True),
    )


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _digests(folder: Path, ranks: Ranks) -> Digests:
    """Of all files there; the ranks share the work."""
    names = ranks.first(lambda: sorted(p.name for p in folder.glob("*")))

    def read() -> Digests:
        found = {}
        for name in names[ranks.rank :: ranks.size]:
            try:
                with open(folder / name, "rb") as file:
                    found[name] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(
                    f"{folder / name}: cannot be read ({error.strerror})"
                ) from error
        return found

    return {
        name: digest for part in ranks.gather(ranks.each(read)) for name, digest in part.items()
    }


@contextlib.contextmanager
def _told(folder: Path, what: str) -> Iterator[None]:
    """Turn what goes wrong inside torch, on any rank, into a `CheckpointError`."""
    try:
        yield
    except CheckpointException as error:  # is no Exception; holds those of the ranks
        rank, (reason, _) = min(error.failures.items())
        if is_lost(reason):
            raise reason from error
        raise CheckpointError(f"{folder}: {what} (rank {rank}: {first_line(reason)})") from error
    except (KeyError, RuntimeError, ValueError) as error:
        if is_lost(error):
            raise
        raise CheckpointError(f"{folder}: {what} ({first_line(error)})") from error

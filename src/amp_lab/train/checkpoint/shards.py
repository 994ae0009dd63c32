"""Checkpoints of a sharded training: a folder that every rank writes its part of."""

import contextlib
import hashlib
import io
import pickle
import shutil
import warnings
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata, state_dict
from torch.distributed.checkpoint.api import CheckpointException

from amp_lab.core.errors import CheckpointError, first_line
from amp_lab.core.files import open_regular, sync_folder
from amp_lab.parallel.ranks import Ranks
from amp_lab.train.distributed.process_group import is_lost


def save_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict:
    """Write model and optimizer into a new folder that all ranks see; each writes what it holds.

    The folder counts only once what this returns, its name and the SHA-256 of each file, is saved
    elsewhere, for `load_shards`. Raises `CheckpointError` on every rank if one cannot write.
    """

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # what a killed process left under this name
        with _reported(folder, "cannot be made"):
            folder.mkdir(parents=True)

    def look() -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not there; FSDP needs a folder that all nodes share")

    def save() -> None:
        with _reported(folder, "could not be saved"):
            dcp.save(_states(model, optimizer), checkpoint_id=folder)
            sync_folder(folder)

    def names_of_files() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    def digests_of_own() -> dict[str, str]:
        own = names[ranks.rank :: ranks.size]  # each reads some
        return {name: _digest(folder / name) for name in own}

    ranks.first(make)
    ranks.each(look)  # before the ranks meet in `dcp.save`, where one that fails would be missed
    ranks.each(save)
    names = ranks.first(names_of_files)
    digests = ranks.gather(ranks.each(digests_of_own))
    return {"folder": folder.name, "files": dict(ChainMap(*digests))}


def load_shards(
    out: Path, shards: dict, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> None:
    """Read into a model and its optimizer, sharded in any way or not, what `save_shards` wrote.

    `shards` is what it returned, and `out` where the folder is. Every byte is checked first, and no
    code in such files is run: they may hold tensors and plain data. Raises `CheckpointError` on
    every rank if a file is missing, altered, or of another model, or asks for anything else.
    """

    def compare() -> None:
        own = sorted(shards["files"])[ranks.rank :: ranks.size]
        for name in own:
            path = folder / name
            if not path.exists():
                raise CheckpointError(f"{path}: missing")
            if _digest(path) != shards["files"][name]:
                raise CheckpointError(f"{path}: altered since it was saved")

    def load() -> None:
        states = _states(model, optimizer)
        with _reported(folder, "does not fit this run"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: right
            dcp.load(states, storage_reader=_DataReader(folder), planner=_DataPlanner())
            state_dict.set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
            )

    for name in (shards["folder"], *shards["files"]):
        if name in (".", "..") or Path(name).name != name:
            raise CheckpointError(f"{out}: its shards are said to be in {name!r}, elsewhere")
    folder = out / shards["folder"]
    ranks.each(compare)
    ranks.each(load)


def load_whole(
    model_state: dict, optimizer_state: dict, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the state dicts of a model and an optimizer that were not sharded into ones that are."""
    # An optimizer numbers its parameters; `set_state_dict` wants their names.
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    state = {names[number]: value for number, value in optimizer_state["state"].items()}
    (group,) = optimizer_state["param_groups"]  # a run has one
    group_by_name = group | {"params": names}
    state_dict.set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict={"state": state, "param_groups": [group_by_name]},
        options=state_dict.StateDictOptions(full_state_dict=True),
    )


_METADATA_NAMES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
# What torch writes into the description of the shards, besides dtypes.
_DESCRIPTION_GLOBALS = {(metadata.__name__, name) for name in _METADATA_NAMES} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # from Python 3.13 on
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "WindowsPath"),
}


def _memory_format(kind: type, name: str) -> metadata._MEM_FORMAT_ENCODING:
    """A member of the one enum in a description, which Python before 3.11.4 pickles by getattr."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}")
    return metadata._MEM_FORMAT_ENCODING[name]


class _DataUnpickler(pickle.Unpickler):
    """Reads the description of the shards, and refuses whatever it does not need."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names, if it is on the list or a dtype."""
        if (module, name) in _DESCRIPTION_GLOBALS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module == "torch":
            dtype = vars(torch).get(name)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class _DataReader(dcp.FileSystemReader):
    """Reads shards without running code of theirs, where torch's own reader unpickles anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The description of the shards."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            description = _DataUnpickler(file).load()
        if getattr(description, "storage_meta", None) is None:
            description.storage_meta = metadata.StorageMeta()
        description.storage_meta.load_id = self.load_id
        return description


class _DataPlanner(dcp.DefaultLoadPlanner):
    """Puts plain data, such as a learning rate, into the states, where torch's unpickles it."""

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        """Put what a shard has of one thing that is not a tensor into its place."""
        content = torch.load(value, weights_only=True)
        clean = io.BytesIO()
        torch.save(content, clean)  # which the planner of torch may unpickle
        clean.seek(0)
        super().load_bytes(read_item, clean)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _digest(path: Path) -> str:
    with _reported(path, "cannot be read"), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _reported(path: Path, problem: str) -> Iterator[None]:
    """Turn what goes wrong with a file, or inside torch on any rank, into a `CheckpointError`."""
    prefix = ""
    try:
        yield
        return
    except CheckpointException as failed:  # is no Exception; holds those of the ranks
        rank, (error, _) = min(failed.failures.items())
        prefix = f"rank {rank}: "
    except Exception as failed:  # a damaged pickle may raise anything
        error = failed
    if is_lost(error):  # which `join` reports better
        raise error
    reason = getattr(error, "strerror", None) or first_line(error)
    raise CheckpointError(f"{path}: {problem} ({prefix}{reason})") from error

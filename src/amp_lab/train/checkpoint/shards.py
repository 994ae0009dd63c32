"""Sharded checkpoints: a folder into which every rank writes its shards of model and optimizer."""

import contextlib
import hashlib
import io
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

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
    """Write model and optimizer into a new folder, in which every rank saves its shards.

    Returns {"folder": its name, "files": {file name: SHA-256}}. The caller saves this in the
    checkpoint, for `load_shards`. All nodes must share the folder, and all ranks call this
    together. Raises `CheckpointError` on every rank if one cannot write.
    """

    def create() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # a killed process may have left one
        with _checkpoint_errors(folder, "cannot be created"):
            folder.mkdir(parents=True)

    def require_folder() -> None:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} does not exist on this node; FSDP needs a folder that all nodes share"
            )

    def save() -> None:
        with _checkpoint_errors(folder, "could not be saved"):
            dcp.save(_states(model, optimizer), checkpoint_id=folder)
            sync_folder(folder)

    def list_files() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    # `first` runs a function on rank 0, `each` on every rank. If one fails, all ranks raise.
    ranks.first(create)
    # Before `dcp.save`, in which the other ranks would wait for one that has failed.
    ranks.each(require_folder)
    ranks.each(save)
    names = ranks.first(list_files)
    share = names[ranks.rank :: ranks.size]  # the files that this rank reads
    digests = ranks.each(lambda: {name: _digest(folder / name) for name in share})
    all_digests: dict[str, str] = {}
    for digests_of_rank in ranks.gather(digests):
        all_digests |= digests_of_rank
    return {"folder": folder.name, "files": all_digests}


def load_shards(
    out: Path, shards: dict, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> None:
    """Load the shards that `save_shards` wrote into a model and its optimizer.

    `shards` is the result of `save_shards`, and `out` the parent of its folder. The model may be
    sharded over any number of ranks, or not sharded. The checksums are compared first. The files
    may contain only tensors and plain data, so none of their code is run. Raises `CheckpointError`
    on every rank if a file is missing, altered, from another model, or has other content.
    """
    for name in (shards["folder"], *shards["files"]):
        # A checkpoint may come from anyone: it must not make us read outside of its folder.
        if name in (".", "..") or Path(name).name != name:
            raise CheckpointError(
                f"{out}: the checkpoint names {name!r}, outside this folder, for its shards"
            )
    folder = out / shards["folder"]
    share = sorted(shards["files"])[ranks.rank :: ranks.size]  # the files that this rank compares

    def compare_digests() -> None:
        for name in share:
            path = folder / name
            if not path.exists():
                raise CheckpointError(f"{path}: missing")
            if _digest(path) != shards["files"][name]:
                raise CheckpointError(f"{path}: changed after it was saved")

    def load() -> None:
        states = _states(model, optimizer)
        with _checkpoint_errors(folder, "does not fit this run"), warnings.catch_warnings():
            # torch warns if there is one process alone, such as that of an export.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(states, storage_reader=_SafeReader(folder), planner=_SafePlanner())
            state_dict.set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
            )

    ranks.each(compare_digests)
    ranks.each(load)


def load_unsharded(
    model_state: dict, optimizer_state: dict, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the state dicts of an unsharded model and its optimizer into sharded ones."""
    # A state dict of an optimizer numbers the parameters; `set_state_dict` expects their names.
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    state = {names[number]: value for number, value in optimizer_state["state"].items()}
    (group,) = optimizer_state["param_groups"]  # the optimizer of a run has one
    named_group = group | {"params": names}
    state_dict.set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict={"state": state, "param_groups": [named_group]},
        options=state_dict.StateDictOptions(full_state_dict=True),
    )


_METADATA_NAMES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
# (module, name) of the classes and functions in torch's file .metadata, except dtypes.
_METADATA_GLOBALS = {(metadata.__name__, name) for name in _METADATA_NAMES} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # from Python 3.13 on
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "WindowsPath"),
}
_NOT_ALLOWED = "which is not allowed in this file"


def _getattr_of_memory_format(owner: type, name: str) -> metadata._MEM_FORMAT_ENCODING:
    """Stands for `getattr` in a pickle: Python before 3.11.4 pickles members of an enum with it.

    It works for the only enum in torch's .metadata, and raises `UnpicklingError` for other classes.
    """
    if owner is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f".metadata would load {name!r} of {owner!r}, {_NOT_ALLOWED}")
    return metadata._MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles torch's .metadata, and refuses a pickle that refers to anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function that a pickle refers to, if it is allowed; or a dtype."""
        if (module, name) in _METADATA_GLOBALS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _getattr_of_memory_format
        if module == "torch":
            dtype = vars(torch).get(name)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise pickle.UnpicklingError(f".metadata would load {module}.{name}, {_NOT_ALLOWED}")


class _SafeReader(dcp.FileSystemReader):
    """Reads shards without running code in them; torch's reader would unpickle any .metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Read .metadata, which describes the shards; otherwise as torch's reader does."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            description = _MetadataUnpickler(file).load()
        if getattr(description, "storage_meta", None) is None:
            description.storage_meta = metadata.StorageMeta()
        description.storage_meta.load_id = self.load_id
        return description


class _SafePlanner(dcp.DefaultLoadPlanner):
    """Loads values that are no tensors, such as a learning rate; torch's would unpickle any."""

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        """Check that the pickled value is plain data, then let torch's planner load it."""
        content = torch.load(value, weights_only=True)
        # Saved again, since torch's planner reads it with an unrestricted `torch.load`.
        checked = io.BytesIO()
        torch.save(content, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """The state dicts under "model" and "optimizer": parameters by name, sharded as they are."""
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with _checkpoint_errors(path, "cannot be read"), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _checkpoint_errors(path: Path, problem: str) -> Iterator[None]:
    """Turn an error in the block, or inside torch on any rank, into a `CheckpointError`.

    Its message is ``path: problem (reason)``. The error of a lost process stays as it is.
    """
    try:
        yield
    # torch collects the errors of all ranks in this one, which is no `Exception`.
    except CheckpointException as collected:
        rank = min(collected.failures)
        error, _traceback = collected.failures[rank]
        _raise_checkpoint_error(error, f"{path}: {problem}", f"rank {rank}: ")
    except Exception as error:  # a damaged pickle may raise anything
        _raise_checkpoint_error(error, f"{path}: {problem}")


def _raise_checkpoint_error(error: BaseException, problem: str, prefix: str = "") -> NoReturn:
    """Raise a `CheckpointError` in place of `error`, or `error` itself if a process was lost.

    The message is ``problem (reason)``, with `prefix` before the reason.
    """
    if is_lost(error):  # `join` reports a lost process better
        raise error
    reason = getattr(error, "strerror", None) or first_line(error)
    raise CheckpointError(f"{problem} ({prefix}{reason})") from error

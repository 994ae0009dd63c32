"""Checkpoints that are whole or not there: atomic save, checked load."""

import hashlib
import io
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch

from amp_lab.errors import CheckpointError
from amp_lab.files import open_regular, save

# A checkpoint is an ordinary file of `torch.save`, which is a zip archive, whose comment (its very
# last bytes) holds the format's version and the SHA-256 of all that stands before it. So plain
# `torch.load` reads it too, a file that ends early has no comment, and a changed byte shows.
VERSION = 1
_COMMENT = b"amp-lab checkpoint %d sha256 %s"
_COMMENT_BYTES = len(_COMMENT % (VERSION, b"0" * 64))
_ZIP = b"PK\x03\x04"  # its first bytes
_LAST_BYTES = 65_557  # its end's record, and the longest comment there can be
_PIECE_BYTES = 2**20
_WRITTEN = re.compile(rb"amp-lab checkpoint (\d+) sha256 ([0-9a-f]{64})")


def save_checkpoint(path: str | os.PathLike, **state) -> None:
    """Write `state` to `path`, so that at any moment the old file or the new one is there, whole.

    A value with a `state_dict` (a model, an optimizer, a `GradScaler`) is saved as its state dict;
    the rest must be tensors, numbers, strings, None, and dicts, lists and tuples of those.

    Raises `CheckpointError` if it cannot be written (a full disk, no such folder, no permission),
    and leaves what was under `path` as it was; `TypeError` for a value that could not be read back.
    """
    states = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}
    buffer = io.BytesIO()  # a write that fails half-way inside torch.save would lose the reason
    torch.save(states, buffer)
    buffer.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise TypeError(f"save_checkpoint: could not be read back safely: {', '.join(unsafe)}")
    archive = buffer.getbuffer()
    checksum = hashlib.sha256(archive[:-2]).hexdigest().encode()
    comment = _COMMENT % (VERSION, checksum)
    # The last two bytes of the archive are the length of the comment: 0.
    parts = [archive[:-2], len(comment).to_bytes(2, "little"), comment]
    save(Path(path), parts, CheckpointError)


def load_checkpoint(path: str | os.PathLike) -> dict:
    """The state that `save_checkpoint` wrote, with its tensors on the CPU.

    Every byte is checked before anything is unpickled, and then with `weights_only=True`. Raises
    `CheckpointError` for a file that is missing, truncated, altered, or of another kind or version.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            _check(path, file)
            state = _unpickled(path, file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds no state, but a value of {type(state).__name__}")
    return state


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a file ends as one that `save_checkpoint` wrote, whatever stands before."""
    path = Path(path)
    if path.is_symlink() or not path.is_file() or path.stat().st_size < _COMMENT_BYTES:
        return False
    with open(path, "rb") as file:
        file.seek(-_COMMENT_BYTES, os.SEEK_END)
        return _WRITTEN.fullmatch(file.read()) is not None


def _check(path: Path, file: BinaryIO) -> None:
    """Raise `CheckpointError` unless a file is whole; it is read piece by piece, its end first."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LAST_BYTES))
    last = file.read(_LAST_BYTES)
    written = _WRITTEN.fullmatch(last[-_COMMENT_BYTES:])
    if written is None:
        file.seek(0)
        raise CheckpointError(f"{path}: {_what_else(file.read(len(_ZIP)), last)}")
    version, checksum = int(written[1]), written[2].decode()
    if version != VERSION:
        source = f"{'an older' if version < VERSION else 'a newer'} amp_lab, in format {version}"
        raise CheckpointError(f"{path}: written by {source}; this one reads {VERSION}")
    length = last[:-_COMMENT_BYTES][-2:]
    is_whole = length == _COMMENT_BYTES.to_bytes(2, "little")
    if not is_whole or _digest(file, size - 2 - _COMMENT_BYTES) != checksum:
        raise CheckpointError(f"{path}: altered since it was saved: its checksum does not fit")


def _digest(file: BinaryIO, count: int) -> str:
    """The SHA-256 of the first so many bytes of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    file.seek(0)
    for done in range(0, count, _PIECE_BYTES):
        digest.update(file.read(min(_PIECE_BYTES, count - done)))
    return digest.hexdigest()


def _unpickled(path: Path, file: BinaryIO) -> Any:
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise CheckpointError(f"{path}: does not fit into memory") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path}: not of amp_lab, though its checksum fits") from error


def _what_else(first: bytes, last: bytes) -> str:
    if not first:
        return "empty"
    if first != _ZIP:
        return "not a checkpoint"
    if b"PK\x05\x06" in last:  # the end's record
        return "not a checkpoint of amp_lab, or its last bytes were altered"
    return "truncated: its end is missing"

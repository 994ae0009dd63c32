"""Checkpoint files: saved atomically, and loaded only if their checksum is right."""

import hashlib
import io
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch

from amp_lab.core.errors import CheckpointError
from amp_lab.core.files import open_regular, save

# A checkpoint is a file of `torch.save`, so `torch.load` reads it too. Such a file is a zip
# archive, which ends with the length of a comment (2 bytes) and the comment. The comment of a
# checkpoint has the version of the format, and the SHA-256 of all bytes before that length. A file
# that is cut off has no comment, and a changed byte changes the checksum.
VERSION = 1
_COMMENT = b"amp-lab checkpoint %d sha256 %s"
_COMMENT_BYTES = len(_COMMENT % (VERSION, b"0" * 64))
_ZIP_START = b"PK\x03\x04"  # the first bytes of a zip archive
_END_RECORD = b"PK\x05\x06"  # the first bytes of its last record, which the comment belongs to
_TAIL_BYTES = 65_557  # the last record (22) with the longest comment that it can have (65,535)
_CHUNK_BYTES = 2**20
_COMMENT_PATTERN = re.compile(rb"amp-lab checkpoint (\d+) sha256 ([0-9a-f]{64})")


def save_checkpoint(path: str | os.PathLike, **state) -> None:
    """Save a checkpoint atomically: at any time, either the old file or the new one is complete.

    Args:
        path: The file to write. `torch.load` can read it too.
        **state: The values by name. A value with a `state_dict`, such as a model, is saved as its
            state dict. Other values must be tensors, numbers, strings, None, or dicts, lists and
            tuples of these.

    Raises:
        CheckpointError: If the file cannot be written. An older file stays unchanged.
        TypeError: If a value has a type that cannot be loaded.

    Example:
        model = nn.Linear(4, 2)
        save_checkpoint("model.ckpt", model=model, epoch=3)
        model.load_state_dict(load_checkpoint("model.ckpt")["model"])
    """
    states = {}
    for name, value in state.items():
        has_state = hasattr(value, "state_dict")
        states[name] = value.state_dict() if has_state else value
    # Not straight to the file: if a write fails inside `torch.save`, its error hides the reason.
    buffer = io.BytesIO()
    torch.save(states, buffer)
    buffer.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise TypeError(f"save_checkpoint cannot save these types safely: {', '.join(unsafe)}")
    archive = buffer.getbuffer()[:-2]  # without the length of the comment, which is 0 here
    checksum = hashlib.sha256(archive).hexdigest()
    comment = _COMMENT % (VERSION, checksum.encode())
    comment_length = len(comment).to_bytes(2, "little")
    save(Path(path), [archive, comment_length, comment], CheckpointError)


def load_checkpoint(path: str | os.PathLike) -> dict:
    """Load a checkpoint that `save_checkpoint` wrote.

    Args:
        path: The file.

    Returns:
        The values by name, with tensors on the CPU.

    Raises:
        CheckpointError: If the file is missing, truncated, altered, of another version, or not a
            checkpoint.

    Source:
        `load_checkpoint` compares the SHA-256 checksum before it unpickles anything. Unpickling
        runs no code of the file (`weights_only=True`).

    Example:
        save_checkpoint("model.ckpt", epoch=3)
        print(load_checkpoint("model.ckpt")["epoch"])
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            _require_intact(path, file)
            state = _unpickle(path, file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(state, dict):
        type_name = type(state).__name__
        raise CheckpointError(f"{path}: contains a {type_name} instead of a dict of values")
    return state


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a file ends with the comment that `save_checkpoint` writes; the checksum is ignored.

    False for a symbolic link, and for a path with no file.
    """
    path = Path(path)
    if path.is_symlink() or not path.is_file():
        return False
    if path.stat().st_size < _COMMENT_BYTES:
        return False
    with open(path, "rb") as file:
        file.seek(-_COMMENT_BYTES, os.SEEK_END)
        return _COMMENT_PATTERN.fullmatch(file.read()) is not None


def _require_intact(path: Path, file: BinaryIO) -> None:
    """Raise `CheckpointError` unless the file is a checkpoint whose checksum is right."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read(_TAIL_BYTES)  # more than our comment, to describe a file that has none
    comment = _COMMENT_PATTERN.fullmatch(tail[-_COMMENT_BYTES:])
    if comment is None:
        file.seek(0)
        head = file.read(len(_ZIP_START))
        problem = _describe_foreign_file(head, tail)
        raise CheckpointError(f"{path}: {problem}")
    _require_version(path, int(comment[1]))
    checksum = comment[2].decode()
    before_comment = tail[:-_COMMENT_BYTES]
    has_right_length = before_comment.endswith(_COMMENT_BYTES.to_bytes(2, "little"))
    checked_bytes = size - 2 - _COMMENT_BYTES  # 2: the length of the comment
    if not has_right_length or _digest(file, checked_bytes) != checksum:
        raise CheckpointError(f"{path}: wrong checksum, so the file was changed after it was saved")


def _require_version(path: Path, version: int) -> None:
    """Raise `CheckpointError` for a file in another version of the format."""
    if version == VERSION:
        return
    age = "an older" if version < VERSION else "a newer"
    source = f"{age} amp_lab, in format {version}"
    raise CheckpointError(f"{path}: written by {source}; this version reads format {VERSION}")


def _digest(file: BinaryIO, count: int) -> str:
    """The SHA-256 of the first `count` bytes of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    file.seek(0)
    for start in range(0, count, _CHUNK_BYTES):
        chunk_bytes = min(_CHUNK_BYTES, count - start)
        digest.update(file.read(chunk_bytes))
    return digest.hexdigest()


def _unpickle(path: Path, file: BinaryIO) -> Any:
    """The value in a file of `torch.save`, tensors on the CPU; `CheckpointError` if that fails."""
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise CheckpointError(f"{path}: does not fit into memory") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"{path}: right checksum, but amp_lab did not write the content"
        ) from error


def _describe_foreign_file(head: bytes, tail: bytes) -> str:
    """What is wrong with a file that does not end with our comment, by its first and last bytes."""
    if not head:
        return "empty"
    if head != _ZIP_START:
        return "not a checkpoint"
    if _END_RECORD in tail:
        return "not a checkpoint of amp_lab, or the last bytes of the file were changed"
    return "truncated: the end of the file is missing"

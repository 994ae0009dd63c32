"""Checkpoints that are whole or not there: atomic save, checked load."""

import hashlib
import io
import os
import pickle
import re
from pathlib import Path

import torch

from amp_lab.errors import CheckpointError
from amp_lab.files import read_regular, save

# A checkpoint is an ordinary file of `torch.save`, which is a zip archive, whose comment (its very
# last bytes) holds the format's version and the SHA-256 of all that stands before it. So plain
# `torch.load` reads it too, a file that ends early has no comment, and a changed byte shows.
VERSION = 1
_COMMENT = b"amp-lab checkpoint %d sha256 %s"
_COMMENT_BYTES = len(_COMMENT % (VERSION, b"0" * 64))
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
        content = read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    archive, comment = content[:-_COMMENT_BYTES], content[-_COMMENT_BYTES:]
    written = _WRITTEN.fullmatch(comment)
    if written is None:
        raise CheckpointError(f"{path}: {_what_else(content)}")
    version, checksum = int(written[1]), written[2].decode()
    if version != VERSION:
        source = f"{'an older' if version < VERSION else 'a newer'} amp_lab, in format {version}"
        raise CheckpointError(f"{path}: written by {source}; this one reads {VERSION}")
    is_whole = archive[-2:] == len(comment).to_bytes(2, "little")
    if not is_whole or hashlib.sha256(archive[:-2]).hexdigest() != checksum:
        raise CheckpointError(f"{path}: altered since it was saved: its checksum does not fit")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: not of amp_lab, though its checksum fits") from error
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


def _what_else(content: bytes) -> str:
    if not content:
        return "empty"
    if not content.startswith(b"PK\x03\x04"):
        return "not a checkpoint"
    if b"PK\x05\x06" in content[-65_557:]:  # the end's record, and the longest comment there can be
        return "not a checkpoint of amp_lab, or its last bytes were altered"
    return "truncated: its end is missing"

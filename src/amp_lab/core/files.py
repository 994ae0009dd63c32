"""Write files atomically, and read files of the user with care."""

import contextlib
import errno
import glob
import io
import json
import math
import os
import reprlib
import stat
import tempfile
import time
import types
import typing
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from amp_lab.core.errors import AmpLabError, OptionError

GENERATOR = "made by amp-lab"  # stands at the beginning of every picture and page of ours
_MAX_JSON_BYTES = 2**26
_PARTIAL = ".amp-lab-partial"  # the end of the name of a file that is being written
_ABANDONED_S = 3600.0  # a partial file of this age was left by a process that was killed


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[io.BufferedReader]:
    """The block in which a file is open, to read its bytes.

    Raises `OSError` if the file cannot be opened, or if it is a pipe or a device, which may never
    end.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def _open_without_waiting(name: str, flags: int) -> int:
    """The descriptor of a file. Opening a pipe would wait until somebody writes into it."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    """The bytes of a file.

    Raises `OSError` like `open_regular`, and for more bytes than `max_bytes` or memory.
    """
    with open_regular(path) as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
        try:
            return file.read()
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `OSError` as `read_regular`; `ValueError` if invalid."""
    text = read_regular(path, _MAX_JSON_BYTES)
    try:
        return json.loads(text, parse_constant=_number, parse_int=_number, parse_float=_number)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _number(text: str) -> int | float:
    """The number that JSON text such as ``1.5`` or ``NaN`` stands for.

    A whole number that fits into 64 bits is an int, any other number a float. Raises `ValueError`
    for NaN, infinity and what a float of 64 bits cannot hold; Python's parser would take them.
    """
    value = float(text)
    if not math.isfinite(value):
        if not text[-1].isdigit():  # NaN, Infinity or -Infinity
            raise ValueError(f"{text} is no number in JSON")
        raise ValueError(f"{text[:20]} does not fit into 64 bits")
    is_integer = text.lstrip("-").isdigit()
    if is_integer and abs(value) < 2**63:
        return int(text)
    return value


def require_types(record: Any) -> None:
    """Raise `TypeError` if a field of a dataclass has a value of another type than is declared.

    This is for values that were read from a file. A bool is no number here.
    """
    for name, kind in typing.get_type_hints(type(record)).items():
        value = getattr(record, name)
        if not _has_type(value, kind):
            declared = getattr(kind, "__name__", kind)
            raise TypeError(f"{name!r} is {reprlib.repr(value)}, but must be of type {declared}")


def _has_type(value: object, kind: Any) -> bool:
    """Whether a value has a type, which may be one such as ``list[float]`` or ``int | None``.

    Items of lists and values of dicts are checked too. An int is also a float; a bool is neither.
    """
    container = typing.get_origin(kind)  # list of ``list[float]``
    arguments = typing.get_args(kind)  # (float,)
    if container is types.UnionType:
        return any(_has_type(value, alternative) for alternative in arguments)
    if isinstance(value, (list, dict)):
        if type(value) is not container:
            return False
        items = value.values() if isinstance(value, dict) else value
        # The last argument: the only one of a list, the type of the values of a dict.
        return all(_has_type(item, arguments[-1]) for item in items)
    if container is not None:  # a list or dict is declared, and the value is neither
        return False
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    return isinstance(value, kind)


def atomic_write(
    path: Path, parts: Iterable[bytes | memoryview], like: os.stat_result | None = None
) -> None:
    """Write a file so that at any moment either the old file or the new one is complete.

    `parts` are the bytes, in pieces. They are written to a temporary file next to `path`, which is
    renamed to `path` only when it is safely on the disk. The file gets the owner and the mode of
    `like`, if given. Raises `OSError` if a step fails, or if `path` is a link, a device or
    something else that is not a file; an old file at `path` then stays unchanged.
    """
    require_writable(path)
    _remove_old_partials(path)
    # A name of its own, since another process may write the same file now.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
    try:
        with open(partial, "xb") as file:  # x: never through a link that somebody puts there
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if like is not None:
            _copy_owner_and_mode(partial, like)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):  # the error to report is the first one
            partial.unlink(missing_ok=True)
        raise
    with contextlib.suppress(PermissionError):  # a folder that may be written to, but not opened
        sync_folder(path.parent)


def _remove_old_partials(path: Path) -> None:
    """Remove the partial files of `path` that are older than an hour; no write takes that long.

    Processes that were killed have left them.
    """
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if time.time() - partial.lstat().st_mtime > _ABANDONED_S:
                partial.unlink()


def save(
    path: Path, parts: Iterable[bytes | memoryview], error: type[AmpLabError] = OptionError
) -> None:
    """Write a file like `atomic_write`; raises `error`, with the reason in a line, if it cannot."""
    try:
        atomic_write(path, parts)
    except OSError as os_error:
        raise error(f"{path}: cannot be written ({os_error.strerror})") from os_error


def require_writable(path: Path) -> None:
    """Raise `OSError` if `path` cannot be written, as far as this shows without writing.

    It cannot be written if it is something other than a regular file, or if its folder does not
    exist or does not let this process create files.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:  # a new file
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "the path exists and is not a regular file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def try_to_write(path: Path) -> None:
    """Raise `OSError` if `atomic_write` would; tries to open a temporary file in the folder.

    `require_writable` is not enough: /proc reports that files can be written there.
    """
    require_writable(path)
    tempfile.TemporaryFile(dir=path.parent).close()  # closing removes it


def _copy_owner_and_mode(path: Path, like: os.stat_result) -> None:
    """Give a file the owner and the mode in `like`."""
    # The owner first, since a new owner clears bits of the mode such as setuid.
    if os.name == "posix" and (os.geteuid(), os.getegid()) != (like.st_uid, like.st_gid):
        os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, stat.S_IMODE(like.st_mode))


def sync_folder(folder: Path) -> None:
    """Put a folder's entries, such as a new name, safely on the disk."""
    if os.name != "posix":  # where a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

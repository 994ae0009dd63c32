"""Files that are whole or not there."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file so that at any moment the old one or the new one is there, whole.

    It is written beside `path` under another name, and takes that name only when it is safely on
    the disk. Raises `OSError` if that fails, and leaves what was under `path` as it was.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            partial.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Put a folder's entries, such as a new name, safely on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

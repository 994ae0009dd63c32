"""The sources of Python's standard library, under the licence of the PSF."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from amp_lab.train.data.samples import DataSplits, LoadOptions
from amp_lab.train.data.text import load_text

# Folders of the standard library with programs or tests, or that not every Python has.
_SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "turtledemo"}


def load(options: LoadOptions) -> DataSplits:
    """Load the sources as a text, which need no folder. See `load_text`."""
    return load_text("stdlib", _read_modules(), options)


def _read_modules() -> Iterator[str]:
    """The source of each module of Python's standard library, without the folders `_SKIPPED`."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _SKIPPED.isdisjoint(parts):
            yield file.read_text(encoding="utf-8", errors="replace")

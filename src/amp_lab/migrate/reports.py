"""The results in formats for other tools: GitHub annotations, and a patch for git."""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    from amp_lab.migrate.files import Result
    from amp_lab.migrate.tree.rewriter import Finding

_LEVELS = {
    "mistake": "error",
    "rewritten": "warning",
    "by hand": "warning",
    "left": "notice",
    "note": "notice",
}
"""The level that GitHub gives to each kind of finding."""


def format_github(results: Iterable["Result"]) -> str:
    """Return a GitHub workflow command, on a line, for each finding and each error.

    GitHub shows each command as an annotation of the file.
    """
    lines = []
    for result in results:
        file = f"file={_escape(_relative(result.path), ',:')}"
        for finding in result.lines:
            # A line within a cell is not a line of the notebook's file, so it is only in the text.
            location = file
            if finding.cell is None:
                location = f"{file},line={finding.line}"
            level = _LEVELS[finding.kind]
            text = _escape(_describe(finding))
            lines.append(f"::{level} {location},title=amp-lab migrate::{text}\n")
        if result.error is not None:
            lines.append(f"::error {file},title=amp-lab migrate::{_escape(result.error)}\n")
    return "".join(lines)


def _escape(text: str, also: str = "") -> str:
    """Escape line ends, ``%`` and the characters in `also` for a workflow command.

    Each becomes its code after a ``%``: a newline becomes ``%0A``.
    """
    return re.sub(f"[%\r\n{also}]", lambda match: f"%{ord(match[0]):02X}", text)


def _describe(finding: "Finding") -> str:
    """A finding as one text: ``mistake: …``, in a notebook after ``cell 2, line 5:``."""
    text = f"{finding.kind}: {finding.message}"
    if finding.cell is None:
        return text
    return f"cell {finding.cell}, line {finding.line}: {text}"


def _relative(path: Path) -> str:
    """A path with ``/``, relative to the working directory if it is below that."""
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        relative = str(path)
    return relative.replace(os.sep, "/")


def make_patch(path: Path, old: bytes, new: bytes) -> bytes:
    """The patch, for `git apply` in the working directory, from a file's old content to its new.

    Raises `OptionError` for a file outside the working directory, or with a name that git quotes.
    """
    name = os.path.relpath(path).replace(os.sep, "/")
    is_outside = name.startswith("..")
    if is_outside or re.search(r"[\r\n\t\"\\]", name):
        raise OptionError("cannot be part of a patch: run the command in a folder above it")
    if " " in name:
        name += "\t"  # git reads a name up to a tab or, if there is none, to the first blank
    before = os.fsencode(f"a/{name}")
    after = os.fsencode(f"b/{name}")
    changes = difflib.diff_bytes(
        difflib.unified_diff, _lines_of(old), _lines_of(new), before, after
    )
    lines = []
    for line in changes:
        if not line.endswith(b"\n"):
            line += b"\n\\ No newline at end of file\n"
        lines.append(line)
    return b"".join(lines)


def _lines_of(text: bytes) -> list[bytes]:
    """The lines of a file with their newlines; a carriage return ends no line for git."""
    return re.findall(rb"[^\n]*\n|[^\n]+", text)

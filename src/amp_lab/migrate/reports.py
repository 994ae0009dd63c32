"""What was found, in the forms that other tools read: annotations of GitHub, SARIF, a patch."""

import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import amp_lab
from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    from amp_lab.migrate.files import Result
    from amp_lab.migrate.rewriter import Finding

_LEVELS = {  # how bad each kind is, as GitHub and as SARIF put it
    "mistake": ("error", "error"),
    "rewritten": ("warning", "warning"),
    "by hand": ("warning", "warning"),
    "left": ("notice", "none"),
    "note": ("notice", "note"),
}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def format_github(results: Iterable["Result"]) -> str:
    """A workflow command of GitHub's for each line, which it shows as an annotation there."""
    lines = []
    for result in results:
        file = f"file={_escape(_relative(result.path), ',:')}"
        for line in result.lines:
            # a line of a cell is none of the notebook's file
            where = file
            if line.cell is None:
                where = f"{file},line={line.line}"
            level, _ = _LEVELS[line.kind]
            text = _escape(_text(line))
            lines.append(f"::{level} {where},title=amp-lab migrate::{text}\n")
        if result.error is not None:
            lines.append(f"::error {file},title=amp-lab migrate::{_escape(result.error)}\n")
    return "".join(lines)


def _escape(text: str, also: str = "") -> str:
    """The text as a workflow command can hold it."""
    return re.sub(f"[%\r\n{also}]", lambda sign: f"%{ord(sign[0]):02X}", text)


def format_sarif(results: Iterable["Result"]) -> str:
    """A log in SARIF 2.1.0, which code scanning and editors read."""
    found = []
    errors = []
    for result in results:
        found += [_sarif_result(result.path, line) for line in result.lines]
        if result.error is not None:
            errors.append({"level": "error", "message": {"text": result.error}})
    rules = [{"id": kind.replace(" ", "-")} for kind in _LEVELS]
    driver = {"name": "amp-lab migrate", "version": amp_lab.__version__, "rules": rules}
    invocation = {"executionSuccessful": not errors, "toolExecutionNotifications": errors}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": found}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _sarif_result(path: Path, line: "Finding") -> dict:
    uri = quote(os.fsencode(_relative(path)))
    place: dict = {"artifactLocation": {"uri": uri}}
    if line.cell is None:
        place["region"] = {"startLine": line.line}
    _, level = _LEVELS[line.kind]
    return {
        "ruleId": line.kind.replace(" ", "-"),
        "level": level,
        "message": {"text": _text(line)},
        "locations": [{"physicalLocation": place}],
    }


def _text(line: "Finding") -> str:
    text = f"{line.kind}: {line.message}"
    if line.cell is None:
        return text
    return f"cell {line.cell}, line {line.line}: {text}"


def _relative(path: Path) -> str:
    """A path as it is seen from the folder where the command runs, if it lies below that."""
    seen = os.path.relpath(path)
    if seen.startswith(".."):
        seen = str(path)
    return seen.replace(os.sep, "/")


def patch(path: Path, old: bytes, new: bytes) -> bytes:
    """What `git apply` makes the new file of, in the folder where the command runs.

    Raises `OptionError` for a file that is not below it: git takes no such name.
    """
    name = os.path.relpath(path)
    if name.startswith("..") or re.search(r"[\r\n\t\"\\]", name.replace(os.sep, "/")):
        raise OptionError("cannot be named in a patch: run the command in a folder above it")
    name = name.replace(os.sep, "/")
    if " " in name:
        name += "\t"  # else it would end at its blank
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
    """Its lines with their ends, which are newlines alone: git knows no others."""
    return re.findall(rb"[^\n]*\n|[^\n]+", text)

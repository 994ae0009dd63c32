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
from amp_lab.errors import OptionError

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
            where = file if line.cell is not None else f"{file},line={line.line}"
            text = _escape(_text(line))
            lines.append(f"::{_LEVELS[line.kind][0]} {where},title=amp-lab migrate::{text}\n")
        if result.error is not None:
            lines.append(f"::error {file},title=amp-lab migrate::{_escape(result.error)}\n")
    return "".join(lines)


def _escape(text: str, also: str = "") -> str:
    """The text as a workflow command can hold it."""
    return re.sub(f"[%\r\n{also}]", lambda sign: f"%{ord(sign[0]):02X}", text)


def format_sarif(results: Iterable["Result"]) -> str:
    """A log in SARIF 2.1.0, which code scanning and editors read."""
    results = list(results)
    found = [_sarif_result(result.path, line) for result in results for line in result.lines]
    errors = [result.error for result in results if result.error is not None]
    rules = [{"id": kind.replace(" ", "-")} for kind in _LEVELS]
    driver = {"name": "amp-lab migrate", "version": amp_lab.__version__, "rules": rules}
    told = [{"level": "error", "message": {"text": error}} for error in errors]
    ran = {"executionSuccessful": not errors, "toolExecutionNotifications": told}
    run = {"tool": {"driver": driver}, "invocations": [ran], "results": found}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _sarif_result(path: Path, line: "Finding") -> dict:
    place: dict = {"artifactLocation": {"uri": quote(os.fsencode(_relative(path)))}}
    if line.cell is None:
        place["region"] = {"startLine": line.line}
    return {
        "ruleId": line.kind.replace(" ", "-"),
        "level": _LEVELS[line.kind][1],
        "message": {"text": _text(line)},
        "locations": [{"physicalLocation": place}],
    }


def _text(line: "Finding") -> str:
    where = "" if line.cell is None else f"cell {line.cell}, line {line.line}: "
    return f"{where}{line.kind}: {line.message}"


def _relative(path: Path) -> str:
    """A path as it is seen from the folder where the command runs, if it lies below that."""
    relative = os.path.relpath(path)
    return (str(path) if relative.startswith("..") else relative).replace(os.sep, "/")


def patch(path: Path, old: bytes, new: bytes) -> bytes:
    """What `git apply` makes the new file of, in the folder where the command runs.

    Raises `OptionError` for a file that is not below it: git takes no such name.
    """
    name = os.path.relpath(path)
    if name.startswith("..") or re.search(r"[\r\n\t\"\\]", name.replace(os.sep, "/")):
        raise OptionError("cannot be named in a patch: run the command in a folder above it")
    name = name.replace(os.sep, "/") + "\t" * (" " in name)  # else it would end at its blank
    a, b = (os.fsencode(f"{side}/{name}") for side in "ab")
    before, after = (re.findall(rb"[^\n]*\n|[^\n]+", text) for text in (old, new))
    lines = difflib.diff_bytes(difflib.unified_diff, before, after, a, b)
    whole = (x if x.endswith(b"\n") else x + b"\n\\ No newline at end of file\n" for x in lines)
    return b"".join(whole)

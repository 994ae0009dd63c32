"""Python files and notebooks on the disk: read, migrated, shown as a diff, written back whole."""

import bisect
import concurrent.futures
import dataclasses
import difflib
import functools
import io
import json
import multiprocessing
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from amp_lab import files
from amp_lab.errors import OptionError, first_line
from amp_lab.migrate.magics import without_magics
from amp_lab.migrate.nesting import with_room_to_recurse
from amp_lab.migrate.reports import patch
from amp_lab.migrate.rewriter import Edit, Finding, apply
from amp_lab.migrate.rules import EVERYTHING, Wanted, edits_and_findings, is_triggered

MAX_BYTES = 1 << 19
"""Of Python in one file: for twice as much, the tree and its positions took 620 MB."""
_MOST_BYTES = 1 << 26
"""Of any file that is read: a notebook may be large by its pictures."""
_ENDINGS = (".py", ".pyi", ".pyw", ".ipynb")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")
_WORTH_PROCESSES = 60  # files; below it, starting a process takes longer than it saves


# The bytes of the new file, what is said of it, and a title, the old and the new text of each part.
_Migrated = tuple[bytes, list[Finding], list[tuple[str, str, str]]]


@dataclasses.dataclass
class Result:
    """What was found in a file, the `diff` to its migrated text, or the `error` that kept it.

    `skipped` says why a file is passed over that nobody asked for by name.
    """

    path: Path
    lines: list[Finding] = dataclasses.field(default_factory=list)
    diff: str = ""
    patch: bytes = b""  # what `git apply` takes, if it was wanted
    written: bool = False
    error: str | None = None
    skipped: str | None = None

    def __bool__(self) -> bool:
        return bool(self.lines or self.error or self.skipped)  # whether there is anything to say

    @property
    def to_do(self) -> list[Finding]:
        """The lines that are still to be changed, by this tool or by hand."""
        done = {"left", "note"} | ({"rewritten"} if self.written else set())
        return [line for line in self.lines if line.kind not in done]


def migrate_paths(
    paths: Iterable[str | Path], write: bool = False, wanted: Wanted = EVERYTHING
) -> Iterator[Result]:
    """Migrate files, and the Python files and notebooks in folders; yield those with something.

    Nothing is changed unless `write`; `wanted` says what is looked at. A file that cannot be done
    is yielded with its error, and left as it was.
    """
    found: list[Path] = []
    named = dict.fromkeys(map(Path, paths))
    below = {path: list(find(path)) for path in named}
    for path, files_below in below.items():
        if not files_below:
            yield Result(path, error=f"{path}: has no Python file and no notebook in it")
    for path in dict.fromkeys(path for files_below in below.values() for path in files_below):
        if path not in named and path.is_symlink():
            yield Result(path, skipped=f"{path}: is a link: passed over")
            continue
        try:
            if has_names(path):
                found.append(path)
        except OSError as error:
            yield Result(path, error=f"{path}: cannot be read: {error.strerror}")
    migrate = functools.partial(migrate_file, write=write, wanted=wanted)
    processes = min(os.cpu_count() or 1, 4)  # more would wait for the disk
    if len(found) < _WORTH_PROCESSES or processes == 1:
        yield from filter(None, map(migrate, found))
        return
    with concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        yield from filter(None, pool.map(migrate, found, chunksize=8))


def find(path: Path) -> Iterator[Path]:
    """The file given, or those below the folder given that may hold Python."""
    if not path.is_dir():
        yield path
        return
    broken: list[OSError] = []
    for folder, below, names in os.walk(path, onerror=broken.append):
        # os.walk goes into what is left
        below[:] = sorted(name for name in below if not _is_skipped(Path(folder, name)))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(_ENDINGS))
        yield from (link for name in below if (link := Path(folder, name)).is_symlink())
    yield from (Path(error.filename) for error in broken)  # to read them will tell why


def _is_skipped(folder: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _SKIPPED_FOLDERS or os.path.exists(folder / "pyvenv.cfg")


def has_names(path: Path) -> bool:
    """Whether a file has any text that triggers a rule; most files are only read."""
    if path.is_fifo():  # nothing to be told of: it is no file of code
        return False
    return is_triggered(files.read_regular(path, _MOST_BYTES))


def migrate_file(path: Path, write: bool = False, wanted: Wanted = EVERYTHING) -> Result:
    """Migrate one file; the result holds the error if that cannot be done."""
    try:
        return _migrate(path, write, wanted)
    except cst.ParserSyntaxError as error:
        why = f"line {error.raw_line} does not parse as Python"
    except (OptionError, OSError) as error:
        why = getattr(error, "strerror", None) or error
    except ValueError as error:
        why = f"cannot be migrated: {error}"
    return Result(path, error=f"{path}: {why}; left as it was")


def _migrate(path: Path, write: bool, wanted: Wanted) -> Result:
    if path.is_symlink():
        raise OptionError("is a link: give the file itself")
    status = path.stat()
    data = files.read_regular(path, _MOST_BYTES)
    migrate = _migrate_notebook if path.suffix == ".ipynb" else _migrate_python
    new, lines, before_and_after = migrate(data, wanted)
    result = Result(path, lines)
    if new == data:
        return result
    result.diff = "".join(_diff(f"{path}{part}", old, now) for part, old, now in before_and_after)
    result.patch = patch(path, data, new) if wanted.patch else b""
    if write:
        _write(path, data, new, status)
        result.written = True
    return result


def _write(path: Path, old: bytes, new: bytes, status: os.stat_result) -> None:
    if not status.st_mode & stat.S_IWUSR or not os.access(path, os.W_OK):
        raise OptionError("is read-only")
    if status.st_nlink > 1:  # to replace the file would part it from its other names
        raise OptionError(f"has {status.st_nlink} names (hard links): copy it first")
    if path.read_bytes() != old:  # an editor may have saved it since
        raise OptionError("was changed meanwhile")
    files.write_whole(path, [new], like=status)


def _diff(name: str, old: str, new: str) -> str:
    ends = re.compile(r"\r\n?")
    before, after = (ends.sub("\n", text).removesuffix("\n").split("\n") for text in (old, new))
    diff = difflib.unified_diff(before, after, name, name, lineterm="")
    return "".join(f"{line}\n" for line in diff)


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise OptionError(f"has {size / 2**20:.1f} MiB of Python, and 0.5 is the most: split it")


# Python.


def _migrate_python(data: bytes, wanted: Wanted) -> _Migrated:
    _check_size(len(data))
    if b"\0" in data:
        raise OptionError("has a null byte, so it is no Python")
    try:
        lines_of = io.BytesIO(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        encoding, _ = tokenize.detect_encoding(lines_of.readline)
        text = data.decode(encoding)
    except LookupError as error:  # rot13, hex and the like are no encodings of text
        raise OptionError(f"its encoding is wrong: {first_line(error)}") from error
    except SyntaxError as error:  # an encoding that is not there, or a first line that breaks it
        raise OptionError(f"its encoding is wrong: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OptionError(f"line {line} is not {error.encoding}") from error
    if text.encode(encoding) != data:  # some encodings have two ways to write a character
        raise OptionError(f"its {encoding} cannot be written back as it was")
    edits, findings = edits_and_findings(text, wanted)
    new = apply(text, edits)
    return new.encode(encoding), findings, [("", text, new)]


# Notebooks.


_STRING = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?')  # a JSON string; a colon follows a key


class _Cell(NamedTuple):
    number: int  # from 1, among all cells
    text: str
    start: int  # where its text starts in the text of all code cells
    spans: list[slice]
    """Where in the JSON text each piece of its source starts and ends, without quotes."""


def _migrate_notebook(data: bytes, wanted: Wanted) -> _Migrated:
    text, cells = _read_notebook(data)
    for cell in cells:
        if "\0" in cell.text:
            raise OptionError(f"cell {cell.number} has a null byte, so it is no Python")
    # All cells are one program: a name that one imports is used in another.
    code = "".join(without_magics(cell.text) + "\n" for cell in cells)
    if not is_triggered(code.encode()):
        return data, [], []
    _check_size(len(code))
    try:
        edits, findings = edits_and_findings(code, wanted)
    except cst.ParserSyntaxError as error:
        raise OptionError(_why_no_python(cells)) from error
    line_of = [code.count("\n", 0, cell.start) for cell in cells]
    lines = []
    for finding in findings:
        at = bisect.bisect_left(line_of, finding.line) - 1
        lines.append(finding._replace(line=finding.line - line_of[at], cell=cells[at].number))
    raw_edits, changes = [], []
    edits = sorted(edits, key=lambda edit: edit.start)
    for cell in cells:
        end = cell.start + len(cell.text)
        first = bisect.bisect_left(edits, cell.start, key=lambda edit: edit.start)
        last = bisect.bisect_right(edits, end, key=lambda edit: edit.start)
        own = [
            Edit(edit.start - cell.start, min(edit.end, end) - cell.start, edit.text)
            for edit in edits[first:last]
        ]
        new = apply(cell.text, own)
        if new != cell.text:
            raw_edits.append(_in_json(text, cell, new))
            changes.append((f" (cell {cell.number})", cell.text, new))
    return apply(text, raw_edits).encode(), lines, changes


def _read_notebook(data: bytes) -> tuple[str, list[_Cell]]:
    """The text of a notebook, and its code cells. Raises `OptionError`."""
    try:
        text = data.decode()
        # The same notebook, with the place of each string in its stead, finds the sources in the
        # text: written anew as a whole, it would get other blanks and escapes.
        places = _STRING.sub(lambda m: m[0] if m[2] else f'"{m.start(1)} {m.end(1)}"', text)
        return text, _code_cells(json.loads(text), json.loads(places))
    except UnicodeDecodeError as error:
        raise OptionError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        why = error.msg.lower().removesuffix(" at").removesuffix(" starting")
        raise OptionError(f"is no whole notebook: line {error.lineno}, {why}") from error
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise OptionError("is JSON, but no notebook") from error


def _code_cells(notebook: dict, places: dict) -> list[_Cell]:
    """The code cells with something in them; none if the notebook is in another language."""
    metadata = notebook["metadata"]
    kernel, info = metadata.get("kernelspec", {}), metadata.get("language_info", {})
    language = kernel.get("language") or info.get("name")
    if language is not None and language.lower() not in ("python", "ipython"):
        return []
    cells, start = [], 0
    # numbered as people count them, with the text cells
    pairs = zip(notebook["cells"], places["cells"], strict=True)
    for number, (cell, place) in enumerate(pairs, 1):
        if cell["cell_type"] != "code":
            continue
        text = "".join(cell["source"])  # a TypeError if a line of it is no text
        pieces = [place["source"]] if isinstance(place["source"], str) else place["source"]
        spans = [slice(*map(int, piece.split())) for piece in pieces]
        cells.append(_Cell(number, text, start, spans))
        start += len(text) + 1
    return cells


def _why_no_python(cells: list[_Cell]) -> str:
    for cell in cells:
        try:
            with_room_to_recurse(cst.parse_module, without_magics(cell.text))
        except cst.ParserSyntaxError as error:
            return f"cell {cell.number}:{error.raw_line} does not parse as Python"
    return "its cells do not parse together as Python"


def _in_json(text: str, cell: _Cell, new: str) -> Edit:
    """An edit of the JSON text that puts a new source into a cell, and leaves each old line."""
    raw = "".join(text[span] for span in cell.spans)
    raw_lines = re.findall(r"(?:[^\\]|\\[^n])*\\n|(?:[^\\]|\\[^n])+", raw)
    old_lines, new_lines = (re.findall(r"[^\n]*\n|[^\n]+", source) for source in (cell.text, new))
    same = dict(zip(old_lines, raw_lines, strict=True))
    is_ascii = text.isascii()
    lines = [same.get(x) or json.dumps(x, ensure_ascii=is_ascii)[1:-1] for x in new_lines]
    start, end = cell.spans[0].start, cell.spans[-1].stop
    before = text[: start - 1].rstrip()
    # In a list, the blanks after its bracket separate each line from the next one too.
    separator = f'",{text[len(before) : start - 1]}"' if before.endswith("[") else ""
    return Edit(start, end, separator.join(lines))

"""Migrates Python files and notebooks on the disk: reads them, makes diffs, and writes them."""

import bisect
import dataclasses
import difflib
import io
import itertools
import json
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from amp_lab.core import files
from amp_lab.core.errors import OptionError, first_line
from amp_lab.migrate.magics import without_magics
from amp_lab.migrate.reports import patch
from amp_lab.migrate.rules import EVERYTHING, Wanted, edits_and_findings, triggered_rules
from amp_lab.migrate.tree.nesting import with_room_to_recurse
from amp_lab.migrate.tree.rewriter import Edit, Finding, apply

MAX_BYTES = 1 << 19
"""The largest size of Python code in one file; at twice this size, the tree took 620 MB."""
_MAX_FILE_BYTES = 1 << 26
"""The largest file that is read: a notebook may be large because of its pictures."""
_SUFFIXES = (".py", ".pyi", ".pyw", ".ipynb")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")


class _Change(NamedTuple):
    """The text of a file, or of a cell of a notebook, before and after."""

    title: str
    """The text after the path in the diff: `` (cell 2)``, or empty for a file."""
    old: str
    new: str


class _Migration(NamedTuple):
    """A migrated file, before it is written."""

    data: bytes
    findings: list[Finding]
    changes: list[_Change]


@dataclasses.dataclass
class Result:
    """The outcome for one file: its findings, or an error; false if there is nothing to report."""

    path: Path
    lines: list[Finding] = dataclasses.field(default_factory=list)
    """The findings, each of which is a line of the report."""
    diff: str = ""
    """The diff to the migrated text; empty if that is the same."""
    patch: bytes = b""
    """A patch for `git apply`, if `Wanted.patch` asks for it."""
    written: bool = False
    """Whether the migrated text was written to the file."""
    error: str | None = None
    """The reason why the file was not migrated."""
    skipped: str | None = None
    """The reason why a file in a folder, such as a link, was not read."""

    def __bool__(self) -> bool:
        return bool(self.lines or self.error or self.skipped)

    @property
    def to_do(self) -> list[Finding]:
        """The findings that still need a change, by this tool or by hand."""
        settled_kinds = {"left", "note"}
        if self.written:
            settled_kinds.add("rewritten")
        return [line for line in self.lines if line.kind not in settled_kinds]


def migrate_paths(
    paths: Iterable[str | Path], write: bool = False, wanted: Wanted = EVERYTHING
) -> Iterator[Result]:
    """Migrate files, and the Python files and notebooks in folders; yield the results.

    Files are changed only with `write`; `wanted` selects the rules. Files without a finding are
    left out. A file that cannot be migrated is not changed, and its result has the error.
    """
    named_paths = dict.fromkeys(map(Path, paths))  # a dict keeps the order
    files_by_path = {path: list(find(path)) for path in named_paths}
    for path, files_below in files_by_path.items():
        if not files_below:
            yield Result(path, error=f"{path}: contains no Python file and no notebook")
    for path in dict.fromkeys(itertools.chain.from_iterable(files_by_path.values())):
        # a link in a folder; one that is named itself is an error of `migrate_file`
        if path not in named_paths and path.is_symlink():
            yield Result(path, skipped=f"{path}: skipped, because it is a link")
            continue
        try:
            if not has_names(path):
                continue
        except OSError as error:
            yield Result(path, error=f"{path}: cannot be read: {error.strerror}")
            continue
        result = migrate_file(path, write, wanted)
        if result:  # a result with nothing to report is false
            yield result


def find(path: Path) -> Iterator[Path]:
    """Yield the Python files, notebooks and links to folders in a folder; for a file, itself.

    A folder that cannot be listed is yielded too: reading the folder raises the error to report.
    """
    if not path.is_dir():
        yield path
        return
    errors: list[OSError] = []
    for folder, subfolders, names in os.walk(path, onerror=errors.append):
        # os.walk goes only into the folders that remain in this list
        subfolders[:] = sorted(name for name in subfolders if not _is_skipped(Path(folder, name)))
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                yield Path(folder, name)
        for name in subfolders:
            subfolder = Path(folder, name)
            if subfolder.is_symlink():
                yield subfolder
    for error in errors:
        yield Path(error.filename)


def _is_skipped(folder: Path) -> bool:
    """Whether a folder is hidden, a virtual environment, or holds other people's packages."""
    name = folder.name
    if name.startswith(".") or name in _SKIPPED_FOLDERS:
        return True
    return os.path.exists(folder / "pyvenv.cfg")  # a virtual environment


def has_names(path: Path) -> bool:
    """Whether a file has a text that triggers a rule, so the file has to be parsed.

    False for a named pipe, which is not opened.
    """
    if path.is_fifo():  # to open one would wait for its other end
        return False
    return bool(triggered_rules(files.read_regular(path, _MAX_FILE_BYTES)))


def migrate_file(path: Path, write: bool = False, wanted: Wanted = EVERYTHING) -> Result:
    """Migrate one file, and write it with `write`; the result has the error if that fails."""
    try:
        return _migrate(path, write, wanted)
    except cst.ParserSyntaxError as error:
        reason = f"line {error.raw_line} does not parse as Python"
    except (OptionError, OSError) as error:
        # an OSError's own text would name the path once more
        reason = getattr(error, "strerror", None) or error
    except ValueError as error:
        reason = f"cannot be migrated: {error}"
    return Result(path, error=f"{path}: {reason}; not changed")


def _migrate(path: Path, write: bool, wanted: Wanted) -> Result:
    """Migrate one file. Raises the errors that `migrate_file` puts into its result."""
    if path.is_symlink():
        raise OptionError("is a link: give the file itself")
    status = path.stat()
    data = files.read_regular(path, _MAX_FILE_BYTES)
    migrate = _migrate_notebook if path.suffix == ".ipynb" else _migrate_python
    migration = migrate(data, wanted)
    result = Result(path, migration.findings)
    if migration.data == data:
        return result
    result.diff = "".join(_diff(path, change) for change in migration.changes)
    if wanted.patch:
        result.patch = patch(path, data, migration.data)
    if write:
        _write(path, data, migration.data, status)
        result.written = True
    return result


def _write(path: Path, old: bytes, new: bytes, status: os.stat_result) -> None:
    """Replace a file whose content is `old`; `status` is that of when it was read.

    Raises `OptionError` if it is read-only, has hard links, or has changed meanwhile.
    """
    is_writable = status.st_mode & stat.S_IWUSR and os.access(path, os.W_OK)
    if not is_writable:
        raise OptionError("is read-only")
    if status.st_nlink > 1:  # the new file would have only one of the names
        raise OptionError(f"has {status.st_nlink} names (hard links): copy it first")
    if path.read_bytes() != old:  # an editor may have saved it since
        raise OptionError("was changed in the meantime")
    files.atomic_write(path, [new], like=status)


def _diff(path: Path, change: _Change) -> str:
    """The unified diff of a change, with the path and the change's title in its header."""
    name = f"{path}{change.title}"
    lines = difflib.unified_diff(
        _lines_of(change.old), _lines_of(change.new), name, name, lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


def _lines_of(text: str) -> list[str]:
    """The lines of a text without their ends, which may be of any kind."""
    text = re.sub(r"\r\n?", "\n", text)
    return text.removesuffix("\n").split("\n")


def _check_size(size: int) -> None:
    """Raise `OptionError` for too much Python, in bytes or characters."""
    if size > MAX_BYTES:
        raise OptionError(f"has {size / 2**20:.1f} MiB of Python; the limit is 0.5 MiB: split it")


# Python.


def _migrate_python(data: bytes, wanted: Wanted) -> _Migration:
    """Migrate the bytes of a Python file. Raises `OptionError` if they are no Python."""
    _check_size(len(data))
    if b"\0" in data:
        raise OptionError("contains a null byte, so it is not Python")
    text, encoding = _decode(data)
    edits, findings = edits_and_findings(text, wanted)
    new = apply(text, edits)
    change = _Change(title="", old=text, new=new)
    return _Migration(new.encode(encoding), findings, [change])


def _decode(data: bytes) -> tuple[str, str]:
    """The text of a Python file, and its encoding such as ``utf-8``. Raises `OptionError`."""
    # detect_encoding reads two lines, and knows no \r as the end of one
    lines = io.BytesIO(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    try:
        encoding, _ = tokenize.detect_encoding(lines.readline)
        text = data.decode(encoding)
    except LookupError as error:  # rot13 and hex are codecs of Python, but no encodings of text
        raise OptionError(f"its encoding is wrong: {first_line(error)}") from error
    except SyntaxError as error:  # an unknown encoding, or a first line that is not in it
        raise OptionError(f"its encoding is wrong: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OptionError(f"line {line} is not {error.encoding}") from error
    if text.encode(encoding) != data:  # some encodings can write one character in two ways
        raise OptionError(f"its {encoding} text cannot be written back unchanged")
    return text, encoding


# Notebooks.


# A JSON string, such as "import torch\n"; group 1 without quotes, group 2 the colon after a key.
_STRING = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?')
_START = attrgetter("start")


class _Cell(NamedTuple):
    """A code cell of a notebook."""

    number: int
    """From 1, among all cells."""
    text: str
    start: int
    """The position of its text in the joined text of all code cells."""
    spans: list[slice]
    """The positions in the JSON text of the strings of its source, without quotes."""

    @property
    def end(self) -> int:
        """The position after its text in the joined text of all code cells."""
        return self.start + len(self.text)


def _migrate_notebook(data: bytes, wanted: Wanted) -> _Migration:
    """Migrate the bytes of a notebook. Raises `OptionError` if they are no notebook in Python."""
    text, cells = _read_notebook(data)
    for cell in cells:
        if "\0" in cell.text:
            raise OptionError(f"cell {cell.number} contains a null byte, so it is not Python")
    # All cells are one program: a name that one imports is used in another.
    code = "".join(without_magics(cell.text) + "\n" for cell in cells)
    if not triggered_rules(code.encode()):
        return _Migration(data, [], [])
    _check_size(len(code))
    try:
        edits, findings = edits_and_findings(code, wanted)
    except cst.ParserSyntaxError as error:
        raise OptionError(_syntax_error_in(cells)) from error
    json_edits: list[Edit] = []  # of `text`; `edits` are of `code`
    changes: list[_Change] = []
    edits = sorted(edits, key=_START)
    for cell in cells:
        new = apply(cell.text, _edits_in_cell(cell, edits))
        if new != cell.text:
            json_edits.append(_json_edit(text, cell, new))
            changes.append(_Change(f" (cell {cell.number})", cell.text, new))
    new_data = apply(text, json_edits).encode()
    return _Migration(new_data, _in_cells(findings, code, cells), changes)


def _in_cells(findings: list[Finding], code: str, cells: list[_Cell]) -> list[Finding]:
    """The findings with the number of their cell, and their line in it in place of that in `code`.

    `code` is the joined text of all cells.
    """
    lines_before = [code.count("\n", 0, cell.start) for cell in cells]
    findings_in_cells = []
    for finding in findings:
        # the last cell that has fewer lines before it than the number of the finding's line
        index = bisect.bisect_left(lines_before, finding.line) - 1
        line = finding.line - lines_before[index]
        findings_in_cells.append(finding._replace(line=line, cell=cells[index].number))
    return findings_in_cells


def _edits_in_cell(cell: _Cell, edits: list[Edit]) -> list[Edit]:
    """The edits inside one cell, with positions in its text.

    `edits` are those of the joined text of all cells, sorted by their start.
    """
    first = bisect.bisect_left(edits, cell.start, key=_START)
    last = bisect.bisect_right(edits, cell.end, key=_START)
    cell_edits = []
    for edit in edits[first:last]:
        # to remove the last line of a cell would also remove the newline that joins the cells
        end = min(edit.end, cell.end)
        cell_edits.append(Edit(edit.start - cell.start, end - cell.start, edit.text))
    return cell_edits


def _read_notebook(data: bytes) -> tuple[str, list[_Cell]]:
    """The text of a notebook, and its code cells. Raises `OptionError`."""
    try:
        text = data.decode()
        # A copy of the notebook with each string replaced by its span shows where the sources are
        # in the text. So only these change: json.dumps would change blanks and escapes everywhere.
        spans_text = _STRING.sub(_span_of_string, text)
        return text, _code_cells(json.loads(text), json.loads(spans_text))
    except UnicodeDecodeError as error:
        raise OptionError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        reason = error.msg.lower().removesuffix(" at").removesuffix(" starting")
        raise OptionError(f"is not a complete notebook: line {error.lineno}, {reason}") from error
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise OptionError("is JSON, but not a notebook") from error


def _span_of_string(string: re.Match) -> str:
    """The start and end of a JSON string as a JSON string, ``"120 133"``; a key stays as it is."""
    is_key = string[2] is not None
    if is_key:
        return string[0]
    start, end = string.span(1)
    return f'"{start} {end}"'


def _code_cells(notebook: dict, spans_notebook: dict) -> list[_Cell]:
    """The code cells of a notebook; none if it is in another language.

    `spans_notebook` is the same notebook with spans in place of strings: see `_read_notebook`.
    """
    if not _is_python(notebook["metadata"]):
        return []
    cells = []
    start = 0
    pairs = zip(notebook["cells"], spans_notebook["cells"], strict=True)
    for number, (cell, spans_cell) in enumerate(pairs, 1):  # text cells are counted too
        if cell["cell_type"] != "code":
            continue
        text = "".join(cell["source"])  # raises TypeError if a line of it is no text
        cells.append(_Cell(number, text, start, _spans_of(spans_cell["source"])))
        start += len(text) + 1  # and the newline that joins the cells
    return cells


def _is_python(metadata: dict) -> bool:
    """Whether a notebook is in Python, or does not say its language."""
    kernel = metadata.get("kernelspec", {})
    info = metadata.get("language_info", {})
    language = kernel.get("language") or info.get("name")
    if language is None:
        return True
    return language.lower() in ("python", "ipython")


def _spans_of(source: str | list[str]) -> list[slice]:
    """The spans in a source such as ``["120 133", "140 151"]``, or one such string."""
    strings = [source] if isinstance(source, str) else source
    spans = []
    for string in strings:
        start, end = map(int, string.split())
        spans.append(slice(start, end))
    return spans


def _syntax_error_in(cells: list[_Cell]) -> str:
    """The message for cells that do not parse together: the first that does not by itself."""
    for cell in cells:
        try:
            with_room_to_recurse(cst.parse_module, without_magics(cell.text))
        except cst.ParserSyntaxError as error:
            return f"cell {cell.number}:{error.raw_line} does not parse as Python"
    return "its cells do not parse together as Python"


def _json_edit(text: str, cell: _Cell, new: str) -> Edit:
    """The edit of `text`, the whole notebook's JSON, that gives a cell the source `new`.

    A line that the old source has too is written as it was there, with the same escapes.
    """
    raw = "".join(text[span] for span in cell.spans)
    # The raw lines in JSON, each up to its \n: a backslash with the letter n.
    raw_lines = re.findall(r"(?:[^\\]|\\[^n])*\\n|(?:[^\\]|\\[^n])+", raw)
    raw_by_line = dict(zip(_lines_with_ends(cell.text), raw_lines, strict=True))
    is_ascii = text.isascii()
    lines = []
    for line in _lines_with_ends(new):
        if line not in raw_by_line:
            raw_by_line[line] = json.dumps(line, ensure_ascii=is_ascii)[1:-1]  # without quotes
        lines.append(raw_by_line[line])
    start = cell.spans[0].start
    end = cell.spans[-1].stop
    before = text[: start - 1].rstrip()  # start - 1 is the quote of the first string
    separator = ""  # of a source that is one string
    if before.endswith("["):
        # The source is a list: separate its strings by the blanks that are after its bracket.
        blanks = text[len(before) : start - 1]
        separator = f'",{blanks}"'
    return Edit(start, end, separator.join(lines))


def _lines_with_ends(source: str) -> list[str]:
    """The lines of a source, each with its newline; the last one may have none."""
    return re.findall(r"[^\n]*\n|[^\n]+", source)

"""Migrates Python files and notebooks on the disk: reads them, makes diffs, and writes them."""

import bisect
import codecs
import dataclasses
import difflib
import io
import json
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from amp_lab.core import files
from amp_lab.core.errors import OptionError, first_line
from amp_lab.migrate.magics import without_magics
from amp_lab.migrate.reports import make_patch
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
    """The findings or the error of one file. The result is false if there is nothing to report."""

    path: Path
    lines: list[Finding] = dataclasses.field(default_factory=list)
    """The findings. Each finding is a line of the report."""
    diff: str = ""
    """The diff to the migrated text; empty if nothing changes."""
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
    named_paths = dict.fromkeys(map(Path, paths))  # each once; a dict keeps the order, unlike a set
    files_to_check: list[Path] = []
    for path in named_paths:
        source_files = find_source_files(path)
        files_to_check += source_files
        if not source_files:
            yield Result(path, error=f"{path} contains no Python file and no notebook")
    for path in dict.fromkeys(files_to_check):  # a file and its folder may both be named
        # A link inside a folder is skipped. For a link that the caller names, `migrate_file`
        # returns an error.
        if path not in named_paths and path.is_symlink():
            yield Result(path, skipped=f"{path} was skipped, because it is a link")
            continue
        try:
            if not has_trigger(path):
                continue
        except OSError as error:
            yield Result(path, error=f"{path}: cannot be read: {error.strerror}")
            continue
        result = migrate_file(path, write, wanted)
        if result:  # a result with nothing to report is false
            yield result


def find_source_files(path: Path) -> list[Path]:
    """List the Python files and notebooks at any depth in a folder; for a file, only itself.

    The list also has links to folders, which are not followed, and folders that cannot be listed:
    the caller reports the former as skipped, and gets an `OSError` when it reads one of the latter.
    """
    if not path.is_dir():
        return [path]
    found_paths: list[Path] = []
    errors: list[OSError] = []
    for folder, subfolders, names in os.walk(path, onerror=errors.append):
        # os.walk goes only into the folders that remain in this list
        subfolders[:] = sorted(name for name in subfolders if not _is_skipped(Path(folder, name)))
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                found_paths.append(Path(folder, name))
        for name in subfolders:
            subfolder = Path(folder, name)
            if subfolder.is_symlink():
                found_paths.append(subfolder)
    unlisted_folders = [Path(error.filename) for error in errors]
    return found_paths + unlisted_folders


def _is_skipped(folder: Path) -> bool:
    """Whether a folder is hidden, a virtual environment, or holds other people's packages."""
    name = folder.name
    if name.startswith(".") or name in _SKIPPED_FOLDERS:
        return True
    return os.path.exists(folder / "pyvenv.cfg")  # a virtual environment


def has_trigger(path: Path) -> bool:
    """Whether a file has a text that triggers a rule. Only such a file has to be parsed.

    False for a named pipe, which is not opened. Raises `OSError` if the file cannot be read.
    """
    if path.is_fifo():  # opening one waits until another process opens its other end
        return False
    data = files.read_regular(path, _MAX_FILE_BYTES)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        # Python cannot read such a file, and `migrate_file` says so. ASCII letters have null bytes
        # beside them. (The mark of little-endian UTF-32 begins with that of UTF-16.)
        data = data.replace(b"\0", b"")
    return bool(triggered_rules(data))


def migrate_file(path: Path, write: bool = False, wanted: Wanted = EVERYTHING) -> Result:
    """Migrate one file, and write it with `write`; the result has the error if that fails."""
    try:
        return _migrate(path, write, wanted)
    except cst.ParserSyntaxError as error:
        reason = f"line {error.raw_line} does not parse as Python"
    except (OptionError, OSError) as error:
        # The text of an OSError has the path, which the line below has too; `strerror` has not.
        reason = getattr(error, "strerror", None) or error
    except ValueError as error:
        reason = f"cannot be migrated: {error}"
    return Result(path, error=f"{path}: {reason}; not changed")


def _migrate(path: Path, write: bool, wanted: Wanted) -> Result:
    """Migrate one file. Raises the errors that `migrate_file` puts into its result."""
    if path.is_symlink():
        raise OptionError("the path is a link: give the file that it points to")
    status = path.stat()
    data = files.read_regular(path, _MAX_FILE_BYTES)
    if path.suffix == ".ipynb":
        migration = _migrate_notebook(data, wanted)
    else:
        migration = _migrate_python(data, wanted)
    result = Result(path, migration.findings)
    if migration.data == data:
        return result
    result.diff = "".join(_diff(path, change) for change in migration.changes)
    if wanted.patch:
        result.patch = make_patch(path, data, migration.data)
    if write:
        _write(path, data, migration.data, status)
        result.written = True
    return result


def _write(path: Path, old: bytes, new: bytes, status: os.stat_result) -> None:
    """Write `new` to a file that had the content `old` and this `status` when it was read.

    Raises `OptionError` if it is read-only, has hard links, or has changed meanwhile.
    """
    is_writable = status.st_mode & stat.S_IWUSR and os.access(path, os.W_OK)
    if not is_writable:
        raise OptionError("the file is read-only")
    if status.st_nlink > 1:  # the new file would have only one of the names
        raise OptionError(f"the file has {status.st_nlink} hard links: migrate a copy")
    if path.read_bytes() != old:  # an editor may have saved it since
        raise OptionError("another program changed the file: try again")
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
    """Raise `OptionError` for too many bytes of Python."""
    if size > MAX_BYTES:
        raise OptionError(
            f"{size:,} bytes of Python exceed the limit of {MAX_BYTES:,}: split the file"
        )


# Python.


def _migrate_python(data: bytes, wanted: Wanted) -> _Migration:
    """Migrate the bytes of a Python file. Raises `OptionError` if they are no Python."""
    _check_size(len(data))
    if b"\0" in data:
        raise OptionError("the file contains a null byte, so it is not Python")
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
        raise OptionError(f"wrong encoding: {first_line(error)}") from error
    except SyntaxError as error:  # an unknown encoding, or a first line that is not in it
        raise OptionError(f"wrong encoding: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OptionError(f"line {line} is not {error.encoding}") from error
    if text.encode(encoding) != data:  # some encodings can write one character in two ways
        raise OptionError(f"the {encoding} text cannot be written back unchanged")
    return text, encoding


# Notebooks.


# A JSON string, such as "import torch\n"; group 1 without quotes, group 2 the colon after a key.
_STRING = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?')
# One line of Python inside a JSON string. It ends with \n, which JSON writes as a backslash and the
# letter n; the last line may have no end. An escaped backslash may stand before a letter n, too.
_LINE_IN_JSON = re.compile(r"(?:[^\\]|\\[^n])*\\n|(?:[^\\]|\\[^n])+")


class _Cell(NamedTuple):
    """A code cell of a notebook."""

    number: int
    """From 1, among all cells."""
    text: str
    """Its Python code."""
    start: int
    """The position of its text in the joined text of all code cells."""
    spans: list[slice]
    """Where the strings of its source are in the text of the file, which is JSON; without quotes.

    A source is one string, or a list with a string for each line.
    """

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
    _check_size(len(code.encode()))
    try:
        edits, findings = edits_and_findings(code, wanted)
    except cst.ParserSyntaxError as error:
        raise OptionError(_syntax_error_in(cells)) from error
    json_edits: list[Edit] = []  # of `text`, the file; `edits` are those of `code`
    changes: list[_Change] = []
    for cell, cell_edits in zip(cells, _edits_by_cell(edits, cells), strict=True):
        new = apply(cell.text, cell_edits)
        if new != cell.text:
            json_edits.append(_json_edit(text, cell, new))
            changes.append(_Change(f" (cell {cell.number})", cell.text, new))
    new_data = apply(text, json_edits).encode()
    return _Migration(new_data, _findings_by_cell(findings, code, cells), changes)


def _findings_by_cell(findings: list[Finding], code: str, cells: list[_Cell]) -> list[Finding]:
    """The findings in `code`, the joined text of all cells, with lines counted in their cell."""
    first_lines = [code.count("\n", 0, cell.start) + 1 for cell in cells]
    findings_in_cells = []
    for finding in findings:
        index = bisect.bisect_right(first_lines, finding.line) - 1  # the last cell to start by then
        line_in_cell = finding.line - first_lines[index] + 1
        findings_in_cells.append(finding._replace(line=line_in_cell, cell=cells[index].number))
    return findings_in_cells


def _edits_by_cell(edits: list[Edit], cells: list[_Cell]) -> list[list[Edit]]:
    """For each cell the edits inside it, with positions in its text.

    `edits` have positions in the joined text of all cells.
    """
    starts = [cell.start for cell in cells]
    edits_by_cell: list[list[Edit]] = [[] for _ in cells]
    for edit in edits:
        index = bisect.bisect_right(starts, edit.start) - 1  # the last cell to start by then
        cell = cells[index]
        # An edit that removes the last line of a cell also removes the newline that joins the
        # cells, which is not in the cell's text.
        end = min(edit.end, cell.end)
        edit_in_cell = Edit(edit.start - cell.start, end - cell.start, edit.text)
        edits_by_cell[index].append(edit_in_cell)
    return edits_by_cell


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
        raise OptionError(f"the notebook is incomplete: line {error.lineno}, {reason}") from error
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise OptionError("the file is JSON, but not a notebook") from error


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
    return "the cells together do not parse as Python"


def _json_edit(text: str, cell: _Cell, new: str) -> Edit:
    """The edit of `text`, the whole notebook's JSON, that gives a cell the source `new`.

    JSON can write a character in several ways, so lines that do not change are copied from `text`.
    """
    json_source = "".join(text[span] for span in cell.spans)
    json_lines = _LINE_IN_JSON.findall(json_source)
    json_by_line = dict(zip(_lines_with_ends(cell.text), json_lines, strict=True))
    new_json_lines = []
    for line in _lines_with_ends(new):
        if line not in json_by_line:
            quoted = json.dumps(line, ensure_ascii=text.isascii())
            json_by_line[line] = quoted[1:-1]
        new_json_lines.append(json_by_line[line])
    start = cell.spans[0].start
    end = cell.spans[-1].stop
    first_quote = start - 1
    text_before = text[:first_quote].rstrip()
    separator = ""
    if text_before.endswith("["):  # the source is a list with a string for each line
        # Between two strings put the same blanks as between the bracket and the first string.
        blanks = text[len(text_before) : first_quote]
        separator = f'",{blanks}"'
    return Edit(start, end, separator.join(new_json_lines))


def _lines_with_ends(source: str) -> list[str]:
    """The lines of a source, each with its newline; the last one may have none."""
    return re.findall(r"[^\n]*\n|[^\n]+", source)

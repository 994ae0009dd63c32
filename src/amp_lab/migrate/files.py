"""Python files and notebooks on the disk: read, migrated, shown as a diff, written back whole."""

import bisect
import concurrent.futures
import dataclasses
import difflib
import functools
import io
import itertools
import json
import multiprocessing
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


class _Change(NamedTuple):
    """The text of a file, or of a cell of a notebook, before and after."""

    title: str
    """What follows the path in the diff, such as `` (cell 2)``."""
    old: str
    new: str


# The bytes of the new file, what is said of it, and what is changed.
_Migrated = tuple[bytes, list[Finding], list[_Change]]


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
        done = {"left", "note"}
        if self.written:
            done.add("rewritten")
        return [line for line in self.lines if line.kind not in done]


def migrate_paths(
    paths: Iterable[str | Path], write: bool = False, wanted: Wanted = EVERYTHING
) -> Iterator[Result]:
    """Migrate files, and the Python files and notebooks in folders; yield those with something.

    Nothing is changed unless `write`; `wanted` says what is looked at. A file that cannot be done
    is yielded with its error, and left as it was.
    """
    named = dict.fromkeys(map(Path, paths))
    below = {path: list(find(path)) for path in named}
    for path, files_below in below.items():
        if not files_below:
            yield Result(path, error=f"{path}: has no Python file and no notebook in it")
    with_names: list[Path] = []
    for path in dict.fromkeys(itertools.chain.from_iterable(below.values())):
        if path not in named and path.is_symlink():
            yield Result(path, skipped=f"{path}: is a link: passed over")
            continue
        try:
            if has_names(path):
                with_names.append(path)
        except OSError as error:
            yield Result(path, error=f"{path}: cannot be read: {error.strerror}")
    for result in _migrate_all(with_names, write, wanted):
        if result:
            yield result


def _migrate_all(paths: list[Path], write: bool, wanted: Wanted) -> Iterator[Result]:
    """Migrate files, many of them in several processes."""
    # Other processes take a partial, and no function that is defined here.
    migrate = functools.partial(migrate_file, write=write, wanted=wanted)
    processes = min(os.cpu_count() or 1, 4)  # more would wait for the disk
    if len(paths) < _WORTH_PROCESSES or processes == 1:
        yield from map(migrate, paths)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(migrate, paths, chunksize=8)


def find(path: Path) -> Iterator[Path]:
    """The file given, or those below the folder given that may hold Python."""
    if not path.is_dir():
        yield path
        return
    broken: list[OSError] = []
    for folder, below, names in os.walk(path, onerror=broken.append):
        # os.walk goes into what is left
        below[:] = sorted(name for name in below if not _is_skipped(Path(folder, name)))
        for name in sorted(names):
            if name.endswith(_ENDINGS):
                yield Path(folder, name)
        for name in below:
            path_below = Path(folder, name)
            if path_below.is_symlink():
                yield path_below
    for error in broken:  # to read them will tell why
        yield Path(error.filename)


def _is_skipped(folder: Path) -> bool:
    name = folder.name
    if name.startswith(".") or name in _SKIPPED_FOLDERS:
        return True
    return os.path.exists(folder / "pyvenv.cfg")  # a virtual environment


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
        reason = f"line {error.raw_line} does not parse as Python"
    except (OptionError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
    except ValueError as error:
        reason = f"cannot be migrated: {error}"
    return Result(path, error=f"{path}: {reason}; left as it was")


def _migrate(path: Path, write: bool, wanted: Wanted) -> Result:
    if path.is_symlink():
        raise OptionError("is a link: give the file itself")
    status = path.stat()
    data = files.read_regular(path, _MOST_BYTES)
    if path.suffix == ".ipynb":
        new, findings, changes = _migrate_notebook(data, wanted)
    else:
        new, findings, changes = _migrate_python(data, wanted)
    result = Result(path, findings)
    if new == data:
        return result
    result.diff = "".join(_diff(path, change) for change in changes)
    if wanted.patch:
        result.patch = patch(path, data, new)
    if write:
        _write(path, data, new, status)
        result.written = True
    return result


def _write(path: Path, old: bytes, new: bytes, status: os.stat_result) -> None:
    is_writable = status.st_mode & stat.S_IWUSR and os.access(path, os.W_OK)
    if not is_writable:
        raise OptionError("is read-only")
    if status.st_nlink > 1:  # to replace the file would part it from its other names
        raise OptionError(f"has {status.st_nlink} names (hard links): copy it first")
    if path.read_bytes() != old:  # an editor may have saved it since
        raise OptionError("was changed meanwhile")
    files.write_whole(path, [new], like=status)


def _diff(path: Path, change: _Change) -> str:
    name = f"{path}{change.title}"
    lines = difflib.unified_diff(
        _lines_of(change.old), _lines_of(change.new), name, name, lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


def _lines_of(text: str) -> list[str]:
    text = re.sub(r"\r\n?", "\n", text)
    return text.removesuffix("\n").split("\n")


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise OptionError(f"has {size / 2**20:.1f} MiB of Python, and 0.5 is the most: split it")


# Python.


def _migrate_python(data: bytes, wanted: Wanted) -> _Migrated:
    _check_size(len(data))
    if b"\0" in data:
        raise OptionError("has a null byte, so it is no Python")
    text, encoding = _decode(data)
    edits, findings = edits_and_findings(text, wanted)
    new = apply(text, edits)
    return new.encode(encoding), findings, [_Change("", text, new)]


def _decode(data: bytes) -> tuple[str, str]:
    """The text of a Python file, and its encoding. Raises `OptionError`."""
    lines = io.BytesIO(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    try:
        encoding, _ = tokenize.detect_encoding(lines.readline)
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
    return text, encoding


# Notebooks.


_STRING = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?')  # a JSON string; a colon follows a key


_START = attrgetter("start")


class _Cell(NamedTuple):
    number: int  # from 1, among all cells
    text: str
    start: int  # where its text starts in the text of all code cells
    spans: list[slice]
    """Where in the JSON text each piece of its source starts and ends, without quotes."""

    @property
    def end(self) -> int:
        """Where its text ends in the text of all code cells."""
        return self.start + len(self.text)


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
        raise OptionError(_syntax_error_in(cells)) from error
    raw_edits: list[Edit] = []
    changes: list[_Change] = []
    edits = sorted(edits, key=_START)
    for cell in cells:
        new = apply(cell.text, _edits_of(cell, edits))
        if new != cell.text:
            raw_edits.append(_in_json(text, cell, new))
            changes.append(_Change(f" (cell {cell.number})", cell.text, new))
    return apply(text, raw_edits).encode(), _by_cell(findings, code, cells), changes


def _by_cell(findings: list[Finding], code: str, cells: list[_Cell]) -> list[Finding]:
    """The findings in the code of all cells, each with its cell and its line in that cell."""
    lines_before = [code.count("\n", 0, cell.start) for cell in cells]
    found = []
    for finding in findings:
        index = bisect.bisect_left(lines_before, finding.line) - 1
        line = finding.line - lines_before[index]
        found.append(finding._replace(line=line, cell=cells[index].number))
    return found


def _edits_of(cell: _Cell, edits: list[Edit]) -> list[Edit]:
    """Those edits of the code of all cells, in their order, that are of one cell, as its edits."""
    first = bisect.bisect_left(edits, cell.start, key=_START)
    last = bisect.bisect_right(edits, cell.end, key=_START)
    own = []
    for edit in edits[first:last]:
        end = min(edit.end, cell.end)
        own.append(Edit(edit.start - cell.start, end - cell.start, edit.text))
    return own


def _read_notebook(data: bytes) -> tuple[str, list[_Cell]]:
    """The text of a notebook, and its code cells. Raises `OptionError`."""
    try:
        text = data.decode()
        # The same notebook, with the place of each string in its stead, finds the sources in the
        # text: written anew as a whole, it would get other blanks and escapes.
        places = _STRING.sub(_place_of_string, text)
        return text, _code_cells(json.loads(text), json.loads(places))
    except UnicodeDecodeError as error:
        raise OptionError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        reason = error.msg.lower().removesuffix(" at").removesuffix(" starting")
        raise OptionError(f"is no whole notebook: line {error.lineno}, {reason}") from error
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise OptionError("is JSON, but no notebook") from error


def _place_of_string(string: re.Match) -> str:
    """Where a JSON string starts and ends, as a JSON string; the key of a value stays."""
    is_key = string[2] is not None
    if is_key:
        return string[0]
    start, end = string.span(1)
    return f'"{start} {end}"'


def _code_cells(notebook: dict, places: dict) -> list[_Cell]:
    """The code cells with something in them; none if the notebook is in another language."""
    if not _is_python(notebook["metadata"]):
        return []
    cells = []
    start = 0
    # numbered as people count them, with the text cells
    pairs = zip(notebook["cells"], places["cells"], strict=True)
    for number, (cell, place) in enumerate(pairs, 1):
        if cell["cell_type"] != "code":
            continue
        text = "".join(cell["source"])  # a TypeError if a line of it is no text
        cells.append(_Cell(number, text, start, _spans_of(place["source"])))
        start += len(text) + 1
    return cells


def _is_python(metadata: dict) -> bool:
    """Whether a notebook is in Python, or does not say its language."""
    kernel = metadata.get("kernelspec", {})
    info = metadata.get("language_info", {})
    language = kernel.get("language") or info.get("name")
    if language is None:
        return True
    return language.lower() in ("python", "ipython")


def _spans_of(places: str | list[str]) -> list[slice]:
    """The spans of a source, which is one string or a list of them."""
    if isinstance(places, str):
        places = [places]
    spans = []
    for place in places:
        start_and_end = map(int, place.split())
        spans.append(slice(*start_and_end))
    return spans


def _syntax_error_in(cells: list[_Cell]) -> str:
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
    raw_of = dict(zip(_with_ends(cell.text), raw_lines, strict=True))
    is_ascii = text.isascii()
    lines = []
    for line in _with_ends(new):
        old_raw = raw_of.get(line)
        lines.append(old_raw or json.dumps(line, ensure_ascii=is_ascii)[1:-1])
    start = cell.spans[0].start
    end = cell.spans[-1].stop
    before = text[: start - 1].rstrip()
    separator = ""
    if before.endswith("["):
        # In a list, the blanks after its bracket separate each line from the next one too.
        blanks = text[len(before) : start - 1]
        separator = f'",{blanks}"'
    return Edit(start, end, separator.join(lines))


def _with_ends(source: str) -> list[str]:
    """The lines of a source, each with its newline."""
    return re.findall(r"[^\n]*\n|[^\n]+", source)

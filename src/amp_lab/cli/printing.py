"""Print the results of commands in the chosen format, and errors in one line."""

import argparse
import contextlib
import io
import os
import shutil
import sys
import time
from pathlib import Path

from amp_lab.core.errors import OptionError
from amp_lab.core.files import GENERATOR, read_regular, try_to_write
from amp_lab.core.requirements import require_matplotlib


def add_format(command: argparse.ArgumentParser) -> None:
    """Add the option ``--format``."""
    forms = ("table", "markdown", "json")
    command.add_argument(
        "--format", choices=forms, default="table", help="format of the output (default: table)"
    )


def show(result, form: str) -> None:
    """Print a result of a tool, a `Printed`, in the format `form`: table, markdown or json."""
    if form == "table":
        print(result.text(screen_width()))
    else:
        print(getattr(result, f"to_{form}")())


def screen_width() -> int | None:
    """The characters of a line: `COLUMNS`, else the terminal's; None for a pipe or a file.

    A pipe or a file is read by another program, so each row of a table stays one line.
    """
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return max(40, shutil.get_terminal_size().columns)
    return None


def tell(line: str, at_once: bool = False) -> None:
    """Print an error to stderr, in one line.

    The processes that torchrun started on a machine mostly have the same error. Then the first
    process prints it, and torchrun ends the others. So the others wait three seconds before they
    print. `at_once` is for an error that only this process has: this process does not wait.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and not at_once:
        time.sleep(3)
    say_aside(_in_one_line(line))


def say_aside(line: str) -> None:
    """Print a line to stderr: an error, a warning or progress.

    A stderr that cannot be written is ignored: it must not change how the command ends. After an
    error, the exit code still tells of it.
    """
    with contextlib.suppress(OSError):  # such as a full disk
        print(line, file=sys.stderr, flush=True)


def _in_one_line(text: str) -> str:
    """The text with unprintable characters, such as a line's end in a path, written out."""
    # `repr` without its quotes: two characters, \ and n, for the end of a line.
    characters = [char if char.isprintable() else repr(char)[1:-1] for char in text]
    return "".join(characters)


def open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed before Python began.

    Otherwise the next file that is opened would get the number of that stream, and printed text
    would go into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_if_closed(number)
            mode = "r" if name == "stdin" else "w"
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  # stays open
            setattr(sys, name, stream)


def _open_if_closed(number: int) -> None:
    """Open the null device under this file number, if no file has it."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)


def replace_unencodable() -> None:
    """Print a question mark for each character that the terminal cannot encode."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def flush() -> None:
    """Write buffered output now, while an error can still be printed in one line."""
    sys.stdout.flush()


def drop_unwritten() -> None:
    """Drop buffered output that cannot be written; Python would print an error when it ends."""
    try:
        flush()
    except OSError:
        # From now on standard output goes to the null device, and so does the buffer.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())


def show_warning(command: str, message: Warning | str) -> None:
    """Print a warning in a line, where Python would print two."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes have the same warnings
        say_aside(_in_one_line(f"amp-lab {command}: {message}"))


def require_figure(path: str, what: str) -> None:
    """Raise an `AmpLabError` now, and not after minutes, if a picture cannot be written there."""
    if not path.endswith((".png", ".svg")):
        raise OptionError(f"--figure {path!r}: give a name ending with .png or .svg")
    require_matplotlib(what)
    require_output(path)


def require_output(path: str | os.PathLike, ours: bool = False) -> None:
    """Raise `OptionError` now, and not after minutes, if a file could not or should not be written.

    An existing file may be replaced only if it is empty or if its beginning says that this package
    wrote it, which `GENERATOR` is. With `ours`, any file may be: the caller has its own check.
    """
    beginning = b""
    try:
        try_to_write(Path(path))
        if not ours and os.path.exists(path):
            beginning = read_regular(Path(path))[:4096]
    except OSError as error:
        raise OptionError(f"{path}: cannot be written ({error.strerror})") from error
    if beginning and GENERATOR.encode() not in beginning:
        raise OptionError(
            f"{path}: already exists, and amp-lab did not write it: give another name"
        )

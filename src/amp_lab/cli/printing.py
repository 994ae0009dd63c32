"""How the commands print: results in the format asked for, and errors in a line."""

import argparse
import contextlib
import io
import os
import shutil
import sys
import time
from pathlib import Path

from amp_lab.core.errors import OptionError
from amp_lab.core.files import MADE_BY, read_regular, try_to_write
from amp_lab.core.requirements import require_matplotlib


def add_format(command: argparse.ArgumentParser) -> None:
    """Add the option ``--format``."""
    forms = ("table", "markdown", "json")
    command.add_argument("--format", choices=forms, default="table", help="default: table")


def show(result, form: str) -> None:
    """Print a result of the tools in the format asked for."""
    if form == "table":
        print(result.text(screen_width()))
    else:
        print(getattr(result, f"to_{form}")())


def screen_width() -> int | None:
    """The characters of a line: `COLUMNS`, else the terminal's; None for a pipe or a file.

    There another program reads, or a person whose screen is not known: each row stays a line.
    """
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return max(40, shutil.get_terminal_size().columns)
    return None


def tell(line: str, at_once: bool = False) -> None:
    """Print an error.

    Of the processes that torchrun started on a machine, the first tells what all have met, and
    torchrun then ends the others. Only if it does not is there something for another one to tell.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and not at_once:
        time.sleep(3)
    say_aside(_in_one_line(line))


def say_aside(line: str) -> None:
    """Print a line beside the result, if that is possible: the exit code tells of it as well."""
    with contextlib.suppress(OSError):  # a full disk, say
        print(line, file=sys.stderr, flush=True)


def _in_one_line(text: str) -> str:
    """The text with signs such as a line's end written out: a path may hold them."""
    signs = [sign if sign.isprintable() else repr(sign)[1:-1] for sign in text]
    return "".join(signs)


def open_closed_streams() -> None:
    """Let what is read from or written to a stream that was closed before Python began be nothing.

    The next file to be opened would get its number, and all that is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_if_closed(number)
            mode = "r" if name == "stdin" else "w"
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  # as long as we run
            setattr(sys, name, stream)


def _open_if_closed(number: int) -> None:
    """Let the null device have this number, if no file has it."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)


def print_what_can_be() -> None:
    """Let a sign that the terminal's encoding lacks be a question mark, and no error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def flush() -> None:
    """Print what is still held back, here, where an error is still told in a line."""
    sys.stdout.flush()


def drop_unprintable() -> None:
    """Drop what was printed and cannot be written, which Python would complain of at its end."""
    try:
        flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_warning(command: str, message: Warning | str) -> None:
    """Print a warning in a line, where Python would print two."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the others have the same to say
        say_aside(_in_one_line(f"amp-lab {command}: {message}"))


def require_figure(path: str, what: str) -> None:
    """Raise an `AmpLabError` now, and not after minutes, if a picture cannot be written there."""
    if not path.endswith((".png", ".svg")):
        raise OptionError(f"--figure {path!r}: give a name ending with .png or .svg")
    require_matplotlib(what)
    require_output(path)


def require_output(path: str | os.PathLike, ours: bool = False) -> None:
    """Raise `OptionError` now, and not after minutes, if a file could not or should not be written.

    One that is there should not, unless it is empty, or `ours`, or says so.
    """
    beginning = b""
    try:
        try_to_write(Path(path))
        if not ours and os.path.exists(path):
            beginning = read_regular(Path(path))[:4096]
    except OSError as error:
        raise OptionError(f"{path}: cannot be written ({error.strerror})") from error
    if beginning and MADE_BY.encode() not in beginning:
        raise OptionError(f"{path}: is there, and not made by amp-lab: give another name")

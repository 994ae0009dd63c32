"""`amp-lab explain`: explain an error message, a log or a symptom, and how to fix it."""

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from typing import TYPE_CHECKING, BinaryIO

from amp_lab.cli.printing import screen_width
from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    from amp_lab.failures import Explanation, Failure, OwnLine, Page

_MOST_BYTES = 2**20  # of a log, from its end
_LABEL_WIDTH = 12  # characters before the text of a line
_LINE_WIDTH = 100  # at most, and where the output is no terminal


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    explain = commands.add_parser(
        "explain",
        help="explain an error message or a symptom, and how to fix it",
        description="Explain an error message, a warning, a log or a symptom of mixed precision. "
        "The command also explains a code such as AMP0004, which the tools print.",
        epilog="Exit code: 0 if the text is known, 1 if it is unknown.",
    )
    explain.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="a message, a symptom in your words, a code such as AMP0004, or the path of a log "
        "(default: stdin)",
    )
    explain.add_argument("--json", action="store_true", help="print JSON, for other programs")
    explain.set_defaults(run=run, needs_torch=False)


def run(options: argparse.Namespace) -> int:
    """Print the explanation of the text; return 0 if the text is known, 1 if not."""
    from amp_lab.failures import read_explanation

    text = _read_text(options.text)
    if not text.strip():
        raise OptionError("the text is empty: give a message, a symptom, a code, or a log on stdin")
    explanation = read_explanation(text)
    if options.json:
        print(json.dumps(dataclasses.asdict(explanation), indent=1))
    elif explanation.failures:
        _print_known(explanation)
    else:
        print(_unknown(explanation))
    return 0 if explanation.failures else 1


def _read_text(words: list[str]) -> str:
    """The text to explain: the arguments, the file that they name, or stdin for none and for "-".

    Raises `OptionError` if there is none.
    """
    text = " ".join(words)
    if words and os.path.isfile(text):
        with open(text, "rb") as file:
            return _decode(_read_end(file), text)
    if words and text != "-":
        return text
    if sys.stdin.isatty() and not words:
        raise OptionError("there is no text: give a message, the path of a log, or a log on stdin")
    return _decode(_read_end(sys.stdin.buffer), "stdin")


def _read_end(stream: BinaryIO) -> bytes:
    """The last `_MOST_BYTES` of a file or a pipe. What is before them in a file is not read."""
    if stream.seekable():
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _MOST_BYTES))
        return stream.read(_MOST_BYTES)
    end = b""
    while block := stream.read(_MOST_BYTES):
        end = (end + block)[-_MOST_BYTES:]
    return end


def _decode(data: bytes, name: str) -> str:
    """The data as text; raises `OptionError` if they are binary. `name` is their file or stream."""
    if b"\0" in data:
        raise OptionError(f"{name} is binary or UTF-16, which this command cannot read: give UTF-8")
    return data.decode("utf-8", errors="replace")


def _print_known(explanation: "Explanation") -> None:
    """Print the best failure in full, and name the others."""
    best, *others = explanation.failures
    _print_failure(best, explanation.own_line)
    if others:
        print("\nIt may also be:")
        for failure in others:
            print(f"  {failure.code}  {failure.title}")


def _print_failure(failure: "Failure", own_line: "OwnLine | None") -> None:
    """Print a failure: what goes wrong, why, and what to do."""
    print(f"{failure.code}  {failure.title}\n")
    parts = [
        ("Why", failure.cause),
        ("The fix", failure.cure),
        ("Not this", failure.unsafe),
        ("Versions", failure.torch),
        ("Your line", _line_text(own_line)),
        ("More", failure.page),
    ]
    for label, text in parts:
        if text:
            print(_wrap(label, text))


def _wrap(label: str, text: str) -> str:
    """The label, and the text beside it, wrapped into lines."""
    return textwrap.fill(
        text,
        width=min(screen_width() or _LINE_WIDTH, _LINE_WIDTH),
        initial_indent=f"  {label:<{_LABEL_WIDTH - 2}}",
        subsequent_indent=" " * _LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _line_text(line: "OwnLine | None") -> str:
    """A line of the user's code, such as ``train.py:12, in step: loss.backward()``; "" for None."""
    if line is None:
        return ""
    function = f", in {line.function}" if line.function else ""
    code = f": {line.code}" if line.code else ""
    return f"{line.file}:{line.line}{function}{code}"


def _unknown(explanation: "Explanation") -> str:
    """One line for an unknown text, with the pages that have the most words in common with it."""
    if not explanation.nearest:
        return "Unknown: this reference is about mixed precision in PyTorch, and no entry fits."
    titles = "; ".join(_title_and_address(page) for page in explanation.nearest)
    return f"Unknown: no entry of the reference fits. Closest pages by words: {titles}"


def _title_and_address(page: "Failure | Page") -> str:
    """The title of a page, and where it is: the code of a failure, the address of other pages."""
    from amp_lab.failures import Failure

    where = page.code if isinstance(page, Failure) else page.page
    return f"{page.title} ({where})"

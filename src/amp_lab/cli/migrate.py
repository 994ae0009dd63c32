"""`amp-lab migrate`: update old mixed-precision code to today's names."""

import argparse
import itertools
import sys
from collections import Counter
from typing import TYPE_CHECKING

from amp_lab.cli.printing import tell
from amp_lab.core.errors import OptionError

if TYPE_CHECKING:
    from amp_lab.migrate import Result


def add(commands) -> None:
    """Add the command to the parser's `commands`."""
    migrate = commands.add_parser(
        "migrate",
        help="update old AMP and Apex code to today's names, and find mistakes",
        description="Print a diff from torch.cuda.amp, torch.cpu.amp and NVIDIA Apex to torch.amp. "
        "Below the diff, list mistakes and the lines that you have to change by hand. The command "
        "changes files and notebooks only with --write.",
    )
    option = migrate.add_argument
    option("paths", nargs="+", metavar="PATH", help="a file, notebook or folder")
    parts = ["torch", "apex", "mistakes"]
    help_text = "use only these rules; repeat the option for several (default: all three)"
    option("--select", action="append", choices=parts, help=help_text)
    mark = "put a comment above each line of Apex code that you have to change by hand"
    option("--mark", action="store_true", help=mark)
    output = "print text with a diff (default), or annotations for GitHub"
    option("--format", choices=["text", "github"], default="text", help=output)
    exclusive_option = migrate.add_mutually_exclusive_group().add_argument
    exclusive_option("--write", action="store_true", help="change the files")
    exclusive_option(
        "--check", action="store_true", help="exit with code 1 if code still needs a change"
    )
    exclusive_option("--diff", action="store_true", help="print only a patch for `git apply`")
    migrate.set_defaults(run=run, needs_torch=False)  # it only reads code


def run(options: argparse.Namespace) -> int:
    """Print the changes, or make them with --write; return the exit code.

    The exit code is 2 after an error in a file, and 1 with --check if code still needs a change.
    """
    # Imported here, since it needs libcst, which the other commands do not.
    from amp_lab.migrate import SELECTIONS, Wanted, migrate_paths

    if options.diff and options.format != "text":
        raise OptionError(f"--diff prints a patch: leave out --format {options.format}")
    select = tuple(options.select or SELECTIONS)
    wanted = Wanted(select, mark=options.mark, patch=options.diff)
    # One result after the other, as the files are read, so that the first diff is printed at once.
    new_results = migrate_paths(options.paths, options.write, wanted)
    if options.write:  # first change all files: a closed pipe must not end the loop half-way
        new_results = list(new_results)
    results = []
    for result in new_results:
        results.append(result)
        problem = result.error or result.skipped
        if problem:
            tell(f"amp-lab migrate: {problem}")
        _print_diff(result, options)
    if not options.diff:
        _report(results, options)
    if any(result.error for result in results):
        return 2
    if options.check and any(result.to_do for result in results):
        return 1
    return 0


def _print_diff(result: "Result", options: argparse.Namespace) -> None:
    """Print the diff of a file: as a patch with --diff, and nothing for the other formats."""
    if options.diff:
        sys.stdout.flush()
        sys.stdout.buffer.write(result.patch)  # the bytes of the file, whatever its encoding
    elif options.format == "text":
        print(result.diff, end="")


def _report(results: "list[Result]", options: argparse.Namespace) -> None:
    """Print the findings in the format of --format, and a summary."""
    from amp_lab.migrate import format_github, notes_on_versions

    if options.format == "github":
        print(format_github(results), end="")
    else:
        print(_format_lines(results), end="")
    findings = itertools.chain.from_iterable(result.lines for result in results)
    for note in notes_on_versions(findings):
        print(note)
    print(_format_summary(results, options.write), end="")


def _format_lines(results: "list[Result]") -> str:
    """A line for each finding, ``PATH:LINE: …``, after an empty line; "" without findings."""
    text = ""
    for result in results:
        for line in result.lines:
            text += f"{result.path}:{line}\n"  # `line` begins with its number, or its cell
    if not text:
        return ""
    return f"\n{text}"


def _format_summary(results: "list[Result]", is_written: bool) -> str:
    """The last line: how many findings of each kind there are, and how many files change."""
    kinds = Counter()
    for result in results:
        kinds.update(line.kind for line in result.lines)
    if not kinds:
        has_error = any(result.error for result in results)
        return "" if has_error else "nothing to do\n"
    counts = [f"{kinds[kind]} {kind}" for kind in ("rewritten", "by hand", "left")]
    counts.append(_count(kinds["mistake"], "mistake"))
    if kinds["note"]:
        counts.append(_count(kinds["note"], "note"))
    if is_written:
        count = len([result for result in results if result.written])
        change = "changed"
    else:
        count = len([result for result in results if result.diff])
        change = "to change with --write"
    return f"{', '.join(counts)}; {_count(count, 'file')} {change}\n"


def _count(number: int, noun: str) -> str:
    """A number with its noun: ``1 file``, or ``2 files``."""
    if number != 1:
        noun = f"{noun}s"
    return f"{number} {noun}"

"""The command line, `amp-lab …`. Only this folder prints for a person and exits.

Each command is a file with two functions: `add` tells the parser the command's options, and `run`
runs the command.
"""

import argparse
import difflib
import re
import warnings

from amp_lab import __version__

# torch takes seconds to load, so each `run` imports it, not these modules: --help answers at once.
from amp_lab.cli import (
    advise,
    bench,
    diff,
    doctor,
    explain,
    export,
    memory,
    migrate,
    ops,
    rehearse,
    sample,
    train,
    xray,
)
from amp_lab.cli.printing import (
    drop_unwritten,
    flush,
    open_closed_streams,
    replace_unencodable,
    show_warning,
    tell,
)
from amp_lab.core.errors import AmpLabError, AmpLabWarning, OptionError, OtherRankError
from amp_lab.core.requirements import needed_for, require_torch

COMMANDS = {
    "your machine": [doctor, bench],
    "your model": [advise, xray, memory, rehearse, diff],
    "an error": [explain],
    "your code": [migrate],
    "train": [train, sample, export],
    "reference": [ops],
}
"""The modules of the commands by the question that they answer, in the order of --help."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str):  # the usage above it would bury the one line that matters
        tell(f"{self.prog}: {message} (see {self.prog} --help)")
        self.exit(2)


class _MainParser(_Parser):
    """The parser of `amp-lab` itself, which lists the commands by the question they answer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.commands = self.add_subparsers(
            dest="command", required=True, metavar="COMMAND", parser_class=_Parser
        )
        for group in COMMANDS.values():
            for command in group:
                command.add(self.commands)

    def parse_args(self, args=None, namespace=None):
        """Parse as argparse does; an unknown option is reported with a similar one."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = _did_you_mean(unknown[0], self.commands.choices[options.command])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def format_help(self) -> str:
        """The usage, the commands in their groups, and the options."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        # argparse keeps an entry with the name and the help of each command.
        entry_of = {entry.dest: entry for entry in self.commands._choices_actions}
        for title, group in COMMANDS.items():
            formatter.start_section(title)
            names = [command.__name__.rpartition(".")[2] for command in group]
            formatter.add_arguments([entry_of[name] for name in names])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(self._optionals._group_actions)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def _did_you_mean(argument: str, parser: argparse.ArgumentParser) -> str:
    """The end of a message about an unknown option, such as ``; did you mean --precision?``.

    It names an option of the command's `parser` with a similar name, or else one with this word in
    its help. Empty if there is none, and if the unknown `argument` is no option.
    """
    name = argument.partition("=")[0]
    if not name.startswith("--"):
        return ""
    help_of: dict[str, str] = {}  # option: its help text
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                help_of[option] = str(action.help)
    suggestions = difflib.get_close_matches(name, help_of, n=1)
    word = name.strip("-").lower()
    for option, text in help_of.items():
        if word in re.findall(r"\w+", text.lower()):
            suggestions.append(option)
    if not suggestions:
        return ""
    return f"; did you mean {suggestions[0]}?"


def main(argv: list[str] | None = None) -> int:
    """Run `amp-lab` with these arguments; return its exit code.

    The exit code is 0 (even if the program that reads the output ended first), or 2 for an error
    that the user can put right, or 128 plus the number of the signal that ended the command;
    `migrate --check` returns 1 if something is to be done, and `explain` if a text is unknown.
    """
    open_closed_streams()
    replace_unencodable()
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except OtherRankError:  # the rank that raised it has printed it
        return 2
    except AmpLabError as error:
        tell(f"amp-lab {options.command}: {error}", at_once=error.is_of_one_rank)
        return 2
    except OSError as error:
        drop_unwritten()
        if isinstance(error, BrokenPipeError):
            return 0  # the program that reads our output, such as `head`, has ended
        tell(f"amp-lab {options.command}: {error}")  # such as a full disk
        return 2
    except KeyboardInterrupt:
        return 130  # as a shell counts Ctrl-C


def _run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code, 0 by default. Warnings are printed in a line each."""

    def print_warning(message: Warning | str, *_: object, **__: object) -> None:
        """Stands in for `warnings.showwarning`, which gets the place of the warning too."""
        show_warning(options.command, message)

    _refuse_empty(options)
    with warnings.catch_warnings(action="default", category=AmpLabWarning):  # whatever -W says
        warnings.showwarning = print_warning
        with needed_for(options.command):  # names the command if a package is missing
            if options.needs_torch:
                require_torch()
            code = options.run(options)
    flush()
    return code or 0


def _refuse_empty(options: argparse.Namespace) -> None:
    """Raise `OptionError` if an option has an empty text, such as ``"$OUT"`` of an unset variable.

    As a path it would mean the working folder.
    """
    for name, value in vars(options).items():
        values = value if isinstance(value, list) else [value]
        if "" in values:
            raise OptionError(f"the value of {name.replace('_', ' ')} is empty: give a value")


def _parser() -> _MainParser:
    """The parser of `amp-lab`, with a subparser for each command."""
    parser = _MainParser(
        prog="amp-lab",
        description="Tools for mixed precision in PyTorch, for your model and your hardware.",
        epilog="Add --help to a command to see its options.",
    )
    parser.add_argument("--version", action="version", version=f"amp-lab {__version__}")
    parser.set_defaults(needs_torch=True)
    return parser

"""`--help` lists the options of a command, and its defaults are those that the command uses."""

import argparse
import dataclasses
import re

import pytest

from amp_lab import cli
from amp_lab.train.train_options import RunConfig

SETTINGS = {field.name: field.default for field in dataclasses.fields(RunConfig)}


COMMANDS = next(
    action.choices
    for action in cli._parser()._actions
    if isinstance(action, argparse._SubParsersAction)
)


def named_defaults() -> list[tuple[str, str, object, str]]:
    """Command, option, value and text of each default that the parser or `RunConfig` holds."""
    found = []
    for name, command in COMMANDS.items():
        for action in command._actions:
            said = re.search(r"\(default: ([^;)]*)", action.help or "")
            if said is None or action.default is None:
                continue
            is_of_run = action.default == argparse.SUPPRESS
            value = SETTINGS[action.dest] if is_of_run else action.default
            if value is not None:
                found.append((name, action.option_strings[-1], value, said[1]))
    return found


@pytest.mark.parametrize(("command", "option", "value", "said"), named_defaults())
def test_help_names_the_default(command, option, value, said):
    if option == "--reserve":  # a share, which help gives in percent
        value = 100 * value
    assert type(value)(said) == value


def test_most_commands_name_one():
    assert {command for command, *_ in named_defaults()} >= {"train", "rehearse", "advise", "bench"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_options_of_a_command(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    options = [option for action in COMMANDS[name]._actions for option in action.option_strings]
    assert options
    assert [option for option in options if option not in printed] == []

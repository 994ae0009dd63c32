"""Whatever option a message names, the command that prints it has."""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import amp_lab
from amp_lab import cli

PACKAGE = Path(amp_lab.__file__).parent
TRAINS = ("train", "sample", "export")
# Which commands print the messages of a folder; of cli/ those of the file's name.
PRINTED_BY = {
    "train": TRAINS, "parallel": TRAINS, "models": TRAINS,
    "bench": ("bench",), "migrate": ("migrate",), "formats": ("rehearse",),
}  # fmt: skip
# Files whose messages several commands print, each of which has the options that are named.
PRINTED_BY_EACH = {
    "tracing/answered.py": ("xray", "memory", "advise"),
    "tracing/memory_advice.py": ("memory",),
    "tracing/xray.py": ("xray",),
}
OTHER_PROGRAMS = ("torchrun", "git")


def options_of() -> dict[str, set[str]]:
    """The options of each command."""
    parser = cli._parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: {option for action in command._actions for option in action.option_strings}
        for name, command in commands.choices.items()
    }


def texts(path: Path) -> Iterator[str]:
    """The texts in a file that may be printed: all but docstrings and single words."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings and " " in node.value.strip():
            yield node.value


def named(path: Path) -> list[tuple[str, str]]:
    """Each option that a text of the file names, with the text before it."""
    pattern = r"(?<![\w-])(--[a-z][a-z-]+)"
    return [(text, found[0]) for text in texts(path) for found in re.finditer(pattern, text)]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if named(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_an_option_in_a_message_is_one_of_the_command_that_prints_it(path):
    options, here = options_of(), path.relative_to(PACKAGE)
    for text, option in named(path):
        if any(program in text for program in OTHER_PROGRAMS):
            continue
        said = re.search(rf"amp-lab (\w+)[^,;]*{option}", text)
        if said:
            commands = [said[1]]
        elif here.as_posix() in PRINTED_BY_EACH:
            commands = [*PRINTED_BY_EACH[here.as_posix()]]
            assert all(option in options[command] for command in commands), (text, option)
        elif here.parts[0] == "cli":
            commands = [here.stem] if here.stem in options else list(options)
        else:
            commands = list(PRINTED_BY.get(here.parts[0], ()))
        assert commands, f"{text!r} is printed by several commands: name the one that has {option}"
        assert any(option in options[command] for command in commands), (text, option, commands)


def test_there_are_messages_to_look_at():
    assert len(FILES) > 10
    assert "--real" in options_of()["xray"]
    assert "--real" not in options_of()["advise"]

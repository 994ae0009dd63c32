"""Every command that README and docs print is one that the command line takes; and runs."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_lab import cli
from conftest import WEEKLY

ROOT = Path(__file__).parents[2]
ANSWERS = ROOT / "tests" / "answers"  # tests of the pages of questions and answers
PAGES = [ROOT / "README.md", ROOT / "CHEATSHEET.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What a person replaces: names of files and folders that are not here.
STANDS_FOR = ("FILE", "PATH", "my_model.py", "my_train.py", "before.py", "runs/", "letters.txt")
TAKES_LONG = ("bench", "train", "advise", "rehearse")  # these have tests of their own


def commands() -> list[tuple[str, list[str]]]:
    """The arguments of each `amp-lab` in a block of code, and the page that it stands on."""
    found = []
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            lines = block.replace("\\\n", " ").splitlines() if language != "python" else ()
            for line in lines:
                line = re.sub(r"  +#.*", "", line).replace("REPOSITORY", "x")
                if match := re.search(r"(?:pdm run amp-lab|-m amp_lab|\" amp-lab) (.*)", line):
                    found.append((page.name, shlex.split(match[1])))
    return found


COMMANDS = commands()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_its_title(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")


@pytest.mark.parametrize(("page", "arguments"), COMMANDS, ids=lambda value: str(value)[:60])
def test_a_command_on_a_page_is_one_that_there_is(page, arguments):
    options = cli._parser().parse_args(arguments)
    assert options.command == arguments[0]


def test_every_page_with_commands_was_read():
    assert {page for page, _ in COMMANDS} >= {
        "README.md", "bench.md", "hardware.md", "migrate.md", "several_machines.md", "train.md",
        "when_it_breaks.md", "your_model.md",
    }  # fmt: skip
    assert len(COMMANDS) > 20


RUN = [
    (page, arguments)
    for page, arguments in COMMANDS
    if arguments[0] not in TAKES_LONG
    and not any(name in part for part in arguments for name in STANDS_FOR)
    and page != "migrate.md"
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "arguments"),
    RUN if WEEKLY else [run for run in RUN if "resnet18" in " ".join(run[1])],
    ids=lambda value: str(value)[:60],
)
def test_a_command_on_a_page_runs(page, arguments, capsys):
    assert cli.main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_the_python_on_a_page_runs(capsys):
    """All but the loops of the cheat sheet, and the pages that have tests of their own."""
    tested = {path.stem.removeprefix("test_") for path in ANSWERS.glob("test_*.py")}
    blocks = {
        page.name: [
            code for language, code in FENCE.findall(page.read_text()) if language == "python"
        ]
        for page in PAGES
        if page.stem not in tested | {"frameworks"}
    }
    assert {name: len(found) for name, found in blocks.items() if found} == {
        "CHEATSHEET.md": 2, "when_it_breaks.md": 2
    }  # fmt: skip
    nonfinite, underflow = blocks["when_it_breaks.md"]

    def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).log().sum()
        loss.backward()
        return loss

    with torch.random.fork_rng():
        names = {"model": nn.Linear(2, 1), "batch": -torch.ones(1, 2), "train_step": train_step}
        nn.init.ones_(names["model"].weight)
        exec(nonfinite, names)
        assert re.match("NaN .*forward by log: outside", capsys.readouterr().out)
        names["loss"] = names["model"](torch.ones(1, 2)).sum()
        exec(underflow, names)
    assert "keep at" in capsys.readouterr().out

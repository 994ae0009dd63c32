"""Runs of `amp-lab train`: their command lines, what they leave, and how they are refused."""

import csv
import re
from pathlib import Path

import tiny_classifier
import torch

from amp_lab import load_checkpoint
from amp_lab.cli import main

# A run of 12 steps with all that must come back: shuffling, augmentation, dropout, a schedule.
RUN = {
    "--model": tiny_classifier.NAME,
    "--limit": 32,
    "--image-size": 24,
    "--batch-size": 8,
    "--epochs": 3,
    "--checkpoint-every": 1,
}
STEPS = 12


def arguments(out: Path, run: dict = RUN, **changed) -> list[str]:
    """The command line of a run into `out`; an option set to None is left out, True is a flag."""
    options = run | {"--" + name.replace("_", "-"): value for name, value in changed.items()}
    line = ["train", "--out", str(out)]
    for name, value in options.items():
        if value is not None:
            line += [name] if value is True else [name, str(value)]
    return line


def read_rows(out: Path) -> list[dict]:
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def refused(capsys, line: list[str]) -> str:
    """The one line on stderr with which `amp-lab` refuses, with exit code 2."""
    capsys.readouterr()
    try:
        code = main(line)
    except SystemExit as error:  # from the parser
        code = error.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert re.match("amp-lab( train| export)?: ", said)
    assert len(said.splitlines()) == 1, said
    assert "Traceback" not in said
    return said


def outcome(out: Path, checkpoint: str = "checkpoint.pt") -> dict:
    """All that must be equal in two runs, bit for bit: the last state, and the figures before."""
    state = load_checkpoint(out / checkpoint)
    timed = {"seconds", "images_per_s"}
    for own in state["ranks"]:
        for epoch in own["progress"]["epochs"]:
            for name in timed:
                del epoch[name]
    rows = [
        {name: value for name, value in row.items() if name not in timed} for row in read_rows(out)
    ]
    return state | {"rows": rows}


def assert_equal(first: object, second: object, where: str = "") -> None:
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert list(first) == list(second), where
        for key in first:
            assert_equal(first[key], second[key], f"{where}/{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            assert_equal(a, b, f"{where}/{i}")
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    else:
        assert first == second, where

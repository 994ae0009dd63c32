"""Whole programs as of 2020, migrated by the command: they run, and print the same losses."""

import json
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
from migrate_snippets import snippets

from amp_lab.cli import main

PROGRAMS = {  # the file to run, with its arguments, and the line and words of each mistake
    "mobilenet": (
        "mixed_precision.py",
        [],
        {
            "mixed_precision.py": [
                ("torch.nn.utils.clip_grad_norm_", "scaled gradients are clipped")
            ]
        },
    ),
    "resnet": (
        "train.py",
        ["--use-amp", "yes"],
        {"train.py": []},  # the checkpoint lacks the scaler, but nothing goes on from it
    ),
}


def write(folder: Path, name: str, device: str) -> None:
    """Write a program to a folder; on the CPU, mixed precision is on here, and not on CUDA."""
    folder.mkdir()
    for file, text in snippets(f"program_{name}").items():
        (folder / file).write_text(text.replace("torch.cuda.amp", f"torch.{device}.amp"))


@pytest.fixture
def losses(monkeypatch, capsys):
    """What to run a program with, in this process, which has loaded torch already."""

    def run(folder: Path, file: str, *arguments: str, action: str = "error") -> list[str]:
        capsys.readouterr()
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            for kind in (FutureWarning, DeprecationWarning):
                warnings.simplefilter(action, kind)
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            patch.setattr(sys, "argv", [file, *arguments])
            runpy.run_path(file, run_name="__main__")
            for path in folder.glob("*.py"):  # the next program has modules of the same names
                sys.modules.pop(path.stem, None)
        assert any("is deprecated" in str(w.message) for w in caught) == (action == "always")
        return re.findall(r"(?:loss|resumed): \S+", capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("name", "device"), [("mobilenet", "cuda"), ("mobilenet", "cpu"), ("resnet", "cuda")]
)
def test_a_program_migrates_runs_without_a_warning_and_gives_the_same(
    tmp_path, capsys, losses, name, device
):
    file, arguments, mistakes = PROGRAMS[name]
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        write(folder, name, device)
        if (folder / "preprocess.py").exists():
            losses(folder, "preprocess.py")
    assert main(["migrate", "--write", str(new)]) == 0
    said = capsys.readouterr().out
    for path, expected in mistakes.items():
        lines = (old / path).read_text().replace("torch.cpu.", "torch.cuda.").splitlines()
        found = re.findall(rf"^{re.escape(str(new / path))}:(\d+): mistake: (.*)", said, re.M)
        assert len(found) == len(expected)
        for (line, message), (code, words) in zip(found, expected, strict=True):
            assert code in lines[int(line) - 1]
            assert words in message
    assert main(["migrate", "--write", str(new)]) == 0
    assert " rewritten: " not in (again := capsys.readouterr().out)
    assert " by hand: " not in again

    printed = losses(old, file, *arguments, action="always")
    assert losses(new, file, *arguments) == printed
    assert len(set(printed)) >= 4
    if device == "cpu":  # with and without mixed precision
        assert printed[0] != printed[4]


def cells(script: str) -> list[dict]:
    """The cells of a script in the percent format, as they are in a notebook."""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.M)[1:]
    made = []
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        is_code = "markdown" not in head
        source = body.strip("\n") if is_code else re.sub(r"(?m)^# ?", "", body.strip("\n"))
        cell = {"cell_type": "code" if is_code else "markdown", "metadata": {}}
        cell |= {"execution_count": None, "outputs": []} if is_code else {}
        made.append(cell | {"source": source.splitlines(keepends=True)})
    return made


def test_the_program_as_a_notebook_becomes_what_the_script_becomes(tmp_path, capsys):
    write(tmp_path / "a", "mobilenet", "cuda")
    script, notebook = tmp_path / "a" / "mixed_precision.py", tmp_path / "a" / "mixed.ipynb"
    rest = {"metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    old = {"cells": cells(script.read_text())} | rest
    notebook.write_text(json.dumps(old, indent=1))
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    new = {"cells": cells(script.read_text())} | rest
    assert notebook.read_text() == json.dumps(new, indent=1)
    (cell, line) = re.search(
        r"mixed.ipynb:cell (\d+):(\d+): mistake", capsys.readouterr().out
    ).groups()
    assert "clip_grad_norm_" in old["cells"][int(cell) - 1]["source"][int(line) - 1]

"""What other tools take: a patch, annotations of GitHub, hooks of pre-commit."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import build_pairs
from amp_lab.cli import main

ROOT = build_pairs.FOLDER.parent
OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
NOTEBOOK = {
    "cells": [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        | {"source": ["%cd ..\n", *OLD.splitlines(keepends=True)]}
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 4,
}
FILES = {  # whatever is in a file, its patch leaves the rest of its bytes
    "a.py": OLD.encode(),
    "part/with a blank é.py": OLD.encode(),
    "crlf.py": OLD.replace("\n", "\r\n").encode(),
    "mixed.py": b"x = 1\r\n" + OLD.encode(),
    "latin.py": f"# coding: latin-1\n# é\n{OLD}".encode("latin-1"),
    "no_end.py": OLD.rstrip("\n").encode(),
    "separators.py": f"x = '\x0c\x1c\u2028'\n{OLD}".encode(),
    "note.ipynb": json.dumps(NOTEBOOK, indent=1).encode(),
    "in_one_line.ipynb": json.dumps(NOTEBOOK, separators=(",", ":")).encode(),
    "right.py": b"x = 1\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    for name, data in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize("given", [".", "absolute"])
def test_git_applies_the_patch_and_gets_what_write_writes(project, capfdbinary, given):
    path = str(project) if given == "absolute" else given
    assert main(["migrate", "--diff", path]) == 0
    patch = capfdbinary.readouterr().out
    assert {name: (project / name).read_bytes() for name in FILES} == FILES
    subprocess.run(["git", "init", "-q"], check=True, timeout=60)
    subprocess.run(["git", "apply"], input=patch, check=True, timeout=60)
    applied = {name: (project / name).read_bytes() for name in FILES}
    for name, data in FILES.items():
        (project / name).write_bytes(data)
    assert main(["migrate", "--write", path]) == 0
    assert applied == {name: (project / name).read_bytes() for name in FILES}
    assert [name for name in FILES if applied[name] == FILES[name]] == ["right.py"]


def test_what_lies_elsewhere_cannot_be_named_in_a_patch(project, capfd, monkeypatch):
    monkeypatch.chdir(project / "part")
    assert main(["migrate", "--diff", "../a.py"]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert re.search(r"a\.py: .*part of a patch: ", error)


def test_a_patch_is_no_report(capfd):
    assert main(["migrate", "--diff", "--format", "github", "."]) == 2
    assert "--diff prints a patch: leave out --format github" in capfd.readouterr().err


CODE = OLD + "for x in y:\n    scaler.scale(f(x)).backward()\n    scaler.step(opt)\n"
IN_CELL = {**NOTEBOOK, "cells": [{**NOTEBOOK["cells"][0], "source": CODE}]}


@pytest.fixture
def wrong(tmp_path, monkeypatch) -> Path:
    (tmp_path / "a,b%.py").write_text(CODE)
    (tmp_path / "note.ipynb").write_text(json.dumps(IN_CELL))
    (tmp_path / "broken.py").write_text(OLD + "x = (\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_github_gets_an_annotation_for_each_line(wrong, capsys):
    assert main(["migrate", "--check", "--format", "github", "."]) == 2
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("::")]
    title = "title=amp-lab migrate"
    assert [command.partition(": ")[0] for command in commands] == [
        f"::warning file=a%2Cb%25.py,line=2,{title}::rewritten",
        f"::error file=a%2Cb%25.py,line=5,{title}::mistake",
        f"::error file=broken.py,{title}::broken.py",
        f"::warning file=note.ipynb,{title}::cell 1, line 2",
        f"::error file=note.ipynb,{title}::cell 1, line 5",
    ]
    assert "---" not in lines


@pytest.mark.parametrize(
    ("select", "kinds"),
    [
        (["torch"], {"rewritten"}),
        (["apex"], {"by hand"}),
        (["mistakes"], {"mistake"}),
        (["apex", "torch"], {"rewritten", "by hand"}),
    ],
)
def test_only_what_is_selected_is_looked_at(tmp_path, capsys, select, kinds):
    path = tmp_path / "a.py"
    path.write_text(CODE + "from apex import amp\namp.initialize(m, o)\n")
    chosen = [word for name in select for word in ("--select", name)]
    assert main(["migrate", *chosen, "--format", "github", str(path)]) == 0
    assert set(re.findall(r"amp-lab migrate::([\w ]+):", capsys.readouterr().out)) == kinds


def test_the_hooks_of_pre_commit_are_commands_that_there_are(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"]["migrate"]
    assert len({hook["id"] for hook in hooks}) == len(hooks) == 2
    for hook in hooks:
        name, command, option = hook["entry"].split()
        assert name in project["scripts"]
        assert (command, hook["language"]) == ("migrate", "python")
        assert hook["additional_dependencies"] == needed
        assert main([command, option, str(tmp_path)]) == 0

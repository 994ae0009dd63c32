"""Notebooks with magics: what is IPython's stays as it is, and all the rest is migrated."""

import ast
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager
from remedy_tests import says

from amp_lab.cli import main
from amp_lab.migrate.magics import without_magics

CELLS = {  # what of a cell is IPython's, line by line from 1
    "%matplotlib inline\nx = 1": [1],
    "import os\n!pip install -q timm  # and ' a quote\nx = 'a'": [2],
    "%time x = f(1)": [1],
    "if on:\n    !ls data\nelse:\n    %cd ..\nx = 1": [2, 4],
    "!pip install \\\n    torch \\\n    timm\nx = 1": [1, 2, 3],
    "files = !ls\nn = 3": [1],
    "out = %sql select 1\nx = out": [1],
    "model?\nx = 1": [1],
    "torch.optim.Adam??": [1],
    "?model": [1],
    "%%time\nx = 1\ny = 2": [1, 2, 3],
    "\n\n%%bash\npip install x": [1, 2, 3, 4],
    "   \n%%bash\npip install x": [2, 3],
    'text = """\n%s of %d\n!\n""" % (1, 2)\n%cd a': [5],
    "x = (7\n  % 3)\ny = 7 \\\n  % 3": [],
    "x = 1 % 3  # (\n%cd a": [2],
    'x = ")"\n%cd a\ny = "(" % ()\n!ls': [2, 4],
    "x = [\n    1,  # !\n    # %cd\n]": [],
    "x = 'a\\'%'\n!ls": [2],
    "print(f'{x=!r}', '''\n!ls\n''')": [],
    "%cd a\r\nx = 1\r\n": [1],
}


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_no_python_is_blanked_and_nothing_else_moves(cell):
    blanked = without_magics(cell)
    ast.parse(blanked)
    assert len(blanked) == len(cell)
    pairs = list(zip(cell.splitlines(), blanked.splitlines(), strict=True))
    changed = [number for number, (old, new) in enumerate(pairs, 1) if old.rstrip() != new.rstrip()]
    assert [n for n in CELLS[cell] if pairs[n - 1][0].strip()] == changed
    is_ipython = "get_ipython" in TransformerManager().transform_cell(cell)
    assert bool(changed) == is_ipython  # as IPython itself reads it


@pytest.mark.parametrize(
    "line", ["pip install -q timm", "ls ./data/", "cd ..", "    mkdir -p out/a", "rm -rf a b"]
)
def test_a_command_that_needs_no_sign_is_blanked(line):
    cell = f"if x:\n    y = 1\n{line}\nz = 2\n"
    with pytest.raises(SyntaxError):
        ast.parse(cell)
    blanked = without_magics(cell)
    ast.parse(blanked)
    assert len(blanked) == len(cell)


@pytest.mark.parametrize("line", ["ls = 1", "cat - x", "pip in x", "cd.a", "f(\n  ls .5)", "cp\nx"])
def test_a_variable_that_is_named_like_a_command_stays(line):
    assert without_magics(f"{line}\n") == f"{line}\n"


def notebook(*cells: str) -> str:
    parts = [
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
        | {"source": cell.splitlines(keepends=True)}
        for cell in cells
    ]
    made = {"cells": parts, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(made, indent=1)


# A recipe of pytorch/tutorials, a solution of a competition, and a demo that clones its repository.
NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").iterdir())


def run(cells: list[str]) -> list:
    """What the Python of a notebook's cells makes."""
    names: dict = {}
    for cell in cells:
        exec(without_magics(cell), names)
    return names["result"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_with_magics_is_migrated_and_gives_the_same(tmp_path, monkeypatch, path):
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    old, new = (half.split("# In[]:\n") for half in path.read_text().split("--- becomes\n"))
    file = tmp_path / "a.ipynb"
    file.write_text(notebook(*old))
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_text() == notebook(*new)
    assert main(["migrate", "--check", str(file)]) == 0
    with pytest.warns(FutureWarning, match="is deprecated"):
        before = run(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        torch.testing.assert_close(run(new), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kept",
    ["%%time\nwith autocast():\n    pass\n", "%timeit autocast()", "if x:\n    %time autocast()"],
)
def test_a_name_that_a_magic_uses_keeps_its_import(tmp_path, capsys, kept):
    file = tmp_path / "a.ipynb"
    first = "import torch\nfrom torch.cuda.amp import autocast\nwith autocast(): pass\n"
    file.write_text(notebook(first, kept))
    assert main(["migrate", "--write", str(file)]) == 0
    now = first.replace("with autocast(", 'with torch.amp.autocast("cuda", dtype=torch.float16')
    assert file.read_text() == notebook(now, kept)
    said = capsys.readouterr().out
    line = next(n for n, text in enumerate(kept.splitlines(), 1) if "autocast" in text)
    assert re.search(rf"a\.ipynb:cell 2:{line}: by hand: .*uses torch\.", said)
    assert says("migrate.in_magic", said)


@pytest.mark.parametrize(
    ("first", "kept", "advice"),
    [
        (
            "from apex import amp\n",
            "%%time\nx = amp.initialize(m, o)\n",
            "2:2: by hand: delete this call",
        ),
        ("import apex\n", "%time apex.amp.initialize(m, o)\n", "2:1: by hand: delete this call"),
        ("from apex.optimizers import FusedAdam\n", "%time FusedAdam(p)\n", "2:1: by hand: write"),
        (
            "from apex.fp16_utils import FP16_Optimizer\n",
            "%time FP16_Optimizer(o)\n",
            "2:1: by hand",
        ),
    ],
)
def test_an_import_of_apex_that_a_magic_uses_is_not_left_over(
    tmp_path, capsys, first, kept, advice
):
    file = tmp_path / "a.ipynb"
    file.write_text(notebook(first, kept))
    assert main(["migrate", "--check", str(file)]) == 1
    said = capsys.readouterr().out
    assert f"a.ipynb:cell {advice}" in said
    assert "delete the import" not in said

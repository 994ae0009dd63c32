"""The names of torch, torchao and keras that the notebooks call are in the installed versions.

A notebook finds such a name missing too, but only in the cell that calls it.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
LIBRARIES = ("torch", "torchao", "keras")
ENVIRONMENT = os.environ | {"KERAS_BACKEND": "torch"}
PRINTED = re.compile(r"^# ```python\n(.*?)^# ```$", re.MULTILINE | re.DOTALL)


def code_in(text: str) -> Iterator[ast.Module]:
    """The code of a notebook, and the code that its text shows, where that is whole."""
    yield ast.parse(text)
    for block in PRINTED.findall(text):
        try:
            yield ast.parse(re.sub("^# ?", "", block, flags=re.MULTILINE))
        except SyntaxError:  # a part of a program
            continue


def library_names(tree: ast.Module, library: str) -> set[str]:
    """The full names of a library's functions, classes and modules that the code mentions."""
    modules: dict[str, str] = {}  # of a name in the code
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found.add(name.name)
                top = name.name.partition(".")[0]
                modules[name.asname or top] = name.name if name.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
                found.add(f"{node.module}.{name.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, others = ast.unparse(node).partition(".")
            if first in modules and re.fullmatch(r"[\w.]+", others):
                found.add(f"{modules[first]}.{others}")
    return {name for name in found if name.partition(".")[0] == library}


def is_there(name: str) -> bool:
    """Whether the installed library has a name; what follows a value in it is not looked at."""
    first, *others = name.split(".")
    value, so_far = importlib.import_module(first), first
    for other in others:
        so_far += f".{other}"
        if not hasattr(value, other):
            try:
                importlib.import_module(so_far)
            except ImportError:
                return False
        value = getattr(value, other)
        if not (inspect.isclass(value) or isinstance(value, types.ModuleType)):
            break
    return True


def missing_names(library: str) -> list[str]:
    """The names that the notebooks and `course` mention and the installed library does not have."""
    missing = []
    for path in sorted(NOTEBOOKS.rglob("*.py")):
        for tree in code_in(path.read_text(encoding="utf-8")):
            names = sorted(library_names(tree, library))
            missing += [f"{path.name}: {name}" for name in names if not is_there(name)]
    return missing


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_version_has_every_name_that_the_notebooks_call(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    # In a process of its own: some libraries warn when they are imported, or choose a backend.
    code = f"import test_called_names as t; print('\\n'.join(t.missing_names({library!r})))"
    command = [sys.executable, "-c", code]
    settings = {"cwd": Path(__file__).parent, "env": ENVIRONMENT}
    done = subprocess.run(command, **settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_names_are_found_under_each_form_of_import():
    code = (
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
        "import torch.distributed as dist\nx = torch.amp.GradScaler().scale\nF.relu(nn.Linear)\n"
        "dist.init_process_group()\ny.torch.no_name\n"
    )
    assert library_names(ast.parse(code), "torch") >= {
        "torch.amp.GradScaler",
        "torch.nn.functional.relu",
        "torch.nn.Linear",
        "torch.distributed.init_process_group",
    }
    assert not [name for name in library_names(ast.parse(code), "torch") if "no_name" in name]


def test_the_code_in_the_text_is_read_too():
    text = "# ```python\n# from torchao.optim import AdamW8bit\n#\n# AdamW8bit()\n# ```\n"
    names = [name for tree in code_in(text) for name in library_names(tree, "torchao")]
    assert names == ["torchao.optim.AdamW8bit"]


@pytest.mark.parametrize("name", ["torch.no_such", "torch.nn.NoSuch", "torch.Tensor.no_such"])
def test_a_name_that_is_not_there_is_found(name):
    assert not is_there(name)


@pytest.mark.parametrize("name", ["torch.nn.Linear", "torch.float16.itemsize", "torch.nn.init"])
def test_a_name_that_is_there_is_found(name):
    assert is_there(name)

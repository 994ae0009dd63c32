"""The rules of ARCHITECTURE.md, on this package and on small ones that break them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import density
import measure_code

ROOT = measure_code.ROOT
PACKAGE = measure_code.PACKAGE

# What the package keeps to. Its number of lines and of public names has no limit.
MOST_BRANCHING_PER_100_FUNCTIONS = 5.0
FEWEST_COMMENTS_PER_100_LINES = 6.0
MOST_ERROR_CLASSES = 12
MOST_NODES_PER_STATEMENT = 7.0
MOST_NODES_PER_LINE = 5.5
MOST_PER_1000_LINES = {"tuple_assignments": 7.0, "conditional_expressions": 22.0}


def test_the_package_keeps_the_rules():
    assert measure_code.complaints(PACKAGE, measure_code.NOTEBOOKS) == []


def test_the_package_stays_plain():
    figures = measure_code.table(PACKAGE)
    limits = "\n".join(f"{name}: {value}" for name, value in figures.items())
    assert number(figures, "blocks") <= MOST_BRANCHING_PER_100_FUNCTIONS, limits
    assert number(figures, "comments") >= FEWEST_COMMENTS_PER_100_LINES, limits
    errors = re.findall(
        r"^class (\w+)\(", (PACKAGE / "core" / "errors.py").read_text(), re.MULTILINE
    )
    assert len(errors) <= MOST_ERROR_CLASSES, errors


def test_a_statement_and_a_line_say_no_more_than_can_be_read_at_once():
    """The files are as `ruff format` writes them, since the linter asks for that."""
    total = density.Density()
    for path in sorted(PACKAGE.rglob("*.py")):
        total += density.density(path.read_text(encoding="utf-8"))
    assert total.nodes_per_statement <= MOST_NODES_PER_STATEMENT
    assert total.nodes_per_line <= MOST_NODES_PER_LINE
    for habit, most in MOST_PER_1000_LINES.items():
        assert total.per_1000_lines(habit) <= most, habit


def number(figures: dict[str, str], beginning: str) -> float:
    value = next(value for name, value in figures.items() if name.startswith(beginning))
    return float(value.replace(",", ""))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A package that keeps all the rules: folders of two floors, one with a folder inside."""
    package = tmp_path / "amp_lab"
    for folder in ("core", "train", "train/data", "cli"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text("_EXPORTS = {}\n")
    (package / "core" / "device.py").write_text("import amp_lab.core.errors\n")
    (package / "train" / "run.py").write_text("from amp_lab.train.data import batches\n")
    (package / "cli" / "__init__.py").write_text("from amp_lab import core, train\n")
    return package


def test_a_package_that_keeps_the_rules_is_told_nothing(small):
    notebook = small.parent / "01_sound.py"
    notebook.write_text("from amp_lab.train.data import x\nfrom amp_lab.core.device import y\n")
    assert measure_code.complaints(small, [notebook]) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("core/device.py", "from amp_lab.train.data import x\n", "core/ imports train/, which is"),
        ("core/device.py", "def f():\n    from amp_lab import train\n", "core/ imports train/"),
        ("train/run.py", "import amp_lab.cli.train\n", "train/ imports cli/, which is above it"),
        (
            "train/data/text.py",
            "from amp_lab.train.run import x\n",
            "a file of train/, which holds",
        ),
        ("banana.py", "", "in no folder that measure_code.py knows"),
        ("train/run.py", "x = 1\n" * 501, "501 lines; split a module of more than 500"),
        ("core/device.py", "def f():\n" + "    x = 1\n" * 80, "f has 81 lines; split a function"),
        ("../02_x.py", "from amp_lab.train.data.text import x\n", "a file of amp_lab.train.data;"),
        ("../02_x.py", "import amp_lab.train.run as x\n", "a file of amp_lab.train;"),
        ("../02_x.py", "from amp_lab.train import run\n", "a file of amp_lab.train;"),
    ],
)
def test_a_broken_rule_is_named_with_its_place(small, file, text, said):
    path = small / file
    path.write_text(text)
    notebooks = [path.resolve()] if path.resolve().parent == small.parent else []
    (complaint,) = measure_code.complaints(small, notebooks)
    assert said in complaint
    assert path.name in complaint


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (f"def f({', '.join(f'a{i}' for i in range(9))}):\n    pass\n", "PLR0913"),
        ("def f(x):\n" + "    if x:\n        x += 1\n" * 11, "C901"),
        ("def f(x):\n" + "    x += 1\n" * 51, "PLR0915"),
    ],
)
def test_ruff_holds_the_size_of_a_function(tmp_path, text, rule):
    """Run as `pdm run lint` does, on a file that would lie in the package."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise"]
    file = ["--stdin-filename", str(PACKAGE / "new.py"), "-"]
    done = subprocess.run([*command, *file], input=text, capture_output=True, text=True, cwd=ROOT)
    assert rule in done.stdout, done.stdout


def test_the_page_shows_the_folders_that_there_are():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page.partition("## The folders")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    assert sorted(shown) == sorted(measure_code.FOLDERS)
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(shown)
    for module in (PACKAGE / "core").glob("[a-z]*.py"):
        assert f"`{module.stem}`" in page, module
    for path in re.findall(r"`((?:src|notebooks|tests|tools|data|docker)/[\w./-]*)`", page):
        assert (ROOT / path).exists(), path


def test_contributing_names_files_that_there_are():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipes = page.partition("## How to add")[2]
    named = re.findall(r"`(\w+/[\w./-]+\.py)`", recipes)
    assert len(named) > 15
    made_up = {"train/data/NAME.py"}  # by whoever follows the recipe
    for path in set(named) - made_up:
        assert (ROOT / path).exists() or (PACKAGE / path).exists(), path


def test_contributing_names_what_stands_in_those_files():
    """Such as the table to which a row is added."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipes = page.partition("## How to add")[2]
    named = re.findall(r"`(\w+)`(?: or\s+`(\w+)`)? (?:in|of|to)\s+`([\w./]+\.py)`", recipes)
    assert len(named) > 15
    for *names, path in named:
        file = PACKAGE / path if (PACKAGE / path).exists() else ROOT / path
        for name in filter(None, names):
            assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")), (name, path)

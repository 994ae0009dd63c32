"""The notebooks: pairs in step and executed, every cell run, each also a plain script."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import build_pairs
from conftest import cells_not_run

SOURCES = build_pairs.find()
NAMES = [source.stem for source in SOURCES]
MAX_BYTES = 250_000
MAX_CELL_LINES = 20
SCRIPT_NEEDS = {"amp_lab", "torch", "torchvision", "numpy", "matplotlib", "sklearn", "tqdm"} | {
    "PIL", "filelock",  # come with torchvision and torch
}  # fmt: skip
START_NEEDS = {
    "12_keras": ("keras", "tensorflow")
}  # besides; `start` says in a line if it is not there

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=NAMES)


def read_pair(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def code_cells(source: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in build_pairs.read_source(source).cells if cell.cell_type == "code"]


def run_script(source: Path, **settings: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", source],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_there_are_notebooks_numbered_without_a_gap():
    assert [int(name[:2]) for name in NAMES] == list(range(1, len(NAMES) + 1))
    assert len(NAMES) >= 4


@each_notebook
def test_pair_is_in_step(source):
    build_pairs.check([source])


@each_notebook
def test_a_changed_line_puts_the_pair_out_of_step(source, tmp_path):
    for path in (source, source.with_suffix(".ipynb")):
        shutil.copy(path, tmp_path)
    shutil.copy(build_pairs.FOLDER.parent / "pyproject.toml", tmp_path)
    copy = tmp_path / source.name
    build_pairs.check([copy])
    copy.write_text(copy.read_text() + "\n# %%\nassert True\n")
    with pytest.raises(build_pairs.Problem, match="out of step"):
        build_pairs.check([copy])


@each_notebook
def test_pair_was_executed_from_top_to_bottom_without_a_word_on_stderr(source):
    pair = read_pair(source)
    code = [cell for cell in pair.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)


@each_notebook
def test_pair_is_small_and_holds_no_metadata_of_a_machine(source):
    assert source.with_suffix(".ipynb").stat().st_size < MAX_BYTES
    pair = read_pair(source)
    assert set(pair.metadata) == {"kernelspec"}
    for cell in pair.cells:  # jupytext keeps the blank lines of the .py in lines_to_next_cell
        assert set(cell.metadata) <= {"tags", "lines_to_next_cell"}
        assert set(cell.metadata.get("tags", [])) <= {"nbval-ignore-output"}


@each_notebook
def test_frame(source):
    """One H1; what you'll do, learn and need; summary, exercises and further reading last."""
    text = "\n".join(
        c.source for c in build_pairs.read_source(source).cells if c.cell_type == "markdown"
    )
    assert len(re.findall(r"^# \S", text, re.MULTILINE)) == 1
    for heading in ("**What you'll do.**", "**What you'll learn.**", "**What you need.**"):
        assert heading in text
    sections = re.findall(r"^## (.+)", text, re.MULTILINE)
    assert sections[-3:] == ["Summary", "Exercises", "Further reading"]


@each_notebook
def test_cells_are_short_and_the_notebook_asserts(source):
    cells = code_cells(source)
    lines = {i: sum(map(bool, cell.source.splitlines())) for i, cell in enumerate(cells)}
    assert {i: n for i, n in lines.items() if n > MAX_CELL_LINES} == {}
    asserting = [
        cell
        for cell in cells
        if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source)))
    ]
    assert len(asserting) >= len(cells) / 3


@each_notebook
def test_a_cell_that_nbval_does_not_compare_asserts_or_draws(source):
    for cell in code_cells(source):
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            assert re.search(r"\bassert\b|plots\.|assert_close", cell.source), cell.source


@each_notebook
def test_links_between_notebooks_lead_somewhere(source):
    for cell in build_pairs.read_source(source).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\((?!https?://)([^)#]+)", cell.source):
                assert (source.parent / target).exists(), target


@each_notebook
def test_is_a_plain_script_that_needs_little(source):
    """nbval runs the cells; as a script they need no more than a GPU machine's Python has."""
    modules, names = set(), set()
    package = source.parent / "amp_lab"
    for path in (source, *package.rglob("*.py")):
        if path.parent == package / "migrate":
            continue  # needs libcst: see the next test
        nodes = list(ast.walk(ast.parse(path.read_text())))
        for node in nodes:
            if isinstance(node, ast.Import):
                modules.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module.partition(".")[0])
        if path == source:
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert modules - sys.stdlib_module_names <= SCRIPT_NEEDS.union(START_NEEDS.get(source.stem, ()))
    assert not names & {"get_ipython", "display"}


def imports_migration(node: ast.AST) -> bool:
    """Whether this is a statement that loads `amp_lab.migrate`, or a part of it."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return any(f"{name}.".startswith("amp_lab.migrate.") for name in names)


def test_the_command_and_one_cell_alone_load_what_needs_more():
    """That cell, in notebook 13, does so only where libcst is: see its own test."""
    package = SOURCES[0].parent / "amp_lab"
    loading = {
        str(path.relative_to(package.parent))
        for path in (*SOURCES, *package.rglob("*.py"))
        if path.parent != package / "migrate"
        and any(map(imports_migration, ast.walk(ast.parse(path.read_text()))))
    }
    assert loading == {"13_from_apex.py", "amp_lab/cli/migrate.py"}
    without = "import sys; sys.modules['libcst'] = None; import amp_lab.cli"
    assert subprocess.run([sys.executable, "-c", without]).returncode == 0


def test_one_runs_as_a_script_without_a_warning():
    """All of them do so in the weekly run: here it would double the time of the tests."""
    done = run_script(SOURCES[2])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@each_notebook
def test_set_up_is_the_same_in_every_notebook(source):
    more = ", ".join(f'"{name}"' for name in START_NEEDS.get(source.stem, ()))
    assert f"device, scale = start({more})" in code_cells(source)[0].source


def test_script_refuses_a_wrong_setting_in_one_line():
    done = run_script(SOURCES[2], AMP_LAB_DEVICE="banana")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "AMP_LAB_DEVICE='banana' is not a device" in done.stderr


def test_script_refuses_a_missing_package_in_one_line():
    code = "from amp_lab.notebook import start; start('json', 'no_such', 'nor_this')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "needs no_such and nor_this, not installed here; `pdm sync`" in done.stderr


def test_a_cell_that_did_not_run_is_counted():
    all_cells = {
        f"notebooks/{source.stem}.ipynb::Cell {number}"
        for source in SOURCES
        for number in range(len(code_cells(source)))
    }
    assert cells_not_run(all_cells) == {}
    one = f"{NAMES[0]}.ipynb"
    assert cells_not_run(all_cells - {f"notebooks/{one}::Cell 0"}) == {one: 1}

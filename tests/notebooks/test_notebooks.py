"""The notebooks: pairs in step and executed, every cell run, each also a plain script."""

import ast
import functools
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import build_pairs
import reading_time
from conftest import cells_not_run

pytestmark = pytest.mark.slow

SOURCES = build_pairs.find()
NAMES = [source.stem for source in SOURCES]
MAX_BYTES = 350_000
MAX_MINUTES, MAX_LINES = 20, 650  # of reading, and of the whole source
MAX_OPTIONAL = 0.2  # of the minutes
MAX_TOGETHER = 450  # minutes, with optional sections
MAX_CELL_LINES = 20
SCRIPT_NEEDS = {"torch", "torchvision", "numpy", "matplotlib", "sklearn", "tqdm"} | {
    "amp_lab", "course",  # of this checkout
    "PIL", "filelock", "triton",  # come with torchvision and torch
    "matplotlib_inline",  # imported in a kernel alone, which brings it
}  # fmt: skip
START_NEEDS = {"12_keras": ("keras",)}  # besides; `start` says in a line if it is not there
OPTIONAL = {"12_keras": {"tensorflow"}}  # what a notebook does without where it is not there

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=NAMES)


def read_pair(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def cells_of(source: Path) -> list[nbformat.NotebookNode]:
    return _cells(source, source.read_text(encoding="utf-8"))


@functools.cache
def _cells(source: Path, text: str) -> list[nbformat.NotebookNode]:
    return build_pairs.read_source(source).cells


def code_cells(source: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in cells_of(source) if cell.cell_type == "code"]


def run_script(source: Path, **settings: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", source],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_notebook_has_a_number_of_its_own():
    numbers = [name.partition("_")[0] for name in NAMES]
    twice = {number for number in numbers if numbers.count(number) > 1}
    assert not twice, f"two notebooks have the number {twice}; rename one of them"
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
    anew = f"run: pdm run notebooks {source.stem}"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), anew
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs), anew
    printed = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not printed, f"a cell warns; change it so that it does not, then {anew}: {printed}"


@each_notebook
def test_pair_is_small_and_holds_no_metadata_of_a_machine(source):
    size = source.with_suffix(".ipynb").stat().st_size
    assert size < MAX_BYTES, f"{size} bytes are too many: draw fewer figures, or print less"
    pair = read_pair(source)
    anew = f"make the pair with: pdm run notebooks {source.stem}"
    assert set(pair.metadata) == {"kernelspec"}, anew
    for cell in pair.cells:  # jupytext keeps the blank lines of the .py in lines_to_next_cell
        assert set(cell.metadata) <= {"tags", "lines_to_next_cell"}, anew
        tags = set(cell.metadata.get("tags", []))
        assert tags <= {"nbval-ignore-output"}, f"no other tag than nbval-ignore-output: {tags}"


@each_notebook
def test_frame(source):
    """One H1; what you'll do, learn and need; summary, exercises and further reading last.

    A part of the reference of failures has no summary and no exercises.
    """
    text = "\n".join(
        c.source for c in build_pairs.read_source(source).cells if c.cell_type == "markdown"
    )
    titles = re.findall(r"^# \S.*", text, re.MULTILINE)
    assert len(titles) == 1, f"write one title, '# Verb …', and '## …' for sections: {titles}"
    for heading in ("**What you'll do.**", "**What you'll learn.**", "**What you need.**"):
        assert heading in text, f"write a paragraph below the title that begins with {heading}"
    sections = re.findall(r"^## (.+)", text, re.MULTILINE)
    last = ["Summary", "Exercises", "Further reading"]
    if build_pairs.is_reference(source):
        last = last[-1:]
    found = sections[-len(last) :]
    assert found == last, f"end with the sections {last}, not {found}"


@each_notebook
def test_it_can_be_read_in_twenty_minutes(source):
    found, lines = reading_time.minutes(source), len(source.read_text().splitlines())
    assert found.core <= MAX_MINUTES, f"{found.core:.1f} minutes: drop an idea"
    assert found.optional <= MAX_OPTIONAL * found.core, f"{found.optional:.1f} minutes are optional"
    assert lines <= MAX_LINES, f"{lines} lines: a notebook has at most {MAX_LINES}"


def test_all_can_be_read_in_seven_hours_and_a_half():
    sources = [source for source in SOURCES if not build_pairs.is_reference(source)]
    assert sum(sum(reading_time.minutes(source)) for source in sources) <= MAX_TOGETHER


def test_the_readme_says_how_long_they_take():
    readme = reading_time.README.read_text(encoding="utf-8")
    rows = {match[2] for match in reading_time.ROW.finditer(readme)}
    lessons = {source.stem for source in SOURCES if not build_pairs.is_reference(source)}
    assert rows == lessons, f"the README's table has no row for {lessons ^ rows}"
    assert reading_time.with_minutes(readme) == readme, "python tools/reading_time.py --write"


@each_notebook
def test_a_ratio_in_the_text_was_printed(source):
    """Others come from a machine's run that no reader can see, or from one that is gone."""
    pair = read_pair(source)
    lesson = "\n".join(c.source for c in pair.cells if c.cell_type == "markdown")
    printed = "\n".join(
        str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
        for cell in pair.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    lesson = lesson.partition("## Exercises")[0]  # which may give some to work with
    ratio = re.compile(r"(?<![\d.])\d+\.\d+x\b")
    gone = set(ratio.findall(lesson)) - set(ratio.findall(printed)) - {"1.00x"}  # which is a line
    assert not gone, f"no cell prints {gone}: quote what the pair shows today"


@each_notebook
def test_cells_are_short_and_the_notebook_asserts(source):
    cells = code_cells(source)
    lines = {i: sum(map(bool, cell.source.splitlines())) for i, cell in enumerate(cells)}
    long = {f"code cell {i + 1}": n for i, n in lines.items() if n > MAX_CELL_LINES}
    assert not long, f"at most {MAX_CELL_LINES} lines a cell, make two of it: {long}"
    asserting = [
        cell
        for cell in cells
        if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source)))
    ]
    lesson = [
        cell for cell in cells if "\nexercises.check_" not in cell.source
    ]  # exercises check themselves
    assert len(asserting) >= len(lesson) / 3, (
        f"{len(asserting)} of {len(lesson)} code cells assert something; a third of them must: "
        "assert what the text says"
    )


@each_notebook
def test_a_cell_that_nbval_does_not_compare_asserts_or_draws(source):
    for cell in code_cells(source):
        if "nbval-ignore-output" in cell.metadata.get("tags", []):
            assert re.search(r"\bassert\b|figures\.|assert_close|= start\(", cell.source), (
                f"assert what must hold on any machine in this cell, or draw it: {cell.source}"
            )


def made_on(pair: nbformat.NotebookNode) -> str:
    """The line that `start` printed into a pair, without scale, date and commit."""
    line = build_pairs.stamp(pair)
    made = r".+, CPU, .+, \d+ threads, torch \S+, quick scale, \d{4}-\d\d-\d\d, commit [0-9a-f]+\n"
    assert re.fullmatch(made, line), line
    return line.partition(", quick scale")[0]


def test_all_pairs_come_from_one_machine_and_one_torch():
    machines = {source.stem: made_on(read_pair(source)) for source in SOURCES}
    assert len(set(machines.values())) == 1, machines


@each_notebook
def test_no_pair_holds_a_figure_of_a_busy_machine(source):
    found = build_pairs.untrusted(read_pair(source))
    assert not found, f"make it on a quiet machine: pdm run notebooks {source.stem[:2]}"


@each_notebook
def test_links_between_notebooks_lead_somewhere(source):
    for cell in cells_of(source):
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", cell.source):
                assert (source.parent / target).exists(), f"correct the link: no file {target}"


def imports_and_names(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """The packages that a file imports without asking for them in a line, and its names."""
    return _imports_and_names(path.read_text(encoding="utf-8"))


@functools.cache
def _imports_and_names(text: str) -> tuple[frozenset[str], frozenset[str]]:
    modules, tree = set(), ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and "needed_for(" in ast.unparse(node.items[0]):
            node.body = []  # what is asked for in a line, if it is missing
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    return frozenset(modules), frozenset(node.id for node in nodes if isinstance(node, ast.Name))


@each_notebook
def test_is_a_plain_script_that_needs_little(source):
    """nbval runs the cells; as a script they need no more than a GPU machine's Python has."""
    modules, names = imports_and_names(source)
    package = build_pairs.FOLDER.parent / "src" / "amp_lab"
    course = build_pairs.FOLDER / "course"
    of_course = [*course.glob("*.py"), *course.glob("figures/*.py")]
    of_course += course.glob(f"exercises/{source.name}")
    for path in (*package.rglob("*.py"), *of_course):
        # These need extras, and ask for them in a line.
        if package / "migrate" not in path.parents and path.name != "export.py":
            modules |= imports_and_names(path)[0]
    needed = SCRIPT_NEEDS.union(START_NEEDS.get(source.stem, ()), OPTIONAL.get(source.stem, ()))
    more = modules - sys.stdlib_module_names - needed
    assert not more, f"a GPU machine's Python may lack {more}: do without, or see START_NEEDS"
    assert not names & {"get_ipython", "display"}, "print it, or end the cell with it"


def imports_migration(node: ast.AST) -> bool:
    """Whether this is a statement that loads `amp_lab.migrate`, or a part of it."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return any(f"{name}.".startswith("amp_lab.migrate.") for name in names)


def test_the_command_and_one_cell_alone_load_what_needs_more():
    """That cell, in notebook 13, does so only where libcst is: see its own test."""
    package = build_pairs.FOLDER.parent / "src" / "amp_lab"
    loading = {
        path.name
        for path in (*SOURCES, *package.rglob("*.py"))
        if package / "migrate" not in path.parents
        and any(map(imports_migration, ast.walk(ast.parse(path.read_text()))))
    }
    assert loading == {"13_from_apex.py", "migrate.py"}
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
    line = f"device, scale = start({more})"
    assert line in code_cells(source)[0].source, f"the first code cell must have the line: {line}"


def test_script_refuses_a_wrong_setting_in_one_line():
    done = run_script(SOURCES[2], AMP_LAB_DEVICE="banana")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "AMP_LAB_DEVICE='banana' is not a device" in done.stderr


def test_script_refuses_a_missing_package_in_one_line():
    code = "from course import start; start('json', 'no_such', 'nor_this')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=build_pairs.FOLDER, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "needs no_such and nor_this: run `pdm sync`" in done.stderr


def test_a_cell_that_did_not_run_is_counted():
    all_cells = {
        f"notebooks/{source.stem}.ipynb::Cell {number}"
        for source in SOURCES
        for number in range(len(code_cells(source)))
    }
    assert cells_not_run(all_cells) == {}
    one = f"{NAMES[0]}.ipynb"
    assert cells_not_run(all_cells - {f"notebooks/{one}::Cell 0"}) == {one: 1}


@pytest.fixture(scope="module")
def new_notebook(tmp_path_factory) -> Path:
    """A notebook as `pdm run notebooks --new` makes it, with its pair."""
    root = tmp_path_factory.mktemp("new")
    (root / "notebooks").mkdir()
    shutil.copy(build_pairs.FOLDER.parent / "pyproject.toml", root)
    shutil.copy(SOURCES[1].with_suffix(".ipynb"), root / "notebooks")  # which it links to
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(build_pairs.FOLDER))  # where `course` is
        patch.setattr(build_pairs, "FOLDER", root / "notebooks")
        assert build_pairs.main(["--new", "20_fused_optimizers"]) == 0
        assert build_pairs.main(["--force", "20"]) == 0  # it times nothing
    return root / "notebooks" / "20_fused_optimizers.py"


RULES = [
    rule
    for name, rule in list(globals().items())
    if name.startswith("test_") and "source" in inspect.signature(rule).parameters
]


@pytest.mark.parametrize("rule", RULES, ids=[rule.__name__ for rule in RULES])
def test_a_new_notebook_passes_every_rule(rule, new_notebook, tmp_path):
    given = {"source": new_notebook, "tmp_path": tmp_path}
    rule(**{name: given[name] for name in inspect.signature(rule).parameters})


def test_a_new_notebook_passes_the_linter(new_notebook):
    ruff = shutil.which("ruff")
    if ruff is None:
        pytest.skip("the dependency group 'lint' is not installed")
    name = f"notebooks/{new_notebook.name}"
    for command in ("check", "format --check"):
        line = [ruff, *command.split(), "--no-cache", "--stdin-filename", name, "-"]
        text = new_notebook.read_text(encoding="utf-8")
        root = build_pairs.FOLDER.parent
        done = subprocess.run(line, cwd=root, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

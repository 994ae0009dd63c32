"""The notebooks for Colab and Kaggle: their first cell, and where their links lead."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from packaging.requirements import Requirement

import build_pairs
import edition

ROOT = edition.ROOT
COMMIT = "c0ffee" + "0" * 34
ADDRESS = "https://github.com/owner/name"
COLAB = "/github/owner/name/blob/colab/"
NOWHERE = "http://127.0.0.1:9/name"  # a port where nothing listens
OLD_PYTHON = "import sys; sys.version_info = (3, 10, 12)\n"


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """The edition, in a folder of its own."""
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.setattr(edition, "_commit", lambda root: COMMIT)
    edition.write(tmp_path / "colab")
    return tmp_path / "colab"


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def links(notebook: nbformat.NotebookNode) -> list[str]:
    """The targets of the links in its text."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
    return re.findall(r"\]\(((?:[^()\s]|\([^()\s]*\))+)", code.sub("", text))


def problem(link: str, notebook: nbformat.NotebookNode, folder: Path) -> str:
    """Why a link of a notebook in the edition leads nowhere; empty if it leads somewhere."""
    parts = urlsplit(link)
    if not parts.scheme:
        text = "\n".join(cell.source for cell in notebook.cells)
        is_there = parts.path == "" and f'name="{unquote(parts.fragment)}"' in text
        return "" if is_there else "no such section"
    if parts.netloc == "colab.research.google.com" and parts.path.startswith(COLAB):
        other = folder / parts.path.removeprefix(COLAB)
        if not other.is_file():
            return "no such notebook"
        cells = {cell.metadata.get("id") for cell in read(other).cells}
        cell = parts.fragment.removeprefix("scrollTo=")
        return "" if not cell or cell in cells else "no such cell"
    if link.startswith(ADDRESS):
        path = parts.path.removeprefix(f"/owner/name/blob/{COMMIT}/")
        return "" if (ROOT / path).is_file() else "no such file in the repository"
    return ""  # to another host


def test_a_notebook_is_its_pair_with_one_cell_more(written):
    sources = build_pairs.find()
    assert sorted(path.stem for path in written.iterdir()) == [source.stem for source in sources]
    for source in sources:
        notebook = read(written / f"{source.stem}.ipynb")
        nbformat.validate(notebook)
        first, *others = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        assert notebook.cells[0].source == first
        if source.stem.startswith("10_"):
            assert others.pop() == edition.RECORD_CELL.read_text(encoding="utf-8").strip()
        pair = read(source.with_suffix(".ipynb"))
        assert others == [cell.source for cell in pair.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("answer", ["True", "False"])
def test_the_last_cell_of_notebook_10_records_the_device_if_asked(monkeypatch, capsys, answer):
    calls = []
    monkeypatch.setitem(sys.modules, "record", SimpleNamespace(record_device=record))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(record, "calls", calls, raising=False)
    code = edition.RECORD_CELL.read_text(encoding="utf-8")
    exec(code.replace("RECORD = False", f"RECORD = {answer}"), {})
    assert calls == ([10] if answer == "True" else [])
    assert ("Set RECORD to True" in capsys.readouterr().out) == (answer == "False")
    assert (str(ROOT / "tools") == sys.path[0]) == (answer == "True")


def record(minutes):
    record.calls.append(minutes)


def test_every_link_leads_to_something_that_is_published(written):
    wrong, inside = [], 0
    for path in sorted(written.iterdir()):
        notebook = read(path)
        for link in links(notebook):
            found = problem(link, notebook, written)
            inside += "scrollTo" in link or ADDRESS in link
            if found:
                wrong.append((path.name, link, found))
    assert wrong == []
    assert inside > 100


@pytest.mark.parametrize(
    "link",
    [
        f"https://colab.research.google.com{COLAB}99_gone.ipynb",
        f"https://colab.research.google.com{COLAB}00_start_here.ipynb#scrollTo=gone",
        f"{ADDRESS}/blob/{COMMIT}/docs/gone.md",
        "#gone",
        "../docs/train.md",
    ],
)
def test_a_link_that_leads_nowhere_is_found(written, link):
    assert problem(link, read(written / "00_start_here.ipynb"), written)


@pytest.mark.parametrize(
    ("variable", "urls", "expected"),
    [
        ("owner/name", "", ADDRESS),
        ("owner/name", '[project.urls]\nRepository = "https://github.com/a/b"\n', ADDRESS),
        ("", '[project.urls]\nRepository = "https://github.com/owner/name.git"\n', ADDRESS),
        ("", "", ""),
    ],
)
def test_the_address_is_one_setting(tmp_path, monkeypatch, variable, urls, expected):
    (tmp_path / "pyproject.toml").write_text(f"[project]\n{urls}")
    monkeypatch.setenv("GITHUB_REPOSITORY", variable)
    assert edition.repository(tmp_path) == expected


@pytest.mark.parametrize("address", ["", "file:///somewhere", "https://example.org/owner/name"])
def test_colab_opens_only_what_is_on_github(address):
    assert edition.colab_address(address, "00_start_here.ipynb") == ""


def test_the_first_cell_asks_for_what_pyproject_names():
    code = "device, scale = start({})"
    of_all, of_keras = (
        edition.packages_of({"cells": [{"cell_type": "code", "source": [code.format(argument)]}]})
        for argument in ("", '"keras"')
    )
    assert {"lunr>=0.8", "libcst>=1.8", "tqdm>=4.67"} <= set(of_all)
    assert not [need for need in of_all if need.startswith(("torch>", "amp-lab", "keras"))]
    assert [re.match(r"\w+", need)[0] for need in of_keras if need not in of_all] == ["keras"]


@pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="a whole checkout: an image has none")
def test_what_colab_has_is_new_enough():
    text = (ROOT / ".github" / "requirements" / "colab.txt").read_text(encoding="utf-8")
    there = dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))
    asked = [Requirement(need) for need in edition.requirements()]
    checked = [need for need in asked if need.name in there]
    assert {need.name for need in checked} >= {"numpy", "scikit-learn", "torchvision"}
    for need in checked:
        assert there[need.name] in need.specifier, need


def test_an_edition_without_a_commit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(edition, "_commit", lambda root: "")
    assert edition.main([str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def cell(address: str = "", packages: tuple[str, ...] = ()) -> str:
    return edition.first_cell(address, COMMIT, list(packages))


def test_the_first_cell_parses_in_an_old_python():
    tree = ast.parse(cell(), feature_version=(3, 10))
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "torch" not in ast.unparse(ast.Module(imported, []))  # nothing before the installation


@pytest.fixture
def run(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs the code of a cell as a script in an empty folder, which has to stay empty."""
    folder = tmp_path / "content"
    folder.mkdir()

    def run(code: str, *options: str, cwd: Path = folder, **settings: str):
        (tmp_path / "cell.py").write_text(code)
        command = [sys.executable, *options, str(tmp_path / "cell.py")]
        environment = os.environ | settings
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
        )
        assert list(folder.iterdir()) == []
        return done

    return run


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    (line,) = done.stderr.splitlines()
    for word in words:
        assert word in line


def with_torch(folder: Path, version: str) -> str:
    """A folder for the path, in which this version of torch seems to be installed."""
    metadata = folder / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return str(folder)


def test_without_an_address_the_first_cell_says_what_to_set(run):
    assert_one_line(run(cell()), "GITHUB_REPOSITORY=OWNER/NAME")


def test_an_old_python_is_one_line(run):
    assert_one_line(run(OLD_PYTHON + cell(NOWHERE)), "3.11 or later, not 3.10", "newer runtime")


def test_an_old_torch_is_one_line(run, tmp_path):
    done = run(cell(NOWHERE), PYTHONPATH=with_torch(tmp_path / "site", "2.10.0+cu126"))
    assert_one_line(done, "2.11 or later, not 2.10.0+cu126", "newer runtime")


def test_a_missing_torch_is_one_line(run):
    assert_one_line(run(cell(NOWHERE), "-I", "-S"), "torch is missing", "https://pytorch.org")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git")
def test_without_a_network_nothing_is_left(run):
    assert_one_line(run(cell(NOWHERE), no_proxy="*"), NOWHERE, "check the network")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_is_one_line(run):
    done = run(cell(NOWHERE), cwd=Path("/proc"))
    assert_one_line(done, "/proc cannot be written", "folder that you can write to")


@pytest.fixture
def beside_course(tmp_path) -> Path:
    """A folder with `course`, beside which a cell fetches nothing, and with a pip of its own."""
    (tmp_path / "beside" / "course").mkdir(parents=True)
    (tmp_path / "beside" / "course" / "start.py").write_text("")
    return tmp_path / "beside"


def bundled_pip() -> str:
    """A pip to import, since this environment may have none."""
    ensurepip = pytest.importorskip("ensurepip")
    wheels = list((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not wheels:
        pytest.skip("this Python brings no pip")
    return str(wheels[0])


def write_wheel(folder: Path, name: str, *needs: str) -> None:
    """Write a wheel of an empty package, which pip can install without a network."""
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    about += "".join(f"Requires-Dist: {need}\n" for need in needs)
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for file, text in {"METADATA": about, "WHEEL": tags, "RECORD": ""}.items():
            wheel.writestr(f"{name}-1.0.dist-info/{file}", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ("needs_torch", "would replace a package of this runtime"),
        ("no_such_package", "check the network"),
        ("sound", "virtual environment that you can write to"),
    ],
)
def test_what_pip_cannot_install_is_one_line(run, beside_course, tmp_path, package, advice):
    write_wheel(tmp_path, "needs_torch", "torch>=999")
    write_wheel(tmp_path, "sound")
    settings = {"PYTHONPATH": bundled_pip(), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    settings["PIP_PREFIX"] = str(tmp_path / "cell.py" / "site")  # below a file
    done = run(cell(packages=(f"{package}>=1",)), cwd=beside_course, **settings)
    assert_one_line(done, package, advice)


@pytest.mark.slow
def test_in_jupyter_too_a_problem_is_one_line_and_ends_the_run(tmp_path):
    after = nbformat.v4.new_code_cell("print('went on')")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell()), after])
    client = NotebookClient(
        notebook,
        extra_arguments=["--log-level=ERROR"],
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    with pytest.raises(CellExecutionError):
        client.execute()
    (output,) = notebook.cells[0].outputs
    (line,) = output.traceback
    assert "GITHUB_REPOSITORY" in line
    assert after.execution_count is None


@pytest.mark.slow
def test_the_archive_has_all_that_a_notebook_needs(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    edition.write_archive(tmp_path / "notebooks.zip")
    with zipfile.ZipFile(tmp_path / "notebooks.zip") as archive:
        archive.extractall(tmp_path)
    notebooks = tmp_path / "amp-lab" / "notebooks"
    wrong = []
    for path in sorted(notebooks.glob("*.ipynb")):
        for link in links(read(path)):
            parts = urlsplit(link)
            if not parts.scheme and not (notebooks / unquote(parts.path)).exists():
                wrong.append((path.name, link))
    assert wrong == []
    first, second = [c for c in read(notebooks / "00_start_here.ipynb").cells if c.source][:3:2]
    code = f"{first.source}\n{second.source}\nprint(torch.__name__)"
    code = re.sub(r"^PACKAGES = .*$", "PACKAGES = []", code, flags=re.MULTILINE)
    settings = os.environ | {"AMP_LAB_DEVICE": "cpu", "AMP_LAB_SCALE": "quick"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=notebooks,
        env=settings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("CPU: ")
    assert "hardware support for matmuls in reduced precision: " in lines[0]
    assert lines[-1] == "torch"


def test_the_archive_is_the_same_each_time(tmp_path):
    for name in ("a.zip", "b.zip"):
        edition.write_archive(tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_the_command_writes_the_edition(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(edition, "_commit", lambda root: COMMIT)
    monkeypatch.setattr(build_pairs, "check", lambda sources: None)  # another test's
    assert build_pairs.main(["--edition", str(tmp_path / "out")]) == 0
    assert f"wrote {len(build_pairs.find())} notebooks" in capsys.readouterr().out
    first = json.loads((tmp_path / "out" / "00_start_here.ipynb").read_text(encoding="utf-8"))
    assert COMMIT in "".join(first["cells"][0]["source"])

"""The wheel: small, and at home beside somebody's torch and model, where nothing else is."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from cases import some_of
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from measure_code import ROOT

pytestmark = pytest.mark.slow

FAILURES = ROOT / "src" / "amp_lab" / "failures" / "data"
MAX_BYTES = 1_000_000
# Neither this checkout nor this environment can be seen, nor a server asked.
SETTINGS = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
# torch's compiler looks for CUDA, and remarks on a machine that has its tools and no GPU.
SETTINGS["TORCH_LOGS"] = "-torch.utils.cpp_extension"

MODEL = """
import torch
from torch import nn

class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items, self.join = nn.Embedding(10, 16), nn.Linear(4, 16), nn.Linear(32, 1)

    def forward(self, users, items):  # (B,), (B, 4) to (B, 1)
        return self.join(torch.cat([self.users(users), self.items(items).relu()], dim=1))
"""
INPUTS = ["--input", "int64:8<10", "--input", "8,4"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Wheel and sdist of this checkout, by what their names end with."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    # Of which only the package is to go in.
    for name in ("src", "notebooks", "tests", "data/results"):
        unwanted = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    code = "from pdm.backend import build_sdist, build_wheel; build_wheel('d'); build_sdist('d')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return {".whl": next(source.glob("d/*.whl")), ".tar.gz": next(source.glob("d/*.tar.gz"))}


def test_both_are_small_and_hold_the_package_alone(built):
    package = ROOT / "src" / "amp_lab"
    modules = {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}
    data = {
        "amp_lab/py.typed",
        "amp_lab/bench/tiled_convmodel.cpp",
    }
    data |= {f"amp_lab/failures/data/{file.name}" for file in FAILURES.glob("*.json")}
    wheel = set(zipfile.ZipFile(built[".whl"]).namelist())
    assert {name for name in wheel if ".dist-info/" not in name} == {*modules, *data}
    with tarfile.open(built[".tar.gz"]) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    inside = {name.removeprefix("src/") for name in source if name.startswith("src/")}
    assert inside == {*modules, *data}
    others = {name for name in source if not name.startswith("src/")}
    assert others == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert max(path.stat().st_size for path in built.values()) < MAX_BYTES


def with_what_they_need(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """These packages of this environment, and all that they need in turn, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        needs = [Requirement(line) for line in found[name].requires or []]
        wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate()]
    return found


def link_packages(folder: Path) -> None:
    """Fill a folder with torch and the wheel's dependencies of this environment."""
    for distribution in with_what_they_need("torch", "lunr", "numpy", "tqdm").values():
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            target = Path(str(distribution.locate_file(name)))
            if target.exists() and not (folder / name).exists():  # "nvidia" is of several
                (folder / name).symlink_to(target)


@pytest.fixture(scope="module")
def theirs(built, tmp_path_factory) -> Path:
    """An environment that has torch and this wheel, with a model in a file beside it."""
    home = tmp_path_factory.mktemp("theirs")
    (home / "my_models.py").write_text(MODEL)
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    (home / "packages").mkdir()
    link_packages(home / "packages")
    paths = {"base": str(home / "venv"), "platbase": str(home / "venv")}
    site = sysconfig.get_path("purelib", "venv", paths)
    (Path(site) / "their_packages.pth").write_text(str(home / "packages"))
    # --isolated: whatever this machine's settings say, pip finds nothing but what is there.
    pip = ["-m", "pip", "--isolated", "install", "--no-index", "--quiet", built[".whl"]]
    done = run(home, "python", *pip)
    assert done.returncode == 0, done.stderr
    return home


def run(home: Path, program: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    scripts = Path(sysconfig.get_path("scripts", "venv", {"base": str(home / "venv")}))
    command = [scripts / program, *arguments]
    return subprocess.run(
        command, cwd=home, env=SETTINGS, capture_output=True, text=True, timeout=300
    )


def test_nothing_else_is_there(theirs):
    modules = [
        "torchvision",
        "PIL",
        "matplotlib",
        "libcst",
        "sklearn",
        "IPython",
        "jupyterlab",
        "jupytext",
        "pytest",
    ]
    code = f"import importlib.util as u; print([m for m in {modules} if u.find_spec(m)])"
    assert run(theirs, "python", "-c", code).stdout == "[]\n"
    where = run(theirs, "python", "-c", "import amp_lab; print(amp_lab.__file__)").stdout
    assert Path(where).is_relative_to(theirs / "venv")


QUICKLY = ["--device", "cpu", "--minutes", "0.05"]


@pytest.mark.parametrize(
    ("command", "said"),
    some_of(
        (["xray", "my_models:TwoTower", *INPUTS], "TwoTower on cuda, autocast fp16"),
        (["memory", "my_models:TwoTower", *INPUTS, "--memory", "1GiB"], "largest batch in 1 GiB"),
        (["diff", "my_models:TwoTower", *INPUTS, "--precision", "bf16"], "They diverge nowhere"),
        (["rehearse", "my_models:TwoTower", *INPUTS], "TwoTower, rehearsed on cpu"),
        (
            ["advise", "my_models.py:TwoTower", *INPUTS, *QUICKLY],
            "\nThe code for training ",
        ),
        (["doctor", "--device", "cpu"], "\nUse "),
        (["ops", "--device", "mps"], "scaled_dot_product_attention"),
        (["explain", "the loss scale falls to 0"], "AMP0002"),
    ),
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_works_on_their_model(theirs, command, said):
    done = run(theirs, "amp-lab", *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout


@pytest.mark.parametrize(
    ("command", "line"),
    some_of(
        (["migrate", "my_models.py"], "migrate needs libcst: pip install 'amp-lab[migrate]'"),
        (["bench", "--list"], "bench needs torchvision: pip install 'amp-lab[train]'"),
        (["train", "--out", "x"], "train needs torchvision: pip install 'amp-lab[train]'"),
        (["sample", "x"], "loading data needs pillow: pip install 'amp-lab[train]'"),
        (["export", "x", "y"], "export needs torchvision: pip install 'amp-lab[train]'"),
    ),
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_that_needs_more_says_what(theirs, command, line):
    done = run(theirs, "amp-lab", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"amp-lab {command[0]}: {line}\n"


def test_an_extra_is_added_to_what_is_installed(theirs):
    """The wheel need not come from an index: pip looks there only for what the extra brings."""
    pip = ["-m", "pip", "--isolated", "install", "--no-index", "amp-lab[migrate]"]
    done = run(theirs, "python", *pip)
    assert done.returncode == 1
    assert "No matching distribution found for libcst" in done.stderr


def test_pip_refuses_a_python_that_is_too_old(built):
    with zipfile.ZipFile(built[".whl"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        about = email.message_from_string(wheel.read(name).decode())
    wanted = SpecifierSet(about["Requires-Python"])
    assert [f"3.{minor}.0" in wanted for minor in (10, 11, 12, 13, 14)] == [False, *[True] * 4]


def test_every_public_name_is_there_or_says_what_it_needs(theirs):
    code = """
import amp_lab
for name in amp_lab.__all__:
    try:
        getattr(amp_lab, name)
    except ImportError as error:
        print(name, error)
"""
    done = run(theirs, "python", "-W", "error", "-c", code)
    assert done.stderr == ""
    line = "loading data needs pillow: pip install 'amp-lab[train]'"
    assert done.stdout.splitlines() == [f"load_dataset {line}", f"make_stand_in {line}"]

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import sync


@pytest.fixture
def pdm(monkeypatch, tmp_path):
    """Stands in for pdm: notes what it is called with, and exits as it is told to."""
    pdm = SimpleNamespace(calls=[], code=0)

    def run(command, cwd):
        assert command[:2] == ["/somewhere/pdm", "--no-cache"]
        pdm.calls.append(command[2:])
        return SimpleNamespace(returncode=pdm.code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sync.shutil, "which", lambda name: f"/somewhere/{name}")
    monkeypatch.setattr(sync, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(sync.os, "access", lambda path, mode: True)  # an image cannot be written
    pdm.installed = {}
    monkeypatch.setattr(sync, "version_of", pdm.installed.get)
    return pdm


def test_it_syncs_once_and_leaves_out_tensorflow(pdm):
    assert sync.main([]) == 0
    assert sync.main([]) == 0
    assert pdm.calls == [["sync", "--without", "tensorflow"]]


def test_tensorflow_comes_when_asked_for(pdm):
    sync.main([])
    assert sync.main(["--with", "tensorflow"]) == 0
    assert pdm.calls[1:] == [["sync"]]


def test_an_image_stays_as_it_was_built(pdm, monkeypatch):
    sync.main([])
    monkeypatch.setattr(sync.os, "access", lambda path, mode: False)
    assert sync.main(["--with", "tensorflow"]) == 0
    assert len(pdm.calls) == 1


def test_a_tensorflow_that_is_there_is_kept_in_step(pdm, monkeypatch):
    pdm.installed["tensorflow-cpu"] = "2.21.0"
    sync.main([])
    sync.main(["--with", "tensorflow"])
    assert pdm.calls == [["sync"]]


def test_what_is_left_out_is_a_group():
    groups = tomllib.loads((sync.ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for group, packages in sync.OPTIONAL.items():
        assert {entry.partition(">")[0] for entry in groups[group]} == set(packages)
    assert all("python_version < '3.14'" in entry for entry in groups["tensorflow"])


def test_it_syncs_again_when_the_lock_has_changed(pdm, monkeypatch):
    sync.main([])
    monkeypatch.setattr(sync, "fingerprint", lambda: "another lock")
    sync.main([])
    assert len(pdm.calls) == 2


def test_a_sync_that_failed_says_what_is_free_and_is_tried_again(pdm, monkeypatch, capsys):
    monkeypatch.setattr(sync.shutil, "disk_usage", lambda path: SimpleNamespace(free=260_000_000))
    pdm.code = 1
    assert sync.main([]) == 1
    assert "failed, with 0.3 GB free in " in capsys.readouterr().err
    pdm.code = 0
    assert sync.main([]) == 0
    assert len(pdm.calls) == 2


def test_arguments_go_to_pdm(pdm):
    sync.main(["--without", "browser"])
    assert pdm.calls == [["sync", "--without", "browser"]]


def test_without_pdm_it_says_so(pdm, monkeypatch, capsys):
    monkeypatch.setattr(sync.shutil, "which", lambda name: None)
    assert sync.main([]) == 2
    assert "no command `pdm`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        ("2.15.0", []),
        ("2.11.0+rocm7.1", ["--without", "torch", "--without", "bench"]),
        ("2.13.0+cpu", ["--without", "torch", "--without", "bench"]),
    ],
)
def test_a_torch_that_is_not_from_the_lock_is_kept(monkeypatch, version, arguments):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert sync.without_torch() == arguments


def test_a_fresh_environment_gets_torch(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert sync.without_torch() == []


def test_what_is_left_out_leaves_no_torch():
    """No other group may bring the lock's torch along."""
    left_out = {"torch", "bench"}
    lock = tomllib.loads((sync.ROOT / "pdm.lock").read_text())
    torch = [package for package in lock["package"] if package["name"].startswith("torch")]
    assert torch
    assert all(set(package["groups"]) <= left_out for package in torch)


def test_a_torch_from_the_lock_has_to_go_before_one_from_an_index(pdm, capsys):
    pdm.installed["torch"] = "2.15.0"
    assert sync.main(["--torch-index", "https://host.invalid"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"torch 2.15.0 is installed with the packages that it needs: delete {sys.prefix}" in line
    assert pdm.calls == []


def test_without_pip_an_index_is_refused_in_a_line(pdm, monkeypatch, capsys):
    monkeypatch.setattr(sync, "pip_command", lambda: None)
    assert sync.main(["--torch-index", "https://host.invalid"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--torch-index needs pip or ensurepip" in line
    assert pdm.calls == []


def test_the_lock_without_torch_has_the_rest_and_its_hashes():
    whole = (sync.ROOT / "pdm.lock").read_text()
    packages = tomllib.loads(whole)["package"]
    rest = tomllib.loads(sync.lock_without_torch(whole))["package"]
    left_out = {package["name"] for package in packages} - {package["name"] for package in rest}
    assert {"torch", "torchvision", "triton", "nvidia-cudnn-cu13"} <= left_out
    assert {"networkx", "sympy", "torchao", "transformers"}.isdisjoint(left_out)
    assert all(package in packages for package in rest)


def write_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Make a wheel of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    about = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    about += [f"Requires-Dist: {need}" for need in needs]
    tags = ["Wheel-Version: 1.0", "Generator: test", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    files = {
        f"{name.replace('-', '_')}.py": f"version = {version!r}\n",
        f"{stem}.dist-info/METADATA": "\n".join([*about, ""]),
        f"{stem}.dist-info/WHEEL": "\n".join([*tags, ""]),
    }
    record = f"{stem}.dist-info/RECORD"
    files[record] = "".join(f"{path},,\n" for path in [*files, record])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def write_index(root: Path, wheels: dict[tuple[str, str], list[str]]) -> str:
    """Make an index of such wheels, by name and version, with what each needs; return its URL."""
    for (name, version), needs in wheels.items():
        write_wheel(root / name, name, version, *needs)
        links = [f'<a href="{path.name}">{path.name}</a>' for path in (root / name).glob("*.whl")]
        (root / name / "index.html").write_text("<!DOCTYPE html>" + "".join(links))
    return root.as_uri()


PYPI = {
    ("torch", "2.15.0"): ["networkx", "nvidia-cudnn-cu13", "triton"],
    ("torchvision", "0.29.2"): ["torch==2.15.0"],
    ("accelerate", "1.15.0"): ["torch"],
    ("tensorflow-cpu", "2.21.0"): [],
    ("networkx", "3.6"): [],
    ("nvidia-cudnn-cu13", "9.26"): [],
    ("triton", "3.9.0"): [],
}
CPU = {
    ("torch", "2.14.0+cpu"): ["networkx"],
    ("torch", "2.15.0+cpu"): ["networkx"],
    ("torch", "2.16.0+cpu"): ["networkx"],
    ("torchvision", "0.28.0+cpu"): ["torch==2.14.0"],
    ("torchvision", "0.29.2+cpu"): ["torch==2.15.0"],
    ("torchvision", "0.30.0+cpu"): ["torch==2.16.0"],
    ("networkx", "9"): [],  # the lock's is installed already, and checked against its hash
}
PROJECT = """
[project]
name = "small"
version = "1"
requires-python = ">=3.11"

[dependency-groups]
torch = ["torch>=2.11", "torchvision>=0.26"]
tensorflow = ["tensorflow-cpu>=2.21"]
bench = ["accelerate>=1.15"]

[tool.pdm]
distribution = false

[[tool.pdm.source]]
name = "pypi"
url = "{url}"
"""


@pytest.fixture
def small(tmp_path):
    """Run a command in a project that is as small as can be, and has its own environment."""
    pdm = Path(sysconfig.get_path("scripts")) / "pdm"
    if not pdm.exists():
        pytest.skip("pdm is not installed in this environment")
    project = tmp_path / "project"
    (project / "tools").mkdir(parents=True)
    shutil.copy(sync.__file__, project / "tools")
    url = write_index(tmp_path / "pypi", PYPI)
    (project / "pyproject.toml").write_text(PROJECT.format(url=url))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    hidden = ("PYTHON", "PDM_", "PIP_", "VIRTUAL_ENV")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    settings |= {"PDM_CHECK_UPDATE": "0", "PIP_CONFIG_FILE": os.devnull}

    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [pdm, *command], cwd=project, env=settings, capture_output=True, text=True, timeout=300
        )

    locked = run("lock")
    assert locked.returncode == 0, locked.stderr
    return SimpleNamespace(run=run, project=project)


def installed_in(project: Path) -> dict[str, str]:
    """The packages of a project's environment, and their versions, without what installs them."""
    site = sysconfig.get_path("purelib", "venv", {"base": str(project / ".venv")})
    found = importlib.metadata.distributions(path=[site])
    versions = {package.metadata["Name"]: package.version for package in found}
    return {name: versions[name] for name in versions if name not in ("pip", "setuptools")}


@pytest.mark.slow
def test_torch_from_an_index_brings_no_cuda_and_stays(small, tmp_path):
    url = write_index(tmp_path / "cpu", CPU)
    done = small.run("run", "python", "tools/sync.py", "--torch-index", url)
    assert done.returncode == 0, done.stderr
    wanted = {"torch": "2.15.0+cpu", "torchvision": "0.29.2+cpu"}
    wanted |= {"networkx": "3.6", "accelerate": "1.15.0"}
    assert installed_in(small.project) == wanted
    (small.project / ".venv" / "amp-lab-synced").unlink()  # as after a change of the lock
    done = small.run("run", "python", "tools/sync.py")
    assert (done.returncode, "keeping torch 2.15.0+cpu" in done.stdout) == (0, True)
    assert installed_in(small.project) == wanted


@pytest.mark.slow
def test_a_package_that_is_not_the_locked_one_is_refused(small, tmp_path):
    url = write_index(tmp_path / "cpu", CPU)
    write_wheel(tmp_path / "pypi" / "networkx", "networkx", "3.6", "triton")  # other bytes
    done = small.run("run", "python", "tools/sync.py", "--torch-index", url)
    assert done.returncode == 1
    assert "networkx" not in installed_in(small.project)
    assert "torch" not in installed_in(small.project)


@pytest.mark.slow
def test_an_index_without_torch_is_told_in_a_line(small, tmp_path):
    url = write_index(tmp_path / "none", {("networkx", "9"): []})
    done = small.run("run", "python", "tools/sync.py", "--torch-index", url)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"sync: no torch could be installed from {url}"

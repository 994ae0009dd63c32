"""What has to be installed: asked for by name in a line, and the same in pyproject.toml."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch._inductor.utils import fresh_cache

import amp_lab
import measure_code
from amp_lab.cli import main
from amp_lab.core import requirements
from amp_lab.core.errors import AmpLabError, RequirementError

PROJECT = tomllib.loads((measure_code.ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
TORCH_BRINGS = {"jinja2", "typing_extensions"}
IN_A_GROUP = {"torchao", "triton"}  # told in a line of its own where it is not there
A_KERNEL_BRINGS = {"matplotlib_inline"}  # imported in a notebook alone


def test_the_versions_of_python_that_the_readme_names_are_allowed():
    readme = (measure_code.ROOT / "README.md").read_text(encoding="utf-8")
    first, last, excluded = re.search(
        r"Python 3\.(\d+) to 3\.(\d+) \(not ([\d.]+)\)", readme
    ).groups()
    allowed = SpecifierSet(PROJECT["project"]["requires-python"])
    assert all(f"3.{minor}.0" in allowed for minor in range(int(first), int(last) + 1))
    assert f"3.{int(first) - 1}.9" not in allowed
    assert excluded not in allowed


def test_the_oldest_macos_that_the_readme_names_is_that_of_torchs_wheels():
    readme = (measure_code.ROOT / "README.md").read_text(encoding="utf-8")
    lock = (measure_code.ROOT / "pdm.lock").read_text(encoding="utf-8")
    oldest = set(re.findall(r'"torch-[^"]*-macosx_(\d+)_\d+_arm64\.whl"', lock))
    assert oldest == set(re.findall(r"macOS (\d+) or later on Apple silicon", readme))


def test_compiling_for_a_cpu_needs_a_cpp_compiler():
    torch.compiler.reset()
    # torch loses this setting if it is set and restored as an attribute.
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with without, fresh_cache(), pytest.raises(Exception, match="InvalidCxxCompiler"):
        torch.compile(torch.sin)(torch.ones(8))
    torch.compiler.reset()


def test_a_torch_that_is_too_old_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu126")
    line = "torch 2.10.1+cu126 is too old: amp_lab needs 2.11 or later"
    with pytest.raises(ImportError, match=re.escape(line)) as raised:
        amp_lab.__getattr__("xray")
    assert isinstance(raised.value, AmpLabError)
    for command in (["doctor"], ["ops"], ["xray", "x:y", "--input", "1"], ["export", "a", "b"]):
        assert main(command) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"amp-lab {command[0]}: {line}")
        assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0", "2.11.0a0+git1234", "3.0.0", "2.100.1"])
def test_a_later_torch_is_taken_as_it_is(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    requirements.require_torch()


def test_without_torch_a_name_is_an_import_error_and_code_is_still_migrated(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"torch is not installed: .*needs"):
        amp_lab.__getattr__("xray")
    assert amp_lab.__getattr__("AmpLabError") is AmpLabError
    (tmp_path / "new.py").write_text("import torch\n")
    assert main(["migrate", str(tmp_path)]) == 0


def test_a_torch_whose_libraries_are_missing_is_told_in_a_line(monkeypatch):
    def broken(name, *arguments):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("builtins.__import__", broken)
    with pytest.raises(RequirementError, match="cannot be imported: OSError: libcudart"):
        requirements.require_torch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "missing", "line"),
    [
        ("migrate", "libcst", "migrate needs libcst: pip install 'amp-lab[migrate]'"),
        ("plots", "matplotlib", "drawing needs matplotlib: pip install 'amp-lab[plots]'"),
        (
            "train.data",
            "torchvision",
            "loading data needs torchvision: pip install 'amp-lab[train]'",
        ),
    ],
)
def test_a_folder_asks_for_what_it_needs(folder, missing, line):
    code = f"import sys; sys.modules[{missing!r}] = None; import amp_lab.{folder}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"amp_lab.core.errors.RequirementError: {line}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "module", "line"),
    [
        (["migrate", "."], "libcst", "migrate needs libcst: pip install 'amp-lab[migrate]'"),
        (["train", "--out", "x"], "matplotlib", "train needs matplotlib: pip install"),
        (["bench"], "matplotlib", "bench needs matplotlib: pip install 'amp-lab[plots]'"),
    ],
)
def test_a_command_asks_before_it_works(monkeypatch, capsys, tmp_path, command, module, line):
    monkeypatch.chdir(tmp_path)
    for name in list(sys.modules):
        if f"{name}.".startswith("amp_lab.migrate."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"amp-lab {command[0]}: {line}")
    assert len(printed.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_another_missing_module_is_no_missing_extra():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), requirements.needed_for("x"):
        importlib.import_module("no_such_module")


def names(wanted: list[str]) -> set[str]:
    """The packages of a list in pyproject.toml, without those that its own extras bring."""
    found = {re.match(r"[\w-]+", entry)[0] for entry in wanted if isinstance(entry, str)}
    return found - {PROJECT["project"]["name"]}


def test_the_wheel_itself_needs_three_packages():
    assert names(PROJECT["project"]["dependencies"]) == {"lunr", "numpy", "tqdm"}


def test_every_other_package_that_is_imported_has_an_extra():
    imported = set()
    for path in measure_code.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    others = imported - sys.stdlib_module_names - {"amp_lab", "lunr", "numpy", "tqdm", "torch"}
    assert others - TORCH_BRINGS - IN_A_GROUP - A_KERNEL_BRINGS == set(requirements._EXTRAS)
    for module, extra in requirements._EXTRAS.items():
        package = requirements._PACKAGE_NAMES.get(module, module)
        assert package in names(EXTRAS[extra]) or package == "pillow", module  # torchvision's


def test_the_projects_own_environment_has_what_the_extras_have():
    """PDM does not install extras, so the same stands in its groups, with the same bounds."""
    groups = PROJECT["dependency-groups"]
    own = {entry for extra in EXTRAS.values() for entry in extra if not entry.startswith("amp-lab")}
    assert own == {*groups["lab"], next(e for e in groups["torch"] if "vision" in e)}
    left_out = PROJECT["tool"]["pdm"]["options"]["sync"]
    assert set(left_out) == {"--without", *EXTRAS}


def test_one_oldest_torch():
    (oldest,) = (e for e in PROJECT["dependency-groups"]["torch"] if e.startswith("torch>"))
    assert oldest == f"torch>={'.'.join(map(str, requirements.OLDEST_TORCH))}"


def test_one_version():
    assert PROJECT["project"]["version"] == amp_lab.__version__

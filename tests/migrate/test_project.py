"""Which torch the result needs, and a project that asks for an older one."""

import json
import re

import pytest
from remedy_tests import says

from amp_lab.cli import main
from amp_lab.core.remedies import REMEDIES

OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
CUSTOM = "from torch.cuda.amp import custom_fwd\n@custom_fwd\ndef f(x): pass\n"

OLDER = {  # a file that asks for a torch below 2.3, by its name and the line of it
    ("requirements.txt", 2): "numpy\ntorch>=1.8.0\ntorchvision>=0.9\n",
    ("requirements-dev.txt", 1): "torch==1.13.1+cu117\n",
    ("requirements_gpu.txt", 1): "torch[opt]~=2.0 ; python_version>'3.8'\n",
    ("pyproject.toml", 2): '[project]\ndependencies = ["numpy>=1.2", "torch>=1.10,<3"]\n',
    ("pyproject.toml", 3): '[tool.poetry.dependencies]\nnumpy = "1"\ntorch = "^1.9"\n',
    ("pyproject.toml", 1): 'torch = {version = ">=2.2", source = "pytorch"}\n',
    ("setup.cfg", 3): "[options]\ninstall_requires =\n    torch >= 1.6\n",
    ("setup.py", 1): "setup(install_requires=['torch (>=1.7)', 'tqdm'])\n",
    ("setup.py", 2): "setup(install_requires=[\n'torch<2.0'])\n",
}


@pytest.mark.parametrize("file", OLDER)
@pytest.mark.parametrize("below", ["", "package/part"])
def test_a_project_that_asks_for_an_older_torch_is_warned(tmp_path, capsys, file, below):
    (tmp_path / file[0]).write_text(OLDER[file])
    folder = tmp_path / below
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.py").write_text(OLD)
    assert main(["migrate", str(folder / "a.py")]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{re.escape(file[0])}:{file[1]}: by hand: torch .*needs 2\.3: ", out)
    assert (tmp_path / file[0]).read_text() == OLDER[file]


def test_the_project_is_named_as_seen_from_here(tmp_path, capsys, monkeypatch):
    (tmp_path / "setup.py").write_text("setup(install_requires=['torch (>=1.7)'])\n")
    (tmp_path / "a.py").write_text(OLD)
    monkeypatch.chdir(tmp_path)
    assert main(["migrate", "a.py"]) == 0
    assert "\nsetup.py:1: by hand: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "torch\n",
        "torch>=2.3\n",
        "torch==2.11.0\n",
        "torchvision>=0.9\npytorch-lightning>=1.2\n",
        "# torch>=1.8\n",
        "numpy>=1.8 # with torch\n",
        "torch-scatter==1.0\n",
    ],
)
def test_a_project_that_asks_for_no_older_one_is_not_warned(tmp_path, capsys, text):
    (tmp_path / "requirements.txt").write_text(text)
    (tmp_path / "a.py").write_text(OLD)
    assert main(["migrate", str(tmp_path)]) == 0
    assert "requirements.txt" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "version"), [(OLD, "2.3"), (OLD + CUSTOM, "2.4"), (CUSTOM, "2.4")]
)
def test_the_summary_says_which_torch_the_result_needs(tmp_path, capsys, code, version):
    (tmp_path / "a.py").write_text(code)
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    assert f"what is rewritten needs torch {version} or later\n" in capsys.readouterr().out
    assert main(["migrate", str(tmp_path)]) == 0
    assert "needs torch" not in capsys.readouterr().out


AUTOCAST = "import torch\nwith torch.cuda.amp.autocast(): pass\n"


def test_autocast_alone_needs_no_recent_torch(tmp_path, capsys):
    (tmp_path / "a.py").write_text(AUTOCAST)
    (tmp_path / "requirements.txt").write_text("torch>=2.0\n")
    assert main(["migrate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "needs torch 1.12 or later\n" in out
    assert "requirements.txt" not in out
    (tmp_path / "requirements.txt").write_text("torch>=1.10\n")
    assert main(["migrate", str(tmp_path)]) == 0
    assert "requirements.txt:1: by hand: torch 1.10 " in capsys.readouterr().out


def said_for_older_torch(tmp_path, capsys, code: str) -> list[str]:
    """The codes of what is said about older versions, for a file with this code."""
    (tmp_path / "a.py").write_text(code)
    assert main(["migrate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    return [code for code in REMEDIES if code.startswith("migrate.for_") and says(code, out)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (OLD, ["migrate.for_both.scaler"]),
        (OLD + CUSTOM, ["migrate.for_both.scaler", "migrate.for_both.custom"]),
        (CUSTOM, ["migrate.for_both.custom"]),
        (AUTOCAST, ["migrate.for_older_autocast"]),
        (OLD + AUTOCAST, ["migrate.for_both.scaler"]),
        ("import torch\nscaler = torch.cpu.amp.GradScaler()\n", []),  # older ones had none
        ("import torch\nscaler = torch.amp.GradScaler('cuda')\n", []),
        ("try:\n    from torch.amp import GradScaler\nexcept ImportError:\n"
         "    from torch.cuda.amp import GradScaler\nscaler = GradScaler()\n", []),
    ],
)  # fmt: skip
def test_how_to_support_older_versions_is_said_of_what_was_rewritten(
    tmp_path, capsys, code, expected
):
    assert said_for_older_torch(tmp_path, capsys, code) == expected


def test_other_formats_hold_no_code_for_older_versions(tmp_path, capsys):
    (tmp_path / "a.py").write_text(OLD)
    assert main(["migrate", "--format", "sarif", str(tmp_path)]) == 0
    json.loads(capsys.readouterr().out)


def test_the_files_of_a_project_further_up_are_not_those_of_another(tmp_path, capsys):
    (tmp_path / "requirements.txt").write_text("torch==1.8\n")
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    (project / "a.py").write_text(OLD)
    assert main(["migrate", str(project)]) == 0
    assert "requirements.txt" not in capsys.readouterr().out

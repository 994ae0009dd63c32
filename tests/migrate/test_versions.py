"""Which torch the result needs, and how to support an older one."""

import pytest
from remedy_tests import says

from amp_lab.cli import main
from amp_lab.core.remedies import REMEDIES

OLD = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
CUSTOM = "from torch.cuda.amp import custom_fwd\n@custom_fwd\ndef f(x): pass\n"


@pytest.mark.parametrize(
    ("code", "version"), [(OLD, "2.3"), (OLD + CUSTOM, "2.4"), (CUSTOM, "2.4")]
)
def test_the_summary_says_which_torch_the_result_needs(tmp_path, capsys, code, version):
    (tmp_path / "a.py").write_text(code)
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    assert f"the new names of torch.amp need torch {version} or later\n" in capsys.readouterr().out
    assert main(["migrate", str(tmp_path)]) == 0
    assert "needs torch" not in capsys.readouterr().out


AUTOCAST = "import torch\nwith torch.cuda.amp.autocast(): pass\n"


def test_autocast_alone_needs_no_recent_torch(tmp_path, capsys):
    (tmp_path / "a.py").write_text(AUTOCAST)
    assert main(["migrate", str(tmp_path)]) == 0
    assert "need torch 1.12 or later\n" in capsys.readouterr().out


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
        ("import torch\nscaler = torch.cpu.amp.GradScaler()\n" + AUTOCAST, []),  # needs torch 2.3
        ("import torch\nscaler = torch.amp.GradScaler('cuda')\n", []),
        ("try:\n    from torch.amp import GradScaler\nexcept ImportError:\n"
         "    from torch.cuda.amp import GradScaler\nscaler = GradScaler()\n", []),
    ],
)  # fmt: skip
def test_how_to_support_older_versions_is_said_of_what_was_rewritten(
    tmp_path, capsys, code, expected
):
    assert said_for_older_torch(tmp_path, capsys, code) == expected

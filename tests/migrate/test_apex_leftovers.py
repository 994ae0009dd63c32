"""Imports of Apex that nothing uses any more: they fail without Apex, so they are reported."""

import re
import sys

import pytest

from amp_lab.cli import main
from amp_lab.migrate import migrate_source
from amp_lab.migrate.rules.apex import MARK

DELETE = "delete the import, unless another file imports "
LEFT_OVER = [  # the lines that are reported end in a comment `# !`
    "from apex import amp  # !\n",
    "import apex  # !\n",
    "import apex.parallel  # !\n",
    "import apex.amp as mixed  # !\n",
    "from apex.fp16_utils import FP16_Optimizer  # !\n",
    "from apex.optimizers import FusedAdam  # !\n",
    "import os, apex  # !\nprint(os.sep)\n",
    "from apex.optimizers import (\n    FusedAdam,  # !\n    FusedSGD,  # !\n)\n",
    "def train():\n    from apex import amp  # !\n",
    "if fp16:\n    from apex import amp  # !\n",
    "try:\n    from apex import amp  # !\nexcept ImportError:\n    raise ImportError('get Apex')\n",
    "try:\n    from apex import amp  # !\nexcept ImportError:\n    print('get Apex')\n"
    "    sys.exit(1)\n",
    "try:\n    from apex import amp  # !\nfinally:\n    pass\n",
    "if backend == 'apex':\n    from apex import amp  # !\n",
    "amp = 'apex.amp'\ndef train():\n    from apex import amp  # !\n",
]
CHOSEN = [
    "try:\n    from apex import amp\nexcept ImportError:\n    pass\n",
    "try:\n    import apex\nexcept ImportError:\n    apex = None\n",
    "try:\n    from torch import nn\nexcept ImportError:\n    from apex import normalization\n",
    "from contextlib import suppress\nwith suppress(ImportError):\n    import apex\n",
    "if has_apex:\n    from apex import amp\n",
    "if importlib.util.find_spec('apex') is not None:\n    from apex import amp\n",
    "found = find_spec('apex')\nif found:\n    from apex import amp\n",
    "if is_package_available('apex'):\n    from apex import amp\n",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from apex import amp\n",
    "import torch\nif torch.__version__ < '1.6':\n    from apex import amp\n",
]
EXPORTED = [
    "from apex.optimizers import FusedAdam\n__all__ = ['FusedAdam']\n",
    "from apex.optimizers import FusedAdam\n__all__ = []\n__all__ += ['FusedAdam']\n",
    "from apex.optimizers import FusedAdam\n__all__ = []\n__all__.append('FusedAdam')\n",
    "from apex.optimizers import FusedAdam as FusedAdam\n",
    "class Optimizers:\n    from apex.optimizers import FusedAdam\n",
]


def found(code: str) -> list[tuple[int, str, str]]:
    return [(f.line, f.kind, f.message) for f in migrate_source(code)[1]]


@pytest.mark.parametrize("code", LEFT_OVER)
def test_an_import_that_is_left_over_is_reported_and_stays(code):
    compile(code, "left over", "exec")
    expected = [n for n, line in enumerate(code.splitlines(), 1) if line.endswith("# !")]
    told = found(code)
    assert [line for line, _, _ in told] == expected
    assert {kind for _, kind, _ in told} == {"by hand"}
    assert all(DELETE in message for _, _, message in told)
    assert migrate_source(code)[0] == code


@pytest.mark.parametrize("code", CHOSEN)
def test_an_import_that_is_a_choice_stays_and_nothing_is_said(code):
    compile(code, "chosen", "exec")
    assert migrate_source(code) == (code, [])


@pytest.mark.parametrize("code", EXPORTED)
def test_a_name_for_other_files_is_told_what_takes_its_place(code):
    compile(code, "exported", "exec")
    ((_, kind, message),) = found(code)
    assert kind == "by hand"
    assert "write torch.optim.AdamW" in message
    assert "delete" not in message


def test_a_file_that_needs_apex_fails_the_check(tmp_path, capsys, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text("from apex import amp\n")
    assert main(["migrate", "--check", str(path)]) == 1
    assert "nothing to do" not in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ImportError):
        exec(path.read_text(), {})


def test_the_rest_of_an_import_is_reported_beside_what_is_rewritten():
    head = "import torch\nfrom apex.optimizers import FusedAdam, FusedSGD\n"
    old = f"{head}o = FusedSGD(weights, 0.1)\n"
    new, findings = migrate_source(old)
    assert "from apex.optimizers import FusedAdam\n" in new
    assert sorted(f.kind for f in findings) == ["by hand", "rewritten"]
    assert [kind for _, kind, message in found(new) if DELETE in message] == ["by hand"]


def test_a_mark_is_put_above_it_once():
    old = "import torch\nfrom apex import amp\n"
    new, _ = migrate_source(old, mark=True)
    assert re.match(rf"{re.escape(MARK)}.*uses amp, ", new.splitlines()[1])
    assert [line for line in new.splitlines() if MARK not in line] == old.splitlines()
    assert migrate_source(new, mark=True)[0] == new


@pytest.mark.parametrize(
    "guard",
    [
        "if importlib.util.find_spec('apex'):\n    import apex\n    apex.amp.initialize(m, o)\n",
        "from contextlib import suppress\nwith suppress(ImportError):\n"
        "    from apex import amp\n    amp.initialize(m, o)\n",
    ],
)
def test_a_use_in_the_same_guards_is_a_choice_too(guard):
    assert migrate_source(guard)[0] == guard
    assert {kind for _, kind, _ in found(guard)} == {"left"}

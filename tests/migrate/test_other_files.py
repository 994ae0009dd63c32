"""Names that come from another file, which is torch.amp's once that file is migrated."""

import pytest

from amp_lab.migrate import files

COMMON = "import torch\nfrom torch.cuda.amp import (\n    autocast,  # and\n    GradScaler,\n)\n"


def told(folder, name: str, text: str) -> list[int]:
    """The lines of a file, with one more for torch, at which its neighbour is spoken of."""
    path = folder / name
    path.write_text(f"import torch\n{text}")
    lines = files.migrate_file(path).lines
    assert all(line.kind == "by hand" for line in lines)
    return [line.line for line in lines if " comes from " in line.message]


@pytest.fixture
def folder(tmp_path):
    for home in ("common.py", "parts/__init__.py", "parts/common.py", "inside/deep.py"):
        path = tmp_path / home
        path.parent.mkdir(exist_ok=True)
        path.write_text(COMMON)
    (tmp_path / "modules.py").write_text(
        "from torch.cuda import amp\nfrom torch.cuda.amp import custom_fwd\n"
    )
    (tmp_path / "tried.py").write_text(
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    pass\n"
    )
    (tmp_path / "both.py").write_text(
        "try:\n    from torch.amp import autocast\n"
        "except ImportError:\n    from torch.cuda.amp import autocast\n"
    )
    (tmp_path / "on_cpu.py").write_text("from torch.cpu.amp import GradScaler\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "from common import autocast\nwith autocast(): pass\n"),
        ("a.py", "from common import GradScaler as S, GradScaler\nGradScaler(1024.0)\n"),
        ("a.py", "from common import *\nwith autocast(enabled=False): pass\n"),
        ("a.py", "import common\nwith common.autocast(use_amp): pass\n"),
        ("a.py", "import parts.common\nparts.common.GradScaler(2.0)\n"),
        ("a.py", "from parts import common\ncommon.GradScaler(2.0)\n"),
        ("parts/a.py", "from . import autocast\nwith autocast(): pass\n"),
        ("parts/a.py", "from .common import autocast\nwith autocast(): pass\n"),
        ("parts/a.py", "from ..inside.deep import autocast\nwith autocast(): pass\n"),
        ("parts/a.py", "from inside.deep import autocast\nwith autocast(): pass\n"),
        ("a.py", "from common import autocast as ac\nwith ac(): pass\n"),
        ("a.py", "from common import autocast\nwith autocast(enabled=use_cuda): pass\n"),
        ("a.py", "from modules import amp\nwith amp.autocast(False): pass\n"),
        ("a.py", "import modules\nwith modules.amp.autocast(): pass\n"),
        ("a.py", "from modules import custom_fwd\n@custom_fwd\ndef f(c): pass\n"),
        ("a.py", "from tried import autocast\nwith autocast(): pass\n"),
        ("a.py", "from on_cpu import GradScaler\nGradScaler()\n"),
    ],
)
def test_a_call_without_a_device_is_told(folder, name, text):
    assert told(folder, name, text) == [3]


@pytest.mark.parametrize(
    "text",
    [
        'from common import autocast\nwith autocast("cuda"): pass\n',
        "from common import autocast\nwith autocast(device.type): pass\n",
        "from elsewhere import autocast\nwith autocast(): pass\n",
        "from common import other\nother.autocast()\n",
        "from common import GradScaler\nGradScaler(init_scale=4.0)\n",
        "from both import autocast\nwith autocast(): pass\n",
        'from modules import custom_fwd\n@custom_fwd(device_type="cuda")\ndef f(c): pass\n',
        "from common import autocast\nprint(autocast)\n",
        "from .................... import autocast\nwith autocast(): pass\n",
    ],
)
def test_what_has_a_device_or_comes_from_elsewhere_is_not(folder, text):
    assert told(folder, "a.py", text) == []


def test_the_file_that_has_the_name_is_named_and_so_is_its_device(folder):
    (folder / "common.py").write_text(COMMON.replace("cuda", "cpu"))
    (folder / "a.py").write_text("import torch\nfrom common import autocast\nautocast()\n")
    (line,) = files.migrate_file(folder / "a.py").lines
    assert "comes from common.py" in line.message
    assert 'give it "cpu" first' in line.message
    (folder / "a.py").write_text("import torch\nfrom parts import autocast\nautocast()\n")
    (line,) = files.migrate_file(folder / "a.py").lines
    assert "comes from parts/__init__.py" in line.message


def test_a_file_that_does_not_name_torch_is_looked_at_too(folder):
    (folder / "a.py").write_text("from common import autocast\nautocast()\n")
    assert files.has_names(folder / "a.py")
    assert [line.line for line in files.migrate_file(folder / "a.py").lines] == [2]


def test_once_the_neighbour_is_migrated_it_is_still_told(folder):
    files.migrate_file(folder / "common.py", write=True)
    assert told(folder, "a.py", "from common import autocast\nwith autocast(): pass\n") == [3]


def test_a_neighbour_of_its_own_making_is_not(folder):
    (folder / "common.py").write_text("import torch\ndef autocast(): pass\n")
    assert told(folder, "a.py", "from common import autocast\nwith autocast(): pass\n") == []

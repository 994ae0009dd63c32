"""The table of sizes in docs/hardware.md is that of the packages for torch 2.15 with CUDA."""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
ROWS = {
    "CUDA and Triton": ("nvidia", "cuda", "triton"),
    "torch and torchvision": ("torch==", "torchvision=="),
}


def installed_bytes(starts: tuple[str, ...]) -> int:
    """The size of the files of all packages whose `name==version` starts so."""
    total = 0
    for package in metadata.distributions():
        name = f"{package.metadata['Name'].lower()}=={package.version}"
        if name.startswith(starts):
            paths = [Path(file.locate()) for file in package.files or ()]
            total += sum(path.stat().st_size for path in paths if path.exists())
    return total


@pytest.mark.skipif(
    torch.version.cuda is None or not torch.__version__.startswith("2.15"),
    reason="not the build that the page measures",
)
@pytest.mark.skipif(sys.platform != "linux", reason="the page measures Linux")
@pytest.mark.parametrize("row", ROWS)
def test_the_page_states_the_size_of_the_packages(row):
    gigabytes = float(re.search(rf"^\| {row} \| ([\d.]+) GB \|", PAGE, re.MULTILINE)[1])
    assert installed_bytes(ROWS[row]) / 1e9 == pytest.approx(gigabytes, rel=0.05)

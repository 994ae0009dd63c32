"""The table of settings in notebook 19, held against what the libraries do."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "notebooks" / "19_choose_your_precision.py"
NEEDED = ("accelerate", "keras", "lightning", "lightning_fabric", "transformers")


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"
)
def test_every_cell_of_the_table_is_what_a_hook_sees():
    program = ROOT / "tests" / "support" / "framework_dtypes.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    heading = "# | setting | weights | products | gradients | state | outputs |"
    lines = SOURCE.read_text().partition(heading)[2].splitlines()[2:]
    rows = [line for line, _ in zip(lines, found, strict=False)]
    stated = {}
    for line in rows:
        name, *cells = (cell.strip() for cell in line.strip("# |").split(" | "))
        stated[re.sub("`", "", name)] = cells
    assert stated == found

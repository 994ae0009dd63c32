"""Write what the memory playground knows of GPUs, from their table: `python tools/write_gpus.py`.

The site is built without torch, which the table imports, so the file is kept beside the playground.
"""

import json
from pathlib import Path

from amp_lab.core.gpus import GPUS

FILE = Path(__file__).resolve().parents[1] / "site" / "playgrounds" / "gpus.js"
_HEAD = """\
/* The GPUs by the memory in GB with which they are sold. Do not edit: `tools/write_gpus.py` writes
   this file from `src/amp_lab/core/gpus.py`. */
"use strict";

const AmpGpus = [
"""


def script() -> str:
    """The file's text: a line for each size of memory, the smallest first."""
    names: dict[int, list[str]] = {}
    for gpu in GPUS.values():
        if gpu.memory_gb is not None:
            names.setdefault(gpu.memory_gb, []).append(gpu.name)
    rows = [f"  {{ gb: {size}, names: {json.dumps(names[size])} }},\n" for size in sorted(names)]
    return f"{_HEAD}{''.join(rows)}];\n"


if __name__ == "__main__":
    FILE.write_text(script(), encoding="utf-8")

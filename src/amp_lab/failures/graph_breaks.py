"""Graph breaks of `torch.compile`, as the installed torch explains them.

torch keeps the explanations in `torch/_dynamo/graph_break_registry.json`. The file is read without
importing torch.
"""

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from amp_lab.failures.reference import Failure

_CODE = re.compile(r"graph-break-site/gb/gb(\d{4})|\bGB(\d{4})\b", re.IGNORECASE)
_SITE = "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb{number}.html"


def graph_break(text: str) -> Failure | None:
    """The last graph break in a text whose code torch knows; None if there is none."""
    codes = [found[1] or found[2] for found in _CODE.finditer(text)]
    for number in reversed(codes):
        versions = _registry().get(f"GB{number}")
        if versions:
            newest = versions[0]
            return Failure(
                code=f"GB{number}",
                title=f"torch.compile breaks the graph: {newest['Gb_type']}",
                cause=newest["Explanation"],
                cure=" ".join(hint.strip() for hint in newest["Hints"]),
                page=_SITE.format(number=number),
            )
    return None


@functools.cache
def _registry() -> dict[str, list[dict[str, Any]]]:
    """The graph breaks of the installed torch by code; empty without torch, or in an older one."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return {}
    file = Path(torch.origin).parent / "_dynamo" / "graph_break_registry.json"
    if not file.exists():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))

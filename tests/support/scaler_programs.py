"""Short training programs with a GradScaler: how they begin, what they leave, what is said."""

from typing import Any

from amp_lab.migrate import migrate_source

HEAD = """
import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

model = nn.Linear(2, 1, bias=False)
nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu", init_scale=2.0**10)
x = torch.ones(4, 2)


def new_loss():
    with autocast("cpu", dtype=torch.float16):
        return model(x).float().square().mean()
"""


def run(code: str, **names: Any) -> dict[str, Any]:
    """The names that a program leaves."""
    left = names | {"__name__": "__main__"}
    exec(compile(code, "program", "exec"), left)
    return left


def found(code: str) -> str:
    findings = migrate_source(code)[1]
    return "\n".join(f.message for f in findings if f.kind in ("mistake", "note"))

"""What migrate leaves to people: what it tells them to write is in torch, and can be called."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_lab.migrate
from amp_lab.migrate.apex import ADVICE

CODE = Path(amp_lab.migrate.__file__).parent
NAME = re.compile(r"\btorch(?:\.[A-Za-z_]\w*)+")
OLD = ("torch.cuda.amp", "torch.cpu.amp")  # what is to be replaced
PARAMETERS = "torch.nn.Linear(2, 2).parameters()"


def resolved(name: str) -> object:
    found: object = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("old", ADVICE)
def test_what_stands_for_a_name_of_apex_is_in_torch(old):
    import torch.distributed.fsdp  # noqa: F401 - it is no part of `import torch`

    names = NAME.findall(ADVICE[old])
    for name in names:
        assert resolved(name.rstrip(".")) is not None, name


@pytest.mark.parametrize(
    ("old", "call"),
    [
        ("apex.optimizers.FusedAdam", "torch.optim.AdamW(..., weight_decay=0.0, fused=True)"),
        ("apex.optimizers.FusedSGD", "torch.optim.SGD(..., fused=True)"),
    ],
)
def test_an_optimizer_can_be_made_as_it_says(old, call):
    assert call in ADVICE[old]
    optimizer = eval(call.replace("...", PARAMETERS), {"torch": torch})
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize(
    "old", ["apex.normalization.FusedRMSNorm", "apex.normalization.MixedFusedRMSNorm"]
)
def test_a_norm_is_apexs(old):
    """Whose eps is 1e-5, where torch's own depends on the dtype."""
    (call,) = re.findall(r"torch\.nn\.RMSNorm\(.*?\)", ADVICE[old])
    norm = eval(call.replace("...", "8"), {"torch": torch})
    assert norm.eps == 1e-5
    assert nn.RMSNorm(8).eps is None


@pytest.mark.parametrize("old", ["apex.amp.disable_casts", "apex.amp.float_function"])
def test_casts_are_off_as_it_says(old):
    (call,) = re.findall(r'torch\.autocast\("cuda", enabled=False\)', ADVICE[old])
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        with eval(call.replace("cuda", "cpu"), {"torch": torch}):
            assert layer(x.float()).dtype is torch.float32


def test_gradients_of_the_masters_are_those_of_the_optimizer():
    (code,) = re.findall(r"write (\(p for .*?\)), after", ADVICE["apex.amp.master_params"])
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [*eval(code, {"optimizer": optimizer})] == [*model.parameters()]


def test_every_name_of_torch_in_a_message_is_there():
    """Of those with which the files that rewrite torch's own names tell what to write."""
    text = (CODE / "torch_amp.py").read_text(encoding="utf-8")
    told = re.findall(r'"[^"\n]*(?:write|use|derive from|import) (torch\.[A-Za-z_.]+)', text)
    assert len(told) > 5
    for name in told:
        if not name.startswith(OLD):
            assert resolved(name.rstrip(".")) is not None, name

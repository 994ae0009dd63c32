"""Code that migrate prints to support old and new versions of torch, run as on both.

An old torch is one whose torch.amp lacks the name, as torch 2.2 lacks GradScaler and 2.3
custom_fwd (torch/amp/__init__.py of these versions).
"""

import functools
import textwrap
from typing import Any

import pytest
import torch
from remedy_tests import does

from amp_lab.core.remedies import REMEDIES
from amp_lab.migrate import migrate_source

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def printed(code: str) -> str:
    """The program text that stands in a remedy."""
    _, _, indented = REMEDIES[code].text.partition(":\n\n")
    return textwrap.dedent(indented)


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "program", "exec"), names)
    return names


@pytest.fixture(params=["new", "old"])
def version(request, monkeypatch):
    """Today's torch, and one without the names that torch.amp was given in 2.3 and 2.4."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    if request.param == "old":
        for name in ("custom_fwd", "custom_bwd"):  # which today look for those of torch.amp
            own = functools.partial(getattr(torch.amp, name), device_type="cuda")
            monkeypatch.setattr(torch.cuda.amp, name, own)
        for name in ("GradScaler", "custom_fwd", "custom_bwd"):
            monkeypatch.delattr(torch.amp, name)
    return request.param


@does("migrate.for_both.scaler")
def test_a_scaler_for_both(version):
    code = (
        printed("migrate.for_both.scaler")
        + "scaler = GradScaler()\nother = GradScaler(init_scale=8.0)\n"
    )
    assert "keep GradScaler() without a device" in REMEDIES["migrate.for_both.scaler"].text
    names = run(code)
    home = "torch.cuda.amp" if version == "old" else "torch.amp"
    assert names["GradScaler"].__module__.startswith(home)
    assert names["scaler"]._device == "cuda"
    assert names["other"]._init_scale == 8.0
    new, findings = migrate_source(code)
    assert new == code
    assert {finding.kind for finding in findings} == {"left"}


FUNCTION = """
import torch


class Double(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @custom_bwd
    def backward(ctx, gradient):
        return 2 * gradient


class DoubleInFp32(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @custom_bwd
    def backward(ctx, gradient):
        return 2 * gradient


x = torch.ones(2, requires_grad=True)
y = Double.apply(x) + DoubleInFp32.apply(x)
y.sum().backward()
"""


@does("migrate.for_both.custom")
def test_a_function_with_casts_for_both(version):
    code = printed("migrate.for_both.custom") + FUNCTION
    names = run(code)
    assert names["y"].tolist() == [4.0, 4.0]
    assert names["x"].grad.tolist() == [4.0, 4.0]
    new, findings = migrate_source(code)
    assert new == code
    assert {finding.kind for finding in findings} == {"left"}


@does("migrate.for_older_autocast")
def test_autocast_by_its_name_of_torch_1_10():
    old = "import torch\nwith torch.cuda.amp.autocast():\n    pass\n"
    new, _ = migrate_source(old)
    assert "torch.amp.autocast(" in new
    assert torch.autocast is torch.amp.autocast
    older = new.replace("torch.amp.autocast(", "torch.autocast(")
    assert migrate_source(older)[0] == older
    compile(older, "program", "exec")

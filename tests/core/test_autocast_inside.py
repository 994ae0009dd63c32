"""Ops whose kernels call matmuls: the tools see and run these matmuls as autocast does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab import find_nonfinite, xray
from amp_lab.core.autocast_inside import autocast_inside_kernels
from amp_lab.difference.run_log import record_run
from amp_lab.tracing.fake_device import autocast_on

OPS = {
    "affine_grid": lambda x: F.affine_grid(x.view(2, 2, 3), [2, 1, 6, 7], align_corners=False),
    "affine_grid in 3D": lambda x: F.affine_grid(
        x.view(1, 3, 4), [1, 1, 4, 5, 6], align_corners=True
    ),
    "pinv": lambda x: torch.linalg.pinv(x.view(3, 4)),
}
NAMES = list(OPS)


class Call(nn.Module):
    """A model that scales its input, and calls an op with the product."""

    def __init__(self, op):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.op = op

    def forward(self, x):
        return self.op(x * self.scale)


class PlainMode(TorchDispatchMode):
    """Runs each op, and keeps their names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(seed))


def has_a_rule() -> bool:
    name = "aten::affine_grid_generator"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")


def in_eager_mode(op, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with torch.autocast("cpu", dtype):
        return Call(op)(values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_mode_gets_the_result_of_eager_mode(name, dtype):
    expected = in_eager_mode(OPS[name], dtype)
    assert expected.dtype is dtype
    with autocast_inside_kernels(), torch.autocast("cpu", dtype), PlainMode() as mode:
        result = Call(OPS[name])(values())
    assert result.dtype is dtype
    assert torch.equal(result, expected)
    assert {"aten.mm.default", "aten.bmm.default"} & set(mode.names)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_block_a_mode_gets_another_dtype(name):
    """If this fails, torch has mended it, and the module can go."""
    with torch.autocast("cpu"), PlainMode():
        assert Call(OPS[name])(values()).dtype is torch.float32


@pytest.mark.parametrize("name", ["affine_grid", "affine_grid in 3D"])
def test_gradients_are_those_of_eager_mode(name):
    """Without pinv: torch cannot differentiate it under autocast."""
    model = Call(OPS[name])
    with torch.autocast("cpu"):
        loss = model(values()).sum()
    (expected,) = torch.autograd.grad(loss, model.scale)
    with autocast_inside_kernels(), torch.autocast("cpu"), PlainMode():
        loss = model(values()).sum()
    (gradient,) = torch.autograd.grad(loss, model.scale)
    torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_changes_without_autocast(name):
    expected = Call(OPS[name])(values())
    with autocast_inside_kernels(), PlainMode():
        result = Call(OPS[name])(values())
    assert torch.equal(result, expected)
    with autocast_inside_kernels(), torch.autocast("cpu", enabled=False), PlainMode():
        result = Call(OPS[name])(values())
    assert torch.equal(result, expected)


def test_the_rules_end_with_the_outermost_block():
    assert not has_a_rule()
    with autocast_inside_kernels():
        with autocast_inside_kernels():
            assert has_a_rule()
        assert has_a_rule()
    assert not has_a_rule()
    with autocast_on("cpu"):
        assert has_a_rule()
    assert not has_a_rule()


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_xray_names_the_dtype(name, device_type):
    result = xray(Call(OPS[name]), values(), device_type=device_type, dtype=torch.bfloat16)
    assert result.outputs[""][0] is torch.bfloat16
    matmuls = [row for row in result.rows if row.op in ("mm", "bmm")]
    assert [row.dtype for row in matmuls] == [torch.bfloat16]


@pytest.mark.parametrize("name", NAMES)
def test_xray_of_a_real_run_names_the_dtype(name):
    result = xray(Call(OPS[name]), values(), device_type="cpu", real=True)
    assert result.outputs[""][0] is torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_find_nonfinite_does_not_change_the_result(name):
    model = Call(OPS[name])
    with find_nonfinite(model), torch.autocast("cpu"):
        result = model(values())
    assert torch.equal(result, in_eager_mode(OPS[name]))
    assert not has_a_rule()


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_has_the_result_of_eager_mode(name):
    kept = []

    def run():
        with torch.autocast("cpu"):
            kept.append(Call(OPS[name])(values()))
        return kept[0]

    record_run("after", run)
    assert torch.equal(kept[0], in_eager_mode(OPS[name]))

"""The remedy of find_nonfinite for an attention kernel that is at fault, done as it says."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from planted_faults import find
from remedy_tests import does
from torch import nn
from torch.nn.attention import SDPBackend

from amp_lab import find_nonfinite
from amp_lab.core.remedies import REMEDIES

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel"),
]
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
CODE = "nonfinite.attention_kernel"


class SelfAttention(nn.Module):
    """A projection, and attention with one head."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.scale = scale

    def forward(self, x):
        heads = self.project(x)[:, None] * self.scale
        return F.scaled_dot_product_attention(heads, heads, heads)


def nan_forward(query, *args, **kwargs):
    return torch.full_like(query, math.nan), query.new_zeros(query.shape[:-1])


def nan_backward(gradient, query, key, value, *args, **kwargs):
    return torch.full_like(query, math.nan), torch.zeros_like(key), torch.zeros_like(value)


@pytest.fixture
def plant():
    """Replace a kernel of the CPU, until the test ends."""
    library = torch.library.Library("aten", "IMPL")
    yield lambda name, kernel: library.impl(name, kernel, "CPU")
    library._destroy()


def report_of(model, x, block=contextlib.nullcontext):
    with find_nonfinite(model) as found, block():
        model(x).float().sum().backward()
    return found.report


@does(CODE)
@pytest.mark.parametrize(
    ("name", "kernel", "phase"),
    [(KERNEL, nan_forward, "forward"), (f"{KERNEL}_backward", nan_backward, "backward")],
)
def test_a_kernel_that_makes_a_nan_is_named_and_plain_ops_are_finite(plant, name, kernel, phase):
    x = torch.randn(2, 8, 16)
    assert report_of(SelfAttention(), x) is None
    plant(name, kernel)
    report = report_of(SelfAttention(), x)
    assert report.phase == phase
    assert [remedy.code for remedy in report.remedies] == [CODE]
    assert report.advice == REMEDIES[CODE].text
    plain = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
    assert plain in report.advice
    assert report_of(SelfAttention(), x, lambda: eval(plain, {"torch": torch})) is None


def test_cudnn_is_switched_off_by_the_call_in_the_remedy():
    call = "torch.backends.cuda.enable_cudnn_sdp(False)"
    assert call in REMEDIES[CODE].text
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        exec(call, {"torch": torch})
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_in_plain_ops_an_overflow_inside_of_attention_is_named():
    """The kernel is not at fault if the scores exceed fp32."""
    x = torch.ones(2, 8, 16)
    huge = SelfAttention(1e25)
    assert [remedy.code for remedy in report_of(huge, x).remedies] == [CODE]
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        report = find(huge, x)
    assert "inside attention" in REMEDIES[CODE].text
    assert CODE not in [remedy.code for remedy in report.remedies]
    assert report.op in ("bmm", "matmul", "mul", "baddbmm")


def test_a_gradient_that_overflows_in_fp16_is_not_blamed_on_the_kernel():
    model, x = SelfAttention().half(), torch.randn(2, 8, 16).half()
    with find_nonfinite(model) as found:
        (model(x).sum() * 6e4).backward()
    assert found.report is not None
    assert CODE not in [remedy.code for remedy in found.report.remedies]

"""advice: each rule says what the rows and casts prove, and is silent where there is nothing."""

import re

import pytest
import torch
import torch.nn.functional as F
from remedy_tests import says
from small_models import Head
from torch import nn

from amp_lab import forecast_memory
from amp_lab.core.backends import backend
from amp_lab.core.errors import TraceError
from amp_lab.tracing.records import LOSS
from amp_lab.tracing.xray import xray

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

FP16, FP32 = torch.float16, torch.float32


def advice(model, *inputs, **options):
    return "\n".join(xray(model, *inputs, **options).advice)


def test_a_value_cast_back_and_forth_is_told():
    said = advice(Head(), torch.randn(8, 8))
    assert re.search(r"layer_norm .*'norm': .*fp16 .*fp32", said)
    assert "back to fp16 for linear" in said
    assert "back to" not in advice(Head(), torch.randn(8, 8), device_type="cpu")
    assert "back to" not in advice(Head().a, torch.randn(8, 8))


def test_low_precision_softmax_and_norm_are_told_where_they_happen():
    said = advice(Head(), torch.randn(8, 8), device_type="cpu")
    assert re.search(r"softmax .*itself .*bf16 on cpu", said)
    assert re.search(r"layer_norm .*'norm' .*bf16 .*cpu", said)
    assert "runs in" not in advice(Head(), torch.randn(8, 8), device_type="cuda")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("device", "wide"), [("cpu", 0), ("mps", 0), ("cuda", 1), ("xpu", 1)])
def test_rms_norm_is_in_fp32_only_where_autocast_has_a_rule_for_it(device, wide):
    """Elsewhere it computes in fp32 inside, but takes and gives what it was given."""
    key = f"Autocast{backend(device).key}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", key) == bool(wide)
    model = nn.Sequential(nn.Linear(16, 64), nn.RMSNorm(64), nn.Linear(64, 8))
    found = xray(model, torch.randn(4, 16), device_type=device, dtype=torch.bfloat16)
    (row,) = (row for row in found.rows if row.op == "rms_norm")
    assert row.dtype is (torch.float32 if wide else torch.bfloat16)
    said = "\n".join(found.advice)
    assert ("rms_norm in '1' stays" in said) == bool(wide)
    assert bool(re.search(rf"rms_norm .*'1' .*bf16 on {device}", said)) == (not wide)


def test_the_surprise_of_cross_entropy_is_told_and_its_remedy_helps():
    target = torch.zeros(8, dtype=torch.long)
    low = xray(Head().a, torch.randn(8, 8), loss_fn=lambda y: F.cross_entropy(y, target))
    assert [(r.op, r.in_dtypes[0]) for r in low.rows if r.module == LOSS] == [
        ("_log_softmax", FP16),
        ("nll_loss_forward", FP32),
    ]
    (said,) = (line for line in low.advice if "cross_entropy" in line)
    assert re.search(r" log_softmax .*fp16, .*fp32 loss", said)
    assert re.search(r"Loss: fp32, .* log_softmax .*fp16", str(low))
    wide = xray(Head().a, torch.randn(8, 8), loss_fn=lambda y: F.cross_entropy(y.float(), target))
    assert not any("loss is computed" in line for line in wide.advice)
    assert wide.loss_dtype is FP32
    assert "Loss: fp32." in str(wide)


def test_a_loss_that_ends_in_low_precision_is_said_to_be_in_it():
    found = xray(Head().a, torch.randn(8, 8), loss_fn=torch.mean, device_type="cpu")
    (said,) = (line for line in found.advice if "the loss" in line)
    assert "mean runs in bf16, so" in said
    assert "Loss: bf16." in str(found)


def test_a_loss_module_with_weights_is_moved_too():
    loss = nn.CrossEntropyLoss(weight=torch.ones(16))
    target = torch.zeros(8, dtype=torch.long)
    found = xray(Head().a, torch.randn(8, 8), loss_fn=lambda y: loss(y.float(), target))
    assert found.loss_dtype is FP32


def test_an_op_that_raises_under_autocast_alone_is_told():
    target = torch.zeros(8, 8)
    found = xray(
        nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()),
        torch.randn(8, 8),
        loss_fn=lambda p: F.binary_cross_entropy(p, target),
    )
    assert "binary_cross_entropy" in found.raised
    assert found.advice[0].startswith("The model fails only under autocast: ")
    assert "the loss (binary_cross_entropy)" in found.advice[0]
    assert "binary_cross_entropy_with_logits" in found.advice[0]
    assert found.output_dtypes == [FP16]


class Masked(nn.Linear):
    lowest = -1e9

    def forward(self, x):
        scores = super().forward(x)
        return scores.masked_fill(scores < 0, self.lowest).softmax(-1)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_mask_value_that_fp16_cannot_hold_is_told_with_the_remedy(device):
    model, x = Masked(8, 8), torch.randn(8, 8)
    with torch.autocast("cpu", FP16), pytest.raises(RuntimeError, match="without overflow") as real:
        model(x)
    found = xray(model, x, device_type=device, dtype=FP16)
    assert (
        found.advice[0]
        == f"The model fails only under autocast: {found.raised}. The table ends at this op."
    )
    assert f"itself (masked_fill): RuntimeError: {real.value}" in found.raised
    assert says("dtype.fill_value", found.raised)
    with pytest.raises(TraceError, match=r"without overflow; use torch\.finfo"):
        forecast_memory(model, x, device_type=device, precision="fp16")
    assert xray(model, x, device_type=device, dtype=torch.bfloat16).raised is None
    model.lowest = torch.finfo(FP16).min
    assert xray(model, x, device_type=device, dtype=FP16).raised is None


def test_a_model_in_float64_is_left_alone_and_told():
    said = advice(nn.Linear(8, 8).double(), torch.randn(8, 8).double())
    assert re.search(r"none of its work .*fp16", said)
    assert "because autocast does not cast fp64" in said


def test_shapes_that_matrix_units_cannot_use_whole_are_told():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 9, 1))
    said = advice(model, torch.randn(8, 3, 8, 8))
    assert "conv2d in '0': 3 input channels" in said
    assert re.search(r"conv2d in '1': 1 channel .*depthwise", said)
    assert "conv2d in '2': 9 output channels" in said
    assert "multiples of 8" not in advice(model, torch.randn(8, 3, 8, 8), device_type="cpu")
    assert "linear in 'the" not in advice(nn.Linear(16, 8), torch.randn(8, 16))
    assert "1,001 output features" in advice(nn.Linear(16, 1001), torch.randn(8, 16))


def test_layers_with_less_than_a_hundredth_of_the_work_are_left_out_and_the_rest_is_one_line():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.large = nn.ModuleList(nn.Linear(width, width) for width in (1001, 1003, 1005, 999))
            self.tiny = nn.Linear(7, 5)

        def forward(self, x):
            for layer in self.large:
                x = layer(x.new_zeros(x.shape[0], layer.in_features))
            return self.tiny(x[:, :7])

    said = advice(Mixed(), torch.randn(8, 7))
    lines = [line for line in said.splitlines() if "multiples of 8" in line]
    assert len(lines) == 1
    assert ">99.9 % of the work" in lines[0]
    assert lines[0].index("1,005 input features") < lines[0].index("1,003 input features")
    assert lines[0].endswith("; and 1 more.")
    assert "tiny" not in said


def test_the_verdict_comes_first_and_says_what_is_saved():
    wide = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    many, few = (xray(wide, torch.empty(rows, 64)) for rows in (4096, 1))
    assert re.match(r"100 % .*in fp16", many.advice[0])
    # Each of the four results takes half, and the casts are those of the input and the weights.
    saved = 4 * 4096 * 64 * 2 - 4096 * 64 * 2 - 2 * (64 * 64 + 64) * 2
    share = 100 * saved / (4 * 4096 * 64 * 4)
    assert f"writes {share:.3g} % fewer bytes than in fp32" in many.advice[0]
    assert re.search(r"fp16 does not reduce the bytes written: .*write 16\.4 KiB", few.advice[0])
    assert "only 0.5 KiB smaller" in few.advice[0]


def test_there_is_no_verdict_on_what_failed():
    def loss(y):
        return F.binary_cross_entropy(y.sigmoid(), y.new_zeros(8, 8))

    found = xray(nn.Linear(8, 8), torch.randn(8, 8), loss_fn=loss)
    assert found.raised
    assert not any("of the work is done" in line for line in found.advice)


def test_a_large_op_in_fp32_is_told_with_its_reason():
    class Scores(nn.Module):
        def forward(self, q):
            return (q @ q.mT).softmax(-1)

    said = advice(Scores(), torch.randn(4, 64, 8))
    assert re.search(r"softmax .*stays in fp32, .*cuda", said)


class Twice(nn.Module):
    """One layer under two names, called twice."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x))


def test_a_weight_used_twice_is_cast_once_and_a_frozen_one_each_time():
    model = Twice()
    assert len([c for c in xray(model, torch.randn(8, 8)).casts if "weight" in c.what]) == 1
    assert not any("again for each use" in line for line in xray(model, torch.randn(8, 8)).advice)
    found = xray(model.requires_grad_(False), torch.randn(8, 8))
    weights = [cast for cast in found.casts if "weight" in cast.what]
    assert [cast.cached for cast in weights] == [False, False]
    assert any(re.search(r"casts first\.bias, first\.weight again", line) for line in found.advice)
    assert {row.module for row in found.rows} == {"first"}


def test_an_empty_batch_is_no_division_by_zero():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    report = xray(model, torch.empty(0, 8), device_type="cuda")
    assert not any("stays in fp32" in line for line in report.advice)
    full = xray(model, torch.empty(2, 8), device_type="cuda")
    assert any("stays in fp32" in line for line in full.advice)

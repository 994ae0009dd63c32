"""Checks for inf and NaN that a model makes in one dtype alone find what finite values have."""

import pytest
import torch
from torch import nn

from amp_lab import forecast_inference, forecast_memory, xray
from amp_lab.core.backends import BACKENDS
from amp_lab.core.errors import TraceError

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF = float("inf")

# Each says whether there is an inf or a NaN.
CHECKS = {
    "isinf": lambda x: torch.isinf(x).any(),
    "isnan": lambda x: torch.any(torch.isnan(x)),
    "isposinf": lambda x: torch.isposinf(x).any() | torch.isneginf(x).any(),
    "isfinite": lambda x: not torch.isfinite(x).all(),
    "inverted": lambda x: ~torch.isfinite(x).all(),
    "any inverted": lambda x: torch.logical_not(x.isfinite()).any(),
    "both": lambda x: torch.isinf(x).any() | torch.isnan(x).any(),
    "both of elements": lambda x: torch.logical_or(x.isinf(), x.isnan()).any(),
    "one after the other": lambda x: torch.isinf(x).any() or torch.isnan(x).any(),
    "number": lambda x: torch.isnan(x).any().item(),
    "sum": lambda x: x.isnan().sum() > 0,
    "two sums": lambda x: x.isnan().sum() + x.isinf().sum() > 0,
    "sum as a number": lambda x: x.isnan().sum().item() > 0,
    "count": lambda x: torch.count_nonzero(x.isnan()),
    "count of all": lambda x: x.isfinite().sum() != x.numel(),
    "share": lambda x: x.isnan().float().mean() > 0,
    "rows": lambda x: x.isnan().any(dim=-1).any(),
    "of a sum": lambda x: not torch.isfinite(x.sum()),
    "maximum": lambda x: x.isnan().flatten().max(),
    "on the CPU": lambda x: torch.isnan(x).cpu().any(),
    "unlike itself": lambda x: (x != x).any(),
    "like itself": lambda x: not (x == x).all(),
    "compared": lambda x: (x.abs() == INF).any(),
    "below": lambda x: not (x.abs() < INF).all(),
    "in place": lambda x: x.isnan().logical_or_(x.isinf()).any(),
}


class Checked(nn.Module):
    """Clamps where a check finds inf or NaN, which it makes in one dtype alone, or in all."""

    def __init__(self, check, dtype=FP16):
        super().__init__()
        self.layer, self.check, self.dtype = nn.Linear(8, 8), check, dtype

    def forward(self, x):
        x = self.layer(x)
        if self.dtype in (None, x.dtype) and self.check(x):
            x = torch.clamp(x, -100.0, 100.0)
        return x


def ops(found) -> set[str]:
    return {row.op for row in found.rows}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_that_only_fp16_makes_finds_nothing(name):
    model, x = Checked(CHECKS[name]), torch.randn(4, 8)
    assert not CHECKS[name](x)
    found = xray(model, x, dtype=FP16)
    assert "clamp" not in ops(found)
    assert "for inf or NaN" in found.decisions
    assert "the outputs of the run on the CPU in fp32 are finite" in found.decisions


@pytest.mark.parametrize("device_type", BACKENDS)
def test_it_finds_nothing_on_any_device_and_is_not_made_in_bf16(device_type):
    model, x = Checked(CHECKS["isfinite"]), torch.randn(4, 8)
    assert "for inf or NaN" in xray(model, x, device_type=device_type, dtype=FP16).decisions
    assert not xray(model, x, device_type=device_type, dtype=BF16).decisions


def test_every_trace_says_that_it_rests_on_this():
    model, x = Checked(CHECKS["isfinite"]), torch.randn(4, 8)
    remark = "1 check for inf or NaN was assumed to find none"
    assert remark in forecast_inference(model, x, precision="fp16").decisions
    assert remark in str(forecast_memory(model, x, precision="fp16"))
    assert remark not in str(forecast_memory(model, x, precision="bf16"))
    assert remark in xray(model.half(), x.half()).decisions
    two = nn.Sequential(*[Checked(CHECKS["one after the other"]) for _ in range(2)])
    assert "4 checks for inf or NaN" in str(xray(two, x, dtype=FP16))


def test_a_check_that_the_real_run_makes_too_has_its_answer():
    x = torch.randn(4, 8)
    for first in (1.0, INF):
        x[0, 0] = first
        for dtype in (FP16, FP32):
            found = xray(Checked(CHECKS["isfinite"], None), x, device_type="cpu", dtype=dtype)
            assert ("clamp" in ops(found)) == (first == INF)
            assert "1 decision" in found.decisions
            assert "inf or NaN" not in found.decisions


class Chosen(Checked):
    """Takes some rows after the check."""

    def forward(self, x):
        x = super().forward(x)
        return x[x[:, 0] > 0]


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_checks_of_one_run_alone_come_between_decisions_of_both(dtype):
    check = CHECKS["one after the other"]
    model, x = nn.Sequential(Chosen(check, dtype), Chosen(check, dtype)), torch.randn(9, 8)
    found = xray(model, x, dtype=FP16)
    assert "2 decisions" in found.decisions
    assert ("4 checks" in found.decisions) == (dtype is FP16)
    assert forecast_memory(model, x, precision="fp16").peak


def test_what_the_real_run_alone_found_is_another_course():
    x = torch.randn(4, 8)
    x[0, 0] = INF
    with pytest.raises(TraceError, match=r"another branch .*index in '0'"):
        xray(nn.Sequential(Chosen(CHECKS["isfinite"], FP32)), x, dtype=FP16)


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_nothing_is_assumed_of_a_run_that_is_not_finite(bad):
    x = torch.randn(4, 8)
    x[0, 0] = bad
    words = r"inf or NaN in '0', but the run on the CPU has no such check, and its outputs are not"
    with pytest.raises(TraceError, match=words) as refused:
        xray(nn.Sequential(Checked(CHECKS["isfinite"])), x, dtype=FP16)
    assert "\n" not in str(refused.value)


NO_CHECKS = {
    "range": lambda x: x.abs().max() > 60000,
    "sign": lambda x: (x > 0).all(),
    "filled": lambda x: x.isnan().fill_(True).any(),
    "with another mask": lambda x: (x.isnan() | (x > 100)).any(),
    "in place": lambda x: x.isnan().logical_or_(x > 100).any(),
    "like another": lambda x: (x == x.flip(0)).all(),
    "none at all": lambda x: x[:0].isfinite().any(),
}


@pytest.mark.parametrize("name", NO_CHECKS)
def test_other_values_are_not_assumed(name):
    with pytest.raises(TraceError, match="another branch"):
        xray(Checked(NO_CHECKS[name]), torch.randn(4, 8), dtype=FP16)


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["Bart", "Marian", "NllbMoe"])
def test_translation_in_fp16_is_traced_past_its_checks(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50}
    counts = {"encoder_layers": 2, "decoder_layers": 1, "pad_token_id": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **counts, **heads)
    model = getattr(transformers, f"{name}Model")(config).half().eval()
    ids = torch.randint(2, 50, (2, 9))
    found = xray(model, input_ids=ids, decoder_input_ids=ids)
    assert " checks for inf or NaN " in found.decisions
    assert FP32 not in {row.dtype for row in found.rows if row.flops}

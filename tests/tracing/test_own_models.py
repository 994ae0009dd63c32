"""Models as people have them: weights in bf16, adapters, experts, configs that refuse a change."""

import collections

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from amp_lab import forecast_memory, xray
from amp_lab.errors import TraceError

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def dtypes(found) -> set[torch.dtype]:
    """Of the work that an X-ray saw."""
    return {row.dtype for row in found.rows if row.flops}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_in_low_precision_is_xrayed_as_it_is(dtype, device):
    found = xray(mlp().to(dtype), torch.ones(4, 8, dtype=dtype), device_type=device)
    assert found.dtype is FP32  # no autocast
    assert dtypes(found) == {dtype}
    assert found.casts == []
    assert found.output_dtypes == [dtype]


def test_autocast_over_low_weights_is_what_one_asks_for():
    found = xray(mlp().to(BF16), torch.ones(4, 8, dtype=BF16), dtype=FP16)
    assert dtypes(found) == {FP16}
    assert {(cast.from_dtype, cast.to_dtype) for cast in found.casts} >= {(BF16, FP16)}


class Adapted(nn.Module):
    """A frozen base in bf16 with fp32 adapters, as LoRA leaves it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).to(BF16).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x.float()))


def test_a_low_base_with_wide_adapters_runs_under_autocast_to_the_base():
    x = torch.ones(4, 8, dtype=BF16)
    found = xray(Adapted(), x)
    assert found.dtype is BF16
    assert {cast.what for cast in found.casts if cast.is_of_parameter} == {
        "parameter down.weight",
        "parameter up.weight",
    }
    forecast = forecast_memory(Adapted(), x, precision="bf16")
    assert forecast.weights == 2 * (64 + 8) + 4 * (16 + 16)
    assert forecast.gradients == 4 * (16 + 16)  # of the adapters alone


def test_wide_inputs_for_low_weights_fail_as_they_do_for_real():
    model = nn.Sequential(nn.Linear(8, 8)).to(BF16)
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 8))
    with pytest.raises(TraceError, match="its weights are bfloat16: give such inputs"):
        xray(model, torch.ones(4, 8))


class OwnProduct(torch.autograd.Function):
    """A product whose backward pass meets fp32 weights with fp16 gradients under autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class WithOwnProduct(nn.Module):
    def __init__(self, function=OwnProduct):
        super().__init__()
        self.first, self.function = nn.Linear(8, 8), function
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return self.function.apply(self.first(x), self.weight)


def test_a_function_whose_backward_pass_fails_under_autocast_is_told():
    model, x = WithOwnProduct(), torch.ones(4, 8)
    with torch.autocast("cpu", dtype=BF16):
        out = model(x)
    with pytest.raises(RuntimeError):
        out.sum().backward()
    for device in ("cuda", "cpu"):
        assert "(backward pass of OwnProduct)" in xray(model, x, device_type=device).raised


def test_a_function_with_custom_fwd_is_sound():
    class Sound(torch.autograd.Function):
        forward = staticmethod(
            torch.amp.custom_fwd(OwnProduct.forward, device_type="cpu", cast_inputs=BF16)
        )
        backward = staticmethod(torch.amp.custom_bwd(OwnProduct.backward, device_type="cpu"))

    assert xray(WithOwnProduct(Sound), torch.ones(4, 8), device_type="cpu").raised is None


class Frozen(collections.OrderedDict):
    """A config that refuses every change, such as diffusers'."""

    def clear(self):
        raise TypeError("frozen")

    update = __setitem__ = clear

    def __init__(self, **values):
        for name, value in values.items():
            super().__setitem__(name, value)


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.config, self.seen = nn.Linear(8, 8), Frozen(width=8, depth=2), []

    def forward(self, x):
        self.seen.append(x)
        return self.layer(x)


def test_a_frozen_config_stays_and_what_the_model_noted_goes():
    model = Configured()
    xray(model, torch.ones(4, 8))
    forecast_memory(model, torch.ones(4, 8), precision="bf16")
    assert dict(model.config) == {"width": 8, "depth": 2}
    assert model.seen == []


class Experts(nn.Module):
    """Rows sorted by expert, one product for each group, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.router, self.weight = nn.Linear(16, 2), nn.Parameter(torch.ones(2, 16, 32))

    def forward(self, x):
        if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
            raise RuntimeError("no grouped products on this card")
        ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, self.weight, offs=ends) + self.router(x).sum()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_experts_count_and_a_card_that_is_asked_answers(device):
    found = xray(Experts(), torch.ones(16, 16), device_type=device, dtype=BF16)
    work = {row.op: row.flops for row in found.rows if row.flops}
    assert work["_grouped_mm"] == 2 * 16 * 16 * 32
    assert work["addmm"] == 2 * 16 * 16 * 2


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(5, 4, 3)

    def forward(self, x):
        return self.layer(x[:, :5], x[:, 5:])


class Deformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torchvision.ops.DeformConv2d(4, 6, 3, padding=1)

    def forward(self, x):
        offset = x.new_zeros(x.shape[0], 18, *x.shape[2:])
        return self.layer(x, offset)


@pytest.mark.parametrize(
    ("model", "inputs", "count"),
    [
        (Bilinear(), torch.ones(7, 9), 2 * 7 * 3 * 5 * 4),
        (Deformed(), torch.ones(2, 4, 5, 5), 2 * 2 * 6 * 5 * 5 * 4 * 9),
    ],
    ids=["bilinear", "deformable convolution"],
)
def test_work_that_torch_does_not_count_is_counted(model, inputs, count):
    assert sum(row.flops for row in xray(model, inputs, device_type="cpu").rows) == count


def test_a_long_lstm_casts_its_weights_once():
    """As cuDNN's flat copy: torch's kernels, which stand in for it, cast them in every step."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    short, long = (
        forecast_memory(Layer(), torch.ones(2, steps, 64), precision="fp16") for steps in (8, 256)
    )
    assert short.cast_cache == long.cast_cache < 4 * short.weights
    wide = forecast_memory(Layer(), torch.ones(2, 256, 64), precision="fp32")
    assert long.peak < wide.peak

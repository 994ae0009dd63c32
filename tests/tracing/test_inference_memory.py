"""The forecast for inference, compared with real forward passes on the CPU."""

import contextlib
import re

import pytest
import torch
import torchvision.models as tv
from memory_models import Meter, images
from torch import nn

from amp_lab import forecast_inference
from amp_lab.core.backends import backend
from amp_lab.core.errors import TraceError
from amp_lab.model_call import ModelCall
from amp_lab.models.gpt import Gpt, Size
from amp_lab.tracing.inference_memory import QUANTIZED_WEIGHTS, InferenceTable, inference_table
from amp_lab.tracing.inference_result import InferenceForecast

TOKENS = torch.randint(0, 500, (4, 32))
MODELS = {
    "vit": (lambda: tv.VisionTransformer(32, 8, 2, 4, 64, 128), images(32)),
    "resnet18": (tv.resnet18, images(64)),
    "gpt": (lambda: Gpt(Size(64, heads=4, depth=3), 500), TOKENS),
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)).eval()


def real_peak(model, inputs, *, autocast: bool, under=torch.inference_mode) -> int:
    """The most that a real pass has in use, with the model's own and the inputs."""
    meter = Meter()
    own = [*model.parameters(), *model.buffers(), inputs]
    for tensor in own:
        meter.see(tensor)
    block = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with under(), meter, block:
        model(inputs)
    return meter.most


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fp32", "autocast", "cast"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_a_real_pass(name, way):
    build, inputs = MODELS[name]
    model = build().eval()
    forecast = forecast_inference(
        model,
        inputs,
        device_type="cpu",
        precision="fp32" if way == "fp32" else "bf16",
        autocast=way == "autocast",
    )
    if way == "cast":
        model = model.bfloat16()
        inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    # Kernels of layer norms give statistics whose dtype fakes get wrong in bf16.
    real = real_peak(model, inputs, autocast=way == "autocast")
    assert forecast.peak == pytest.approx(real, rel=0.01)


def table(model: nn.Module, inputs: torch.Tensor, **options) -> InferenceTable:
    return inference_table(ModelCall(model, (inputs,)), **options)


def by_table(model: nn.Module, inputs: torch.Tensor) -> InferenceForecast:
    return table(model, inputs, device_type="cpu")["bf16 autocast"]


def by_function(model: nn.Module, inputs: torch.Tensor) -> InferenceForecast:
    return forecast_inference(model, inputs, device_type="cpu", precision="bf16", autocast=True)


@pytest.mark.parametrize("forecast_of", [by_table, by_function])
def test_casts_stay_under_no_grad_alone(forecast_of):
    model, inputs = mlp(), torch.rand(2, 256)
    forecast = forecast_of(model, inputs)
    under = {
        mode: real_peak(model, inputs, autocast=True, under=mode)
        for mode in (torch.inference_mode, torch.no_grad)
    }
    assert forecast.peak == under[torch.inference_mode]
    assert forecast.kept_under_no_grad == under[torch.no_grad] - under[torch.inference_mode] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_autocast_no_grad_keeps_nothing_more(precision):
    model, inputs = mlp(), torch.rand(2, 256)
    forecast = forecast_inference(model, inputs, device_type="cpu", precision=precision)
    if precision == "bf16":
        model, inputs = model.bfloat16(), inputs.bfloat16()
    real = real_peak(model, inputs, autocast=False, under=torch.no_grad)
    assert forecast.peak + forecast.kept_under_no_grad == real


def test_weights_in_eight_bits_take_what_torchao_stores():
    quantization = pytest.importorskip("torchao.quantization")
    model = mlp().bfloat16()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    stored = 0
    for layer in (model[0], model[2]):
        parts, _ = layer.weight.__tensor_flatten__()
        tensors = [getattr(layer.weight, part) for part in parts]
        stored += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    biases = model[0].bias.nbytes + model[2].bias.nbytes
    assert table(mlp(), torch.rand(2, 256), device_type="cpu")["int8"].weights == stored + biases


def test_four_bits_have_a_scale_and_a_zero_point_in_bf16_for_each_group():
    four = next(weights for weights in QUANTIZED_WEIGHTS if weights.name == "int4")
    assert four.bytes_of(rows=16, columns=256) == 16 * 256 // 2 + 16 * 2 * (2 + 2)


def test_a_weight_that_torchao_cannot_group_stays_in_16_bits():
    """``Int4WeightOnlyConfig`` skips a layer whose inputs are no multiple of 128."""
    four = next(weights for weights in QUANTIZED_WEIGHTS if weights.name == "int4")
    assert four.bytes_of(rows=192, columns=192) == 192 * 192 * 2


def test_a_weight_that_an_embedding_shares_stays_in_16_bits():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    found = table(Tied().eval(), torch.zeros(2, 3, dtype=torch.int64), device_type="cpu")
    assert "int8" not in [forecast.way for forecast in found.forecasts]
    assert found["bf16 weights"].weights == 50 * 16 * 2


def test_a_weight_that_a_parametrization_computes_stays_in_16_bits():
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    found = table(nn.Sequential(computed), torch.rand(2, 8), device_type="cpu")
    assert "int8" not in [forecast.way for forecast in found.forecasts]
    found = table(nn.Sequential(computed, nn.Linear(8, 8)), torch.rand(2, 8), device_type="cpu")
    saved = found["bf16 weights"].weights - found["int8"].weights
    assert saved == 8 * 8 * 2 - QUANTIZED_WEIGHTS[0].bytes_of(8, 8)  # of the other layer


def test_the_largest_batch_is_the_largest_that_fits():
    model = mlp()
    memory = 2**20
    found = table(model, torch.rand(2, 256), device_type="cpu", memory_bytes=memory)
    for way, largest in found.largest.items():
        forecasts = {
            batch: table(model, torch.rand(batch, 256), device_type="cpu")[way].peak
            for batch in (largest, largest + 1)
        }
        assert forecasts[largest] <= memory < forecasts[largest + 1], way
    assert list(found.largest) == ["fp32", "bf16 autocast", "bf16 weights", "int8", "int4"]


def test_a_model_that_refuses_cast_weights_is_named_and_the_others_are_forecast():
    class MakesFloats(nn.Linear):
        def forward(self, x):
            return super().forward(x) @ torch.ones(4, 4)

    found = table(MakesFloats(4, 4).eval(), torch.rand(2, 4))
    assert [forecast.way for forecast in found.forecasts] == ["fp32", "bf16 autocast"]
    assert set(found.failed) == {"bf16 weights"}
    assert re.search(r"No forecast .*bf16 weights: MakesFloats .*\(2, 4\)", str(found))


def test_a_wrong_input_is_an_error():
    with pytest.raises(TraceError, match=r"Sequential with input of shape \(2, 7\): "):
        table(mlp(), torch.rand(2, 7))
    with pytest.raises(TraceError, match="precision 'fp8'"):
        forecast_inference(mlp(), torch.rand(2, 256), precision="fp8")


def test_the_model_is_as_it_was():
    model, inputs = mlp(), torch.rand(2, 256)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table(model, inputs)
    assert all(p.dtype is torch.float32 and p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_in_16_bits_is_forecast_in_fp32_too():
    found = table(mlp().bfloat16(), torch.rand(2, 256), device_type="cpu")
    assert found["fp32"].weights == 2 * found["bf16 weights"].weights
    assert found["fp32"].peak == table(mlp(), torch.rand(2, 256), device_type="cpu")["fp32"].peak


def test_a_model_whose_course_depends_on_values_takes_those_of_a_run():
    torch.manual_seed(0)
    found = table(KeepsPositive(4, 4).eval(), torch.rand(8, 4), device_type="cpu")
    assert len(found.forecasts) == 5
    assert "taken from a run" in str(found)


class Squares(nn.Linear):
    """Multiplies its rows by all of them, so that its memory grows with the square of the batch."""

    def forward(self, x):
        rows = super().forward(x)
        return rows @ rows.T


class KnowsItsBatch(nn.Linear):
    """Raises a `KeyError` for any batch but 2."""

    def forward(self, x):
        scale = {2: 1.0}[len(x)]
        return scale * super().forward(x)


class KeepsPositive(nn.Linear):
    """The number of its rows depends on values."""

    def forward(self, x):
        rows = super().forward(x)
        return rows[rows.sum(1) > 0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Squares, "does not grow linearly with the batch"),
        (KnowsItsBatch, "KnowsItsBatch: KeyError: 3 "),
        (KeepsPositive, "depends on values"),
    ],
)
def test_a_largest_batch_that_cannot_be_told_comes_with_the_reason_in_its_line(kind, reason):
    torch.manual_seed(0)
    model = kind(64, 64).eval()
    found = table(model, torch.rand(2, 64), device_type="cpu", memory_bytes="1MiB")
    assert found.largest == {}
    assert set(found.no_largest) == {forecast.way for forecast in found.forecasts}
    (line,) = [line for line in str(found).splitlines() if "largest batch" in line]
    assert "1 MiB is unknown for fp32, " in line
    assert reason in line.partition(" is unknown for ")[2]


def test_a_way_with_a_largest_batch_stands_beside_one_without():
    class SquaresUnderAutocast(nn.Linear):
        def forward(self, x):
            rows = super().forward(x)
            return rows @ rows.T if torch.is_autocast_enabled("cpu") else rows

    model = SquaresUnderAutocast(64, 64).eval()
    found = table(model, torch.rand(2, 64), device_type="cpu", memory_bytes="1MiB")
    assert set(found.no_largest) == {"bf16 autocast"}
    row, line = [line for line in str(found).splitlines() if "largest batch" in line]
    assert row.split()[5:7] == [f"{found.largest['fp32']:,}", "-"]
    assert re.search(r"1 MiB is unknown for bf16 autocast: Squares", line)


def test_of_a_batch_that_nobody_asks_for_nothing_is_said():
    assert "largest batch" not in str(table(Squares(64, 64).eval(), torch.rand(2, 64)))


CONSTANTS = {
    "made there": lambda x: torch.tensor(2.0, device=x.device),
    "empty": lambda x: torch.tensor([], device=x.device),
    "moved": lambda x: torch.tensor(2.0, device="cpu").to(x.device),
    "moved and cast": lambda x: torch.tensor(2, device="cpu").to(x),
}


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps", "xpu"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_on_a_device_that_is_not_here_is_none_for_real(name, device_type):
    """Under inference_mode torch would make it there."""

    class Scales(nn.Linear):
        def forward(self, x):
            return super().forward(x) * CONSTANTS[name](x).sum()

    model, inputs = Scales(64, 64).eval(), torch.rand(2, 64)
    forecast = forecast_inference(model, inputs, device_type=device_type, precision="fp32")
    assert forecast.temporaries >= 2 * 2 * 64 * 4  # with and without the factor


class Attention(nn.Module):
    """One layer of attention, (N, T, 64) to (N, T, 64), with four heads."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.inward(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.outward(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps"])
def test_attention_is_forecast_for_a_device_that_is_not_here(device_type):
    """Under inference_mode the op comes whole; where no kernel fuses it, its scores count."""
    x = torch.randn(4, 256, 64)
    peak = forecast_inference(Attention(), x, device_type=device_type, precision="fp32").peak
    scores = 4 * 4 * 256 * 256 * 4  # bytes
    assert (peak > scores) == (not backend(device_type).fused_attention)

"""The memory forecast, held against what real training steps keep and use on the CPU."""

import gc

import pytest
import torch
import torch.utils.checkpoint
import torchvision.models as tv
from memory_models import (
    OwnAttention,
    Two,
    bytes_kept,
    cpu_autocast,
    images,
    loss_of,
    real_peaks,
    vgg,
)
from torch import nn

from amp_lab import Precision, forecast_inference, forecast_memory, largest_batch
from amp_lab.core.errors import DeviceError, TraceError
from amp_lab.core.optimizers import OPTIMIZERS
from amp_lab.core.torch_versions import function_nodes_need_their_parents
from amp_lab.models.gpt import Gpt, Size
from amp_lab.tracing.memory import compare_memory
from amp_lab.tracing.memory_arguments import parse_bytes

pytestmark = pytest.mark.slow

MIB = 2**20


class Checkpointed(nn.Module):
    """A block that the backward pass computes again."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


def small_gpt(checkpoint=False):
    model = Gpt(Size(64, heads=4, depth=3), 500)
    if checkpoint:
        model.blocks = nn.Sequential(*map(Checkpointed, model.blocks))
    return model


class Autoencoder(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.SiLU(inplace=True),
            nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1),
            nn.InstanceNorm2d(16, affine=True),
            nn.LeakyReLU(0.1),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(16, 3, 1),
            nn.Sigmoid(),
        )


class Silu(torch.autograd.Function):
    """Keeps its input alone, as memory-efficient activations do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        part = x.sigmoid()
        return gradient * part * (1 + x * (1 - part))


class ScaledBy(torch.autograd.Function):
    """Takes a number before its tensor, so that the first result of its backward is None."""

    @staticmethod
    def forward(ctx, factor, x):
        ctx.factor = factor
        return factor * x

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.factor * gradient


class NumberFirst(nn.Linear):
    def forward(self, x):
        return ScaledBy.apply(2.0, super().forward(x))


class CustomFunctions(nn.Module):
    """Two in a row, one after an op that keeps its output, and one at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 128)

    def forward(self, x):
        hidden = Silu.apply(Silu.apply(self.first(x)))
        return Silu.apply(Silu.apply(self.second(hidden)).tanh())


class LoRA(nn.Linear):
    """A frozen layer with adapters of rank 4 beside it."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x)) * 2


def lora():
    """A frozen embedding, norms that are trained, and layers with adapters."""
    embedding = nn.Embedding(100, 64).requires_grad_(False)
    halves = [[LoRA(64, 256), nn.GELU(), LoRA(256, 64), nn.LayerNorm(64)] for _ in range(2)]
    return nn.Sequential(embedding, *halves[0], *halves[1], LoRA(64, 100))


class Scaled(nn.Sequential):
    """A product of bf16 and fp32, whose gradient is cast while the gradient it comes from lives."""

    def __init__(self):
        super().__init__(nn.Linear(64, 512, bias=False), nn.Linear(512, 4))
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x):
        return self[1](self[0](x) * self.scale)


def convnext():
    block = tv.convnext.CNBlockConfig
    return tv.convnext.ConvNeXt([block(32, 64, 2), block(64, None, 2)], num_classes=10)


MODELS = {
    "LoRA": (lora, torch.randint(0, 100, (4, 16))),
    "resnet18": (tv.resnet18, images(64)),
    "mobilenet_v2": (
        lambda: tv.MobileNetV2(inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]]),
        images(64),
    ),
    "vgg": (vgg, images(32)),
    "densenet": (lambda: tv.DenseNet(16, (2, 4, 2), 32), images(64)),
    "squeezenet": (tv.squeezenet1_1, images(64)),
    "shufflenet": (lambda: tv.ShuffleNetV2([2, 1, 1], [24, 48, 96, 192, 64]), images(64)),
    "convnext": (convnext, images(64)),
    "swin": (lambda: tv.SwinTransformer([4, 4], 32, [1, 1], [2, 4], [4, 4]), images(64)),
    "vit": (lambda: tv.VisionTransformer(32, 8, 2, 4, 64, 128), images(32)),
    "autoencoder": (Autoencoder, images(32)),
    "scaled": (Scaled, torch.rand(256, 64)),
    "custom functions": (CustomFunctions, torch.rand(64, 64)),
    "number before the tensor": (lambda: NumberFirst(64, 128), torch.rand(64, 64)),
    "gru": (lambda: nn.GRU(32, 64, 2, batch_first=True), torch.rand(4, 12, 32)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
        torch.rand(4, 20, 64),
    ),
    "gpt": (small_gpt, torch.randint(0, 500, (4, 32))),
    "gpt, checkpointed": (lambda: small_gpt(checkpoint=True), torch.randint(0, 500, (4, 32))),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_forecast_agrees_with_a_real_step_on_the_cpu(name, precision):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build()
    forecast = forecast_memory(
        model, inputs, device_type="cpu", precision=precision, optimizer="sgd", loss_fn=loss_of
    )
    kept = bytes_kept(model, precision, inputs)
    assert forecast.activations + forecast.cast_kept == kept

    forward, backward, gradients = real_peaks(model, precision, inputs)
    there = forecast.weights + forecast.buffers + inputs.nbytes
    assert forecast.phases["forward"] - there == pytest.approx(forward, rel=0.01)
    late = 0  # with torch 2.11, the output of tanh is still there when the function before it runs
    if name == "custom functions" and function_nodes_need_their_parents():
        late = 64 * 128 * 4
    assert forecast.phases["backward"] - there == pytest.approx(backward + late, rel=0.01)
    assert forecast.gradients == gradients
    assert forecast.peak == max(forecast.phases.values())
    assert forecast.peak == sum(forecast.at_peak.values())


NORMS = {
    "layer": lambda affine: nn.LayerNorm(8, elementwise_affine=affine),
    "group": lambda affine: nn.GroupNorm(2, 4, affine=affine),
    "instance": lambda affine: nn.InstanceNorm1d(4, affine=affine),
    "batch": lambda affine: nn.BatchNorm1d(4, affine=affine, track_running_stats=False),
}


@pytest.mark.parametrize("weights", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_norms_in_bf16_have_the_dtype_that_they_have_on_the_cpu(name, weights):
    norm = NORMS[name](weights is not None).to(weights)
    values = torch.rand(4, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    forecast = forecast_memory(norm, values, device_type="cpu", precision="fp32", loss_fn=loss_of)
    assert forecast.activations == bytes_kept(norm, "fp32", values)


class Boxes(nn.Linear):
    """Makes boxes of sizes that it holds and of a tensor without a device, and then moves them."""

    def __init__(self):
        super().__init__(4, 4)
        self.sizes = [torch.ones(4)]

    def forward(self, x):
        boxes = self.sizes[0] * torch.arange(4)
        return super().forward(x) + boxes.to(x.device)


class Elsewhere(Boxes):
    """The same without moving them, which fails on every device but the CPU."""

    def forward(self, x):
        return nn.Linear.forward(self, x) + self.sizes[0]


@pytest.mark.parametrize("forecast", [forecast_memory, forecast_inference])
def test_tensors_made_without_a_device_may_be_meant_for_the_cpu(forecast):
    values = torch.rand(8, 4)
    found = forecast(Boxes(), values, device_type="cuda", precision="fp32")
    assert found.weights == 4 * (4 * 4 + 4)
    with pytest.raises(TraceError, match="same device"):
        forecast(Elsewhere(), values, device_type="cuda", precision="fp32")


def test_a_model_in_bf16_has_gradients_and_state_in_bf16():
    model = nn.Linear(64, 64, bias=False).bfloat16()
    forecast = forecast_memory(model, torch.rand(8, 64).bfloat16(), precision="fp32")
    assert forecast.weights == forecast.gradients == 2 * 64 * 64
    assert forecast.optimizer == 4 * 64 * 64


def test_gradients_and_state_exist_only_where_something_is_trained():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    forecast = forecast_memory(model, torch.rand(8, 64), precision="fp32")
    one = sum(p.nbytes for p in model[1].parameters())
    assert (forecast.weights, forecast.gradients, forecast.optimizer) == (2 * one, one, 2 * one)


def test_a_model_may_end_with_a_function_of_its_own():
    model = CustomFunctions()
    forecast = forecast_memory(model, torch.rand(64, 64), precision="fp32")
    assert forecast.gradients == forecast.weights == sum(p.nbytes for p in model.parameters())


def test_a_frozen_model_needs_its_forward_pass_only():
    model = nn.Linear(64, 64).requires_grad_(False)
    forecast = forecast_memory(model, torch.rand(8, 64), precision="fp32")
    assert (forecast.gradients, forecast.optimizer, forecast.activations) == (0, 0, 0)
    assert forecast.peak == forecast.weights + 2 * 8 * 64 * 4  # input and output


def test_weight_casts_are_told_from_activations_and_what_autograd_keeps_of_them():
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64))
    weights = sum(p.numel() for p in model.parameters())
    forecast = forecast_memory(model, torch.rand(4, 256), precision="fp16")
    assert forecast.cast_cache == 2 * weights  # one low copy of each, also of the biases
    assert forecast.cast_kept == 2 * 128 * 64  # the gradient of its input needs only this weight
    assert forecast.activations == 2 * (4 * 256 + 4 * 128)  # inputs of both layers; ReLU's is one
    assert forecast_memory(model, torch.rand(4, 256), precision="fp32").cast_cache == 0


def test_views_and_in_place_ops_count_once():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(16, 16))

        def forward(self, x):
            y = (x @ self.w).relu_()
            return torch.cat([y.view(-1, 16) @ self.w, y.t().t() @ self.w.t()])

    forecast = forecast_memory(Views(), torch.rand(8, 16), precision="fp32", optimizer="sgd")
    assert forecast.activations == 4 * (8 * 16 + 8 * 16)  # x and y; w is a parameter
    assert forecast.weights == forecast.gradients == 4 * 16 * 16


def test_checkpointing_lowers_activations_and_is_paid_again_in_the_backward_pass():
    tokens = torch.randint(0, 500, (4, 32))
    plain, checkpointed = (
        forecast_memory(small_gpt(checkpoint=c), tokens, precision="fp16") for c in (False, True)
    )
    assert checkpointed.activations < 0.5 * plain.activations
    assert checkpointed.phases["backward"] > checkpointed.phases["forward"]
    assert checkpointed.phases["backward"] < plain.phases["backward"]


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps", "cpu"])
def test_low_precision_keeps_less_on_every_backend(device_type):
    mlp = nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)
    model = nn.Sequential(OwnAttention(64, 192), *mlp)
    inputs = torch.rand(4, 32, 64)
    high, tf32, low, other = (
        forecast_memory(model, inputs, device_type=device_type, precision=precision)
        for precision in ("fp32", Precision.TF32, "fp16", Precision.BF16)
    )
    assert high.phases == tf32.phases
    assert low.phases == other.phases
    assert low.activations < 0.8 * high.activations
    assert low.weights == high.weights


def test_the_model_is_left_as_it_was():
    model, inputs = tv.DenseNet(16, (2, 2), 32), images(64)
    before = {k: (v.data_ptr(), v.device, v.clone()) for k, v in model.state_dict().items()}
    tracking = gc.isenabled(), torch._C._get_mkldnn_enabled(), torch.is_autocast_enabled("cuda")
    forecast_memory(model, inputs, precision="fp16")
    with pytest.raises(TraceError):
        forecast_memory(model, torch.rand(2, 1, 64, 64), precision="fp16")
    for key, value in model.state_dict().items():
        pointer, device, content = before[key]
        assert (value.data_ptr(), value.device) == (pointer, device), key
        assert torch.equal(value, content), key
    assert all(p.grad is None for p in model.parameters())
    after = gc.isenabled(), torch._C._get_mkldnn_enabled(), torch.is_autocast_enabled("cuda")
    assert after == tracking
    assert model(inputs).device.type == "cpu"


def test_a_transformer_of_billions_of_parameters_on_meta_needs_no_memory():
    with torch.device("meta"):
        model = Gpt(Size(4096, heads=32, depth=8), 32000)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters > 1.7e9
    tokens = torch.empty(1, 2048, dtype=torch.int64, device="meta")
    forecast = forecast_memory(model, tokens, precision="bf16", optimizer="adamw")
    assert forecast.weights == forecast.gradients == 4 * parameters
    assert forecast.optimizer == 8 * parameters
    assert forecast.activations > 100 * MIB
    assert all(p.is_meta for p in model.parameters())


def test_inputs_by_keyword_count_as_inputs_do():
    model, x, mask = Two(), torch.rand(4, 8, 64), torch.rand(4, 8, 64)
    tokens = torch.zeros(4, 8, dtype=torch.int64)

    def forecast(*args, **kwargs):
        return forecast_memory(
            model, *args, **kwargs, device_type="cpu", precision="fp32", optimizer="sgd"
        )

    plain, named = forecast(tokens, x), forecast(tokens, features=x)
    assert named.phases == plain.phases
    masked = forecast(tokens, x, mask=mask)
    assert masked.input_shapes == ((4, 8), (4, 8, 64), (4, 8, 64))
    assert masked.activations == plain.activations + mask.nbytes  # its gradient needs the mask
    with pytest.raises(TraceError, match="optimiser"):
        forecast(tokens, x, optimiser="sgd")


def test_a_mask_whose_kind_torch_reads_is_told_with_the_remedy():
    layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerDecoder(layer, 1)
    source, target = torch.rand(2, 5, 16), torch.rand(2, 4, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    with pytest.raises(TraceError, match="tgt_is_causal=True or") as error:
        forecast_memory(model, target, source, tgt_mask=mask.to("meta"), precision="fp16")
    assert "\n" not in str(error.value)
    told = {"tgt_mask": mask, "tgt_is_causal": True, "precision": "fp16"}
    found = forecast_memory(model, target, source, **told)
    assert found.input_shapes == ((2, 4, 16), (2, 5, 16), (4, 4))
    assert found.weights == found.gradients == sum(p.nbytes for p in model.parameters())


class Sparse(nn.Module):
    """Rows of a table, each by itself and summed up."""

    def __init__(self):
        super().__init__()
        self.each = nn.Embedding(1000, 32, sparse=True)
        self.bag = nn.EmbeddingBag(1000, 32, sparse=True, mode="sum")
        self.layer = nn.Linear(64, 2)

    def forward(self, tokens):
        return self.layer(torch.cat([self.each(tokens).mean(1), self.bag(tokens)], 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sparse_gradients_take_what_is_stored_of_them(precision):
    model, tokens = Sparse(), torch.randint(0, 1000, (4, 6))
    with cpu_autocast(precision):
        loss = loss_of(model(tokens))
    loss.backward()
    sparse = [model.each.weight.grad, model.bag.weight.grad]
    assert all(g._indices().data_ptr() == tokens.data_ptr() for g in sparse)  # which are there
    stored = sum(g._values().nbytes for g in sparse)
    options = {"precision": precision, "optimizer": "sgd", "loss_fn": loss_of}
    found = forecast_memory(model, tokens, **options)
    assert found.gradients == stored + sum(p.grad.nbytes for p in model.layer.parameters())
    assert found.peak == sum(found.at_peak.values())
    most = largest_batch(model, (6,), memory_bytes=MIB, input_dtype=torch.long, **options)
    more = (tokens[:1].expand(count, 6) for count in (most, most + 1))
    peaks = [forecast_memory(model, batch, **options).peak for batch in more]
    assert peaks[0] <= MIB < peaks[1]

    alone = nn.Embedding(1000, 32, sparse=True)
    found = forecast_memory(alone, tokens, device_type="cpu", **options)
    loss_of(alone(tokens)).backward()
    assert found.gradients == alone.weight.grad._values().nbytes


class Twice(Sparse):
    def forward(self, tokens):
        return super().forward(tokens) + super().forward(tokens + 1)


@pytest.mark.parametrize(("model", "device"), [(Sparse, "cpu"), (Twice, "cuda")])
def test_sparse_gradients_whose_size_fakes_do_not_have_are_told(model, device):
    options = {"device_type": device, "precision": "fp32", "optimizer": "sgd"}
    with pytest.raises(TraceError, match=r"bag\.weight .*sparse, .*values decide"):
        forecast_memory(model(), torch.randint(0, 999, (4, 6)), **options)


@pytest.mark.parametrize("optimizer", [row for row in OPTIMIZERS.values() if row.in_torch])
def test_an_optimizer_that_refuses_sparse_gradients_is_told_with_their_names(optimizer):
    model, tokens = Sparse(), torch.randint(0, 1000, (4, 6))
    model(tokens).sum().backward()
    weights = [model.each.weight] if optimizer.rest else model.parameters()
    if optimizer.takes_sparse:
        optimizer.make(weights).step()
        return
    with pytest.raises(RuntimeError):
        optimizer.make(weights).step()
    name = optimizer.name
    said = rf"gradients of each\.weight, bag\.weight are sparse, and {name} does not support"
    with pytest.raises(TraceError, match=said):
        forecast_memory(model, tokens, precision="fp16", optimizer=name)


# -------------------------------------------------------------------------------------- bad input


class Branch(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Lossy(nn.Linear):
    def forward(self, x):
        return super().forward(x[x > 0])


class Reentrant(nn.Linear):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(
            super().forward, x.requires_grad_(), use_reentrant=True
        )


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (nn.Linear(4, 4).half(), {"precision": "fp32"}, "^Linear .*: addmm .*one dtype"),
        (nn.Linear(4, 4), {"optimizer": "no-such"}, "^unknown optimizer 'no-such': .*sgd, "),
        (nn.Linear(4, 4), {"precision": "fp17"}, "^precision 'fp17': .*fp32, tf32, "),
        (nn.Linear(5, 4), {}, r"^Linear .*\(2, 4\): .*dim, but got"),
        (Branch(4, 4).to("meta"), {}, "^Branch: .*_local_scalar_dense.* depends"),
        (Lossy(4, 4).to("meta"), {}, "^Lossy: .*aten.nonzero.* depends"),
        (Reentrant(4, 4), {}, "^activation checkpointing .*use_reentrant=True"),
        (
            nn.Linear(4, 4),
            {"loss_fn": lambda y: y.detach().sum()},
            "^the output of .* has no gradient",
        ),
        (nn.Linear(4, 4), {"loss_fn": lambda y: y}, r"^loss_fn .*one number, not \(2,"),
        (torch.relu, {}, "^a builtin_function_or_method .*model: "),
    ],
)
def test_a_mistake_is_told_in_one_line(model, options, says):
    with pytest.raises(TraceError, match=says) as error:
        forecast_memory(model, torch.rand(2, 4), **{"precision": "fp16"} | options)
    assert "\n" not in str(error.value)


def test_an_unknown_device_and_an_impossible_shape_are_refused():
    with pytest.raises(DeviceError, match="device type 'tpu'"):
        forecast_memory(nn.Linear(4, 4), torch.rand(2, 4), precision="fp16", device_type="tpu")
    for shape in ((), (0, 4), (-1, 4), (1.5, 4)):
        with pytest.raises(TraceError, match=r"^input shape .*1 or more"):
            largest_batch(nn.Linear(4, 4), shape, memory_bytes=10**9, precision="fp32")


def test_a_precision_that_fails_does_not_take_the_others_with_it():
    def loss(p):
        return nn.functional.binary_cross_entropy(p.sigmoid(), torch.zeros_like(p))

    found = compare_memory(nn.Linear(8, 8), (4, 8), loss_fn=loss, memory_bytes="1GiB")
    assert [str(one.precision) for one in found.forecasts] == ["fp32"]
    assert set(found.failed) == {"fp16", "bf16"}
    assert "No forecast for fp16: " in str(found)
    assert "unsafe to autocast" in str(found)
    assert found.largest.keys() == {"fp32"}
    with pytest.raises(TraceError, match="unsafe to autocast"):
        compare_memory(nn.Linear(8, 8), (4, 8), loss_fn=loss, precisions=("fp16",))


def test_a_small_memory_without_a_unit_is_asked_about():
    with pytest.raises(TraceError, match=r"'24' .*unit, .*24GiB"):
        parse_bytes("24")
    assert parse_bytes(24) == 24
    assert parse_bytes(str(2**30)) == 2**30

"""Models as people have them: weights in bf16, adapters, experts, configs that refuse a change."""

import collections
import functools

import pytest
import torch
import torch.nn.functional as F
import torchvision
from custom_matmul import CustomMatmul, CustomMatmulModel
from remedy_tests import says
from torch import nn
from torch.utils._pytree import tree_map_only

from amp_lab import forecast_memory, xray
from amp_lab.core.errors import TraceError

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
    with pytest.raises(TraceError, match="Give input 0 in bfloat16"):
        xray(model, torch.ones(4, 8))


def test_a_function_whose_backward_pass_fails_under_autocast_is_told():
    model, x = CustomMatmulModel(), torch.ones(4, 8)
    with torch.autocast("cpu", dtype=BF16):
        out = model(x)
    with pytest.raises(RuntimeError):
        out.sum().backward()
    remedy = "under autocast, decorate the forward of CustomMatmul with @torch.amp.custom_fwd"
    for device in ("cuda", "cpu"):
        found = xray(model, x, device_type=device)
        assert "(backward pass of CustomMatmul)" in found.raised
        assert remedy in found.advice[0]
        with pytest.raises(TraceError, match=remedy):
            forecast_memory(model, x, device_type=device, precision="bf16")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_remedy_for_such_a_function_helps_and_is_told_to_no_other(device):
    class Decorated(CustomMatmul):
        forward = staticmethod(torch.amp.custom_fwd(CustomMatmul.forward, device_type=device))
        backward = staticmethod(torch.amp.custom_bwd(CustomMatmul.backward, device_type=device))

    class StillMixed(Decorated):
        @staticmethod
        @functools.partial(torch.amp.custom_bwd, device_type=device)
        def backward(ctx, gradient):
            with torch.autocast(device, enabled=False):
                return CustomMatmul.backward(ctx, gradient)

    x = torch.ones(4, 8)
    assert xray(CustomMatmulModel(Decorated), x, device_type=device).raised is None
    assert forecast_memory(CustomMatmulModel(Decorated), x, device_type=device, precision="bf16")
    raised = xray(CustomMatmulModel(StillMixed), x, device_type=device).raised
    assert "dtype" in raised
    assert "custom_fwd" not in raised


def test_a_function_with_custom_fwd_is_sound():
    class Sound(torch.autograd.Function):
        forward = staticmethod(
            torch.amp.custom_fwd(CustomMatmul.forward, device_type="cpu", cast_inputs=BF16)
        )
        backward = staticmethod(torch.amp.custom_bwd(CustomMatmul.backward, device_type="cpu"))

    assert xray(CustomMatmulModel(Sound), torch.ones(4, 8), device_type="cpu").raised is None


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
            raise RuntimeError("no grouped products on this GPU")
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


# What is not a plain model


@pytest.mark.weekly
@pytest.mark.parametrize("training", [False, True])
def test_a_detector_is_traced_and_refused_without_boxes(training):
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=2
    ).train(training)
    boxes = {"boxes": torch.tensor([[1.0, 1.0, 20.0, 20.0]]), "labels": torch.tensor([1])}
    inputs = ([torch.rand(3, 64, 64)], [boxes]) if training else ([torch.rand(3, 64, 64)],)
    # torchvision suppresses many boxes in one way on a CPU, and in another on a GPU.
    device = {"device_type": "cpu"} if training else {}
    assert "Other inputs may lead to other decisions" in xray(model, *inputs, **device).decisions
    caveats = forecast_memory(model, *inputs, precision="bf16", **device).caveats
    assert "Other inputs may lead to other decisions" in caveats[-1]
    if training:  # without boxes it does not get so far
        with pytest.raises(TraceError, match=r"X-ray only model\.backbone"):
            xray(model, *inputs[:1])
        with pytest.raises(TraceError, match=r"forecast only model\.backbone"):
            forecast_memory(model, *inputs[:1], precision="fp16")
    assert xray(model.backbone, torch.rand(1, 3, 64, 64)).rows
    assert forecast_memory(model.backbone, torch.rand(1, 3, 64, 64), precision="fp16").peak


class Choosing(nn.Module):
    """A value decides, in a part that has the name of one in which none does."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), Chooses())

    def forward(self, x):
        return self.encoder(x)


class Chooses(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_the_part_in_which_values_decide_is_not_what_one_is_sent_to():
    for trace in (xray, functools.partial(forecast_memory, precision="fp16")):
        with pytest.raises(TraceError) as error:
            trace(Choosing(), torch.empty(2, 8, device="meta"))
        assert says("trace.parts", str(error.value))


@pytest.mark.parametrize("kind", [nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_a_wrapped_model_is_refused_in_a_line(kind):
    wrapped = kind.__new__(kind)  # a real one of the first needs a process group
    nn.Module.__init__(wrapped)
    wrapped.module = mlp()
    for trace in (xray, functools.partial(forecast_memory, precision="fp16")):
        with pytest.raises(TraceError, match=rf"^{kind.__name__} wraps .*\.module"):
            trace(wrapped, torch.ones(4, 8))


class Bytes(torch.Tensor):
    """A weight in int8 with a scale for each row, as torchao keeps it."""

    def __new__(cls, values, scales, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=dtype, device=values.device
        )

    def __init__(self, values, scales, dtype):
        self.values, self.scales = values, scales

    def __tensor_flatten__(self):
        return ["values", "scales"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts, dtype, size, stride):
        return cls(parts["values"], parts["scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scales, args[0].dtype)

        def plain(weight):
            return weight.values.to(weight.dtype) * weight.scales

        args, kwargs = tree_map_only(cls, plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class Quantised(nn.Module):
    """A frozen base in int8, and an adapter that is trained."""

    def __init__(self, dtype=FP32):
        super().__init__()
        self.base, self.adapter = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        weight = Bytes(torch.ones(64, 64, dtype=torch.int8), torch.ones(64, 1, dtype=dtype), dtype)
        self.base.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_quantised_base_is_traced_with_the_bytes_that_it_has(device):
    model, x = Quantised(), torch.ones(4, 64)
    expected = model(x)
    forecast = forecast_memory(model, x, precision="bf16", device_type=device)
    assert forecast.weights == 64 * 64 + 4 * 64 + 4 * 64 * 64  # int8, scales, the adapter
    assert forecast.gradients == 4 * 64 * 64
    found = xray(model, x, device_type=device, dtype=BF16)
    assert dtypes(found) == {BF16}
    base = [row for row in found.rows if row.module == "base"]
    assert torch.int8 in {dtype for row in base for dtype in row.in_dtypes}  # it is unpacked there
    assert sum(row.flops for row in found.rows) == 2 * (2 * 4 * 64 * 64)
    assert isinstance(model.base.weight, Bytes)
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore")  # of torchao's own
def test_a_model_quantised_by_torchao_is_forecast_by_its_bytes():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()).to(BF16)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    x = torch.ones(4, 256, dtype=BF16)
    forecast = forecast_memory(model.requires_grad_(False), x, precision="fp32")
    assert 256 * 256 <= forecast.weights < 1.05 * 256 * 256
    assert sum(row.flops for row in xray(model, x).rows) == 2 * 4 * 256 * 256


class Unknown(Bytes):
    """One whose code runs what fakes cannot."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        raise NotImplementedError("no kernel")


def test_an_error_of_a_quantised_weight_says_what_to_do():
    model = Quantised()
    weight = Unknown(torch.ones(64, 64, dtype=torch.int8), torch.ones(64, 1), FP32)
    model.base.weight = nn.Parameter(weight, requires_grad=False)
    for trace in (xray, functools.partial(forecast_memory, precision="fp16")):
        with pytest.raises(TraceError, match="no kernel; ") as error:
            trace(model, torch.ones(4, 64))
        assert says("trace.quantised", str(error.value))


@pytest.mark.parametrize("attribute", ["quant_state", "SCB"])
def test_weights_that_only_kernels_can_read_are_refused_in_a_line(attribute):
    """As those of bitsandbytes."""
    model = mlp()
    setattr(model[0].weight, attribute, None)
    for trace in (xray, functools.partial(forecast_memory, precision="fp16")):
        with pytest.raises(TraceError, match=r"^0\.weight is quantised") as error:
            trace(model, torch.ones(4, 8))
        assert says("trace.quantised", str(error.value))


def test_a_wrapper_that_cannot_be_copied_is_refused_in_a_line():
    class Broken(Bytes):
        @classmethod
        def __tensor_unflatten__(cls, parts, dtype, size, stride):
            raise NotImplementedError("no copies\nof this")

    model = mlp()
    weight = Broken(torch.ones(16, 8, dtype=torch.int8), torch.ones(16, 1), FP32)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(TraceError, match=r"^0\.weight is a Broken .*\(no copies\)"):
        xray(model, torch.ones(4, 8))

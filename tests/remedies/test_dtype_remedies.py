"""Each remedy of X-ray, the forecast and errors of dtypes, done to a model on a fake device.

Where a remedy is for a model whatever its weights are, it is tried on one with fp32 weights under
autocast, on one that is cast, and on one with both.
"""

import functools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchvision
from own_product import OwnProduct, WithOwnProduct
from remedy_tests import does, says
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_lab import forecast_memory, largest_batch, xray
from amp_lab.cli import main
from amp_lab.cpu import lstm_error
from amp_lab.errors import TraceError
from amp_lab.remedies import REMEDIES
from amp_lab.tracing.records import LOSS

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def complaint(model: nn.Module, *inputs: torch.Tensor, **options) -> str:
    """Why a model fails in an X-ray; empty if it does not."""
    try:
        return xray(model, *inputs, **options).raised or ""
    except TraceError as error:
        return str(error)


def as_kind(kind: str, *layers: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    """A model of these layers behind a linear one, and an input of (8, 8) for it."""
    model = nn.Sequential(nn.Linear(8, 8), *layers)
    if kind == "mixed":
        model[0].half()
    elif kind == "cast":
        model.half()
    x = torch.randn(8, 8)
    return model, x.half() if kind == "cast" else x


KINDS = pytest.mark.parametrize("kind", ["autocast", "cast", "mixed"])


class Masked(nn.Module):
    """Masks what is negative with a number."""

    def __init__(self, lowest: Callable[[torch.Tensor], float]):
        super().__init__()
        self.lowest = lowest

    def forward(self, x):
        return x.masked_fill(x < 0, self.lowest(x)).softmax(-1)


@does("dtype.fill_value")
@KINDS
def test_a_mask_of_what_the_dtype_holds(kind):
    device = {"device_type": "cuda", "dtype": None if kind == "cast" else FP16}
    model, x = as_kind(kind, Masked(lambda x: -1e9))
    assert says("dtype.fill_value", complaint(model, x, **device))
    (code,) = re.findall(r"torch\.finfo\(.*\)\.min", REMEDIES["dtype.fill_value"].text)
    model, x = as_kind(kind, Masked(lambda x: eval(code)))
    assert complaint(model, x, **device) == ""


@does("dtype.bce")
@pytest.mark.parametrize("kind", ["autocast", "mixed"])  # a cast model runs without autocast
def test_binary_cross_entropy_of_logits(kind):
    target = torch.zeros(8, 8)
    model, x = as_kind(kind, nn.Sigmoid())
    options = {"device_type": "cuda", "dtype": FP16}
    bad = complaint(model, x, loss_fn=lambda p: F.binary_cross_entropy(p, target), **options)
    assert says("dtype.bce", bad)
    logits, x = as_kind(kind)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(y, target)

    assert complaint(logits, x, loss_fn=loss, **options) == ""


@does("dtype.custom_function")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_function_of_ones_own_that_follows_autocast(device):
    x = torch.randn(8, 8)
    said = complaint(WithOwnProduct(), x, device_type=device)
    assert says("dtype.custom_function", said)
    forward, backward = (
        eval(code, {"torch": torch}) for code in re.findall(r"@(torch\.amp\.\w+\(.*?\))", said)
    )

    class Whole(OwnProduct):
        pass

    Whole.forward = staticmethod(forward(OwnProduct.forward))
    Whole.backward = staticmethod(backward(OwnProduct.backward))
    assert complaint(WithOwnProduct(Whole), x, device_type=device) == ""


@does("dtype.inputs_of_a_cast_model")
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_inputs_in_the_dtype_of_the_weights(dtype):
    model, x = nn.Linear(8, 8).to(dtype), torch.randn(8, 8)
    said = complaint(model, x)
    assert says("dtype.inputs_of_a_cast_model", said)
    assert str(dtype).removeprefix("torch.") in said
    assert complaint(model, x.to(dtype)) == ""


class Spectral(nn.Module):
    """A convolution, a spectrum times weights and back, and a convolution."""

    def __init__(self, given: str = "x", returned: str = "y"):
        super().__init__()
        self.lift, self.project = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
        self.weights = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.given, self.returned = given, returned

    def forward(self, x):
        x = self.lift(x)
        spectrum = torch.fft.rfft(eval(self.given, {"x": x}))
        mixed = torch.einsum("bct,cd->bdt", spectrum, self.weights)
        y = torch.fft.irfft(mixed, n=x.shape[-1])
        return self.project(eval(self.returned, {"x": x, "y": y}))


@does("dtype.fft")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("length", [20, 16], ids=["no power of two", "power of two"])
@pytest.mark.parametrize("kind", ["autocast", "cast"])
def test_a_transform_in_fp32(kind, length):
    text = REMEDIES["dtype.fft"].text
    (given,), (back,) = re.findall(r"x\.float\(\)", text), re.findall(r"\.to\(x\.dtype\)", text)
    x, mended = torch.randn(4, 1, length), Spectral(given, f"y{back}")
    options = {"device_type": "cuda", "dtype": None if kind == "cast" else FP16}
    model = Spectral()
    if kind == "cast":  # as `.half()` would, without the complex weights
        x = x.half()
        for layers in (model, mended):
            layers.lift.half()
            layers.project.half()
        options["dtype"] = FP32
    assert says("dtype.fft", complaint(model, x, **options))
    assert complaint(mended, x, **options) == ""


class OnlyFlash(nn.Module):
    def __init__(self, allowed: str = "sdpa_kernel([SDPBackend.FLASH_ATTENTION])"):
        super().__init__()
        self.layer, self.allowed = nn.Linear(8, 8), allowed

    def forward(self, x):
        x = self.layer(x)[None, None]
        names = {"sdpa_kernel": sdpa_kernel, "SDPBackend": SDPBackend}
        with eval(self.allowed, names):
            return F.scaled_dot_product_attention(x, x, x)


@does("dtype.no_attention_kernel")
def test_attention_with_the_kernel_that_takes_everything():
    x, options = torch.randn(8, 8), {"device_type": "cuda", "dtype": FP32}
    assert says("dtype.no_attention_kernel", complaint(OnlyFlash(), x, **options))
    (allowed,) = re.findall(r"sdpa_kernel\(.*\)", REMEDIES["dtype.no_attention_kernel"].text)
    assert complaint(OnlyFlash(allowed), x, **options) == ""
    assert complaint(OnlyFlash(), x, device_type="cuda", dtype=FP16) == ""


@does("xray.loss_in_low_precision")
@KINDS
@pytest.mark.parametrize("name", ["cross entropy", "contrastive"])
def test_a_loss_outside_autocast(kind, name):
    """A contrastive loss multiplies: `.float()` alone would not do, since autocast casts back."""
    target = torch.arange(8)

    def loss(output: torch.Tensor) -> torch.Tensor:
        if name == "contrastive":
            output = output @ output.T
        return F.cross_entropy(output, target)

    def outside(output: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return loss(eval("output.float()", {"output": output}))

    model, x = as_kind(kind)
    options = {"device_type": "cuda", "dtype": None if kind == "cast" else FP16}
    found = xray(model, x, loss_fn=loss, **options)
    assert says("xray.loss_in_low_precision", "\n".join(found.advice))
    found = xray(model, x, loss_fn=outside, **options)
    assert not says("xray.loss_in_low_precision", "\n".join(found.advice))
    assert {row.dtype for row in found.rows if row.module == LOSS} == {FP32}


class Reader(nn.Module):
    def __init__(self, region: str | None = None):
        super().__init__()
        self.layer, self.region = nn.LSTM(8, 8), region

    def forward(self, x):
        if self.region is None:
            return self.layer(x)[0]
        with eval(self.region, {"torch": torch}):
            return self.layer(x.float())[0]


@does("cpu.no_primitive")
def test_an_lstm_that_onednn_has_no_kernel_for():
    if lstm_error(FP16, with_gradients=True) is None:
        pytest.skip("a torch with oneDNN: without, an LSTM runs in fp16 too")
    x = torch.randn(3, 8, 8)
    found = xray(Reader(), x, device_type="cpu", dtype=FP16)
    assert says("cpu.no_primitive", "\n".join(found.advice))
    (region,) = re.findall(r"torch\.autocast\(.*\)(?=,)", REMEDIES["cpu.no_primitive"].text)

    def run(model: Reader) -> torch.Tensor:
        with torch.autocast("cpu", FP16):
            output = model(x)
        output.float().sum().backward()
        return output

    with pytest.raises(RuntimeError, match="primitive"):
        run(Reader())
    assert run(Reader(region)).dtype is FP32
    found = xray(Reader(region), x, device_type="cpu", dtype=FP16)
    assert not says("cpu.no_primitive", "\n".join(found.advice))


class Chooses(nn.Module):
    """Takes only the rows that are positive, behind a part in which no value decides."""

    def __init__(self, name: str = "encoder"):
        super().__init__()
        setattr(self, name, nn.Linear(8, 8))
        self.head, self._name = nn.Linear(8, 2), name

    def forward(self, x):
        x = getattr(self, self._name)(x)
        return self.head(x[x.sum(-1).nonzero().flatten()])


forecast = functools.partial(forecast_memory, precision="fp16")


@does("trace.part", "trace.parts", "trace.values")
@pytest.mark.parametrize(("code", "name"), [("trace.part", "encoder"), ("trace.parts", "body")])
def test_a_part_in_which_no_value_decides(code, name):
    model, x = Chooses(name), torch.randn(4, 8)
    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(model, x.to("meta"))
        assert says("trace.values", str(refused.value))
        assert trace(model, x)  # where it has values
        assert says(code, str(refused.value))
    part = eval(f"model.{name}")
    assert xray(part, x).rows
    assert forecast(part, x).peak


class ByDevice(Chooses):
    """Asks for other values on a CPU."""

    def forward(self, x):
        if x.device.type == "cpu" and x.sum() > 1e9:
            return x
        return super().forward(x)


@does("xray.for_real")
def test_a_model_with_another_course_on_the_cpu_runs_for_real(tmp_path, monkeypatch, capsys):
    model, x = ByDevice(), torch.randn(4, 8)
    text = REMEDIES["xray.for_real"].text
    assert says("xray.for_real", complaint(model, x))
    (call,) = re.findall(r"xray\(.*?\)", text)
    found = eval(call.replace("...", "model, x"), {"xray": xray, "model": model, "x": x})
    assert [row.module for row in found.rows if row.flops] == ["encoder", "head"]
    command = text.rpartition("amp-lab ")[2].split()
    (tmp_path / "by_device.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass ByDevice(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(8, 8)\n\n"
        "    def forward(self, x):\n        x = self.a(x)\n"
        "        if x.device.type == 'cpu' and x.sum() > 1e9:\n            return x\n"
        "        return x[x.sum(-1).nonzero()]\n"
    )
    monkeypatch.chdir(tmp_path)
    model = ["by_device.py:ByDevice", "--input", "4,8"]
    assert main([command[0], *model]) == 2
    assert says("xray.for_real", capsys.readouterr().err)
    assert main([command[0], *model, *command[1:]]) == 0


class InTraining(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x[x.sum(-1).nonzero().flatten()] if self.training else x


@does("trace.eval")
def test_a_model_whose_course_depends_on_values_in_training_mode():
    model, x = InTraining(8, 8), torch.empty(4, 8, device="meta")
    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(model.train(), x)
        assert says("trace.eval", str(refused.value))
        assert model.training
        (call,) = re.findall(r"model\.\w+\(\)", REMEDIES["trace.eval"].text)
        eval(call)
        assert trace(model, x)


@does("trace.without_loss")
def test_a_loss_that_alone_asks_for_values():
    def loss(output):
        return output.sum() if (output > 0).any() else -output.sum()

    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(nn.Linear(8, 8).eval(), torch.empty(4, 8, device="meta"), loss_fn=loss)
        assert says("trace.without_loss", str(refused.value))
        assert trace(nn.Linear(8, 8).eval(), torch.empty(4, 8, device="meta"))


@does("memory.each_batch")
def test_batches_of_a_model_that_depends_on_values_one_by_one():
    model = Chooses()
    with pytest.raises(TraceError) as refused:
        largest_batch(model, (1, 8), memory_bytes="1GiB", precision="fp16")
    assert says("memory.each_batch", str(refused.value))
    for batch in (2, 4):
        assert forecast(model, torch.randn(batch, 8)).peak


@does("trace.causal_mask")
@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_a_mask_that_torch_is_told_of(part):
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    x = torch.rand(2, 4, 16)
    if part == "decoder":
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        model, inputs, name = nn.TransformerDecoder(layer, 1), (x, x), "tgt_mask"
        told = "tgt_is_causal"
    else:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model, inputs, name = nn.TransformerEncoder(layer, 1), (x,), "mask"
        told = "is_causal"
    assert told in REMEDIES["trace.causal_mask"].text
    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(model, *inputs, **{name: mask.to("meta")})
        assert says("trace.causal_mask", str(refused.value))
        for value in (True, False):
            assert trace(model, *inputs, **{name: mask, told: value})


@does("trace.detector")
def test_the_backbone_of_a_detector():
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=2
    ).train()  # which fails for want of boxes
    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(model, [torch.rand(3, 64, 64)])
        assert says("trace.detector", str(refused.value))
        assert trace(model.backbone, torch.rand(1, 3, 64, 64))


@does("trace.quantised")
def test_a_model_before_it_is_quantised():
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    for trace in (xray, forecast):
        assert trace(model, x)
    model[0].weight.quant_state = None  # as a library marks what its kernels alone can read
    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(model, x)
        assert says("trace.quantised", str(refused.value))

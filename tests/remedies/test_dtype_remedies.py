"""Each remedy of X-ray, the forecast and errors of dtypes, done to a model on a fake device.

Where a remedy is for a model whatever its weights are, it is tried on one with fp32 weights under
autocast, on one that is cast, and on one with both.
"""

import dataclasses
import functools
import re
import threading
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from custom_matmul import CustomMatmul, CustomMatmulModel
from remedy_tests import does, says
from rnnt_loss import rnnt_loss
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_lab import first_difference, forecast_memory, largest_batch, xray
from amp_lab.cli import main
from amp_lab.core.cpu import lstm_error
from amp_lab.core.errors import NumericsError, TraceError
from amp_lab.core.remedies import REMEDIES
from amp_lab.difference import compare_runs
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
    said = complaint(CustomMatmulModel(), x, device_type=device)
    assert says("dtype.custom_function", said)
    forward, backward = (
        eval(code, {"torch": torch}) for code in re.findall(r"@(torch\.amp\.\w+\(.*?\))", said)
    )

    class Decorated(CustomMatmul):
        pass

    Decorated.forward = staticmethod(forward(CustomMatmul.forward))
    Decorated.backward = staticmethod(backward(CustomMatmul.backward))
    assert complaint(CustomMatmulModel(Decorated), x, device_type=device) == ""


@does("dtype.inputs_of_a_cast_model")
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_inputs_in_the_dtype_of_the_weights(dtype):
    model, x = nn.Linear(8, 8).to(dtype), torch.randn(8, 8)
    said = complaint(model, x)
    assert says("dtype.inputs_of_a_cast_model", said)
    assert f"Give input 0 in {str(dtype).removeprefix('torch.')}" in said
    assert complaint(model, x.to(dtype)) == ""


class Positions(nn.Module):
    """Adds positions in fp32 to an input that it casts, in front of a layer in 16 bits."""

    def __init__(self, held_as: str, used_as: str = "positions"):
        super().__init__()
        self.used_as = used_as
        self.up = nn.Linear(8, 8, dtype=FP16)
        positions = torch.randn(8, 8)
        if held_as == "buffer":
            self.register_buffer("positions", positions)
        else:
            self.positions = positions

    def forward(self, x):
        named = {"positions": self.positions, "torch": torch}
        return self.up(x.half() + eval(self.used_as, named))


@does("dtype.own_tensor_of_a_cast_model")
@pytest.mark.parametrize("held_as", ["buffer", "attribute"])
@pytest.mark.parametrize("real", [False, True])
def test_a_tensor_of_the_model_cast_where_it_is_used(held_as, real):
    """The inputs are not the cause: the model casts them itself."""
    options = {"device_type": "cpu", "real": real}
    for x in (torch.randn(8, 8), torch.randn(8, 8).half()):
        said = complaint(Positions(held_as), x, **options)
        assert says("dtype.own_tensor_of_a_cast_model", said)
        assert f"addmm (test_dtype_remedies.py:{line_of('self.up(x.half()')})" in said
        assert re.search(rf"float32 .*{held_as} positions .*float16 .*parameter up\.", said)
        assert "input 0" not in said
    (cast,) = re.findall(r"positions\.to\(torch\.\w+\)", said)
    assert complaint(Positions(held_as, cast), torch.randn(8, 8), **options) == ""


def line_of(code: str) -> int:
    """The line of this file in which a piece of code stands first."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, start=1) if code in line)


class Widens(nn.Module):
    """Computes in fp32 between two layers in 16 bits."""

    def __init__(self, given: str = "x"):
        super().__init__()
        self.given = given
        self.down, self.up = nn.Linear(8, 8, dtype=FP16), nn.Linear(8, 8, dtype=FP16)

    def forward(self, x):
        x = self.down(x).float().exp() + 1
        return self.up(eval(self.given, {"x": x, "torch": torch}))


@does("dtype.computed_in_a_cast_model")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_a_model_computes_in_fp32_cast_before_the_next_layer(device):
    x = torch.randn(8, 8).half()
    said = complaint(Widens(), x, device_type=device)
    assert says("dtype.computed_in_a_cast_model", said)
    assert re.search(r"float32 from .*output of float ", said)
    (cast,) = re.findall(r"x\.to\(torch\.\w+\)", said)
    assert complaint(Widens(cast), x, device_type=device) == ""


@does("dtype.cast_model_under_autocast")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_is_named_only_where_the_model_runs_under_it(device):
    for model in (Widens(), nn.Linear(8, 8, dtype=FP16), nn.Conv1d(8, 8, 1, dtype=BF16)):
        low = next(model.parameters()).dtype
        x = torch.randn(8, 8)
        said = complaint(model, x, device_type=device)
        assert says("dtype.cast_model_under_autocast", said)
        (asked,) = re.findall(r"dtype=(torch\.\w+)", said)
        assert eval(asked, {"torch": torch}) is low
        assert complaint(model, x, device_type=device, dtype=low) == ""
    said = complaint(Writes(), x, device_type=device)
    assert "takes tensors of one dtype" in said
    assert not says("dtype.cast_model_under_autocast", said)


class Writes(nn.Module):
    """Writes what a layer in 16 bits returns into rows of fp32."""

    def __init__(self, written: str = "values", dtype: torch.dtype = FP16):
        super().__init__()
        self.layer, self.written = nn.Linear(8, 8, dtype=dtype), written

    def forward(self, x):
        target, rows = torch.zeros(8, 8, device=x.device), torch.arange(8, device=x.device)
        values = self.layer(x.to(self.layer.weight.dtype))
        target[rows] = eval(self.written, {"values": values, "target": target})
        return target


class Adds(Writes):
    def forward(self, x):
        target, rows = torch.zeros(8, 8, device=x.device), torch.arange(8, device=x.device)
        values = self.layer(x.to(self.layer.weight.dtype))
        values = eval(self.written, {"values": values, "target": target})
        return target.index_copy(0, rows, target.index_add(0, rows, values))


class Scatters(Writes):
    def forward(self, x):
        target, rows = torch.zeros(8, 8, device=x.device), torch.zeros_like(x).long()
        values = self.layer(x.to(self.layer.weight.dtype))
        values = eval(self.written, {"values": values, "target": target})
        return target.scatter(0, rows, values).masked_scatter(rows == 0, values)


class Puts(Writes):
    def forward(self, x):
        target, rows = torch.zeros(8, 8, device=x.device), torch.arange(8, device=x.device)
        values = self.layer(x.to(self.layer.weight.dtype))
        values = eval(self.written, {"values": values, "target": target})
        return target.put(rows, values[0])


@does("dtype.write")
@pytest.mark.parametrize("kind", [Writes, Adds, Scatters, Puts])
@pytest.mark.parametrize("weights", [FP16, FP32], ids=["16-bit weights", "autocast"])
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_values_written_in_the_dtype_of_their_target(kind, weights, real):
    x, options = torch.randn(8, 8), {"device_type": "cpu", "real": real}
    if weights is FP32:
        options["dtype"] = BF16
    said = complaint(kind(dtype=weights), x, **options)
    assert says("dtype.write", said)
    assert re.search(r" at test_dtype_remedies\.py:\d+ ", said)
    (cast,) = re.findall(r"values\.to\(.*?\)", REMEDIES["dtype.write"].text)
    assert complaint(kind(cast, weights), x, **options) == ""
    with pytest.raises(TraceError) as refused:
        forecast_memory(kind(dtype=weights), x, device_type="cpu", precision="bf16")
    assert says("dtype.write", str(refused.value))
    assert forecast_memory(kind(cast, weights), x, device_type="cpu", precision="bf16").peak


class Quantized(nn.Module):
    """A linear layer with int8 weights, which computes in a dtype of its own."""

    def __init__(self, precision: torch.dtype):
        super().__init__()
        self.precision = precision
        self.register_buffer("weight", torch.ones(8, 8, dtype=torch.int8))

    def forward(self, x):
        return F.linear(x.to(self.precision), self.weight.to(self.precision))


class Cached(nn.Module):
    """A model in 16 bits that writes what such a layer returns into a cache."""

    def __init__(self, dtype: torch.dtype, precision: torch.dtype = FP32):
        super().__init__()
        self.embed, self.keys = nn.Linear(8, 8), Quantized(precision)
        self.register_buffer("cache", torch.zeros(16, 8))
        self.to(dtype)

    def forward(self, x):
        cache = self.cache.clone()
        cache[torch.arange(8, device=x.device)] = self.keys(self.embed(x))
        return cache


@does("dtype.written_by_a_layer")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_layer_with_a_dtype_of_its_own_gets_that_of_the_model(dtype, real):
    x, options = torch.randn(8, 8, dtype=dtype), {"device_type": "cpu", "real": real}
    options["dtype"] = FP32
    said = complaint(Cached(dtype), x, **options)
    assert says("dtype.written_by_a_layer", said)
    assert re.search("the float32 values come from the output of .* in 'keys'", said)
    (given,) = re.findall(r"this dtype: pass (torch\.\w+)", said)
    assert complaint(Cached(dtype, eval(given)), x, **options) == ""
    for weights in (FP16, FP32):  # there the target is in fp32, made by torch.zeros
        other = complaint(Writes(dtype=weights), torch.randn(8, 8), device_type="cpu", real=real)
        assert not says("dtype.written_by_a_layer", other)


class InPlace(nn.Module):
    """A sum in fp32 to which a matmul adds, or that it writes: a line of code does."""

    def __init__(self, code: str, dims: tuple[int, int, int], dtype: torch.dtype):
        super().__init__()
        self.layer, self.code = nn.Linear(8, 8, dtype=dtype), code
        self.dims = dims  # of the sum and of the two operands

    def forward(self, x):
        y = self.layer(x.to(self.layer.weight.dtype))
        operand = y.detach()
        shaped = {1: operand[0], 2: operand, 3: operand[None]}
        target, a, b = (shaped[dim] for dim in self.dims)
        names = {"torch": torch, "target": torch.zeros_like(target, dtype=FP32), "a": a, "b": b}
        exec(self.code, names)
        return names["target"] + 0 * y.sum()


IN_PLACE = {
    "addmm": ("target.addmm_(a, b)", (2, 2, 2)),
    "addmv": ("target.addmv_(a, b)", (1, 2, 1)),
    "addbmm": ("target.addbmm_(a, b)", (2, 3, 3)),
    "baddbmm": ("target.baddbmm_(a, b)", (3, 3, 3)),
    "mm": ("torch.mm(a, b, out=target)", (2, 2, 2)),
    "bmm": ("torch.bmm(a, b, out=target)", (3, 3, 3)),
}


class Calls(nn.Module):
    """A layer, and code that gets its output as ``x``."""

    def __init__(self, code: str, dtype: torch.dtype):
        super().__init__()
        self.layer, self.code = nn.Linear(8, 8, dtype=dtype), code

    def forward(self, x):
        return eval(self.code, {"torch": torch, "x": self.layer(x.to(self.layer.weight.dtype))})


@does("dtype.no_kernel")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("code", ["torch.linalg.det(x)", "torch.linalg.inv(x)", "x.quantile(0.5)"])
def test_what_has_no_kernel_for_16_bits_gets_fp32(code, dtype):
    x = torch.randn(8, 8)
    (cast,) = re.findall(r"\.float\(\)", REMEDIES["dtype.no_kernel"].text)
    good = re.sub(r"\bx\b", f"x{cast}", code)
    options = {"device_type": "cpu", "real": True}
    assert says("dtype.no_kernel", complaint(Calls(code, dtype), x, **options))
    assert complaint(Calls(good, dtype), x, **options) == ""
    model, low = Calls(code, FP32), Calls(code, dtype)
    low.load_state_dict(model.state_dict())
    with pytest.raises(NumericsError) as refused:
        first_difference(model, low, x)
    assert says("dtype.no_kernel", str(refused.value))
    low.code = good
    assert compare_runs(model, low, x).end_a < 1e-3


@does("dtype.in_place")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("weights", [BF16, FP32], ids=["16-bit weights", "autocast"])
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_matmul_in_place_in_the_dtype_of_its_target(name, weights, real):
    x, options = torch.randn(8, 8), {"device_type": "cpu", "real": real}
    if weights is FP32:
        options["dtype"] = BF16
    code, dims = IN_PLACE[name]
    model = InPlace(code, dims, weights)
    said = complaint(model, x, **options)
    assert says("dtype.in_place", said)
    assert not says("dtype.computed_in_a_cast_model", said)  # which might copy the target
    (cast,) = re.findall(r"a(\.to\(.*?\))", REMEDIES["dtype.in_place"].text)
    model.code = code.replace("(a, b", f"(a{cast}, b{cast}")
    assert complaint(model, x, **options) == ""
    assert forecast_memory(model, x, precision="bf16").peak
    model.code = code
    with pytest.raises(TraceError) as refused:
        forecast_memory(model, x, precision="bf16")
    assert says("dtype.in_place", str(refused.value))


@does("dtype.out_of_place")
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_matmul_out_of_place_under_autocast(name, device):
    x, options = torch.randn(8, 8), {"device_type": device, "dtype": BF16}
    code, dims = IN_PLACE[name]
    said = complaint(InPlace(code, dims, FP32), x, **options)
    assert says("dtype.in_place", said)
    assert says("dtype.out_of_place", said) == ((name, device) != ("addmv", "cpu"))  # has no rule
    for assignment in re.findall(r"target = torch\.\w+\(.*?\)$", said):
        found = xray(InPlace(assignment, dims, FP32), x, **options)
        assert not found.raised
        assert found.output_dtypes == [BF16]


@does("xray.cast_model")
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_in_16_bits_under_autocast(dtype, device):
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).to(dtype)
    x = torch.randn(8, 8, dtype=dtype)
    found = xray(model, x, device_type=device)
    assert not any(row.autocast for row in found.rows)
    assert says("xray.cast_model", str(found))
    assert says("xray.cast_model", found.to_markdown())
    (asked,) = re.findall(r"dtype=(torch\.\w+)", found.autocast_off)
    found = xray(model, x, device_type=device, dtype=eval(asked, {"torch": torch}))
    assert all(row.autocast for row in found.rows)
    assert not says("xray.cast_model", str(found))
    assert found.dtype is dtype


def step_of_adamw(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> None:
    """A step at a usual learning rate, under autocast to `dtype`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()


@does("xray.trained_cast_model")
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_model_in_16_bits_that_is_trained(dtype):
    layers = nn.LayerNorm(8), nn.Linear(8, 8)
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(8, 8, dtype=dtype)
    assert says("xray.trained_cast_model", str(xray(model, x)))
    assert not says("xray.trained_cast_model", str(xray(model.eval(), x)))
    model.train().requires_grad_(False)
    assert not says("xray.trained_cast_model", str(xray(model, x)))
    model.requires_grad_(True)
    step_of_adamw(model, x, dtype)
    assert model[0].weight.eq(1).all()
    assert "model.float()" in REMEDIES["xray.trained_cast_model"].text
    step_of_adamw(model.float(), x.float(), dtype)
    assert model[0].weight.ne(1).all()


def test_nothing_is_said_of_autocast_where_it_is_on_or_was_turned_off():
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    assert xray(model, x).autocast_off == ""
    assert xray(model, x, dtype=FP32).autocast_off == ""
    assert xray(model.half(), x.half(), dtype=FP32).autocast_off == ""
    assert xray(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).half()), x).autocast_off == ""


def test_an_error_that_is_not_of_dtypes_gets_no_advice_on_them():
    for model in (nn.Linear(4, 8).half(), nn.LayerNorm(4).half()):
        for x in (torch.randn(8, 8), torch.randn(8, 8).half()):
            said = complaint(model, x)
            assert said
            if x.dtype is FP16:
                assert "float32 from" not in said


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


class Recogniser(nn.Module):
    """Features of speech, with a window and filters as buffers, and a layer that reads them."""

    def __init__(self, given: str = "x", returned: str = "y"):
        super().__init__()
        self.features = Features(given, returned)
        self.encoder = nn.Conv1d(4, 4, 3)

    def forward(self, x):  # (B, samples)
        return self.encoder(self.features(x))


class Features(nn.Module):
    """The power of a short-time Fourier transform through filters, (B, 4, frames)."""

    def __init__(self, given: str, returned: str):
        super().__init__()
        self.given, self.returned = given, returned
        self.register_buffer("window", torch.hann_window(16))
        self.register_buffer("filters", torch.rand(4, 9))

    def forward(self, x):
        signal = eval(self.given, {"x": x})
        spectrum = torch.stft(signal, 16, window=self.window, return_complex=True)
        y = self.filters @ torch.view_as_real(spectrum).pow(2).sum(-1)
        return eval(self.returned, {"x": x, "y": y})


@does("dtype.fft")
@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_the_features_of_a_model_that_was_cast_in_fp32(dtype, real):
    text = REMEDIES["dtype.fft"].text
    (given,), (back,) = re.findall(r"x\.float\(\)", text), re.findall(r"\.to\(x\.dtype\)", text)
    assert "call .float() on this module" in text
    x = torch.randn(2, 64, dtype=dtype)
    options = {"device_type": "cpu", "real": real}
    assert says("dtype.fft", complaint(Recogniser().to(dtype), x, **options))
    mended = Recogniser(given, f"y{back}").to(dtype)
    assert complaint(mended, x, **options) != ""  # the filters are in 16 bits
    mended.features.float()
    assert complaint(mended, x, **options) == ""


@does("dtype.copied_values")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_losses_that_are_stacked_and_not_copied(device_type):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def of(make):
        return lambda output: make([output.sum(), output.square().sum()]).sum()

    options = {"device_type": device_type, "dtype": BF16}
    assert says("dtype.copied_values", complaint(model, x, loss_fn=of(torch.tensor), **options))
    assert not of(torch.tensor)(model(x)).requires_grad
    assert "torch.stack" in REMEDIES["dtype.copied_values"].text
    assert complaint(model, x, loss_fn=of(torch.stack), **options) == ""
    of(torch.stack)(model(x)).backward()
    assert model.weight.grad is not None


@does("dtype.fused_fake_quantization")
@pytest.mark.filterwarnings("ignore")  # the old quantization of torch says that it is old
def test_fake_quantization_that_is_not_fused():
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    x = torch.randn(2, 4)

    def prepared(settings: str) -> nn.Module:
        names = {"get_default_qat_qconfig_mapping": get_default_qat_qconfig_mapping}
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
        return prepare_qat_fx(layers, eval(settings, names | {"BACKEND": "fbgemm"}), (x,))

    code = "dtype.fused_fake_quantization"
    fused = prepared("get_default_qat_qconfig_mapping(BACKEND)")
    assert says(code, complaint(fused, x, device_type="cpu", dtype=BF16))
    (settings,) = re.findall(r"get_default\S+ version=0\)", REMEDIES[code].text)
    with torch.autocast("cpu", BF16):
        prepared(settings)(x).float().sum().backward()


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
    (allowed,) = re.findall(r"sdpa_kernel\(.*?\)", REMEDIES["dtype.no_attention_kernel"].text)
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


class Transducer(nn.Linear):
    def forward(self, x):
        logits = super().forward(x)
        return rnnt_loss(logits.float() if self.bias is None else logits)


@does("dtype.rnnt_loss")
def test_an_rnnt_loss_of_logits_in_bf16():
    x = torch.randn(2, 5, 4, 16)
    assert "logits.float()" in REMEDIES["dtype.rnnt_loss"].text
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="float32 or float16"):
        Transducer(16, 16)(x)
    for device in ("cuda", "cpu"):
        found = xray(Transducer(16, 16), x, device_type=device, dtype=BF16)
        assert says("dtype.rnnt_loss", found.raised)
        widened = Transducer(16, 16, bias=False)
        assert xray(widened, x, device_type=device, dtype=BF16).raised is None
        assert forecast_memory(widened, x, device_type=device, precision="bf16").peak
    with torch.autocast("cpu", BF16):
        assert widened(x).isfinite()


class OfGraph(nn.Linear):
    """Takes an object that has its tensor in an attribute."""

    def forward(self, graph):
        return super().forward(graph.x)


@dataclasses.dataclass
class Graph:
    x: torch.Tensor


@does("trace.give_tensors")
def test_an_input_that_cannot_be_copied_as_a_dataclass():
    model, x = OfGraph(8, 8), torch.randn(4, 8)
    assert "a dataclass" in REMEDIES["trace.give_tensors"].text
    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(model, types.SimpleNamespace(x=x, lock=threading.Lock()))
        assert says("trace.give_tensors", str(refused.value))
        assert trace(model, Graph(x))


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


class ReadsMemory(nn.Module):
    """Reads a mean by NumPy, in evaluation mode too or in training mode alone."""

    def __init__(self, reads: str, always: bool = True):
        super().__init__()
        self.layer, self.reads, self.always = nn.Linear(8, 8), reads, always

    def forward(self, x):
        x = self.layer(x)
        if not self.always and not self.training:
            return x
        return x * float(eval(self.reads, {"x": x, "np": np}))


READS = ["x.detach().cpu().numpy().mean()", "np.asarray(x.detach().cpu()).mean()"]


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_that_reads_the_memory_of_a_tensor_runs_for_real(reads, device):
    model, x = ReadsMemory(reads), torch.randn(8, 8)
    said = complaint(model, x, device_type=device)
    assert "reads the memory of a tensor" in said
    assert says("xray.for_real", said)
    assert xray(model, x, device_type="cpu", real=True).rows
    with pytest.raises(TraceError, match="reads the memory of a tensor") as refused:
        forecast(model, x)
    assert says("trace.parts", str(refused.value))
    assert forecast(model.layer, x).peak


class Packed(nn.Module):
    """A recurrent network on sequences of different lengths."""

    def __init__(self):
        super().__init__()
        self.encoder, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        lengths = torch.tensor([3, 2])
        packed = nn.utils.rnn.pack_padded_sequence(self.encoder(x), lengths, batch_first=True)
        return self.lstm(packed)[1][0]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_that_packs_sequences_runs_for_real(device):
    model, x = Packed(), torch.randn(2, 3, 8)
    assert says("xray.for_real", complaint(model, x, device_type=device))
    assert xray(model, x, device_type="cpu", real=True).rows
    with pytest.raises(TraceError, match="reads the memory of a tensor") as refused:
        forecast(model, x)
    assert says("trace.part", str(refused.value))
    assert forecast(model.encoder, x).peak


def test_a_remedy_that_does_not_help_a_model_that_reads_memory_is_not_named():
    x = torch.randn(8, 8)
    said = complaint(ReadsMemory("x.numpy().mean()"), x, device_type="cpu")  # it has a gradient
    assert says("trace.parts", said)
    assert not says("xray.for_real", said)
    in_training = ReadsMemory(READS[0], always=False)
    for trace in (xray, forecast):
        with pytest.raises(TraceError) as refused:
            trace(in_training, x)
        assert says("trace.eval", str(refused.value))
        assert trace(in_training.eval(), x)
        in_training.train()


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

"""Mixed dtypes raise on fake tensors wherever they raise for real."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from memory_models import bytes_kept, loss_of
from rnnt_loss import rnnt_loss
from torch import nn

from amp_lab import forecast_memory, xray
from amp_lab.core.errors import TraceError, first_line
from amp_lab.tracing.dtype_checks import StrictFakeMode
from amp_lab.tracing.fake_device import absent_device

FP32, BF16 = torch.float32, torch.bfloat16


def ones(*shape, dtype=FP32, like):
    return torch.ones(*shape, dtype=dtype, device=like.device)


INDEX = torch.tensor([0, 1])
# Each takes a (4, 4) matrix in fp32 and one in bf16 of the device that is asked about.
MIXED = {
    "mm": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b),
    "linear of integers": lambda a, b: F.linear(a.long(), a),
    "bias of linear": lambda a, b: F.linear(a, a, b[0]),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "baddbmm": lambda a, b: torch.baddbmm(b[None], a[None], a[None]),
    "addbmm": lambda a, b: torch.addbmm(a, a[None], b[None]),
    "mv": lambda a, b: a @ b[0],
    "dot": lambda a, b: a[0] @ b[0],
    "convolution": lambda a, b: F.conv2d(a[None, None], b[None, None]),
    "convolution of integers": lambda a, b: F.conv2d(a[None, None].long(), a[None, None]),
    "transposed convolution": lambda a, b: F.conv_transpose2d(a[None, None], b[None, None]),
    "index_put": lambda a, b: a.index_put((INDEX.to(a.device),), b[:2]),
    "index_add": lambda a, b: a.index_add(0, INDEX.to(a.device), b[:2]),
    "index_copy": lambda a, b: a.index_copy(0, INDEX.to(a.device), b[:2]),
    "scatter": lambda a, b: a.scatter(0, a.long(), b),
    "index_reduce": lambda a, b: a.index_reduce(0, INDEX.to(a.device), b[:2], "mean"),
    "index_reduce in place": lambda a, b: a.index_reduce_(0, INDEX.to(a.device), b[:2], "mean"),
    "put": lambda a, b: a.put(INDEX.to(a.device), b[0, :2]),
    "put in place": lambda a, b: a.put_(INDEX.to(a.device), b[0, :2]),
    "addmm in place": lambda a, b: a.addmm_(b, b),
    "addmm in place into bf16": lambda a, b: b.addmm_(a, a),
    "addmm in place, its operands": lambda a, b: a.addmm_(a.clone(), b),
    "addmv in place": lambda a, b: a[0].addmv_(b, b[0]),
    "addbmm in place": lambda a, b: a.addbmm_(b[None], b[None]),
    "addbmm in place, its operands": lambda a, b: a.addbmm_(b[None], a.clone()[None]),
    "baddbmm in place": lambda a, b: a[None].baddbmm_(b[None], b[None]),
    "mm into out": lambda a, b: torch.mm(a, b, out=torch.empty_like(a)),
    "mm of bf16 into fp32": lambda a, b: torch.mm(b, b, out=torch.empty_like(a)),
    "mv into out": lambda a, b: torch.mv(a, b[0], out=torch.empty_like(a[0])),
    "bmm into out": lambda a, b: torch.bmm(a[None], b[None], out=torch.empty_like(a[None])),
    "matmul into out": lambda a, b: torch.matmul(a, b, out=torch.empty_like(a)),
    "addmm into out": lambda a, b: torch.addmm(a, b, b, out=torch.empty_like(a)),
    "addbmm into out": lambda a, b: torch.addbmm(b, b[None], b[None], out=torch.empty_like(a)),
    "linear into out": lambda a, b: F.linear(a, b, out=torch.empty_like(a)),
    "linear of bf16 into fp32": lambda a, b: F.linear(b, b, out=torch.empty_like(a)),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(a / 2, b),
    "weights of nll_loss": lambda a, b: F.nll_loss(a, a[0].long(), b[0]),
    "attention": lambda a, b: F.scaled_dot_product_attention(
        a[None, None], b[None, None], a[None, None]
    ),
    "grid_sample": lambda a, b: F.grid_sample(
        a[None, None], b.view(1, 2, 4, 2), align_corners=False
    ),
    "cdist": lambda a, b: torch.cdist(a, b),
    "grouped_mm": lambda a, b: F.grouped_mm(
        ones(16, 16, like=a),
        ones(2, 16, 16, dtype=BF16, like=a),
        offs=torch.tensor([8, 16], dtype=torch.int32, device=a.device),
    ),
}
ALIKE_OR_PROMOTED = {
    "mm": lambda a, b: b @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "addmm in place": lambda a, b: b.addmm_(b.clone(), b.clone()),
    "addr in place": lambda a, b: a.addr_(b[0], b[0]),
    "addcmul in place": lambda a, b: b.addcmul_(a, a),
    "outer into out": lambda a, b: torch.outer(b[0], b[0], out=torch.empty_like(a)),
    "linear into out": lambda a, b: F.linear(b, b, out=torch.empty_like(b)),
    "bce with logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b),
    "group_norm of bf16 with fp32 weights": lambda a, b: F.group_norm(b, 2, a[0], a[0]),
    "mask of attention": lambda a, b: F.scaled_dot_product_attention(
        b[None, None], b[None, None], b[None, None], attn_mask=a
    ),
}


def run_on_fakes(call, device_type):
    with StrictFakeMode(), absent_device(device_type):
        return call(
            torch.empty(4, 4, device=device_type), torch.empty(4, 4, device=device_type, dtype=BF16)
        )


@pytest.mark.parametrize("name", MIXED)
def test_what_real_kernels_refuse_is_refused_on_fakes(name):
    call = MIXED[name]
    with pytest.raises(RuntimeError):
        call(torch.ones(4, 4), torch.ones(4, 4, dtype=BF16))
    for device_type in ("cpu", "cuda"):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type|bias type"):
            run_on_fakes(call, device_type)


@pytest.mark.parametrize("name", ALIKE_OR_PROMOTED)
def test_what_real_kernels_take_is_taken_on_fakes(name):
    call = ALIKE_OR_PROMOTED[name]
    real = call(torch.ones(4, 4), torch.ones(4, 4, dtype=BF16))
    for device_type in ("cpu", "cuda"):
        assert run_on_fakes(call, device_type).dtype is real.dtype


def test_a_cpu_takes_no_wide_data_with_low_weights():
    def norm(a, b):
        return F.batch_norm(a, b[0], b[0], b[0], b[0], training=True)

    with pytest.raises(RuntimeError):
        norm(torch.ones(4, 4), torch.ones(4, 4, dtype=BF16))
    with pytest.raises(RuntimeError, match=r"native_batch_norm .*one dtype"):
        run_on_fakes(norm, "cpu")


ACTIVATIONS = "ReLU GELU SiLU Sigmoid Tanh ReLU6 Hardswish Hardsigmoid LeakyReLU ELU Mish GLU"
LAYERS = [
    *(getattr(nn, name)() for name in ACTIVATIONS.split()),
    nn.Softmax(-1), nn.LogSoftmax(-1), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(8),
    nn.Linear(8, 4), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(1),
    nn.AdaptiveAvgPool2d(1), nn.ReflectionPad2d(1), nn.Upsample(scale_factor=2),
    nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(2),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_what_is_no_float_is_taken_by_a_fake_as_by_a_kernel(layer, dtype):
    x = torch.ones(2, 4, 8, 8).to(dtype)

    def refused(run) -> bool:
        try:
            return bool(getattr(run(), "raised", ""))
        except (RuntimeError, NotImplementedError):  # a TraceError is one
            return True

    def real() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)

    traced = refused(lambda: xray(layer, x, device_type="cpu", dtype=torch.bfloat16))
    assert traced is refused(real)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("mode", "dims"),
    [
        *(("nearest", dims) for dims in (3, 4, 5)),
        *(("nearest-exact", dims) for dims in (3, 4, 5)),
        ("linear", 3), ("bilinear", 4), ("bicubic", 4), ("trilinear", 5),
        ("bilinear antialias", 4), ("bicubic antialias", 4),
    ],
)  # fmt: skip
def test_upsampling_takes_uint8_where_a_kernel_does(mode, dims, dtype):
    method, *antialias = mode.split()

    def upsample(x):
        return F.interpolate(x, scale_factor=2, mode=method, antialias=bool(antialias))

    x = torch.ones(1, 2, *[4] * (dims - 2)).to(dtype)
    try:
        upsample(x)
        refused = False
    except RuntimeError:  # a NotImplementedError is one
        refused = True
    with pytest.raises(RuntimeError) if refused else nullcontext(), StrictFakeMode():
        upsample(torch.ones(x.shape, dtype=dtype))


# Each writes a number into a tensor, or a new one like it.
NUMBERS = {
    "masked_fill": lambda y, n: y.masked_fill(y > 0, n),
    "masked_fill_": lambda y, n: y.masked_fill_(y > 0, n),
    "fill_": lambda y, n: y.fill_(n),
    "full": lambda y, n: torch.full((2,), n, dtype=y.dtype, device=y.device),
    "full_like": lambda y, n: torch.full_like(y, n),
    "full_like of another dtype": lambda y, n: torch.full_like(y, n, dtype=torch.float64),
    "new_full": lambda y, n: y.new_full((2,), n),
    "scalar_tensor": lambda y, n: torch.scalar_tensor(n, dtype=y.dtype, device=y.device),
    "one number": lambda y, n: y.new_full((), n),
    "one item": lambda y, n: y[0].__setitem__(0, n),
    "index_fill": lambda y, n: y.index_fill(0, INDEX.to(y.device), n),
    "scatter": lambda y, n: y.scatter(0, y.long(), n),
    "item": lambda y, n: y.__setitem__((slice(None), 0), n),
    "items of a mask": lambda y, n: y.__setitem__(y > 0, n),
    "pad": lambda y, n: F.pad(y, (1, 1), value=n),
    "crop": lambda y, n: F.pad(y, (-1, 0), value=n),
    "clamp": lambda y, n: y.clamp(min=n),
    "clamp to two": lambda y, n: y.clamp(0, n),
    "clamp max": lambda y, n: y.clamp_max_(n),
    "clamp by hardtanh": lambda y, n: F.hardtanh(y, 0.0, abs(n)),
    "where": lambda y, n: torch.where(y > 0, n, y),
    "product": lambda y, n: y * n,
    "sum": lambda y, n: y + n,
    "comparison": lambda y, n: y > n,
    "maximum": lambda y, n: torch.maximum(y, y.new_ones(()) * n),
    "nan_to_num": lambda y, n: y.nan_to_num(n, n, n),
}


def said_of(call, number, dtype, device_type="cpu") -> str:
    try:
        call(torch.ones(4, 4, dtype=dtype, device=device_type), number)
    except RuntimeError as error:
        return first_line(error)
    return ""


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_a_dtype_cannot_hold_is_refused_as_by_a_kernel(name, dtype):
    for number in (65504.0, -65505.0, -1e9, 70_000, 1e39, math.inf, -math.inf, math.nan):
        real = said_of(NUMBERS[name], number, dtype)
        with StrictFakeMode():
            assert said_of(NUMBERS[name], number, dtype) == real, number
        with StrictFakeMode(), absent_device("cuda"):
            # A GPU clamps in fp32 (TensorCompare.cu), and a CPU fills in one number unseen.
            expected = {"clamp": "", "one": said_of(NUMBERS["fill_"], number, dtype)}
            wanted = expected.get(name.split()[0], real)
            assert said_of(NUMBERS[name], number, dtype, "cuda") == wanted, number


def test_a_number_that_an_integer_cannot_hold_may_clamp_it():
    x = torch.ones(4, dtype=torch.uint8)
    assert x.clamp(max=300).equal(x)
    with StrictFakeMode():
        assert torch.ones(4, dtype=torch.uint8).clamp(max=300).dtype is torch.uint8


class Transducer(nn.Linear):
    """Logits (B, T, U, V), and the loss of torchaudio."""

    def forward(self, x):
        return rnnt_loss(super().forward(x))


def test_the_loss_of_a_transducer_is_traced_as_it_runs():
    model, x = Transducer(16, 16), torch.randn(2, 5, 4, 16)
    fake, real = (
        xray(model, x, device_type="cpu", dtype=FP32, real=real) for real in (False, True)
    )
    assert fake.rows == real.rows
    assert fake.outputs == real.outputs
    found = forecast_memory(model, x, precision="fp32", device_type="cpu", loss_fn=loss_of)
    assert found.activations == bytes_kept(model, "fp32", x)
    for device_type in ("cuda", "cpu"):
        rows = xray(model, x, device_type=device_type, dtype=torch.float16).rows
        dtypes = {row.dtype for row in rows if row.op == "rnnt_loss_forward"}
        assert dtypes == {torch.float16}


def test_it_has_no_kernels_for_other_devices():
    with pytest.raises(TraceError, match=r"rnnt_loss .*CPU and CUDA"):
        xray(Transducer(16, 16), torch.randn(2, 5, 4, 16), device_type="mps")

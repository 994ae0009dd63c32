"""Mixed dtypes raise on fake tensors wherever they raise for real."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_lab import xray
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
    with pytest.raises(RuntimeError, match="native_batch_norm takes tensors of one dtype"):
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

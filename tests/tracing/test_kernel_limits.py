"""What kernels refuse: each row raises on fake tensors of its device, and there alone."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_lab import forecast_memory, xray
from amp_lab.advisor import forecast, trace_and_forecast
from amp_lab.core.gpus import unknown_gpu
from amp_lab.core.precision import Precision
from amp_lab.model_call import ModelCall
from amp_lab.tracing.attention import KERNELS
from amp_lab.tracing.dtype_checks import StrictFakeMode
from amp_lab.tracing.fake_device import absent_device, attribute_set
from amp_lab.tracing.kernel_limits import LIMITS

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
C32 = torch.complex32


def error_on_fakes(run, device_type="cuda") -> str:
    """What a call raises on fake tensors of a device; empty if it runs."""
    with StrictFakeMode(), absent_device(device_type), torch.device(device_type):
        try:
            run()
        except RuntimeError as error:
            return str(error)
    return ""


def test_every_row_has_a_source():
    assert all(row.source for row in (*LIMITS, *KERNELS))
    names = [name for row in LIMITS for name in row.ops.split()]
    assert all(hasattr(torch.ops.aten, name) for name in names)


TRANSFORMS = {
    "fft": lambda n, dtype: torch.fft.fft(torch.empty(3, n, dtype=dtype)),
    "rfft": lambda n, dtype: torch.fft.rfft(torch.empty(3, n, dtype=dtype)),
    "rfft along a padded dimension": lambda n, dtype: torch.fft.rfft(
        torch.empty(3, 7, dtype=dtype), n=n
    ),
    "rfft2": lambda n, dtype: torch.fft.rfft2(torch.empty(3, 8, n, dtype=dtype)),
    "stft": lambda n, dtype: torch.stft(
        torch.empty(99, dtype=dtype), n, window=torch.ones(n, dtype=dtype), return_complex=True
    ),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_cufft_takes_only_powers_of_two_in_16_bits(name, dtype):
    run = TRANSFORMS[name]
    precision = "half" if dtype is FP16 else "bfloat16"
    said = error_on_fakes(lambda: run(20, dtype))
    assert re.search(r"cuFFT .*powers of two", said)
    assert f"computing in {precision} precision" in said
    assert error_on_fakes(lambda: run(16, dtype)) == ""
    assert error_on_fakes(lambda: run(20, FP32)) == ""


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_cpu_has_no_transforms_of_16_bits(name, dtype):
    run = TRANSFORMS[name]
    assert error_on_fakes(lambda: run(16, dtype), "cpu")
    assert error_on_fakes(lambda: run(16, FP32), "cpu") == ""
    with pytest.raises(RuntimeError, match=r"Half|BFloat16"):  # the words differ without MKL
        run(16, dtype)
    run(16, FP32)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_cufft_counts_the_whole_signal_of_an_inverse_real_transform():
    def inverse(n: int):
        return lambda: torch.fft.irfft(torch.empty(3, 9, dtype=C32), n=n)

    assert error_on_fakes(inverse(16)) == ""
    assert "signal size of [20]" in error_on_fakes(inverse(20))


def on_capability(major: int, minor: int, run) -> str:
    """What a call raises on a GPU of this compute capability."""

    def run_there():
        with attribute_set(torch.cuda, "get_device_capability", lambda: (major, minor)):
            run()

    return error_on_fakes(run_there)


def test_cufft_takes_bf16_from_compute_capability_8_on():
    def run():
        torch.fft.rfft(torch.empty(3, 16, dtype=BF16))

    assert "compute capability less than SM_80" in on_capability(7, 5, run)
    assert on_capability(8, 0, run) == ""


MATMULS = {
    "mm": lambda a: a @ a,
    "mv": lambda a: a @ a[0],
    "bmm": lambda a: a[None] @ a[None],
    "einsum": lambda a: torch.einsum("bij,bjk->bik", a[None], a[None]),
    "addmm": lambda a: F.linear(a, a, a[0]),
    "baddbmm": lambda a: torch.baddbmm(a[None], a[None], a[None]),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", MATMULS)
def test_cublas_has_no_matmul_of_complex_half(name):
    run = MATMULS[name]
    assert "complex32" in error_on_fakes(lambda: run(torch.empty(4, 4, dtype=C32)))
    assert error_on_fakes(lambda: run(torch.empty(4, 4, dtype=torch.complex64))) == ""
    assert error_on_fakes(lambda: torch.empty(4, dtype=C32) * 2) == ""


def scaled_mm(size: int) -> torch.Tensor:
    x, one = torch.empty(size, size, dtype=torch.float8_e4m3fn), torch.ones(())
    return torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=BF16)


def test_fp8_needs_multiples_of_16_and_compute_capability_8_9():
    assert error_on_fakes(lambda: scaled_mm(32)) == ""
    assert "divisible by 16" in error_on_fakes(lambda: scaled_mm(20))
    assert "compute capability >= 9.0 or 8.9" in on_capability(8, 0, lambda: scaled_mm(32))
    assert on_capability(8, 9, lambda: scaled_mm(32)) == ""


def attention(dtype: torch.dtype, head: int = 64, **options):
    """A call of attention, as (kernels that the program allows) → error."""

    def run(*allowed: SDPBackend) -> str:
        def call():
            x = torch.empty(2, 4, 16, head, dtype=dtype)
            with sdpa_kernel(list(allowed)):
                F.scaled_dot_product_attention(x, x, x, **options)

        return error_on_fakes(call)

    return run


FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


def test_a_kernel_of_attention_that_does_not_take_the_call_is_no_kernel():
    none = "No available kernel"
    assert attention(FP16)(FLASH) == attention(BF16)(FLASH) == attention(FP16)(CUDNN) == ""
    assert attention(FP32)(EFFICIENT) == attention(FP32)(FLASH, MATH) == ""
    assert none in attention(FP32)(FLASH)
    assert none in attention(FP32)(CUDNN)
    assert none in attention(FP16, head=260)(FLASH)
    assert none in attention(FP16, head=12)(EFFICIENT)
    assert none in attention(torch.float64)(FLASH, EFFICIENT, CUDNN)
    assert attention(torch.float64)(MATH) == ""


def test_flash_attention_takes_no_mask_and_causal_squares_alone():
    def call(with_mask: bool, keys: int) -> str:
        def run():
            query, key = (torch.empty(2, 4, n, 64, dtype=FP16) for n in (16, keys))
            mask = torch.empty(16, keys, dtype=FP16) if with_mask else None
            with sdpa_kernel(FLASH):
                F.scaled_dot_product_attention(query, key, key, mask, is_causal=not with_mask)

        return error_on_fakes(run)

    assert call(with_mask=False, keys=16) == ""
    assert "No available kernel" in call(with_mask=True, keys=16)
    assert "No available kernel" in call(with_mask=False, keys=24)


def test_attention_in_bf16_before_ampere_has_the_plain_ops_alone():
    def call(dtype: torch.dtype, *allowed: SDPBackend) -> str:
        def run():
            x = torch.empty(2, 4, 16, 64, dtype=dtype)
            with sdpa_kernel(list(allowed)):
                F.scaled_dot_product_attention(x, x, x)

        return on_capability(7, 5, run)

    assert "No available kernel" in call(BF16, FLASH, EFFICIENT, CUDNN)
    assert "No available kernel" in call(FP16, FLASH, CUDNN)
    assert call(FP16, EFFICIENT) == call(BF16, MATH) == ""


MADE = {
    "tensor": lambda device: torch.tensor(-1e9, device=device),
    "full": lambda device: torch.full((), -1e9, device=device),
    "scalar_tensor": lambda device: torch.scalar_tensor(-1e9, device=device),
    "moved": lambda device: torch.tensor(-1e9, device="cpu").to(device),
    "detached": lambda device: torch.tensor(-1e9, device=device).detach(),
}
FILLED = {
    "masked_fill": lambda y, n: y.masked_fill(y > 0, n),
    "masked_fill_": lambda y, n: y.masked_fill_(y > 0, n),
    "index_fill": lambda y, n: y.index_fill(0, torch.zeros(1, dtype=torch.long), n),
    "clamp": lambda y, n: y.clamp(min=n),
    "maximum": lambda y, n: torch.maximum(y, n),
    "where": lambda y, n: torch.where(y > 0, n, y),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name", FILLED)
def test_a_number_in_a_tensor_is_read_as_the_kernel_reads_it(name, made):
    def run(device: str) -> None:
        FILLED[name](torch.ones(4, dtype=FP16, device=device), MADE[made](device))

    try:
        run("cpu")
        real = ""
    except RuntimeError as error:
        real = str(error).split("\n")[0]
    for device in ("cpu", "cuda"):
        assert error_on_fakes(lambda device=device: run(device), device) == real


def test_a_number_that_was_overwritten_is_forgotten():
    def run():
        number = torch.full((), -1e9)
        number.fill_(0)
        torch.ones(4, dtype=FP16).masked_fill(torch.ones(4, dtype=torch.bool), number)

    assert error_on_fakes(run) == ""


class Spectral(nn.Module):
    """A block of a Fourier neural operator."""

    def __init__(self):
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        return self.project(torch.fft.irfft2(spectrum * 2, s=x.shape[-2:]))


def test_xray_memory_and_advise_say_that_an_fft_fails():
    model, x, said = Spectral(), torch.randn(2, 1, 20, 20), "cuFFT only supports dimensions"
    for precision in (Precision.FP16, Precision.BF16):
        assert said in xray(model, x, dtype=precision.dtype).raised
        with pytest.raises(RuntimeError, match=said):
            forecast_memory(model, x, precision=precision)
    assert forecast_memory(model, x, precision="fp32").peak
    call = ModelCall(model, (x,))
    gpu = unknown_gpu("cuda")
    found = forecast(call, trace_and_forecast(call, torch.device("cuda"), gpu=gpu), gpu).candidates
    raising = [c for c in found if c.verdict == "raises"]
    assert {c.recipe.precision for c in raising} == {Precision.FP16, Precision.BF16}
    assert all(said in c.reason for c in raising)


@pytest.mark.filterwarnings("ignore")  # the old quantization of torch says that it is old
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_fused_fake_quantization_is_refused_as_a_real_run_refuses_it(dtype):
    quantization = pytest.importorskip("torch.ao.quantization")
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    x = torch.randn(2, 4)
    settings = quantization.get_default_qat_qconfig_mapping("fbgemm")
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    model = quantize_fx.prepare_qat_fx(layers, settings, (x,))
    raised = xray(model, x, device_type="cpu", dtype=dtype).raised
    assert "_fused_moving_avg_obs_fq_helper takes only torch.float32" in raised
    with torch.autocast("cpu", dtype), pytest.raises(RuntimeError, match="Float but found"):
        model(x)
    assert not xray(model, x, device_type="cpu", dtype=FP32).raised

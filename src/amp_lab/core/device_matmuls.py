"""Measure a matmul in each precision on a device: its speed and its rounding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from amp_lab.core.backends import backend
from amp_lab.core.precision import Precision, has_tf32
from amp_lab.core.timing import compare, measure

_TF32_EPS = 2**-10  # TF32 has 10 bits of mantissa
_SMALL = 256  # the edge of the matrices that are tried first


@dataclass(frozen=True)
class MatmulNumerics:
    """How a device's matmul rounds, found by products with a known result."""

    error: float
    """Largest error of a sum of 4,096 products, in units in the last place (ulp) of the result: 0.5
    if sums have a wider format and are rounded once. In fp32, several ulp are usual. The inputs
    have the bits of the precision, so that only the sum rounds."""
    input_bits: int
    """Bits of significand that a matmul keeps of an fp32 input: 24, 11 in TF32, 8 in bf16."""
    subnormals: bool
    """Whether the smallest subnormal number times 1 stays the same; some devices return zero."""


def matmul_rates(device: torch.device) -> tuple[dict[Precision, float | None], bool]:
    """FLOP/s of a square matmul in each precision, and whether the figures can be trusted.

    None stands for a precision that the device does not have. All precisions have the same size,
    which doubles until the matmul takes 10 ms in fp32, enough to fill the device. On a CPU, the
    largest size is 1024. An emulated precision, more than ten times as slow as fp32, is timed only
    at the first, small size, because at 1024 one call in fp16 takes seconds on many CPUs.
    """
    precisions = precisions_here(device)
    small_s = {}
    for precision in precisions:
        matmul = make_matmul(device, precision, _SMALL)
        small_s[precision] = measure(matmul, device=device, repeats=2).median_s
    longest_s = 10 * small_s[Precision.FP32]
    # The precisions that the device does not emulate.
    native = [precision for precision in precisions if small_s[precision] <= longest_s]
    largest = 1024 if backend(device).is_host else 8192
    n = filling_size(device, largest, seconds=10e-3)
    matmuls: dict[str, Callable] = {p: make_matmul(device, p, n) for p in native}
    comparison = compare(matmuls, device=device, budget_s=3)
    rates: dict[Precision, float | None] = dict.fromkeys(Precision)  # None until measured
    for precision in precisions:  # 2 n^3 FLOPs of the matmul, over its seconds
        if precision in native:
            rates[precision] = 2 * n**3 / comparison.median_s(precision)
        else:
            rates[precision] = 2 * _SMALL**3 / small_s[precision]
    return rates, comparison.trusted


def precisions_here(device: torch.device) -> list[Precision]:
    """All precisions, without TF32 on a device that does not have it."""
    return [p for p in Precision if p is not Precision.TF32 or has_tf32(device.type)]


def filling_size(device: torch.device, largest: int, *, seconds: float) -> int:
    """The first n of 256, 512, … at which a product of n x n matrices takes `seconds` in fp32.

    If no n below `largest` takes so long, the result is the first n that is at least `largest`.
    """
    n = _SMALL
    while n < largest:
        matmul = make_matmul(device, Precision.FP32, n)
        if measure(matmul, device=device, warmup=1, repeats=2).median_s >= seconds:
            break
        n *= 2
    return n


def make_matmul(device: torch.device, precision: Precision, n: int) -> Callable[[], torch.Tensor]:
    """A function that multiplies two n x n matrices in a precision, (n, n) @ (n, n).

    The product takes 2 n^3 FLOPs: n^3 multiplications and about as many additions.
    """
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(n, n, device=device, generator=generator).to(precision.dtype)
    right = torch.randn(n, n, device=device, generator=generator).to(precision.dtype)
    mode = _without_autocast(precision)

    def multiply() -> torch.Tensor:
        with mode.autocast(device.type):
            return left @ right

    return multiply


def _without_autocast(precision: Precision) -> Precision:
    """The precision whose `autocast` block suits operands that have the precision's dtype already.

    This is never fp16 or bf16, since autocast has nothing to cast.
    """
    if precision is Precision.TF32:
        return Precision.TF32
    return Precision.FP32


def measure_matmul_numerics(device: torch.device, precision: Precision) -> MatmulNumerics:
    """How a matmul in a precision rounds on a device."""
    dtype = precision.dtype
    eps = torch.finfo(dtype).eps
    # Each element of left @ right.T is a sum of 4,096 products.
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(32, 4096, generator=generator).to(dtype)
    right = torch.rand(32, 4096, generator=generator).to(dtype)
    input_eps = eps
    if precision is Precision.TF32:  # whose inputs have fewer bits than its results
        input_eps = _TF32_EPS
        left, right = _to_tf32(left), _to_tf32(right)
    # A matrix of subnormal numbers, and the identity, which leaves it unchanged.
    smallest_subnormal = torch.tensor(torch.finfo(dtype).smallest_normal * input_eps)
    subnormals = smallest_subnormal.to(dtype).expand(16, 16)
    identity = torch.eye(16, dtype=dtype)
    with _without_autocast(precision).autocast(device.type):
        sums = (left.to(device) @ right.T.to(device)).cpu().double()  # (32, 32)
        times_one = (subnormals.to(device) @ identity.to(device)).cpu()
        bits = _input_bits(device, dtype, torch.matmul)
    # All values are positive, so no sum is small, and fp64 is exact enough to compare with.
    exact = left.double() @ right.T.double()
    # A result from 2^e to 2^(e+1) has its last place at 2^e * eps; `frexp` gives e + 1.
    exponents = torch.frexp(exact).exponent.double() - 1
    last_place = torch.exp2(exponents) * eps
    error = ((sums - exact).abs() / last_place).max().item()
    keeps_subnormals = torch.equal(times_one, subnormals)
    return MatmulNumerics(error=error, input_bits=bits, subnormals=keeps_subnormals)


def _to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Cut fp32 numbers off after the 10 bits of mantissa that TF32 has; they stay fp32."""
    cut_bits = (1 << 13) - 1  # of the 23 bits of fp32's mantissa
    return (values.view(torch.int32) & ~cut_bits).view(torch.float32)


def fp32_bits_as_set(device: torch.device) -> tuple[int, int]:
    """Bits that a matmul and a convolution keep of an fp32 input, with the modes that are set.

    See `DeviceReport.fp32_bits_as_set`.
    """
    return (
        _input_bits(device, torch.float32, torch.matmul),
        _input_bits(device, torch.float32, _convolve),
    )


def _input_bits(device: torch.device, dtype: torch.dtype, multiply: Callable) -> int:
    """How many bits of significand an input keeps in a product.

    `multiply` takes two (n, n) matrices and returns their product. For each k from 1 to 32, the
    number 1 + 2^-k is multiplied by 1. The result stays above 1 if the product keeps bit k of the
    significand.
    """
    size = 32
    inputs = (1 + torch.exp2(-torch.arange(1.0, 1 + size))).to(dtype)
    identity = torch.eye(size, dtype=dtype, device=device)
    out = multiply(torch.diag(inputs).to(device), identity)
    is_kept = out.cpu().diagonal() > 1
    return 1 + int(is_kept.sum())


def _convolve(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of (n, k) and (k, m), as a convolution with kernels of 1 x 1: (n, m)."""
    images = left[:, :, None, None]
    weight = right.T[:, :, None, None]
    return torch.nn.functional.conv2d(images, weight)[:, :, 0, 0]

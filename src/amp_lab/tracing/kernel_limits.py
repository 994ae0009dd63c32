"""What real kernels refuse and fake tensors let through: a table, each row with its source.

`StrictFakeMode` asks it about every op, so that X-ray, the memory forecast and `advise --for` raise
where the device would. To add a limit, write a function that says why a call is refused, and a row
in `LIMITS`. A limit without a source has no place here: what only seems likely would refuse models
that run.

Not here, since something else holds it: sizes of `_scaled_mm` (FP8), which fake tensors check
(`torch/_meta_registrations.py`, `_check_scaled_mm_sizes`); the LSTM of a CPU without AVX-512, which
`amp_lab.core.cpu` asks the CPU itself about; and the kernels of attention by dtype, head size and
mask, each with its source, in `amp_lab.tracing.attention`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from amp_lab.core.remedies import remedy

_FFT = remedy(
    "dtype.fft",
    "an FFT gets 16-bit values on a GPU, or its result meets another complex dtype",
    "transform x.float() instead of x, and cast the real result back with .to(x.dtype) if the next "
    "layer is cast to 16 bits",
)
_NO_ATTENTION_KERNEL = remedy(
    "dtype.no_attention_kernel",
    "sdpa_kernel allows no kernel that takes the dtype, mask or head size of an attention",
    "flash attention takes only fp16 and bf16, no mask and heads of up to 256, so allow the kernel "
    "that takes everything too: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])",
)
_FUSED_FAKE_QUANTIZATION = remedy(
    "dtype.fused_fake_quantization",
    "quantization-aware training under autocast uses the fused fake quantization",
    "make its settings with get_default_qat_qconfig_mapping(BACKEND, version=0), whose fake "
    "quantization is not fused, and which autocast runs in fp32",
)
REMEDIES_BY_MESSAGE = {
    "_fused_moving_avg_obs_fq_helper": _FUSED_FAKE_QUANTIZATION.text,
    "cuFFT": _FFT.text,
    "complex32": _FFT.text,
    "Unsupported dtype Half": _FFT.text,  # what torch.fft raises on a CPU and on MPS
    "Unsupported dtype BFloat16": _FFT.text,
    "No available kernel": _NO_ATTENTION_KERNEL.text,
}
"""What to do about a limit, by what the errors of this table and of torch say."""

WITH_OUT = "with out="


class OpCall(NamedTuple):
    """An op with its arguments, as it arrives below autograd and autocast."""

    name: str  # without "aten::"
    args: tuple
    out: torch.Tensor | None = None  # of ``out=``

    @property
    def plain_name(self) -> str:
        """The name without the underscore of an in-place op."""
        return self.name.rstrip("_")

    @property
    def title(self) -> str:
        """The name as an error says it."""
        if self.out is None:
            return self.name
        return f"{self.name} {WITH_OUT}"

    @property
    def first(self) -> torch.Tensor | None:
        """The first argument, if it is a tensor."""
        if self.args and isinstance(self.args[0], torch.Tensor):
            return self.args[0]
        return None

    def is_on_nvidia(self) -> bool:
        """Whether it runs on CUDA, and not on ROCm."""
        first = self.first
        if first is None or first.device.type != "cuda":
            return False
        return torch.version.hip is None


@dataclass(frozen=True)
class KernelLimit:
    """Ops, why their kernels refuse some calls of them, and how that is known."""

    ops: str  # names, with spaces between them
    refusal: Callable[[OpCall], str | None]  # the error of a call; None: it runs
    source: str


def refusal_of(call: OpCall) -> str | None:
    """Why a kernel refuses a call; None if it takes it, as far as is known."""
    for limit in _BY_OP.get(call.name, ()):
        refused = limit.refusal(call)
        if refused is not None:
            return refused
    return None


def require_alike(name: str, given: list[Any]) -> None:
    """Raise `RuntimeError` unless all tensors among the arguments of an op are of one dtype."""
    refused = _unlike(name, given)
    if refused is not None:
        raise RuntimeError(refused)


def _unlike(name: str, given: Iterable[Any]) -> str | None:
    """The refusal of an op whose tensors must be of one dtype; None if they are."""
    dtypes = [tensor.dtype for tensor in given if isinstance(tensor, torch.Tensor)]
    for dtype in dtypes:
        if dtype is not dtypes[0]:
            return f"{name} takes tensors of one dtype, and got {dtypes[0]} and {dtype}"
    return None


def _one_dtype_at(*places: int) -> Callable[[OpCall], str | None]:
    """The refusal of ops whose arguments at these places must be of one dtype."""

    def refusal(call: OpCall) -> str | None:
        given = [call.args[place] for place in places if place < len(call.args)]
        return _unlike(call.title, given)

    return refusal


def _linear_into_out(call: OpCall) -> str | None:
    """The refusal of ``linear`` whose arguments and ``out=`` must be of one dtype."""
    if call.out is None:  # the ops that it is made of are asked about
        return None
    return _unlike(call.title, [*call.args, call.out])


def _wide_data_on_cpu(*places: int) -> Callable[[OpCall], str | None]:
    """The refusal of norms whose data is wider than their weights and statistics, on a CPU."""

    def refusal(call: OpCall) -> str | None:
        given = [call.args[place] for place in places]
        data, *weights = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
        if data.device.type != "cpu":
            return None
        if all(weight.itemsize >= data.itemsize for weight in weights):
            return None
        return _unlike(call.name, [data, *weights])

    return refusal


def _floats_alone(call: OpCall) -> str | None:
    first = call.first
    if first is None or first.is_floating_point() or first.is_complex():
        return None
    if first.dtype is torch.uint8 and call.plain_name.startswith("upsample"):  # pixels
        return None
    return f"{call.name} takes no tensor of {first.dtype}"


def _no_bools(call: OpCall) -> str | None:
    first = call.first
    if first is None or first.dtype is not torch.bool:
        return None
    return f"{call.name} takes no tensor of {first.dtype}"


_IN_CUFFT = {
    torch.float16: "half",
    torch.complex32: "half",
    torch.bfloat16: "bfloat16",
}
"""The names that torch's errors give to 16-bit transforms."""


def _no_power_of_two(call: OpCall) -> str | None:
    """cuFFT's rule; torch's own words, so that they can be searched for."""
    signal = call.args[0]
    if not call.is_on_nvidia() or signal.dtype not in _IN_CUFFT:
        return None
    precision = _IN_CUFFT[signal.dtype]
    if precision == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
        return "cuFFT doesn't support bfloat16 with compute capability less than SM_80"
    sizes = [signal.shape[dim] for dim in call.args[1]]
    if call.name == "_fft_c2r":  # its input has half of the last dimension
        sizes[-1] = call.args[3]
    if all(_is_power_of_two(size) for size in sizes):
        return None
    return (
        "cuFFT only supports dimensions whose sizes are powers of two when computing in "
        f"{precision} precision, but got a signal size of {sizes}"
    )


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _complex_half(call: OpCall) -> str | None:
    if not call.is_on_nvidia():
        return None
    dtypes = {tensor.dtype for tensor in call.args if isinstance(tensor, torch.Tensor)}
    if torch.complex32 not in dtypes:
        return None
    return f"{call.name} takes no tensor of torch.complex32 on CUDA"


def _fp32_alone_on_cpu(call: OpCall) -> str | None:
    first = call.first
    if first is None or first.device.type != "cpu" or first.dtype is torch.float32:
        return None
    return f"{call.name} takes torch.float32 alone, and got {first.dtype}"


def _fp8_before_ada(call: OpCall) -> str | None:
    if not call.is_on_nvidia() or torch.cuda.get_device_capability() >= (8, 9):
        return None
    return (
        "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9"
    )


_CPU_RUN = "run for real on a CPU by tests/tracing/test_dtype_checks.py"
_QUANTIZED_RUN = "run for real on a CPU by tests/tracing/test_kernel_limits.py"
_CUDA_CHECKS = f"{_CPU_RUN}; for CUDA, the checks of the kernels in ATen/native/cuda"
LIMITS: tuple[KernelLimit, ...] = (
    KernelLimit(
        "mm mv _grouped_mm grid_sampler_2d grid_sampler_3d _cdist_forward",
        _one_dtype_at(0, 1),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "index_put index_put_ _index_put_impl_ put put_ nll_loss_forward nll_loss2d_forward",
        _one_dtype_at(0, 2),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "index_add index_add_ index_copy index_copy_ index_reduce index_reduce_",
        _one_dtype_at(0, 3),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "addmm addmv addbmm convolution binary_cross_entropy",
        _one_dtype_at(0, 1, 2),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "addmm_ addmv_ addbmm_ baddbmm_",
        _one_dtype_at(0, 1, 2),
        f"{_CPU_RUN}; for every device, ATen/native/LinearAlgebra.cpp: ADDMM_META, the checks of "
        "addmv and baddbmm in namespace meta, and addbmm_impl_, which calls addmm_",
    ),
    KernelLimit(
        "linear",
        _linear_into_out,
        f"{_CPU_RUN}; ATen/native/Linear.cpp: it is made of mm and addmm, for every device",
    ),
    KernelLimit("native_batch_norm", _wide_data_on_cpu(0, 1, 2), _CPU_RUN),
    KernelLimit("native_layer_norm", _wide_data_on_cpu(0, 2, 3), _CPU_RUN),
    KernelLimit(
        "gelu gelu_ silu silu_ mish mish_ hardswish hardswish_ hardsigmoid hardsigmoid_ glu "
        "_softmax _log_softmax adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d",
        _floats_alone,
        _CPU_RUN,
    ),
    KernelLimit(
        "relu relu_ max_pool2d_with_indices avg_pool2d reflection_pad2d", _no_bools, _CPU_RUN
    ),
    KernelLimit(
        "_fft_r2c _fft_c2r _fft_c2c",
        _no_power_of_two,
        "torch.fft, Note of each function: 'it only supports powers of 2 signal length in every "
        "transformed dimension'; for bf16 the same errors in ATen/native/cuda/CuFFTPlanCache.h, "
        "from torch 2.15 on (before, torch.fft raises 'Unsupported dtype BFloat16' itself)",
    ),
    KernelLimit(
        "mm addmm bmm baddbmm addmv mv",
        _complex_half,
        "ATen/native/cuda/Blas.cpp, AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(Half, BFloat16), "
        "which leaves ComplexHalf out; torch/testing/_internal/common_methods_invocations.py, "
        "dtypesIfCUDA of mm, addmm, bmm, baddbmm, mv",
    ),
    KernelLimit("_fused_moving_avg_obs_fq_helper", _fp32_alone_on_cpu, _QUANTIZED_RUN),
    KernelLimit(
        "_scaled_mm",
        _fp8_before_ada,
        "ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_allowed_device and its error",
    ),
)
"""What kernels refuse and fake tensors do not."""

_BY_OP: dict[str, list[KernelLimit]] = {}
for _limit in LIMITS:
    for _op in _limit.ops.split():
        _BY_OP.setdefault(_op, []).append(_limit)

"""Arguments that real kernels refuse and fake tensors accept: a table, each row with its source.

`StrictFakeMode` looks up every op in the table, so X-ray, the memory forecast and `advise --for`
raise the error that the device would raise. To add a limit, write a function that returns the error
of a call, and add a row to `LIMITS`. Each limit needs a source, since a wrong limit would refuse
models that run.

Checked elsewhere: sizes of `_scaled_mm` (FP8), which fake tensors check
(`torch/_meta_registrations.py`, `_check_scaled_mm_sizes`); the LSTM of a CPU without AVX-512, which
`amp_lab.core.cpu` asks the CPU itself about; and the kernels of attention by dtype, head size and
mask, each with its source, in `amp_lab.tracing.attention`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from amp_lab.core.remedies import remedy
from amp_lab.core.tensors import tensors_in

_FFT = remedy(
    "dtype.fft",
    "an FFT or STFT gets 16-bit values, or its result meets another complex dtype",
    "transform x.float() instead of x. If the next layer is cast to 16 bits, cast the real result "
    "back with .to(x.dtype). If the module also cast its window or filters, as model.half() does, "
    "call .float() on this module afterwards",
    failure="AMP0038",
)
_NO_ATTENTION_KERNEL = remedy(
    "dtype.no_attention_kernel",
    "sdpa_kernel allows no kernel that takes the dtype, mask or head size of an attention",
    "on a GPU, flash attention takes only fp16 and bf16, no mask and heads of up to 256. Also "
    "allow the math kernel, which has none of these limits: "
    "sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])",
    failure="AMP0162",
)
_FUSED_FAKE_QUANTIZATION = remedy(
    "dtype.fused_fake_quantization",
    "quantization-aware training under autocast uses the fused fake quantization",
    "create the qconfig mapping with get_default_qat_qconfig_mapping(BACKEND, version=0). Its "
    "fake quantization is not fused and runs under autocast",
    failure="AMP0157",
)
REMEDIES_BY_MESSAGE = {
    "_fused_moving_avg_obs_fq_helper": _FUSED_FAKE_QUANTIZATION.text,
    "cuFFT": _FFT.text,
    "complex32": _FFT.text,
    "Unsupported dtype Half": _FFT.text,  # what torch.fft raises on a CPU and on MPS
    "Unsupported dtype BFloat16": _FFT.text,
    "FFT doesn't support tensors of type": _FFT.text,  # what a CPU raises if torch has MKL
    "expected scalar type Double but found": _FFT.text,  # and if torch has no MKL
    "No available kernel": _NO_ATTENTION_KERNEL.text,
}
"""Remedy by a phrase of the error's message, of errors from this table and from torch."""


class OpCall(NamedTuple):
    """An op with its arguments, after autograd and autocast."""

    name: str  # without "aten::", such as "addmm_"
    args: tuple
    out: torch.Tensor | None = None  # the keyword argument ``out=``

    @property
    def title(self) -> str:
        """The name for error messages: ``mm``, or ``mm with out=``."""
        return self.name if self.out is None else f"{self.name} with out="

    @property
    def first(self) -> torch.Tensor | None:
        """The first argument, if it is a tensor."""
        if self.args and isinstance(self.args[0], torch.Tensor):
            return self.args[0]
        return None

    def is_on(self, device_type: str) -> bool:
        """Whether the first argument is on this type of device; "cuda" does not include ROCm."""
        first = self.first
        if first is None or first.device.type != device_type:
            return False
        is_rocm = device_type == "cuda" and torch.version.hip is not None
        return not is_rocm


@dataclass(frozen=True)
class KernelLimit:
    """A limit of the kernels of some ops."""

    ops: str  # names, separated by spaces
    # Raises torch's error, or one like it, for a call that a kernel refuses; else does nothing.
    refuse: Callable[[OpCall], None]
    source: str  # where the limit is documented or tested


def check_limits(func: OpOverload, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raise `RuntimeError` if the kernels of the device refuse the arguments of an op."""
    name = func._schema.name.removeprefix("aten::")
    for limit in _BY_OP.get(name, ()):
        limit.refuse(OpCall(name, args, kwargs.get("out")))


def require_same_dtype(name: str, arguments: list[Any]) -> None:
    """Raise `RuntimeError` unless all tensors among the arguments of an op have one dtype."""
    dtypes = [tensor.dtype for tensor in tensors_in(arguments)]
    for dtype in dtypes:
        if dtype is not dtypes[0]:
            raise RuntimeError(
                f"{name} takes tensors of one dtype, but got {dtypes[0]} and {dtype}"
            )


def _refuse_mixed_dtypes(*positions: int) -> Callable[[OpCall], None]:
    """Make a `KernelLimit.refuse` that wants one dtype of the tensors at these argument positions.

    An argument that is not a tensor is ignored.
    """

    def refuse(call: OpCall) -> None:
        # Optional arguments, such as a weight, may be left out at the end.
        arguments = [call.args[position] for position in positions if position < len(call.args)]
        require_same_dtype(call.title, arguments)

    return refuse


def _refuse_mixed_linear_with_out(call: OpCall) -> None:
    """Refuse ``linear`` with ``out=`` unless its arguments and ``out=`` have one dtype."""
    if call.out is not None:  # without it, ``linear`` calls ops such as addmm, which are checked
        require_same_dtype(call.title, [*call.args, call.out])


def _refuse_wide_norm_data_on_cpu(*positions: int) -> Callable[[OpCall], None]:
    """Make a `KernelLimit.refuse` against norms of fp32 data with weights in 16 bits on a CPU.

    The first of `positions` is that of the data among the arguments, the others are those of the
    weights and biases. A norm of 16-bit data with fp32 weights is accepted.
    """

    def refuse(call: OpCall) -> None:
        data, *weights = tensors_in([call.args[position] for position in positions])
        if call.is_on("cpu") and any(weight.itemsize < data.itemsize for weight in weights):
            require_same_dtype(call.name, [data, *weights])

    return refuse


_UPSAMPLES_WITHOUT_UINT8 = ("upsample_linear1d", "upsample_trilinear3d")


def _refuse_non_floats(call: OpCall) -> None:
    """Refuse a first argument of integers or bools; some upsampling takes images in uint8."""
    first = call.first
    if first is None or first.is_floating_point() or first.is_complex():
        return
    takes_uint8 = "upsample" in call.name and call.name not in _UPSAMPLES_WITHOUT_UINT8
    if first.dtype is torch.uint8 and takes_uint8:
        return
    raise RuntimeError(f"{call.name} does not take a tensor of {first.dtype}")


def _refuse_bools(call: OpCall) -> None:
    """Refuse a first argument of bools; integers are accepted."""
    first = call.first
    if first is not None and first.dtype is torch.bool:
        raise RuntimeError(f"{call.name} does not take a tensor of torch.bool")


_TORCH_NAMES = {
    torch.float16: "Half",
    torch.complex32: "ComplexHalf",
    torch.bfloat16: "BFloat16",
}
"""The name of each 16-bit dtype in torch's errors."""


def _refuse_fft_sizes(call: OpCall) -> None:
    """Refuse FFTs in 16 bits on CUDA unless all sizes are powers of two, with torch's own error.

    Those in bf16 are refused for all sizes on GPUs before compute capability 8.0.
    """
    signal = call.args[0]  # `call.args[1]` are the dimensions to transform
    if not call.is_on("cuda") or signal.dtype not in _TORCH_NAMES:
        return
    precision = "half"
    if signal.dtype is torch.bfloat16:
        precision = "bfloat16"
        if torch.cuda.get_device_capability() < (8, 0):
            raise RuntimeError(
                "cuFFT doesn't support bfloat16 with compute capability less than SM_80"
            )
    sizes = [signal.shape[dim] for dim in call.args[1]]
    if call.name == "_fft_c2r":  # a real FFT's inverse, whose input has about half of the last size
        sizes[-1] = call.args[3]  # the last size of its result
    are_powers_of_two = [size.bit_count() <= 1 for size in sizes]  # which have a single bit
    if not all(are_powers_of_two):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in "
            f"{precision} precision, but got a signal size of {sizes}"
        )


def _refuse_fft_in_16_bits_on_cpu(call: OpCall) -> None:
    """Refuse FFTs in 16 bits on a CPU, with torch's own error for builds with MKL."""
    name = _TORCH_NAMES.get(call.args[0].dtype)
    if call.is_on("cpu") and name is not None:
        raise RuntimeError(f"MKL FFT doesn't support tensors of type: {name}")


def _refuse_complex_half(call: OpCall) -> None:
    """Refuse complex32 tensors on CUDA, where cuBLAS does not take them."""
    dtypes = {tensor.dtype for tensor in tensors_in(call.args)}
    if torch.complex32 in dtypes and call.is_on("cuda"):
        raise RuntimeError(f"{call.name} does not take a tensor of torch.complex32 on CUDA")


def _refuse_all_but_fp32_on_cpu(call: OpCall) -> None:
    """Refuse any dtype but fp32 on a CPU."""
    dtype = call.args[0].dtype
    if call.is_on("cpu") and dtype is not torch.float32:
        raise RuntimeError(f"{call.name} takes only torch.float32, but got {dtype}")


def _refuse_fp8_before_ada(call: OpCall) -> None:
    """Refuse FP8 on GPUs without it, before compute capability 8.9, with torch's own error."""
    if call.is_on("cuda") and torch.cuda.get_device_capability() < (8, 9):
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 "
            "or 8.9"
        )


_CPU_RUN = "run for real on a CPU by tests/tracing/test_dtype_checks.py"
_QUANTIZED_RUN = "run for real on a CPU by tests/tracing/test_kernel_limits.py"
_CUDA_CHECKS = f"{_CPU_RUN}; for CUDA, the checks of the kernels in ATen/native/cuda"
LIMITS: tuple[KernelLimit, ...] = (
    KernelLimit(
        "mm mv _grouped_mm grid_sampler_2d grid_sampler_3d _cdist_forward",
        _refuse_mixed_dtypes(0, 1),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "index_put index_put_ _index_put_impl_ put put_ nll_loss_forward nll_loss2d_forward",
        _refuse_mixed_dtypes(0, 2),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "index_add index_add_ index_copy index_copy_ index_reduce index_reduce_",
        _refuse_mixed_dtypes(0, 3),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "addmm addmv addbmm convolution binary_cross_entropy",
        _refuse_mixed_dtypes(0, 1, 2),
        _CUDA_CHECKS,
    ),
    KernelLimit(
        "addmm_ addmv_ addbmm_ baddbmm_",
        _refuse_mixed_dtypes(0, 1, 2),
        f"{_CPU_RUN}; for every device, ATen/native/LinearAlgebra.cpp: ADDMM_META, the checks of "
        "addmv and baddbmm in namespace meta, and addbmm_impl_, which calls addmm_",
    ),
    KernelLimit(
        "linear",
        _refuse_mixed_linear_with_out,
        f"{_CPU_RUN}; ATen/native/Linear.cpp: it is made of mm and addmm, for every device",
    ),
    KernelLimit("native_batch_norm", _refuse_wide_norm_data_on_cpu(0, 1, 2), _CPU_RUN),
    KernelLimit("native_layer_norm", _refuse_wide_norm_data_on_cpu(0, 2, 3), _CPU_RUN),
    KernelLimit(
        "gelu gelu_ silu silu_ mish mish_ hardswish hardswish_ hardsigmoid hardsigmoid_ glu "
        "_softmax _log_softmax adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa "
        "_upsample_bicubic2d_aa",
        _refuse_non_floats,
        _CPU_RUN,
    ),
    KernelLimit(
        "relu relu_ max_pool2d_with_indices avg_pool2d reflection_pad2d", _refuse_bools, _CPU_RUN
    ),
    KernelLimit(
        "_fft_r2c _fft_c2r _fft_c2c",
        _refuse_fft_sizes,
        "torch.fft, Note of each function: 'it only supports powers of 2 signal length in every "
        "transformed dimension'; for bf16 the same errors in ATen/native/cuda/CuFFTPlanCache.h, "
        "from torch 2.15 on (before, torch.fft raises 'Unsupported dtype BFloat16' itself)",
    ),
    KernelLimit(
        "_fft_r2c _fft_c2r _fft_c2c",
        _refuse_fft_in_16_bits_on_cpu,
        "ATen/native/mkl/SpectralOps.cpp: precisions single and double; run for real on a CPU by "
        "tests/tracing/test_kernel_limits.py",
    ),
    KernelLimit(
        "mm addmm bmm baddbmm addmv mv",
        _refuse_complex_half,
        "ATen/native/cuda/Blas.cpp, AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(Half, BFloat16), "
        "which leaves ComplexHalf out; torch/testing/_internal/common_methods_invocations.py, "
        "dtypesIfCUDA of mm, addmm, bmm, baddbmm, mv",
    ),
    KernelLimit("_fused_moving_avg_obs_fq_helper", _refuse_all_but_fp32_on_cpu, _QUANTIZED_RUN),
    KernelLimit(
        "_scaled_mm",
        _refuse_fp8_before_ada,
        "ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_allowed_device and its error",
    ),
)
"""All limits; `check_limits` looks up the op of a call in them."""

_BY_OP: dict[str, list[KernelLimit]] = {}  # the limits of each op, by its name
for _limit in LIMITS:
    for _op in _limit.ops.split():
        _BY_OP.setdefault(_op, []).append(_limit)

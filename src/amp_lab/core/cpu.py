"""The CPU of this machine: its matrix instructions, and layers that fail in low precision."""

import functools
import os

import torch

from amp_lab.core.errors import DeviceError
from amp_lab.core.remedies import remedy

NO_PRIMITIVE = "could not create a primitive descriptor"
"""The beginning of oneDNN's error for an op that it has no kernel for on this CPU."""
NO_PRIMITIVE_REMEDY = remedy(
    "cpu.no_primitive",
    "an LSTM runs under autocast, and oneDNN has no kernel for it on this CPU",
    "oneDNN has no kernel for this layer on this CPU, so run the layer in fp32: "
    'with torch.autocast("cpu", enabled=False), on x.float()',
    failure="AMP0042",
).text

LIMITS: dict[str, tuple[str, ...]] = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512", "vsx", "zvector", "sve256"),
    "ONEDNN_MAX_CPU_ISA": (
        "default", "sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core",
        "avx512_core_vnni", "avx512_core_bf16", "avx512_core_fp16", "avx512_core_amx",
        "avx512_core_amx_fp16", "avx10_1_512", "avx10_1_512_amx", "avx10_1_512_amx_fp16",
        "avx10_2_512", "avx10_2_512_amx_2",
    ),
}  # fmt: skip
"""Environment variables that limit the instructions which ATen and oneDNN choose, to emulate
another CPU, with their values. torch and oneDNN ignore any other value."""


# Values of ONEDNN_MAX_CPU_ISA with which no instruction computes in bf16.
_WITHOUT_BF16 = ("sse41", "avx", "avx2", "avx2_vnni", "avx512_core", "avx512_core_vnni")


def check_limits() -> None:
    """Raise `DeviceError` for a limit in the environment that would be ignored."""
    for name, values in LIMITS.items():
        value = os.environ.get(name, "")
        if value and value.lower() not in values:
            raise DeviceError(f"{name}={value!r} has no effect; give one of {', '.join(values)}")


def matrix_instructions() -> str:
    """The instructions that matter to a matmul, such as ``AVX-512 BF16, AMX``.

    If the environment limits the instructions, the text ends with the variables that do so, such as
    ``(limited by ONEDNN_MAX_CPU_ISA=avx2)``. Raises `DeviceError` as `check_limits` does.
    """
    check_limits()
    instructions = torch.backends.cpu.get_cpu_capability()
    if instructions == "AVX512":
        instructions = ", ".join(_avx512_instructions())
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    if not limits:
        return instructions
    return f"{instructions} (limited by {' '.join(limits)})"


def _avx512_instructions() -> list[str]:
    """The matrix instructions of a CPU with AVX-512, such as ``["AVX-512 BF16", "AMX"]``."""
    names = ["AVX-512 BF16" if has_bf16_instructions() else "AVX-512"]
    if onednn_has_fp16():
        names.append("AVX-512 FP16")
    limit = _onednn_limit()
    is_amx_allowed = limit == "default" or "amx" in limit
    if is_amx_allowed and torch.cpu._is_amx_tile_supported():
        names.append("AMX")
    return names


def has_bf16_instructions() -> bool:
    """Whether this CPU has instructions that multiply in bf16, so bf16 is faster than fp32.

    With AVX-512 alone, oneDNN accepts bf16 too, but converts it to fp32 and back.
    """
    if not onednn_has_bf16():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        # An Arm CPU. There, oneDNN computes in bf16 only if the CPU has the instructions.
        return True
    # torch asks the CPU itself, and does not know that oneDNN may be limited.
    return torch.cpu._is_avx512_bf16_supported() and _onednn_limit() not in _WITHOUT_BF16


def _onednn_limit() -> str:
    """The instructions that oneDNN is limited to, such as ``avx2``; ``default`` without a limit."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "").lower() or "default"


def onednn_has_bf16() -> bool:
    """Whether oneDNN, where this torch has it, computes in bf16 on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_has_fp16() -> bool:
    """Whether oneDNN, where this torch has it, computes in fp16 on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def lstm_error(
    dtype: torch.dtype, *, with_gradients: bool, input_dtype: torch.dtype = torch.float32
) -> str | None:
    """The error of an `nn.LSTM` under autocast to `dtype` on this CPU; None if the layer runs.

    Autocast casts the layer after torch has chosen oneDNN's kernel. This kernel exists

    - in bf16 from AVX-512 on,
    - in fp16 for inference only with AVX-512 FP16,
    - in fp16 for training on no CPU.

    torch chooses by the dtype of the input, `input_dtype`. For an input in 16 bits, torch checks
    whether oneDNN has the kernel, and otherwise uses a kernel of ATen (`use_mkldnn` in
    ATen/native/RNN.cpp). Layers with projections, `nn.GRU` and `nn.RNN` have other kernels, which
    always run.
    """
    return _lstm_error(dtype, with_gradients, input_dtype)


@functools.cache
def _lstm_error(dtype: torch.dtype, with_gradients: bool, input_dtype: torch.dtype) -> str | None:
    """The result of `lstm_error`, found by running a small layer once for each combination."""
    steps = torch.zeros(1, 1, 1, device="cpu", dtype=input_dtype)  # (T, B, C)
    # Of the input and of the hidden state, (4, 1) each: a row for each of the four gates.
    weights = [torch.zeros(4, 1, device="cpu"), torch.zeros(4, 1, device="cpu")]
    try:
        with torch.set_grad_enabled(with_gradients), torch.autocast("cpu", dtype):
            torch.lstm(
                steps,
                (steps, steps),
                weights,
                has_biases=False,
                num_layers=1,
                dropout=0.0,
                train=with_gradients,
                bidirectional=False,
                batch_first=False,
            )
    except RuntimeError as error:
        return str(error).partition(".")[0]  # the first sentence
    return None


def lstm_remarks() -> list[str]:
    """A sentence on the dtypes in which an `nn.LSTM` fails under autocast here; none if it runs."""
    failing = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if lstm_error(dtype, with_gradients=False) is not None:
            failing.append(name)
        elif lstm_error(dtype, with_gradients=True) is not None:
            failing.append(f"{name} (only in training)")
    if not failing:
        return []
    dtypes = " and in ".join(failing)
    return [f"nn.LSTM under autocast fails for fp32 inputs on this CPU in {dtypes}"]

"""Code with which torchao converts a model to a format for inference, and a test run of it."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from amp_lab.formats.scaling import format_of
from amp_lab.formats.torchao_code import error_of, set_of
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, Recipe

_FLOAT8 = """\
import torch
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_
from torchao.quantization.granularity import {granularity}

LEFT_OUT = {left_out}
config = Float8DynamicActivationFloat8WeightConfig(
    granularity={granularity}(),
    set_inductor_config=False,  # True also allows TF32 in the whole process.
)
"""
_MX = """\
import torch
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
from torchao.utils import is_sm_at_least_100

LEFT_OUT = {left_out}
# The fast path of nn.TransformerEncoderLayer cannot use quantised weights.
torch.backends.mha.set_fastpath_enabled(False)
# On a device without MX matmuls, torchao only rounds to MX and multiplies in bf16 (EMULATED).
can = is_sm_at_least_100() and next(model.parameters()).is_cuda
config = MXDynamicActivationMXWeightConfig(
    activation_dtype=torch.{dtype},
    weight_dtype=torch.{dtype},
    kernel_preference=KernelPreference.AUTO if can else KernelPreference.EMULATED,
)
"""
_NVFP4 = """\
import torch
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig
from torchao.quantization import quantize_

LEFT_OUT = {left_out}
# The fast path of nn.TransformerEncoderLayer cannot use quantised weights.
torch.backends.mha.set_fastpath_enabled(False)
# True is faster, but needs the package mslk, which torchao does not install.
config = NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)
"""
_REST = """\
model = model.eval().to(torch.bfloat16)
quantize_(
    model,
    config,
    lambda module, name: isinstance(module, torch.nn.Linear) and name not in LEFT_OUT,
)


def cast(x):  # cast your inputs too: the model is in bf16
    if isinstance(x, dict):
        return {key: cast(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(map(cast, x))
    return x.to(torch.bfloat16) if torch.is_tensor(x) and x.is_floating_point() else x


with torch.inference_mode():
    output = model(*cast(args), **cast(kwargs))
"""
# By the format's name in torchao.
_CONFIG = {"tensorwise": _FLOAT8, "rowwise": _FLOAT8, "mxfp8": _MX, "mxfp4": _MX, "nvfp4": _NVFP4}
_GRANULARITY = {"tensorwise": "PerTensor", "rowwise": "PerRow"}  # torchao's classes
_DTYPE = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn_x2"}  # of the elements
_FP8_AMD = ("gfx940", "gfx941", "gfx942", "gfx950")  # MI300 and MI350, as torchao checks


def lines(form: str, left_out: Sequence[str]) -> str:
    """The code that converts ``model`` and runs it with ``args`` and ``kwargs``.

    It is empty for a format that torchao 0.18 does not have. `left_out` are the names of the linear
    layers that stay as they are. The code converts the model to bf16, since torchao requires that,
    and uses emulated MX kernels where the GPU has none.
    """
    recipe = format_of(form).torchao
    if recipe not in _CONFIG:
        return ""
    conversion = _CONFIG[recipe].format(
        left_out=set_of(left_out), granularity=_GRANULARITY.get(recipe), dtype=_DTYPE.get(recipe)
    )
    return conversion + _REST


def converts(form: str, module: nn.Module | None) -> bool:
    """Whether the code converts a module; in inference this does not depend on the format."""
    return type(module) is nn.Linear


def converted_kind(form: str) -> str:
    """The modules that the code converts, in words; the same for each format."""
    return "nn.Linear"


def untried_reason(form: str, device: torch.device) -> str:
    """The reason why the code cannot be tried on this device; empty if it can."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if form == "nvfp4":
        kernels = "torchao's kernels for NVFP4 inference"
        return f"{kernels} run only on Blackwell, where this report does not try them"
    if format_of(form).torchao in _GRANULARITY and not _torchao_takes_fp8(device):
        gpus = "an NVIDIA GPU of compute capability 8.9 or later, an AMD MI300 or MI350, or an XPU"
        return (
            f"torchao converts models for FP8 inference only on {gpus}, and this model is on "
            f"{device}"
        )
    return ""


def _torchao_takes_fp8(device: torch.device) -> bool:
    """Whether torchao converts a model on this device for FP8 inference.

    `_check_hardware_support` in `torchao.float8.inference` asserts this condition.
    """
    if device.type != "cuda":
        return device.type == "xpu"
    gpu = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return gpu.gcnArchName.startswith(_FP8_AMD)
    return (gpu.major, gpu.minor) >= (8, 9)


def failure(call: ModelCall, code: str) -> str:
    """Try the code: convert a copy of the model and run it.

    Returns the error, such as ``TypeError: …``; empty if there was none.
    """
    # In fp32 if the weights have 16 bits, as in the plain fp32 recipe; None changes no dtype.
    dtype = Recipe(INFERENCE).dtype_for(call.model)
    copy = call.copy().to(dtype=dtype)
    # The variables that the code uses.
    variables: dict[str, object] = {"model": copy.model, "args": copy.args, "kwargs": copy.kwargs}
    was_fastpath_enabled = torch.backends.mha.get_fastpath_enabled()  # the code may disable it
    try:
        return error_of(lambda: exec(code, variables))
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fastpath_enabled)

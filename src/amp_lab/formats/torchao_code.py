"""Code with which torchao converts a model to a format for training, and a test run of the code."""

import importlib.util
import json
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from amp_lab.core.errors import with_type
from amp_lab.core.requirements import nothing_logged
from amp_lab.formats.scaling import format_of
from amp_lab.model_call import ModelCall
from amp_lab.recipes import TRAINING, Recipe, Step

_FLOAT8 = """\
import dataclasses

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.utils import is_MI300, is_MI350, is_sm_at_least_89

LEFT_OUT = {left_out}
config = Float8LinearConfig.from_recipe_name("{recipe}")
# On a device without FP8 matmuls, torchao only rounds to FP8 (emulate=True).
can = is_sm_at_least_89() or is_MI300() or is_MI350()
config = dataclasses.replace(config, emulate=not can)
convert_to_float8_training(
    model, config=config, module_filter_fn=lambda module, name: name not in LEFT_OUT
)
"""
_MXFP8 = """\
import torch
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
from torchao.utils import is_sm_at_least_100

LEFT_OUT = {left_out}
# On a device without MXFP8 matmuls, torchao only rounds to MXFP8 (EMULATED).
can = is_sm_at_least_100()
config = MXFP8TrainingOpConfig(
    kernel_preference=KernelPreference.AUTO if can else KernelPreference.EMULATED,
    out_dtype=next(model.parameters()).dtype,
)
quantize_(
    model,
    config,
    # torchao 0.18 would drop a bias (pytorch/ao 4846).
    lambda module, name: (
        isinstance(module, torch.nn.Linear)
        and module.bias is None
        and name not in LEFT_OUT
    ),
)
"""
_NVFP4 = """\
import torch
from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import (
    NVFP4TrainingConfig,
)
from torchao.quantization import quantize_

LEFT_OUT = {left_out}
quantize_(
    model,
    NVFP4TrainingConfig(),
    lambda module, name: isinstance(module, torch.nn.Linear) and name not in LEFT_OUT,
)
"""
# By the format's name in torchao.
_CODE = {"tensorwise": _FLOAT8, "rowwise": _FLOAT8, "mxfp8": _MXFP8, "nvfp4": _NVFP4}
_WIDTH = 88  # the longest line that ruff leaves by default


def lines(form: str, left_out: Sequence[str]) -> str:
    """The code that converts ``model`` to a format; empty where torchao 0.18 cannot train in it.

    `left_out` are the names of the linear layers that stay as they are.
    """
    recipe = format_of(form).torchao
    return _CODE.get(recipe, "").format(left_out=set_of(left_out), recipe=recipe)


def set_of(names: Sequence[str]) -> str:
    """A set of names as Python code, such as ``{"head"}``: the value of ``LEFT_OUT``.

    If it is too long for one line, each name has a line.
    """
    if not names:
        return "set()"
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    one_line = "{" + ", ".join(quoted) + "}"
    if len(f"LEFT_OUT = {one_line}") <= _WIDTH:
        return one_line
    return "{\n" + "".join(f"    {name},\n" for name in quoted) + "}"


def converts(form: str, module: nn.Module | None) -> bool:
    """Whether the code for a format converts a module."""
    if type(module) is not nn.Linear:  # torchao converts no subclasses of it
        return False
    return form != "mxfp8" or module.bias is None  # `_MXFP8` leaves out layers with a bias


def converted_kind(form: str) -> str:
    """The modules that the code for a format converts, in words."""
    if form == "mxfp8":
        return "nn.Linear without a bias"
    return "nn.Linear"


def untried_reason(form: str, device: torch.device) -> str:
    """The reason why the code cannot be tried here; empty if it can.

    `device` has no effect in training; `torchao_inference.untried_reason` has the same argument.
    """
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if form == "nvfp4":
        kernels = "torchao's kernels for NVFP4 training"
        return f"{kernels} run only on Blackwell, where this report does not try them"
    return ""


def failure(call: ModelCall, code: str) -> str:
    """Try the code: convert a copy of the model and compute its gradients.

    Returns the error, such as ``TypeError: …``; empty if there was none.
    """
    step = Step(call, Recipe(TRAINING))

    def run() -> None:
        exec(code, {"model": step.model})
        step.call.result().backward()  # `Training` gives each call a loss

    return error_of(run)


def error_of(run: Callable[[], None]) -> str:
    """Run a function that uses torchao, without warnings and log; returns its error, or ``""``."""
    try:
        with nothing_logged(), warnings.catch_warnings(action="ignore"):
            run()
    except Exception as error:  # torchao raises any type for a model that it cannot convert
        return with_type(error)
    return ""

"""Predict how autocast to fp16 would run an op that overflowed in a model with fp16 weights."""

import functools

import torch
from torch import nn

from amp_lab.core.backends import BACKENDS

# Ops that autocast runs have other names than in its table: softmax runs _softmax.
_PREFIXES = ("_", "native_")
_SUFFIX = "_forward"


def autocast_around(module: nn.Module) -> torch.dtype | None:
    """The dtype of the autocast block that is open now for a module's device; None without one."""
    parameter = next(module.parameters(), None)
    device_type = "cpu" if parameter is None else parameter.device.type
    if device_type not in BACKENDS or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def runs_in_fp32(op: str, device_type: str) -> bool:
    """Whether autocast to fp16 casts the inputs of an op to fp32 on a type of device."""
    # "fp32_set_opt_dtype": sum, softmax and others, unless the call names a dtype.
    return _policies(op, device_type) in ({"fp32"}, {"fp32_set_opt_dtype"})


def what_autocast_does(op: str, device_type: str) -> str:
    """A clause that describes how autocast to fp16 runs an op that does not run in fp32.

    An example is ``on 'cuda', autocast runs bmm in fp16 as well``.
    """
    if device_type not in BACKENDS:
        return f"amp_lab does not know what autocast does on {device_type!r}"
    op_policies = _policies(op, device_type)
    if op_policies == {"lower_precision"}:
        return f"on {device_type!r}, autocast runs {op} in fp16 as well"
    if op_policies == {"banned"}:
        return f"on {device_type!r}, autocast raises an error for {op}"
    inputs = "the dtype of its inputs, which is fp16 after a linear or convolution layer"
    return f"on {device_type!r}, autocast leaves {op} in {inputs}"


@functools.cache
def _policies(op: str, device_type: str) -> set[str]:
    """The policies for an op in autocast's table, such as ``{"fp32"}``.

    Empty for an op that is not in it, for one that works in place, and for an unknown backend.
    """
    from amp_lab.tracing.op_table import policies  # it imports torch's fake tensors, which is slow

    if device_type not in BACKENDS or op.endswith("_"):
        return set()
    for name in _names_in_table(op):
        op_policies = policies(name, device_type, torch.float16)
        if op_policies:
            return op_policies
    return set()


def _names_in_table(op: str) -> list[str]:
    """The names under which an op may be in autocast's table: _softmax is softmax there."""
    names = [op, f"_{op}", op.removesuffix(_SUFFIX)]
    for prefix in _PREFIXES:
        names.append(op.removeprefix(prefix).removesuffix(_SUFFIX))
    return list(dict.fromkeys(names))

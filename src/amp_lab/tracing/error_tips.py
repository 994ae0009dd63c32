"""Remedies for torch's errors that low precision causes, on fake tensors and on real ones."""

import re
import traceback
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from amp_lab.core.cpu import NO_PRIMITIVE, NO_PRIMITIVE_REMEDY
from amp_lab.core.remedies import remedy
from amp_lab.tracing.kernel_limits import REMEDIES_BY_MESSAGE
from amp_lab.tracing.operands import remedies_for_writes

_NO_KERNEL = remedy(
    "dtype.no_kernel",
    "an op has no kernel for 16 bits on the device that the model runs on",
    "this op has no kernel for 16 bits: call .float() on its inputs",
    failure="AMP0023",
)
# Phrases of torch's errors for an op without a kernel for 16 bits.
_NO_KERNEL_SAYS = (
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "Low precision dtypes not supported",  # torch.linalg
    "must be either float or double dtype",  # quantile
)
NO_FAKE = remedy(
    "trace.no_fake",
    "a custom op of torch.library has no fake implementation",
    "write a function with the same arguments that returns empty results of the right shapes and "
    'dtypes, and decorate it with @torch.library.register_fake("{op}")',
)
_TIPS = {  # remedy by a phrase of the error's message
    "are unsafe to autocast": remedy(
        "dtype.bce",
        "binary cross-entropy of probabilities under autocast",
        "pass logits to binary_cross_entropy_with_logits instead",
        failure="AMP0022",
    ).text,
    "without overflow": remedy(
        "dtype.fill_value",
        "a mask is filled with a number outside the range of its dtype",
        "use torch.finfo(x.dtype).min (or .max) instead of the number",
        failure="AMP0004",
    ).text,
    "_to_copy.default encountered during backward but not found in storage": remedy(
        "dtype.selective_checkpoint",
        "regions of selective checkpointing use the same weight under autocast",
        "two regions of selective checkpointing (context_fn) use a weight that autocast has cast "
        "once. Open autocast with cache_enabled=False. For a forecast, open it in the model's "
        "forward, around the regions",
        failure="AMP0158",
    ).text,
    NO_PRIMITIVE: NO_PRIMITIVE_REMEDY,
    **dict.fromkeys(_NO_KERNEL_SAYS, _NO_KERNEL.text),
    **REMEDIES_BY_MESSAGE,
}
_CUSTOM_FUNCTION = remedy(
    "dtype.custom_function",
    "the backward of an autograd.Function mixes dtypes, because backward runs without autocast",
    "under autocast, decorate the forward of {name} with "
    "@torch.amp.custom_fwd(device_type={device!r}) and its backward with "
    "@torch.amp.custom_bwd(device_type={device!r})",
    failure="AMP0020",
)

_COPIED_VALUES = remedy(
    "dtype.copied_values",
    "torch.tensor copies the values of other tensors, but fake tensors have no values",
    "torch.tensor copies only values, so tensors before it get no gradient. Use "
    "torch.stack([...]) instead",
    failure="AMP0011",
)
# What an op of torch.library.custom_op raises on fake tensors.
_NO_FAKE_SAYS = re.compile(r"There was no fake impl registered for <CustomOpDef\(([^)]+)\)>")
# What torch.tensor raises for a list of fake tensors.
_NO_VALUES_SAYS = ("Found no NVIDIA driver", "its data is not allocated yet")


def tips_for(error: Exception, op: str, device_type: str) -> list[str]:
    """The sentences of the remedies for an error; empty if there is no remedy for the error.

    `op` is the op that failed, such as "addmm", or "" if the op is unknown. `device_type` is that
    of the model, such as "cuda".
    """
    message = str(error)
    tips = [tip for phrase, tip in _TIPS.items() if phrase in message]
    tips += remedies_for_writes(error, op, device_type)
    if op == "tensor" and any(phrase in message for phrase in _NO_VALUES_SAYS):
        tips.append(_COPIED_VALUES.text)
    if "dtype" in message:  # the backward of an `autograd.Function` may have mixed dtypes
        for name in _functions_without_autocast(error):
            tips.append(_CUSTOM_FUNCTION.sentence(name=name, device=device_type))
    return tips


def op_without_fake(error: Exception) -> str:
    """The name of a custom op without a fake implementation, such as ``mine::op``; "" if none.

    Ops of torch itself are left out, because users cannot write their fake implementations.
    """
    if isinstance(error, UnsupportedOperatorException):
        if error.func.namespace == "aten":
            return ""
        name, _, _ = error.func.name().partition(".")  # without the overload: "mine::op.default"
        return name
    match = _NO_FAKE_SAYS.match(str(error))
    if match is None:
        return ""
    return match[1]


def _functions_without_autocast(error: Exception) -> Iterator[str]:
    """The name of each `autograd.Function` whose backward is in the error's traceback.

    Left out are those whose forward has the decorator `torch.amp.custom_fwd`.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            continue
        if not hasattr(node, "_fwd_used_autocast"):  # which `custom_fwd` sets
            yield type(node).__name__.removesuffix("Backward")  # torch appends it to the name

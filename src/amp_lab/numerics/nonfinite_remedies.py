"""The remedies of `find_nonfinite` for an inf or a NaN, and the choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from amp_lab.core.remedies import Remedy
from amp_lab.numerics.autocast_effect import runs_in_fp32
from amp_lab.numerics.op_constants import FILLING
from amp_lab.numerics.op_remedies import (
    ATTENTION_KERNEL,
    BACKWARD,
    FORWARD,
    nonfinite_remedy,
)
from amp_lab.numerics.power_remedies import (
    BOTH_SIGNS,
    divides_by_both_signs,
    input_of,
    remedy_for_power,
)

if TYPE_CHECKING:
    from amp_lab.numerics.nonfinite_report import NonfiniteReport


# What was not finite before any op of the block ran, by the kind of tensor.
_BEFORE = {
    "parameter": nonfinite_remedy(
        "parameter",
        "a weight was inf or NaN when it was first used",
        "The weights were inf or NaN before their first use. If an optimizer step caused this, its "
        "gradients were inf or NaN, or the learning rate is too high. Go back to the last good "
        "checkpoint. In fp16 autocast, scaler.step(optimizer) skips such a step, but a plain "
        "optimizer.step() does not. In bf16 and fp32 nothing skips such a step: "
        "clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True) raises before the step.",
    ),
    "buffer": nonfinite_remedy(
        "buffer",
        "a buffer was inf or NaN when it was first used",
        "Check the code that writes this buffer, or the checkpoint that the buffer comes from.",
    ),
    "statistics": nonfinite_remedy(
        "statistics",
        "the running statistics of a norm were inf or NaN",
        "A batch with an inf or a NaN has updated the running statistics. Call "
        "reset_running_stats(), or go back to the last good checkpoint, and find that batch.",
        failure="AMP0007",
    ),
    "input": nonfinite_remedy(
        "input",
        "the model was given an inf or a NaN",
        "The input contained an inf or a NaN. Check the data and the preprocessing: missing "
        "values, a division by a standard deviation of 0, a cast to fp16 of values over 65504.",
        failure="AMP0112",
    ),
    "gradient": nonfinite_remedy(
        "gradient",
        "a gradient was inf or NaN before the backward pass",
        "The gradient is left from an earlier backward pass: call zero_grad() before this one.",
    ),
    "constant": nonfinite_remedy(
        "constant",
        "a tensor from outside the block was inf or NaN",
        "No op of this block made the inf or NaN. Check targets, constants, tensors from before "
        "the block, and memory from torch.empty that was never written.",
    ),
}

# Remedies that do not depend on the op.
_MASKED_SOFTMAX = nonfinite_remedy(
    "masked_softmax",
    "softmax or attention was given a row that is -inf everywhere",
    "A row is masked everywhere, so softmax divides 0 by 0. Leave one position of each row "
    "unmasked, or use masked_fill with torch.finfo(dtype).min instead of -inf. Do not add that "
    "number: the sum can be -inf again.",
    failure="AMP0110",
)
_MASKED = nonfinite_remedy(
    "masked",
    "a mask of -inf was multiplied by 0 or subtracted",
    "0 * -inf and -inf - -inf are NaN. Mask after the arithmetic, with torch.where or "
    "masked_fill, or fill in (do not add) a finite value such as torch.finfo(dtype).min.",
)
_NO_VALUES = nonfinite_remedy(
    "no_values",
    "an op was given an empty tensor",
    "The op got an empty tensor: the mean of no values is NaN. Skip empty batches.",
)
_LOSS_SCALE = nonfinite_remedy(
    "loss_scale",
    "a gradient overflowed while the loss was scaled",
    "The loss was scaled by {scale:g}. If only the scale makes the gradient overflow, GradScaler "
    "handles it: scaler.step(optimizer) skips the step, and scaler.update() lowers the scale. A "
    "plain optimizer.step() skips nothing. If the gradient still overflows at a scale of 1 "
    "(ScaleLog shows the scale), it is a real bug: follow the rest of this advice.",
    failure="AMP0144",
)
_BYPASSED = nonfinite_remedy(
    "bypassed",
    "optimizer.step() was called directly on the gradients of a scaled loss",
    "The code called optimizer.step() directly, although the loss was scaled. optimizer.step() "
    "skips no inf or NaN and does not divide by the scale, so the weights may be broken now: go "
    "back to the last good weights, and call scaler.step(optimizer) and then scaler.update() "
    "instead.",
    failure="AMP0131",
)
HALF_WEIGHTS = nonfinite_remedy(
    "half_weights",
    "trainable weights are fp16, and a GradScaler is used",
    "The trainable weights are fp16. GradScaler refuses their gradients (Attempting to "
    "unscale FP16 gradients), so it neither skips a step nor lowers the scale. Keep these weights "
    "in fp32: load or make the model with dtype=torch.float32, or convert it with model.float(). "
    "Then run the forward pass under torch.autocast. Or use bf16 without a GradScaler: "
    "model.bfloat16(), with inputs in bf16.",
    failure="AMP0009",
)
MASK_VALUE = nonfinite_remedy(
    "mask_value",
    "a number in the code, such as a mask of -1e9, does not fit the dtype",
    "A number in the code is too large for the dtype of this tensor, as -1e9 is for fp16. If it "
    "is a mask, fill in the lowest number that the dtype has: "
    "scores.masked_fill(mask, torch.finfo(scores.dtype).min). Do not add that number: the sum can "
    "be -inf again.",
    failure="AMP0004",
)
_EPS = nonfinite_remedy(
    "eps",
    "an eps that protects a division, a root or a logarithm is 0 in the dtype",
    "The eps of {eps:g} is 0 in fp16, so it has no effect. Compute this part in fp32, on "
    "x.float(), with an eps of 1e-3 or more: where x is 0, a gradient can be 1 / eps, and this "
    "gradient is multiplied by the loss scale and cast back to fp16. An eps of 1e-4 without the "
    "cast is often not enough: the derivative of 1 / x is 1 / x ** 2, and 1e8 is inf in fp16. In "
    "inference, fp32 alone is enough: you can keep the eps. If the next layer has fp16 weights, "
    "cast the result back: .to(x.dtype).",
    failure="AMP0005",
)

# What exceeds 65504 in fp16. How to compute a part in fp32 depends on where its weights are.
_OVERFLOW = "{what} exceeds 65504, the largest number of fp16. Use bf16, which has fp32's range"
_OVERFLOW_AUTOCAST = nonfinite_remedy(
    "fp16_overflow.autocast",
    "a value exceeded 65504 under autocast, with fp32 weights",
    f"{_OVERFLOW}, or compute this part in fp32, up to where its values are small again: with "
    "torch.autocast(device_type, enabled=False), on x.float().",
    failure="AMP0001",
)
_IN_BF16 = f"{_OVERFLOW} (model.bfloat16(), with inputs in bf16)"
_PART = (
    "part.float(), called with x.float(), or x.float() before an op without weights; the result "
    "fits back into fp16 only where its values are small again"
)
_OVERFLOW_CAST = nonfinite_remedy(
    "fp16_overflow.cast",
    "a value exceeded 65504 with weights in fp16, in an op that autocast leaves in fp16",
    f"{_IN_BF16}, or compute this part in fp32: {_PART}. Do not rely on autocast to fp16 instead: "
    "{autocast}.",
    failure="AMP0001",
)
_OVERFLOW_FP32_OP = nonfinite_remedy(
    "fp16_overflow.fp32_op",
    "a value exceeded 65504 with weights in fp16, in an op that autocast runs in fp32",
    f"{_IN_BF16}. Or keep the weights in fp32 and use torch.autocast, which on {{device!r}} runs "
    f"{{op}} in fp32. To compute one part in fp32: {_PART}.",
    failure="AMP0001",
)
_OVERFLOW_GRADIENT = nonfinite_remedy(
    "fp16_overflow.gradient",
    "a gradient exceeded 65504 with weights in fp16",
    f"{_IN_BF16}. Or keep the weights in fp32, and train under torch.autocast with a GradScaler, "
    "which skips such a step and lowers the scale of the loss until the gradients fit.",
)
_SCORES = nonfinite_remedy(
    "attention_scores",
    "a product of activations, such as attention scores, exceeded 65504",
    "If these are attention scores: divide the queries by sqrt(d) before the matmul, or call "
    "F.scaled_dot_product_attention.",
)
_RANGE = nonfinite_remedy(
    "range",
    "a result exceeded the range of bf16 or fp32",
    "The result exceeds the range of {dtype}: find out why the inputs are so large, or whether "
    "this op is infinite at one of them.",
)

_NEAR_ZERO = 1e-2
"""A divisor of a larger magnitude makes no result infinite by itself. The remedies add as much."""

_ATTENTION_NODES = ("scaleddotproduct", "flashattention", "efficientattention", "cudnnattention")
"""Beginnings of the names of autograd's nodes for attention."""

_DERIVATIVE = nonfinite_remedy(
    "backward.other",
    "the backward pass of another op",
    "The derivative is infinite, or this is 0 * inf: before the op, move its input away from "
    "values at which the derivative is infinite. A torch.where after the op does not help.",
)
_UNKNOWN = nonfinite_remedy(
    "other",
    "another op made a NaN",
    "The op computed 0 * inf, inf - inf or 0 / 0: find out which input is zero or very large, and "
    "why.",
)


def remedies_for(report: NonfiniteReport) -> list[Remedy]:
    """The remedies for a finding, in the order in which to print them."""
    remedies = _remedies_for_cause(report)
    if report.bypassed:
        return [_BYPASSED, *remedies]
    return remedies


def _remedies_for_cause(report: NonfiniteReport) -> list[Remedy]:
    """What to do about the inf or NaN itself, the most important first."""
    if report.phase == "before":
        return [_remedy_before_ops(report)]
    # A mask, an empty input or a lost eps is the cause, in whatever op and pass it shows.
    if report.placed_by:
        return [_remedy_for_mask(report)]
    if report.value.kinds == {"NaN"} and any(not summary.values for summary in report.inputs):
        return [_NO_VALUES]
    if report.eps is not None:
        return [_EPS]
    if report.phase == "backward":
        return _remedies_in_backward(report)
    return _remedies_in_forward(report)


def _remedy_before_ops(report: NonfiniteReport) -> Remedy:
    """What to do about a tensor that was not finite before any op."""
    if report.tensor == "buffer" and "running_" in report.name:
        return _BEFORE["statistics"]
    return _BEFORE[report.tensor]


def _remedy_for_mask(report: NonfiniteReport) -> Remedy:
    """What to do about a mask of -inf that an op turned into NaN."""
    kernel = report.kernel or ""
    if "softmax" in kernel or "scaled_dot_product" in kernel:
        return _MASKED_SOFTMAX
    return _MASKED


def _remedies_in_backward(report: NonfiniteReport) -> list[Remedy]:
    """What to do about an op of a backward pass."""
    remedies = []
    if report.loss_scale is not None and _overflows(report):
        remedies.append(HALF_WEIGHTS if report.half_weights else _LOSS_SCALE)
    op_remedy = _remedy_for_derivative(report)
    if op_remedy is not None:
        remedies.append(op_remedy)
    if HALF_WEIGHTS in remedies:  # this remedy leads to fp32 or bf16, so it covers an overflow too
        return remedies
    if _overflows_fp16(report):  # may also be at fault beside the derivative of the op
        remedies.append(_remedy_for_fp16_overflow(report))
    elif op_remedy is None:
        remedies.append(_DERIVATIVE)
    return remedies


def _remedy_for_derivative(report: NonfiniteReport) -> Remedy | None:
    """The remedy for this op's derivative; None if the derivative is not at fault, or unknown."""
    if _op_starts_with(report, "div", "reciprocal", "pow") and divides_by_both_signs(report):
        return BOTH_SIGNS
    if _op_starts_with(report, *_ATTENTION_NODES):
        return None if _overflows_fp16(report) else ATTENTION_KERNEL
    if not _has_infinite_derivative(report):
        return None
    return _find_by_op(report, BACKWARD)


def _has_infinite_derivative(report: NonfiniteReport) -> bool:
    """Whether the derivative may be at fault, and not a large gradient alone."""
    kernel = (report.kernel or "").strip("_")
    if _op_starts_with(report, "pow"):
        # The backward pass of a power also runs a product with the gradient.
        return kernel.startswith("pow")
    divisor = input_of(report, "other")
    if kernel.startswith("div") and divisor is not None:
        return divisor.low < _NEAR_ZERO and divisor.high > -_NEAR_ZERO  # it may have such a value
    return True


def _remedies_in_forward(report: NonfiniteReport) -> list[Remedy]:
    """What to do about an op of a forward pass."""
    if report.constant is not None and _overflows(report):
        # Only a mask is -inf alone, or filled in; data that overflow may have either sign.
        if report.value.kinds == {"-inf"} or _op_starts_with(report, *FILLING):
            return [MASK_VALUE]
        return [MASK_VALUE, *_remedies_for_result(report)]
    return _remedies_for_result(report)


def _remedies_for_result(report: NonfiniteReport) -> list[Remedy]:
    """What to do about a result that is out of range, or where the op is not defined."""
    op_remedy = _remedy_for_forward_op(report)
    if _overflows_fp16(report) and not _is_at_a_pole(report):
        remedies = [_remedy_for_fp16_overflow(report)]
        # The remedies for these ops are more specific than a wider format, so they come first.
        if op_remedy is not None and _op_starts_with(report, "exp", "pow", "to_copy"):
            remedies.insert(0, op_remedy)
        if _op_starts_with(report, "bmm", "baddbmm", "matmul"):
            remedies.append(_SCORES)
        return remedies
    if op_remedy is not None:
        return [op_remedy]
    if report.inputs and _overflows(report):
        return [_RANGE]
    return [_UNKNOWN]


def _remedy_for_forward_op(report: NonfiniteReport) -> Remedy | None:
    """The remedy for this op; None if there is none."""
    if _op_starts_with(report, "pow"):
        return remedy_for_power(report)
    if divides_by_both_signs(report):
        return BOTH_SIGNS
    return _find_by_op(report, FORWARD)


def _remedy_for_fp16_overflow(report: NonfiniteReport) -> Remedy:
    """What to do about a value over 65504 in fp16."""
    if report.weights is not torch.float16:
        return _OVERFLOW_AUTOCAST
    if report.phase == "backward":
        return _OVERFLOW_GRADIENT
    if runs_in_fp32(report.op or "", report.value.device_type):
        return _OVERFLOW_FP32_OP
    return _OVERFLOW_CAST


def _op_starts_with(report: NonfiniteReport, *starts: str) -> bool:
    """Whether the name of the op begins with one of `starts`.

    It is compared in lower case, without underscores: ``softmax`` fits ``_softmax``, and ``sqrt``
    fits autograd's ``SqrtBackward0``.
    """
    return (report.op or "").lower().strip("_").startswith(starts)


def _find_by_op(report: NonfiniteReport, remedies: dict[str, Remedy]) -> Remedy | None:
    """The first remedy of a table, `FORWARD` or `BACKWARD`, whose key fits the name of the op.

    A key such as ``div reciprocal`` has the beginnings of names; None if no key fits.
    """
    for starts, remedy in remedies.items():
        if _op_starts_with(report, *starts.split(" ")):
            return remedy
    return None


def _overflows(report: NonfiniteReport) -> bool:
    """Whether a value is inf or -inf; a result of NaN alone comes from an undefined operation."""
    return not report.value.kinds.isdisjoint({"inf", "-inf"})


def _overflows_fp16(report: NonfiniteReport) -> bool:
    """Whether a value of an fp16 tensor is inf or -inf."""
    return report.value.dtype is torch.float16 and _overflows(report)


def _is_at_a_pole(report: NonfiniteReport) -> bool:
    """Whether an input is zero where that alone makes the result infinite, in any precision."""
    if _op_starts_with(report, "div"):
        divisor = input_of(report, "other")
        return divisor is not None and divisor.low <= 0 <= divisor.high
    argument = input_of(report, "self")
    may_be_zero = argument is not None and argument.low <= 0
    if _op_starts_with(report, "pow"):
        has_negative_exponent = (
            report.exponent is not None and report.exponent < 0
        )  # None: a tensor
        return may_be_zero and has_negative_exponent
    return may_be_zero and _op_starts_with(report, "log", "reciprocal", "rsqrt")

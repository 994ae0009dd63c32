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
    EXPONENT,
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
        "The weights were already inf or NaN when they were first used. If an optimizer step "
        "caused this, its gradients were inf or NaN, or the learning rate is too high. Load the "
        "last good checkpoint. In fp16, use scaler.step(optimizer), which skips such a step. In "
        "bf16 and fp32, call clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True), "
        "which raises before the step.",
    ),
    "trained input": nonfinite_remedy(
        "trained_input",
        "the model was given a leaf tensor with requires_grad that is inf or NaN",
        "This input is a leaf that requires a gradient, such as a soft prompt, and was inf or NaN "
        "before its first use. If an optimizer trains it, run find_nonfinite over the step before: "
        "a report on the optimizer's step names the cause. If no optimizer trains it, check the "
        "data.",
    ),
    "buffer": nonfinite_remedy(
        "buffer",
        "a buffer was inf or NaN when it was first used",
        "The buffer was already inf or NaN when it was first used. Check the code that writes "
        "this buffer, or the checkpoint that it was loaded from.",
    ),
    "statistics": nonfinite_remedy(
        "statistics",
        "the running statistics of a norm were inf or NaN",
        "A batch with an inf or a NaN has updated the running statistics. Find that batch. Then "
        "call reset_running_stats(), or load the last good checkpoint.",
        failure="AMP0007",
    ),
    "input": nonfinite_remedy(
        "input",
        "the model was given an inf or a NaN",
        "The input contained an inf or a NaN. Check the data and the preprocessing for missing "
        "values, a division by a standard deviation of 0, or a cast to fp16 of values over 65504.",
        failure="AMP0112",
    ),
    "gradient": nonfinite_remedy(
        "gradient",
        "a gradient was inf or NaN before the backward pass",
        "The gradient is left over from an earlier backward pass. Call zero_grad() before this "
        "one.",
    ),
    "constant": nonfinite_remedy(
        "constant",
        "a tensor from outside the block was inf or NaN",
        "No op in this block made the inf or NaN. Check targets, constants, tensors from before "
        "the block, and memory from torch.empty that was never written.",
    ),
}

_HALF_PARAMETER = nonfinite_remedy(
    "half_parameter",
    "a weight in fp16 was inf or NaN when it was first used",
    "The weights are fp16, and were inf or NaN before their first use. If Adam or another "
    "optimizer with an eps trains them, the step before probably divided by 0: the square of a "
    "small gradient and the eps of 1e-8 are both 0 in fp16, even if all gradients are finite. Go "
    "back to weights that are finite, keep them in fp32 (model.float() before you create the "
    "optimizer), and let autocast cast them",
    failure="AMP0121",
)
_STEP_EPS = nonfinite_remedy(
    "step.eps",
    "an optimizer with an eps, such as Adam, made a parameter in fp16 inf or NaN",
    "{op} divided by 0: it works in fp16, where the square of a small gradient and the eps of "
    "{eps:g} are both 0. Go back to weights that are finite, and keep what you train in fp32: "
    "model.float(), or tensor.float().requires_grad_() for a single tensor, before you create the "
    "optimizer. Let autocast cast it; frozen weights may stay in fp16. Do not raise the eps: then "
    "weights with small gradients hardly change",
    failure="AMP0121",
)
_STEP = nonfinite_remedy(
    "step",
    "an optimizer's step made inf or NaN of a finite gradient",
    "The gradient was finite, and the optimizer's step made the weights inf or NaN: the learning "
    "rate is too high, or the optimizer's state has an inf or NaN from an earlier step. Go back to "
    "the last good checkpoint of weights and optimizer, and lower the learning rate.",
)

# Remedies that do not depend on the op.
_MASKED_SOFTMAX = nonfinite_remedy(
    "masked_softmax",
    "softmax or attention was given a row that is -inf everywhere",
    "All positions of a row are masked, so softmax gets no finite value. Leave at least one "
    "position of each row unmasked, or use masked_fill with torch.finfo(dtype).min instead of "
    "-inf. Do not add torch.finfo(dtype).min to the scores: the sum can overflow to -inf.",
    failure="AMP0110",
)
_MASKED = nonfinite_remedy(
    "masked",
    "a mask of -inf was multiplied by 0 or subtracted",
    "0 * -inf and -inf - -inf are NaN. Apply the mask after the arithmetic, with torch.where or "
    "masked_fill. Or fill in a finite value, such as torch.finfo(dtype).min, instead of -inf. Do "
    "not add such a value.",
)
_NO_VALUES = nonfinite_remedy(
    "no_values",
    "an op was given an empty tensor",
    "The op got an empty tensor, and the mean of no values is NaN. Skip empty batches.",
)
_LOSS_SCALE = nonfinite_remedy(
    "loss_scale",
    "a gradient overflowed while the loss was scaled",
    "The loss was scaled by {scale:g}. If only the scale makes the gradient overflow, GradScaler "
    "handles this: scaler.step(optimizer) skips the step, and scaler.update() lowers the scale. A "
    "plain optimizer.step() does not skip the step. If the gradient still overflows at a scale of "
    "1, the scale is not the cause: follow the rest of this advice. ScaleLog shows the scale.",
    failure="AMP0144",
)
_BYPASSED = nonfinite_remedy(
    "bypassed",
    "optimizer.step() was called directly on the gradients of a scaled loss",
    "The loss was scaled, but the code called optimizer.step() directly. A direct call does not "
    "divide by the scale and does not skip inf or NaN, so the weights may be broken now. Load the "
    "last good weights, and call scaler.step(optimizer) and scaler.update() instead.",
    failure="AMP0131",
)
HALF_WEIGHTS = nonfinite_remedy(
    "half_weights",
    "trainable weights are fp16, and a GradScaler is used",
    "The trainable weights are fp16. GradScaler.unscale_ raises an error for their gradients "
    "(Attempting to unscale FP16 gradients). Keep these weights in fp32: create or load the model "
    "with dtype=torch.float32, or call model.float(), and run the forward pass under "
    "torch.autocast. Or use bf16 without a GradScaler: model.bfloat16() and bf16 inputs.",
    failure="AMP0009",
)
MASK_VALUE = nonfinite_remedy(
    "mask_value",
    "a number in the code, such as a mask of -1e9, does not fit the dtype",
    "A number in the code is too large for the dtype of this tensor, as -1e9 is for fp16. If the "
    "number is a mask, fill in the lowest number of the dtype: scores.masked_fill(mask, "
    "torch.finfo(scores.dtype).min). Do not add it to the scores: the sum can overflow to -inf.",
    failure="AMP0004",
)
_EPS = nonfinite_remedy(
    "eps",
    "an eps that protects a division, a root or a logarithm is 0 in the dtype",
    "The eps of {eps:g} is 0 in fp16, so it has no effect. Compute this part in fp32, on "
    "x.float(), with an eps of 1e-3 or more. A smaller eps can fail in training: where x is 0, "
    "the gradient can be 1 / eps, and the loss scale multiplies it before the cast back to fp16. "
    "Do not only raise the eps in fp16: with 1e-4, the derivative of 1 / x is 1e8, which is inf "
    "in fp16. For inference, and for values without a gradient such as targets, fp32 is enough, "
    "and you can keep the eps. If the next layer has fp16 "
    "weights, cast the result back with .to(x.dtype).",
    failure="AMP0005",
)

# What exceeds 65504 in fp16. How to compute a part in fp32 depends on where its weights are.
_OVERFLOW = (
    "{what} exceeds 65504, the largest number in fp16. Use bf16, which has nearly the range of fp32"
)
_OVERFLOW_AUTOCAST = nonfinite_remedy(
    "fp16_overflow.autocast",
    "a value exceeded 65504 under autocast, with fp32 weights",
    f"{_OVERFLOW}. Or compute this part in fp32 until the values are below 65504 again: use "
    "torch.autocast(device_type, enabled=False) and x.float().",
    failure="AMP0001",
)
_OVERFLOW_SUM = nonfinite_remedy(
    "fp16_overflow.sum",
    "a sum, mean or norm of many fp16 values exceeded 65504",
    "{what} exceeds 65504, the largest number in fp16, because this op adds many values. Compute "
    "the formula in fp32, from x.float() to its end: for a loss, call .float() on the output of "
    "the model. bf16 has the range too, but only 8 bits, so a loss such as 1 - x / y can be wrong "
    "by many percent",
    failure="AMP0006",
)
_WEIGHTS_GREW = nonfinite_remedy(
    "weights_grew",
    "a weight of more than 500 took part in an overflow",
    "A weight reaches {weight:.3g}, which is unusually large. If an optimizer step made it so "
    "large, bf16 or fp32 does not help: the step was too big. If the loss is scaled without a "
    "GradScaler, check that every gradient is divided by the loss scale before optimizer.step(), "
    "in all parameter groups. Adam hides a forgotten division, but with SGD the steps become too "
    "large. Otherwise, lower the learning rate, and load weights from before this step.",
    failure="AMP0131",
)
_IN_BF16 = f"{_OVERFLOW} (model.bfloat16() and bf16 inputs)"
_PART = (
    "compute this part in fp32: call part.float() on x.float(). An op without weights needs only "
    "x.float(). Cast back to fp16 when the values are below 65504 again"
)
_OVERFLOW_HARDCODED_FP16 = nonfinite_remedy(
    "fp16_overflow.fixed",
    "a value exceeded 65504 in fp16 inside a bf16 autocast block",
    "{what} exceeds 65504, the largest number of fp16, although autocast uses bf16 here: this code "
    "sets fp16 itself, as with dtype=torch.float16. Replace this dtype by "
    "torch.get_autocast_dtype(x.device.type)",
    failure="AMP0291",
)
_OVERFLOW_FP16_OP = nonfinite_remedy(
    "fp16_overflow.cast",
    "a value exceeded 65504 with weights in fp16, in an op that autocast leaves in fp16",
    f"{_IN_BF16}. Or {_PART}. Autocast to fp16 does not help: {{autocast}}.",
    failure="AMP0001",
)
_OVERFLOW_FP32_OP = nonfinite_remedy(
    "fp16_overflow.fp32_op",
    "a value exceeded 65504 with weights in fp16, in an op that autocast runs in fp32",
    f"{_IN_BF16}. Or keep the weights in fp32 and use torch.autocast: on {{device!r}}, autocast "
    f"runs {{op}} in fp32. Or {_PART}.",
    failure="AMP0001",
)
_OVERFLOW_GRADIENT = nonfinite_remedy(
    "fp16_overflow.gradient",
    "a gradient exceeded 65504 with weights in fp16",
    f"{_IN_BF16}. Or keep the weights in fp32 and train under torch.autocast with a GradScaler. "
    "The GradScaler skips such a step and lowers the loss scale until the gradients fit.",
)
_SCORES = nonfinite_remedy(
    "attention_scores",
    "a product of activations, such as attention scores, exceeded 65504",
    "If these are attention scores, divide the queries by sqrt(d) before the matmul, or call "
    "F.scaled_dot_product_attention.",
)
_RANGE = nonfinite_remedy(
    "range",
    "a result exceeded the range of bf16 or fp32",
    "The result exceeds the range of {dtype}, or the op is infinite at an input. Find out why the "
    "inputs are so large, or where the input at which the op is infinite comes from.",
)

_ADDING = ("sum", "mean", "norm", "linalg_vector_norm", "cumsum")
"""Beginnings of the names of ops that add the values of a tensor."""

_LARGE_WEIGHT = 500
"""Weights of a layer that learns are smaller."""

_LAYERS = ("Linear", "Conv")
"""Beginnings of the names of layers whose op gets the weight as ``weight`` or ``mat2``."""

_NEAR_ZERO = 1e-2
"""A divisor of a larger magnitude makes no result infinite by itself. The remedies add as much."""

_ATTENTION_NODES = ("scaleddotproduct", "flashattention", "efficientattention", "cudnnattention")
"""Beginnings of the names of autograd's nodes for attention."""

_ONLY_AT_POLES = ("logit", "atanh", "erfinv")
"""Beginnings of the names of ops that are small except where they are infinite."""

_DIVISOR_NAMES = {"div": "other", "addcdiv": "tensor2", "xlogy": "other"}
"""By the beginning of an op's name, the input at whose zeros the op is infinite."""

_DERIVATIVE = nonfinite_remedy(
    "backward.other",
    "the backward pass of another op",
    "The derivative is infinite at this input, its product with the gradient is too large, or the "
    "backward pass computed 0 * inf. Before the op, move the input away from values at which the "
    "derivative is infinite. A torch.where after the op does not help.",
)
_UNKNOWN = nonfinite_remedy(
    "other",
    "another op made a NaN",
    "The op is not defined at an input, or it computed 0 * inf, inf - inf or 0 / 0. Find out why "
    "an input is zero, very large or outside of the op's range.",
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
    if report.phase == "step":
        return [_STEP if report.eps is None else _STEP_EPS]
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
    if report.tensor == "parameter" and report.value.dtype is torch.float16:
        return _HALF_PARAMETER
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
    if _op_starts_with(report, *_ATTENTION_NODES):
        return None if _overflows_fp16(report) else ATTENTION_KERNEL
    if not _has_infinite_derivative(report):
        return None
    if _op_starts_with(report, "div", "reciprocal", "pow") and divides_by_both_signs(report):
        return BOTH_SIGNS
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
        if large_weight(report) is not None:
            remedies.insert(0, _WEIGHTS_GREW)
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
    if _op_starts_with(report, "exp2"):
        return EXPONENT
    if _is_too_large(report):
        return None
    if divides_by_both_signs(report):
        return BOTH_SIGNS
    return _find_by_op(report, FORWARD)


def _remedy_for_fp16_overflow(report: NonfiniteReport) -> Remedy:
    """What to do about a value over 65504 in fp16."""
    is_forward = report.phase == "forward"
    if is_forward and report.module is None and _op_starts_with(report, *_ADDING):
        return _OVERFLOW_SUM
    if report.weights is not torch.float16:
        # Autocast to bf16 makes no fp16 values, so the user's code casts to fp16 itself.
        if report.autocast is torch.bfloat16 and report.phase == "forward":
            return _OVERFLOW_HARDCODED_FP16
        return _OVERFLOW_AUTOCAST
    if report.phase == "backward":
        return _OVERFLOW_GRADIENT
    if runs_in_fp32(report.op or "", report.value.device_type):
        return _OVERFLOW_FP32_OP
    return _OVERFLOW_FP16_OP


def large_weight(report: NonfiniteReport) -> float | None:
    """The largest magnitude in the weight of a layer, if it is unusually large; else None."""
    if report.phase != "forward" or not (report.module_type or "").startswith(_LAYERS):
        return None
    weight = input_of(report, "weight") or input_of(report, "mat2")
    if weight is None:
        return None
    largest = max(abs(weight.low), abs(weight.high))
    return largest if largest > _LARGE_WEIGHT else None


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


def _is_too_large(report: NonfiniteReport) -> bool:
    """Whether the result of a division, or of a variance, is too large for its dtype."""
    if not _overflows(report) or _op_starts_with(report, "std", "var"):
        return _overflows(report)
    divisor = None
    if _op_starts_with(report, "div"):
        divisor = input_of(report, "other")
    elif _op_starts_with(report, "reciprocal"):
        divisor = input_of(report, "self")
    return divisor is not None and not divisor.low <= 0 <= divisor.high


def _is_at_a_pole(report: NonfiniteReport) -> bool:
    """Whether an input alone, such as a zero, makes the result infinite, in any precision."""
    if _op_starts_with(report, *_ONLY_AT_POLES):
        return True
    for op, name in _DIVISOR_NAMES.items():
        if _op_starts_with(report, op):
            divisor = input_of(report, name)
            return divisor is not None and divisor.low <= 0 <= divisor.high
    argument = input_of(report, "self")
    may_be_zero = argument is not None and argument.low <= 0
    if _op_starts_with(report, "pow"):
        exponent = report.exponent  # None if it is a tensor
        return may_be_zero and exponent is not None and exponent < 0
    return may_be_zero and _op_starts_with(report, "log", "reciprocal", "rsqrt")

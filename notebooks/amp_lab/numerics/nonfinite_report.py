"""What `find_nonfinite` found, in words, and what to do about it."""

import textwrap
from dataclasses import dataclass

import torch

from amp_lab.numerics.tensor_summary import TensorSummary
from amp_lab.report import dtype_name


@dataclass(frozen=True, repr=False, kw_only=True)
class NonfiniteReport:
    """Where the first inf or NaN came from; `str` of it is made to be read."""

    phase: str  # ``forward``, ``backward``, or ``before``: it was so when it was first used
    module: str | None  # qualified name, "" for the model itself; None: outside, as in a loss
    module_type: str | None
    call: int  # which call of that module, from 1 in each forward pass; 0 without one
    op: str | None = None  # ``log``; backward, autograd's ``LogBackward0``; before any op, None
    kernel: str | None = None  # the op that the backward of `op` ran; in forward the same as `op`
    tensor: str  # ``output``, ``gradient``, ``parameter``, ``buffer``, ``input`` or ``constant``
    name: str  # of a parameter or buffer its qualified name, else its place
    value: TensorSummary  # of the tensor that is not finite
    inputs: tuple[TensorSummary, ...] = ()  # without what the op wrote into: its old value is gone
    line: str | None = None  # of your code that called the op, where there was one
    reached: str = ""  # what it spread to: why it counts
    loss_scale: float | None = None  # what a `GradScaler` had multiplied the loss by, if one did
    placed_by: str | None = None  # what had put a -inf there that this op turned into a NaN
    placed: bool = False  # whether it was written there on purpose, as a mask of -inf is
    number: int = 0  # how many there were before it

    @property
    def advice(self) -> str:
        """What to do about it: what the first of the rules says that fits."""
        if self.phase == "before":
            running = self.tensor == "buffer" and "running_" in self.name
            return _BEFORE["statistics" if running else self.tensor]
        # A mask, or an empty input, is the reason whatever the op, and in backward too.
        if self.placed_by:
            kernel = self.kernel or ""
            is_softmax = "softmax" in kernel or "scaled_dot_product" in kernel
            return _MASKED_SOFTMAX if is_softmax else _MASKED
        if self.value.kinds == {"NaN"} and any(not summary.values for summary in self.inputs):
            return "It was given no values: the mean of nothing is NaN. Skip empty batches."
        return _on_backward(self) if self.phase == "backward" else _on_forward(self)

    @property
    def where(self) -> str:
        """The module in words."""
        if self.module is None:
            return "outside the model"
        name = repr(self.module) if self.module else "the model itself"
        text = f"{name} ({self.module_type})"
        return f"{text}, call {self.call}" if self.call > 1 else text

    @property
    def place(self) -> str:
        """What was not finite first, in a line."""
        if self.phase == "before":
            return f"{self.tensor} {self.name!r}"
        return f"{self.op}: {self.where}"

    def __str__(self) -> str:
        kinds = " and ".join(sorted(self.value.kinds, reverse=True))
        head = f"{kinds} made in {self.phase} by {self.place}"
        if self.phase == "before":
            head = f"{kinds} in {self.place}, before any op: {self.where}"
        backward = self.phase == "backward"
        rows = [
            ("kernel", self.kernel if backward else None),
            (self.tensor, str(self.value)),
            *((f"from {summary.name}", str(summary)) for summary in self.inputs[:6]),
            ("-inf from", self.placed_by),
            ("line", self.line),
            ("loss scale", f"{self.loss_scale:g}" if backward and self.loss_scale else None),
            ("reached", self.reached),
            ("what to do", self.advice),
        ]
        rows = [(label, text) for label, text in rows if text]
        width = max(len(label) for label, _ in rows)
        lines = [head]
        for label, text in rows:
            start, rest = f"  {label:<{width}}  ", " " * (width + 4)
            lines += textwrap.wrap(text, 98, initial_indent=start, subsequent_indent=rest)
        return "\n".join(lines)

    __repr__ = __str__


_OVERFLOW = (
    "{} exceeds 65504, the largest fp16: use bf16, or compute this part in fp32 "
    "(torch.autocast(device_type, enabled=False), with inputs.float())."
)
_SCORES = (
    " Of attention scores: divide the queries by sqrt(d) before the product, or call "
    "F.scaled_dot_product_attention."
)
_BEFORE = {  # by the kind of tensor that was so before any op
    "parameter":
        "The weights were broken before they were used. If an optimizer step did it: the learning "
        "rate is too high, or it took gradients that are not finite (with fp16: step through "
        "GradScaler). Go back to the last good checkpoint and watch the step that breaks it.",
    "buffer": "Look at what wrote this buffer, or at the checkpoint it came from.",
    "statistics":
        "The running statistics took in a batch that was not finite: call reset_running_stats(), "
        "or go back to the last good checkpoint, and find that batch.",
    "input":
        "The model was given it. Look at the data and what prepares them: missing values, a "
        "division by a standard deviation of 0, a cast to fp16 of values over 65504.",
    "gradient": "It is left from an earlier backward pass: call zero_grad() before this one.",
    "constant":
        "No op of this block made it: look at targets, constants, what was computed before, and "
        "memory from torch.empty that was never written.",
}  # fmt: skip
_MASKED_SOFTMAX = (
    "A row is masked everywhere, so softmax divides 0 by 0. Leave one position of each row "
    "unmasked, or fill the masked places, with masked_fill, with torch.finfo(dtype).min instead "
    "of -inf. Do not add that number: the sum can be -inf again."
)
_MASKED = (
    "0 * -inf and -inf - -inf are NaN. Mask after the arithmetic, with torch.where or "
    "masked_fill, or fill in (do not add) a finite value such as torch.finfo(dtype).min."
)
# By how the op's name begins, so that the longer of two comes first.
_BACKWARD = {
    "sqrt": "The derivative of sqrt is infinite at 0: torch.sqrt(x + eps).",
    "rsqrt": "The derivative of rsqrt is infinite at 0: torch.rsqrt(x + eps).",
    "pow": "The derivative of a power below 1 is infinite at 0: (x + eps) ** p.",
    "log": "The derivative of log is infinite at 0: clamp its input. Where torch.where discards "
           "the result, replace the input before the log as well; 0 * inf is NaN.",
    "div": "A division by (nearly) zero, whose derivative is larger still: add an eps.",
    "norm": "The derivative of this norm is infinite or undefined at 0: add an eps inside.",
    "linalg": "Undefined at 0, at equal eigenvalues or singular values: add an eps.",
    "acos asin": "The derivative is infinite at -1 and 1: clamp the input inside of them.",
    "": "An infinite derivative, or 0 * inf: keep the input of this op away from where its "
        "derivative is infinite, before the op; torch.where behind it does not help.",
}  # fmt: skip
_FORWARD = {
    "log_softmax": "Look at the logits: a row is infinite, or masked everywhere.",
    "logit": "Keep the input inside (0, 1): torch.logit(x.float(), eps=1e-6). Without the cast, "
             "1 - eps is 1 in fp16 and bf16.",
    "log": "The log of 0 is -inf, and of a negative number NaN: clamp the input "
           "(x.clamp_min(1e-6)), or stay in log space: log_softmax, logsigmoid, "
           "binary_cross_entropy_with_logits.",
    "xlogy": "The logarithm of a negative number: clamp the second argument.",
    "div": "A division by zero: add an eps to the divisor or clamp it (F.normalize has one). In "
           "fp16 an eps below 6e-8 is zero itself.",
    "reciprocal": "A division by zero: clamp the input away from 0 (x.clamp_min(eps)).",
    "rsqrt": "A division by zero, or the root of a negative number: torch.rsqrt(x + eps).",
    "sqrt": "The root of a negative number: clamp the input (x.clamp_min(0)).",
    "pow": "A negative base with a fractional exponent, zero with a negative one, or a result out "
           "of range: clamp the base.",
    "exp": "The exponential overflows fp16 from 11.1 on, and fp32 and bf16 from 88.7: subtract the "
           "largest value first, as softmax and logsumexp do, or use softplus.",
    "acos asin": "Its input must lie in [-1, 1]: clamp it, inside of 1 if gradients are needed.",
    "softmax": "A row holds only -inf, or an inf: look at the scores.",
    "std": "The deviation of a single value is NaN: use correction=0, or more values.",
    "var": "The variance of a single value is NaN: use correction=0, or more values.",
    "nll_loss": "The mean over no targets: all of them are ignore_index, or the class weights "
                "are 0.",
    "to_copy": "The value does not fit the dtype it is cast to: clamp it first, or use bf16.",
}  # fmt: skip


def _on_backward(report: NonfiniteReport) -> str:
    advice = _by_op(report, _BACKWARD)
    if _overflows_fp16(report):  # since the range of fp16 is the reason for this, whatever the op
        advice = _OVERFLOW.format("The gradient")
    if report.loss_scale is None or not _overflows(report):
        return advice
    return (
        f"The loss was scaled by {report.loss_scale:g}. If only that makes it overflow, this is "
        "what GradScaler is there for: it skips the step and lowers the scale. It is a fault if "
        f"it persists at a scale of 1 (see ScaleLog); then: {advice}"
    )


def _on_forward(report: NonfiniteReport) -> str:
    if _overflows_fp16(report) and not _is_at_a_pole(report):
        if _begins(report, "bmm", "baddbmm", "matmul"):
            return _OVERFLOW.format("The product") + _SCORES
        return _OVERFLOW.format("The result")
    dtype, advice = dtype_name(report.value.dtype), _by_op(report, _FORWARD)
    if not advice and report.inputs and _overflows(report):
        return f"The result exceeds the range of {dtype}: see how its inputs came to be so large."
    return advice or (
        "0 * inf, inf - inf or 0 / 0: see which of its inputs is zero or very large, and why."
    )


def _begins(report: NonfiniteReport, *starts: str) -> bool:
    """Whether the op's name does; backward, autograd's: ``SqrtBackward0``; else ``_softmax``."""
    return (report.op or "").lower().strip("_").startswith(starts)


def _by_op(report: NonfiniteReport, texts: dict[str, str]) -> str:
    return next((text for names, text in texts.items() if _begins(report, *names.split(" "))), "")


def _overflows(report: NonfiniteReport) -> bool:
    return not report.value.kinds.isdisjoint({"inf", "-inf"})


def _overflows_fp16(report: NonfiniteReport) -> bool:
    return report.value.dtype is torch.float16 and _overflows(report)


def _is_at_a_pole(report: NonfiniteReport) -> bool:
    """Whether an input is zero where that alone makes the result infinite, in any precision."""
    if _begins(report, "div"):
        return any(x.name == "other" and x.low <= 0 <= x.high for x in report.inputs)
    at_zero = any(x.name == "self" and x.low <= 0 for x in report.inputs)
    return at_zero and _begins(report, "log", "reciprocal", "rsqrt")

"""The report of `find_nonfinite`, with its remedies."""

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from amp_lab.core.remedies import Remedy
from amp_lab.core.report import dtype_name
from amp_lab.numerics.autocast_effect import what_autocast_does
from amp_lab.numerics.nonfinite_remedies import large_weight, remedies_for
from amp_lab.numerics.tensor_summary import TensorSummary


@dataclass(frozen=True, repr=False, kw_only=True)
class NonfiniteReport:
    """The origin of the first inf or NaN that matters. Print the report to read it."""

    phase: str
    """``forward``, ``backward``, ``step`` (of an optimizer), or ``before`` (the first use)."""
    module: str | None
    """Qualified name of the module, "" for the model itself; None outside the model."""
    module_type: str | None  # the name of its class
    call: int  # number of the module's call, from 1 in each forward pass; 0 outside of modules
    op: str | None = None  # such as ``log``, or ``LogBackward0``; None if phase is ``before``
    kernel: str | None = None  # op that the backward node ran; in forward, the same as `op`
    tensor: str  # ``output``, ``gradient``, ``parameter``, ``buffer``, ``constant``, an input
    name: str  # qualified name of a parameter or buffer; else a description
    value: TensorSummary  # the tensor that is not finite
    inputs: tuple[TensorSummary, ...] = ()  # inputs of the op that were not overwritten
    weights: torch.dtype | None = None  # dtype of the module's weights, or of the model's
    half_weights: bool = False  # whether trained weights are fp16
    autocast: torch.dtype | None = None  # of the block around the module
    constant: float | None = None  # constant in the code that is out of range of the result's dtype
    exponent: float | None = None  # constant exponent of `kernel`, if there is one
    eps: float | None = None  # eps that was added to an input, and is 0 in the input's dtype
    line: str | None = None  # line of the user's code that called the op
    reached: str = ""  # where the inf or NaN arrived, which is the reason why it matters
    loss_scale: float | None = None  # factor by which a `GradScaler` had multiplied the loss
    bypassed: bool = False  # whether an optimizer of the model stepped without this scaler
    placed_by: str | None = None  # op that wrote the -inf from which this op computed NaN
    placed: bool = False  # whether the code wrote the value on purpose, as in a mask of -inf
    number: int = 0  # number of origins that were found before this one

    @property
    def remedies(self) -> list[Remedy]:
        """The remedies, the most important first."""
        return remedies_for(self)

    @property
    def advice(self) -> str:
        """The remedies in words, with the facts of this report."""
        facts = {
            "what": "The gradient" if self.phase == "backward" else "The result",
            "scale": self.loss_scale,
            "dtype": dtype_name(self.value.dtype),
            "device": self.value.device_type,
            "op": self.op,
            "autocast": self._autocast_effect,
            "eps": self.eps,
            "constant": self.constant,
            "weight": large_weight(self),
        }
        return " ".join(remedy.sentence(**facts) for remedy in self.remedies)

    @property
    def _autocast_effect(self) -> str:
        """What autocast would do with the op, if the weights are fp16; else empty."""
        if self.op is None or self.weights is not torch.float16:
            return ""
        return what_autocast_does(self.op, self.value.device_type)

    @property
    def where(self) -> str:
        """The module, in words."""
        if self.module is None:
            return "outside the model"
        name = repr(self.module) if self.module else "the model itself"
        text = f"{name} ({self.module_type})"
        if self.call > 1:
            text += f", call {self.call}"
        return text

    @property
    def place(self) -> str:
        """The op and the module, or the tensor: ``log: 'head' (Head)``, ``input 'argument 0'``."""
        if self.phase == "before":
            return f"{self.tensor} {self.name!r}"
        if self.phase == "step":
            return f"{self.op}: {self.tensor} {self.name!r}"
        return f"{self.op}: {self.where}"

    def __str__(self) -> str:
        kinds = " and ".join(sorted(self.value.kinds, reverse=True))
        part = "the optimizer's step" if self.phase == "step" else self.phase
        head = f"{kinds} made in {part} by {self.place}"
        if self.phase == "before":
            head = f"{kinds} in {self.place}, before any op: {self.where}"
        rows = [(label, text) for label, text in self._rows() if text]
        width = max(len(label) for label, _ in rows)
        indent = " " * (width + 4)
        lines = [head]
        for label, text in rows:
            start = f"  {label:<{width}}  "
            # 98 columns, for terminals of 100.
            lines += textwrap.wrap(text, 98, initial_indent=start, subsequent_indent=indent)
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str | None]]:
        """The labels and texts of the report; a text that is unknown is empty or None."""
        is_backward = self.phase == "backward"
        if is_backward:
            yield "kernel", self.kernel
        yield self.tensor, str(self.value)
        for summary in self.inputs[:6]:  # an op such as cat may have hundreds
            yield f"from {summary.name}", str(summary)
        yield "-inf from", self.placed_by
        if self.constant is not None:
            yield "constant", f"{self.constant:g}"
        yield "line", self.line
        if is_backward and self.loss_scale:
            yield "loss scale", f"{self.loss_scale:g}"
        yield "reached", self.reached
        yield "what to do", self.advice

    __repr__ = __str__


def left_by_error(error: Exception, origins: list[NonfiniteReport]) -> NonfiniteReport | None:
    """The report of the first inf or NaN that was still there when `error` ended the block.

    `origins` are those of the tensors that still exist. Such an inf may be the cause of the error,
    although it reached no loss: a matrix of costs, which SciPy refuses. Only what a forward pass
    made counts, and no -inf alone, which may be a mask. None if nothing remains.
    """
    suspects = []
    for origin in origins:
        may_be_mask = origin.placed or origin.value.kinds == {"-inf"}
        if origin.phase == "forward" and not may_be_mask:
            suspects.append(origin)
    if not suspects:
        return None
    first = min(suspects, key=lambda origin: origin.number)
    reached = f"a tensor that was still there when {type(error).__name__} ended the block"
    return dataclasses.replace(first, reached=reached)

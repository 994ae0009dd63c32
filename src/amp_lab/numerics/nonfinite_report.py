"""What `find_nonfinite` found, in words, and what to do about it."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from amp_lab.core.remedies import Remedy
from amp_lab.core.report import dtype_name
from amp_lab.numerics.autocast_effect import what_autocast_does
from amp_lab.numerics.nonfinite_remedies import remedies_for
from amp_lab.numerics.tensor_summary import TensorSummary


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
    weights: torch.dtype | None = None  # of the module, or of the model if it has none
    half_weights: bool = False  # whether weights that are trained are fp16
    constant: float | None = None  # a number in the code that the result's dtype cannot hold
    exponent: float | None = None  # that `kernel` raises to, if it is a number in the code
    eps: float | None = None  # what was added to an input to keep it from 0, and is 0 in its dtype
    line: str | None = None  # of your code that called the op, where there was one
    reached: str = ""  # what it spread to: why it counts
    loss_scale: float | None = None  # what a `GradScaler` had multiplied the loss by, if one did
    bypassed: bool = False  # whether an optimizer of the model stepped without that scaler
    placed_by: str | None = None  # what had put a -inf there that this op turned into a NaN
    placed: bool = False  # whether it was written there on purpose, as a mask of -inf is
    number: int = 0  # how many there were before it

    @property
    def remedies(self) -> list[Remedy]:
        """What to do about it, in the order in which to read it."""
        return remedies_for(self)

    @property
    def advice(self) -> str:
        """The same in words."""
        facts = {
            "what": "The gradient" if self.phase == "backward" else "The result",
            "scale": self.loss_scale,
            "dtype": dtype_name(self.value.dtype),
            "device": self.value.device_type,
            "op": self.op,
            "autocast": self._autocast_effect,
            "eps": self.eps,
            "constant": self.constant,
        }
        return " ".join(remedy.said(**facts) for remedy in self.remedies)

    @property
    def _autocast_effect(self) -> str:
        """What autocast would do with the op, which matters where the weights are fp16."""
        if self.op is None or self.weights is not torch.float16:
            return ""
        return what_autocast_does(self.op, self.value.device_type)

    @property
    def where(self) -> str:
        """The module in words."""
        if self.module is None:
            return "outside the model"
        name = repr(self.module) if self.module else "the model itself"
        text = f"{name} ({self.module_type})"
        if self.call > 1:
            text += f", call {self.call}"
        return text

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
        rows = [(label, text) for label, text in self._rows() if text]
        width = max(len(label) for label, _ in rows)
        indent = " " * (width + 4)
        lines = [head]
        for label, text in rows:
            start = f"  {label:<{width}}  "
            lines += textwrap.wrap(text, 98, initial_indent=start, subsequent_indent=indent)
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str | None]]:
        """What there is to say, each with its label; empty or None if it is not known."""
        is_backward = self.phase == "backward"
        if is_backward:
            yield "kernel", self.kernel
        yield self.tensor, str(self.value)
        for summary in self.inputs[:6]:
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

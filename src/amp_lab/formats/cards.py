"""Forecasts of how long a linear layer takes on a GPU in each format, from peak rates and bytes.

The formulas and the rates are those of torchao's roofline (`torchao.testing.training`), which
underestimates the time of small matmuls, as torchao says itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from amp_lab.core.errors import OptionError

_LAUNCH_S = 2e-6  # the least time of a kernel


class _Layout(NamedTuple):
    """How the operands of a matmul lie in memory in a format."""

    bits: int  # of a value
    block: int = 0  # values that share a scale of one byte; 0: no such scales

    @property
    def bytes(self) -> float:
        """Bytes of a value: 0.5 in four bits."""
        return self.bits / 8


class _Cast(NamedTuple):
    """The memory traffic of one of the kernels that cast a tensor."""

    bf16_bytes: int  # read or written in bf16, for each value
    numbers: int  # read or written in the format, for each value
    row_scale_bytes: int = 0  # written besides, for each row

    def bytes_per_value(self, layout: _Layout) -> float:
        """Bytes read and written for each value, without scales."""
        return self.bf16_bytes + self.numbers * layout.bytes


_LAYOUT = {
    "bf16": _Layout(16),
    "fp8": _Layout(8),
    "fp8-rowwise": _Layout(8),
    "mxfp8": _Layout(8, 32),
    "mxfp4": _Layout(4, 32),
    "nvfp4": _Layout(4, 16),
}
# In training, the kernels that cast an input or a gradient, and the kernels that cast a weight.
# Finding the largest magnitude takes a separate kernel, `_Cast(2, 0)`, which only reads bf16; one
# that computes a scale of the tensor, `_Cast(0, 0)`, takes only its launch.
_CASTS = {
    "fp8": (
        [_Cast(2, 0), _Cast(0, 0), _Cast(2, 2)],
        [_Cast(2, 0), _Cast(0, 0), _Cast(2, 1), _Cast(2, 1)],
    ),
    "fp8-rowwise": (
        [_Cast(4, 1), _Cast(2, 1)],
        [_Cast(2, 1), _Cast(4, 0), _Cast(2, 1)],
    ),
}
_MX_CASTS = ([_Cast(2, 1), _Cast(2, 1)], [_Cast(2, 1), _Cast(2, 1)])  # of the other formats
# In inference, the kernels that cast an input. The weight was cast before.
_INPUT_CASTS = {
    "fp8": [_Cast(2, 0), _Cast(2, 1)],
    "fp8-rowwise": [_Cast(2, 1, row_scale_bytes=4)],
    "mxfp8": [_Cast(2, 1)],
    "mxfp4": [_Cast(2, 1)],
    "nvfp4": [_Cast(4, 1)],
}


@dataclass(frozen=True)
class Card:
    """The peak rates of a GPU without sparsity, and the shares of them that kernels reach."""

    rates: dict[int, float]  # operations per second, by bits of the operands
    bandwidth: float  # bytes per second
    formats: tuple[str, ...]  # the formats that it multiplies
    share_of_rate: float = 0.78  # this and the next are torchao's figures, from measurements
    share_of_bandwidth: float = 0.92

    def matmul_s(self, layout: _Layout, rows: int, inner: int, outer: int) -> float:
        """Seconds of a matmul ``(rows, inner) @ (inner, outer)`` with an output in bf16."""
        read = rows * inner + inner * outer
        if layout.block:
            read += read // layout.block  # scales, which torchao counts like values
        moved_bytes = layout.bytes * read + 2 * rows * outer  # two bytes for a value in bf16
        operations = 2 * rows * inner * outer  # multiplications and additions
        compute_s = operations / self.rates[layout.bits] / self.share_of_rate
        return max(compute_s, self.memory_s(moved_bytes), _LAUNCH_S)

    def memory_s(self, moved_bytes: float) -> float:
        """Seconds of reading and writing these bytes."""
        return moved_bytes / self.bandwidth / self.share_of_bandwidth

    def step_s(self, form: str, rows: int, inner: int, outer: int) -> float:
        """Seconds of a linear layer in a training step: its three matmuls, and the casts.

        `form` names the format; the layer makes ``(rows, outer)`` of ``(rows, inner)``.
        """
        layout = _LAYOUT[form]
        time = self.matmul_s(layout, rows, inner, outer)
        time += self.matmul_s(layout, rows, outer, inner)  # the gradient of the input
        time += self.matmul_s(layout, inner, rows, outer)  # the gradient of the weight
        if layout.bits == 16:  # bf16 needs no casts
            return time
        value_casts, weight_casts = _CASTS.get(form, _MX_CASTS)
        time += self._casts_s(layout, value_casts, rows * inner)  # the input
        time += self._casts_s(layout, weight_casts, inner * outer)
        time += self._casts_s(layout, value_casts, rows * outer)  # the output's gradient
        return time

    def _casts_s(self, layout: _Layout, kernels: Sequence[_Cast], values: int) -> float:
        """Seconds of the kernels that cast this many `values`, one after the other."""
        time = 0.0
        for kernel in kernels:
            time += self._cast_s(values * kernel.bytes_per_value(layout))
        return time

    def _cast_s(self, moved_bytes: float) -> float:
        """Seconds of one kernel of a cast, which only reads and writes."""
        return max(self.memory_s(moved_bytes), _LAUNCH_S)

    def forward_s(self, form: str, rows: int, inner: int, outer: int) -> float:
        """Seconds of a linear layer in inference: its matmul, and the cast of its input.

        The weight was cast once, before. The formulas are torchao's for inference. The arguments
        are those of `step_s`.
        """
        layout = _LAYOUT[form]
        time = self.matmul_s(layout, rows, inner, outer)
        for kernel in _INPUT_CASTS.get(form, ()):
            moved_bytes = rows * inner * kernel.bytes_per_value(layout)
            moved_bytes += rows * kernel.row_scale_bytes
            if layout.block:
                moved_bytes += rows * (inner // layout.block)  # a byte for each block's scale
            time += self._cast_s(moved_bytes)
        return time


_FP8 = ("fp8", "fp8-rowwise")
_ALL = (*_FP8, "mxfp8", "mxfp4", "nvfp4")
CARDS = {  # of each: rates by bits, bandwidth, formats
    "h100": Card({16: 989e12, 8: 1979e12}, 2.4e12, _FP8),
    # Its bandwidth: a bus of 7,680 bits at 3.996 GHz, with two transfers per cycle.
    "b200": Card({16: 2.25e15, 8: 4.5e15, 4: 9e15}, 7680 / 8 * 3.996e9 * 2, _ALL),
    "b300": Card(
        {16: 2.25e15, 8: 4.5e15, 4: 14e15},
        8e12,
        _ALL,
        share_of_rate=0.82,
        share_of_bandwidth=0.84,
    ),
    "gb200": Card({16: 2.25e15, 8: 4.5e15, 4: 9e15}, 8e12, _ALL),
    "mi300x": Card({16: 1307e12, 8: 2614e12}, 5.3e12, _FP8),
}
"""GPUs whose rates are known, by name in lower case."""


def card(name: str) -> Card:
    """The GPU with a name, such as ``H100``; raises `OptionError` if its rates are not known."""
    known_card = CARDS.get(name.lower())
    if known_card is None:
        raise OptionError(f"card: {name!r} is none of {', '.join(CARDS)}")
    return known_card

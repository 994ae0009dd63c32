"""Would a format below 16 bits pay on a card? A forecast by rates and bytes, and no measurement.

The formulas and the rates are those of torchao's roofline (`torchao.testing.training`), which says
itself that it undercounts where a product is small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from amp_lab.core.errors import OptionError

_LAUNCH_S = 2e-6  # of a kernel, which takes no less


class _Layout(NamedTuple):
    """How the operands of a product lie in memory."""

    bits: int
    block: int = 0  # values that share a scale; 0: there are no scales beside the values

    @property
    def bytes(self) -> float:
        """Of a value."""
        return self.bits / 8


class _Cast(NamedTuple):
    """What one kernel of a cast moves for each value."""

    bf16_bytes: int  # read or written
    numbers: int  # of the format, read or written
    row_scale_bytes: int = 0  # written for each row besides

    def bytes_per_value(self, layout: _Layout) -> float:
        """Without scales."""
        return self.bf16_bytes + self.numbers * layout.bytes


_LAYOUT = {
    "bf16": _Layout(16),
    "fp8": _Layout(8),
    "fp8-rowwise": _Layout(8),
    "mxfp8": _Layout(8, 32),
    "mxfp4": _Layout(4, 32),
    "nvfp4": _Layout(4, 16),
}
# In training: the kernels that cast inputs and gradients, and those that cast weights. Finding the
# largest magnitude takes a kernel of its own.
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
_MX_CASTS = ([_Cast(2, 1), _Cast(2, 1)], [_Cast(2, 1), _Cast(2, 1)])
# The kernels that cast an input in inference. The weight was cast before.
_INPUT_CASTS = {
    "fp8": [_Cast(2, 0), _Cast(2, 1)],
    "fp8-rowwise": [_Cast(2, 1, row_scale_bytes=4)],
    "mxfp8": [_Cast(2, 1)],
    "mxfp4": [_Cast(2, 1)],
    "nvfp4": [_Cast(4, 1)],
}


@dataclass(frozen=True)
class Card:
    """What a card does at most, without sparsity, and the shares of it that were seen."""

    rates: dict[int, float]  # operations in a second, by bits of the operands
    bandwidth: float  # bytes in a second
    formats: tuple[str, ...]
    of_rate: float = 0.78
    of_bandwidth: float = 0.92

    def product_s(self, layout: _Layout, rows: int, inner: int, outer: int) -> float:
        """Time of a product of ``(rows, inner)`` and ``(inner, outer)`` that gives bf16."""
        read = rows * inner + inner * outer
        if layout.block:
            read += read // layout.block
        moved = layout.bytes * read + 2 * rows * outer
        operations = 2 * rows * inner * outer
        computing_s = operations / self.rates[layout.bits] / self.of_rate
        return max(computing_s, self.moved_s(moved), _LAUNCH_S)

    def moved_s(self, bytes: float) -> float:
        """Time of reading and writing so many bytes."""
        return bytes / self.bandwidth / self.of_bandwidth

    def step_s(self, form: str, rows: int, inner: int, outer: int) -> float:
        """Time of a linear layer's three products in a training step, and of the casts."""
        layout = _LAYOUT[form]
        time = self.product_s(layout, rows, inner, outer)
        time += self.product_s(layout, rows, outer, inner)  # the gradient of the input
        time += self.product_s(layout, inner, rows, outer)  # and that of the weight
        if layout.bits == 16:
            return time
        value_casts, weight_casts = _CASTS.get(form, _MX_CASTS)
        time += self._casts_s(layout, value_casts, rows * inner)
        time += self._casts_s(layout, weight_casts, inner * outer)
        time += self._casts_s(layout, value_casts, rows * outer)
        return time

    def _casts_s(self, layout: _Layout, kernels: Sequence[_Cast], values: int) -> float:
        """Time of the kernels that cast so many values, one after the other."""
        time = 0.0
        for kernel in kernels:
            time += self._cast_s(values * kernel.bytes_per_value(layout))
        return time

    def _cast_s(self, moved: float) -> float:
        """Time of a kernel that does nothing but read and write so many bytes."""
        return max(self.moved_s(moved), _LAUNCH_S)

    def forward_s(self, form: str, rows: int, inner: int, outer: int) -> float:
        """Time of a linear layer in inference: its matmul, and the cast of its input.

        The weight was cast once, before. The formulas are torchao's for inference.
        """
        layout = _LAYOUT[form]
        time = self.product_s(layout, rows, inner, outer)
        for kernel in _INPUT_CASTS.get(form, ()):
            moved = rows * inner * kernel.bytes_per_value(layout)
            moved += rows * kernel.row_scale_bytes
            if layout.block:
                moved += rows * (inner // layout.block)  # a byte for the scale of each block
            time += self._cast_s(moved)
        return time


_FP8 = ("fp8", "fp8-rowwise")
_ALL = (*_FP8, "mxfp8", "mxfp4", "nvfp4")
CARDS = {
    "h100": Card({16: 989e12, 8: 1979e12}, 2.4e12, _FP8),
    "b200": Card({16: 2.25e15, 8: 4.5e15, 4: 9e15}, 7680 / 8 * 3.996e9 * 2, _ALL),
    "b300": Card({16: 2.25e15, 8: 4.5e15, 4: 14e15}, 8e12, _ALL, 0.82, 0.84),
    "gb200": Card({16: 2.25e15, 8: 4.5e15, 4: 9e15}, 8e12, _ALL),
    "mi300x": Card({16: 1307e12, 8: 2614e12}, 5.3e12, _FP8),
}
"""Cards whose rates are known, by name."""


def card(name: str) -> Card:
    """The card of a name; raises `OptionError` if its rates are not known."""
    found = CARDS.get(name.lower())
    if found is None:
        raise OptionError(f"card: {name!r} is none of {', '.join(CARDS)}")
    return found

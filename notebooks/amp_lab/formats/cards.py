"""Would a format below 16 bits pay on a card? A forecast by rates and bytes, and no measurement.

The formulas and the rates are those of torchao's roofline (`torchao.testing.training`), which says
itself that it undercounts where a product is small.
"""

from dataclasses import dataclass

from amp_lab.errors import OptionError

_LAUNCH_S = 2e-6
_BYTES = {16: 2.0, 8: 1.0, 4: 0.5}


@dataclass(frozen=True)
class Card:
    """What a card does at most, without sparsity, and the shares of it that were seen."""

    rates: dict[int, float]  # operations in a second, by bits of the operands
    bandwidth: float  # bytes in a second
    formats: tuple[str, ...]
    of_rate: float = 0.78
    of_bandwidth: float = 0.92

    def product_s(self, bits: int, block: int, rows: int, inner: int, outer: int) -> float:
        """Time of a product of ``(rows, inner)`` and ``(inner, outer)`` that gives bf16."""
        read = rows * inner + inner * outer
        read += read // block if block else 0
        moved = _BYTES[bits] * read + 2 * rows * outer
        operations = 2 * rows * inner * outer / self.rates[bits] / self.of_rate
        return max(operations, self.moved_s(moved), _LAUNCH_S)

    def moved_s(self, bytes: float) -> float:
        """Time of reading and writing so many bytes."""
        return bytes / self.bandwidth / self.of_bandwidth

    def step_s(self, form: str, rows: int, inner: int, outer: int) -> float:
        """Time of a linear layer's three products in a training step, and of the casts."""
        bits, block = _LAYOUT[form]
        sizes = (rows, inner, outer), (rows, outer, inner), (inner, rows, outer)
        time = sum(self.product_s(bits, block, *size) for size in sizes)
        operands = [(rows * inner, 0), (inner * outer, 1), (rows * outer, 0)]
        for values, is_weight in operands if bits < 16 else ():
            for bytes in _CASTS.get(form, _CASTS["mx"])[is_weight]:
                both = bytes[0] + bytes[1] * _BYTES[bits]
                time += max(self.moved_s(values * both), _LAUNCH_S)
        return time

    def forward_s(self, form: str, rows: int, inner: int, outer: int) -> float:
        """Time of a linear layer in inference: its matmul, and the cast of its input.

        The weight was cast once, before. The formulas are torchao's for inference.
        """
        bits, block = _LAYOUT[form]
        time = self.product_s(bits, block, rows, inner, outer)
        for read, written, for_each_row in _INPUT_CASTS.get(form, ()):
            scales = for_each_row * rows
            if block:
                scales += rows * (inner // block)  # a byte each
            moved = rows * inner * (read + written * _BYTES[bits]) + scales
            time += max(self.moved_s(moved), _LAUNCH_S)
        return time


_LAYOUT = {"bf16": (16, 0), "fp8": (8, 0), "fp8-rowwise": (8, 0), "mxfp8": (8, 32)}
_LAYOUT |= {"mxfp4": (4, 32), "nvfp4": (4, 16)}

# For each kernel of a cast: bytes of bf16, and numbers of the format, that it moves for a value;
# first for inputs and gradients, then for weights. The largest magnitude has a kernel of its own.
_CASTS = {
    "fp8": ([(2, 0), (0, 0), (2, 2)], [(2, 0), (0, 0), (2, 1), (2, 1)]),
    "fp8-rowwise": ([(4, 1), (2, 1)], [(2, 1), (4, 0), (2, 1)]),
    "mx": ([(2, 1), (2, 1)], [(2, 1), (2, 1)]),
}

# For each kernel that casts an input in inference: bytes of bf16, and numbers of the format, that
# it moves for a value, and bytes of scales that it writes for a row.
_INPUT_CASTS = {
    "fp8": ((2, 0, 0), (2, 1, 0)),
    "fp8-rowwise": ((2, 1, 4),),
    "mxfp8": ((2, 1, 0),),
    "mxfp4": ((2, 1, 0),),
    "nvfp4": ((4, 1, 0),),
}

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
    if name.lower() not in CARDS:
        raise OptionError(f"card: {name!r} is none of {', '.join(CARDS)}")
    return CARDS[name.lower()]

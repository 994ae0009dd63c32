"""Forecasts of how long a linear layer takes on a GPU in each format, from peak rates and bytes.

The formulas are from torchao's roofline (`torchao.testing.training`). According to torchao, it
underestimates the time of small matmuls. The rates are in `core.gpus`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from amp_lab.core.gpus import Gpu
from amp_lab.formats.scaling import Format

_LAUNCH_S = 2e-6  # the least time of a kernel
_SIXTEEN_BITS = 16


class _Cast(NamedTuple):
    """The memory traffic of one of the kernels that cast a tensor."""

    bf16_bytes: int  # read or written in bf16, for each value
    numbers: int  # read or written in the format, for each value
    row_scale_bytes: int = 0  # written besides, for each row

    def bytes_per_value(self, form: Format) -> float:
        """Bytes read and written for each value, without scales."""
        return self.bf16_bytes + self.numbers * _bytes(form)


# In training, the kernels that cast an input or a gradient, and the kernels that cast a weight, by
# torchao's name for the recipe.
# Finding the largest magnitude is a kernel of its own, `_Cast(2, 0)`: it reads bf16 and writes
# nothing. Computing the scale from it is another kernel, `_Cast(0, 0)`: it costs only its launch.
_CASTS = {
    "tensorwise": (
        [_Cast(2, 0), _Cast(0, 0), _Cast(2, 2)],
        [_Cast(2, 0), _Cast(0, 0), _Cast(2, 1), _Cast(2, 1)],
    ),
    "rowwise": (
        [_Cast(4, 1), _Cast(2, 1)],
        [_Cast(2, 1), _Cast(4, 0), _Cast(2, 1)],
    ),
}
_BLOCK_CASTS = ([_Cast(2, 1), _Cast(2, 1)], [_Cast(2, 1), _Cast(2, 1)])  # of the other recipes
# In inference, the kernels that cast an input. The weight was cast before.
_INPUT_CASTS = {
    "tensorwise": [_Cast(2, 0), _Cast(2, 1)],
    "rowwise": [_Cast(2, 1, row_scale_bytes=4)],
    "nvfp4": [_Cast(4, 1)],
}
_BLOCK_INPUT_CASTS = [_Cast(2, 1)]  # of the other recipes


def has_forecast(gpu: Gpu, form: Format) -> bool:
    """Whether the formulas apply to this format, and the GPU's rates for the format are known."""
    if not form.torchao or form.matmul not in gpu.architecture.matmuls:
        return False
    return gpu.bandwidth is not None and {form.element.bits, _SIXTEEN_BITS} <= set(gpu.rates)


def step_s(gpu: Gpu, form: Format, rows: int, inner: int, outer: int) -> float:
    """Seconds of a linear layer in a training step: its three matmuls, and the casts.

    The layer maps ``(rows, inner)`` to ``(rows, outer)``. The format is bf16, or another format
    for which `has_forecast` is true.
    """
    time = _matmul_s(gpu, form, rows, inner, outer)
    time += _matmul_s(gpu, form, rows, outer, inner)  # the gradient of the input
    time += _matmul_s(gpu, form, inner, rows, outer)  # the gradient of the weight
    if form.element.bits == _SIXTEEN_BITS:  # bf16 needs no casts
        return time
    value_casts, weight_casts = _CASTS.get(form.torchao, _BLOCK_CASTS)
    time += _casts_s(gpu, form, value_casts, rows * inner)  # the input
    time += _casts_s(gpu, form, weight_casts, inner * outer)
    time += _casts_s(gpu, form, value_casts, rows * outer)  # the output's gradient
    return time


def forward_s(gpu: Gpu, form: Format, rows: int, inner: int, outer: int) -> float:
    """Seconds of a linear layer in inference: its matmul, and the cast of its input.

    The weight has been cast once, before. The formulas are torchao's for inference. The arguments
    are the same as for `step_s`.
    """
    time = _matmul_s(gpu, form, rows, inner, outer)
    if form.element.bits == _SIXTEEN_BITS:
        return time
    for kernel in _INPUT_CASTS.get(form.torchao, _BLOCK_INPUT_CASTS):
        moved_bytes = rows * inner * kernel.bytes_per_value(form)
        moved_bytes += rows * kernel.row_scale_bytes
        if _block(form):
            moved_bytes += rows * (inner // _block(form))  # a byte for each block's scale
        time += _cast_s(gpu, moved_bytes)
    return time


def _bytes(form: Format) -> float:
    """Bytes of a value without its scale: 0.5 in four bits."""
    return form.element.bits / 8


def _block(form: Format) -> int:
    """The number of values that share a scale of one byte; 0 without such scales."""
    return form.block[1]


def _matmul_s(gpu: Gpu, form: Format, rows: int, inner: int, outer: int) -> float:
    """Seconds of a matmul ``(rows, inner) @ (inner, outer)`` with an output in bf16."""
    read = rows * inner + inner * outer
    if _block(form):
        read += read // _block(form)  # scales, which torchao counts like values
    moved_bytes = _bytes(form) * read + 2 * rows * outer  # two bytes for a value in bf16
    operations = 2 * rows * inner * outer  # multiplications and additions
    compute_s = operations / gpu.rates[form.element.bits] / gpu.share_of_rate
    return max(compute_s, _memory_s(gpu, moved_bytes), _LAUNCH_S)


def _memory_s(gpu: Gpu, moved_bytes: float) -> float:
    """Seconds of reading and writing these bytes."""
    assert gpu.bandwidth is not None  # `has_forecast` asks for it
    return moved_bytes / gpu.bandwidth / gpu.share_of_bandwidth


def _casts_s(gpu: Gpu, form: Format, kernels: Sequence[_Cast], values: int) -> float:
    """Seconds of the kernels that cast this many `values`, one after the other."""
    time = 0.0
    for kernel in kernels:
        time += _cast_s(gpu, values * kernel.bytes_per_value(form))
    return time


def _cast_s(gpu: Gpu, moved_bytes: float) -> float:
    """Seconds of one kernel of a cast, which only reads and writes."""
    return max(_memory_s(gpu, moved_bytes), _LAUNCH_S)

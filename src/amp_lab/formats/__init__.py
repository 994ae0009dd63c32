"""Formats below 16 bits on any machine: FP8, MX, NVFP4 and INT8, with their shared scales.

The results are the same as on hardware with these formats, but the speed is not. `quantize` rounds
a tensor to a format, and `quantized_linear` multiplies such tensors.
"""

from amp_lab.formats.accumulation import hopper_matmul
from amp_lab.formats.elements import ELEMENTS, Element
from amp_lab.formats.matmul import MatmulFormats, hadamard, quantized_linear
from amp_lab.formats.scaling import FORMATS, Counts, Format, format_of, quantize

__all__ = [
    "ELEMENTS", "FORMATS", "Counts", "Element", "Format", "MatmulFormats", "format_of",
    "hadamard", "hopper_matmul", "quantize", "quantized_linear",
]  # fmt: skip

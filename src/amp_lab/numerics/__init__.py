"""Numerics of training in fp16: gradients that underflow, the loss scale, the first inf or NaN.

Four tools each answer one question about your model:

- `gradient_underflow`: which gradients would fp16 lose, and which loss scale keeps them?
- `ScaleLog`: which loss scale did the `GradScaler` use in each step, and which steps did it skip?
- `find_nonfinite`: where did the inf or NaN come from?
- `largest_values`: would the values of the model fit into fp16?
"""

from amp_lab.numerics.largest_values import largest_values
from amp_lab.numerics.nonfinite import find_nonfinite
from amp_lab.numerics.nonfinite_report import NonfiniteReport
from amp_lab.numerics.scale_log import ScaleLog
from amp_lab.numerics.underflow import UnderflowReport, gradient_underflow

__all__ = [
    "NonfiniteReport",
    "ScaleLog",
    "UnderflowReport",
    "find_nonfinite",
    "gradient_underflow",
    "largest_values",
]

"""The distance of a step's tensors from the tensors of the same step in fp32."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_lab.core.tensors import named_tensors


def floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors in an output of any structure."""
    return [tensor for _, tensor in named_tensors(output) if tensor.is_floating_point()]


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    squares = [float(tensor.double().square().sum()) for tensor in tensors]
    return math.sqrt(sum(squares))


def distance(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return the relative distance of tensors from a reference, in the joint Euclidean norm.

    If the reference is all zeros, the distance is absolute.
    """
    errors = []
    for tensor, exact in zip(tensors, reference, strict=True):
        errors.append(tensor.double() - exact.double())
    return norm(errors) / (norm(reference) or 1.0)

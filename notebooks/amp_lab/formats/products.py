"""A matrix product whose operands are rounded to a format, forward and backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.errors import NumericsError
from amp_lab.formats.scaling import Counts, Format, format_of, quantize

FORWARD, GRAD_INPUT, GRAD_WEIGHT = PRODUCTS = ("forward", "grad_input", "grad_weight")
HADAMARD = 16  # values that are mixed, as in NVIDIA's recipe for NVFP4


@dataclass(frozen=True)
class ProductFormats:
    """What the operands are rounded to in the three products of a linear layer's training step.

    `values` is for the input and the weight, and `gradient` for the gradient that comes from above,
    which is as `values` where it is None. `grad_weight` replaces both of them where the gradient of
    the weight (wgrad) is computed. With `hadamard` its operands are mixed first, which spreads
    outliers; with a `generator` gradients are rounded stochastically.
    """

    values: str | Format
    gradient: str | Format | None = None
    grad_weight: str | Format | None = None
    hadamard: bool = False
    generator: torch.Generator | None = None

    def of(self, which: str) -> tuple[Format, Format]:
        """The formats of both operands of one of `PRODUCTS`; the gradient is the first."""
        right = format_of((which == GRAD_WEIGHT and self.grad_weight) or self.values)
        if which == FORWARD or (which == GRAD_WEIGHT and self.grad_weight):
            return right, right
        return format_of(self.gradient or self.values), right

    def product(
        self,
        which: str,
        left: Tensor,
        right: Tensor,
        counts: Sequence[Counts | None] = (None, None),
    ) -> Tensor:
        """``left @ right.T`` of one of `PRODUCTS`, with both rounded along what is summed over.

        In the two of the backward pass `left` is the gradient. `counts`, one for each, are told
        what was clipped and flushed.
        """
        (form, of_right), generator = self.of(which), None if which == FORWARD else self.generator
        if which == GRAD_WEIGHT:  # its sum is over the rows of a batch, which libraries pad too
            missing = -left.shape[1] % max(form.block[1], HADAMARD if self.hadamard else 1)
            left, right = (nn.functional.pad(x, (0, missing)) for x in (left, right))
            if self.hadamard:
                left, right = hadamard(left.float()), hadamard(right.float())
        with torch.autocast(left.device.type, enabled=False):
            rounded = quantize(left, form, generator=generator, counts=counts[0])
            return rounded @ quantize(right, of_right, counts=counts[1]).T


def operands(
    which: str, values: Tensor, weight: Tensor, grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The two whose ``left @ right.T`` is one of the `PRODUCTS` of ``values @ weight.T``."""
    rows = values.reshape(-1, values.shape[-1])
    if grad is None:
        return rows, weight
    grad = grad.reshape(-1, len(weight))
    return (grad, weight.T) if which == GRAD_INPUT else (grad.T, rows.T)


TORCHAO = {"fp8": ProductFormats("fp8", gradient="fp8-e5m2")}
"""Recipes of torchao that round gradients to another format than the rest, by the format's name."""


def recipe(form: str | Format) -> ProductFormats:
    """The products of a format, as torchao trains with it."""
    return TORCHAO.get(format_of(form).name) or ProductFormats(form)


def inference_recipe(form: str | Format) -> ProductFormats:
    """The forward product of a format, as torchao infers with it: scales of rows are any in fp32.

    torchao trains with powers of two there.
    """
    form = format_of(form)
    if form.scale == "power2":
        form = replace(form, scale="fp32")
    return ProductFormats(form)


def quantized_linear(
    values: Tensor, weight: Tensor, formats: str | Format | ProductFormats
) -> Tensor:
    """`values @ weight.T`, of shapes ``(…, in)`` and ``(out, in)``, with rounded operands, in fp32.

    In each of the three products both operands are quantised along the dimension that is summed
    over, as the hardware wants its blocks and rows to lie; so the weight is quantised anew for
    dgrad. The sums are in fp32. Wgrad sums over the rows of `values`: where those are no multiple
    of a block, zeros are appended.

    Raises what `quantize` raises; ``in`` and ``out`` have to be multiples of the format's block.
    """
    if not isinstance(formats, ProductFormats):
        formats = recipe(formats)
    return _Linear.apply(values, weight, formats)


def hadamard(values: Tensor, size: int = HADAMARD, seed: int = 0) -> Tensor:
    """`values` with each `size` of the last dimension mixed by a random Hadamard transform.

    Signs are drawn from the seed; then the transform is orthogonal, so that the product of two
    tensors, along that dimension, stays as it is. `size` is a power of two that divides it, else
    `NumericsError` is raised.
    """
    if size < 1 or size & (size - 1) or values.shape[-1] % size:
        raise NumericsError(f"hadamard: {size} is no power of two that divides {values.shape[-1]}")
    draws = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=draws).mul_(2).sub_(1)
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    mixed = (signs[:, None] * matrix / math.sqrt(size)).to(values)
    return (values.reshape(-1, size) @ mixed).view(values.shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, formats: ProductFormats) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.formats = formats
        out = formats.product(FORWARD, *operands(FORWARD, values, weight))
        return out.view(*values.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for at, which in enumerate((GRAD_INPUT, GRAD_WEIGHT)):
            if not ctx.needs_input_grad[at]:
                found.append(None)
                continue
            of = ctx.saved_tensors[at]
            grad = ctx.formats.product(which, *operands(which, *ctx.saved_tensors, *grads))
            found.append(grad.view(of.shape).to(of.dtype))
        return *found, None

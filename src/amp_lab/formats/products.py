"""A matrix product whose operands are rounded to a format, forward and backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.core.errors import NumericsError
from amp_lab.formats.scaling import Counts, Format, format_of, quantize

FORWARD = "forward"
GRAD_INPUT = "grad_input"
GRAD_WEIGHT = "grad_weight"
PRODUCTS = (FORWARD, GRAD_INPUT, GRAD_WEIGHT)
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
        if which == GRAD_WEIGHT and self.grad_weight:
            both = format_of(self.grad_weight)
            return both, both
        values = format_of(self.values)
        if which == FORWARD:
            return values, values
        return format_of(self.gradient or self.values), values

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
        left_format, right_format = self.of(which)
        if which == GRAD_WEIGHT:
            left = self._summed_over_rows(left, left_format)
            right = self._summed_over_rows(right, left_format)
        generator = self.generator
        if which == FORWARD:
            generator = None
        with torch.autocast(left.device.type, enabled=False):
            left = quantize(left, left_format, generator=generator, counts=counts[0])
            right = quantize(right, right_format, counts=counts[1])
            return left @ right.T

    def _summed_over_rows(self, operand: Tensor, form: Format) -> Tensor:
        """An operand of wgrad, ``(…, rows of the batch)``, padded with zeros, as libraries do."""
        multiple = max(1, form.block[1])
        if self.hadamard:
            multiple = max(multiple, HADAMARD)
        missing = -operand.shape[1] % multiple
        padded = nn.functional.pad(operand, (0, missing))
        if self.hadamard:
            padded = hadamard(padded.float())
        return padded


def operands(
    which: str, values: Tensor, weight: Tensor, grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The two whose ``left @ right.T`` is one of the `PRODUCTS` of ``values @ weight.T``."""
    rows = values.reshape(-1, values.shape[-1])
    if grad is None:
        return rows, weight
    grad = grad.reshape(-1, len(weight))
    if which == GRAD_INPUT:
        return grad, weight.T
    return grad.T, rows.T


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
    length = values.shape[-1]
    is_power_of_two = size > 0 and not size & (size - 1)
    if not is_power_of_two or length % size:
        raise NumericsError(f"hadamard: {size} is no power of two that divides {length}")
    draws = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (size,), generator=draws)
    signs = 2 * bits - 1
    of_two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, of_two)
    transform = signs[:, None] * matrix / math.sqrt(size)
    mixed = values.reshape(-1, size) @ transform.to(values)
    return mixed.view(values.shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, formats: ProductFormats) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.formats = formats
        out = formats.product(FORWARD, *operands(FORWARD, values, weight))
        return out.view(*values.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found: list[Tensor | None] = [None, None]
        for i, which in enumerate((GRAD_INPUT, GRAD_WEIGHT)):
            if ctx.needs_input_grad[i]:
                left, right = operands(which, *saved, *grads)
                grad = ctx.formats.product(which, left, right)
                found[i] = grad.view_as(saved[i]).to(saved[i].dtype)
        return *found, None

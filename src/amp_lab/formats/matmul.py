"""A linear layer's matmuls with operands rounded to a format, forward and backward."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.core.errors import NumericsError
from amp_lab.formats.scaling import Counts, Format, format_of, quantize

FORWARD = "forward"
GRAD_INPUT = "grad_input"
GRAD_WEIGHT = "grad_weight"
MATMULS = (FORWARD, GRAD_INPUT, GRAD_WEIGHT)
HADAMARD = 16  # size of the Hadamard transform, as in NVIDIA's recipe for NVFP4


@dataclass(frozen=True)
class MatmulFormats:
    """The formats of the operands in the three matmuls of a linear layer's training step.

    - `values` is the format of the input and the weight.
    - `gradient` is the format of the output's gradient. None is the format in `values`.
    - `grad_weight` is the format of both operands of wgrad, the gradient of the weight. None is the
      format that they have in the other matmuls.
    - If `hadamard` is set, a Hadamard transform is applied to the operands of wgrad first. The
      transform spreads outliers over their block.
    - With a `generator`, gradients are rounded stochastically, except in a format without a scale
      (bf16, fp16).
    """

    values: str | Format
    gradient: str | Format | None = None
    grad_weight: str | Format | None = None
    hadamard: bool = False
    generator: torch.Generator | None = None

    def of(self, which: str) -> tuple[Format, Format]:
        """The formats ``(left, right)`` of the operands of one of the `MATMULS`; see `matmul`."""
        if which == GRAD_WEIGHT and self.grad_weight:
            both = format_of(self.grad_weight)
            return both, both
        values = format_of(self.values)
        if which == FORWARD:
            return values, values
        gradient = format_of(self.gradient or self.values)
        return gradient, values  # in both matmuls of the backward pass, the gradient is `left`

    def matmul(
        self,
        which: str,
        left: Tensor,
        right: Tensor,
        counts: Sequence[Counts | None] = (None, None),
    ) -> Tensor:
        """Compute ``left @ right.T`` for one of `MATMULS`, with operands rounded to their formats.

        The matmul sums over the last dimension. Blocks and rows of the formats also run along this
        dimension. In the two matmuls of the backward pass, `left` is the gradient. `counts` has a
        `Counts` for each operand, which counts clipped and flushed values. The result is in fp32.
        """
        left_format, right_format = self.of(which)
        if which == GRAD_WEIGHT:
            # One format for both, so that both get the same length.
            left = self._prepare_for_wgrad(left, left_format)
            right = self._prepare_for_wgrad(right, left_format)
        generator = self.generator
        if which == FORWARD:  # its operands are no gradients
            generator = None
        with torch.autocast(left.device.type, enabled=False):
            left = quantize(left, left_format, generator=generator, counts=counts[0])
            right = quantize(right, right_format, counts=counts[1])
            return left @ right.T

    def _prepare_for_wgrad(self, operand: Tensor, form: Format) -> Tensor:
        """Pad an operand (features, rows of the batch) to whole blocks, and transform it.

        Zeros are appended to each row, as libraries do: they do not change the sums.
        """
        multiple = max(1, form.block[1])
        if self.hadamard:
            multiple = max(multiple, HADAMARD)
        missing = -operand.shape[1] % multiple  # from the length to the next multiple
        padded = nn.functional.pad(operand, (0, missing))
        if self.hadamard:
            padded = hadamard(padded.float())
        return padded


def operands(
    which: str, values: Tensor, weight: Tensor, grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The operands ``(left, right)`` of one of `MATMULS`, which is ``left @ right.T``.

    The linear layer is ``values @ weight.T``, of shapes ``(…, in)`` and ``(out, in)``. The two
    matmuls of the backward pass need `grad`, the gradient ``(…, out)`` of the output.
    """
    rows = values.reshape(-1, values.shape[-1])
    if which == FORWARD:
        return rows, weight
    assert grad is not None
    grad = grad.reshape(-1, len(weight))
    if which == GRAD_INPUT:  # grad @ weight
        return grad, weight.T
    return grad.T, rows.T  # GRAD_WEIGHT: grad.T @ rows


def needed_backward_matmuls(ctx: Any, grad: Tensor) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """The matmuls of the backward pass of an `autograd.Function` that saved values and weight.

    Yields the index of the input that gets the gradient, the name in `MATMULS`, and both operands.
    """
    values, weight = ctx.saved_tensors  # whose gradients are computed in this order
    for index, which in enumerate((GRAD_INPUT, GRAD_WEIGHT)):
        if ctx.needs_input_grad[index]:
            left, right = operands(which, values, weight, grad)
            yield index, which, left, right


def recipe(form: str | Format) -> MatmulFormats:
    """The formats of all operands when torchao trains in a format; gradients may differ."""
    form = format_of(form)
    return MatmulFormats(form, gradient=form.gradient or None)


def inference_recipe(form: str | Format) -> MatmulFormats:
    """The formats of the operands when torchao runs inference in a format.

    Scales that are powers of two in training may be any fp32 numbers in inference.
    """
    form = format_of(form)
    if form.scale == "power2":
        form = replace(form, scale="fp32")
    return MatmulFormats(form)


def quantized_linear(
    values: Tensor, weight: Tensor, formats: str | Format | MatmulFormats
) -> Tensor:
    """Compute `values @ weight.T`, of shapes ``(…, in)`` and ``(out, in)``, with rounded operands.

    The sums and the result are in fp32. The backward pass also rounds the operands of dgrad
    (gradient of `values`) and wgrad (gradient of `weight`). The operands of a matmul are quantised
    along the dimension of the sum, because the hardware needs blocks and rows along this dimension.
    Therefore dgrad quantises the weight a second time. Wgrad sums over the rows of `values`. If
    these rows do not fill a block, zeros are appended.

    Raises the errors of `quantize`. ``in`` and ``out`` must be multiples of the format's block.
    """
    if not isinstance(formats, MatmulFormats):
        formats = recipe(formats)
    return _Linear.apply(values, weight, formats)


def hadamard(values: Tensor, size: int = HADAMARD, seed: int = 0) -> Tensor:
    """Apply a random Hadamard transform to every `size` neighbours of the last dimension.

    The seed determines the random signs of the transform. The transform is orthogonal, so a matmul
    of two transformed tensors along this dimension has the same result. Raises `NumericsError` if
    `size` is not a power of two, or does not divide the dimension.
    """
    length = values.shape[-1]
    is_power_of_two = size > 0 and not size & (size - 1)
    if not is_power_of_two or length % size:
        raise NumericsError(f"hadamard: size {size} must be a power of two that divides {length}")
    draws = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (size,), generator=draws)
    signs = 2 * bits - 1
    hadamard_2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # larger matrices are its Kronecker powers
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, hadamard_2)
    transform = signs[:, None] * matrix / math.sqrt(size)
    mixed = values.reshape(-1, size) @ transform.to(values)
    return mixed.view(values.shape)


class _Linear(torch.autograd.Function):
    """``values @ weight.T`` with rounded operands in all three matmuls."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, formats: MatmulFormats) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.formats = formats
        out = formats.matmul(FORWARD, *operands(FORWARD, values, weight))
        return out.view(*values.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `values` and `weight`, each None where it is not needed."""
        gradients: list[Tensor | None] = [None, None]
        for index, which, left, right in needed_backward_matmuls(ctx, *grads):
            operand = ctx.saved_tensors[index]  # values or weight
            grad = ctx.formats.matmul(which, left, right)
            gradients[index] = grad.view_as(operand).to(operand.dtype)
        return *gradients, None  # None for `formats`, the third argument of `forward`

"""A training step of the ConvModel written by hand: few passes over memory, in blocks of pixels.

Every layer of the ConvModel works on each pixel alone, except batch normalisation, which needs the
mean and variance of its whole input before the next layer may begin. So a step takes five passes
over the pixels, and within a pass a block of pixels stays in the cache. Cheap values are computed
again: only the outputs of the two large convolutions and one gradient are saved. The formulas of
the gradients are from Ioffe and Szegedy, "Batch normalization" (2015), rearranged so each gradient
is a multiple of the gradient above, plus a multiple of the convolution's output, plus a constant.

Names: z1, z2 and z3 are the outputs of the first three convolutions, without their biases. Batch
normalisation n makes z * scale + shift of them, and ReLU the activation a. g is the gradient of a
normalisation's output, dz of its input, dy of the model's output, and dw of a weight. In shapes, P
is all pixels, B the pixels of a block, and C the hidden channels.
"""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.bench.convmodel import ConvModel
from amp_lab.core.backends import backend

BLOCK = 4096
"""Pixels of a block on a CPU: 2 MiB for 256 channels in bf16."""


class FusedStep:
    """A step that computes loss and gradients of a `ConvModel` in training mode.

    Calling it with inputs (1, 2, H, W) and target (1, 1, H, W) returns the mean squared error,
    replaces every `.grad`, and updates the running statistics. Weights and gradients are float32;
    activations and matmuls have `dtype`. The biases before a batch normalisation get a gradient of
    exactly zero; autograd computes rounding errors there. With `compiled`, torch.compile fuses each
    chain of elementwise ops into one kernel.
    """

    # Set by `_start`, for one call. Shapes are with P pixels and C channels.
    x: Tensor  # (2, P), the inputs in float32
    columns: Tensor  # (2, P, 1), the same
    target: Tensor  # (P,)
    pixels: int  # P
    blocks: list[slice]  # the pixels of each block
    w1: Tensor  # (C, 2), the weights of the four convolutions
    w2: Tensor  # (C, C) in `dtype`
    w3: Tensor  # (C, C) in `dtype`
    w4: Tensor  # (C,)
    # Set by `_forward`.
    n1: "_Normalised"  # the batch normalisations, as scale and shift
    n2: "_Normalised"
    n3: "_Normalised"
    weight1: Tensor  # (2, C), w1 multiplied by the scale of n1
    z2: Tensor  # (P, C) in `dtype`
    z3: Tensor  # (P, C) in `dtype`
    # Set by `_last_layer`.
    dy: Tensor  # (P,)
    dy_sum: Tensor  # (C,), the sums of dy and of dy * z3 where the channel's ReLU is open
    dy_z3_sum: Tensor
    # Set by `_backward`.
    g2: Tensor  # (P, C) in `dtype`

    def __init__(self, model: ConvModel, dtype: torch.dtype, *, compiled: bool = True):
        self.dtype = dtype
        # The functions in `_CHAINS`, compiled or not: `self.chains.head` is `_head`.
        self.chains = _chains(compiled)
        # Any: for the type checker, a layer of an `nn.Sequential` is only an `nn.Module`.
        layers: list[Any] = list(model)  # conv, norm, ReLU, conv, norm, ReLU, …, conv
        self.convs = layers[0::3]  # 4
        self.norms = layers[1::3]  # 3
        self.saved = torch.empty(0, 0, 0)  # the memory of z2, z3 and g2, see `_start`

    @torch.no_grad()
    def __call__(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Run one forward and backward pass, and return the loss."""
        self._start(inputs, target)
        self._forward()
        loss = self._last_layer()
        self._backward()
        return loss

    def _start(self, inputs: Tensor, target: Tensor) -> None:
        """Prepare the pixels, the blocks, the cast weights, and the memory of z2, z3 and g2."""
        self.x = inputs[0].flatten(1).float().contiguous()
        self.columns = self.x[:, :, None]
        self.target = target.flatten().float()
        self.pixels = self.target.numel()
        device = self.x.device
        # On a GPU one block has all pixels, to keep thousands of threads busy.
        block_size = BLOCK if backend(device).is_host else self.pixels
        starts = range(0, self.pixels, block_size)
        self.blocks = [slice(start, start + block_size) for start in starts]
        channels = self.convs[1].in_channels
        shape = (3, self.pixels, channels)  # z2, z3 and g2
        if self.saved.shape != shape:  # later steps reuse it: the system maps new memory slowly
            self.saved = torch.empty(shape, dtype=self.dtype, device=device)
        self.z2, self.z3, self.g2 = self.saved  # (P, C) each
        self.w1, w2, w3, w4 = (conv.weight.flatten(1) for conv in self.convs)
        self.w2 = w2.to(self.dtype)
        self.w3 = w3.to(self.dtype)
        self.w4 = w4.flatten()

    def _first_activation(self, b: slice) -> Tensor:
        """The first activation (B, C) of the block `b` of pixels.

        Both passes that need it compute it, since that is cheaper than saving it.
        """
        x0, x1 = self.columns[:, b]  # (B, 1) each
        shift = self.n1.shift
        return self.chains.first_activation(x0, x1, self.weight1, shift, self.dtype)

    def _forward(self) -> None:
        """Run the first three layers in two passes over the pixels: sets z2, z3 and n1 to n3.

        The first layer needs no pass: its mean and variance follow from those of the input. Making
        a `_Normalised` also updates the running statistics of its batch normalisation.
        """
        norm1, norm2, norm3 = self.norms
        conv1, conv2, conv3, _ = self.convs
        pixels = self.pixels
        mean, variance = self._first_moments()
        self.n1 = _Normalised(norm1, mean, variance, conv1.bias, pixels)
        scaled = self.w1 * self.n1.scale[:, None]  # (C, 2)
        self.weight1 = scaled.T.contiguous()
        sums = self._second_layer()  # writes z2
        self.n2 = _Normalised.from_sums(norm2, sums, conv2.bias, pixels)
        sums = self._third_layer()  # writes z3
        self.n3 = _Normalised.from_sums(norm3, sums, conv3.bias, pixels)

    def _first_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (C,) of z1 = w1 @ x, from the mean and covariance of x."""
        mean = self.x.mean(1)  # (2,)
        centred = self.x - mean[:, None]
        covariance = centred @ centred.T / self.pixels  # (2, 2)
        # The diagonal of w1 @ covariance @ w1.T, without the rest of that matrix.
        variance = ((self.w1 @ covariance) * self.w1).sum(1)
        return self.w1 @ mean, variance

    def _second_layer(self) -> list[Tensor]:
        """Write z2; return the sums (C,) of z2 and of its squares."""
        weight = self.w2.T
        sums = []
        for b in self.blocks:
            z2 = self.z2[b]  # a view, which `torch.mm` fills
            a1 = self._first_activation(b)
            torch.mm(a1, weight, out=z2)
            sums.append(self.chains.sums(z2))
        return _totals(sums)

    def _third_layer(self) -> list[Tensor]:
        """Write z3; return the sums (C,) of z3 and of its squares."""
        n2 = self.n2
        weight = self.w3.T
        sums = []
        for b in self.blocks:
            z2 = self.z2[b]
            z3 = self.z3[b]  # a view, which `torch.mm` fills
            a2 = self.chains.activation(z2, n2.scale, n2.shift)
            torch.mm(a2, weight, out=z3)
            sums.append(self.chains.sums(z3))
        return _totals(sums)

    def _last_layer(self) -> Tensor:
        """Run the last layer; return the loss, and set the gradients of the layer's parameters."""
        conv = self.convs[3]
        n3 = self.n3
        self.dy = torch.empty(self.pixels, device=self.x.device)
        squared_error, self.dy_sum, self.dy_z3_sum = self._head()  # writes dy
        # dw4 is the sum of dy * a3 over the pixels, where a3 = z3 * scale + shift if the ReLU is
        # open, and else 0.
        dw4 = n3.scale * self.dy_z3_sum + n3.shift * self.dy_sum
        _set_grad(conv.weight, dw4)
        _set_grad(conv.bias, self.dy.sum())
        return squared_error / self.pixels

    def _head(self) -> list[Tensor]:
        """Write dy; return the sum of squared errors, and the sums (C,) of dy and of dy * z3.

        The latter two are over the pixels where the channel's ReLU is open (its input above 0).
        """
        bias = self.convs[3].bias
        scale = self.n3.scale
        shift = self.n3.shift
        factor = 2 / self.pixels  # derivative of the mean squared error, per error
        sums: list[tuple[Tensor, ...]] = []
        for b in self.blocks:
            z3 = self.z3[b]
            target = self.target[b]
            dy = self.dy[b]  # a view, which `copy_` fills
            squared_error, block_dy = self.chains.head(
                z3, scale, shift, self.w4, bias, target, factor
            )
            dy.copy_(block_dy)
            dy_sum, dy_z3_sum = self.chains.head_sums(z3, dy, scale, shift)
            sums.append((squared_error, dy_sum, dy_z3_sum))
        return _totals(sums)

    def _backward(self) -> None:
        """Set the gradients of the first three layers, in two passes over the pixels.

        `_Normalised.backward` sets those of the batch normalisations.
        """
        conv1, conv2, conv3, _ = self.convs
        # The gradient g3 of a pixel is w4 * dy, so its sums are w4 times those of dy.
        g3_sum = self.w4 * self.dy_sum
        g3_z3_sum = self.w4 * self.dy_z3_sum
        dz3_factors = self.n3.backward(g3_sum, g3_z3_sum)
        dw3, g2_sum, g2_z2_sum = self._third_backward(dz3_factors)
        _set_grad(conv3.weight, dw3)
        dz2_factors = self.n2.backward(g2_sum, g2_z2_sum)
        dw2, g1_sum, g1_x0_sum, g1_x1_sum = self._second_backward(dz2_factors)
        _set_grad(conv2.weight, dw2)
        g1_x_sums = torch.stack([g1_x0_sum, g1_x1_sum], 1)  # (C, 2)
        dw1 = self._first_weight_grad(g1_sum, g1_x_sums)
        _set_grad(conv1.weight, dw1)
        # Batch normalisation subtracts the mean, so a bias before it does not change the loss.
        for conv in (conv1, conv2, conv3):
            conv.bias.grad = torch.zeros_like(conv.bias)

    def _first_weight_grad(self, g_sum: Tensor, gx_sums: Tensor) -> Tensor:
        """Return dw1 (C, 2), which is the sum of dz1 * x over the pixels.

        `g_sum` (C,) and `gx_sums` (C, 2) are the sums of g1 and of g1 * x. No pass is needed over
        the pixels: since z1 = w1 @ x, the sums of g1 * z1 and of z1 * x follow from sums with x.
        Sets the gradients of the first batch normalisation too.
        """
        gz_sum = (self.w1 * gx_sums).sum(1)
        g_factor, z_factor, constant = self.n1.backward(g_sum, gz_sum)
        zx_sums = self.w1 @ (self.x @ self.x.T)  # (C, 2)
        x_sums = self.x.sum(1)  # (2,)
        from_g = gx_sums * g_factor[:, None]
        from_z = zx_sums * z_factor[:, None]
        from_constant = constant[:, None] * x_sums
        return from_g + from_z + from_constant

    def _third_backward(self, dz3_factors: Sequence[Tensor]) -> list[Tensor]:
        """Write g2; return dw3 (C, C), and the sums (C,) of g2 and of g2 * z2.

        `dz3_factors` are those that `_Normalised.backward` returns.
        """
        n2 = self.n2
        n3 = self.n3
        weight = self.convs[2].weight.flatten(1)
        dw3 = torch.zeros_like(weight)
        sums = []
        for b in self.blocks:
            z2 = self.z2[b]
            z3 = self.z3[b]
            dy = self.dy[b]
            g2 = self.g2[b]
            dz3 = self.chains.head_backward(z3, dy, n3.scale, n3.shift, self.w4, *dz3_factors)
            dw3 += dz3.T @ self.chains.activation(z2, n2.scale, n2.shift)
            da2 = dz3 @ self.w3
            sums.append(self.chains.relu_backward(g2, da2, z2, n2.scale, n2.shift))
        return [dw3, *_totals(sums)]

    def _second_backward(self, dz2_factors: Sequence[Tensor]) -> list[Tensor]:
        """Return dw2 (C, C), and the sums (C,) of g1, of g1 * x0 and of g1 * x1.

        `dz2_factors` are those that `_Normalised.backward` returns.
        """
        weight = self.convs[1].weight.flatten(1)
        dw2 = torch.zeros_like(weight)
        sums = []
        for b in self.blocks:
            z2 = self.z2[b]
            g2 = self.g2[b]
            dz2 = self.chains.norm_backward(g2, z2, *dz2_factors)
            a1 = self._first_activation(b)
            dw2 += dz2.T @ a1
            da1 = dz2 @ self.w2
            x0, x1 = self.columns[:, b]
            sums.append(self.chains.first_sums(da1, a1, x0, x1))
        return [dw2, *_totals(sums)]


def _totals(sums: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Add up the sums of all blocks: one total for each position in the tuples.

    Each tuple has the sums of one block.
    """
    totals: list[Tensor] = []
    for block_sums in zip(*sums, strict=True):
        stacked = torch.stack(block_sums)
        totals.append(stacked.sum(0))
    return totals


def _set_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Set `parameter.grad` to a gradient with as many values, in the shape of the parameter."""
    parameter.grad = gradient.reshape(parameter.shape)


class _Normalised:
    """Batch normalisation of z (P, C), written as z * scale + shift.

    z is a convolution's output without its `bias`, which only the running mean needs. `mean` and
    `variance` (C,) are those of z over all `pixels`. Making one updates the running statistics of
    `norm`, a batch normalisation.
    """

    def __init__(self, norm: Any, mean: Tensor, variance: Tensor, bias: Tensor, pixels: int):
        self.norm = norm
        self.mean = mean
        self.pixels = pixels
        self.inverse_std = (variance + norm.eps).rsqrt()
        self.scale = norm.weight * self.inverse_std
        self.shift = norm.bias - mean * self.scale
        mean_with_bias = mean + bias
        norm.running_mean.lerp_(mean_with_bias, norm.momentum)
        correction = pixels / (pixels - 1)  # torch keeps the unbiased variance
        unbiased_variance = variance * correction
        norm.running_var.lerp_(unbiased_variance, norm.momentum)
        norm.num_batches_tracked += 1

    @classmethod
    def from_sums(cls, norm: Any, sums: Sequence[Tensor], bias: Tensor, pixels: int):
        """Make a `_Normalised` from `sums`: the sum (C,) of z and that of its squares."""
        mean, mean_square = (total / pixels for total in sums)
        variance = mean_square - mean * mean
        variance = variance.clamp_min(0)  # rounding may make it negative
        return cls(norm, mean, variance, bias, pixels)

    def backward(self, g_sum: Tensor, gz_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(g_factor, z_factor, constant)``: dz = g * g_factor + z * z_factor + constant.

        g is the gradient of the normalisation's output; `g_sum` and `gz_sum` are the sums over the
        pixels of g and of g * z. All are (C,). Sets the gradients of the normalisation's weight and
        bias.

        The formula of the gradient, with the normalised input zn = (z - mean) * inverse_std, is
        dz = scale * (g - mean of g - zn * mean of (g * zn)). It is sorted by g, z and the rest.
        """
        g_zn_sum = (gz_sum - self.mean * g_sum) * self.inverse_std  # the sum of g * zn
        _set_grad(self.norm.weight, g_zn_sum)
        _set_grad(self.norm.bias, g_sum)
        g_factor = self.scale
        z_factor = -self.scale * g_zn_sum * self.inverse_std / self.pixels
        constant = -self.scale * g_sum / self.pixels - z_factor * self.mean
        return g_factor, z_factor, constant


# --- The chains of elementwise ops, which torch.compile turns into one kernel each. They compute in
# float32, and return blocks in the dtype of z. The arguments z and a are blocks (B, C), weights and
# factors (C,), dy and target (B,).


def _first_activation(x0, x1, weight, shift, dtype):
    """a1 (B, C) from the coordinates x0 and x1, (B, 1) each, and the weight (2, C)."""
    w0 = weight[0]
    w1 = weight[1]
    a = x0 * w0 + x1 * w1 + shift
    a = torch.relu(a)
    return a.to(dtype)


def _sums(z):
    """The sums (C,) of z and of its squares."""
    z = z.float()
    return z.sum(0), (z * z).sum(0)


def _activation(z, scale, shift):
    """relu(z * scale + shift), (B, C): the activation of z after its normalisation."""
    a = z.float() * scale + shift
    a = torch.relu(a)
    return a.to(z.dtype)


def _head(z, scale, shift, weight, bias, target, factor):
    """The sum of squared errors of the last layer, and dy (B,), the gradient of their mean.

    `weight` (C,) and `bias` (1,) are those of the last layer. `factor` is 2 divided by the number
    of pixels.
    """
    a = torch.relu(z.float() * scale + shift)
    product = (a * weight).sum(1)  # (B,)
    error = product + bias - target
    squares = error * error
    return squares.sum(), error * factor


def _head_sums(z, dy, scale, shift):
    """The sums (C,) of dy and of dy * z over the pixels where the ReLU is open."""
    z = z.float()
    is_open = z * scale + shift > 0
    open_dy = torch.where(is_open, dy[:, None], 0.0)
    dy_sum = open_dy.sum(0)
    dy_z_sum = (open_dy * z).sum(0)
    return dy_sum, dy_z_sum


def _head_backward(z, dy, scale, shift, weight, g_factor, z_factor, constant):
    """dz (B, C) from dy: through the last layer, the ReLU and the normalisation below it.

    `weight` (C,) is that of the last layer; the three last arguments are from
    `_Normalised.backward`.
    """
    low_dtype = z.dtype
    z = z.float()
    is_open = z * scale + shift > 0
    g = dy[:, None] * weight
    g = torch.where(is_open, g, 0.0)
    dz = g * g_factor + z * z_factor + constant
    return dz.to(low_dtype)


def _relu_backward(out, da, z, scale, shift):
    """Write g (B, C), which is `da` through the ReLU, to `out`; return the sums of g and g * z."""
    z = z.float()
    is_open = z * scale + shift > 0
    g = torch.where(is_open, da.float(), 0.0)
    out.copy_(g)
    g_sum = g.sum(0)
    gz_sum = (g * z).sum(0)
    return g_sum, gz_sum


def _norm_backward(g, z, g_factor, z_factor, constant):
    """dz (B, C), with the factors and the constant that `_Normalised.backward` returns."""
    dz = g.float() * g_factor + z.float() * z_factor + constant
    return dz.to(z.dtype)


def _first_sums(da, a, x0, x1):
    """The sums (C,) of g1, of g1 * x0 and of g1 * x1, where g1 is da through the ReLU."""
    is_open = a > 0
    g = torch.where(is_open, da.float(), 0.0)
    g_sum = g.sum(0)
    g_x0_sum = (g * x0).sum(0)
    g_x1_sum = (g * x1).sum(0)
    return g_sum, g_x0_sum, g_x1_sum


_CHAINS = (
    _first_activation, _sums, _activation, _head, _head_sums, _head_backward, _relu_backward,
    _norm_backward, _first_sums,
)  # fmt: skip


@functools.cache  # so that all steps of a process share the code that torch.compile makes
def _chains(compiled: bool) -> SimpleNamespace:
    """The functions of `_CHAINS` as attributes, by name without the underscore.

    With `compiled`, each goes through torch.compile.
    """
    chains = SimpleNamespace()
    for chain in _CHAINS:
        name = chain.__name__.removeprefix("_")
        if compiled:
            chain = torch.compile(chain, dynamic=False, fullgraph=True)
        setattr(chains, name, chain)
    return chains

"""A training step of the ConvModel written by hand: few passes over memory, in blocks of pixels.

Every layer of the ConvModel works on pixels one by one, but for batch normalisation, which needs
the mean and variance of a whole layer before the next may begin. So a step takes five passes over
the pixels, and within a pass a block of them stays in the cache. What is cheap is computed again:
of all activations only the outputs of the two large convolutions are kept, and one gradient. The
gradients are those of Ioffe and Szegedy, "Batch normalization" (2015), rearranged so that each is a
multiple of the gradient, a multiple of the convolution's output, and a constant.
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
    """Loss and gradients of a `ConvModel`, its batch normalisation in training mode.

    Calling it with inputs (1, 2, H, W) and target (1, 1, H, W) returns the mean squared error, adds
    nothing to what is in `.grad` but replaces it, and updates the running statistics. Weights and
    gradients are float32; activations and matrix products have `dtype`. The biases before a batch
    normalisation have no gradient, and get exact zeros, where autograd gets rounding errors.
    With `compiled`, torch.compile makes one kernel of each chain of elementwise ops.
    """

    def __init__(self, model: ConvModel, dtype: torch.dtype, *, compiled: bool = True):
        self.dtype = dtype
        self.k = _kernels(compiled)
        # Any: for the type checker, what is in an `nn.Sequential` is only an `nn.Module`.
        layers: list[Any] = list(model)
        self.convs = layers[::3]
        self.norms = layers[1::3]
        self.kept = torch.empty(0, 0, 0)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, target: Tensor) -> Tensor:
        """One forward and backward pass; P pixels, C channels."""
        self._start(inputs, target)
        self._forward()
        loss = self._output()
        self._backward()
        return loss

    def _start(self, inputs: Tensor, target: Tensor) -> None:
        coordinates = inputs[0].flatten(1)  # (2, P)
        self.x = coordinates.float().contiguous()
        self.columns = self.x[:, :, None]  # (2, P, 1)
        self.target = target.flatten().float()  # (P,)
        device = self.x.device
        self.pixels = self.target.numel()
        # A GPU has thousands of threads to keep busy, and no cache that is worth a block.
        block = self.pixels
        if backend(device).is_host:
            block = BLOCK
        self.blocks: list[slice] = []
        for start in range(0, self.pixels, block):
            end = min(start + block, self.pixels)
            self.blocks.append(slice(start, end))
        channels = self.convs[1].in_channels
        shape = (3, self.pixels, channels)
        if self.kept.shape != shape:  # else as before: new memory must be mapped first
            self.kept = torch.empty(shape, dtype=self.dtype, device=device)
        self.z2, self.z3, self.g2 = self.kept  # (P, C)
        weights = [conv.weight.flatten(1) for conv in self.convs]
        self.w1, w2, w3, w4 = weights
        self.w2 = w2.to(self.dtype)
        self.w3 = w3.to(self.dtype)
        self.w4 = w4.flatten()

    def _first(self, b: slice) -> Tensor:
        """The first activation of a block, (B, C): cheaper to compute again than to keep."""
        x0, x1 = self.columns[:, b]
        shift = self.n1.shift
        return self.k.first(x0, x1, self.weight1, shift, self.dtype)

    def _forward(self) -> None:
        """Three layers in two passes: mean and variance of the first follow from the input's."""
        norm1, norm2, norm3 = self.norms
        conv1, conv2, conv3, _ = self.convs
        pixels = self.pixels
        mean, variance = self._first_moments()
        self.n1 = _Normalised(norm1, mean, variance, conv1.bias, pixels)
        scaled = self.w1 * self.n1.scale[:, None]  # (C, 2)
        self.weight1 = scaled.T.contiguous()
        sums = self._second_layer()
        self.n2 = _Normalised.from_sums(norm2, sums, conv2.bias, pixels)
        sums = self._third_layer()
        self.n3 = _Normalised.from_sums(norm3, sums, conv3.bias, pixels)

    def _first_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (C,) of the first convolution's output, which is linear in x."""
        mean = self.x.mean(1)  # (2,)
        centred = self.x - mean[:, None]
        covariance = centred @ centred.T / self.pixels  # (2, 2)
        products = (self.w1 @ covariance) * self.w1
        return self.w1 @ mean, products.sum(1)

    def _second_layer(self) -> list[Tensor]:
        """Write z2; return the sums of it and of its squares."""
        weight = self.w2.T
        sums = []
        for b in self.blocks:
            z2 = self.z2[b]
            torch.mm(self._first(b), weight, out=z2)
            sums.append(self.k.sums(z2))
        return _totals(sums)

    def _third_layer(self) -> list[Tensor]:
        """The same for z3."""
        n2 = self.n2
        weight = self.w3.T
        sums = []
        for b in self.blocks:
            z2 = self.z2[b]
            z3 = self.z3[b]
            a2 = self.k.activation(z2, n2.scale, n2.shift)
            torch.mm(a2, weight, out=z3)
            sums.append(self.k.sums(z3))
        return _totals(sums)

    def _output(self) -> Tensor:
        """The loss, and what of its gradient a sum over all pixels needs."""
        conv = self.convs[3]
        n3 = self.n3
        self.dy = torch.empty(self.pixels, device=self.x.device)
        loss, self.d, self.dz = self._head()
        dw4 = n3.scale * self.dz + n3.shift * self.d
        _set_grad(conv.weight, dw4)
        _set_grad(conv.bias, self.dy.sum())
        return loss / self.pixels

    def _head(self) -> list[Tensor]:
        """Write dy; return sums: of squared errors, and where a ReLU is open of dy and dy * z3."""
        bias = self.convs[3].bias
        scale = self.n3.scale
        shift = self.n3.shift
        factor = 2 / self.pixels
        sums: list[tuple[Tensor, ...]] = []
        for b in self.blocks:
            z3 = self.z3[b]
            target = self.target[b]
            dy = self.dy[b]
            loss, dy[:] = self.k.head(z3, scale, shift, self.w4, bias, target, factor)
            d, dz = self.k.head_sums(z3, dy, scale, shift)
            sums.append((loss, d, dz))
        return _totals(sums)

    def _backward(self) -> None:
        """Two more passes; g2 is the gradient of the second normalisation's output."""
        conv1, conv2, conv3, _ = self.convs
        g3 = self.w4 * self.d
        gz3 = self.w4 * self.dz
        to_z3 = self.n3.backward(g3, gz3)
        dw3, g2, gz2 = self._through_third(to_z3)
        _set_grad(conv3.weight, dw3)
        to_z2 = self.n2.backward(g2, gz2)
        dw2, g1, gx0, gx1 = self._through_second(to_z2)
        _set_grad(conv2.weight, dw2)
        gx = torch.stack([gx0, gx1], 1)  # (C, 2)
        dw1 = self._first_weight_grad(g1, gx)
        _set_grad(conv1.weight, dw1)
        for conv in (conv1, conv2, conv3):  # whose normalisation takes any constant away
            conv.bias.grad = torch.zeros_like(conv.bias)

    def _first_weight_grad(self, g: Tensor, gx: Tensor) -> Tensor:
        """(C, 2), from the sums over the pixels of the gradient (C,), and of it times x (C, 2)."""
        gz = (self.w1 * gx).sum(1)
        of_g, of_z, constant = self.n1.backward(g, gz)
        zx = self.w1 @ (self.x @ self.x.T)  # (C, 2)
        x_sums = self.x.sum(1)  # (2,)
        from_g = gx * of_g[:, None]
        from_z = zx * of_z[:, None]
        from_constant = constant[:, None] * x_sums
        return from_g + from_z + from_constant

    def _through_third(self, to_z3: Sequence[Tensor]) -> list[Tensor]:
        """Write g2; return the gradient of the weights, and the sums of g2 and of g2 * z2."""
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
            dz3 = self.k.through_head(z3, dy, n3.scale, n3.shift, self.w4, *to_z3)
            dw3 += dz3.T @ self.k.activation(z2, n2.scale, n2.shift)
            da2 = dz3 @ self.w3
            sums.append(self.k.through_relu(g2, da2, z2, n2.scale, n2.shift))
        return [dw3, *_totals(sums)]

    def _through_second(self, to_z2: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of the weights, and the sums of g1, the gradient below, and of g1 * x."""
        weight = self.convs[1].weight.flatten(1)
        dw2 = torch.zeros_like(weight)
        sums = []
        for b in self.blocks:
            z2 = self.z2[b]
            g2 = self.g2[b]
            dz2 = self.k.through_norm(g2, z2, *to_z2)
            a1 = self._first(b)
            dw2 += dz2.T @ a1
            da1 = dz2 @ self.w2
            x0, x1 = self.columns[:, b]
            sums.append(self.k.first_sums(da1, a1, x0, x1))
        return [dw2, *_totals(sums)]


def _totals(sums: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """The sums over all blocks, from those of each."""
    totals: list[Tensor] = []
    for of_blocks in zip(*sums, strict=True):
        stacked = torch.stack(of_blocks)
        totals.append(stacked.sum(0))
    return totals


def _set_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.reshape(parameter.shape)


class _Normalised:
    """Batch normalisation of z (P, C), without its convolution's bias, as z * scale + shift."""

    def __init__(self, norm: Any, mean: Tensor, variance: Tensor, bias: Tensor, n: int):
        self.norm = norm
        self.mean = mean
        self.pixels = n
        self.inverse_std = (variance + norm.eps).rsqrt()
        self.scale = norm.weight * self.inverse_std
        self.shift = norm.bias - mean * self.scale
        with_bias = mean + bias
        norm.running_mean.lerp_(with_bias, norm.momentum)
        correction = n / (n - 1)
        unbiased = variance * correction
        norm.running_var.lerp_(unbiased, norm.momentum)
        norm.num_batches_tracked += 1

    @classmethod
    def from_sums(cls, norm: Any, sums: Sequence[Tensor], bias: Tensor, n: int):
        """From the sums of z and of its squares."""
        mean, mean_square = (total / n for total in sums)
        variance = mean_square - mean * mean
        variance = variance.clamp_min(0)  # rounding may make it negative
        return cls(norm, mean, variance, bias, n)

    def backward(self, g: Tensor, gz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of gradient, of z, and the constant that make the gradient of z.

        `g` and `gz` are the sums over the pixels of the gradient of the output, and of its product
        with z. Sets the gradients of the normalisation's own parameters.
        """
        centred = gz - self.mean * g
        d_weight = centred * self.inverse_std
        _set_grad(self.norm.weight, d_weight)
        _set_grad(self.norm.bias, g)
        scale = self.scale
        of_z = -scale * d_weight * self.inverse_std / self.pixels
        of_mean = -scale * g / self.pixels
        constant = of_mean - of_z * self.mean
        return scale, of_z, constant


# --- The chains of elementwise ops; (B, C) blocks of pixels, (C,) factors.


def _first(x0, x1, weight, shift, dtype):
    w0 = weight[0]
    w1 = weight[1]
    a = x0 * w0 + x1 * w1 + shift
    a = torch.relu(a)
    return a.to(dtype)


def _sums(z):
    z = z.float()
    return z.sum(0), (z * z).sum(0)


def _activation(z, scale, shift):
    a = z.float() * scale + shift
    a = torch.relu(a)
    return a.to(z.dtype)


def _head(z, scale, shift, weight, bias, target, factor):
    a = torch.relu(z.float() * scale + shift)
    product = (a * weight).sum(1)  # (B,)
    error = product + bias - target
    squares = error * error
    return squares.sum(), error * factor


def _head_sums(z, dy, scale, shift):
    z = z.float()
    is_open = z * scale + shift > 0
    d = torch.where(is_open, dy[:, None], 0.0)
    total = d.sum(0)
    with_z = (d * z).sum(0)
    return total, with_z


def _through_head(z, dy, scale, shift, weight, of_g, of_z, constant):
    low = z.dtype
    z = z.float()
    is_open = z * scale + shift > 0
    g = dy[:, None] * weight
    g = torch.where(is_open, g, 0.0)
    dz = g * of_g + z * of_z + constant
    return dz.to(low)


def _through_relu(out, da, z, scale, shift):
    z = z.float()
    is_open = z * scale + shift > 0
    g = torch.where(is_open, da.float(), 0.0)
    out.copy_(g)
    total = g.sum(0)
    with_z = (g * z).sum(0)
    return total, with_z


def _through_norm(g, z, of_g, of_z, constant):
    dz = g.float() * of_g + z.float() * of_z + constant
    return dz.to(z.dtype)


def _first_sums(da, a, x0, x1):
    is_open = a > 0
    g = torch.where(is_open, da.float(), 0.0)
    total = g.sum(0)
    with_x0 = (g * x0).sum(0)
    with_x1 = (g * x1).sum(0)
    return total, with_x0, with_x1


_CHAINS = (
    _first, _sums, _activation, _head, _head_sums, _through_head, _through_relu, _through_norm,
    _first_sums,
)  # fmt: skip


@functools.cache  # once for a process, since a compiled function remembers what it compiled
def _kernels(compiled: bool) -> SimpleNamespace:
    """The chains by their names."""
    kernels = SimpleNamespace()
    for chain in _CHAINS:
        name = chain.__name__.removeprefix("_")
        if compiled:
            chain = torch.compile(chain, dynamic=False, fullgraph=True)
        setattr(kernels, name, chain)
    return kernels

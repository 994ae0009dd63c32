"""A training step of the ConvModel written by hand: few passes over memory, in blocks of pixels.

Every layer of the ConvModel works on pixels one by one, but for batch normalisation, which needs
the mean and variance of a whole layer before the next may begin. So a step takes five passes over
the pixels, and within a pass a block of them stays in the cache. What is cheap is computed again
instead of being stored: of all activations only the outputs of the two large convolutions are kept,
and one gradient. The mean and variance of the first convolution follow from those of its input,
since it is linear. The gradients are those of Ioffe and Szegedy, "Batch normalization" (2015),
rearranged so that each is a multiple of the gradient, a multiple of the convolution's output, and
a constant.
"""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from amp_lab.bench.convmodel import ConvModel

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
        self._model, self._dtype = model, dtype
        self._kept: list[Tensor] | None = None
        self._kernels = _compiled() if compiled else _plain()

    @torch.no_grad()
    def __call__(self, inputs: Tensor, target: Tensor) -> Tensor:
        """One forward and backward pass."""
        conv1, norm1, _, conv2, norm2, _, conv3, norm3, _, conv4 = self._model
        k, dtype = self._kernels, self._dtype
        x = inputs[0].flatten(1).float().contiguous()  # (2, P)
        t = target.flatten().float()  # (P,)
        pixels, channels = t.numel(), conv2.in_channels
        columns = x[:, :, None]  # (2, P, 1)
        block = BLOCK if x.device.type == "cpu" else pixels
        blocks = [slice(i, min(i + block, pixels)) for i in range(0, pixels, block)]

        if self._kept is None or self._kept[0].shape != (pixels, channels):
            self._kept = [
                torch.empty(pixels, channels, dtype=dtype, device=x.device) for _ in range(3)
            ]  # for the next step too: new memory would have to be mapped first
        z2, z3, g2 = self._kept  # (P, C)

        w1, w2, w3 = (conv.weight.flatten(1) for conv in (conv1, conv2, conv3))
        w2_low, w3_low = w2.to(dtype), w3.to(dtype)
        w4 = conv4.weight.flatten()

        # Forward, first two layers.
        mean_x = x.mean(1)  # (2,)
        centred = x - mean_x[:, None]
        covariance = centred @ centred.T / pixels  # (2, 2)
        n1 = _Normalised(norm1, w1 @ mean_x, ((w1 @ covariance) * w1).sum(1), conv1.bias, pixels)
        sums = []
        weight1 = (w1 * n1.scale[:, None]).T.contiguous()  # (2, C)
        for b in blocks:
            a1 = k.first(columns[0, b], columns[1, b], weight1, n1.shift, dtype)
            torch.mm(a1, w2_low.T, out=z2[b])
            sums.append(k.sums(z2[b]))
        n2 = _Normalised.from_sums(norm2, sums, conv2.bias, pixels)

        # Third layer.
        sums = []
        for b in blocks:
            a2 = k.activation(z2[b], n2.scale, n2.shift)
            torch.mm(a2, w3_low.T, out=z3[b])
            sums.append(k.sums(z3[b]))
        n3 = _Normalised.from_sums(norm3, sums, conv3.bias, pixels)

        # Output and loss, and what of their gradient a sum over all pixels needs.
        dy = torch.empty(pixels, device=x.device)
        sums = []
        for b in blocks:
            loss, dy[b] = k.head(z3[b], n3.scale, n3.shift, w4, conv4.bias, t[b], 2 / pixels)
            sums.append((loss, *k.head_sums(z3[b], dy[b], n3.scale, n3.shift)))
        loss, d, dz = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
        _set_grad(conv4.weight, n3.scale * dz + n3.shift * d)
        _set_grad(conv4.bias, dy.sum())

        # Backward through the third layer: g2 is the gradient of the second normalisation's output.
        to_z3 = n3.backward(w4 * d, w4 * dz)
        dw3, sums = torch.zeros_like(w3), []
        for b in blocks:
            dz3 = k.through_head(z3[b], dy[b], n3.scale, n3.shift, w4, *to_z3)
            dw3 += dz3.T @ k.activation(z2[b], n2.scale, n2.shift)
            sums.append(k.through_relu(g2[b], dz3 @ w3_low, z2[b], n2.scale, n2.shift))
        _set_grad(conv3.weight, dw3)
        g, gz = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))

        # Backward through the second and the first.
        to_z2 = n2.backward(g, gz)
        dw2, sums = torch.zeros_like(w2), []
        for b in blocks:
            dz2 = k.through_norm(g2[b], z2[b], *to_z2)
            a1 = k.first(columns[0, b], columns[1, b], weight1, n1.shift, dtype)
            dw2 += dz2.T @ a1
            sums.append(k.first_sums(dz2 @ w2_low, a1, columns[0, b], columns[1, b]))
        _set_grad(conv2.weight, dw2)
        g, gx0, gx1 = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
        gx = torch.stack([gx0, gx1], 1)  # (C, 2)
        of_g, of_z, constant = n1.backward(g, (w1 * gx).sum(1))
        zx = w1 @ (x @ x.T)  # (C, 2)
        _set_grad(
            conv1.weight,
            gx * of_g[:, None] + zx * of_z[:, None] + constant[:, None] * x.sum(1),
        )
        for conv in (conv1, conv2, conv3):
            conv.bias.grad = torch.zeros_like(conv.bias)
        return loss / pixels


def _set_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.reshape(parameter.shape)


class _Normalised:
    """Batch normalisation of z (P, C), without its convolution's bias, as z * scale + shift."""

    def __init__(self, norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, bias: Tensor, n: int):
        self.norm, self.mean, self.pixels = norm, mean, n
        self.inverse_std = (variance + norm.eps).rsqrt()
        self.scale = norm.weight * self.inverse_std
        self.shift = norm.bias - mean * self.scale
        norm.running_mean.lerp_(mean + bias, norm.momentum)
        norm.running_var.lerp_(variance * (n / (n - 1)), norm.momentum)
        norm.num_batches_tracked += 1

    @classmethod
    def from_sums(cls, norm, sums: list[tuple[Tensor, Tensor]], bias: Tensor, n: int):
        """From the sums of z and of its squares in each block."""
        total, squares = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
        mean = total / n
        variance = (squares / n - mean * mean).clamp_min(0)
        return cls(norm, mean, variance, bias, n)

    def backward(self, g: Tensor, gz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of gradient, of z, and the constant that make the gradient of z.

        `g` and `gz` are the sums over the pixels of the gradient of the output, and of its product
        with z. Sets the gradients of the normalisation's own parameters.
        """
        d_weight = (gz - self.mean * g) * self.inverse_std
        _set_grad(self.norm.weight, d_weight)
        _set_grad(self.norm.bias, g)
        of_z = -self.scale * d_weight * self.inverse_std / self.pixels
        return self.scale, of_z, -self.scale * g / self.pixels - of_z * self.mean


# --- The chains of elementwise ops; (B, C) blocks of pixels, (C,) factors.


def _first(x0, x1, weight, shift, dtype):
    return torch.relu(x0 * weight[0] + x1 * weight[1] + shift).to(dtype)


def _sums(z):
    z = z.float()
    return z.sum(0), (z * z).sum(0)


def _activation(z, scale, shift):
    return torch.relu(z.float() * scale + shift).to(z.dtype)


def _head(z, scale, shift, weight, bias, target, factor):
    a = torch.relu(z.float() * scale + shift)
    error = (a * weight).sum(1) + bias - target  # (B,)
    return (error * error).sum(), error * factor


def _head_sums(z, dy, scale, shift):
    z = z.float()
    d = torch.where(z * scale + shift > 0, dy[:, None], 0.0)
    return d.sum(0), (d * z).sum(0)


def _through_head(z, dy, scale, shift, weight, of_g, of_z, constant):
    low, z = z.dtype, z.float()
    g = torch.where(z * scale + shift > 0, dy[:, None] * weight, 0.0)
    return (g * of_g + z * of_z + constant).to(low)


def _through_relu(out, da, z, scale, shift):
    z = z.float()
    g = torch.where(z * scale + shift > 0, da.float(), 0.0)
    out.copy_(g)
    return g.sum(0), (g * z).sum(0)


def _through_norm(g, z, of_g, of_z, constant):
    return (g.float() * of_g + z.float() * of_z + constant).to(z.dtype)


def _first_sums(da, a, x0, x1):
    g = torch.where(a > 0, da.float(), 0.0)
    return g.sum(0), (g * x0).sum(0), (g * x1).sum(0)


_CHAINS = (
    _first,
    _sums,
    _activation,
    _head,
    _head_sums,
    _through_head,
    _through_relu,
    _through_norm,
    _first_sums,
)


def _plain() -> SimpleNamespace:
    return SimpleNamespace(**{chain.__name__[1:]: chain for chain in _CHAINS})


@functools.cache  # once for a process, since a compiled function remembers what it compiled
def _compiled() -> SimpleNamespace:
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True)
    return SimpleNamespace(**{chain.__name__[1:]: compiled(chain) for chain in _CHAINS})

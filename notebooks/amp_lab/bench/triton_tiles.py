"""The passes of `TiledStep` as Triton kernels, for a GPU.

A program takes a tile of pixels with all their channels: what goes into a product is made in
registers right before it, and its sums are taken right after it. Only the gradient of the weights
is too large for that, and has a kernel of its own, so that with 256 channels z2, z3 and g2 are read
seven, four and three times, where a CPU reads them three times, twice and once.

Matrices are (pixels, channels), row by row. `rows` are constants of each channel, one row after the
other. FIRST says that below the layer lie the coordinates, and not another layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from amp_lab.errors import OptionError, with_type

# With 256 channels, such that NVIDIA's assembler finds registers for everything, for Ampere, Hopper
# and Blackwell. No GPU has timed them.
OPTIONS = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
_TILE = tl.constexpr(64)  # pixels of a program
_DEPTH = tl.constexpr(32)  # channels that a product takes at once
_BLOCK = 128  # rows and columns of the weights' gradient that a program sums
_SHARES = 64  # of the pixels, for that gradient


class TritonTiles:
    """The kernels for so many pixels, a multiple of 64, and channels, a power of two from 32.

    Raises `OptionError` for others. Sums are float32.
    """

    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, pixels: int, channels: int, device: torch.device):
        is_power_of_two = channels & (channels - 1) == 0
        channels_fit = channels >= _DEPTH.value and is_power_of_two
        pixels_fit = pixels % _TILE.value == 0
        has_addresses = pixels * channels < 2**31  # of 32 bits
        if not (channels_fit and pixels_fit and has_addresses):
            size = f"{pixels} pixels of {channels} channels"
            raise OptionError(
                f"{size}: on a GPU the step in tiles needs a multiple of {_TILE} pixels, and of "
                f"channels a power of two from {_DEPTH}"
            )
        self.pixels = pixels
        self.channels = channels
        self.device = device
        self.parts = pixels // _TILE.value
        self.shares = min(_SHARES, self.parts)

    @staticmethod
    def right_side(matrix: Tensor) -> Tensor:
        """The right side of a product, (K, N), as the kernels read it."""
        return matrix.contiguous()

    def run(self, name: str, *tensors: Tensor) -> None:
        """Run a pass: the tensors are in the order of its function in tiled_convmodel.cpp."""
        if name in ("forward2", "forward3"):
            self._launch(_layer, *tensors, self.pixels, FIRST=name == "forward2")
        elif name == "head":
            self._launch(_head, *tensors, self.pixels)
        elif name == "backward3":
            z2, z3, dy, affine2, rows, weight, g2, dw, sums = tensors
            self._back((dy, z3, rows, z2, affine2), weight, g2, dw, sums, first=False)
        else:
            g2, z2, x, affine1, rows, weight, dw, sums = tensors
            self._back((g2, z2, rows, x, affine1), weight, None, dw, sums, first=True)

    def _back(self, inputs, weight, out, dw, sums, *, first: bool) -> None:
        self._launch(_below, inputs, weight, out, sums, self.pixels, FIRST=first)
        block = min(_BLOCK, self.channels)
        blocks = self.channels // block
        grid = (blocks, blocks, self.shares)
        self._launch(
            _weights, inputs, dw, self.pixels, self.parts, FIRST=first, BLOCK=block, grid=grid
        )

    def _launch(self, kernel, *arguments, grid: tuple[int, ...] = (), **constants) -> None:
        constants |= {"C": self.channels, **OPTIONS}
        with torch.accelerator.device_index(self.device.index):
            try:
                kernel[grid or (self.parts,)](*arguments, **constants)
            except triton.TritonError as error:
                message = f"Triton has no step in tiles for {self.device}: {with_type(error)}"
                raise OptionError(message) from error


# --- Of a tile: addresses, constants, and what is made again in each pass.


@triton.jit
def _at(p, c, C: tl.constexpr):
    return p[:, None] * C + c[None, :]


@triton.jit
def _row(rows, i, c, C: tl.constexpr):
    return tl.load(rows + i * C + c)[None, :]


@triton.jit
def _activation(below, rows, p, c, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """relu(w0 * x0 + w1 * x1 + shift) of the coordinates, or relu(scale * z + shift)."""
    if FIRST:
        x0 = tl.load(below + p)[:, None]
        x1 = tl.load(below + pixels + p)[:, None]
        a = x0 * _row(rows, 0, c, C) + x1 * _row(rows, 1, c, C) + _row(rows, 2, c, C)
    else:
        z = tl.load(below + _at(p, c, C)).to(tl.float32)
        a = z * _row(rows, 0, c, C) + _row(rows, 1, c, C)
    return tl.maximum(a, 0.0)


@triton.jit
def _gradient(above, z, rows, p, c, C: tl.constexpr, FIRST: tl.constexpr):
    """Of a layer's output z: through its normalisation, and if it is the last through its ReLU."""
    z = tl.load(z + _at(p, c, C)).to(tl.float32)
    if FIRST:
        g = tl.load(above + _at(p, c, C)).to(tl.float32)
        return g * _row(rows, 0, c, C) + z * _row(rows, 1, c, C) + _row(rows, 2, c, C)
    is_open = z * _row(rows, 0, c, C) + _row(rows, 1, c, C) > 0
    g = tl.load(above + p)[:, None] * _row(rows, 2, c, C)
    g = tl.where(is_open, g, 0.0)
    return g + z * _row(rows, 3, c, C) + _row(rows, 4, c, C)


# --- The kernels.


@triton.jit
def _layer(below, rows, weight, z, sums, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """z = activation @ weight, and the sums of z and of its squares."""
    tile = tl.program_id(0)
    p = tile * _TILE + tl.arange(0, _TILE)
    c = tl.arange(0, C)
    out = tl.zeros((_TILE, C), tl.float32)
    for start in range(0, C, _DEPTH):
        k = start + tl.arange(0, _DEPTH)
        a = _activation(below, rows, p, k, pixels, C, FIRST)
        w = tl.load(weight + _at(k, c, C))
        out = tl.dot(a.to(w.dtype), w, out, input_precision="ieee")
    tl.store(z + _at(p, c, C), out.to(z.dtype.element_ty))
    sums += 2 * tile * C
    tl.store(sums + c, tl.sum(out, 0))
    tl.store(sums + C + c, tl.sum(out * out, 0))


@triton.jit
def _head(z, rows, bias, target, dy, sums, pixels, C: tl.constexpr):
    """The last layer, dy; sums of dy, dy * z where the ReLU is open, and of squared errors."""
    tile = tl.program_id(0)
    p = tile * _TILE + tl.arange(0, _TILE)
    c = tl.arange(0, C)
    z = tl.load(z + _at(p, c, C)).to(tl.float32)
    a = tl.maximum(z * _row(rows, 0, c, C) + _row(rows, 1, c, C), 0.0)
    error = tl.sum(a * _row(rows, 2, c, C), 1) + tl.load(bias) - tl.load(target + p)
    d = error * 2 / pixels
    tl.store(dy + p, d)
    g = tl.where(a > 0, d[:, None], 0.0)
    sums += 3 * tile * C
    tl.store(sums + c, tl.sum(g, 0))
    tl.store(sums + C + c, tl.sum(g * z, 0))
    tl.store(sums + 2 * C, tl.sum(error * error, 0))


@triton.jit
def _below(inputs, weight, out, sums, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """The gradient of a layer's input through the ReLU below; its sums, with what is below too."""
    above, z, rows, below, below_rows = inputs
    tile = tl.program_id(0)
    p = tile * _TILE + tl.arange(0, _TILE)
    c = tl.arange(0, C)
    da = tl.zeros((_TILE, C), tl.float32)
    for start in range(0, C, _DEPTH):
        k = start + tl.arange(0, _DEPTH)
        w = tl.load(weight + _at(k, c, C))
        dz = _gradient(above, z, rows, p, k, C, FIRST).to(w.dtype)
        da = tl.dot(dz, w, da, input_precision="ieee")
    a = _activation(below, below_rows, p, c, pixels, C, FIRST)
    g = tl.where(a > 0, da, 0.0)
    if FIRST:
        sums += 3 * tile * C
        x0 = tl.load(below + p)[:, None]
        x1 = tl.load(below + pixels + p)[:, None]
        tl.store(sums + C + c, tl.sum(g * x0, 0))
        tl.store(sums + 2 * C + c, tl.sum(g * x1, 0))
    else:
        sums += 2 * tile * C
        tl.store(out + _at(p, c, C), g.to(out.dtype.element_ty))
        z_below = tl.load(below + _at(p, c, C)).to(tl.float32)
        tl.store(sums + C + c, tl.sum(g * z_below, 0))
    tl.store(sums + c, tl.sum(g, 0))


@triton.jit
def _weights(inputs, dw, pixels, tiles, C: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """A block of dz.T @ activation, summed over the tiles of a share of the pixels."""
    above, z, rows, below, below_rows = inputs
    share = tl.program_id(2)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = tl.zeros((BLOCK, BLOCK), tl.float32)
    for tile in range(share, tiles, tl.num_programs(2)):
        p = tile * _TILE + tl.arange(0, _TILE)
        dz = _gradient(above, z, rows, p, n, C, FIRST).to(z.dtype.element_ty)
        a = _activation(below, below_rows, p, k, pixels, C, FIRST).to(z.dtype.element_ty)
        out = tl.dot(tl.trans(dz), a, out, input_precision="ieee")
    tl.store(dw + share * C * C + _at(n, k, C), out)

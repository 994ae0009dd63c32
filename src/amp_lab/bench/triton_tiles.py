"""The passes of `TiledStep` as Triton kernels, for a GPU.

A program takes a tile of pixels with all their channels: what goes into a product is made in
registers right before it, and its sums are taken right after it. Only the gradient of the weights
is too large for that, and has a kernel of its own, so that with 256 channels z2, z3 and g2 are read
seven, four and three times, where a CPU reads them three times, twice and once.

Matrices are (pixels, channels), row by row; in them, `p` are the pixels of a tile and `c` channels.
`rows` are constants of each channel, one row after the other. FIRST says that below the layer lie
the coordinates, and not another layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from amp_lab.core.errors import OptionError, with_type

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
            wanted = f"a multiple of {_TILE} pixels, and of channels a power of two from {_DEPTH}"
            raise OptionError(f"{size}: on a GPU the step in tiles needs {wanted}")
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
            is_first = name == "forward2"
            self._launch(_layer, *tensors, self.pixels, FIRST=is_first)
        elif name == "head":
            self._launch(_head, *tensors, self.pixels)
        elif name == "backward3":
            z2, z3, dy, affine2, rows, weight, g2, dw, sums = tensors
            inputs = (dy, z3, rows, z2, affine2)
            self._back(inputs, weight, g2, dw, sums, first=False)
        else:
            g2, z2, x, affine1, rows, weight, dw, sums = tensors
            inputs = (g2, z2, rows, x, affine1)
            self._back(inputs, weight, None, dw, sums, first=True)

    def _back(self, inputs, weight, out, dw, sums, *, first: bool) -> None:
        self._launch(_below, inputs, weight, out, sums, self.pixels, FIRST=first)
        block = min(_BLOCK, self.channels)
        blocks = self.channels // block
        grid = (blocks, blocks, self.shares)
        sizes = (self.pixels, self.parts)
        self._launch(_weights, inputs, dw, *sizes, FIRST=first, BLOCK=block, grid=grid)

    def _launch(self, kernel, *arguments, grid: tuple[int, ...] = (), **constants) -> None:
        constants |= {"C": self.channels, **OPTIONS}
        if not grid:
            grid = (self.parts,)
        with torch.accelerator.device_index(self.device.index):
            try:
                launch = kernel[grid]
                launch(*arguments, **constants)
            except triton.TritonError as error:
                message = f"Triton has no step in tiles for {self.device}: {with_type(error)}"
                raise OptionError(message) from error


# --- Of a tile: addresses, constants, and what is made again in each pass.


@triton.jit
def _at(p, c, C: tl.constexpr):
    rows = p[:, None]
    columns = c[None, :]
    return rows * C + columns


@triton.jit
def _pixels_of(tile):
    return tile * _TILE + tl.arange(0, _TILE)


@triton.jit
def _values(matrix, p, c, C: tl.constexpr):
    """A part of a matrix of activations or gradients, in float32."""
    values = tl.load(matrix + _at(p, c, C))
    return values.to(tl.float32)


@triton.jit
def _row(rows, i, c, C: tl.constexpr):
    row = tl.load(rows + i * C + c)
    return row[None, :]


@triton.jit
def _column(pixel_values, p):
    column = tl.load(pixel_values + p)
    return column[:, None]


@triton.jit
def _activation(below, rows, p, c, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """relu(w0 * x0 + w1 * x1 + shift) of the coordinates, or relu(scale * z + shift)."""
    if FIRST:
        x0 = _column(below, p)
        x1 = _column(below + pixels, p)
        w0 = _row(rows, 0, c, C)
        w1 = _row(rows, 1, c, C)
        shift = _row(rows, 2, c, C)
        a = x0 * w0 + x1 * w1 + shift
    else:
        z = _values(below, p, c, C)
        scale = _row(rows, 0, c, C)
        shift = _row(rows, 1, c, C)
        a = z * scale + shift
    return tl.maximum(a, 0.0)


@triton.jit
def _gradient(above, z, rows, p, c, C: tl.constexpr, FIRST: tl.constexpr):
    """Of a layer's output z: through its normalisation, and if it is the last through its ReLU."""
    z = _values(z, p, c, C)
    if FIRST:
        g = _values(above, p, c, C)
        of_g = _row(rows, 0, c, C)
        of_z = _row(rows, 1, c, C)
        constant = _row(rows, 2, c, C)
        return g * of_g + z * of_z + constant
    scale = _row(rows, 0, c, C)
    shift = _row(rows, 1, c, C)
    is_open = z * scale + shift > 0
    weight = _row(rows, 2, c, C)
    g = _column(above, p) * weight
    g = tl.where(is_open, g, 0.0)
    of_z = _row(rows, 3, c, C)
    constant = _row(rows, 4, c, C)
    return g + z * of_z + constant


# --- The kernels.


@triton.jit
def _layer(below, rows, weight, z, sums, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """z = activation @ weight, and the sums of z and of its squares."""
    tile = tl.program_id(0)
    p = _pixels_of(tile)
    c = tl.arange(0, C)
    out = tl.zeros((_TILE, C), tl.float32)
    for start in range(0, C, _DEPTH):
        k = start + tl.arange(0, _DEPTH)
        w = tl.load(weight + _at(k, c, C))
        a = _activation(below, rows, p, k, pixels, C, FIRST)
        a = a.to(w.dtype)
        out = tl.dot(a, w, out, input_precision="ieee")
    rounded = out.to(z.dtype.element_ty)
    tl.store(z + _at(p, c, C), rounded)
    total = tl.sum(out, 0)
    total_of_squares = tl.sum(out * out, 0)
    sums += 2 * tile * C
    tl.store(sums + c, total)
    tl.store(sums + C + c, total_of_squares)


@triton.jit
def _head(z, rows, bias, target, dy, sums, pixels, C: tl.constexpr):
    """The last layer, dy; sums of dy, dy * z where the ReLU is open, and of squared errors."""
    tile = tl.program_id(0)
    p = _pixels_of(tile)
    c = tl.arange(0, C)
    z = _values(z, p, c, C)
    scale = _row(rows, 0, c, C)
    shift = _row(rows, 1, c, C)
    a = tl.maximum(z * scale + shift, 0.0)
    weight = _row(rows, 2, c, C)
    product = tl.sum(a * weight, 1)
    error = product + tl.load(bias) - tl.load(target + p)
    d = error * 2 / pixels
    tl.store(dy + p, d)
    g = tl.where(a > 0, d[:, None], 0.0)
    total = tl.sum(g, 0)
    total_with_z = tl.sum(g * z, 0)
    squared_error = tl.sum(error * error, 0)
    sums += 3 * tile * C
    tl.store(sums + c, total)
    tl.store(sums + C + c, total_with_z)
    tl.store(sums + 2 * C, squared_error)


@triton.jit
def _below(inputs, weight, out, sums, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """The gradient of a layer's input through the ReLU below; its sums, with what is below too."""
    above, z, rows, below, below_rows = inputs
    tile = tl.program_id(0)
    p = _pixels_of(tile)
    c = tl.arange(0, C)
    da = tl.zeros((_TILE, C), tl.float32)
    for start in range(0, C, _DEPTH):
        k = start + tl.arange(0, _DEPTH)
        w = tl.load(weight + _at(k, c, C))
        dz = _gradient(above, z, rows, p, k, C, FIRST)
        dz = dz.to(w.dtype)
        da = tl.dot(dz, w, da, input_precision="ieee")
    a = _activation(below, below_rows, p, c, pixels, C, FIRST)
    g = tl.where(a > 0, da, 0.0)
    if FIRST:
        sums += 3 * tile * C
        x0 = _column(below, p)
        x1 = _column(below + pixels, p)
        total_with_x0 = tl.sum(g * x0, 0)
        total_with_x1 = tl.sum(g * x1, 0)
        tl.store(sums + C + c, total_with_x0)
        tl.store(sums + 2 * C + c, total_with_x1)
    else:
        sums += 2 * tile * C
        rounded = g.to(out.dtype.element_ty)
        tl.store(out + _at(p, c, C), rounded)
        z_below = _values(below, p, c, C)
        total_with_z = tl.sum(g * z_below, 0)
        tl.store(sums + C + c, total_with_z)
    total = tl.sum(g, 0)
    tl.store(sums + c, total)


@triton.jit
def _weights(inputs, dw, pixels, tiles, C: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """A block of dz.T @ activation, summed over the tiles of a share of the pixels."""
    above, z, rows, below, below_rows = inputs
    share = tl.program_id(2)
    shares = tl.num_programs(2)
    first_row = tl.program_id(0) * BLOCK
    first_column = tl.program_id(1) * BLOCK
    n = first_row + tl.arange(0, BLOCK)
    k = first_column + tl.arange(0, BLOCK)
    dtype = z.dtype.element_ty
    out = tl.zeros((BLOCK, BLOCK), tl.float32)
    for tile in range(share, tiles, shares):
        p = _pixels_of(tile)
        dz = _gradient(above, z, rows, p, n, C, FIRST)
        dz = tl.trans(dz.to(dtype))
        a = _activation(below, below_rows, p, k, pixels, C, FIRST)
        a = a.to(dtype)
        out = tl.dot(dz, a, out, input_precision="ieee")
    dw += share * C * C
    tl.store(dw + _at(n, k, C), out)

"""The passes of `TiledStep` as Triton kernels, for a GPU.

A program (Triton's word for a block of threads) takes a tile of pixels with all their channels. It
computes the operands of a matmul in registers right before it, and the sums right after it. Only
the weight gradient is too large for that, and has a separate kernel. So, with 256 channels, z2, z3
and g2 are read seven, four and three times, where a CPU reads them three times, twice and once.

Names: matrices are (pixels, channels), row by row. `p` are the indices of a tile's pixels, `c` and
`k` the indices of channels, and C is the number of channels. `rows` holds constants of each
channel, one row after the other. `below` is the input of a layer: the coordinates if FIRST, else
the output z of the layer below. `above` is the gradient that comes from above: g if FIRST, else dy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from amp_lab.core.errors import OptionError, with_type

# With these, 256 channels fit into the registers of Ampere, Hopper and Blackwell, as NVIDIA's
# assembler reports. They were not timed on any GPU.
OPTIONS = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
_TILE = tl.constexpr(64)  # pixels of a program
_DEPTH = tl.constexpr(32)  # channels of one step of a matmul's loop
_BLOCK = 128  # rows and columns of the weight gradient that one program computes
_SHARES = 64  # groups of tiles whose weight gradients are summed separately


class TritonTiles:
    """The Triton kernels for a number of pixels and of channels; sums are float32.

    Pixels have to be a multiple of 64, channels a power of two from 32, and their product below
    2^31; other sizes raise `OptionError`. `parts` counts the partial sums, one for each tile of 64
    pixels, and `shares` the partial weight gradients, one for each group of tiles.
    """

    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, pixels: int, channels: int, device: torch.device):
        is_power_of_two = channels & (channels - 1) == 0
        channels_fit = channels >= _DEPTH.value and is_power_of_two
        pixels_fit = pixels % _TILE.value == 0
        fits_int32 = pixels * channels < 2**31  # the kernels' indices are int32
        if not (channels_fit and pixels_fit and fits_int32):
            size = f"{pixels} pixels of {channels} channels"
            sizes = (
                f"a multiple of {_TILE.value} pixels, a power of two of at least {_DEPTH.value} "
                "channels, and fewer than 2^31 values"
            )
            raise OptionError(f"{size}: on a GPU, the tiled step needs {sizes}")
        self.pixels = pixels
        self.channels = channels
        self.device = device
        self.parts = pixels // _TILE.value
        self.shares = min(_SHARES, self.parts)

    @staticmethod
    def right_operand(matrix: Tensor) -> Tensor:
        """The right operand (K, N) of a matmul, contiguous as the kernels read it."""
        return matrix.contiguous()

    def run(self, name: str, *tensors: Tensor) -> None:
        """Run the pass `name`, with the tensors in the order of tiled_convmodel.cpp's function."""
        if name in ("forward2", "forward3"):
            is_first = name == "forward2"
            self._launch(_layer, *tensors, self.pixels, FIRST=is_first)
        elif name == "head":
            self._launch(_head, *tensors, self.pixels)
        elif name == "backward3":
            z2, z3, dy, affine2, rows, weight, g2, dw, sums = tensors
            inputs = (dy, z3, rows, z2, affine2)
            self._run_backward(inputs, weight, g2, dw, sums, is_first=False)
        else:  # backward2
            g2, z2, x, affine1, rows, weight, dw, sums = tensors
            inputs = (g2, z2, rows, x, affine1)
            # Below are the coordinates, which need no gradient: g1 is only summed, not written.
            self._run_backward(inputs, weight, None, dw, sums, is_first=True)

    def _run_backward(self, inputs, weight, out, dw, sums, *, is_first: bool) -> None:
        """Launch the kernels of the input's and of the weight's gradient.

        `inputs` are the tensors ``(above, z, rows, below, below_rows)``, see the top of the module.
        The kernels write to `out` (None if `is_first`), to `dw` and to `sums`.
        """
        self._launch(_input_grad, inputs, weight, out, sums, self.pixels, FIRST=is_first)
        block = min(_BLOCK, self.channels)
        blocks = self.channels // block
        grid = (blocks, blocks, self.shares)
        tiles = self.parts  # each tile makes one part of the sums
        sizes = (self.pixels, tiles)
        self._launch(_weight_grad, inputs, dw, *sizes, FIRST=is_first, BLOCK=block, grid=grid)

    def _launch(self, kernel, *arguments, grid: tuple[int, ...] = (), **constants) -> None:
        """Launch a kernel, by default with one program for each tile of pixels.

        `constants` are its constexpr arguments; C and `OPTIONS` are added to them. Raises
        `OptionError` if Triton has no such kernel for the device.
        """
        constants |= {"C": self.channels, **OPTIONS}
        if not grid:
            grid = (self.parts,)
        with torch.accelerator.device_index(self.device.index):
            try:
                launch = kernel[grid]
                launch(*arguments, **constants)
            except triton.TritonError as error:
                message = (
                    f"Triton cannot compile the tiled step for {self.device}: {with_type(error)}"
                )
                raise OptionError(message) from error


# --- Functions of a tile that the kernels share: indices, loads, and values computed in each pass.


@triton.jit
def _offsets(p, c, C: tl.constexpr):
    """Offsets (p, c) into a matrix with C columns."""
    rows = p[:, None]
    columns = c[None, :]
    return rows * C + columns


@triton.jit
def _pixels_of(tile):
    """The indices (p,) of the pixels of a tile."""
    return tile * _TILE + tl.arange(0, _TILE)


@triton.jit
def _values(matrix, p, c, C: tl.constexpr):
    """Load the values (p, c) of a matrix of activations or gradients, in float32."""
    values = tl.load(matrix + _offsets(p, c, C))
    return values.to(tl.float32)


@triton.jit
def _row(rows, i, c, C: tl.constexpr):
    """Load the constants (1, c) in row i of `rows`."""
    row = tl.load(rows + i * C + c)
    return row[None, :]


@triton.jit
def _column(pixel_values, p):
    """Load one number for each pixel, (p, 1)."""
    column = tl.load(pixel_values + p)
    return column[:, None]


@triton.jit
def _activation(below, rows, p, c, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """relu(w0 * x0 + w1 * x1 + shift) of the coordinates if FIRST, else relu(scale * z + shift).

    The result is (p, c). `pixels` is the number of all pixels.
    """
    if FIRST:
        x0 = _column(below, p)
        x1 = _column(below + pixels, p)  # the coordinates are (2, pixels)
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
    """dz (p, c), the gradient of a layer's output z, computed from `above`.

    dz = g * g_factor + z * z_factor + constant, with one g_factor, z_factor and constant for each
    channel. It is the gradient through the layer's normalisation.

    If FIRST, `above` is g, and `rows` are g_factor, z_factor and constant. Else `above` is dy, and
    `rows` are scale, shift, dy_factor, z_factor and constant. Then g * g_factor is dy * dy_factor
    where the ReLU is open (scale * z + shift > 0), and 0 elsewhere.
    """
    z = _values(z, p, c, C)
    if FIRST:
        g = _values(above, p, c, C)
        g_factor = _row(rows, 0, c, C)
        z_factor = _row(rows, 1, c, C)
        constant = _row(rows, 2, c, C)
        return g * g_factor + z * z_factor + constant
    scale = _row(rows, 0, c, C)
    shift = _row(rows, 1, c, C)
    is_open = z * scale + shift > 0
    dy_factor = _row(rows, 2, c, C)
    scaled_g = tl.where(is_open, _column(above, p) * dy_factor, 0.0)  # g * g_factor
    z_factor = _row(rows, 3, c, C)
    constant = _row(rows, 4, c, C)
    return scaled_g + z * z_factor + constant


# --- The kernels.


@triton.jit
def _layer(below, rows, weight, z, sums, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """Write z = activation @ weight, and this tile's sums (C,) of z and of its squares."""
    tile = tl.program_id(0)
    p = _pixels_of(tile)
    c = tl.arange(0, C)
    out = tl.zeros((_TILE, C), tl.float32)
    for start in range(0, C, _DEPTH):
        k = start + tl.arange(0, _DEPTH)
        w = tl.load(weight + _offsets(k, c, C))
        a = _activation(below, rows, p, k, pixels, C, FIRST)
        a = a.to(w.dtype)
        out = tl.dot(a, w, out, input_precision="ieee")  # float32 without TF32
    rounded = out.to(z.dtype.element_ty)
    tl.store(z + _offsets(p, c, C), rounded)
    total = tl.sum(out, 0)
    total_of_squares = tl.sum(out * out, 0)
    sums += 2 * tile * C  # this tile's part: 2 rows of C
    tl.store(sums + c, total)
    tl.store(sums + C + c, total_of_squares)


@triton.jit
def _head(z, rows, bias, target, dy, sums, pixels, C: tl.constexpr):
    """Run the last layer: write dy, and this tile's sums of dy, of dy * z and of squared errors.

    The first two sums (C,) are over the pixels where the ReLU is open.
    """
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
    error_gradient = error * 2 / pixels  # of the mean squared error
    tl.store(dy + p, error_gradient)
    open_dy = tl.where(a > 0, error_gradient[:, None], 0.0)
    dy_sum = tl.sum(open_dy, 0)
    dy_z_sum = tl.sum(open_dy * z, 0)
    squared_error = tl.sum(error * error, 0)
    sums += 3 * tile * C  # this tile's part: 3 rows of C, the last with one number
    tl.store(sums + c, dy_sum)
    tl.store(sums + C + c, dy_z_sum)
    tl.store(sums + 2 * C, squared_error)


@triton.jit
def _input_grad(inputs, weight, out, sums, pixels, C: tl.constexpr, FIRST: tl.constexpr):
    """Compute g, the gradient of a layer's input through the ReLU below, and this tile's sums.

    The sums (C,) are those of g, and of g times each coordinate if FIRST, else of g times the z
    below. Only a layer that is not FIRST writes g to `out`.
    """
    above, z, rows, below, below_rows = inputs
    tile = tl.program_id(0)
    p = _pixels_of(tile)
    c = tl.arange(0, C)
    da = tl.zeros((_TILE, C), tl.float32)
    for start in range(0, C, _DEPTH):
        k = start + tl.arange(0, _DEPTH)
        w = tl.load(weight + _offsets(k, c, C))
        dz = _gradient(above, z, rows, p, k, C, FIRST)
        dz = dz.to(w.dtype)
        da = tl.dot(dz, w, da, input_precision="ieee")  # float32 without TF32
    a = _activation(below, below_rows, p, c, pixels, C, FIRST)
    g = tl.where(a > 0, da, 0.0)
    if FIRST:
        sums += 3 * tile * C  # the three sums of this tile
        x0 = _column(below, p)
        x1 = _column(below + pixels, p)
        g_x0_sum = tl.sum(g * x0, 0)
        g_x1_sum = tl.sum(g * x1, 0)
        tl.store(sums + C + c, g_x0_sum)
        tl.store(sums + 2 * C + c, g_x1_sum)
    else:
        sums += 2 * tile * C  # the two sums of this tile
        rounded = g.to(out.dtype.element_ty)
        tl.store(out + _offsets(p, c, C), rounded)
        z_below = _values(below, p, c, C)
        gz_sum = tl.sum(g * z_below, 0)
        tl.store(sums + C + c, gz_sum)
    g_sum = tl.sum(g, 0)
    tl.store(sums + c, g_sum)


@triton.jit
def _weight_grad(
    inputs, dw, pixels, tiles, C: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    """Write one block of the weight gradient dz.T @ activation, summed over a share of the tiles.

    `dw` is (shares, C, C), and `tiles` the number of all tiles. The block has the rows `n` (columns
    of dz) and the columns `k` (columns of the activation).
    """
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
        out = tl.dot(dz, a, out, input_precision="ieee")  # float32 without TF32
    dw += share * C * C  # this share's matrix
    tl.store(dw + _offsets(n, k, C), out)

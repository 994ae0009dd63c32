"""The ConvModel's step written by hand, with one kernel for each pass over the pixels.

In `FusedStep` each op reads and writes a block of 4,096 pixels. Here a kernel takes a tile of 32 or
64 pixels from the inputs of a pass to the sums of its outputs. So only the saved tensors z2, z3 and
g2 are written to memory, once each, in bf16. The kernels are in C++ for a CPU (`cpp_tiles`), and in
Triton for a GPU (`triton_tiles`). fused_convmodel.py explains the names.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_lab.bench.convmodel import ConvModel
from amp_lab.bench.cpp_tiles import CppTiles, cpp_kernels, cpp_unsupported_reason
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.core.backends import backend
from amp_lab.core.errors import OptionError


class TiledStep(FusedStep):
    """A `FusedStep` with tiled kernels, for sizes that are multiples of the tiles.

    On a CPU the dtype has to be bf16.

    On a CPU, channels and pixels must be multiples of 32. On a GPU, pixels must be a multiple of
    64, and channels a power of two, 32 or more.

    The first step of a process compiles the kernels, which takes a few seconds. Raises
    `OptionError` if the kernels cannot be compiled or cannot run (see `tiled_unsupported_reason`).
    `tiles` is a class of kernels, `CppTiles` or `TritonTiles`. The default is the class for the
    model's device.
    """

    def __init__(
        self, model: ConvModel, dtype: torch.dtype = torch.bfloat16, *, tiles: type | None = None
    ):
        if tiles is None:
            weight = next(model.parameters())
            tiles = _tiles_of(weight.device)
        self.tiles_type = tiles
        if dtype not in self.tiles_type.dtypes:
            allowed = " or ".join(map(str, self.tiles_type.dtypes))
            raise OptionError(f"the tiled step computes in {allowed}, not in {dtype}")
        super().__init__(model, dtype, compiled=False)  # its kernels replace the compiled chains

    def _start(self, inputs: Tensor, target: Tensor) -> None:
        """Prepare as `FusedStep` does, and make the kernels for these sizes in `self.tiles`."""
        super()._start(inputs, target)
        self.channels = self.z2.shape[1]
        self.tiles = self.tiles_type(self.pixels, self.channels, inputs.device)

    def _run(self, name: str, *tensors: Tensor, sums: int) -> list[Tensor]:
        """Run the pass `name` of the kernels; return its sums over all pixels, `sums` tensors (C,).

        Each thread or program writes its own part of the sums, so that none waits for another.
        """
        shape = (self.tiles.parts, sums, self.channels)
        partial_sums = self.x.new_zeros(shape)
        self.tiles.run(name, *tensors, partial_sums)
        return [*partial_sums.sum(0)]

    def _run_backward(self, name: str, *tensors: Tensor, sums: int) -> list[Tensor]:
        """Run a backward pass; return the weight's gradient (C, C), then the sums of `_run`."""
        shape = (self.tiles.shares, self.channels, self.channels)
        partial_dw = self.x.new_zeros(shape)
        totals = self._run(name, *tensors, partial_dw, sums=sums)
        return [partial_dw.sum(0), *totals]

    # The methods below replace those of `FusedStep`, and return the same. The constants of each
    # channel go to a kernel as the rows of one matrix, in the order that its C++ function names.

    def _second_layer(self) -> list[Tensor]:
        """Write z2; return the sums (C,) of z2 and of its squares."""
        self.affine1 = torch.stack([*self.weight1, self.n1.shift])  # (3, C), for backward too
        weight = self.tiles.right_operand(self.w2.T)
        inputs = (self.x, self.affine1, weight)
        return self._run("forward2", *inputs, self.z2, sums=2)

    def _third_layer(self) -> list[Tensor]:
        """Write z3; return the sums (C,) of z3 and of its squares."""
        n2 = self.n2
        self.affine2 = torch.stack([n2.scale, n2.shift])  # (2, C), for backward too
        weight = self.tiles.right_operand(self.w3.T)
        inputs = (self.z2, self.affine2, weight)
        return self._run("forward3", *inputs, self.z3, sums=2)

    def _head(self) -> list[Tensor]:
        """Write dy; return the sums of squared errors, of dy and of dy * z3, see `FusedStep`."""
        n3 = self.n3
        rows = torch.stack([n3.scale, n3.shift, self.w4])
        bias = self.convs[3].bias
        inputs = (self.z3, rows, bias, self.target)
        dy_sum, dy_z3_sum, squared_errors = self._run("head", *inputs, self.dy, sums=3)
        # The kernel writes the squared error at channel 0, and zeros at the others.
        return [squared_errors[0], dy_sum, dy_z3_sum]

    def _third_backward(self, dz3_factors: Sequence[Tensor]) -> list[Tensor]:
        """Write g2; return dw3 (C, C), and the sums (C,) of g2 and of g2 * z2."""
        g_factor, z_factor, constant = dz3_factors
        dy_factor = self.w4 * g_factor  # since g3 = w4 * dy
        n3 = self.n3
        rows = torch.stack([n3.scale, n3.shift, dy_factor, z_factor, constant])
        weight = self.tiles.right_operand(self.w3)
        inputs = (self.z2, self.z3, self.dy, self.affine2, rows, weight)
        return self._run_backward("backward3", *inputs, self.g2, sums=2)

    def _second_backward(self, dz2_factors: Sequence[Tensor]) -> list[Tensor]:
        """Return dw2 (C, C), and the sums (C,) of g1, of g1 * x0 and of g1 * x1."""
        rows = torch.stack([*dz2_factors])
        weight = self.tiles.right_operand(self.w2)
        inputs = (self.g2, self.z2, self.x, self.affine1, rows, weight)
        return self._run_backward("backward2", *inputs, sums=3)


def _tiles_of(device: torch.device) -> type:
    """The class of kernels for a device, `CppTiles` or `TritonTiles`.

    Raises `OptionError` if the kernels cannot run there, or if those in C++ do not compile.
    """
    reason = tiled_unsupported_reason(device)
    if reason:
        raise OptionError(reason)
    if backend(device).is_host:
        cpp_kernels()  # compiles them now, so that an error comes before the first step
        return CppTiles
    from amp_lab.bench.triton_tiles import TritonTiles  # here, since it imports triton

    return TritonTiles


def tiled_unsupported_reason(device: torch.device | str = "cpu") -> str | None:
    """Return the reason why `TiledStep` cannot run on a device, or None if it can."""
    if backend(device).is_host:
        return cpp_unsupported_reason()
    has_package = importlib.util.find_spec("triton") is not None
    if not backend(device).has_triton or not has_package:
        return f"the tiled step needs Triton on a GPU, and Triton is not available for {device}"
    return None

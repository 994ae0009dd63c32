"""The ConvModel's step by hand with each of its passes in one kernel.

In `FusedStep` a block of 4,096 pixels goes through one op after the other, each of which reads and
writes it. Here a tile of 32 or 64 goes from its input to the sums of its output at once. So memory
moves only what has to be kept: z2, z3 and g2, in bf16, each of them written once. The kernels are
in C++ for a CPU, and in Triton for a GPU.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_lab.bench.convmodel import ConvModel
from amp_lab.bench.cpp_tiles import CppTiles, cpp_kernels, why_not_in_cpp
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.core.backends import backend
from amp_lab.core.errors import OptionError


class TiledStep(FusedStep):
    """A `FusedStep` in bf16, of sizes that its kernels divide.

    On a CPU these are multiples of 32 channels and pixels; on a GPU, multiples of 64 pixels, and a
    power of two of channels, from 32.

    The first one of a process compiles the kernels, which takes some seconds. Raises `OptionError`
    where they cannot be compiled or cannot run, see `why_not_tiled`. `tiles` are other kernels than
    those of the model's device.
    """

    def __init__(
        self, model: ConvModel, dtype: torch.dtype = torch.bfloat16, *, tiles: type | None = None
    ):
        if tiles is None:
            weight = next(model.parameters())
            tiles = _tiles_of(weight.device)
        self.tiles_type = tiles
        if dtype not in self.tiles_type.dtypes:
            raise OptionError(f"the step in tiles computes in bf16, not in {dtype}")
        super().__init__(model, dtype, compiled=False)

    def _start(self, inputs: Tensor, target: Tensor) -> None:
        super()._start(inputs, target)
        self.channels = self.z2.shape[1]
        self.tiles = self.tiles_type(self.pixels, self.channels, inputs.device)

    def _run(self, name: str, *tensors: Tensor, sums: int) -> list[Tensor]:
        """One pass; the sums over all its parts, so many rows for each channel."""
        shape = (self.tiles.parts, sums, self.channels)
        parts = self.x.new_zeros(shape)
        self.tiles.run(name, *tensors, parts)
        return [*parts.sum(0)]

    def _run_back(self, name: str, *tensors: Tensor, sums: int) -> list[Tensor]:
        """The same, with the gradient of the weights before the sums."""
        shape = (self.tiles.shares, self.channels, self.channels)
        dw = self.x.new_zeros(shape)
        totals = self._run(name, *tensors, dw, sums=sums)
        return [dw.sum(0), *totals]

    def _second_layer(self) -> list[Tensor]:
        self.affine1 = torch.stack([*self.weight1, self.n1.shift])
        weight = self.tiles.right_side(self.w2.T)
        inputs = (self.x, self.affine1, weight)
        return self._run("forward2", *inputs, self.z2, sums=2)

    def _third_layer(self) -> list[Tensor]:
        n2 = self.n2
        self.affine2 = torch.stack([n2.scale, n2.shift])
        weight = self.tiles.right_side(self.w3.T)
        inputs = (self.z2, self.affine2, weight)
        return self._run("forward3", *inputs, self.z3, sums=2)

    def _head(self) -> list[Tensor]:
        n3 = self.n3
        rows = torch.stack([n3.scale, n3.shift, self.w4])
        bias = self.convs[3].bias
        inputs = (self.z3, rows, bias, self.target)
        d, dz, losses = self._run("head", *inputs, self.dy, sums=3)
        return [losses[0], d, dz]

    def _through_third(self, to_z3: Sequence[Tensor]) -> list[Tensor]:
        of_g, *rest = to_z3
        of_dy = self.w4 * of_g
        n3 = self.n3
        rows = torch.stack([n3.scale, n3.shift, of_dy, *rest])
        weight = self.tiles.right_side(self.w3)
        inputs = (self.z2, self.z3, self.dy, self.affine2, rows, weight)
        return self._run_back("backward3", *inputs, self.g2, sums=2)

    def _through_second(self, to_z2: Sequence[Tensor]) -> list[Tensor]:
        rows = torch.stack([*to_z2])
        weight = self.tiles.right_side(self.w2)
        inputs = (self.g2, self.z2, self.x, self.affine1, rows, weight)
        return self._run_back("backward2", *inputs, sums=3)


def _tiles_of(device: torch.device) -> type:
    """The kernels for a device, in C++ compiled; raises `OptionError` if there are none."""
    reason = why_not_tiled(device)
    if reason:
        raise OptionError(reason)
    if backend(device).is_host:
        cpp_kernels()
        return CppTiles
    from amp_lab.bench.triton_tiles import TritonTiles  # which needs triton

    return TritonTiles


def why_not_tiled(device: torch.device | str = "cpu") -> str | None:
    """Why `TiledStep` cannot run on a device, in a line; None if it can."""
    if backend(device).is_host:
        return why_not_in_cpp()
    has_package = importlib.util.find_spec("triton") is not None
    if not backend(device).has_triton or not has_package:
        return f"the step in tiles needs Triton on a GPU, and there is none here for {device}"
    return None

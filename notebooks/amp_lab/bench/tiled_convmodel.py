"""The ConvModel's step by hand with its passes in C++, for a CPU with AVX-512 and bf16.

In `FusedStep` a block of 4,096 pixels goes through one op after the other, each of which reads and
writes it. Here a block of 32 goes from its input to the sums of its output at once, and the
products are oneDNN's small ones, which torch has as `brgemm`. So memory moves only what has to be
kept: z2, z3 and g2, in bf16, each written once, and read three times, twice and once.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from amp_lab.bench.convmodel import ConvModel
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.errors import OptionError, first_line

_SOURCE = Path(__file__).with_name("tiled_convmodel.cpp")
_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "fma")
_MULTIPLE = 32
"""Of channels, and of pixels: what the kernels work on at once."""


class TiledStep(FusedStep):
    """A `FusedStep` in bf16 on a CPU; channels and pixels must be multiples of 32.

    The first one of a process compiles the kernels, which takes some seconds. Raises `OptionError`
    where they cannot be compiled or cannot run, see `why_not_tiled`.
    """

    def __init__(self, model: ConvModel, dtype: torch.dtype = torch.bfloat16):
        reason = why_not_tiled()
        if reason:
            raise OptionError(reason)
        if dtype is not torch.bfloat16:
            raise OptionError(f"the step in tiles computes in bf16, not in {dtype}")
        super().__init__(model, dtype, compiled=False)
        self.library, self.threads = _library(), torch.get_num_threads()

    def _start(self, inputs: Tensor, target: Tensor) -> None:
        super()._start(inputs, target)
        self.channels = self.z2.shape[1]
        if self.pixels % _MULTIPLE or self.channels % _MULTIPLE or not self.z2.is_cpu:
            size = f"{self.pixels} pixels of {self.channels} channels on {self.z2.device}"
            raise OptionError(f"{size}: the step in tiles needs multiples of {_MULTIPLE}, on a CPU")

    def _call(self, name: str, *tensors: Tensor) -> None:
        shape = _Shape(self.pixels, self.channels, self.threads)
        for t in tensors:  # of which the kernels get nothing but the address
            assert t.is_contiguous()
            assert t.dtype in (torch.float32, torch.bfloat16)
        getattr(self.library, name)(shape, *(ctypes.c_void_p(t.data_ptr()) for t in tensors))

    def _sums(self, rows: int) -> Tensor:
        return torch.zeros(self.threads, rows, self.channels, dtype=torch.float32)

    def _second_layer(self) -> list[Tensor]:
        self.affine1, sums = torch.stack([*self.weight1, self.n1.shift]), self._sums(2)
        self._call("forward2", self.x, self.affine1, _in_pairs(self.w2.T), self.z2, sums)
        return [*sums.sum(0)]

    def _third_layer(self) -> list[Tensor]:
        self.affine2, sums = torch.stack([self.n2.scale, self.n2.shift]), self._sums(2)
        self._call("forward3", self.z2, self.affine2, _in_pairs(self.w3.T), self.z3, sums)
        return [*sums.sum(0)]

    def _head(self) -> list[Tensor]:
        rows, sums = torch.stack([self.n3.scale, self.n3.shift, self.w4]), self._sums(3)
        bias = self.convs[3].bias
        self._call("head", self.z3, rows, bias, self.target, self.dy, sums)
        d, dz, losses = sums.sum(0)
        return [losses[0], d, dz]

    def _through_third(self, to_z3: Sequence[Tensor]) -> list[Tensor]:
        of_g, *rest = to_z3
        rows = torch.stack([self.n3.scale, self.n3.shift, self.w4 * of_g, *rest])
        dw, sums = self._sums(self.channels), self._sums(2)
        inputs = (self.z2, self.z3, self.dy, self.affine2, rows, _in_pairs(self.w3))
        self._call("backward3", *inputs, self.g2, dw, sums)
        return [dw.sum(0), *sums.sum(0)]

    def _through_second(self, to_z2: Sequence[Tensor]) -> list[Tensor]:
        dw, sums = self._sums(self.channels), self._sums(3)
        inputs = (self.g2, self.z2, self.x, self.affine1, torch.stack([*to_z2]), _in_pairs(self.w2))
        self._call("backward2", *inputs, dw, sums)
        return [dw.sum(0), *sums.sum(0)]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("pixels", "channels", "threads")]


def _in_pairs(weight: Tensor) -> Tensor:
    """The right side of a product, (K, N), with the numbers of two rows next to each other."""
    return weight.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()  # (K / 2, N, 2)


def why_not_tiled() -> str | None:
    """Why `TiledStep` cannot run here, in a line; None if it can."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "the step in tiles needs a CPU with AVX-512 and its bf16 instructions"
    if shutil.which(_compiler()) is None:
        return f"the step in tiles is compiled at its first use, and there is no {_compiler()} here"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


@functools.cache
def _library() -> ctypes.CDLL:
    """The kernels, compiled for this process: a file that is kept could be of another torch."""
    torch_ = Path(torch.__file__).parent
    flags = ["-O3", "-std=c++20", "-fPIC", *(f"-m{name}" for name in _INSTRUCTIONS)]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "kernels.so")
        compile_ = [*flags, "-fopenmp", f"-I{torch_ / 'include'}", "-c", str(_SOURCE)]
        # Without -fopenmp here: there has to be one OpenMP in a process, which is torch's.
        link = ["-shared", f"{built}.o", f"-L{torch_ / 'lib'}", "-ltorch_cpu", "-lc10"]
        for arguments in ([*compile_, "-o", f"{built}.o"], [*link, "-o", str(built)]):
            run = subprocess.run([_compiler(), *arguments], capture_output=True, text=True)
            if run.returncode:
                error = first_line(RuntimeError(run.stderr))
                raise OptionError(f"{_compiler()} does not compile {_SOURCE.name}: {error}")
        library = ctypes.CDLL(str(built))  # which stays when its file is gone
    library.has_products.restype = ctypes.c_bool
    if not library.has_products():
        raise OptionError("the step in tiles needs a torch whose oneDNN has small products in bf16")
    return library

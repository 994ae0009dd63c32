"""The passes of `TiledStep` in C++, see tiled_convmodel.cpp, for a CPU with AVX-512 and bf16."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from amp_lab.core.cpu import has_bf16_instructions
from amp_lab.core.errors import OptionError, first_line

_SOURCE = Path(__file__).with_name("tiled_convmodel.cpp")
_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "fma")
_MULTIPLE = 32
"""Of channels, and of pixels: what the kernels work on at once."""


class CppTiles:
    """The kernels for so many pixels and channels, both multiples of 32, matrices in bf16.

    Raises `OptionError` for other sizes.
    """

    dtypes = (torch.bfloat16,)

    def __init__(self, pixels: int, channels: int, device: torch.device):
        if pixels % _MULTIPLE or channels % _MULTIPLE or device.type != "cpu":
            size = f"{pixels} pixels of {channels} channels on {device}"
            raise OptionError(f"{size}: the step in tiles needs multiples of {_MULTIPLE} on a CPU")
        threads = torch.get_num_threads()
        self.shape = _Shape(pixels, channels, threads)
        self.parts = self.shares = threads

    @staticmethod
    def right_side(matrix: Tensor) -> Tensor:
        """The right side of a product, (K, N), with the numbers of two rows next to each other."""
        return matrix.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()  # (K / 2, N, 2)

    def run(self, name: str, *tensors: Tensor) -> None:
        """Run a pass, whose arguments stand in the C++ file."""
        for t in tensors:  # of which the kernels get nothing but the address
            assert t.is_contiguous()
            assert t.is_cpu
            assert t.dtype in (torch.float32, torch.bfloat16)
        getattr(cpp_kernels(), name)(self.shape, *(ctypes.c_void_p(t.data_ptr()) for t in tensors))


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("pixels", "channels", "threads")]


def why_not_in_cpp() -> str | None:
    """Why they cannot run here, in a line; None if they can."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "the step in tiles needs a CPU with AVX-512 and its bf16 instructions"
    if not has_bf16_instructions():  # oneDNN's too, which may be limited
        return "the step in tiles needs a torch whose oneDNN has small products in bf16"
    if shutil.which(_compiler()) is None:
        return f"the step in tiles is compiled at its first use, and there is no {_compiler()} here"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


@functools.cache
def cpp_kernels() -> ctypes.CDLL:
    """The kernels, compiled for this process: a file that is kept could be of another torch.

    Raises `OptionError` where they do not compile, or torch has no products for them.
    """
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

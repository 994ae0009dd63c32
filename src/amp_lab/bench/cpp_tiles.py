"""The kernels of `TiledStep` for a CPU with AVX-512 and bf16: compiles tiled_convmodel.cpp."""

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
_MULTIPLE = 32  # of pixels and of channels: the kernels work on 32 x 32 numbers at once


class CppTiles:
    """The C++ kernels for a number of pixels and of channels, with matrices in bf16.

    Pixels and channels have to be multiples of 32; other sizes raise `OptionError`. `parts` and
    `shares` count the partial sums and the partial weight gradients, one for each thread.
    """

    dtypes = (torch.bfloat16,)

    def __init__(self, pixels: int, channels: int, device: torch.device):
        if pixels % _MULTIPLE or channels % _MULTIPLE or device.type != "cpu":
            size = f"{pixels} pixels of {channels} channels on {device}"
            raise OptionError(
                f"{size}: the tiled step needs a CPU, and multiples of {_MULTIPLE} for pixels "
                "and channels"
            )
        threads = torch.get_num_threads()
        self.shape = _Shape(pixels, channels, threads)
        self.parts = self.shares = threads

    @staticmethod
    def right_operand(matrix: Tensor) -> Tensor:
        """The right operand (K, N) of a matmul as (K / 2, N, 2): two rows interleaved.

        The bf16 instructions of AVX-512 multiply such pairs.
        """
        return matrix.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()

    def run(self, name: str, *tensors: Tensor) -> None:
        """Run the function `name` of tiled_convmodel.cpp, with tensors in its parameters' order.

        The tensors are contiguous, on the CPU, and in float32 or bf16. The function writes its
        results to some of the tensors.
        """
        addresses = []
        for t in tensors:
            # The kernels get only the address, so a wrong layout or dtype would not be noticed.
            assert t.is_contiguous()
            assert t.is_cpu
            assert t.dtype in (torch.float32, torch.bfloat16)
            addresses.append(ctypes.c_void_p(t.data_ptr()))
        kernel = getattr(cpp_kernels(), name)
        kernel(self.shape, *addresses)


class _Shape(ctypes.Structure):
    """The struct `Shape` of tiled_convmodel.cpp: numbers of pixels, channels and threads."""

    _fields_ = [(name, ctypes.c_int64) for name in ("pixels", "channels", "threads")]


def cpp_unsupported_reason() -> str | None:
    """The reason why the C++ kernels cannot run here, in a line; None if they can."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "the tiled step needs a CPU with AVX-512 and its bf16 instructions"
    if not has_bf16_instructions():  # False also where an environment variable limits oneDNN
        return "the tiled step needs a torch build whose oneDNN has small matmuls in bf16"
    if shutil.which(_compiler()) is None:
        return f"the tiled step needs the C++ compiler {_compiler()}, which is not installed here"
    return None


def _compiler() -> str:
    """The command of the C++ compiler: the environment variable CXX, by default ``c++``."""
    return os.environ.get("CXX", "c++")


@functools.cache
def cpp_kernels() -> ctypes.CDLL:
    """The library of C++ kernels, compiled at the first call in a process.

    It is not kept for other processes, which may have another torch. Raises `OptionError` where the
    kernels do not compile, or where torch has no small matmuls in bf16.
    """
    torch_folder = Path(torch.__file__).parent
    flags = ["-O3", "-std=c++20", "-fPIC", *(f"-m{name}" for name in _INSTRUCTIONS)]
    with tempfile.TemporaryDirectory() as folder:
        library_file = f"{folder}/kernels.so"
        object_file = f"{library_file}.o"
        include = f"-I{torch_folder / 'include'}"
        _compile([*flags, "-fopenmp", include, "-c", str(_SOURCE), "-o", object_file])
        # Linked without -fopenmp: a process must have one OpenMP, and torch brings it.
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        _compile(["-shared", object_file, *libraries, "-o", library_file])
        library = ctypes.CDLL(library_file)  # it stays loaded when its file is deleted
    library.has_products.restype = ctypes.c_bool  # by default ctypes reads an int
    if not library.has_products():
        raise OptionError(
            "the tiled step needs a torch build whose oneDNN has small matmuls in bf16"
        )
    return library


def _compile(arguments: list[str]) -> None:
    """Run the compiler; raise `OptionError` with the first line of its errors if it fails."""
    finished = subprocess.run([_compiler(), *arguments], capture_output=True, text=True)
    if finished.returncode:
        error = first_line(RuntimeError(finished.stderr))  # `first_line` takes an exception
        raise OptionError(f"{_compiler()} cannot compile {_SOURCE.name}: {error}")

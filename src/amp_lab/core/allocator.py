"""Memory of tensors on the CPU: whether the C library keeps it or allocates it again each time."""

import ctypes
import sys
from collections.abc import Callable

# Parameters of glibc's mallopt, with the numbers that its malloc.h gives them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
# No tensor gets pages of its own (mmap), and freed memory is never given back (trim).
_SETTINGS_THAT_KEEP = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}
ENVIRONMENT = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1000000000000"
"""The same settings as environment variables, for a whole program."""


def keep_memory() -> bool:
    """Make the C library reuse the memory of freed CPU tensors; return whether this succeeded.

    By default, glibc gets the memory of each tensor of 32 MiB or more from the operating system,
    and returns this memory when the tensor is freed. If much memory is free, glibc also returns the
    memory of smaller tensors. The system then has to fill every page of 4 KiB with zeros again,
    which may take as long as the step that uses the page. This happens more often in fp32 than in
    16 bits, because tensors in 16 bits are half as large. The setting lasts for the rest of the
    process, so its memory never shrinks, and takes effect after a few steps. Source: mallopt(3).

    Returns False without Linux and glibc. `ENVIRONMENT` does the same for a whole program.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    # mallopt returns 1, or 0 for a setting that it refuses.
    return all(libc.mallopt(name, value) for name, value in _SETTINGS_THAT_KEEP.items())


def memory_taken(call: Callable[[], object]) -> int:
    """Bytes that the process takes from the operating system while `call()` runs; 0 on Windows.

    Each page of memory that the process gets is counted as a minor page fault.
    """
    if sys.platform == "win32":
        return 0
    import resource  # Windows has no such module

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults * resource.getpagesize()

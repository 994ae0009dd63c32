"""Memory of tensors on the CPU: whether the C library keeps it or takes it anew each time."""

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
    """Have the C library keep the memory of CPU tensors that are gone for those that come next.

    By default glibc takes each tensor of 32 MiB or more from the operating system and gives it back
    at its end, and smaller ones too when much is free. The system makes every page of 4 KiB anew
    then, full of zeros, which may take as long as the step that fills it; in fp32 more often than
    in 16 bits, whose tensors are half as large. It holds for the rest of the process, which stays
    as large as it ever was, and shows after a few steps. Source: mallopt(3).

    Returns whether it could be set: it takes Linux and glibc. `ENVIRONMENT` does it from outside.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(name, value) for name, value in _SETTINGS_THAT_KEEP.items())


def memory_taken(call: Callable[[], object]) -> int:
    """Bytes that a call takes anew from the operating system; 0 on Windows.

    Each page that the process gets is counted as a minor page fault.
    """
    if sys.platform == "win32":
        return 0
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults * resource.getpagesize()

"""Register an idle device guard for a type of device that this torch was built without.

torch gets the current stream from a *device guard* when it records for autograd or copies. Without
a guard for the device, torch aborts the process. There is no public function to register a guard,
so `idle_guard` writes into the table of guards in libc10.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from amp_lab.core.backends import Backend
from amp_lab.core.errors import DeviceError

# std::array<std::atomic<DeviceGuardImplInterface*>, …> c10::impl::device_guard_impl_registry
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


@contextmanager
def idle_guard(row: Backend) -> Iterator[None]:
    """The block in which a type of device uses the guard of ``meta``, which does nothing.

    `row` describes the type of device. If it already has a guard, this guard stays. Raises
    `DeviceError` if the table of guards cannot be found in libc10.
    """
    device_types: Any = torch._C._autograd.DeviceType
    index = int(getattr(device_types, row.key))
    meta_index = int(device_types.Meta)
    # The table has a pointer to a guard for each device type; it is read up to the two of interest.
    table_type = ctypes.c_void_p * (1 + max(index, meta_index))
    try:
        suffix = ".dylib" if sys.platform == "darwin" else ".so"
        libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libc10{suffix}"))
        guards = table_type.in_dll(libc10, _REGISTRY)
    except (OSError, ValueError):  # no libc10, or no such symbol in it, as on Windows
        # A torch that was built with CUDA has a guard for it.
        advice = "'cuda' or 'cpu'" if torch.backends.cuda.is_built() else "'cpu'"
        raise DeviceError(
            f"device type {row.type!r}: torch {torch.__version__} on {sys.platform} cannot trace "
            f"for this device without having one. Give {advice}"
        ) from None
    guard_before = guards[index]  # None: there is none
    if guard_before is None:
        guards[index] = guards[meta_index]
    try:
        yield
    finally:
        guards[index] = guard_before

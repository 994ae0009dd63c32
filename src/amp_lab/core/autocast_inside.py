"""Ops of torch whose kernels call matmuls, which autocast casts although it has no rule for the op.

A dispatch mode turns autocast off while it runs an op. So with a mode, these matmuls would run in
fp32: the mode would report a wrong dtype, and change the results of the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from amp_lab.core.backends import BACKENDS

# Ops of aten, each with the key of the kernel that calls the matmul. Among the samples of torch's
# op_db, no other op returns another dtype under autocast on a CPU when a mode is active.
_KERNEL_KEYS = {
    torch.ops.aten.affine_grid_generator.default: DispatchKey.CompositeExplicitAutograd,
    torch.ops.aten.linalg_pinv.atol_rtol_tensor: DispatchKey.CompositeExplicitAutogradNonFunctional,
}


@contextmanager
def autocast_inside_kernels() -> Iterator[None]:
    """The block in which a dispatch mode gets the matmuls inside these ops, with autocast's casts.

    Under autocast the mode then gets the ops of the kernel one by one. Without autocast, the block
    changes nothing.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for row in BACKENDS.values():
            for op, kernel_key in _KERNEL_KEYS.items():
                _run_above_modes(library, op, kernel_key, f"Autocast{row.key}")
        yield


def _run_above_modes(
    library: torch.library.Library, op: OpOverload, kernel_key: DispatchKey, autocast_key: str
) -> None:
    """Register the kernel of an op for a key of autocast, which comes before autograd and modes."""
    # It is registered already if the blocks are nested.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), autocast_key):
        library.impl(op, _kernel(op, kernel_key), autocast_key)


def _kernel(op: OpOverload, key: DispatchKey) -> Callable[..., torch.Tensor]:
    """A function that runs the kernel of an op for a dispatch key."""

    def run_kernel(*args, **kwargs) -> torch.Tensor:
        return op._op_dk(key, *args, **kwargs)

    return run_kernel

"""Fake copies of a model's tensors and of its inputs, and which tensors have none."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from amp_lab.core.errors import TraceError, first_line
from amp_lab.core.remedies import remedy
from amp_lab.tracing.ops_seen import storage_key

QUANTISED = remedy(
    "trace.quantised",
    "a model whose weights are tensors of a library for quantisation",
    "trace the model before it is quantised",
)
REAL_ALONE = "for kernels that take real tensors alone"


class FakeCopies:
    """Fake copies of tensors on one device, one for each tensor, one storage for each storage."""

    def __init__(self, device: torch.device):
        self._device = device
        # The originals are kept, so that no other tensor can come to have their address.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def of_each(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The copies of named tensors, under their names."""
        return {name: self.of(tensor, name) for name, tensor in tensors}

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The copy of a tensor; raises `TraceError` with its name if it can have none."""
        if id(tensor) in self._copies:
            _, fake = self._copies[id(tensor)]
            return fake
        reason = _unsupported_reason(tensor)
        if reason is not None:
            raise TraceError(f"{name} {reason}")
        if is_wrapper(tensor):
            fake = self._copy_wrapper(tensor, name)
        else:
            fake = self._copy_plain(tensor)
        self._copies[id(tensor)] = (tensor, fake)
        return fake

    def _copy_plain(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (storage_key(tensor), tensor.dtype)
        with torch.no_grad():
            if key not in self._storages:
                length = tensor.untyped_storage().nbytes() // tensor.itemsize
                self._storages[key] = torch.empty(length, dtype=tensor.dtype, device=self._device)
            fake = self._storages[key].as_strided(
                tensor.size(), tensor.stride(), tensor.storage_offset()
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.detach().requires_grad_(tensor.requires_grad)

    def _copy_wrapper(self, tensor: Any, name: str) -> torch.Tensor:
        """A copy of a tensor that is made of tensors, such as a quantised weight and its scales."""
        kind = type(tensor)
        try:
            parts, context = tensor.__tensor_flatten__()
            fakes = {part: self.of(getattr(tensor, part), name) for part in parts}
            fake = kind.__tensor_unflatten__(fakes, context, tensor.size(), tensor.stride())
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            return fake
        except Exception as error:  # the code of the subclass may raise anything
            reason = f"is a {kind.__name__} without a fake copy ({first_line(error)})"
            raise TraceError(f"{name} {reason}: {QUANTISED.text}") from error


def _unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no fake copy, and what to do about it; None if it has one."""
    if hasattr(tensor, "device_mesh"):
        return "is sharded over several devices: trace the model before it is sharded"
    # What bitsandbytes' weights carry beside their bytes, which only its kernels can read.
    if tensor.is_quantized or hasattr(tensor, "quant_state") or hasattr(tensor, "SCB"):
        return f"is quantised, {REAL_ALONE}: {QUANTISED.text}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "is sparse or nested: only dense tensors have a fake copy"
    return None

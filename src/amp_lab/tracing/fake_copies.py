"""Make fake copies of a model's tensors and inputs; refuse tensors that cannot be copied."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from amp_lab.core.errors import TraceError, first_line
from amp_lab.core.remedies import remedy
from amp_lab.core.tensors import storage_key

QUANTISED = remedy(
    "trace.quantised",
    "a library has quantised the weights of a model",
    "trace the model before it is quantised",
)
REAL_ALONE = "and its kernels take only real tensors"


class FakeCopies:
    """Makes fake copies of tensors on one device.

    A tensor is copied once, so tied weights stay tied. If tensors share a storage, so do their
    copies.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # By `id`: the original and its copy. Keeping the original keeps its `id` from being reused.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # For each storage of the originals and each dtype, a 1-D fake tensor of all its values.
        self._storages: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def of_each(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The copies of named tensors, by name."""
        return {name: self.of(tensor, name) for name, tensor in tensors}

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The copy of a tensor; raises `TraceError` with `name` if the tensor cannot be copied."""
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
        """A view of a fake storage, with the shape, strides and offset of the tensor.

        Tensors that share a storage become views of one fake storage.
        """
        # A fake storage has one dtype, so views of other dtypes get another one.
        key = (storage_key(tensor), tensor.dtype)
        with torch.no_grad():
            if key not in self._storages:
                length = tensor.untyped_storage().nbytes() // tensor.itemsize  # in values
                self._storages[key] = torch.empty(length, dtype=tensor.dtype, device=self._device)
            fake = self._storages[key].as_strided(
                tensor.size(), tensor.stride(), tensor.storage_offset()
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        # Detached: torch refuses some in-place ops on a view that was made under no_grad.
        return fake.detach().requires_grad_(tensor.requires_grad)

    def _copy_wrapper(self, tensor: Any, name: str) -> torch.Tensor:
        """A copy of a tensor that is made of tensors, such as a quantised weight and its scales.

        Raises `TraceError` with `name` if the tensor's class cannot make one.
        """
        wrapper_type = type(tensor)
        try:
            inner_names, context = tensor.__tensor_flatten__()  # names of the inner tensors
            fakes = {inner: self.of(getattr(tensor, inner), name) for inner in inner_names}
            fake = wrapper_type.__tensor_unflatten__(fakes, context, tensor.size(), tensor.stride())
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
            return fake
        except Exception as error:  # the code of the subclass may raise anything
            reason = f"is a {wrapper_type.__name__} that has no fake copy ({first_line(error)})"
            raise TraceError(f"{name} {reason}: {QUANTISED.text}") from error


def _unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Say why a tensor cannot have a fake copy, and what to do; None if it can.

    The text continues a sentence that begins with the tensor's name.
    """
    if hasattr(tensor, "device_mesh"):
        return "is sharded over several devices: trace the model before it is sharded"
    # bitsandbytes' weights have one of these attributes; only its kernels can read their bytes.
    if tensor.is_quantized or hasattr(tensor, "quant_state") or hasattr(tensor, "SCB"):
        return f"is quantised, {REAL_ALONE}: {QUANTISED.text}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "is sparse or nested, but only dense tensors have a fake copy"
    return None

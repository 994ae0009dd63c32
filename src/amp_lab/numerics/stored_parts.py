"""The tensors in which a subclass, such as torchao's quantized weights, stores its values."""

import functools
import sys
import warnings

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from amp_lab.core.errors import AmpLabWarning

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_summable_classes: dict[type, bool] = {}  # what `_supports_sums` has found, by class


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself, or the plain tensors in which a subclass stores its values.

    For a DTensor, the result is the shard of this rank. Reading all shards would need a collective,
    which hangs if not every rank reads the same tensors. If a subclass does not list its parts, the
    result is empty, with one warning for each class.
    """
    if is_sharded(tensor):
        shard: torch.Tensor = getattr(tensor, "_local_tensor")  # noqa: B009
        return parts_of(shard)
    if type(tensor) in _PLAIN or _supports_sums(tensor):
        return [tensor]
    if not is_traceable_wrapper_subclass(tensor):
        _warn_unread(type(tensor))
        return []
    names, _ = tensor.__tensor_flatten__()
    parts = []
    for name in names:
        parts += parts_of(getattr(tensor, name))
    return parts


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, as the parameters of FSDP2 are."""
    dtensor = sys.modules.get("torch.distributed.tensor")  # which takes long to load
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def _supports_sums(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class has `isfinite` and `sum`. Each class is tried only once."""
    kind = type(tensor)
    if kind not in _summable_classes:
        try:
            values = tensor.detach()
            values.isfinite()
            values.sum()
            _summable_classes[kind] = True
        except (NotImplementedError, TypeError):  # torchao raises either
            _summable_classes[kind] = False
    return _summable_classes[kind]


@functools.cache
def _warn_unread(kind: type) -> None:
    """Warn, once for each class, that tensors of this class cannot be looked at."""
    message = (
        f"the values of a {kind.__name__} are not checked: the class has neither sums nor "
        "__tensor_flatten__"
    )
    warnings.warn(message, AmpLabWarning, stacklevel=2)

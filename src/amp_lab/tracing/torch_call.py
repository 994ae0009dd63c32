"""A function of torch that the model called: what autocast casts in it, and what ran inside."""

from dataclasses import dataclass, field

import torch

from amp_lab.tracing.attention import ATTENTION
from amp_lab.tracing.ops_seen import tensor_key
from amp_lab.tracing.records import RNN_LAYERS

NORMS = {"layer_norm", "group_norm", "rms_norm", "instance_norm"}

_RNNS = RNN_LAYERS | {f"{name}_cell" for name in RNN_LAYERS}
_RNN_KERNELS = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_lstm_mps"}
# Each is one row, whatever kernels it chooses: that choice needs the device, the dtypes do not.
_ONE_ROW = _RNNS | NORMS | {ATTENTION, "batch_norm"}


@dataclass
class TorchCall:
    """A function of torch that the model called, and what was seen inside of it."""

    name: str = ""
    dtype: torch.dtype | None = None  # of autocast, None where it is off
    casts: bool = False  # whether it is a cast of the model's own, or has one of its own inside
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)  # of its arguments, after casts
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    given_dtype: torch.dtype | None = None  # of a recurrent layer: its input's, before casts
    products: set[torch.dtype] = field(default_factory=set)  # dtypes of matrix products inside
    copied: dict[int, int] = field(default_factory=dict)  # by storage: what it is a copy of

    def __post_init__(self) -> None:
        self.is_one_row = self.name in _ONE_ROW
        self.is_rnn = self.name in _RNNS

    def note_arguments(self, tensors: list[torch.Tensor]) -> None:
        """Note the dtypes and shapes of its arguments, before autocast casts them."""
        self.dtypes = {self.key(tensor): tensor.dtype for tensor in tensors}
        self.shapes = {self.key(tensor): tuple(tensor.shape) for tensor in tensors}

    def inserts_cast(self, source: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether a change of dtype during this call is autocast's."""
        if self.casts or self.dtype is None or not source.is_floating_point():
            return False
        if not self.is_one_row:
            return result.dtype in (self.dtype, torch.float32)
        # Inside of it only the cast of an argument is autocast's, and for each step of a recurrent
        # layer only the first.
        is_lowered = self.is_rnn or self.name == ATTENTION
        wanted = self.dtype if is_lowered else torch.float32
        key = self.key(source)
        if key not in self.dtypes or result.dtype != wanted:
            return False
        is_first = self.dtypes[key] == source.dtype
        self.dtypes[key] = result.dtype
        return is_first or not self.is_rnn

    def note_inside(self, name: str, args: tuple, out: torch.Tensor, is_product: bool) -> None:
        """Note an op inside a recurrent layer."""
        if is_product or name in _RNN_KERNELS:
            self.products.add(out.dtype)
        elif name == "clone" and self.key(args[0]) in self.dtypes:
            self.copied[tensor_key(out)] = self.key(args[0])  # an argument, in another order

    def key(self, tensor: torch.Tensor) -> int:
        """What tells one argument from another: a recurrent layer takes its own to pieces."""
        return self.origin(tensor) if self.is_rnn else id(tensor)

    def origin(self, tensor: torch.Tensor) -> int:
        """The storage of a tensor, or of what it was copied from inside this call."""
        storage = tensor_key(tensor)
        return self.copied.get(storage, storage)

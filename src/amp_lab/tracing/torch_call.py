"""A call of one of torch's functions: the casts of autocast in it, and the ops that ran inside."""

from dataclasses import dataclass, field

import torch

from amp_lab.core.tensors import tensor_key
from amp_lab.tracing.attention import ATTENTION, FLEX_ATTENTION
from amp_lab.tracing.records import RNN_LAYERS

NORMS = {"layer_norm", "group_norm", "rms_norm", "instance_norm"}

_RNNS = RNN_LAYERS | {f"{name}_cell" for name in RNN_LAYERS}
_RNN_KERNELS = {"mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_lstm_mps"}
# Each is one row of an X-ray, although it runs several ops: which ones depends on the device.
_ATTENTIONS = {ATTENTION, FLEX_ATTENTION}
_ONE_ROW = _RNNS | NORMS | _ATTENTIONS | {"batch_norm"}


@dataclass
class TorchCall:
    """A call of a torch function by the model, and the ops that ran inside of it so far."""

    name: str = ""
    autocast_dtype: torch.dtype | None = None  # None: autocast is off
    casts_itself: bool = False  # whether a cast inside is its own, or the model's, not autocast's
    # Of its arguments, by `key`. The dtypes change with autocast's casts. Both are empty for a call
    # that is not one row.
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # The next three are for recurrent layers alone.
    given_dtype: torch.dtype | None = None  # of the input, before casts
    matmul_dtypes: set[torch.dtype] = field(default_factory=set)  # of matmuls inside
    # For an argument that was copied: the key of the copy's storage, and that of the original's.
    copy_sources: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_one_row = self.name in _ONE_ROW
        self.is_rnn = self.name in _RNNS

    def note_arguments(self, tensors: list[torch.Tensor]) -> None:
        """Note the dtypes and shapes of the arguments, before autocast casts them."""
        self.dtypes = {self.key(tensor): tensor.dtype for tensor in tensors}
        self.shapes = {self.key(tensor): tuple(tensor.shape) for tensor in tensors}

    def note_cast(self, source: torch.Tensor, result: torch.Tensor) -> bool:
        """Note a cast that ran during this call; return whether autocast inserted it."""
        if self.autocast_dtype is None or self.casts_itself:
            return False
        if not source.is_floating_point():
            return False
        if self.is_one_row:
            return self._note_argument_cast(source, result, self.autocast_dtype)
        return result.dtype in (self.autocast_dtype, torch.float32)

    def _note_argument_cast(
        self, source: torch.Tensor, result: torch.Tensor, autocast_dtype: torch.dtype
    ) -> bool:
        """Note the new dtype of an argument in `dtypes`; return whether autocast cast it.

        For a call that is one row: of the casts inside, only those of its arguments are autocast's.
        """
        # Autocast runs recurrent layers and attention in low precision, and norms in fp32.
        target_dtype = torch.float32
        if self.is_rnn or self.name in _ATTENTIONS:
            target_dtype = autocast_dtype
        key = self.key(source)
        is_argument = key in self.dtypes
        if not is_argument or result.dtype != target_dtype:
            return False
        is_first_cast = self.dtypes[key] == source.dtype
        self.dtypes[key] = result.dtype
        if self.is_rnn:
            # Here torch's own kernels run, which cast the weights again in each time step. The
            # kernels of a device cast them once, so only the first cast counts.
            return is_first_cast
        return True

    def note_rnn_op(self, name: str, args: tuple, out: torch.Tensor, is_matmul: bool) -> None:
        """Note an op that ran inside a recurrent layer, if it is a matmul or copies an argument.

        `name` is the name of the op, `args` are its arguments, and `out` is its first result.
        """
        if is_matmul or name in _RNN_KERNELS:
            self.matmul_dtypes.add(out.dtype)
        elif name == "clone" and self.key(args[0]) in self.dtypes:
            # An argument that is copied into another memory layout is still that argument.
            self.copy_sources[tensor_key(out)] = self.key(args[0])

    def key(self, tensor: torch.Tensor) -> int:
        """A number that identifies an argument: the id of the tensor, or its storage.

        The storage is for recurrent layers, which use views of their arguments.
        """
        return self.origin(tensor) if self.is_rnn else id(tensor)

    def origin(self, tensor: torch.Tensor) -> int:
        """The key of a tensor's storage; for a copy made inside this call, the original's key."""
        storage = tensor_key(tensor)
        return self.copy_sources.get(storage, storage)

"""The log of a trace: a row for each op, and each cast that autocast inserted."""

import torch

from amp_lab.core.backends import backend
from amp_lab.core.tensors import LOWER_DTYPES, tensor_key
from amp_lab.tracing.records import RNN_LAYERS, Cast, OpRecord, PlainArgument, place_of, widest
from amp_lab.tracing.torch_call import TorchCall

_INTEGERS = {torch.int16, torch.int32, torch.int64}


class OpLog:
    """The rows and the casts of a trace, and the op that made each cast tensor."""

    def __init__(self, device_type: str):
        self._backend = backend(device_type)
        self.rows: list[OpRecord] = []
        self.casts: list[Cast] = []
        # Ops that autocast runs in fp32, whose result it then casts back to 16 bits; each with the
        # function that needs the second cast.
        self.bounces: list[tuple[OpRecord, str]] = []
        # The next two are by the key of a storage.
        self.names: dict[int, str] = {}  # of parameters, buffers and inputs
        self._written_by: dict[int, OpRecord] = {}  # the op that wrote it last
        self._casts_since_row: list[Cast] = []  # those of the inputs of the op that comes next

    def end_call(self) -> None:
        """Forget casts without a following op: casts of a call do not count for the next call."""
        self._casts_since_row = []

    def add_row(
        self,
        module: str,
        call: TorchCall,
        name: str,
        ins: list,
        outs: list,
        flop_count: int,
        arguments: dict[str, PlainArgument],
    ) -> None:
        """Add a row for an op, or for a call that is one row as a whole.

        Args:
            module: The name of the module that runs.
            call: The call of a torch function that the op belongs to.
            name: The name of the op, or of the function if all of the call is one row.
            ins: The input tensors. For a call that is one row, the row has their dtypes from before
                autocast's casts.
            outs: The output tensors.
            flop_count: The FLOPs.
            arguments: The arguments that are no tensors, see `plain_arguments`.
        """
        # With the dtypes from before autocast's casts, if the call is one row.
        in_dtypes = [call.dtypes.get(call.key(tensor), tensor.dtype) for tensor in ins]
        row = OpRecord(
            module=module,
            op=name,
            in_dtypes=tuple(in_dtypes),
            out_dtypes=tuple(tensor.dtype for tensor in outs),
            in_shapes=_shapes(ins),
            out_shapes=_shapes(outs),
            called=call.name or name,
            flops=flop_count,
            autocast=call.autocast_dtype is not None,
            widened=self._is_widened(call, name, ins, outs),
            product_dtype=widest(call.matmul_dtypes),
            given_dtype=call.given_dtype,
            arguments=arguments,
        )
        self.rows.append(row)
        self._casts_since_row = []
        for tensor in outs:
            self._written_by[tensor_key(tensor)] = row

    def _is_widened(self, call: TorchCall, name: str, ins: list, outs: list) -> bool:
        """Whether autocast makes an op compute in fp32 with an input that was in 16 bits.

        `ins` and `outs` are the tensors that the op got and returned.
        """
        if any(_widens(cast.from_dtype, cast.to_dtype) for cast in self._casts_since_row):
            return True
        if name not in ("_softmax", "_log_softmax"):
            return False
        # A softmax may need no cast: autocast calls it with the argument `dtype` set to fp32.
        if call.autocast_dtype is None or call.casts_itself:
            return False
        return _widens(ins[0].dtype, outs[0].dtype)

    def add_cast(
        self, module: str, call: TorchCall, source: torch.Tensor, result: torch.Tensor
    ) -> None:
        """Add a cast that autocast has inserted, from `source` to `result`."""
        storage = call.origin(source)
        row = self._written_by.get(storage)
        if row is None:
            place = place_of(module)
            source_text = f"a tensor made in {place}"
        else:
            place = place_of(row.module)
            source_text = f"output of {row.called} in {place}"
        shape = tuple(source.shape)
        cast = Cast(
            module=module,
            from_dtype=source.dtype,
            to_dtype=result.dtype,
            what=self.names.get(storage, source_text),
            cached=self._is_cached(call, source, result),
            shape=call.shapes.get(call.key(source), shape),
            called=call.name,
            of_integers=row is not None and _gives_integers(row),
        )
        self.casts.append(cast)
        self._casts_since_row.append(cast)
        if row is None:
            return
        # A later cast of `result` is still a cast of that op's output.
        self._written_by[tensor_key(result)] = row
        narrows = result.dtype in LOWER_DTYPES and source.dtype not in LOWER_DTYPES
        # Autocast widened the op's inputs, and now casts its output back to 16 bits.
        if row.widened and narrows:
            self.bounces.append((row, call.name))

    def _is_cached(self, call: TorchCall, source: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether autocast caches a cast, by the rule of cached_cast in ATen/autocast_mode.cpp."""
        if call.name in RNN_LAYERS and self._backend.fused_rnn_dtype is not None:
            return False  # a library that takes all weights as one flat copy has no cached casts
        if not torch.is_autocast_cache_enabled() or torch.is_inference_mode_enabled():
            return False
        if source.dtype is not torch.float32 or result.dtype is not call.autocast_dtype:
            return False
        is_trained_leaf = source.requires_grad and source.is_leaf
        return is_trained_leaf and not source._is_view()


def _shapes(tensors: list[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The shapes of tensors, as tuples of numbers."""
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _widens(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast leads from 16 bits to a wider dtype."""
    return before in LOWER_DTYPES and after not in LOWER_DTYPES


def _gives_integers(row: OpRecord) -> bool:
    """Whether the output of an op holds integers: ``arange``, or a cast from an integer dtype."""
    if row.op == "arange":
        return True
    return row.op == "_to_copy" and row.in_dtypes[0] in _INTEGERS

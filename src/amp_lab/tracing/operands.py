"""Ops with operands of different dtypes: the source of each operand, and the remedies."""

import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from amp_lab.core.remedies import remedy
from amp_lab.core.report import dtype_name
from amp_lab.core.tensors import LOWER_DTYPES, tensor_key, tensors_in
from amp_lab.tracing.ops_seen import has_autocast_rule

_INPUT = remedy(
    "dtype.inputs_of_a_cast_model",
    "an op of a model cast to fp16 or bf16 gets an input in fp32",
    "{op} gets float32 from {wide} and {dtype} from {low}. Give {wide} in {dtype}",
    failure="AMP0150",
)
_OWN = remedy(
    "dtype.own_tensor_of_a_cast_model",
    "an op of a 16-bit model gets an fp32 tensor: a buffer, a weight or an attribute",
    "{op} gets float32 from {wide} and {dtype} from {low}. Cast {name} where it is used: "
    "{name}.to(torch.{dtype})",
    failure="AMP0060",
)
_COMPUTED = remedy(
    "dtype.computed_in_a_cast_model",
    "an op of a 16-bit model gets an fp32 tensor that the model computes",
    "{op} gets float32 from {wide} and {dtype} from {low}. Cast the float32 tensor before the op: "
    "x.to(torch.{dtype})",
    failure="AMP0060",
)
_WRITE = remedy(
    "dtype.write",
    "values of another dtype are written into a tensor, by x[i] = y, index_add, scatter, …",
    "the values{place} and the tensor into which they are written have different dtypes: write "
    "values.to(target.dtype)",
    failure="AMP0019",
)
_WRITTEN = remedy(
    "dtype.written_by_a_layer",
    "a layer of a 16-bit model returns fp32 values, which are written into a 16-bit tensor",
    "the float32 values come from {wide}, in a model with weights in {dtype}. If this layer sets "
    "its output dtype, as layers with quantized weights may, model.to() does not change this "
    "dtype: pass torch.{dtype} when you create the layer",
    failure="AMP0156",
)
_IN_PLACE = remedy(
    "dtype.in_place",
    "a matmul that writes in place, x.addmm_, or into out=, gets fp32 and 16 bits",
    "autocast does not cast for in-place ops or out=. Cast the inputs of the op{place} to the "
    "dtype of the target tensor: a.to(target.dtype)",
    failure="AMP0019",
)
_OUT_OF_PLACE = remedy(
    "dtype.out_of_place",
    "a matmul in place gets fp32 and 16 bits, and autocast has a rule for the op out of place",
    "or, under autocast, assign the result, target = torch.{op}({arguments}), because autocast "
    "casts the inputs of torch.{op}",
)
# The begin of torch's messages, such as ``Index put requires the source and destination dtypes
# match`` or ``scatter(): Expected self.dtype to be equal to src.dtype``.
_WRITE_MESSAGE = re.compile(
    r"^_?(index[ _](put|add|copy|reduce)|put_?\b|scatter|masked_scatter)", re.IGNORECASE
)
# One of these words is in it too, unless the dtype of the index is what is wrong.
_WRITE_WORDS = ("source", "src", "tensors of one dtype")
_ADDING_MATMULS = ("addmm", "addmv", "addbmm", "baddbmm")  # add to their first argument
_MATMULS = (*_ADDING_MATMULS, "mm", "bmm", "mv", "matmul")
# Messages of torch, and of `kernel_limits`: ``addmm_ takes tensors of one dtype``, ``mm with out=
# takes tensors of one dtype``.
_ONE_DTYPE = re.compile(r"(one|same) dtype|dtypes must be the same")
_IN_PLACE_MESSAGE = re.compile(rf"^({'|'.join(_ADDING_MATMULS)})_ takes tensors of one dtype")
_OUT_MESSAGE = re.compile(r"^(\w+) with out= takes tensors|^Expected out tensor to have dtype")
_TORCH_FOLDER = Path(torch.__file__).parent
_PACKAGE_FOLDER = Path(__file__).parent.parent


class SourceKind(Enum):
    """Where the values of a tensor come from."""

    INPUT = "input"  # of the model
    OWN = "own"  # a parameter, a buffer or an attribute of the model
    COMPUTED = "computed"  # by an op of the model


_REMEDIES = {SourceKind.INPUT: _INPUT, SourceKind.OWN: _OWN, SourceKind.COMPUTED: _COMPUTED}


@dataclass(frozen=True)
class Source:
    """The source of a tensor's values."""

    kind: SourceKind
    text: str  # such as ``input 0``, ``buffer table``, ``the output of float in 'up'``


_UNKNOWN_SOURCE = Source(SourceKind.COMPUTED, "a tensor that the model makes")


@dataclass(frozen=True)
class Operand:
    """A floating-point tensor that an op got."""

    dtype: torch.dtype
    source: Source


class Sources:
    """Follows the sources of tensors in fp32, through the ops that compute with them."""

    def __init__(self) -> None:
        # Both by the key of a tensor's storage.
        self._named: dict[int, Source] = {}  # tensors that are there before the model runs
        self._computed: dict[int, Source] = {}  # results of ops, in fp32 alone

    def name(self, tensor: torch.Tensor, kind: SourceKind, text: str) -> None:
        """Set the source of a tensor that exists before the run, if it has no source yet."""
        self._named.setdefault(tensor_key(tensor), Source(kind, text))

    def name_attributes(self, model: nn.Module) -> None:
        """Name tensors that are plain attributes of modules: a cast of the model skips those."""
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    text = f"attribute {path}.{name}"
                    text = text.replace(" .", " ")  # the path of the model itself is ""
                    self.name(value, SourceKind.OWN, text)

    def note_op(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], text: str) -> None:
        """Note the source of an op's fp32 outputs.

        An output has the source of the op's first fp32 input, so that a result of computations in
        fp32 leads back to where fp32 came in. Without an fp32 input the op itself is the source.
        `text` describes the outputs, as ``output of float in 'up'``.
        """
        fp32_inputs = [tensor for tensor in inputs if tensor.dtype is torch.float32]
        if fp32_inputs:
            source = self.source_of(fp32_inputs[0])
        else:
            source = Source(SourceKind.COMPUTED, f"the {text}")
        for tensor in outputs:
            key = tensor_key(tensor)
            if key in self._named:  # the op writes in place, so the tensor keeps its source
                continue
            if tensor.dtype is torch.float32:
                self._computed[key] = source
            else:  # a tensor that was freed may have had the same key
                self._computed.pop(key, None)

    def source_of(self, tensor: torch.Tensor) -> Source:
        """The source of a tensor; `_UNKNOWN_SOURCE` if neither `name` nor `note_op` got it."""
        key = tensor_key(tensor)
        if key in self._named:
            return self._named[key]
        return self._computed.get(key, _UNKNOWN_SOURCE)

    def operands(self, tensors: Iterable[torch.Tensor]) -> tuple[Operand, ...]:
        """The floating-point tensors of an op, each with its source."""
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        return tuple(Operand(tensor.dtype, self.source_of(tensor)) for tensor in floats)


def low_operand(operands: tuple[Operand, ...]) -> Operand | None:
    """The first operand in 16 bits, if another operand is in fp32; else None."""
    if not any(operand.dtype is torch.float32 for operand in operands):
        return None
    return next((operand for operand in operands if operand.dtype in LOWER_DTYPES), None)


def remedy_for_mixed(
    error: Exception, op: str, operands: tuple[Operand, ...], has_low_weights: bool
) -> str:
    """The remedy for an op that failed because it got tensors in fp32 and in 16 bits.

    `op` is the name of the op and `operands` are its arguments. `has_low_weights` says whether the
    model has weights in 16 bits: if not, only a buffer or an attribute of the model is sure to be
    the cause. `remedies_for_writes` has the casts for a write and for a matmul in place.

    Returns "" for an error of another kind, and if the cause is not sure.
    """
    low = low_operand(operands)
    if low is None or "type" not in str(error):  # torch says "dtype" or "scalar type"
        return ""
    if is_write(error):
        return _remedy_for_written(operands, low, has_low_weights)
    wide_source = next(operand.source for operand in operands if operand.dtype is torch.float32)
    if wide_source.kind is not SourceKind.INPUT and _matmul_in_place(error, op) is not None:
        return ""  # the tensor in fp32 may be the one that is written
    if not has_low_weights:
        is_parameter = wide_source.text.startswith("parameter ")
        if wide_source.kind is not SourceKind.OWN or is_parameter:
            return ""
    code_line = user_line(error)
    return _REMEDIES[wide_source.kind].sentence(
        op=f"{op} ({code_line})" if code_line else op,
        wide=wide_source.text,
        low=low.source.text,
        dtype=dtype_name(low.dtype),
        name=wide_source.text.rpartition(" ")[2],  # ``table`` of ``buffer table``
    )


def _remedy_for_written(operands: tuple[Operand, ...], low: Operand, has_low_weights: bool) -> str:
    """The remedy for an op that should write fp32 values into a tensor in 16 bits.

    It names the layer that the values come from. `low` is the first operand in 16 bits. Returns ""
    if the model did not compute the values, or has no weights in 16 bits.
    """
    # An op that writes gets the tensor that it writes into first, and the values last.
    target = operands[0]
    values = operands[-1]
    if target is not low or not has_low_weights:
        return ""
    if values.source.kind is not SourceKind.COMPUTED:
        return ""
    return _WRITTEN.sentence(wide=values.source.text, dtype=dtype_name(low.dtype))


@dataclass(frozen=True)
class MixedCall:
    """A call of an op with floating-point arguments of several dtypes."""

    op: str  # such as ``mylib::attention``
    # For each dtype the names of its arguments: ((torch.float32, ("q", "k")), (torch.half, ("v",)))
    arguments: tuple[tuple[torch.dtype, tuple[str, ...]], ...]


def mixed_call(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> MixedCall | None:
    """The call of an op that gets tensors in fp32 and 16 bits, or in both 16-bit dtypes; else None.

    Tensors without a dimension, such as a scale, do not count.
    """
    argument_names = [argument.name for argument in func._schema.arguments]
    named_arguments = [*zip(argument_names, args, strict=False), *kwargs.items()]
    # For each dtype the names of its arguments; a dict, in place of a set, keeps their order.
    names_of_dtype: dict[torch.dtype, dict[str, None]] = {}
    for name, value in named_arguments:
        for tensor in tensors_in(value):
            if tensor.dim() > 0 and tensor.dtype in (torch.float32, *LOWER_DTYPES):
                names_of_dtype.setdefault(tensor.dtype, {})[name] = None
    if len(names_of_dtype) < 2:
        return None
    arguments = tuple((dtype, tuple(names)) for dtype, names in names_of_dtype.items())
    return MixedCall(func._schema.name, arguments)


def is_write(error: Exception) -> bool:
    """Whether an op refused to write values into a tensor of another dtype."""
    message = str(error)
    # "dtype" or "scalar type": the ops raise for shapes and indices too.
    if "type" not in message or not _WRITE_MESSAGE.match(message):
        return False
    return any(word in message for word in _WRITE_WORDS)


def remedies_for_writes(error: Exception, op: str, device_type: str) -> list[str]:
    """The remedies for a write of another dtype, or a matmul in place or into ``out=``.

    `op` is the op that failed, or "" if the op is unknown. The list is empty for other errors.
    """
    code_line = user_line(error)
    where = f" at {code_line}" if code_line else ""
    if is_write(error):
        return [_WRITE.sentence(place=where)]
    name = _matmul_in_place(error, op)
    if name is None:
        return []
    remedies = [_IN_PLACE.sentence(place=where)]
    matmul = name.rstrip("_")
    if matmul in _MATMULS and has_autocast_rule(f"aten::{matmul}", device_type):
        arguments = "target, a, b" if matmul in _ADDING_MATMULS else "a, b"
        remedies.append(_OUT_OF_PLACE.sentence(op=matmul, arguments=arguments))
    return remedies


def _matmul_in_place(error: Exception, op: str) -> str | None:
    """The name of the matmul that failed to write in place or into ``out=``, such as ``addmm_``.

    None for any other error. `op` is the op that failed, or "" if the op is unknown.
    """
    message = str(error)
    is_in_place = op.endswith("_") and op.rstrip("_") in _ADDING_MATMULS
    if is_in_place and _ONE_DTYPE.search(message):
        return op
    match = _IN_PLACE_MESSAGE.match(message) or _OUT_MESSAGE.match(message)
    if match is None:
        return None
    name_in_message = match[1]
    return name_in_message or op


def user_line(error: Exception) -> str:
    """The innermost line of the user's code in a traceback, as ``model.py:12``; "" if none."""
    code_line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):  # the innermost comes last
        path = Path(frame.f_code.co_filename)
        if _is_user_file(path):
            code_line = f"{path.name}:{number}"
    return code_line


def _is_user_file(path: Path) -> bool:
    """Whether a file is neither torch's nor of this package."""
    if path.name.startswith("<") or not path.suffix:  # such as ``<string>``: code without a file
        return False
    return not path.is_relative_to(_TORCH_FOLDER) and not path.is_relative_to(_PACKAGE_FOLDER)

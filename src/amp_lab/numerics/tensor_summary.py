"""Whether a tensor is finite, and a summary of its values."""

import cmath
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amp_lab.core.report import dtype_name, percent
from amp_lab.core.tensors import stored_values
from amp_lab.numerics.stored_parts import is_sharded, parts_of


@dataclass(frozen=True)
class TensorSummary:
    """A summary of a tensor's values that does not keep the tensor."""

    name: str  # of the op's argument: ``self``, ``weight``, ``grad_output``
    dtype: torch.dtype
    device_type: str
    shape: tuple[int, ...]
    low: float  # smallest finite value, or real or imaginary part; NaN if there is none
    high: float  # largest finite value, likewise
    values: int  # number of values; a complex one counts as two, its parts
    nan: int  # how many of them are NaN
    inf: int  # … are inf
    neg_inf: int  # … are -inf
    stored_as: tuple[torch.dtype, ...] = ()  # dtypes of the parts of a tensor subclass
    sharded: bool = False  # whether only this rank's shard was read, of a DTensor

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds among the values: ``NaN``, ``inf`` and ``-inf``."""
        return frozenset(self._counts())

    def _counts(self) -> dict[str, int]:
        """How many values are NaN, inf and -inf, without those of which there are none."""
        counts = {"NaN": self.nan, "inf": self.inf, "-inf": self.neg_inf}
        return {kind: count for kind, count in counts.items() if count}

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)} {self.shape}"
        if self.sharded:
            text += ", read on this rank only"
        if self.stored_as:
            dtypes = " and ".join(dict.fromkeys(map(dtype_name, self.stored_as)))
            text += f" stored as {dtypes}, only floating-point values read"
        if not self.values:
            return f"{text}, no values"
        finite = f"from {self.low:.4g} to {self.high:.4g}"
        counts = self._counts()
        if not counts:
            return f"{text}, {finite}"
        nonfinite = sum(counts.values())
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        text += f", {percent(nonfinite, self.values)} % non-finite ({kinds})"
        if nonfinite < self.values:
            text += f", the others {finite}"
        return text


def summarise(name: str, tensor: Tensor) -> TensorSummary:
    """The summary of a tensor; a tensor without memory, as on ``meta``, counts as zeros."""
    stored_as: tuple[torch.dtype, ...] = ()
    if _has_no_memory(tensor):
        values = torch.zeros(tensor.shape)
    else:
        parts = parts_of(tensor)
        values = _floating_values(parts)
        if not is_sharded(tensor) and not any(part is tensor for part in parts):
            stored_as = tuple(part.dtype for part in parts)
    low = math.nan
    high = math.nan
    finite = values[values.isfinite()]
    if finite.numel():
        low, high = map(float, torch.aminmax(finite))
    return TensorSummary(
        name=name,
        dtype=tensor.dtype,
        device_type=tensor.device.type,
        shape=tuple(tensor.shape),
        low=low,
        high=high,
        values=values.numel(),
        nan=int(values.isnan().sum()),
        inf=int((values == math.inf).sum()),
        neg_inf=int((values == -math.inf).sum()),
        stored_as=stored_as,
        sharded=is_sharded(tensor),
    )


def _floating_values(parts: list[Tensor]) -> Tensor:
    """The values of a tensor, given as its `parts_of`, as real numbers.

    Of several parts, the values of those that are floating-point or complex are joined into one
    dimension, in float64.
    """
    if len(parts) == 1:
        return _as_real(readable(parts[0]))
    inexact = [part for part in parts if _may_be_infinite(part)]
    flattened = [_as_real(readable(part)).flatten().double() for part in inexact]
    if not flattened:
        return torch.zeros(0)
    return torch.cat(flattened)


def _as_real(values: Tensor) -> Tensor:
    """The values; of complex ones the real and imaginary parts, in a last dimension of 2."""
    if not values.is_complex():
        return values
    if values.is_conj():
        # view_as_real refuses a lazy conjugate; conjugating again removes the mark, and the sign
        # of the imaginary part does not matter here.
        values = values.conj()
    return torch.view_as_real(values)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; integers and bools always are."""
    if not _may_be_infinite(tensor) or _has_no_memory(tensor):
        return True
    return all(_is_part_finite(part) for part in parts_of(tensor) if _may_be_infinite(part))


def _may_be_infinite(tensor: Tensor) -> bool:
    """Whether the dtype has inf and NaN, unlike integers and bools."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_part_finite(tensor: Tensor) -> bool:
    """Whether all values of a plain floating-point or complex tensor are finite."""
    values = tensor
    if tensor.layout is not torch.strided or tensor.itemsize == 1:
        values = readable(tensor)
    # A sum is the cheapest op that reads every value, and each inf or NaN makes it so too. But it
    # may also overflow by itself, so only a finite sum is an answer. In fp16 it soon would.
    dtype = torch.float32 if values.dtype is torch.float16 else None
    if cmath.isfinite(values.sum(dtype=dtype).item()):
        return True
    return bool(values.isfinite().all())


def readable(tensor: Tensor) -> Tensor:
    """The values of a tensor in a dtype and layout that support sums and comparisons."""
    values = stored_values(tensor.detach())
    if values.layout is not torch.strided:  # oneDNN's own layout
        values = values.to_dense()
    if values.dtype.itemsize == 1:  # the float8 formats
        values = values.to(torch.float32)
    return values


def _has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor has no memory: on ``meta``, lazy, or autograd's zero tensor."""
    return tensor.device.type == "meta" or nn.parameter.is_lazy(tensor) or tensor._is_zerotensor()

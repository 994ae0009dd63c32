"""Whether a tensor is finite, and what one held that is not."""

import cmath
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amp_lab.core.report import dtype_name, percent
from amp_lab.numerics.stored_parts import parts_of
from amp_lab.tracing.ops_seen import stored_values


@dataclass(frozen=True)
class TensorSummary:
    """What a tensor held, without the tensor."""

    name: str  # among the op's arguments: ``self``, ``weight``, ``grad_output``
    dtype: torch.dtype
    device_type: str
    shape: tuple[int, ...]
    low: float  # the smallest finite value, of a complex tensor a part's; NaN if it has none
    high: float  # the largest
    values: int  # how many it has, and below how many of them are NaN, +inf and -inf
    nan: int
    inf: int
    neg_inf: int
    stored_as: tuple[torch.dtype, ...] = ()  # of a subclass that was read part by part

    @property
    def kinds(self) -> frozenset[str]:
        """Which of ``NaN``, ``inf`` and ``-inf`` it holds."""
        return frozenset(self._counts())

    def _counts(self) -> dict[str, int]:
        counts = {"NaN": self.nan, "inf": self.inf, "-inf": self.neg_inf}
        return {kind: count for kind, count in counts.items() if count}

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)} {self.shape}"
        if self.stored_as:
            dtypes = " and ".join(dict.fromkeys(map(dtype_name, self.stored_as)))
            text += f" stored as {dtypes}, of which the floating-point values were read"
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
    """What a tensor holds; one without memory behind it counts as zeros."""
    stored_as: tuple[torch.dtype, ...] = ()
    if _is_without_values(tensor):
        values = torch.zeros(tensor.shape)
    else:
        parts = parts_of(tensor)
        values = _numbers(parts)
        if not any(part is tensor for part in parts):
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
    )


def _numbers(parts: list[Tensor]) -> Tensor:
    """The floating-point values of a tensor's parts, as real numbers; of one alone as it lies."""
    if len(parts) == 1:
        return _real(readable(parts[0]))
    found = [_real(readable(part)).flatten().double() for part in parts if _may_be_infinite(part)]
    if not found:
        return torch.zeros(0)
    return torch.cat(found)


def _real(values: Tensor) -> Tensor:
    if not values.is_complex():
        return values
    if values.is_conj():
        # Below autograd a lazy conjugate cannot be resolved, but be made one of a conjugate.
        values = values.conj()
    return torch.view_as_real(values)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. Other than floating-point and complex ones always are."""
    if not _may_be_infinite(tensor) or _is_without_values(tensor):
        return True
    return all(_is_part_finite(part) for part in parts_of(tensor) if _may_be_infinite(part))


def _may_be_infinite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_part_finite(tensor: Tensor) -> bool:
    values = tensor
    if tensor.layout is not torch.strided or tensor.itemsize == 1:
        values = readable(tensor)
    # A sum passes every inf and NaN on, and is the cheapest look at every value there is. It may
    # also overflow by itself, so only a finite one is an answer.
    dtype = torch.float32 if values.dtype is torch.float16 else None
    if cmath.isfinite(values.sum(dtype=dtype).item()):
        return True
    return bool(values.isfinite().all())


def readable(tensor: Tensor) -> Tensor:
    """Its values in a form that has sums and comparisons."""
    values = stored_values(tensor.detach())
    if values.layout is not torch.strided:  # oneDNN's own
        values = values.to_dense()
    if values.dtype.itemsize == 1:  # the float8 formats
        values = values.to(torch.float32)
    return values


def _is_without_values(tensor: Tensor) -> bool:
    """Whether there is no memory behind it: reading the zeros of autograd's would be a crash."""
    return tensor.device.type == "meta" or nn.parameter.is_lazy(tensor) or tensor._is_zerotensor()

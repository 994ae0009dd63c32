"""Whether a tensor is finite, and what one held that is not."""

import cmath
import math
from dataclasses import dataclass

import torch
from torch import nn

from amp_lab.report import dtype_name, percent
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

    @property
    def kinds(self) -> frozenset[str]:
        """Which of ``NaN``, ``inf`` and ``-inf`` it holds."""
        return frozenset(self._counts())

    def _counts(self) -> dict[str, int]:
        counts = {"NaN": self.nan, "inf": self.inf, "-inf": self.neg_inf}
        return {kind: count for kind, count in counts.items() if count}

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)} {self.shape}"
        if not self.values:
            return f"{text}, no values"
        bad = sum(self._counts().values())
        if bad:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in self._counts().items())
            text += f", {percent(bad, self.values)} % non-finite ({kinds})"
        if bad < self.values:
            text += f", {'the others ' if bad else ''}from {self.low:.4g} to {self.high:.4g}"
        return text


def summarise(name: str, tensor: torch.Tensor) -> TensorSummary:
    """What a tensor holds; one without memory behind it counts as zeros."""
    values = torch.zeros(tensor.shape) if _without_values(tensor) else readable(tensor)
    if values.is_complex():
        # Below autograd a lazy conjugate cannot be resolved, but be made one of a conjugate.
        values = torch.view_as_real(values.conj() if values.is_conj() else values)
    finite = values[values.isfinite()]
    low, high = torch.aminmax(finite) if finite.numel() else (math.nan, math.nan)
    return TensorSummary(
        name=name,
        dtype=tensor.dtype,
        device_type=tensor.device.type,
        shape=tuple(tensor.shape),
        low=float(low),
        high=float(high),
        values=values.numel(),
        nan=int(values.isnan().sum()),
        inf=int((values == math.inf).sum()),
        neg_inf=int((values == -math.inf).sum()),
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite. Other than floating-point and complex ones always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or _without_values(tensor):
        return True
    values = tensor if tensor.layout is torch.strided and tensor.itemsize > 1 else readable(tensor)
    # A sum passes every inf and NaN on, and is the cheapest look at every value there is. It may
    # also overflow by itself, so only a finite one is an answer.
    dtype = torch.float32 if values.dtype is torch.float16 else None
    return cmath.isfinite(values.sum(dtype=dtype).item()) or bool(values.isfinite().all())


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in a form that has sums and comparisons."""
    values = stored_values(tensor.detach())
    if values.layout is not torch.strided:  # oneDNN's own
        values = values.to_dense()
    return values.to(torch.float32) if values.dtype.itemsize == 1 else values  # the float8 formats


def _without_values(tensor: torch.Tensor) -> bool:
    """Whether there is no memory behind it: reading the zeros of autograd's would be a crash."""
    return tensor.device.type == "meta" or nn.parameter.is_lazy(tensor) or tensor._is_zerotensor()

"""What a device can do at most, and what a step has to do at least."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from amp_lab.device import describe_device
from amp_lab.measure import measure
from amp_lab.precision import Precision

_VIEWS = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach"}
# Edge of the matrices of a product, bytes of a copy.
_LARGEST = {"cpu": (2048, 2**29), "accelerator": (8192, 2**32)}


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that were measured on a device."""

    flops_per_s: dict[str, float | None]
    """Of a large square matrix product, by precision; None for one that the device lacks."""
    copy_bytes_per_s: dict[int, float]
    """Of a copy, by the bytes that it reads and writes together: small ones stay in a cache."""
    trusted: bool
    """Whether repeated measurements agreed."""

    def copy_rate(self, nbytes: int) -> float:
        """The highest rate of a copy of so many bytes or more, since a cache may hold them."""
        sizes = sorted(self.copy_bytes_per_s)
        nearest = max((size for size in sizes if size <= nbytes), default=sizes[0])
        return max(rate for size, rate in self.copy_bytes_per_s.items() if size >= nearest)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes/s of a copy that fits in no cache."""
        return self.copy_bytes_per_s[max(self.copy_bytes_per_s)]


@dataclass(frozen=True)
class Count:
    """What one step does, counted and not timed."""

    flops: int
    """Multiplications and additions of its matrix products and convolutions."""
    moved_bytes: int
    """What the ops of the plain eager step read and write, each op from and to memory."""
    least_bytes: int
    """What no step can do without: its inputs, weights and optimizer state, each once."""

    def floor_s(self, ceilings: Ceilings, precision: str) -> float | None:
        """Seconds that the step takes at least, if all else were free."""
        rate = ceilings.flops_per_s[precision]
        if rate is None:
            return None
        return max(self.flops / rate, self.least_bytes / ceilings.copy_rate(self.least_bytes))


def measure_ceilings(device: torch.device) -> Ceilings:
    """Matrix products and a copy, timed here and now; the fastest of some calls counts."""
    rates = dict(describe_device(device).rates)
    size, _ = _LARGEST["cpu" if device.type == "cpu" else "accelerator"]
    turns: dict[str, list[float]] = {}
    for _ in range(2):
        for precision in rates:
            fp32 = rates[Precision.FP32]
            if rates[precision] is not None and rates[precision] > 0.5 * fp32:
                turns.setdefault(precision, []).append(_product_rate(device, precision, size))
    for precision, found in turns.items():
        rates[precision] = max(rates[precision], *found)
    trusted = all(max(found) < 1.25 * min(found) for found in turns.values())
    return Ceilings(
        flops_per_s={str(precision): rate for precision, rate in rates.items()},
        copy_bytes_per_s=_copy_rates(device),
        trusted=trusted,
    )


def _copy_rates(device: torch.device) -> dict[int, float]:
    """The fastest of some copies of each size, from 64 KiB to more than any cache holds."""
    rates = {}
    _, largest = _LARGEST["cpu" if device.type == "cpu" else "accelerator"]
    nbytes = 2**15
    while nbytes < largest:
        nbytes *= 2  # half of it read, half written
        source = torch.empty(nbytes // 8, device=device).normal_()
        copy = torch.empty_like(source)
        calls = max(1, 2**24 // nbytes)  # a single small one is shorter than the clock can tell

        def copies(copy=copy, source=source, calls=calls) -> None:
            for _ in range(calls):
                copy.copy_(source)

        m = measure(copies, device=device, warmup=1, repeats=3)
        rates[nbytes] = calls * nbytes / min(m.samples_s)
    return rates


def _product_rate(device: torch.device, precision: Precision, n: int) -> float:
    left, right = (torch.randn(n, n, device=device).to(precision.dtype) for _ in range(2))
    mode = Precision.TF32 if precision is Precision.TF32 else Precision.FP32
    with mode.autocast(device.type):
        m = measure(lambda: left @ right, device=device, warmup=1, repeats=5)
    return 2 * n**3 / min(m.samples_s)


class _Moved(TorchDispatchMode):
    """Adds up the bytes that each op reads and writes."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not views and name not in _VIEWS:
            for tensor in tree_leaves((args, kwargs, out)):
                if isinstance(tensor, torch.Tensor):
                    self.nbytes += tensor.numel() * tensor.itemsize
        return out


def count_step(
    step: Callable[[], object], model: nn.Module, inputs: torch.Tensor, *, training: bool
) -> Count:
    """Count one call of `step`, which must be eager, by running it twice.

    Adam's training step reads and writes each weight and two numbers of state, in fp32. Inference
    reads inputs and weights once, as they are kept.
    """
    with FlopCounterMode(display=False) as flops:
        step()
    with _Moved() as moved:
        step()
    weights = sum(p.numel() * p.itemsize for p in model.parameters())
    read = inputs.numel() * inputs.itemsize + (6 if training else 1) * weights
    return Count(flops.get_total_flops(), moved.nbytes, read)

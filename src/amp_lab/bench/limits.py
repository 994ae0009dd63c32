"""The highest rates of a device, measured, and the least work of a step, counted."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from amp_lab.core.backends import backend
from amp_lab.core.device import describe_device
from amp_lab.core.device_matmuls import filling_size, make_matmul
from amp_lab.core.precision import Precision
from amp_lab.core.tensors import tensors_in
from amp_lab.core.timing import compare
from amp_lab.tracing.ops_seen import FLOP_FORMULAS, computes_nothing


class _Sizes(NamedTuple):
    """The largest sizes that are timed.

    A slow device, such as the GPU of a laptop, gets smaller ones: the sizes grow until a matmul or
    a copy takes `_LONG_S` seconds.
    """

    edge: int  # rows and columns of a matrix
    copy_bytes: int  # read and written by a copy


_LARGEST_ON_CPU = _Sizes(edge=2048, copy_bytes=2**29)
_LARGEST_ON_ACCELERATOR = _Sizes(edge=8192, copy_bytes=2**32)
_LONG_S = 0.02


@dataclass
class Ceilings:
    """The highest rates that were measured on a device."""

    # Of a large matmul, by the name of the precision; None: the device does not have it.
    flops_per_s: dict[str, float | None]
    stream_bytes_per_s: dict[int, float]  # of a copy or a sum, by the bytes read and written
    trusted: bool  # whether the machine was quiet enough to trust the times of the matmuls

    def floor_s(self, precision: str, flops: int | None, nbytes: int | None) -> float | None:
        """The least seconds of a step with these FLOPs and bytes, by the roofline model.

        None if a count or the rate of the precision is unknown.
        """
        rate = self.flops_per_s[precision]
        if rate is None or flops is None or nbytes is None:
            return None
        compute_s = flops / rate
        memory_s = nbytes / self.stream_rate(nbytes)
        return max(compute_s, memory_s)

    def stream_rate(self, nbytes: int) -> float:
        """The highest bytes/s measured for the size `nbytes` or a larger one.

        If `nbytes` was not measured, the next smaller size counts too. Still smaller sizes do not
        count: they may fit in a cache that `nbytes` do not fit in.
        """
        least_size = self._size_at_most(nbytes)
        return max(rate for size, rate in self.stream_bytes_per_s.items() if size >= least_size)

    def raise_stream_rate(self, nbytes: int, rate: float) -> None:
        """Raise the limit for `nbytes` to a measured `rate` in bytes/s, if the limit is lower.

        The rate is kept at the largest measured size up to `nbytes`.
        """
        if rate > self.stream_rate(nbytes):
            self.stream_bytes_per_s[self._size_at_most(nbytes)] = rate

    def _size_at_most(self, nbytes: int) -> int:
        """The largest measured size up to `nbytes`, or else the smallest one."""
        sizes = sorted(self.stream_bytes_per_s)
        return max((size for size in sizes if size <= nbytes), default=sizes[0])

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes/s from and to main memory: of the largest size, which fits in no cache."""
        largest = max(self.stream_bytes_per_s)
        return self.stream_bytes_per_s[largest]


@dataclass(frozen=True)
class Count:
    """The work of one step, counted and not timed."""

    # Multiplications and additions of matmuls and convolutions. Attention counts in full, although
    # a causal kernel may leave out up to half of it.
    flops: int
    moved_bytes: int  # read and written by the ops of the plain eager step, from and to memory
    least_bytes: int  # of inputs, weights and optimizer state, which every step has to move once


def measure_ceilings(device: torch.device) -> Ceilings:
    """Time matmuls, copies and sums on a device. The fastest of several calls is the peak rate."""
    known_rates = describe_device(device).rates  # FLOP/s, measured in less time than here
    rates = {name: rate for name, rate in known_rates.items() if rate is not None}
    n = filling_size(device, _largest_sizes(device).edge, seconds=_LONG_S)
    # A precision with less than half of fp32's rate is emulated. It would take seconds at this
    # size, so it keeps its known rate.
    least_rate = 0.5 * rates[Precision.FP32]
    native = [precision for precision, rate in rates.items() if rate > least_rate]
    matmuls: dict[str, Callable[[], object]] = {}
    for precision in native:
        matmuls[precision] = make_matmul(device, precision, n)
    # Medians within 10 % are enough, since only the fastest call counts.
    comparison = compare(matmuls, device=device, budget_s=4, precision=0.1)
    flops = 2 * n**3  # of a matmul: n multiplications and additions for each of n x n values
    for precision in native:
        fastest_s = min(comparison.samples_s[precision])
        rates[precision] = max(rates[precision], flops / fastest_s)
    return Ceilings(
        flops_per_s={str(precision): rates.get(precision) for precision in Precision},
        stream_bytes_per_s=_stream_rates(device),
        trusted=comparison.trusted,
    )


def _largest_sizes(device: torch.device) -> _Sizes:
    """The largest sizes for a device."""
    if backend(device).is_host:
        return _LARGEST_ON_CPU
    return _LARGEST_ON_ACCELERATOR


def _stream_rates(device: torch.device) -> dict[int, float]:
    """Bytes/s by size in bytes, the faster of a copy and a sum.

    The sizes are powers of two, from 64 KiB to that of `_largest_sizes`, or to an eighth of the
    device's memory if this is less.
    A slow device ends earlier, at the first size from 256 MiB that takes over `_LONG_S` seconds.
    """
    largest_bytes = _largest_sizes(device).copy_bytes
    memory_bytes = describe_device(device).memory_bytes
    if memory_bytes:  # a larger share of a small memory may not be free
        largest_bytes = min(largest_bytes, memory_bytes // 8)
    rates: dict[int, float] = {}
    for power in range(16, largest_bytes.bit_length()):
        nbytes = 2**power
        source = torch.ones(nbytes // 4, device=device)  # float32, which a sum reads as a whole
        half = source[: source.numel() // 2]
        copy = torch.empty_like(half)  # half of the bytes are read, half are written
        runs = {"copy": functools.partial(copy.copy_, half), "sum": source.sum}
        # A short comparison will do, since only the fastest call of each size counts.
        comparison = compare(runs, device=device, budget_s=0.3, precision=0.2)
        fastest_s = min(min(samples) for samples in comparison.samples_s.values())
        rates[nbytes] = nbytes / fastest_s
        if nbytes >= 2**28 and fastest_s > _LONG_S:  # more than any cache holds
            break
    return rates


class _BytesMoved(TorchDispatchMode):
    """Adds up the bytes of the tensors that the ops in its block read and write, in `nbytes`."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the op, and count its tensors, both operands and results.

        Autograd splits a composite op, such as `linear`, into simpler ones. Inference mode does
        not, so such an op is split here.
        """
        kwargs = kwargs or {}
        with self:  # torch switches the mode off in this method; count the simpler ops too
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:  # it was composite, and its simpler ops have been counted
            return out
        out = func(*args, **kwargs)
        if not computes_nothing(func):  # such as a view
            self.nbytes += sum(tensor.nbytes for tensor in tensors_in((args, kwargs, out)))
        return out


def count_step(
    step: Callable[[], object], model: nn.Module, inputs: torch.Tensor, *, training: bool
) -> Count:
    """Count the FLOPs and bytes of one call of `step`, an eager function, by calling it twice.

    Inference reads at least the inputs and the weights, in their dtypes. A training step with Adam
    also reads and writes, in fp32, each weight and its two numbers of optimizer state.
    """
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as flops:
        step()
    with _BytesMoved() as moved:
        step()
    weight_bytes = sum(p.nbytes for p in model.parameters())
    if training:  # three numbers for each weight, each read and written
        weight_bytes *= 6
    return Count(flops.get_total_flops(), moved.nbytes, inputs.nbytes + weight_bytes)

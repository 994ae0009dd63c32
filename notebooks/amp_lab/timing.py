"""Time and peak memory of a piece of code, measured so that the figures can be trusted."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from amp_lab.backends import backend


@dataclass(frozen=True)
class Measurement:
    """What `measure` found: seconds and bytes of one call of the function."""

    samples_s: tuple[float, ...]
    """Seconds of each repeat, in the order in which they ran."""
    peak_bytes: int | None
    """Largest number of bytes in tensors at any moment, whatever was there before included; None
    where the backend keeps no count, as on a CPU."""
    reserved_bytes: int | None
    """The same for what the caching allocator held back from the driver; at least `peak_bytes`."""

    @property
    def median_s(self) -> float:
        """Median of the samples, in seconds."""
        return statistics.median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the samples, in seconds: the spread of the middle half."""
        if len(self.samples_s) == 1:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return third - first

    def __str__(self) -> str:
        unit, factor = ("s", 1) if self.median_s >= 1 else ("ms", 1e3)
        text = f"{self.median_s * factor:.3g} {unit} (IQR {self.iqr_s * factor:.2g} {unit}"
        text += f", {len(self.samples_s)} repeats)"
        return (
            text if self.peak_bytes is None else f"{text}, peak {self.peak_bytes / 2**20:.0f} MiB"
        )


def measure(
    fn: Callable[[], object], *, device: torch.device | str, warmup: int = 3, repeats: int = 10
) -> Measurement:
    """Time `fn()` on `device`, and read the peak memory it needed there.

    A device runs its work after the call that asked for it has returned, so the clock is read only
    when `torch.accelerator.synchronize` has returned. The first `warmup` calls are not counted:
    they load kernels, choose algorithms and fill caches. Peaks are reset after them.

    Raises `ValueError` for fewer than one repeat or a negative warm-up, and whatever `fn` raises.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"measure: repeats={repeats} must be at least 1 and warmup={warmup} at least 0"
        )
    device = torch.device(device)
    if not backend(device).is_host:  # where a collection may take longer than what is timed
        gc.collect()  # what earlier code left behind is not this function's memory
        torch.accelerator.empty_cache()
    for _ in range(warmup):
        fn()
    _synchronize(device)
    counted = _resets_peak(device)
    samples = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        fn()
        _synchronize(device)
        samples.append(time.perf_counter() - start)
    return Measurement(
        samples_s=tuple(samples),
        peak_bytes=torch.accelerator.max_memory_allocated(device) if counted else None,
        reserved_bytes=torch.accelerator.max_memory_reserved(device) if counted else None,
    )


def allocated_bytes(device: torch.device) -> int:
    """Bytes in tensors on a device now; 0 where the backend keeps no count, as on a CPU."""
    return torch.accelerator.memory_allocated(device) if _resets_peak(device) else 0


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch found no memory; the CPU's allocator has no type of error for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _synchronize(device: torch.device) -> None:
    if not backend(device).is_host:
        torch.accelerator.synchronize(device)


def _resets_peak(device: torch.device) -> bool:
    """Reset the device's peak memory; whether it keeps one."""
    if not backend(device).keeps_peak:
        return False
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, NotImplementedError):  # an allocator without statistics
        return False
    return True

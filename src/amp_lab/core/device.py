"""The device: choose it, describe it, and recommend a precision for it.

`device_facts` reads the name, backend and memory. `device_matmuls` measures the matmuls.
"""

import functools
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from amp_lab.core.backends import BACKENDS, backend
from amp_lab.core.cpu import has_bf16_instructions
from amp_lab.core.device_facts import backend_name, device_name, memory_bytes
from amp_lab.core.device_matmuls import (
    MatmulNumerics,
    fp32_bits_as_set,
    matmul_rates,
    measure_matmul_numerics,
    precisions_here,
)
from amp_lab.core.errors import DeviceError
from amp_lab.core.gpus import matmuls_of
from amp_lab.core.precision import Precision, require_backend

# A precision counts as accelerated when its matmul is at least this many times as fast as
# fp32's. Less drowns in the casts that autocast inserts, and in the noise of a shared machine.
ACCELERATED = 1.25

# Names that people give a device, such as "rocm", and torch's name for it.
_ALSO_KNOWN_AS: dict[str, str] = {}
for _row in BACKENDS.values():
    _ALSO_KNOWN_AS.update(dict.fromkeys(_row.also_called, _row.type))


@dataclass(frozen=True)
class DeviceReport:
    """The result of `describe_device`."""

    device: torch.device
    """The device that was measured."""
    name: str
    """The name of the device, from its manufacturer."""
    backend: str
    """The backend that torch uses for it, e.g. ``CUDA 13.0, compute capability 9.0``."""
    memory_bytes: int | None
    """Memory of the device in bytes; for a CPU, the memory that this process may use. None if
    unknown."""
    rates: dict[Precision, float | None]
    """Measured rate of a matmul in FLOP/s; None for a precision that the device does not have."""
    values: dict[Precision, MatmulNumerics | None]
    """The accuracy of the same matmul in each precision; None for a precision that the device does
    not have."""
    fp32_bits_as_set: tuple[int, int]
    """Bits of significand that fp32 inputs keep in matmuls and in convolutions, with the current
    settings of torch: 24, or 11 if TF32 is allowed and available."""
    trusted: bool
    """Whether the machine was quiet enough to measure the rates. If not, measure again."""
    recommended: Precision
    """The precision to use. It depends on the rates or, if they are not `trusted`, on the device
    type."""
    reason: str
    """The reason for `recommended`: a sentence with figures."""

    @property
    def accelerated(self) -> tuple[Precision, ...]:
        """The precisions with a measurably faster matmul than fp32, fastest first.

        If the rates are not `trusted`, this is only the `recommended` precision, or none for fp32.
        """
        if self.trusted:
            faster = [p for p in Precision if self.speedup(p) >= ACCELERATED]
            return tuple(sorted(faster, key=self.speedup, reverse=True))
        if self.recommended is Precision.FP32:
            return ()
        return (self.recommended,)

    def speedup(self, precision: Precision) -> float:
        """Return the matmul rate of `precision` divided by that of fp32.

        Returns 0 if the device does not support `precision`.
        """
        return _speedup(self.rates, precision)


def pick_device(name: str | None = None) -> torch.device:
    """Choose a device, and check that it is in this machine.

    Args:
        name: A name that torch knows: "cpu", "cuda", "cuda:1", "xpu" or "mps". If None, the
            environment variable AMP_LAB_DEVICE names the device. If the variable is not set either,
            the device is the accelerator of this machine, or the CPU if there is no accelerator.

    Returns:
        The device. A device that you name is never replaced by another one.

    Raises:
        DeviceError: If the name is not a device, or if the device is not in this machine.

    Example:
        device = pick_device("cpu")
        model = nn.Linear(4, 2).to(device)
    """
    if name is not None:
        return _checked_device(name, asked=repr(name))
    name = os.environ.get("AMP_LAB_DEVICE")
    if name:
        return _checked_device(name, asked=f"AMP_LAB_DEVICE={name!r}")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def preserve_random_state(device_type: str) -> AbstractContextManager:
    """The block after which torch draws the same random numbers as before it, on CPU and device."""
    # `fork_rng` always restores the CPU's generator. The list names further devices to restore.
    if backend(device_type).is_host:
        return torch.random.fork_rng(devices=[])
    index = torch.accelerator.current_device_index()
    return torch.random.fork_rng(devices=[index], device_type=device_type)


def _checked_device(name: str, asked: str) -> torch.device:
    """The device with this name.

    Raises `DeviceError` if it is not in this machine. The message begins with `asked`, which shows
    what the user gave, such as ``'cuda'`` or ``AMP_LAB_DEVICE='cuda'``.
    """
    if name in _ALSO_KNOWN_AS:
        torch_name = _ALSO_KNOWN_AS[name]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if name == "gpu" and accelerator is not None:
            torch_name = accelerator.type
        raise DeviceError(f"{asked}: torch calls this device {torch_name!r}; use that name")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"{asked} is not a device; {_devices_here()}") from None
    if device.type == "meta":
        raise DeviceError(f"{asked} stores no values, so no model can run on it; {_devices_here()}")
    try:
        require_backend(device.type)
    except DeviceError:
        raise DeviceError(f"{asked} is not available; {_devices_here()}") from None
    count = _device_count(device.type)
    if device.index is not None and device.index >= count:
        raise DeviceError(f"{asked} does not exist: the highest number is {count - 1}")
    return device


def _device_count(device_type: str) -> int:
    """How many devices of a type there are; the CPU is one."""
    if backend(device_type).is_host:
        return 1
    return torch.get_device_module(device_type).device_count()


def _devices_here() -> str:
    """A clause for messages, such as ``this machine has 'cuda' and 'cpu' (with torch 2.11.0)``."""
    names = "'cpu'"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        names = f"'{accelerator.type}' and 'cpu'"
    return f"this machine has {names} (with torch {torch.__version__})"


@functools.cache
def _describe(device: torch.device, backend_text: str) -> DeviceReport:
    """The report of `describe_device`, measured once for each device and `backend_text`.

    `backend_text` is what `backend_name` returns. For a CPU it has the number of threads, which
    changes the rates, so the report is measured again after that number was changed.
    """
    try:  # any kernel shows whether torch can use the device
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:  # a GPU that this torch has no kernels for, or a broken driver
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"torch cannot use {str(device)!r}, which is in this machine: {reason}"
        ) from error
    rates, trusted = matmul_rates(device)
    if trusted:
        recommended, reason = _recommend(rates)
    else:
        recommended, reason = _recommend_unmeasured(device)
    values = dict.fromkeys(Precision)  # None for a precision that the device does not have
    for precision in precisions_here(device):
        values[precision] = measure_matmul_numerics(device, precision)
    return DeviceReport(
        device=device,
        name=device_name(device),
        backend=backend_text,
        memory_bytes=memory_bytes(device),
        rates=rates,
        values=values,
        fp32_bits_as_set=fp32_bits_as_set(device),
        trusted=trusted,
        recommended=recommended,
        reason=reason,
    )


def describe_device(device: torch.device | str) -> DeviceReport:
    """Measure a device, and recommend a precision for it.

    The first call takes up to a few seconds. Later calls with the same device and the same number
    of threads return the same report.

    Args:
        device: The device or its name, as for `pick_device`.

    Returns:
        A `DeviceReport` with the name, the memory in bytes, the matmul rates in FLOP/s, and the
        recommendation.

    Raises:
        DeviceError: If the device is not in this machine, or if torch cannot use it.

    Source:
        `describe_device` times a square matmul in each precision. It recommends the first of these
        precisions that is at least 1.25 times as fast as fp32: bf16 (only if bf16 has at least 0.75
        of the rate of fp16), fp16, tf32. If none is, it recommends fp32. If the machine is too busy
        to measure, the recommendation depends on the instructions of the CPU or the compute
        capability of the GPU.

    Example:
        report = describe_device("cpu")
        print(report.name, report.recommended, report.reason)
    """
    chosen = pick_device(str(device))
    return _describe(chosen, backend_name(chosen))


def recommend_precision(device: torch.device | str) -> Precision:
    """Recommend the precision to train with on a device.

    Args:
        device: The device or its name, as for `pick_device`.

    Returns:
        A `Precision`: the value of ``describe_device(device).recommended``.

    Raises:
        DeviceError: If the device is not in this machine, or if torch cannot use it.

    Example:
        precision = recommend_precision("cpu")
        with precision.autocast("cpu"):
            output = nn.Linear(4, 2)(torch.ones(3, 4))
    """
    return describe_device(device).recommended


def _speedup(rates: dict[Precision, float | None], precision: Precision) -> float:
    """Rate of `precision` as a multiple of fp32's; 0 if its rate is None."""
    fp32 = rates[Precision.FP32]
    assert fp32 is not None, "every device has fp32"
    return (rates[precision] or 0.0) / fp32


def _recommend(rates: dict[Precision, float | None]) -> tuple[Precision, str]:
    """The precision to use, given the rate of each, and the sentence that says why."""
    bf16 = _speedup(rates, Precision.BF16)
    fp16 = _speedup(rates, Precision.FP16)
    tf32 = _speedup(rates, Precision.TF32)
    # bf16 needs no loss scale, so it may be slower than fp16, down to three quarters of its rate.
    if bf16 >= ACCELERATED and bf16 >= 0.75 * fp16:
        return Precision.BF16, (
            f"a bf16 matmul runs at {bf16:.2f}x the rate of fp32, and bf16 has the range of fp32, "
            "so gradients need no scaling"
        )
    if fp16 >= ACCELERATED:
        return Precision.FP16, (
            f"an fp16 matmul runs at {fp16:.2f}x the rate of fp32, a bf16 matmul at {bf16:.2f}x; "
            "the range of fp16 is small, so use a gradient scaler"
        )
    if tf32 >= ACCELERATED:
        return Precision.TF32, (
            f"a TF32 matmul runs at {tf32:.2f}x the rate of fp32, and no other precision is faster"
        )
    return Precision.FP32, (
        f"no other precision is at least {ACCELERATED} times as fast as fp32 (bf16 {bf16:.2f}x, "
        f"fp16 {fp16:.2f}x)"
    )


def _recommend_unmeasured(device: torch.device) -> tuple[Precision, str]:
    """The precision to use if the measured rates cannot be trusted, and the sentence that says why.

    The instructions of a CPU or the compute capability of an NVIDIA GPU decide. On other devices,
    the result is fp32.
    """
    busy = "the machine was too busy to measure"
    if backend(device).is_host:
        if has_bf16_instructions():
            return Precision.BF16, f"{busy}, and this CPU has instructions for bf16"
        return Precision.FP32, f"{busy}, and this CPU has no instructions for bf16"
    is_nvidia = backend(device).has_capability and not torch.version.hip
    if not is_nvidia:
        return Precision.FP32, f"{busy}: measure again when it is idle"
    major, minor = torch.get_device_module(device.type).get_device_capability(device)
    matmuls = matmuls_of((major, minor))  # the formats with fast matmuls
    gpu = f"{busy}, and compute capability {major}.{minor}"
    if Precision.BF16 in matmuls:
        return Precision.BF16, f"{gpu} has tensor cores for bf16"
    if Precision.FP16 in matmuls:
        return (
            Precision.FP16,
            f"{gpu} has tensor cores for fp16 and none for bf16; use a gradient scaler",
        )
    return Precision.FP32, f"{gpu} has no tensor cores"

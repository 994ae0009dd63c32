"""The device: choose it, describe it, and measure which precisions it accelerates."""

import functools
import os
import platform
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from amp_lab.core.backends import BACKENDS, backend
from amp_lab.core.cpu import has_bf16_instructions, matrix_instructions
from amp_lab.core.errors import DeviceError
from amp_lab.core.gpus import matmuls_of
from amp_lab.core.precision import Precision, has_tf32, require_backend
from amp_lab.core.timing import compare, measure

# A precision counts as accelerated when its matmul is at least this many times as fast as
# fp32's. Less drowns in the casts that autocast inserts, and in the noise of a shared machine.
ACCELERATED = 1.25
_SMALL = 256  # the edge of the matrices that are tried first

# Names that people give a device, such as "rocm", and torch's name for it.
_ALSO_KNOWN_AS: dict[str, str] = {}
for _row in BACKENDS.values():
    _ALSO_KNOWN_AS.update(dict.fromkeys(_row.also_called, _row.type))


@dataclass(frozen=True)
class MatmulNumerics:
    """What a device's matmul does to values, found by products whose result is known."""

    error: float
    """Largest error of a sum of 4,096 products in units in the last place of the result: 0.5 where
    sums are kept in a wider format and rounded once. In fp32 several are usual."""
    input_bits: int
    """Bits of significand that are left of an fp32 input: 24, or 11 in TF32, or 8 in bf16."""
    subnormals: bool
    """Whether the smallest subnormal number, times 1, is itself; some devices make it zero."""


@dataclass(frozen=True)
class DeviceReport:
    """The result of `describe_device`."""

    device: torch.device
    """The device that was measured."""
    name: str
    """The name that its maker gave the device."""
    backend: str
    """The backend that torch uses for it, e.g. ``CUDA 13.0, compute capability 9.0``."""
    memory_bytes: int | None
    """Memory of the device in bytes; for a CPU, what this process may use. None if unknown."""
    rates: dict[Precision, float | None]
    """Measured rate of a matmul in FLOP/s; None for a precision that the device does not have."""
    values: dict[Precision, MatmulNumerics | None]
    """How accurate the same matmul is in each precision; None as in `rates`."""
    fp32_bits_as_set: tuple[int, int]
    """Bits of significand that an fp32 input keeps in a matmul and in a convolution, with the modes
    that are set in this process: 24, or 11 if TF32 is allowed and available."""
    trusted: bool
    """Whether the machine was quiet enough to measure the rates. If not, measure again."""
    recommended: Precision
    """The precision to use: by the rates or, if they are not `trusted`, by the device's type."""
    reason: str
    """The reason for `recommended`: a sentence with figures."""

    @property
    def accelerated(self) -> tuple[Precision, ...]:
        """The precisions whose matmul is measurably faster than fp32's, fastest first.

        If the rates are not `trusted`: the `recommended` precision alone, or none if that is fp32.
        """
        if self.trusted:
            faster = [p for p in Precision if self.speedup(p) >= ACCELERATED]
            return tuple(sorted(faster, key=self.speedup, reverse=True))
        if self.recommended is Precision.FP32:
            return ()
        return (self.recommended,)

    def speedup(self, precision: Precision) -> float:
        """Return the rate of `precision` divided by fp32's; 0 if the device does not have it."""
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
    # `fork_rng` always restores the CPU's generator, and those of the devices that it gets: none
    # for the CPU, for which the device type does not matter.
    if backend(device_type).is_host:
        return torch.random.fork_rng([], device_type="cuda")
    index = torch.accelerator.current_device_index()
    return torch.random.fork_rng([index], device_type=device_type)


def _checked_device(name: str, asked: str) -> torch.device:
    """The device of this name, if it is here.

    Else it raises a `DeviceError` that begins with `asked`, the text in which the name was given.
    """
    if name in _ALSO_KNOWN_AS:
        raise DeviceError(
            f"{asked}: torch calls this device {_ALSO_KNOWN_AS[name]!r}; use that name"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"{asked} is not a device; {_devices_here()}") from None
    if device.type == "meta":
        raise DeviceError(f"{asked} stores no values, so nothing can run there; {_devices_here()}")
    try:
        require_backend(device.type)
    except DeviceError:
        raise DeviceError(f"{asked} is not there; {_devices_here()}") from None
    count = _device_count(device.type)
    if device.index is not None and device.index >= count:
        raise DeviceError(f"{asked}: there is no such number, the highest is {count - 1}")
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
        raise DeviceError(f"{str(device)!r} is there, but torch cannot use it: {reason}") from error
    rates, trusted = _matmul_rates(device)
    if trusted:
        recommended, reason = _recommend(rates)
    else:
        recommended, reason = _recommend_unmeasured(device)
    values = dict.fromkeys(Precision)  # None for a precision that the device does not have
    for precision in _precisions_here(device):
        values[precision] = measure_matmul_numerics(device, precision)
    return DeviceReport(
        device=device,
        name=device_name(device),
        backend=backend_text,
        memory_bytes=memory_bytes(device),
        rates=rates,
        values=values,
        fp32_bits_as_set=(
            _input_bits(device, torch.float32, torch.matmul),
            _input_bits(device, torch.float32, _convolve),
        ),
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
        `describe_device` times a square matmul in each precision. It recommends bf16 if bf16 is at
        least 1.25 times as fast as fp32 and has at least 0.75 of the rate of fp16. Otherwise it
        recommends fp16 or, after that, tf32, if that is at least 1.25 times as fast as fp32. If
        none of them is fast enough, it recommends fp32. If the machine is too busy to measure, the
        instructions of the CPU or the compute capability of the GPU decide.

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


def _matmul_rates(device: torch.device) -> tuple[dict[Precision, float | None], bool]:
    """FLOP/s of a square matmul in each precision, and whether the figures can be trusted.

    None stands for a precision that the device does not have. The size is the same for all: it
    doubles until the product takes 10 ms in fp32, enough to fill the device. On a CPU it stops at
    1024. A precision that is emulated, and so more than ten times as slow as fp32, is timed at the
    first, small size alone: at 1024 one call of fp16 takes seconds on many CPUs.
    """
    precisions = _precisions_here(device)
    small_s = {}
    for precision in precisions:
        matmul = make_matmul(device, precision, _SMALL)
        small_s[precision] = measure(matmul, device=device, repeats=2).median_s
    longest_s = 10 * small_s[Precision.FP32]
    # The precisions that the device does not emulate.
    native = [precision for precision in precisions if small_s[precision] <= longest_s]
    largest = 1024 if backend(device).is_host else 8192
    n = filling_size(device, largest, seconds=10e-3)
    matmuls: dict[str, Callable] = {p: make_matmul(device, p, n) for p in native}
    compared = compare(matmuls, device=device, budget_s=3)
    rates = dict.fromkeys(Precision)
    for precision in precisions:  # FLOPs of the product, over its seconds
        if precision in native:
            rates[precision] = 2 * n**3 / compared.median_s(precision)
        else:
            rates[precision] = 2 * _SMALL**3 / small_s[precision]
    return rates, compared.trusted


def _precisions_here(device: torch.device) -> list[Precision]:
    """All precisions, without TF32 on a device that does not have it."""
    return [p for p in Precision if p is not Precision.TF32 or has_tf32(device.type)]


def filling_size(device: torch.device, largest: int, *, seconds: float) -> int:
    """The first n of 256, 512, … at which a product of n x n matrices takes `seconds` in fp32.

    If none below `largest` does, it is the first that is not below `largest`.
    """
    n = _SMALL
    while n < largest:
        matmul = make_matmul(device, Precision.FP32, n)
        if measure(matmul, device=device, warmup=1, repeats=2).median_s >= seconds:
            break
        n *= 2
    return n


def make_matmul(device: torch.device, precision: Precision, n: int) -> Callable[[], torch.Tensor]:
    """A function that multiplies two n x n matrices in a precision, (n, n) @ (n, n).

    It takes 2 n^3 FLOPs: n^3 multiplications and about as many additions.
    """
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(n, n, device=device, generator=generator).to(precision.dtype)
    right = torch.randn(n, n, device=device, generator=generator).to(precision.dtype)
    mode = _without_autocast(precision)

    def multiply() -> torch.Tensor:
        with mode.autocast(device.type):
            return left @ right

    return multiply


def _without_autocast(precision: Precision) -> Precision:
    """The precision to set for operands that are in the precision's dtype already."""
    if precision is Precision.TF32:
        return Precision.TF32
    return Precision.FP32


def measure_matmul_numerics(device: torch.device, precision: Precision) -> MatmulNumerics:
    """What a matmul in a precision does to values on a device."""
    dtype = precision.dtype
    eps = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(32, 4096, generator=generator).to(dtype)
    right = torch.rand(32, 4096, generator=generator).to(dtype)
    smallest_subnormal = torch.tensor(torch.finfo(dtype).smallest_normal * eps)
    subnormals = smallest_subnormal.to(dtype).expand(16, 16)
    identity = torch.eye(16, dtype=dtype)
    with _without_autocast(precision).autocast(device.type):
        sums = (left.to(device) @ right.T.to(device)).cpu().double()  # (32, 32)
        times_one = (subnormals.to(device) @ identity.to(device)).cpu()
        bits = _input_bits(device, dtype, torch.matmul)
    # All values are positive, so no sum is small, and fp64 is exact enough to compare with.
    exact = left.double() @ right.T.double()
    # A result from 2^e to 2^(e+1) has its last place at 2^e * eps; `frexp` gives e + 1.
    exponents = torch.frexp(exact).exponent.double() - 1
    last_place = torch.exp2(exponents) * eps
    error = ((sums - exact).abs() / last_place).max().item()
    keeps_subnormals = bool((times_one == subnormals).all())
    return MatmulNumerics(error=error, input_bits=bits, subnormals=keeps_subnormals)


def _input_bits(device: torch.device, dtype: torch.dtype, multiply: Callable) -> int:
    """How many bits of significand an input keeps in a product.

    `multiply` takes two (n, n) matrices and returns their product. Each 1 + 2^-k, for k from 1 to
    32, is multiplied by 1. It stays above 1 if the bit of 2^-k is kept.
    """
    size = 32
    inputs = (1 + torch.exp2(-torch.arange(1.0, 1 + size))).to(dtype)
    identity = torch.eye(size, dtype=dtype, device=device)
    out = multiply(torch.diag(inputs).to(device), identity)
    is_kept = out.cpu().diagonal() > 1
    return 1 + int(is_kept.sum())


def _convolve(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of (n, k) and (k, m), as a convolution with kernels of 1 x 1: (n, m)."""
    images = left[:, :, None, None]
    weight = right.T[:, :, None, None]
    return torch.nn.functional.conv2d(images, weight)[:, :, 0, 0]


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
    rate = "its matmul runs at {:.2f}x the rate of fp32"  # of the recommended precision
    # bf16 needs no loss scale, so it may be slower than fp16, down to three quarters of its rate.
    if bf16 >= ACCELERATED and bf16 >= 0.75 * fp16:
        reason = f"{rate.format(bf16)}, and it has the range of fp32"
        return Precision.BF16, f"{reason}, so gradients need no scaling"
    if fp16 >= ACCELERATED:
        reason = f"{rate.format(fp16)}, bf16's at {bf16:.2f}x"
        return Precision.FP16, f"{reason}; its range is small, so use a gradient scaler"
    if tf32 >= ACCELERATED:
        return Precision.TF32, f"{rate.format(tf32)}, and nothing else is faster"
    reason = f"nothing is measurably faster (bf16 {bf16:.2f}x, fp16 {fp16:.2f}x its rate)"
    return Precision.FP32, reason


def _recommend_unmeasured(device: torch.device) -> tuple[Precision, str]:
    """The precision to use where rates cannot be trusted, by what the device has, and why."""
    busy = "the machine was too busy to measure"
    if backend(device).is_host:
        if has_bf16_instructions():
            return Precision.BF16, f"{busy}, and this CPU has instructions for bf16"
        return Precision.FP32, f"{busy}, and this CPU has no instructions for bf16"
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        has = f"{busy}, and compute capability {capability[0]}.{capability[1]} has"
        matmuls = matmuls_of(capability)
        if Precision.BF16 in matmuls:
            return Precision.BF16, f"{has} tensor cores for bf16"
        if Precision.FP16 in matmuls:
            return Precision.FP16, f"{has} tensor cores for fp16 alone; use a gradient scaler"
        return Precision.FP32, f"{has} no tensor cores"
    return Precision.FP32, f"{busy}: measure again when it is idle"


def device_name(device: torch.device) -> str:
    """The name that the maker gave the device, or else the type of processor."""
    module = torch.get_device_module(device.type)
    if hasattr(module, "get_device_name"):
        return module.get_device_name(device)
    if platform.system() == "Darwin":  # CPU and GPU of an Apple chip share its name
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(command, capture_output=True, text=True)
        return answer.stdout.strip() or platform.machine()
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    # "model name      : AMD EPYC 9654 96-Core Processor", once for each core
    match = re.search(r"^model name.*?:(.*)", cpuinfo, re.MULTILINE)
    if match is None:
        return platform.machine()
    return match[1].strip()


def backend_name(device: torch.device) -> str:
    """What torch uses to drive the device, such as ``CUDA 13.0, compute capability 9.0``.

    For a CPU these are its matrix instructions and the number of threads.
    """
    if backend(device).is_host:
        return f"CPU, {matrix_instructions()}, {torch.get_num_threads()} threads"
    if device.type == "cuda" and torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"CUDA {torch.version.cuda}, compute capability {major}.{minor}"
    return device.type.upper()


def memory_bytes(device: torch.device) -> int | None:
    """Bytes of a device's memory; on a CPU, of what this process may use. None if unknown."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if not backend(device).is_host:
        return torch.accelerator.get_memory_info(device)[1]  # free bytes, then all
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # no sysconf, as on Windows
        return None
    try:  # a container may be allowed less than the machine has
        allowed = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    if allowed == "max":
        return total
    return min(total, int(allowed))


def free_bytes() -> int | None:
    """Bytes of main memory that this process could take now; None if unknown."""
    total = memory_bytes(torch.device("cpu"))
    try:
        lines = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux
        return total
    free = total
    # "MemAvailable:   12345678 kB", where kB stands for 1,024 bytes
    available = re.search(r"^MemAvailable:\s+(\d+) kB", lines, re.MULTILINE)
    if available:
        free = int(available[1]) * 1024
    try:  # the limit of a container, and what it uses of it
        taken = int(Path("/sys/fs/cgroup/memory.current").read_text())
        allowed = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # there is no limit, or it is "max"
        return free
    left = max(0, allowed - taken)
    if free is None:
        return left
    return min(free, left)

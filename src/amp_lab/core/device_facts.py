"""The facts that a device reports: its name, its backend, and its memory."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from amp_lab.core.backends import backend
from amp_lab.core.cpu import matrix_instructions


def device_name(device: torch.device) -> str:
    """The name of the device from its manufacturer, or else the type of processor."""
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
    """The backend that torch uses for the device: ``CUDA 13.0, compute capability 9.0``.

    For a CPU, the text has the matrix instructions and the number of threads.
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
    """Bytes of memory of the device; on a CPU, the limit of this process. None if unknown."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if not backend(device).is_host:
        _free, total = torch.accelerator.get_memory_info(device)
        return total
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


def peak_bytes(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on an accelerator that counts it, else of this process."""
    if backend(device).keeps_peak:
        return torch.accelerator.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, others in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        allowed = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # there is no limit, or it is "max"
        return free
    left = max(0, allowed - used)
    if free is None:
        return left
    return min(free, left)

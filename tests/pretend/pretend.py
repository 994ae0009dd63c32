"""Registers the pretend accelerator: `import pretend`, then device "pretend" is there.

PRETEND_LIBRARY names the library that build.py has compiled; see README.md for the other settings.
With PRETEND_GPU=t4, or another NVIDIA GPU of `amp_lab.core.gpus`, the device has the facts of that
GPU: its name, its memory, its compute capability, and whether it emulates bf16.
"""

import os
import platform
import time
import types
from typing import Any

import torch

from amp_lab.core.backends import BACKENDS, Backend
from amp_lab.core.gpus import gpu_of

_name = f"Pretend accelerator on {platform.machine()}"
_capability: tuple[int, int] | None = None
_has_bf16 = True
if os.environ.get("PRETEND_GPU"):
    _gpu = gpu_of(os.environ["PRETEND_GPU"])
    assert _gpu.memory_gb is not None, "a GPU that shares the memory of the CPU"
    assert _gpu.architecture.capability is not None, "a GPU that is not NVIDIA's"
    _name = f"NVIDIA {_gpu.name}"
    _has_bf16 = "bf16" in _gpu.architecture.matmuls
    _capability = _gpu.architecture.capability
    os.environ["PRETEND_MEMORY_MIB"] = str(_gpu.memory_gb * 1024)  # before the library reads them
    if not _has_bf16:
        os.environ["PRETEND_BF16_COST"] = "8"  # four times as long as in fp32

torch.utils.rename_privateuse1_backend("pretend")
torch.ops.load_library(os.environ["PRETEND_LIBRARY"])
_ops = torch.ops.pretend


def _index(device: object = None) -> int:
    """The number of a device, the current one's if it has none."""
    if device is None:
        return torch.accelerator.current_device_index()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


_module = types.ModuleType("torch.pretend")
_module.__dict__.update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: int(os.environ.get("PRETEND_DEVICES", 1)),
    current_device=torch.accelerator.current_device_index,
    set_device=torch.accelerator.set_device_index,
    synchronize=torch.accelerator.synchronize,
    get_device_name=lambda device=None: _name,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    # As torch.cuda answers: emulated bf16 counts as supported, unless it is asked about apart.
    is_bf16_supported=lambda including_emulation=True: including_emulation or _has_bf16,
    manual_seed=_ops.seed_all,
    manual_seed_all=_ops.seed_all,
    initial_seed=lambda: _ops.initial_seed(-1),
    get_rng_state=lambda device=None: _ops.rng_state(_index(device)),
    set_rng_state=lambda state, device=None: _ops.set_rng_state(state, _index(device)),
    empty_cache=torch.accelerator.empty_cache,
    memory_allocated=torch.accelerator.memory_allocated,
    max_memory_allocated=torch.accelerator.max_memory_allocated,
    current_stream=torch.accelerator.current_stream,
    stream=lambda stream: stream,
    Stream=torch.Stream,
    Event=torch.Event,
    device=lambda device: torch.accelerator.device_index(_index(device)),
)
torch._register_device_module("pretend", _module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
# CUDA's `module.to(device)` keeps the Parameter objects, since CUDA's tensors can take the place of
# the CPU's; those of PrivateUse1 can not (TensorImpl::has_compatible_shallow_copy_type).
torch.__future__.set_swap_module_params_on_conversion(True)
_load_state_dict = torch.nn.Module.load_state_dict


def _load_by_copying(self: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
    """`load_state_dict` copies, as on CUDA: a tensor that autograd refers to cannot be swapped."""
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        return _load_state_dict(self, *arguments, **options)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(True)


torch.nn.Module.load_state_dict = _load_by_copying


def _without_kernels(self: object, graph: torch.fx.GraphModule, inputs: list) -> object:
    """Everything of torch.compile but Inductor's kernels, which knows no such device."""
    from torch._dynamo.backends.debugging import aot_eager  # slow to import

    return aot_eager(graph, inputs)


torch._TorchCompileInductorWrapper.__call__ = _without_kernels
if _capability is not None:
    _module.__dict__["get_device_capability"] = lambda device=None: _capability
# The row is all that an accelerator of another make needs.
BACKENDS["pretend"] = Backend("pretend", has_capability=_capability is not None)

# The device's clock runs ahead of the host's by the work that was waited for: whoever reads the
# time without waiting sees that nothing was done yet.
time.perf_counter_ns = _ops.now
time.perf_counter = lambda: _ops.now() / 1e9

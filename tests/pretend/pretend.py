"""Registers the pretend accelerator: `import pretend`, then device "pretend" is there.

PRETEND_LIBRARY names the library that build.py has compiled; see README.md for the other settings.
"""

import os
import platform
import time
import types

import torch

from amp_lab.core.backends import BACKENDS, Backend

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
    get_device_name=lambda device=None: f"Pretend accelerator on {platform.machine()}",
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    is_bf16_supported=lambda: True,
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


def _without_kernels(self: object, graph: torch.fx.GraphModule, inputs: list) -> object:
    """Everything of torch.compile but Inductor's kernels, which knows no such device."""
    from torch._dynamo.backends.debugging import aot_eager  # slow to import

    return aot_eager(graph, inputs)


torch._TorchCompileInductorWrapper.__call__ = _without_kernels
BACKENDS["pretend"] = Backend("pretend")  # all that an accelerator of another make needs

# The device's clock runs ahead of the host's by the work that was waited for: whoever reads the
# time without waiting sees that nothing was done yet.
time.perf_counter_ns = _ops.now
time.perf_counter = lambda: _ops.now() / 1e9

"""Memory of an optimizer: the bytes of its state, and the temporaries of its step."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amp_lab.core.backends import Backend, backend
from amp_lab.core.tensors import tensors_in
from amp_lab.core.torch_versions import step_counters_on_host
from amp_lab.tracing.storage_ledger import StorageLedger

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,  # takes matrices alone; AdamW updates the other parameters
}
"""The optimizers by name. Each is run on tensors without memory, to see what it allocates."""

# Bits of a value, values in a block, bytes of a look-up table, bytes that a step takes for a value.
QUANTIZED = {
    "adamw-8bit": (8, 256, 256 * 4, 8),
    "adamw-4bit": (4, 128, 16 * 4, 26),
    "adamw-fp8": (8, 256, 0, 0),
}
"""``AdamW8bit``, ``AdamW4bit`` and ``AdamWFp8`` of `torchao.optim`, which need not be installed.

The bytes that a step takes are those that Inductor 2.15 allocates on a CPU.
"""

# Their step is a loop over the parameters, in which temporaries of the last parameter live on. So
# parameters cannot be counted one by one.
_LOOPING = ("adafactor", "muon")

Parameter = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def optimizer_bytes(
    name: str, parameters: Iterable[Parameter], device_type: str
) -> tuple[int, int]:
    """Bytes of the optimizer's state, and the most that its step takes for temporaries.

    `name` is a key of `OPTIMIZERS` or `QUANTIZED`; `parameters` are the shape and dtype of each.
    """
    others = list(parameters)  # parameters that can be counted one by one
    state = 0
    temporaries = 0
    if name in _LOOPING:
        # Adafactor updates all parameters in its loop, Muon only matrices.
        looped = tuple(
            (shape, dtype) for shape, dtype in others if name == "adafactor" or len(shape) == 2
        )
        state, temporaries = _bytes_of_one_call(name, looped, device_type)
        others = [parameter for parameter in others if parameter not in looped]
        name = "adamw"  # which updates what Muon leaves out; Adafactor leaves nothing
    # A foreach call has the temporaries of all parameters together, a loop those of one at a time.
    is_foreach = backend(device_type).foreach and name in OPTIMIZERS
    for parameter, count in Counter(others).items():
        own_state, own_temporaries = _bytes_of_one_call(name, (parameter,), device_type)
        state += count * own_state
        if is_foreach:
            temporaries += count * own_temporaries
        else:
            temporaries = max(temporaries, own_temporaries)
    return state, temporaries


@functools.cache  # a transformer has the same few shapes in every block
def _bytes_of_one_call(
    name: str, parameters: tuple[Parameter, ...], device_type: str
) -> tuple[int, int]:
    """Bytes of state and of temporaries for parameters that are updated in one call."""
    device = backend(device_type)
    if name not in QUANTIZED:
        return _bytes_of_two_steps(name, parameters, device)
    ((shape, dtype),) = parameters  # these optimizers are asked for one parameter at a time
    state, temporaries = _quantized_bytes(name, math.prod(shape), dtype.itemsize)
    if device.is_host:
        state += 4  # the counter of steps, which is on the host
    return state, temporaries


def _bytes_of_two_steps(
    name: str, shapes_and_dtypes: tuple[Parameter, ...], device: Backend
) -> tuple[int, int]:
    """Bytes of state and of temporaries, from two steps of the optimizer `name` on ``meta``.

    The first step makes the state, the second is measured.
    """
    with step_counters_on_host(), _ItemsAreOne():
        parameters = [
            nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            for shape, dtype in shapes_and_dtypes
        ]
        gradients = [torch.empty_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        options = {} if name in _LOOPING else {"foreach": device.foreach}
        optimizer = OPTIMIZERS[name](parameters, **options)
        optimizer.step()
        states = tensors_in(list(optimizer.state.values()))
        ledger = StorageLedger("meta")
        # Notes these storages, so that only those of the step are new. The kind does not matter.
        ledger.set_kind("optimizer", [*parameters, *gradients, *states])
        ledger.mark("before")
        with ledger:
            optimizer.step()
        ledger.mark("after")
    # torch keeps counters of steps on the host: they take memory of the device only on a CPU.
    state = sum(tensor.nbytes for tensor in states if tensor.is_meta or device.is_host)
    trace = ledger.trace()
    in_use = trace.in_use()[trace.marks["before"] - 1 :]  # from the last event before the step
    return state, int(in_use.max() - in_use[0])


def _quantized_bytes(name: str, values: int, itemsize: int) -> tuple[int, int]:
    """Bytes of state and of temporaries for a parameter of `values` numbers of `itemsize` bytes.

    The state is two moments, in blocks of values with one fp32 scale each.
    """
    bits, block, table_bytes, step_bytes = QUANTIZED[name]
    # torchao quantizes the moments from 4096 values on, if they fill whole blocks. Else they have
    # the dtype of the parameter, and temporaries are not counted.
    if values < 4096 or values % block:
        return 2 * values * itemsize, 0
    scale_bytes = 4 * values // block
    moment_bytes = values * bits // 8 + scale_bytes + table_bytes
    # The step computes new scales of both moments before it writes them over the old ones.
    return 2 * moment_bytes, values * step_bytes + 2 * scale_bytes


class _ItemsAreOne(TorchFunctionMode):
    """The mode in which ``item()`` of a tensor on ``meta`` returns 1: Adafactor reads a norm."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))

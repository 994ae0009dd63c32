"""What an optimizer needs: the bytes of its state, and what its step takes on top of it."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amp_lab.core.backends import Backend, backend
from amp_lab.core.torch_versions import step_counters_on_host
from amp_lab.tracing.ops_seen import tensors_in
from amp_lab.tracing.storage_ledger import StorageLedger

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,  # for matrices; AdamW has the other parameters
}
"""The optimizers by name. Each is really run, on tensors without memory, to see what it needs."""

QUANTIZED = {  # bits, values in a block, bytes of a look-up table, bytes for a value in a step
    "adamw-8bit": (8, 256, 256 * 4, 8),
    "adamw-4bit": (4, 128, 16 * 4, 26),
    "adamw-fp8": (8, 256, 0, 0),
}
"""``AdamW8bit``, ``AdamW4bit`` and ``AdamWFp8`` of `torchao.optim`, which need not be there.

What a step takes is what Inductor 2.15 allocates on a CPU.
"""

_LOOPS = ("adafactor", "muon")  # over the parameters, in which the last one's temporaries live on

Parameter = tuple[tuple[int, ...], torch.dtype]  # its shape and dtype


def optimizer_bytes(
    name: str, parameters: Iterable[Parameter], device_type: str
) -> tuple[int, int]:
    """Bytes of the optimizer's state, and the most that its step takes on top of it.

    `name` is a key of `OPTIMIZERS` or `QUANTIZED`; `parameters` are the shape and dtype of each.
    """
    separate = list(parameters)
    state = 0
    most_work = 0
    if name in _LOOPS:
        looped = tuple(p for p in separate if name == "adafactor" or len(p[0]) == 2)
        state, most_work = _bytes_for(name, looped, device_type)
        separate = [p for p in separate if p not in looped]
        name = "adamw"
    # In one call for all, the temporaries of all are there together; else those of one.
    is_one_call = backend(device_type).foreach and name in OPTIMIZERS
    for parameter, count in Counter(separate).items():
        state_of_one, work_of_one = _bytes_for(name, (parameter,), device_type)
        state += count * state_of_one
        if is_one_call:
            most_work += count * work_of_one
        else:
            most_work = max(most_work, work_of_one)
    return state, most_work


@functools.cache  # a transformer has the same few shapes in every block
def _bytes_for(name: str, given: tuple[Parameter, ...], device_type: str) -> tuple[int, int]:
    """The same for parameters in one call."""
    device = backend(device_type)
    if name not in QUANTIZED:
        return _bytes_of_two_steps(name, given, device)
    ((shape, dtype),) = given
    state, work = _quantized_bytes(name, math.prod(shape), dtype.itemsize)
    if device.is_host:
        state += 4  # the counter of steps
    return state, work


def _bytes_of_two_steps(
    name: str, given: tuple[Parameter, ...], device: Backend
) -> tuple[int, int]:
    """The same from two steps on ``meta``, of which the first makes the state."""
    with step_counters_on_host(), _AnyNumber():
        parameters = [nn.Parameter(torch.empty(s, dtype=d, device="meta")) for s, d in given]
        gradients = [torch.empty_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        options = {} if name in _LOOPS else {"foreach": device.foreach}
        optimizer = OPTIMIZERS[name](parameters, **options)
        optimizer.step()
        states = tensors_in(list(optimizer.state.values()))
        ledger = StorageLedger("meta")
        ledger.own("optimizer", [*parameters, *gradients, *states])
        ledger.mark("before")
        with ledger:
            optimizer.step()
        ledger.mark("after")
    # Counters of steps, which torch keeps on the host, take memory of the device on a CPU only.
    state = sum(tensor.nbytes for tensor in states if tensor.is_meta or device.is_host)
    trace = ledger.trace()
    in_use = trace.in_use()[trace.marks["before"] - 1 :]
    return state, int(in_use.max() - in_use[0])


def _quantized_bytes(name: str, values: int, itemsize: int) -> tuple[int, int]:
    """The same for a parameter of so many values: two moments, of which blocks share a scale."""
    bits, block, table, work = QUANTIZED[name]
    if values < 4096 or values % block:  # such stay as the parameter is
        return 2 * values * itemsize, 0
    scales = 4 * values // block
    moment = values * bits // 8 + scales + table
    return 2 * moment, values * work + 2 * scales


class _AnyNumber(TorchFunctionMode):
    """In it a tensor without values reads as 1, as Adafactor reads the norm of a weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))

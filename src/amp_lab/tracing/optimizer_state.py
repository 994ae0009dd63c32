"""Memory of an optimizer: the bytes of its state, and the temporaries of its step."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amp_lab.core.backends import Backend, backend
from amp_lab.core.optimizers import OPTIMIZERS, Optimizer, QuantizedState
from amp_lab.core.tensors import tensors_in
from amp_lab.core.torch_versions import step_counters_on_host
from amp_lab.tracing.storage_ledger import StorageLedger

Parameter = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def optimizer_bytes(
    name: str, parameters: Iterable[Parameter], device_type: str
) -> tuple[int, int]:
    """Bytes of the optimizer's state, and the most that its step takes for temporaries.

    `name` is a key of `OPTIMIZERS`; `parameters` are the shape and dtype of each.
    """
    optimizer = OPTIMIZERS[name]
    looped = []  # parameters of a loop, which are counted together
    # How often a call updates these parameters, by the optimizer's name and the parameters.
    calls: Counter[tuple[str, tuple[Parameter, ...]]] = Counter()
    for parameter in parameters:
        shape, _ = parameter
        if optimizer.rest and len(shape) != 2:
            calls[optimizer.rest, (parameter,)] += 1
        elif optimizer.loops:
            looped.append(parameter)
        else:
            calls[name, (parameter,)] += 1
    if looped:
        calls[name, tuple(looped)] = 1
    # A foreach call has the temporaries of all parameters together, a loop those of one at a time.
    is_foreach = backend(device_type).foreach and optimizer.quantized is None
    state = 0
    temporaries = 0
    for (updated_by, updated), count in calls.items():
        own_state, own_temporaries = _bytes_of_one_call(updated_by, updated, device_type)
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
    optimizer = OPTIMIZERS[name]
    device = backend(device_type)
    if optimizer.quantized is None:
        return _bytes_of_two_steps(optimizer, parameters, device)
    ((shape, dtype),) = parameters  # these optimizers are asked for one parameter at a time
    values = math.prod(shape)
    state, temporaries = _quantized_bytes(optimizer.quantized, values, dtype.itemsize)
    if device.is_host:
        state += 4  # the counter of steps, which is on the host
    return state, temporaries


def _bytes_of_two_steps(
    optimizer: Optimizer, shapes_and_dtypes: tuple[Parameter, ...], device: Backend
) -> tuple[int, int]:
    """Bytes of state and of temporaries, from two steps of the optimizer on ``meta``.

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
        options = {} if optimizer.loops else {"foreach": device.foreach}
        made = optimizer.make(parameters, **options)
        made.step()
        states = tensors_in(list(made.state.values()))
        ledger = StorageLedger("meta")
        # Notes these storages, so that only those of the step are new. The kind does not matter.
        ledger.set_kind("optimizer", [*parameters, *gradients, *states])
        ledger.mark("before")
        with ledger:
            made.step()
        ledger.mark("after")
    # torch keeps counters of steps on the host: they take memory of the device only on a CPU.
    state = sum(tensor.nbytes for tensor in states if tensor.is_meta or device.is_host)
    trace = ledger.trace()
    in_use = trace.in_use()[trace.marks["before"] - 1 :]  # from the last event before the step
    return state, int(in_use.max() - in_use[0])


def _quantized_bytes(quantized: QuantizedState, values: int, itemsize: int) -> tuple[int, int]:
    """Bytes of state and of temporaries for a parameter of `values` numbers of `itemsize` bytes.

    The state is two moments, in blocks of values with one fp32 scale each.
    """
    # torchao quantizes the moments from 4096 values on, if they fill whole blocks. Else they have
    # the dtype of the parameter, and temporaries are not counted.
    if values < 4096 or values % quantized.block:
        return 2 * values * itemsize, 0
    scale_bytes = 4 * values // quantized.block
    moment_bytes = values * quantized.bits // 8 + scale_bytes + quantized.table_bytes
    # The step computes new scales of both moments before it writes them over the old ones.
    return 2 * moment_bytes, values * quantized.step_bytes + 2 * scale_bytes


class _ItemsAreOne(TorchFunctionMode):
    """The mode in which ``item()`` of a tensor on ``meta`` returns 1: Adafactor reads a norm."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))

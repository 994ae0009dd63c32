"""Memory of an optimizer: the bytes of its state, and the temporaries of its step."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amp_lab.core.backends import Backend, backend
from amp_lab.core.optimizers import OPTIMIZERS, Optimizer, QuantizedState
from amp_lab.core.tensors import tensors_in
from amp_lab.core.torch_versions import step_counters_on_host
from amp_lab.tracing.storage_ledger import StorageLedger

Parameter = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


class OptimizerBytes(NamedTuple):
    """The memory of an optimizer, in bytes."""

    state: int  # between steps, such as the two moments of Adam
    temporaries: int  # the most that a step takes besides


def optimizer_bytes(name: str, parameters: Iterable[Parameter], device_type: str) -> OptimizerBytes:
    """The bytes of the optimizer's state, and the most that its step takes for temporaries.

    `name` is a key of `OPTIMIZERS`; `parameters` has the shape and dtype of each parameter.
    """
    optimizer = OPTIMIZERS[name]
    # A foreach step has the temporaries of all parameters together, a loop those of one at a time.
    is_foreach = backend(device_type).foreach and optimizer.in_torch
    is_loop = optimizer.loops or (optimizer.overlaps and not is_foreach)
    # The parameters are grouped as they can be counted: an optimizer that loops over them is asked
    # for all at once, any other for one at a time.
    loop_parameters = []
    # How many equal groups there are, by the optimizer that updates them and their parameters.
    groups: Counter[tuple[str, tuple[Parameter, ...]]] = Counter()
    for parameter in parameters:
        shape, _ = parameter
        if optimizer.rest and len(shape) != 2:  # Muon leaves all but matrices to AdamW
            groups[optimizer.rest, (parameter,)] += 1
        elif is_loop:
            loop_parameters.append(parameter)
        else:
            groups[name, (parameter,)] += 1
    if loop_parameters:
        groups[name, tuple(loop_parameters)] = 1
    state = 0
    temporaries = 0
    for (optimizer_name, group), count in groups.items():
        group_bytes = _bytes_of_group(optimizer_name, group, device_type)
        state += count * group_bytes.state
        if is_foreach:
            temporaries += count * group_bytes.temporaries
        else:
            temporaries = max(temporaries, group_bytes.temporaries)
    return OptimizerBytes(state, temporaries)


@functools.cache  # a transformer has the same few shapes in every block
def _bytes_of_group(
    name: str, parameters: tuple[Parameter, ...], device_type: str
) -> OptimizerBytes:
    """The bytes for parameters that one optimizer updates; `name` is that optimizer's."""
    optimizer = OPTIMIZERS[name]
    device = backend(device_type)
    if optimizer.in_torch:
        return _measure_step(optimizer, parameters, device)
    assert optimizer.quantized is not None  # the only kind that torch lacks
    ((shape, dtype),) = parameters  # these optimizers are asked for one parameter at a time
    values = math.prod(shape)
    state, temporaries = _quantized_bytes(optimizer.quantized, values, dtype.itemsize)
    if device.is_host:
        state += 4  # the counter of steps, which is on the host
    return OptimizerBytes(state, temporaries)


def _measure_step(
    optimizer: Optimizer, shapes_and_dtypes: tuple[Parameter, ...], device: Backend
) -> OptimizerBytes:
    """Measure the bytes of an optimizer for some parameters, in two steps on ``meta``.

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
        torch_optimizer = optimizer.make(parameters, **options)
        torch_optimizer.step()
        states = tensors_in(list(torch_optimizer.state.values()))
        ledger = StorageLedger("meta")
        # Notes these storages, so that only those of the step are new. The kind does not matter.
        ledger.set_kind("optimizer", [*parameters, *gradients, *states])
        ledger.mark("before")
        with ledger:
            torch_optimizer.step()
        ledger.mark("after")
    # torch keeps counters of steps on the host: they take memory of the device only on a CPU.
    state = sum(tensor.nbytes for tensor in states if tensor.is_meta or device.is_host)
    trace = ledger.trace()
    in_use = trace.in_use()[trace.marks["before"] - 1 :]  # from the last event before the step
    temporaries = int(in_use.max() - in_use[0])
    return OptimizerBytes(state, temporaries)


def _quantized_bytes(quantized: QuantizedState, values: int, itemsize: int) -> OptimizerBytes:
    """The bytes of an optimizer with a quantized state, for one parameter.

    The parameter has `values` numbers of `itemsize` bytes. The state is two moments, in blocks of
    values with one fp32 scale each.
    """
    # torchao quantizes the moments from 4096 values on, if they fill whole blocks. Else they have
    # the dtype of the parameter, and temporaries are not counted.
    if values < 4096 or values % quantized.block:
        return OptimizerBytes(state=2 * values * itemsize, temporaries=0)
    scale_bytes = 4 * values // quantized.block
    moment_bytes = values * quantized.bits // 8 + scale_bytes + quantized.table_bytes
    # The step computes new scales of both moments before it writes them over the old ones.
    step_bytes = values * quantized.step_bytes + 2 * scale_bytes
    return OptimizerBytes(state=2 * moment_bytes, temporaries=step_bytes)


class _ItemsAreOne(TorchFunctionMode):
    """The mode in which ``item()`` of a tensor on ``meta`` returns 1: Adafactor reads a norm."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))

"""What an optimizer keeps from step to step, and what its step needs besides."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn

from amp_lab.backends import backend
from amp_lab.torch_versions import step_counters_on_host
from amp_lab.tracing.storage_ledger import StorageLedger

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""The optimizers by name. Each is really run, on tensors without memory, to see what it needs."""


def optimizer_bytes(
    name: str, parameters: Iterable[tuple[tuple[int, ...], torch.dtype]], device_type: str
) -> tuple[int, int]:
    """Bytes of the optimizer's state, and the most that its step takes on top of it.

    `name` is a key of `OPTIMIZERS`; `parameters` are the shape and dtype of each.
    """
    state = most = 0
    for (shape, dtype), count in Counter(parameters).items():
        state_of_one, most_of_one = _bytes_for_one(name, shape, dtype, device_type)
        state += count * state_of_one
        # In one call for all, the temporaries of all are there together; else those of one.
        if backend(device_type).foreach:
            most += count * most_of_one
        else:
            most = max(most, most_of_one)
    return state, most


@functools.cache  # a transformer has the same few shapes in every block
def _bytes_for_one(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device_type: str
) -> tuple[int, int]:
    """The same for one parameter, from two steps on ``meta``: the first makes the state."""
    device = backend(device_type)
    with step_counters_on_host():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        optimizer = OPTIMIZERS[name]([parameter], foreach=device.foreach)
        optimizer.step()
        tensors = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor)]
        ledger = StorageLedger("meta")
        ledger.own("optimizer", [parameter, parameter.grad, *tensors])
        ledger.mark("before")
        with ledger:
            optimizer.step()
        ledger.mark("after")
    # Counters of steps, which torch keeps on the host, take memory of the device on a CPU only.
    state = [t.nbytes for t in tensors if t.is_meta or device.is_host]
    trace = ledger.trace()
    in_use = trace.in_use()[trace.marks["before"] - 1 :]
    return sum(state), int(in_use.max() - in_use[0])

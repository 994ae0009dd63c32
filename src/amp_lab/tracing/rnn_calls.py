"""A call of a recurrent layer: its run on fake tensors, and its FLOPs."""

import math
from collections.abc import Callable
from typing import Any

import torch

from amp_lab.core.backends import backend
from amp_lab.core.tensors import tensor_key
from amp_lab.tracing.fake_device import autocast_on
from amp_lab.tracing.torch_call import TorchCall


def run_first_step(call: TorchCall, func: Callable, args: tuple, device_type: str) -> Any:
    """Run a recurrent layer only over its first step, since the other steps run the same ops.

    A packed sequence is run in full. The function first sets `call.autocast_dtype` to the dtype to
    which autocast casts on this backend. It returns the result of `func` for all steps.
    """
    traced_backend = backend(device_type)
    if call.name in traced_backend.rnns_without_rule:
        call.autocast_dtype = None  # it runs as without autocast
    elif call.autocast_dtype is not None:
        # Fake tensors do not reach the kernel that casts to this dtype.
        call.autocast_dtype = traced_backend.fused_rnn_dtype or call.autocast_dtype
    steps = args[0]
    # torch.lstm takes (input, states, weights, …), or (data, batch sizes, states, weights, …)
    # for packed sequences. torch.gru is alike, but has one tensor of states.
    packed_argument = args[1 if call.name == "lstm" else 2]
    is_packed = isinstance(packed_argument, torch.Tensor)
    if not is_packed:
        is_batch_first = args[-1]
        time_dim = 1 if is_batch_first else 0  # (B, T, C), or (T, B, C)
        args = (steps.narrow(time_dim, start=0, length=1), *args[1:])
    with autocast_on(device_type, call.autocast_dtype, enabled=call.autocast_dtype is not None):
        out, *states = func(*args)
    if not is_packed:  # the output has as many steps as the input
        out = out.expand(*steps.shape[:2], out.shape[-1]).contiguous()
    return (out, *states)


def rnn_flops(ins: list[torch.Tensor], names: dict[int, str]) -> int:
    """FLOPs of a recurrent layer: in each step each weight is multiplied once for each item.

    `ins` are the tensors that the layer gets: the input first, then states and weights. `names` are
    the names in `OpLog`.
    """
    weights = 0
    for tensor in ins[1:]:
        # A state may be a matrix too, so the dimensions alone do not tell a weight.
        is_parameter = names.get(tensor_key(tensor), "").startswith("parameter ")
        if tensor.dim() == 2 and is_parameter:
            weights += tensor.numel()
    steps = math.prod(ins[0].shape[:-1])
    return 2 * steps * weights

"""A call of a recurrent layer: its run on fake tensors, and its FLOPs."""

import math
from collections.abc import Callable
from typing import Any

import torch

from amp_lab.core.backends import backend
from amp_lab.core.tensors import tensor_key
from amp_lab.tracing.fake_device import autocast_on
from amp_lab.tracing.torch_call import TorchCall


def rnn_autocast_dtype(call: TorchCall, device_type: str) -> torch.dtype | None:
    """The dtype to which autocast casts for a recurrent layer on a backend; None: it does not.

    Fake tensors do not show it: they do not reach the kernel of a library, such as cuDNN's, for
    which autocast casts to a dtype of its own.
    """
    traced_backend = backend(device_type)
    if call.autocast_dtype is None or call.name in traced_backend.rnns_without_rule:
        return None
    return traced_backend.fused_rnn_dtype or call.autocast_dtype


def run_first_step(call: TorchCall, func: Callable, args: tuple, device_type: str) -> Any:
    """Run a recurrent layer over its first time step alone: the other steps run the same ops.

    A packed sequence is run in full. Autocast casts to `call.autocast_dtype`. The result has the
    shapes that `func` returns for all steps.
    """
    inputs = args[0]
    # The arguments are (input, states, weights, …), or (data, batch sizes, states, weights, …) for
    # a packed sequence. Weights are a list. States are a list for an LSTM, else one tensor. So an
    # LSTM's second argument shows which of the two it is, and the third argument of other layers.
    deciding_argument = args[1 if call.name == "lstm" else 2]
    is_packed = isinstance(deciding_argument, torch.Tensor)
    if not is_packed:
        is_batch_first = args[-1]
        time_dim = 1 if is_batch_first else 0  # (B, T, C), or (T, B, C)
        first_step = inputs.narrow(time_dim, start=0, length=1)
        args = (first_step, *args[1:])
    with autocast_on(device_type, call.autocast_dtype, enabled=call.autocast_dtype is not None):
        out, *states = func(*args)
    if not is_packed:  # the output has as many steps as the input
        out = out.expand(*inputs.shape[:2], out.shape[-1]).contiguous()
    return (out, *states)


def rnn_flops(ins: list[torch.Tensor], names: dict[int, str]) -> int:
    """FLOPs of a recurrent layer: in each step each weight is multiplied once for each item.

    `ins` are the tensors that the layer gets: the input first, then states and weights. `names` are
    those of `OpLog`, by the key of a storage: a weight's begins with "parameter".
    """
    weights = 0  # numbers in all weight matrices
    for tensor in ins[1:]:
        # A state may be a matrix too, so the dimensions alone do not tell a weight.
        is_parameter = names.get(tensor_key(tensor), "").startswith("parameter ")
        if tensor.dim() == 2 and is_parameter:
            weights += tensor.numel()
    items = math.prod(ins[0].shape[:-1])  # batch x time steps
    return 2 * items * weights

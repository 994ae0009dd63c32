"""Recurrent layers of a library that takes the weights as one flat copy, as cuDNN does."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from amp_lab.backends import Backend
from amp_lab.tracing.fake_device import autocast_on

RNN_LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class CastOnce(TorchFunctionMode):
    """Casts a layer's input, states and weights once, and not anew for each step.

    So does autocast for such a library (ATen/cudnn/AutocastRNN.cpp). torch's own kernels, which
    stand in for it on fake tensors, would cast every weight in every step.
    """

    def __init__(self, device: Backend):
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kind = getattr(func, "__name__", ""), self._device.type
        if name not in RNN_LAYERS or not torch.is_autocast_enabled(kind):
            return func(*args, **(kwargs or {}))
        dtype = self._device.fused_rnn_dtype

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor

        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs or {}))
        with autocast_on(kind, dtype, enabled=False):
            return func(*args, **kwargs)

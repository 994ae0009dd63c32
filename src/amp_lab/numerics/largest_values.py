"""Does a model's range fit into a narrower format? The largest value of each module."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from amp_lab.core.tensors import tensors_in
from amp_lab.numerics.tensor_summary import readable
from amp_lab.numerics.watched_ops import outputs


def largest_values(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, float]:
    """Return the largest magnitude that each module computes, by the module's name.

    Compare the magnitudes with the largest number of the format: 65504 in fp16, 3.4e38 in bf16 and
    fp32.

    The model runs once on `inputs`, without gradients and in the dtypes of its weights. Call
    `eval()` first if dropout or batch norm should not be in training mode. Leave autocast off. For
    each module, the function takes the largest magnitude over all calls, in the output and in the
    results of ops in the module's code. The modules are in the order in which their first calls
    end. The name of the model itself is "".

    NaN and +inf count as `inf`. These values are ignored:

    - values below -1e30, also -inf, because they are masks;
    - integers;
    - results of fp32 ops in a model with 16-bit weights, as in many norms, because they stay in
      fp32;
    - values inside a kernel, such as fused attention, because they are not visible.
    """
    maxima = _Maxima(model)
    mha = torch.backends.mha
    has_fastpath = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)  # it would run a whole layer as one op
    try:
        with torch.no_grad(), maxima.hooks(), maxima:
            model(*inputs, **kwargs)
    finally:
        mha.set_fastpath_enabled(has_fastpath)
    return maxima.by_module


class _Maxima(TorchDispatchMode):
    """Follows the ops and module calls of a model; `by_module` has the largest value of each."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.by_module: dict[str, float] = {}
        self._names = {module: name for name, module in model.named_modules()}
        # A stack: the largest value so far in each module that is running, the innermost last.
        self._running = [0.0]
        itemsizes = [p.itemsize for p in model.parameters() if p.is_floating_point()]
        # Only results are counted whose values have at most as many bytes as those of the narrowest
        # weights, but 2 bytes at least, for weights in 8 bits. Without weights, all are counted.
        self._counted_itemsize = max(2, min(itemsizes, default=8))

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """The block in which the calls of the modules are followed."""
        with contextlib.ExitStack() as stack:
            for module in self._names:
                before = module.register_forward_pre_hook(self._enter)
                stack.callback(before.remove)
                after = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(after.remove)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        """A hook before a module: begin to follow its own ops."""
        self._running.append(0.0)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook after a module: add the largest value of this call to `by_module`."""
        largest_inside = self._running.pop()
        with _disable_current_modes():  # these ops are ours, not the model's
            values = list(map(_largest, tensors_in(output)))
        if not isinstance(module, nn.RMSNorm):  # it computes in fp32 in any model
            values.append(largest_inside)
        name = self._names[module]
        self.by_module[name] = max([self.by_module.get(name, 0.0), *values])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in outputs(func, out, all_finite=True):
            if tensor.itemsize <= self._counted_itemsize:
                self._running[-1] = max(self._running[-1], _largest(tensor))
        return out


def _largest(tensor: Tensor) -> float:
    """The largest magnitude: inf if a value is +inf or NaN, 0 for integers and without values.

    Values below -1e30, -inf among them, are masks, which do not count.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    values = readable(tensor)
    unmasked = values.masked_fill(values < -1e30, 0)
    return unmasked.abs().nan_to_num(math.inf, math.inf).max().item()

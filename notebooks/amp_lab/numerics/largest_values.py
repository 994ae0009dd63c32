"""Does a model's range fit into a narrower format? The largest value of each module."""

import contextlib
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from amp_lab.numerics.tensor_summary import readable
from amp_lab.numerics.watched_ops import outputs
from amp_lab.tracing.ops_seen import tensors_in


def largest_values(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, float]:
    """The largest magnitude that each module computes, by its name, in the order of the calls.

    Runs the model once on `inputs`, without gradients, in the dtypes that it has, and takes it as
    it is: call `eval()` first where that matters, and leave autocast off. What counts is what a
    module and the ops in its own code return, in all calls; infinite and NaN count as `inf`. The
    model itself is named "". fp16 ends at 65504, bf16 and fp32 at 3.4e38.

    No values are integers, and what is below -1e30: a mask, as -inf and `finfo.min` are. Ops in
    fp32 among 16-bit weights, as in many norms, do not count, since they stay in fp32; among fp32
    weights they do. What is inside a kernel, such as a fused attention's products, is not seen.
    """
    found: dict[str, float] = {}
    running = [0.0]  # the largest value of each module so far, the innermost last; outside, first
    weights = [p.itemsize for p in model.parameters() if p.is_floating_point()]
    width = max(2, min(weights, default=8))  # of ops that count, in bytes
    mha = torch.backends.mha

    def leave(name: str, module: nn.Module, given: Any, output: Any) -> None:
        with _disable_current_modes():
            values = [running.pop(), *map(_largest, tensors_in(output))]
        inside = isinstance(module, nn.RMSNorm)  # which computes in fp32 in any model
        found[name] = max([found.get(name, 0.0), *values[inside:]])

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = [t for t in outputs(func, out, all_finite=True) if t.itemsize <= width]
            running[-1] = max([running[-1], *map(_largest, made)])
            return out

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            enter, after = lambda *_: running.append(0.0), functools.partial(leave, name)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)  # a whole layer as one op
        with torch.no_grad(), Ops():
            model(*inputs, **kwargs)
    return found


def _largest(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    values = readable(tensor)
    return values.masked_fill(values < -1e30, 0).abs().nan_to_num(math.inf, math.inf).max().item()

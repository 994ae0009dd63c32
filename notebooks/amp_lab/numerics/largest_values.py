"""Does a model's range fit into a narrower format? The largest value of each module."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def largest_values(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, float]:
    """The largest magnitude that each module returns, by its name, in the order of the calls.

    Runs the model once on `inputs`, without gradients, in the dtypes that it has, and takes it as
    it is: call `eval()` first where that matters. A module that returns several tensors has the
    largest of them all, and one that is called several times the largest of all calls; infinite
    and NaN count as `inf`. The model itself is named "". What is inside a function, such as the
    products of a fused attention, is not seen. fp16 ends at 65504, bf16 and fp32 at 3.4e38.
    """
    found: dict[str, float] = {}

    def note(name: str):
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                    largest = tensor.abs().nan_to_num(math.inf, math.inf).max().item()
                    found[name] = max(found.get(name, 0.0), largest)

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            model(*inputs, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found

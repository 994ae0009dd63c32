"""Copy a model that has already been run, which `copy.deepcopy` alone may refuse."""

import copy
from typing import Any

from torch import nn

from amp_lab.core.tensors import named_tensors


def copied(model: nn.Module, *others: Any) -> Any:
    """Return a deep copy of a model; with `others`, a tuple of copies (model, *others).

    Tensors and modules that the model and `others` share are shared by the copies, too.
    A module may keep a computed tensor as an attribute: torchvision's RAFT keeps features,
    `torch.nn.utils.weight_norm` a weight. torch refuses to copy a tensor with a `grad_fn`, so the
    copy gets a detached one. Raises what `copy.deepcopy` raises.
    """
    detached = {}  # deepcopy's memo: for the `id` of an object, its copy
    for module in model.modules():
        for _, tensor in named_tensors(vars(module)):
            if tensor.grad_fn is not None:
                detached[id(tensor)] = tensor.detach().clone()
    if not others:
        return copy.deepcopy(model, memo=detached)
    return copy.deepcopy((model, *others), memo=detached)

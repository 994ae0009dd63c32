"""Copies of a model that has already been run."""

import copy
from typing import Any

from torch import nn

from amp_lab.tracing.structures import named_tensors


def copied(model: nn.Module, *others: Any) -> Any:
    """A deep copy of a model; with `others`, a tuple of copies, in which they share what they do.

    A module may keep what it computed last: torchvision's RAFT a pyramid of features,
    `torch.nn.utils.weight_norm` a weight. torch copies no tensor of a graph, so the copy has their
    values alone. Raises what `copy.deepcopy` raises.
    """
    without_graph = {}
    for module in model.modules():
        for _, tensor in named_tensors(vars(module)):
            if tensor.grad_fn is not None:
                without_graph[id(tensor)] = tensor.detach().clone()
    if not others:
        return copy.deepcopy(model, without_graph)
    return copy.deepcopy((model, *others), without_graph)

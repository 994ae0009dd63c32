"""Tensors in the structures that models take and return: tuples, mappings, dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def named_leaves(structure: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Place and value of each leaf of tuples, lists, mappings and dataclasses."""
    if isinstance(structure, (list, tuple)):
        structure = dict(enumerate(structure))
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        structure = {f.name: getattr(structure, f.name) for f in dataclasses.fields(structure)}
    if not isinstance(structure, Mapping):
        yield path, structure
        return
    for step, value in structure.items():
        yield from named_leaves(value, f"{path}.{step}")


def named_tensors(structure: object) -> list[tuple[str, torch.Tensor]]:
    """The tensors among `named_leaves`."""
    return [pair for pair in named_leaves(structure) if isinstance(pair[1], torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    """`structure` with `function` of every tensor in its tuples, lists, dicts and dataclasses."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        copied = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            mapped = map_tensors(function, getattr(leaf, field.name))
            object.__setattr__(copied, field.name, mapped)  # a frozen dataclass refuses setattr
        return copied

    return pytree.tree_map(of_leaf, structure)

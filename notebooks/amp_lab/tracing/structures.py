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
    """`structure` with `function` of every tensor in its tuples, lists, dicts and dataclasses.

    An object that is a cache of keys and values, such as a `DynamicCache` of transformers, is
    copied with what it holds, since a model that gets one writes into it.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if is_cache(leaf):
            mapped = {id(tensor): function(tensor) for tensor in _tensors_inside(leaf, set())}
            return copy.deepcopy(leaf, mapped)  # which takes these in place of copies
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        copied = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            mapped = map_tensors(function, getattr(leaf, field.name))
            object.__setattr__(copied, field.name, mapped)  # a frozen dataclass refuses setattr
        return copied

    return pytree.tree_map(of_leaf, structure)


def is_cache(thing: object) -> bool:
    """Whether this is an object of a class that is named a cache, as transformers' are."""
    named = "cache" in type(thing).__name__.lower()
    return named and hasattr(thing, "__dict__") and not callable(thing)


def parts_of(thing: Any, *, opened: bool) -> dict[str, Any]:
    """What a structure holds, by name or number; attributes of other objects only if `opened`."""
    if isinstance(thing, Mapping):
        return {str(key): value for key, value in thing.items()}
    if hasattr(thing, "_asdict"):  # a named tuple
        return thing._asdict()
    if isinstance(thing, (list, tuple)):
        return {str(number): value for number, value in enumerate(thing)}
    if isinstance(thing, torch.Tensor) or callable(thing):  # a module or a class among them
        return {}
    return {**vars(thing)} if opened and hasattr(thing, "__dict__") else {}


def _tensors_inside(thing: Any, known: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in a structure and in the attributes of its objects, each once."""
    if id(thing) in known:
        return
    known.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    for part in parts_of(thing, opened=True).values():
        yield from _tensors_inside(part, known)

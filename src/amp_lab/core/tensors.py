"""Tensors in the structures that models take and return, and the identity of storages."""

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from amp_lab.core.errors import TraceError, first_line
from amp_lab.core.remedies import remedy

_GIVE_TENSORS = remedy(
    "trace.give_tensors",
    "an input is an object that cannot be copied, or whose attributes cannot be read",
    "give the model its tensors in a dict or a dataclass",
)

LOWER_DTYPES = (torch.float16, torch.bfloat16)  # autocast can compute in them, on every backend
_COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def largest_integer(dtype: torch.dtype) -> int:
    """The number up to which a dtype represents every integer: 256 for bf16, 2048 for fp16."""
    # `eps` is the step between numbers from 1 to 2, so 2 / eps is where the step becomes 2.
    return int(2 / torch.finfo(dtype).eps)


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of tuples, lists and dicts."""
    if isinstance(structure, torch.Tensor):
        return [structure]
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored values of a sparse tensor; any other tensor as it is."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._values()
    if layout in _COMPRESSED_LAYOUTS:
        return tensor.values()
    return tensor


def storage_key(tensor: torch.Tensor) -> int | None:
    """A number that identifies a tensor's storage; None for oneDNN's tensors, which have none.

    The number is the address of the storage object, because fake tensors and ``meta`` tensors have
    no data. After a storage is freed, another storage may get the same number, so keep the storage
    or a weak reference.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        values = stored_values(tensor)
        if values is tensor:  # not sparse
            return None
        return storage_key(values)


def tensor_key(tensor: torch.Tensor) -> int:
    """The `storage_key` of a tensor; for oneDNN's tensors, which have none, the tensor's id."""
    return storage_key(tensor) or id(tensor)


def named_leaves(
    structure: object, path: str = "", *, open_objects: bool = False
) -> Iterator[tuple[str, Any]]:
    """Path and value of each leaf of tuples, lists, mappings and dataclasses.

    The path of ``x`` in ``[{"image": x}]`` is ``.0.image``. An object of another class is a leaf.
    With `open_objects`, if an object contains tensors, as a batch of graphs does, these tensors
    are the leaves instead of the object. A cache of keys and values is always a leaf.
    """
    # Sequences and dataclasses are treated as mappings from now on.
    if isinstance(structure, (list, tuple)):
        structure = dict(enumerate(structure))
    elif _is_record(structure):
        structure = _fields_of(structure)
    if isinstance(structure, Mapping):
        for step, value in structure.items():
            yield from named_leaves(value, f"{path}.{step}", open_objects=open_objects)
        return
    tensors: list[tuple[str, torch.Tensor]] = []
    if open_objects and not is_cache(structure):
        tensors += _tensors_inside(structure, path, visited=set())
    if tensors:
        yield from tensors
    else:
        yield path, structure


def named_tensors(
    structure: object, *, open_objects: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """Path and value of each tensor among the `named_leaves`."""
    leaves = named_leaves(structure, open_objects=open_objects)
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    """A copy of `structure` in which `function` has replaced every tensor.

    The function finds tensors in tuples, lists, dicts, dataclasses and the attributes of objects,
    such as a batch of graphs. A cache of keys and values is copied too, since models write into
    the cache.

    Raises `TraceError` for an object that cannot be copied, and for an object that has a method
    `to` but no attributes.
    """

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if _is_record(leaf) and not is_cache(leaf):
            return _map_record(function, leaf)
        tensors = [tensor for _, tensor in _tensors_inside(leaf, path="", visited=set())]
        if tensors or is_cache(leaf):  # a cache may still be empty
            mapped = {id(tensor): function(tensor) for tensor in tensors}
            return _copy_with(leaf, mapped)
        if _hides_its_tensors(leaf):
            class_name = type(leaf).__name__
            raise TraceError(f"the tensors in a {class_name} cannot be found: {_GIVE_TENSORS.text}")
        return leaf

    return pytree.tree_map(map_leaf, structure)


def _is_record(thing: object) -> bool:
    """Whether this is an instance of a dataclass."""
    return dataclasses.is_dataclass(thing) and not isinstance(thing, type)


def _fields_of(record: Any) -> dict[str, Any]:
    """The values of a dataclass by the names of its fields."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _map_record(function: Callable[[torch.Tensor], torch.Tensor], record: Any) -> Any:
    """A copy of a dataclass, with `map_tensors` of each of its fields."""
    copied = copy.copy(record)  # without `__init__`, which may do more than set the fields
    for name, value in _fields_of(record).items():
        mapped = map_tensors(function, value)
        object.__setattr__(copied, name, mapped)  # a frozen dataclass refuses `setattr`
    return copied


def _copy_with(thing: Any, mapped: dict[int, Any]) -> Any:
    """A copy of an object with other tensors in it: `mapped` has them by the id of the old ones."""
    try:
        # `mapped` is the memo, in which deepcopy looks for a copy before it makes one.
        return copy.deepcopy(thing, mapped)
    except Exception as error:  # what it holds may refuse, such as a lock or an open file
        class_name = type(thing).__name__
        raise TraceError(
            f"a {class_name} cannot be copied ({first_line(error)}): {_GIVE_TENSORS.text}"
        ) from error


def _hides_its_tensors(thing: Any) -> bool:
    """Whether an object has a method `to`, as objects with tensors do, but no attributes."""
    return not _is_code(thing) and hasattr(thing, "to") and not _attributes(thing)


def is_cache(thing: object) -> bool:
    """Whether an object is a cache of keys and values, such as transformers' `DynamicCache`.

    The name of its class must contain "cache", and it must have attributes and not be callable.
    """
    if "cache" not in type(thing).__name__.lower():
        return False
    return hasattr(thing, "__dict__") and not callable(thing)


def parts_of(thing: Any, *, open_objects: bool) -> dict[str, Any]:
    """The values in a mapping, tuple or list, by name or number; or the attributes of an object.

    Empty for tensors and code, and without `open_objects` also for all other objects.
    """
    if isinstance(thing, Mapping):
        return {str(key): value for key, value in thing.items()}
    if hasattr(thing, "_asdict"):  # a named tuple
        return thing._asdict()
    if isinstance(thing, (list, tuple)):
        return {str(number): value for number, value in enumerate(thing)}
    if not open_objects or isinstance(thing, torch.Tensor) or _is_code(thing):
        return {}
    return _attributes(thing)


def _is_code(thing: Any) -> bool:
    """Whether this is a class, a function, a partial, a Python module or an `nn.Module`.

    The tensors of these do not belong to an input.
    """
    if isinstance(thing, (type, types.ModuleType, nn.Module, functools.partial)):
        return True
    return inspect.isroutine(thing)


def _attributes(thing: Any) -> dict[str, Any]:
    """The attributes of an object, from its `__dict__` and its `__slots__`."""
    attributes = {**getattr(thing, "__dict__", {})}
    for name in _slots_of(type(thing)):
        if hasattr(thing, name):  # a slot may be empty
            attributes[name] = getattr(thing, name)
    return attributes


def _slots_of(cls: type) -> list[str]:
    """The names in `__slots__` of a class and of its base classes."""
    slots = []
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if inspect.ismemberdescriptor(member):
                slots.append(name)
    return slots


def _tensors_inside(thing: Any, path: str, visited: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and value of each tensor in a structure and in the attributes of its objects.

    Each one comes once: `visited` has the ids of all objects that were looked at, and this function
    adds to it. All paths begin with `path`.
    """
    if id(thing) in visited:  # objects may refer to each other
        return
    visited.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield path, thing
    for step, part in parts_of(thing, open_objects=True).items():
        yield from _tensors_inside(part, f"{path}.{step}", visited)

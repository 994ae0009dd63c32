"""Build a model on ``meta``, where it takes no memory, if a trace does not need its values."""

import gc
import importlib.machinery
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from amp_lab.core.tensors import storage_key, tensors_in
from amp_lab.tracing.attributes import attribute_set

# Tensors from these functions are made on the CPU: they may be inputs such as ids of tokens, whose
# values are checked later.
_FACTORIES_OF_VALUES = (torch.tensor, torch.as_tensor, torch.randint)


def build_on_meta(factory: Callable[[], Any], model_and_inputs: Callable[[Any], tuple]) -> Any:
    """Call `factory` with ``meta`` as the default device; return its result, or None.

    A trace does not need the values of weights, and weights without values take no time to create.
    Returns None if values may be needed after all:

    - The factory raises, for example because it reads values.
    - It made another tensor on ``meta`` than the weights, buffers and inputs, such as a table in an
      attribute or a closure. The model may read its values during a call.

    `model_and_inputs` extracts (model, inputs) from the result of the factory. If the model is not
    an `nn.Module`, or has lazy weights, the result is returned, and the caller has to refuse it.
    """
    watch = _TensorWatch()
    try:
        with warnings.catch_warnings(), torch.device("meta"), _imports_on_cpu(), watch:
            warnings.simplefilter("ignore")  # such as: values are not copied to meta
            built = factory()
    except Exception:  # it may work with values; if not, the caller's own call raises the error
        return None
    model, inputs = model_and_inputs(built)
    if not isinstance(model, nn.Module):
        return built  # the caller raises an error that describes it
    own_tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, own_tensors)):
        return built  # here, too, the caller raises
    known_storages = {storage_key(tensor) for tensor in [*own_tensors, *tensors_in(inputs)]}
    if watch.has_other_tensors(known_storages):
        gc.collect()  # a tensor that only a reference cycle keeps alive is not part of the model
    if watch.has_other_tensors(known_storages):
        return None
    return built


class _TensorWatch(TorchFunctionMode):
    """A mode that notes every tensor on ``meta`` that a function of torch returns."""

    def __init__(self):
        super().__init__()
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function of torch, and note the tensors on ``meta`` that it returns."""
        kwargs = dict(kwargs or {})
        # An explicit device of the factory is respected.
        if func in _FACTORIES_OF_VALUES and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        self._tensors += [weakref.ref(tensor) for tensor in tensors_in(out) if tensor.is_meta]
        return out

    def has_other_tensors(self, known_storages: set[int | None]) -> bool:
        """Whether a noted tensor is still alive, and its storage is not one of `known_storages`.

        `known_storages` has keys that `storage_key` returned.
        """
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and storage_key(tensor) not in known_storages:
                return True
        return False


def _imports_on_cpu() -> AbstractContextManager:
    """The block in which Python modules that are imported make their tensors on the CPU, as always.

    A module stays imported after the block, so its tensors must not stay on ``meta``.
    """
    loader = importlib.machinery.SourceFileLoader  # Python's importer of .py files
    original_exec_module = loader.exec_module

    def exec_module(self, module):
        """Run the code of a module that is imported."""
        with torch.device("cpu"):
            original_exec_module(self, module)

    return attribute_set(loader, "exec_module", exec_module)

"""Build a model where it takes no memory, if it comes out as it would with values."""

import gc
import importlib.machinery
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from amp_lab.tracing.fake_device import attribute_set
from amp_lab.tracing.ops_seen import storage_key, tensors_in

# What a factory writes down or draws as inputs keeps its values: they may be ids to be checked.
_WITH_VALUES = (torch.tensor, torch.as_tensor, torch.randint)


def build_on_meta(factory: Callable[[], Any], parts: Callable[[Any], tuple]) -> Any:
    """What `factory` returns if it is called with ``meta`` as the default device, or None.

    A model whose weights have no values is as good for a trace as one with values, and is there at
    once. It is None where that is not certain: the factory raises, as one does that reads values,
    or something besides the weights, buffers and inputs is on ``meta`` too, such as a table in an
    attribute or a closure, whose values the model may read when it is called. `parts` is asked for
    the model and the inputs in what the factory returned.
    """
    watch = _TensorsMade()
    try:
        with warnings.catch_warnings(), torch.device("meta"), _imports_elsewhere(), watch:
            warnings.simplefilter("ignore")  # such as those of values that are not copied
            built = factory()
    except Exception:  # with values it may work, and if not, that call tells why
        return None
    model, inputs = parts(built)
    if not isinstance(model, nn.Module):
        return built  # what is wrong with it, the caller says
    own = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, own)):
        return built  # likewise
    known = {storage_key(tensor) for tensor in [*own, *tensors_in(inputs)]}
    if watch.left_on_meta(known):
        gc.collect()  # what only a circle of references holds is no part of the model
    if watch.left_on_meta(known):
        return None
    return built


class _TensorsMade(TorchFunctionMode):
    """Notes every tensor that a function of torch returns, as long as it lives."""

    def __init__(self):
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _WITH_VALUES and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        self._made += [weakref.ref(tensor) for tensor in tensors_in(out) if tensor.is_meta]
        return out

    def left_on_meta(self, known: set[int | None]) -> bool:
        """Whether a tensor lives on whose storage is none of the `known`."""
        for reference in self._made:
            tensor = reference()
            if tensor is not None and storage_key(tensor) not in known:
                return True
        return False


def _imports_elsewhere():
    """The block in which a module that is imported makes its own tensors on the CPU, as always.

    It stays imported, so that a tensor of its own on ``meta`` would be there for good.
    """
    loader = importlib.machinery.SourceFileLoader
    run_module = loader.exec_module

    def exec_module(self, module):
        with torch.device("cpu"):
            run_module(self, module)

    return attribute_set(loader, "exec_module", exec_module)

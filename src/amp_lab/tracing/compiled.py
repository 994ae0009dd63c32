"""Recognize models that torch.compile has compiled.

A trace of such a model has the ops of eager mode, because a trace is a dispatch mode, and the
compiler does not compile code under a dispatch mode.
"""

from torch import nn


def has_compiled_modules(model: nn.Module) -> bool:
    """Whether torch.compile wraps the model or a module in it, or compiles one in place."""
    for module in model.modules():
        # `torch.compile(module)` returns a wrapper, which has the module in `_orig_mod`.
        # `module.compile()` changes the module in place, and sets `_compiled_call_impl`.
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return True
    return False


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's wrapper; a model without one is returned as it is."""
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return original
    return model

"""Models that torch.compile has compiled. A trace sees their ops as they are in eager mode.

The compiler leaves code alone that runs under a dispatch mode, as each trace does.
"""

from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile wraps a module of the model, or compiles it in place."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return True
    return False


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model that torch.compile wraps as a whole; any other as it is."""
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return original
    return model

"""The tensors of a model, the dtypes of its weights, and the weights that FSDP2 gathers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_lab.numerics.stored_parts import is_sharded


def state_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """The tensors that a model holds: ``("parameter", "head.weight", tensor)``.

    The first is ``parameter``, ``buffer`` or, for the `.grad` of a parameter, ``gradient``.
    """
    for name, parameter in model.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield "gradient", name, parameter.grad


def own_state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and running statistics of a module, without those of the modules inside."""
    for name, tensor in (module._parameters | module._buffers).items():
        is_statistic = name in module._buffers and name.startswith("running_")
        if tensor is not None and (name in module._parameters or is_statistic):
            yield name, tensor


def accumulated_into(node: Any, args: tuple) -> Tensor | None:
    """The `.grad` that autograd adds a gradient to, if the op of a backward node does this."""
    if node is None or not node.name().endswith("AccumulateGrad") or len(args) < 2:
        return None
    gradient = node.variable.grad
    # If the op adds in place to `.grad`, that is its first argument.
    return gradient if gradient is args[0] else None


def weights_dtype(model: nn.Module, name: str | None) -> torch.dtype | None:
    """The dtype of the weights of the module with this name, or else of the model's first weight.

    None for a model without floating-point weights.
    """
    if name is not None:
        module_dtype = _first_dtype(model.get_submodule(name).parameters(recurse=False))
        if module_dtype is not None:
            return module_dtype
    return _first_dtype(model.parameters())


def _first_dtype(parameters: Iterator[nn.Parameter]) -> torch.dtype | None:
    """The dtype of the first floating-point parameter."""
    return next((p.dtype for p in parameters if p.is_floating_point()), None)


def trains_fp16_weights(model: nn.Module) -> bool:
    """Whether a parameter that requires a gradient is fp16."""
    return any(p.requires_grad and p.dtype is torch.float16 for p in model.parameters())


def watch_gathered(
    module: nn.Module, name: str, watch: Callable[[Tensor, str], None]
) -> RemovableHandle:
    """Call `watch` with each parameter that FSDP2 gathers for a module, and with its name.

    Autograd computes the gradients of the gathered parameters. FSDP2 sets `.grad` of the sharded
    parameters itself, without calling their hooks. Returns the handle of the hook that calls
    `watch`.
    """
    watched_ids: set[int] = set()  # FSDP2 keeps a gathered parameter, and gathers into it again

    def look(module: nn.Module, args: tuple) -> None:
        for own_name, parameter in module.named_parameters(recurse=False):
            is_gathered = parameter.requires_grad and not is_sharded(parameter)
            if is_gathered and id(parameter) not in watched_ids:
                watched_ids.add(id(parameter))
                watch(parameter, f"{name}.{own_name}".lstrip("."))

    # FSDP2 gathers in a hook that it put before all others, so this one comes after it.
    return module.register_forward_pre_hook(look)

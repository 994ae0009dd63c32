"""What real runs of other libraries' models show: dtypes of modules, and a planted overflow."""

from collections import defaultdict
from contextlib import contextmanager

import torch
from memory_models import cpu_autocast, loss_of

from amp_lab.core.tensors import named_tensors

LARGE = 1e38  # once it multiplies a usual value in fp32 or bf16 without an overflow, twice never


def call(model, args, kwargs):
    return model(*args, **kwargs)


@contextmanager
def hooked(model, note):
    """The block in which `note` gets the name, the module and the output of every call."""
    handles = [
        module.register_forward_hook(
            lambda module, given, output, name=name: note(name, module, output)
        )
        for name, module in model.named_modules()
    ]
    yield
    for handle in handles:
        handle.remove()


def dtypes_of_modules(model, args, kwargs):
    """The dtypes that each module returns in a real run under autocast to bf16, by name."""
    found = defaultdict(set)

    def note(name, module, output):
        found[name].add(tuple(tensor.dtype for _, tensor in named_tensors(output)))

    with hooked(model, note), cpu_autocast("bf16"):
        call(model, args, kwargs)
    return dict(found)


def module_dtypes(found):
    """The same of an X-ray."""
    return {
        row.name: {tuple(dtype for dtype, _ in outputs.values()) for outputs in row.outputs}
        for row in found.modules
        if row.outputs
    }


def layers_called(model, args, kwargs):
    """The modules with parameters and no parts that returned a tensor, in the order of calls."""
    found = {}

    def note(name, module, output):
        is_layer = not [*module.children()] and [*module.parameters()]
        if is_layer and isinstance(output, torch.Tensor) and output.is_floating_point():
            found.setdefault(name)

    with hooked(model, note), torch.no_grad():
        call(model, args, kwargs)
    return [*found]


@contextmanager
def overflow_in(layer):
    """The block in which the output of a layer overflows."""
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * LARGE * LARGE
    try:
        yield
    finally:
        del layer.forward


def step_is_finite(model, args, kwargs):
    """Whether the loss and every gradient of a real step are finite."""
    model.zero_grad()
    loss = loss_of(call(model, args, kwargs))
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(tensor.isfinite().all() for tensor in [loss, *gradients])

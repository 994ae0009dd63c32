"""Models for the memory forecast, and a meter for what real steps take."""

import weakref

import torch
import torchvision.models as tv
from torch import nn
from torch._subclasses.fake_tensor import get_plain_tensors
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_lab.core.tensors import named_tensors
from amp_lab.tracing.fake_device import is_composite


def images(size):
    return torch.rand(2, 3, size, size)


def vgg():
    layers = tv.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"], batch_norm=False)
    return nn.Sequential(
        layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(256, 9)
    )


class Two(nn.Module):
    """Tokens (B, T) and their features (B, T, C) to (B, C), each with a batch."""

    def __init__(self):
        super().__init__()
        self.token, self.layer = nn.Embedding(10, 64), nn.Linear(64, 64)

    def forward(self, tokens, features, *, mask=None):
        x = (self.token(tokens) + self.layer(features)).relu()
        return (x if mask is None else x * mask).mean(1)


class MultiheadAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class OwnAttention(nn.Linear):
    """Calls the function itself, with 4 heads of 16."""

    def forward(self, x):  # (B, T, 64)
        q, k, v = super().forward(x).view(len(x), -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Meter(TorchDispatchMode):
    """Bytes of the living storages that real ops have made, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_composite(func):  # whole under inference_mode
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result

    def see(self, tensor, count=True):
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes() if count else 0
        if address in self.known:
            return

        def end(_):
            self.live -= size
            del self.known[address]

        self.known[address] = weakref.ref(storage, end)
        self.live += size
        self.most = max(self.most, self.live)


def loss_of(output):
    leaves = pytree.tree_leaves(output)
    return sum(t.square().mean() for t in leaves if isinstance(t, torch.Tensor) and t.grad_fn)


def cpu_autocast(precision):
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def tensors_given(inputs):
    """The tensors among inputs, those of a batch of graphs too."""
    return [tensor for _, tensor in named_tensors(inputs, open_objects=True)]


def parts_of(model):
    """The parameters and buffers of a model; of a quantised one the tensors inside."""
    tensors = [*model.parameters(), *model.buffers()]
    parts = [part for tensor in tensors for part in get_plain_tensors(tensor, out=[])]
    return [part for part in parts if isinstance(part, torch.Tensor)]


class Saved:
    """A tensor that autograd saved; it lives as long as the graph that needs it."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def bytes_kept(model, precision, *args, **kwargs):
    """Bytes of all storages that autograd keeps after a real forward pass, but the model's own.

    What was saved for an output that nobody holds any more is not among them.
    """
    own = {part.untyped_storage()._cdata for part in parts_of(model)}
    saved = weakref.WeakSet()

    def pack(tensor):
        kept = Saved(tensor)
        saved.add(kept)
        return kept

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
    with cpu_autocast(precision), hooks:
        loss = loss_of(model(*args, **kwargs))
    assert loss.grad_fn is not None
    storages = [kept.tensor.untyped_storage() for kept in saved]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(size for address, size in sizes.items() if address not in own)


def real_peaks(model, precision, *args, **kwargs):
    """The most in use in the forward and backward pass, beyond what was there, and gradients."""
    meter = Meter()
    inputs = tensors_given((args, kwargs))
    for tensor in [*parts_of(model), *inputs]:
        meter.see(tensor, count=False)
    with meter:
        with cpu_autocast(precision):
            loss = loss_of(model(*args, **kwargs))
        forward, meter.most = meter.most, meter.live
        loss.backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return forward, meter.most, gradients

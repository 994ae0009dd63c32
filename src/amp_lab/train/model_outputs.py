"""The forms that batches come in, and what models return: the targets, the loss, the logits."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_lab.core.errors import OptionError

_TARGETS = ("labels", "targets", "target")  # names of the entry of a dict that is the target


class Batch(NamedTuple):
    """What a model is called with, and the targets.

    It comes as ``(inputs, targets)``, where inputs may be a dict or tuple of arguments; as
    ``(a, b, …, targets)``; as a dict of arguments by name, with the targets under "labels",
    "targets" or "target"; or as inputs without targets, for a model that returns its loss.
    """

    args: tuple
    kwargs: dict[str, Any]
    targets: Any
    samples: int


def split(batch: Any, model: nn.Module) -> Batch:
    """A batch, taken apart; targets in a dict go to the model too if it takes such an argument."""
    if isinstance(batch, Mapping):
        return _split_mapping(batch, model)
    inputs = [batch]
    if isinstance(batch, (tuple, list)):
        inputs = list(batch)
    targets = None
    if len(inputs) > 1:
        targets = inputs.pop()
    first = inputs[0]
    samples = _count_samples(first if targets is None else targets)
    if len(inputs) == 1 and isinstance(first, Mapping):
        return Batch((), dict(first), targets, samples)
    if len(inputs) == 1 and isinstance(first, tuple):
        return Batch(first, {}, targets, samples)
    return Batch(tuple(inputs), {}, targets, samples)


def _split_mapping(batch: Mapping, model: nn.Module) -> Batch:
    """A batch of arguments by name, the targets perhaps among them."""
    kwargs = dict(batch.items())
    samples = _count_samples(batch)
    name = next((name for name in _TARGETS if name in batch), None)
    if name is None:
        return Batch((), kwargs, None, samples)
    if not _takes_argument(model, name):
        del kwargs[name]
    return Batch((), kwargs, batch[name], samples)


def _count_samples(values: Any) -> int:
    """How many samples there are: the first size of the first tensor, or the items of a list."""
    if isinstance(values, Mapping) and values:
        return _count_samples(next(iter(values.values())))
    if isinstance(values, tuple) and values:
        return _count_samples(values[0])
    has_samples = isinstance(values, Tensor) and values.dim() > 0
    if has_samples or isinstance(values, list):
        return len(values)
    kind = type(values).__name__
    raise OptionError(f"a batch begins with a {kind}, not with a tensor (N, …) or a list of N")


def _takes_argument(model: nn.Module, name: str) -> bool:
    """Whether the model has an argument of this name, or takes any, as DDP does for its model."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or name in parameters


def _values(outputs: Any) -> list[Any]:
    """What a model returns, one by one."""
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    if isinstance(outputs, (tuple, list)):
        return list(outputs)
    return [outputs]


def _tensors(values: list[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def own_loss(outputs: Any) -> Tensor | None:
    """The loss that a model returns: what is called "loss", or the only single number.

    A dict of nothing but single numbers, as torchvision's detectors return it, is added up.
    """
    values = _values(outputs)
    if isinstance(outputs, Mapping):
        named = outputs.get("loss")
        wanted = len(values)
    else:
        named = getattr(outputs, "loss", None)
        wanted = 1
    if named is not None:
        return named
    numbers = [tensor for tensor in _tensors(values) if tensor.dim() == 0]
    if not numbers or len(numbers) != wanted:
        return None
    return torch.stack(numbers).sum()


def _logits(outputs: Any, targets: Any) -> tuple[Tensor | None, int | None]:
    """The first tensor of the outputs with a size, and the dimension of its classes, if any."""
    tensors = _tensors(_values(outputs))
    logits = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    if logits is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return logits, None
    dims = _class_dimensions(logits.shape, targets.shape)
    if logits.dim() == 3 and len(dims) > 1:
        shapes = f"logits {tuple(logits.shape)} for targets {tuple(targets.shape)}"
        raise OptionError(f"{shapes}: the classes may be either dimension; give loss_fn and metric")
    if not dims:
        return logits, None
    return logits, dims[0]


def _class_dimensions(logits: torch.Size, targets: torch.Size) -> list[int]:
    """Which of the second and the last dimension leaves the targets' shape if it is taken out."""
    dims = []
    for dim in (1, len(logits) - 1):
        others = logits[:dim] + logits[dim + 1 :]
        if others == targets:
            dims.append(dim)
    return dims


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Cross-entropy of logits (N, C, …) or (N, T, C) and classes (N, …), computed in fp32."""
    logits, dim = _logits(outputs, targets)
    if logits is None or not isinstance(targets, Tensor):
        raise OptionError("no loss is returned, and it takes logits and targets: give loss_fn")
    if dim is not None and dim > 1:
        logits = logits.flatten(0, -2)
        targets = targets.flatten()
    # Under autocast, logits arrive in fp16 or bf16, in which some backends would go on.
    return F.cross_entropy(logits.float(), targets)


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """Whether each sample is classified right, (N,); of pixels or tokens, the share in each.

    A class of -100 does not count, as in torch's losses. NaN where the targets are no classes.
    """
    logits, dim = _logits(outputs, targets)
    if logits is None or dim is None:
        return torch.tensor(math.nan)
    is_right = logits.argmax(dim) == targets
    if is_right.dim() == 1:
        return is_right
    counted = (targets != -100).flatten(1).sum(1)
    right = is_right.flatten(1).sum(1)
    return right / counted.clamp_min(1)

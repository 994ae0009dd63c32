"""The forms that batches come in, and what models return: the targets, the loss, the logits."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_lab.errors import OptionError

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
        name = next((name for name in _TARGETS if name in batch), "")
        passed = {key: value for key, value in batch.items() if key != name or _takes(model, name)}
        return Batch((), passed, batch[name] if name else None, _samples(batch))
    if not isinstance(batch, (tuple, list)):
        batch = (batch,)
    *args, targets = batch if len(batch) > 1 else (*batch, None)
    samples = _samples(args[0] if targets is None else targets)
    if len(args) == 1 and isinstance(args[0], Mapping):
        return Batch((), dict(args[0]), targets, samples)
    return Batch(args[0] if isinstance(args[0], tuple) else tuple(args), {}, targets, samples)


def _samples(part: Any) -> int:
    """How many samples there are: the first size of the first tensor, or the items of a list."""
    if isinstance(part, (Mapping, tuple)) and part:
        return _samples(next(iter(part.values() if isinstance(part, Mapping) else part)))
    if isinstance(part, list) or (isinstance(part, Tensor) and part.dim()):
        return len(part)
    kind = type(part).__name__
    raise OptionError(f"a batch begins with a {kind}, not with a tensor (N, …) or a list of N")


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the model has an argument of this name, or takes any, as DDP does for its model."""
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    parameters = inspect.signature((model.module if wrapped else model).forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _parts(outputs: Any) -> list[Any]:
    """What a model returns, one by one."""
    outputs = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def own_loss(outputs: Any) -> Tensor | None:
    """The loss that a model returns: what is called "loss", or the only single number.

    A dict of nothing but single numbers, as torchvision's detectors return it, is added up.
    """
    is_dict, parts = isinstance(outputs, Mapping), _parts(outputs)
    named = outputs.get("loss") if is_dict else getattr(outputs, "loss", None)
    if named is not None:
        return named
    numbers = [part for part in parts if isinstance(part, Tensor) and not part.dim()]
    wanted = len(parts) if is_dict else 1
    return torch.stack(numbers).sum() if len(numbers) == wanted > 0 else None


def _logits(outputs: Any, targets: Any) -> tuple[Tensor | None, int | None]:
    """The first tensor of the outputs with a size, and the dimension of its classes, if any."""
    logits = next((x for x in _parts(outputs) if isinstance(x, Tensor) and x.dim()), None)
    if logits is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return logits, None
    sizes = logits.shape
    dims = [d for d in (1, logits.dim() - 1) if sizes[:d] + sizes[d + 1 :] == targets.shape]
    if logits.dim() == 3 and len(dims) > 1:
        shapes = f"logits {tuple(sizes)} for targets {tuple(targets.shape)}"
        raise OptionError(f"{shapes}: the classes may be either dimension; give loss_fn and metric")
    return logits, dims[0] if dims else None


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Cross-entropy of logits (N, C, …) or (N, T, C) and classes (N, …), computed in fp32."""
    logits, dim = _logits(outputs, targets)
    if logits is None or not isinstance(targets, Tensor):
        raise OptionError("no loss is returned, and it takes logits and targets: give loss_fn")
    if dim is not None and dim > 1:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    # Under autocast, logits arrive in fp16 or bf16, in which some backends would go on.
    return F.cross_entropy(logits.float(), targets)


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """Whether each sample is classified right, (N,); of pixels or tokens, the share in each.

    A class of -100 does not count, as in torch's losses. NaN where the targets are no classes.
    """
    logits, dim = _logits(outputs, targets)
    if logits is None or dim is None:
        return torch.tensor(math.nan)
    right = logits.argmax(dim) == targets
    if right.dim() == 1:
        return right
    counted = (targets != -100).flatten(1).sum(1)
    return right.flatten(1).sum(1) / counted.clamp_min(1)

"""Find arguments and targets in a batch, and loss and logits in the outputs of a model."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_lab.core.errors import OptionError

_TARGET_NAMES = ("labels", "targets", "target")  # keys of the targets in a batch that is a dict


class Batch(NamedTuple):
    """The arguments to call a model with, the targets, and the number of samples.

    `split` makes a `Batch` from a batch in one of these forms:

    - ``(inputs, targets)``, where inputs may be a dict or a tuple of arguments;
    - ``(a, b, …, targets)``;
    - a dict of arguments by name, with the targets under "labels", "targets" or "target";
    - inputs without targets, for a model that returns its loss.
    """

    args: tuple
    kwargs: dict[str, Any]
    targets: Any  # None if there are none
    samples: int


def split(batch: Any, model: nn.Module) -> Batch:
    """Split a batch into the arguments for `model` and the targets.

    Targets in a dict are also passed to the model if the model has an argument with that name.
    Raises `OptionError` for a batch in a form that `Batch` does not describe.
    """
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
    """Split a batch that is a dict of arguments by name, with or without targets."""
    kwargs = dict(batch.items())
    samples = _count_samples(batch)
    for name in _TARGET_NAMES:
        if name in batch:
            if not _takes_argument(model, name):
                del kwargs[name]
            return Batch((), kwargs, batch[name], samples)
    return Batch((), kwargs, None, samples)


def _count_samples(values: Any) -> int:
    """The number of samples: the size N of the first tensor (N, …), or the length of a list.

    `values` are a batch, its inputs or its targets. Raises `OptionError` if it begins otherwise.
    """
    if isinstance(values, Mapping) and values:
        first, *_ = values.values()
        return _count_samples(first)
    if isinstance(values, tuple) and values:
        return _count_samples(values[0])
    has_samples = isinstance(values, Tensor) and values.dim() > 0
    if has_samples or isinstance(values, list):
        return len(values)
    kind = type(values).__name__
    problem = f"a batch begins with a {kind}"
    raise OptionError(f"{problem}; it must begin with a tensor (N, …) or a list of N values")


def _takes_argument(model: nn.Module, name: str) -> bool:
    """Whether the model's `forward` has an argument of this name, or takes ``**kwargs``."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # DDP's own `forward` takes any argument
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or name in parameters


def _values(outputs: Any) -> list[Any]:
    """The outputs of a model as a list: a dict's values, a tuple's items, or the single output."""
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    if isinstance(outputs, (tuple, list)):
        return list(outputs)
    return [outputs]


def _tensors(values: list[Any]) -> list[Tensor]:
    """Those of `values` that are tensors, in the same order."""
    return [value for value in values if isinstance(value, Tensor)]


def returned_loss(outputs: Any) -> Tensor | None:
    """The loss among the outputs of a model, or None.

    The loss is the output called "loss", or the only scalar tensor. If a dict has only scalar
    tensors, as with torchvision's detectors, the loss is their sum.
    """
    is_dict = isinstance(outputs, Mapping)
    named_loss = outputs.get("loss") if is_dict else getattr(outputs, "loss", None)
    if named_loss is not None:
        return named_loss
    values = _values(outputs)
    scalars = [tensor for tensor in _tensors(values) if tensor.dim() == 0]
    if not scalars:
        return None
    # All values of a dict have to be losses. Elsewhere, of two scalars either may be the loss.
    expected_scalars = len(values) if is_dict else 1
    if len(scalars) != expected_scalars:
        return None
    return torch.stack(scalars).sum()


class _Logits(NamedTuple):
    """The logits among the outputs of a model."""

    tensor: Tensor | None  # None: the outputs have no logits
    class_dim: int | None  # the dimension of the classes; None if the targets do not show it


def _find_logits(outputs: Any, targets: Any) -> _Logits:
    """Find the logits, which are the first tensor that is no scalar, and their classes' dimension.

    The dimension is None if the targets are no classes, or if their shape does not fit the logits.
    Raises `OptionError` if two dimensions fit.
    """
    candidates = [tensor for tensor in _tensors(_values(outputs)) if tensor.dim() > 0]
    if not candidates:
        return _Logits(None, None)
    logits = candidates[0]
    has_classes = isinstance(targets, Tensor) and not targets.is_floating_point()
    if not has_classes:
        return _Logits(logits, None)
    dims = _class_dimensions(logits.shape, targets.shape)
    # Ambiguous: (N, C, L) or (N, T, C). With more dimensions it is (N, C, …), as for torch.
    if logits.dim() == 3 and len(dims) > 1:
        shapes = f"logits {tuple(logits.shape)} for targets {tuple(targets.shape)}"
        raise OptionError(
            f"{shapes}: the dimension of the classes is ambiguous; give loss_fn and metric"
        )
    class_dim = dims[0] if dims else None
    return _Logits(logits, class_dim)


def _class_dimensions(logits: torch.Size, targets: torch.Size) -> list[int]:
    """The dimensions of the logits that may be the classes: dimension 1, the last, both or none.

    `logits` and `targets` are shapes. A dimension may be the classes if the logits without it have
    the shape of the targets. For logits (N, C), dimension 1 is also the last, and is listed twice.
    Logits (N,) have no classes.
    """
    if len(logits) < 2:
        return []
    dims = []
    for dim in (1, len(logits) - 1):
        other_sizes = logits[:dim] + logits[dim + 1 :]
        if other_sizes == targets:
            dims.append(dim)
    return dims


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Mean cross-entropy of logits (N, C, …) or (N, T, C) and classes (N, …), computed in fp32.

    Floating-point targets are class probabilities, in the shape of the logits. Raises `OptionError`
    without logits or targets, and for logits (N,), for example of one output for two classes.
    """
    logits, class_dim = _find_logits(outputs, targets)
    if logits is None or not isinstance(targets, Tensor):
        raise OptionError(
            "the model returns neither a loss nor logits for the targets: give loss_fn"
        )
    if logits.dim() == 1 and targets.dim() == 1 and not targets.is_floating_point():
        raise OptionError(
            f"logits {tuple(logits.shape)} have no dimension of classes: give loss_fn"
        )
    if class_dim is not None and class_dim > 1:  # torch takes the classes in dimension 1
        logits = logits.flatten(0, -2)
        targets = targets.flatten()
    # Autocast hands over logits in fp16 or bf16, and some backends compute the loss in these.
    return F.cross_entropy(logits.float(), targets)


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """Whether each sample is classified correctly, bool (N,).

    If a sample has many targets, such as pixels or tokens, the result is the share of correctly
    classified targets, float (N,), and targets of -100 do not count, as in torch's losses. Returns
    a scalar NaN if there are no logits, or if the targets are not classes.
    """
    logits, class_dim = _find_logits(outputs, targets)
    if logits is None or class_dim is None:
        return torch.tensor(math.nan)
    is_right = logits.argmax(class_dim) == targets
    if is_right.dim() == 1:
        return is_right
    is_counted = targets != -100
    counted = is_counted.flatten(1).sum(1)
    right = is_right.flatten(1).sum(1)  # no logits have a class -100, so these are never right
    return right / counted.clamp_min(1)  # 0 for a sample without any target that counts

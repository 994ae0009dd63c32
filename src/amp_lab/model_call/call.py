"""`ModelCall`: a model with its inputs and its loss, which you can copy, move and resize."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_lab.core.tensors import map_tensors, named_tensors


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """A call of a model, and a loss of its output: ``loss_fn(model(*args, **kwargs))``.

    Methods return a new call, and do not change the inputs of this call. The inputs may contain
    tensors in tuples, lists, dicts, dataclasses and attributes of objects.
    """

    model: nn.Module
    args: tuple = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_fn: Callable[[Any], Any] | None = None  # takes the output

    def output(self) -> Any:
        """The output of the model."""
        return self.model(*self.args, **self.kwargs)

    def result(self) -> Any:
        """Return the loss, or the output if there is no loss function."""
        output = self.output()
        if self.loss_fn is None:
            return output
        return self.loss_fn(output)

    @property
    def device(self) -> torch.device:
        """The device of the model's first weight; the CPU for a model without weights."""
        for weight in self.model.parameters():
            return weight.device
        return torch.device("cpu")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the inputs."""
        named = named_tensors((self.args, self.kwargs), open_objects=True)
        return [tensor for _, tensor in named]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor among the inputs."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    @property
    def batch(self) -> int:
        """The batch size: the first size of the first tensor with a dimension; else 1."""
        for shape in self.shapes:
            if shape:
                return shape[0]
        return 1

    @property
    def fixed_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors that do not grow with the batch size."""
        batch = self.batch
        return tuple(shape for shape in self.shapes if shape[:1] != (batch,))

    def named_inputs(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors in tuples, dicts and dataclasses, each with the name of its argument."""
        names = [parameter.name for parameter in arguments_of(self.model)]
        names += [f"input {i}" for i in range(len(names), len(self.args))]
        inputs = [*zip(names, self.args, strict=False), *self.kwargs.items()]
        named = []
        for name, value in inputs:
            named += [(name, tensor) for _, tensor in named_tensors(value)]
        return named

    def copy(self) -> "ModelCall":
        """A call of a copy of the model on copies of the tensors.

        If the model and the inputs share a tensor, the copies share a tensor too. A module may
        store a computed tensor as an attribute, such as the features in torchvision's RAFT. torch
        cannot copy a tensor with a `grad_fn`, so the copy gets a detached tensor. Raises the errors
        of `copy.deepcopy`.
        """
        copies: dict[int, Any] = {}  # deepcopy's memo: for the `id` of an object, its copy

        def copy_of(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                duplicate = tensor.detach().clone()
                duplicate.requires_grad_(tensor.is_leaf and tensor.requires_grad)
                copies[id(tensor)] = duplicate
            return copies[id(tensor)]

        for module in self.model.modules():
            for _, tensor in named_tensors(vars(module)):
                if tensor.grad_fn is not None:
                    copy_of(tensor)  # so that deepcopy finds its copy in the memo
        model = copy.deepcopy(self.model, memo=copies)
        return dataclasses.replace(self, model=model).map_inputs(copy_of)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "ModelCall":
        """The call on a device, with weights, buffers and floating-point inputs in a dtype.

        The model itself is moved and cast, as by `nn.Module.to`. To keep the model, copy the call
        first.
        """

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point():
                return tensor.to(device, dtype)
            return tensor.to(device)

        self.model.to(device, dtype)
        return self.map_inputs(moved)

    def with_batch(self, batch: int) -> "ModelCall":
        """The call with another batch size. Rows of the inputs are repeated or left out.

        Only tensors whose first size is the batch size have rows. Other tensors, such as positions
        that all items share, stay unchanged.
        """
        old_batch = self.batch

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:1] != (old_batch,):
                return tensor
            return tensor[torch.arange(batch, device=tensor.device) % old_batch]

        return self.map_inputs(resized)

    def without_values(self, batch: int, device: torch.device | str) -> "ModelCall":
        """The call with empty tensors on a device, in the shapes of another batch.

        The model stays where it is. See `with_batch` for the tensors that grow with the batch.
        """
        old_batch = self.batch

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            shape = tensor.shape
            if shape[:1] == (old_batch,):
                shape = torch.Size((batch, *shape[1:]))
            values = torch.empty(shape, dtype=tensor.dtype, device=device)
            return values.requires_grad_(tensor.requires_grad)

        return self.map_inputs(empty)

    def map_inputs(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ModelCall":
        """The call in which `function` has replaced every tensor among the inputs.

        Raises `TraceError` for an object that cannot be copied (see `map_tensors`).
        """
        args, kwargs = map_tensors(function, (self.args, self.kwargs))
        return dataclasses.replace(self, args=args, kwargs=kwargs)


def arguments_of(model: nn.Module) -> list[inspect.Parameter]:
    """The arguments that a model takes by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter for parameter in parameters if parameter.kind in by_position]

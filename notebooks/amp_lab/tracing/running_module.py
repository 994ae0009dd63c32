"""Which module's code is running, and what each module returns."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from amp_lab.tracing.structures import named_tensors

Outputs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of an output, by its place; "": the output is that tensor."""


def outputs_of(output: object) -> Outputs:
    """What is known of the tensors in an output; empty if there are none."""
    return {path[1:]: (tensor.dtype, tuple(tensor.shape)) for path, tensor in named_tensors(output)}


class ModuleCalls:
    """Counts the calls of each module, and notes what they return, from hooks of a model."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by name, also those that raised
        self.outputs: dict[str, list[Outputs]] = defaultdict(list)  # the different ones, in order

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """The block in which hooks note each call."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                enter = functools.partial(self._enter, name)
                leave = functools.partial(self._leave, name)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple) -> None:
        self.counts[name] += 1

    def _leave(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        outputs = outputs_of(output)
        if outputs not in self.outputs[name]:
            self.outputs[name].append(outputs)


class RunningModule:
    """Knows the module whose code is running, from hooks of a model."""

    def __init__(self) -> None:
        self._names = [""]  # those that are running, the innermost last

    @property
    def name(self) -> str:
        """The qualified name of the innermost module; "": the model itself, or none."""
        return self._names[-1]

    @property
    def is_none(self) -> bool:
        """Whether no module is running, as in the loss."""
        return len(self._names) == 1

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """The block in which hooks keep the name up to date."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                enter = functools.partial(self._enter, name)
                leave = functools.partial(self._leave, name)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple) -> None:
        self._names.append(name)

    def _leave(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        # Those that are above it on the stack were left without a call of their hooks.
        while len(self._names) > 1 and self._names.pop() != name:
            pass

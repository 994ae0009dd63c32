"""Which module's code is running, and what each module returns."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from amp_lab.tracing.structures import named_tensors

Outputs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor of an output, by its place; "": the output is that tensor."""


def outputs_of(output: object) -> Outputs:
    """What is known of the tensors in an output; empty if there are none."""
    return {path[1:]: (tensor.dtype, tuple(tensor.shape)) for path, tensor in named_tensors(output)}


@contextmanager
def _hooks(
    model: nn.Module,
    enter: Callable[..., None],
    leave: Callable[..., None],
    also_if_raised: bool = False,
) -> Iterator[None]:
    """The block in which each call of a module calls these two, with its name before the rest."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(functools.partial(enter, name))
            stack.callback(before.remove)
            after = module.register_forward_hook(
                functools.partial(leave, name), always_call=also_if_raised
            )
            stack.callback(after.remove)
        yield


class ModuleCalls:
    """Counts the calls of each module, and notes what they return, from hooks of a model."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by name, also those that raised
        self.outputs: dict[str, list[Outputs]] = defaultdict(list)  # the different ones, in order

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """The block in which hooks note each call."""
        with _hooks(model, self._enter, self._leave):
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
        with _hooks(model, self._enter, self._leave, also_if_raised=True):
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple) -> None:
        self._names.append(name)

    def _leave(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        # Those that are above it on the stack were left without a call of their hooks.
        while len(self._names) > 1 and self._names.pop() != name:
            pass

"""Hooks of a model that record which module is running, and the outputs of each module."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from amp_lab.core.tensors import named_tensors
from amp_lab.tracing.records import LOSS

Outputs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor in an output, by its path, as ``0`` or ``logits``.

The path is "" if the output is itself a tensor.
"""


def outputs_of(output: object) -> Outputs:
    """The dtype and shape of each tensor in an output; empty if there are none."""
    # `named_tensors` begins each path with a dot.
    return {path[1:]: (tensor.dtype, tuple(tensor.shape)) for path, tensor in named_tensors(output)}


@contextmanager
def _hooks(
    model: nn.Module,
    enter: Callable[..., None],
    leave: Callable[..., None],
    leave_on_error: bool = False,
) -> Iterator[None]:
    """The block in which each call of a module calls `enter` before it, and `leave` after it.

    They get the module's name, and then the arguments of torch's hooks. With `leave_on_error`,
    `leave` is called too if the module raises.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = functools.partial(enter, name)
            after = functools.partial(leave, name)
            stack.enter_context(module.register_forward_pre_hook(before))
            stack.enter_context(module.register_forward_hook(after, always_call=leave_on_error))
        yield


class ModuleCalls:
    """Counts the calls of each module, and records the dtypes and shapes of their outputs."""

    def __init__(self) -> None:
        # Both by the name of a module.
        self.counts: Counter[str] = Counter()  # calls that raised count too
        self.outputs: dict[str, list[Outputs]] = defaultdict(list)  # equal ones once, in order

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """The block in which hooks of the model note each call."""
        with _hooks(model, self._enter, self._leave):
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple) -> None:
        self.counts[name] += 1

    def _leave(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        outputs = outputs_of(output)
        if outputs not in self.outputs[name]:
            self.outputs[name].append(outputs)


class RunningModule:
    """Tracks which module of a model is running, by hooks on all its modules."""

    def __init__(self) -> None:
        self._names = [""]  # of the modules that are running, the innermost last; "": none is

    @property
    def name(self) -> str:
        """The qualified name of the innermost running module; "" for the model itself or none."""
        return self._names[-1]

    @property
    def name_or_loss(self) -> str:
        """The name as in `name`, but `LOSS` if no module is running."""
        return self.name if len(self._names) > 1 else LOSS

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """The block in which hooks keep the name up to date."""
        with _hooks(model, self._enter, self._leave, leave_on_error=True):
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple) -> None:
        self._names.append(name)

    def _leave(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        """Remove a module from the stack, and those above it, which ended without this hook."""
        while len(self._names) > 1:  # the first name, "", stays
            removed = self._names.pop()
            if removed == name:
                return

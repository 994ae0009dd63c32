"""Mistakes that only a run of the model shows: ids beyond a vocabulary, a missing loss."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from amp_lab.core.errors import OptionError, with_type
from amp_lab.core.report import dtype_name
from amp_lab.core.tensors import named_tensors, storage_key
from amp_lab.model_call import ModelCall


def _upper_bound(ids: torch.Tensor) -> int | None:
    """The largest of these integers plus 1; None if they have no values or are no integers."""
    if ids.is_meta or ids.numel() == 0:
        return None
    if ids.is_floating_point() or ids.is_complex():
        return None
    return int(ids.max()) + 1


class Observer:
    """Watches a model run and notes mistakes in its inputs and its loss.

    On fake tensors, which have no values, an id beyond the vocabulary raises no error.
    """

    def __init__(self, call: ModelCall, below: Sequence[int | None]):
        """`below` has an upper bound for the values of each input, or None if it is unknown.

        If `below` is empty, the bounds are found from the values.
        """
        self._model = call.model
        self._inputs = call.named_inputs()
        self._below = list(below)
        if not self._below:
            self._below = [_upper_bound(tensor) for _, tensor in self._inputs]
        # While the model runs: for the key of a storage, the index of the input that has it.
        self._by_storage: dict[int | None, int] = {}
        self.problem: str | None = None
        """The mistake in one line, with more detail than torch's error."""
        # The name and shape of each floating-point output of the last run.
        self._outputs: list[tuple[str, torch.Size]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The block in which each run of the model is watched, by hooks on its modules."""
        with contextlib.ExitStack() as hooks:
            begin = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
            hooks.enter_context(begin)
            hooks.enter_context(self._model.register_forward_hook(self._end))
            for name, module in self._model.named_modules():
                if isinstance(module, nn.Embedding):
                    check = self._embedding_check(name, module.num_embeddings)
                    hooks.enter_context(module.register_forward_pre_hook(check))
            yield

    def watch_loss(self, loss_fn: Callable[[Any], Any], text: str) -> Callable[[Any], Any]:
        """Wrap the loss so that a mistake sets `problem`: an error, or a result of many numbers.

        `text` names the loss in messages.
        """

        def loss(output: Any) -> Any:
            try:
                value = loss_fn(output)
            except OptionError as error:  # --loss .NAME, and the output has no such attribute
                self.problem = str(error)
                raise
            except (TypeError, AttributeError, LookupError, ValueError) as error:
                self.problem = f"{text} fails on the model's output: {with_type(error)}"
                raise
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                return value
            returned = type(value).__name__
            shape = getattr(value, "shape", None)
            if shape is not None:
                returned = f"shape {tuple(shape)}"
            self.problem = f"{text} must return one number, not {returned}"
            raise OptionError(self.problem)

        return loss

    @property
    def loss_left_out(self) -> str | None:
        """A remark if a missing loss changes the forecast, as for a language model; else None."""
        for name, shape in self._outputs:
            if name and len(shape) == 0:  # a single number in the output, which may be the loss
                option = "--loss PACKAGE.MODULE:CALLABLE"
                if name.isidentifier():
                    option = f"--loss .{name}"
                return (
                    f"the output has {name!r}: add {option}, or the whole output is differentiated"
                )
        embeddings = [m for m in self._model.modules() if isinstance(m, nn.Embedding)]
        vocabulary_sizes = {embedding.num_embeddings for embedding in embeddings}
        for _, shape in self._outputs:
            if len(shape) > 2 and shape[-1] in vocabulary_sizes:  # (B, T, vocabulary)
                return (
                    f"the output has logits of {shape[-1]:,} tokens, but no loss is given. Cross "
                    "entropy needs at least as much memory as the logits, so fewer items fit than "
                    "the table shows; add --loss PACKAGE.MODULE:CALLABLE or --loss .loss"
                )
        return None

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """A hook before the model that notes the storages of its inputs."""
        self.problem = None  # forget that of an earlier run, such as one with another batch
        self._by_storage = {}
        for index, (_, tensor) in enumerate(ModelCall(model, args, kwargs).named_inputs()):
            self._by_storage[storage_key(tensor)] = index

    def _embedding_check(self, name: str, rows: int) -> Callable[[nn.Module, tuple], None]:
        """A hook before an embedding that checks the ids, if they are an input of the model.

        The embedding is called `name` in the model, and has `rows` rows.
        """
        place = f"embedding {name!r}" if name else "embedding"

        def check(module: nn.Module, args: tuple) -> None:
            key = None
            if args and isinstance(args[0], torch.Tensor):
                key = storage_key(args[0])
            if key in self._by_storage:  # an input, and nothing that the model computed
                self._check_ids(self._by_storage[key], place, rows)

        return check

    def _check_ids(self, index: int, place: str, rows: int) -> None:
        """Set `problem` if an input that an embedding looks up has no integers, or too large ones.

        `index` is the position of the input in `_inputs`, `place` describes the embedding, as
        ``embedding 'tokens'``, and `rows` is the number of its rows.
        """
        name, ids = self._inputs[index]
        below = self._below[index]
        if ids.is_floating_point() or ids.dtype is torch.bool:
            sizes = ",".join(map(str, ids.shape))
            self.problem = (
                f"{name!r} is {dtype_name(ids.dtype)}, but the {place} needs integers: give "
                f"int64:{sizes} ('int64:{sizes}<{rows}' for random ids)"
            )
        elif below is not None and below > rows:
            most = f"{name!r} has ids up to {below - 1:,}"
            self.problem = (
                f"{most}, but the {place} has {rows:,} rows: give ids below {rows} (int64:…<{rows})"
            )

    def _end(self, model: nn.Module, args: tuple, output: Any) -> None:
        """A hook after the model that notes the names and shapes of its outputs."""
        self._outputs = []
        for name, tensor in named_tensors(output):
            if tensor.is_floating_point():
                self._outputs.append((name[1:], tensor.shape))  # "logits" of the path ".logits"
        self._by_storage = {}  # after the run the same memory may hold another tensor

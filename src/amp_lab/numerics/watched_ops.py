"""The inputs and results of an op that `find_nonfinite` looks at."""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_lab.core.tensors import tensors_in
from amp_lab.numerics.tensor_summary import TensorSummary, summarise


@dataclass(frozen=True)
class Site:
    """The module whose code ran, and the number of its call; no module with the defaults."""

    module: str | None = None
    module_type: str | None = None
    call: int = 0


@dataclass(frozen=True)
class Call:
    """A call of an op, and where it ran."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    node: Any  # the backward node that autograd runs it for; None in a forward pass
    site: Site
    recomputed: bool  # whether activation checkpointing runs it again in the backward pass

    @property
    def name(self) -> str:
        """The op's name without its namespace."""
        return self.func._schema.name.partition("::")[2]

    @property
    def is_backward(self) -> bool:
        """Whether the op computes a gradient."""
        return self.node is not None and not self.recomputed

    def places_nonfinite(self, kinds: frozenset[str]) -> bool:
        """Whether the op writes an inf or NaN from the code, such as the value of a mask.

        `kinds` are the kinds in the result: ``NaN``, ``inf``, ``-inf``.
        """
        if self.is_backward:
            return False
        arguments = tree_leaves((self.args, self.kwargs))
        constants = [x for x in arguments if isinstance(x, float) and not math.isfinite(x)]
        if self.name in ("mul", "mul_"):
            # A product with -inf that gives only -inf makes a mask; any other is a fault.
            return constants == [-math.inf] and kinds == {"-inf"}
        return bool(constants)

    @property
    def statistics_written(self) -> list[Tensor]:
        """The running mean and variance that a batch norm in training writes."""
        names = [argument.name for argument in self.func._schema.arguments]
        arguments = dict(zip(names, self.args, strict=False)) | self.kwargs
        # Ops of a backward pass call the flag `train`; an op without a flag always trains.
        is_training = arguments.get("training", arguments.get("train", True))
        if not is_training:
            return []
        return tensors_in([x for name, x in arguments.items() if name.startswith("running_")])


# Beginnings of ops that are not looked at: they compute nothing (memory that is not written yet),
# or work on lists of tensors, as optimizers do; what these break is found when it is used next.
_UNSEEN = ("empty", "new_empty", "resize", "set_", "_unsafe_view", "_foreach", "_fused_adam",
           "_fused_sgd", "_fused_adagrad", "_amp_", "lift")  # fmt: skip
# Ops that copy or drop values: from finite inputs their results are finite.
_PASSING_ON = {"clone", "relu", "relu_", "threshold_backward", "max_pool2d_with_indices",
               "select_backward", "slice_backward"}  # fmt: skip
# Parts of the names of ops of which only the first outputs are results; the others are workspace,
# which may hold anything.
_RESULTS = {"scaled_dot_product": 1, "attention_forward": 1, "ctc_loss": 1, "rnn": 3, "_norm": 1}
# Beginnings of ops that reduce many numbers to one to which each of them contributes.
REDUCTIONS = ("sum", "mean", "dot", "mse_loss", "nll_loss", "smooth_l1", "huber", "binary_cross",
               "soft_margin", "l1_loss", "linalg_vector_norm", "norm")  # fmt: skip


@functools.cache
def _count_results(func: Any, all_finite: bool) -> int:
    """How many of an op's outputs, from the first on, are results that have to be checked.

    `all_finite` says whether all values so far were finite: see `outputs`.
    """
    name = func._schema.name.partition("::")[2]
    if func.is_view or name.startswith(_UNSEEN):
        return 0
    if all_finite and name in _PASSING_ON:
        return 0
    if "backward" not in name:
        for part, count in _RESULTS.items():
            if part in name:
                return count
    return len(func._schema.returns)


def outputs(func: Any, out: object, *, all_finite: bool) -> list[Tensor]:
    """The results of an op that have to be checked.

    With `all_finite`, all values so far were finite, so ops that only copy are left out.
    """
    count = _count_results(func, all_finite)
    if not count:
        return []
    if not isinstance(out, (tuple, list)):
        return tensors_in(out)
    results = []
    for result in out[:count]:
        results += tensors_in(result)
    return results


def argument_summaries(call: Call, written: list[Tensor]) -> Iterator[TensorSummary]:
    """Summaries of an op's floating-point inputs, named as in its schema.

    Those in `written`, which the op has overwritten, are left out. The tensors of a list are named
    by their numbers: ``tensors[0]``.
    """
    names = [argument.name for argument in call.func._schema.arguments]
    arguments = dict(zip(names, call.args, strict=False)) | call.kwargs
    for name, argument in arguments.items():
        tensors = tensors_in(argument)
        for number, tensor in enumerate(tensors):
            is_inexact = tensor.is_floating_point() or tensor.is_complex()
            if among(tensor, written) or not is_inexact:
                continue
            label = f"{name}[{number}]" if len(tensors) > 1 else name
            yield summarise(label, tensor)


def among(tensor: Tensor, others: Iterable[object]) -> bool:
    """Whether a tensor is one of the others (the same object, not an equal one)."""
    return any(tensor is other for other in others)

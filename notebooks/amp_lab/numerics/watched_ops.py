"""What an op was given and what it returned, as far as `find_nonfinite` looks at it."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_lab.numerics.tensor_summary import TensorSummary, summarise


@dataclass(frozen=True)
class Site:
    """The module whose code ran, and which call of it; as it stands, outside of all modules."""

    module: str | None = None
    module_type: str | None = None
    call: int = 0


@dataclass(frozen=True)
class Call:
    """An op that ran, and where: `node` is what autograd ran it for in backward, else None."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    node: Any
    site: Site

    @property
    def name(self) -> str:
        """The op's name without its namespace."""
        return self.func._schema.name.partition("::")[2]


# Ops that compute nothing (views, memory that is not written yet), and those on lists of tensors,
# which are optimizers and scalers: what they break is found when it is next used.
_UNSEEN = ("empty", "new_empty", "resize", "set_", "_foreach", "_fused_adam", "_fused_sgd",
           "_fused_adagrad", "_amp_", "lift")  # fmt: skip
# Ops of which only the first outputs are results; the others are workspace, with any content.
_RESULTS = {"scaled_dot_product": 1, "attention_forward": 1, "ctc_loss": 1, "rnn": 3}
# Ops that make one number of many in a way that lets every one of them count.
REDUCTIONS = ("sum", "mean", "dot", "mse_loss", "nll_loss", "smooth_l1", "huber", "binary_cross",
               "soft_margin", "l1_loss", "linalg_vector_norm", "norm")  # fmt: skip


@functools.cache
def _looks_at(func) -> int:
    """How many of the op's outputs are to be looked at."""
    name = func._schema.name.partition("::")[2]
    if func.is_view or name.startswith(_UNSEEN) or not func._schema.returns:
        return 0
    if "backward" not in name:
        for part, count in _RESULTS.items():
            if part in name:
                return count
    return len(func._schema.returns)


def outputs(func: Any, out: object) -> list[torch.Tensor]:
    """The tensors an op returned that are results."""
    count = _looks_at(func)
    if not count:
        return []
    if isinstance(out, torch.Tensor):
        return [out]
    if not isinstance(out, (tuple, list)):
        return []
    return tensors(out[:count])


def tensors(structure: object) -> list[torch.Tensor]:
    """The tensors in tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def argument_summaries(call: Call, bad: list[torch.Tensor]) -> Iterator[TensorSummary]:
    """The floating-point tensors an op was given, by their names in its schema."""
    names = [argument.name for argument in call.func._schema.arguments]
    for name, given in [*zip(names, call.args, strict=False), *call.kwargs.items()]:
        found = tensors(given)
        for number, tensor in enumerate(found):
            if among(tensor, bad) or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            yield summarise(f"{name}[{number}]" if len(found) > 1 else name, tensor)


def among(tensor: torch.Tensor, others: Iterable[object]) -> bool:
    """Whether it is one of the others, not whether it equals one."""
    return any(tensor is other for other in others)

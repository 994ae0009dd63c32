"""The parameters of an optimizer before and after its step, for `find_nonfinite`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_lab.numerics.call_stack import is_in_scaler, user_line
from amp_lab.numerics.tensor_summary import is_finite, summarise

_LARGEST_LOST_EPS = 2.0**-25
"""fp16's smallest number is 2^-24. Half of it is a tie, which rounds to 0."""


class StepWatch:
    """Find the parameters that the step of an optimizer makes inf or NaN."""

    def __init__(self) -> None:
        # While an optimizer steps, ids of its parameters that were broken before.
        self._broken: set[int] | None = None

    @property
    def is_in_step(self) -> bool:
        """Whether an optimizer updates its parameters now.

        A closure that the step calls computes the loss with gradients switched on.
        """
        return self._broken is not None and not torch.is_grad_enabled()

    def start(self, optimizer: Optimizer) -> None:
        """Note the parameters that are not finite, or whose gradient is not, before a step."""
        self._broken = set()
        for _, parameter in _optimized(optimizer):
            gradient = parameter.grad
            has_bad_gradient = gradient is not None and not is_finite(gradient)
            if has_bad_gradient or not is_finite(parameter):
                self._broken.add(id(parameter))

    def end(self, optimizer: Optimizer, model: nn.Module) -> dict[str, Any] | None:
        """After a step, the fields of a report on the first parameter that it broke, or None.

        A parameter that is not in the model has no name in the report.
        """
        broken_before = self._broken
        self._broken = None  # the step is over
        if broken_before is None:
            return None
        for group, parameter in _optimized(optimizer):
            if id(parameter) not in broken_before and not is_finite(parameter):
                return _fields(optimizer, group, parameter, model)
        return None


def bypasses_scaler(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer of the model steps now without a `GradScaler`."""
    if is_in_scaler("step", "_maybe_opt_step"):
        return False
    ids_in_model = {id(parameter) for parameter in model.parameters()}
    ids_in_optimizer = {id(parameter) for _, parameter in _optimized(optimizer)}
    return not ids_in_model.isdisjoint(ids_in_optimizer)


def _optimized(optimizer: Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    """Each parameter that an optimizer updates, after its group of options."""
    return [(group, p) for group in optimizer.param_groups for p in group["params"]]


def _fields(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, model: nn.Module
) -> dict[str, Any]:
    """What a `NonfiniteReport` says about a parameter that a step made inf or NaN."""
    names = [name for name, candidate in model.named_parameters() if candidate is parameter]
    gradient = parameter.grad
    return {
        "value": summarise("parameter", parameter),
        "phase": "step",
        "op": f"{type(optimizer).__name__}.step",
        "tensor": "parameter",
        "name": names[0] if names else "a tensor outside the model",
        "inputs": () if gradient is None else (summarise("its gradient", gradient),),
        "eps": _lost_eps(group, parameter),
        "line": user_line(),
    }


def _lost_eps(group: dict[str, Any], parameter: Tensor) -> float | None:
    """The optimizer's eps, if it is 0 in the dtype of an fp16 parameter; else None."""
    eps = group.get("eps")
    is_lost = isinstance(eps, float) and eps <= _LARGEST_LOST_EPS
    return eps if is_lost and parameter.dtype is torch.float16 else None

"""Eager against compiled, at the boundaries of modules: a compiled model has no ops to see."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from amp_lab.difference import rounding
from amp_lab.difference.result import Difference, Growth, RunComparison
from amp_lab.difference.run_log import record_run
from amp_lab.errors import NumericsError, with_type
from amp_lab.tracing.ops_seen import tensors_in

# A compiled module fuses and reorders what the eager one rounds op by op, so its error may be as
# large as that of the eager one, some times over, and no more.
_TIMES_THE_EAGER_ERROR = 8.0

_NO_GRADIENTS = (
    "Gradients were not compared: only the forward pass ran, and torch.compile makes a graph of "
    "its own for the backward pass."
)


class _Measured(NamedTuple):
    eager: float  # error against fp64, relative; so are the next
    compiled: float
    predicted: float  # what the error of the eager one and the rounding of the result explain
    dtype: torch.dtype


def is_compiled(run: object) -> bool:
    """Whether `torch.compile` made this model."""
    return isinstance(run, nn.Module) and hasattr(run, "_orig_mod")


def compare_modules(
    run_a: Callable[..., Any], run_b: Callable[..., Any], inputs: tuple, kwargs: dict[str, Any]
) -> RunComparison:
    """Compare a model with what `torch.compile` made of it, and its modules only if they part.

    The finding is the innermost and earliest that parts from its eager self when compiled alone.
    Raises `NumericsError` if it is not the same model, or a compiled module cannot be run.
    """
    swapped = is_compiled(run_a)
    eager, compiled = (run_b, run_a) if swapped else (run_a, run_b)
    names = ("compiled", "eager") if swapped else ("eager", "compiled")
    modules = dict(eager.named_modules()) if isinstance(eager, nn.Module) else {}
    original: Any = getattr(compiled, "_orig_mod", None)
    if modules.keys() != dict(original.named_modules()).keys():
        raise NumericsError("a compiled model is compared with the model itself: the other run is "
                            "none, or has other modules")  # fmt: skip
    growth, first = [], None
    around, sound = "", set()  # the module to look into, and those that have nothing to find
    for name, given in _calls(modules, inputs, kwargs).items():
        if not _is_inside(name, around) or any(_is_inside(name, other) for other in sound):
            continue
        kind, found = type(modules[name]).__name__, _measure(name, modules[name], compiled, given)
        growth.append(Growth(name, kind, found.eager, found.compiled, math.nan))
        if found.compiled <= found.predicted:
            sound.add(name)
        else:
            around, first = name, _difference(name, kind, found, names)
    whole = growth[0]  # the model itself, which is called first
    return RunComparison(
        first=first,
        matched=len(growth),
        only_a=0,
        only_b=0,
        format_a=names[0],
        format_b=names[1],
        unit="modules",
        growth=tuple(growth),
        end_a=whole.b if swapped else whole.a,
        end_b=whole.a if swapped else whole.b,
        remarks=(_NO_GRADIENTS,),
    )


def _is_inside(name: str, outer: str) -> bool:
    return not outer or f"{name}.".startswith(f"{outer}.")


def _calls(modules: dict[str, nn.Module], inputs: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What each module is given in its first call in an eager run, by name, in order."""
    names = {module: name for name, module in modules.items()}
    found: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        found.setdefault(names[module], _copied((args, kwargs)))

    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        record_run("A", functools.partial(modules[""], *inputs, **kwargs))
    return found


def _copied(given: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, given)


def _measure(name: str, module: nn.Module, compiled: Any, given: Any) -> _Measured:
    """Errors of a module and of its compiled self; of several results, of the one off most."""
    args, kwargs = _copied(given)  # a module may write into them
    log = record_run("A", functools.partial(module, *args, **kwargs))
    words = f"{name!r}, compiled," if name else "the model, compiled,"
    if name:
        own = compiled._orig_mod.get_submodule(name)
        compiled = type(compiled)(own, compiled.dynamo_ctx)
    buffers = [(buffer, buffer.clone()) for buffer in compiled.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            results = tensors_in(compiled(*given[0], **given[1]))
    except Exception as error:  # the compiler's own too
        raise NumericsError(f"{words} raises {with_type(error)}") from error
    finally:
        for buffer, value in buffers:  # such as running statistics
            buffer.copy_(value)
    results = [tensor for tensor in results if tensor.is_floating_point()]
    if len(results) != len(log.results):
        raise NumericsError(f"{words} returns other tensors than without")
    measured = []
    nothing = _Measured(0.0, 0.0, 1.0, torch.float32)
    for (eager, exact), result in zip(log.results, results, strict=True):
        errors = rounding.relative_error(eager, exact), rounding.relative_error(result, exact)
        predicted = _TIMES_THE_EAGER_ERROR * errors[0] + 2 * rounding.unit_roundoff(result.dtype)
        measured.append(_Measured(*errors, predicted, result.dtype))
    return max(measured, key=lambda one: one.compiled / one.predicted, default=nothing)


def _difference(name: str, kind: str, found: _Measured, ops: tuple[str, str]) -> Difference:
    reason = (
        "Compiled by itself, on the inputs that it gets in the eager run, it is off by "
        f"{found.compiled:.2g} from fp64, and eager by {found.eager:.2g}. Inside a compiled module "
        "there are no ops to compare."
    )
    facts = "module", name, kind, 1, None, *ops, found.dtype, found.dtype
    return Difference(*facts, found.compiled, found.predicted, reason)

"""Eager against compiled, at the boundaries of modules: a compiled model has no ops to see."""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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


def is_compiled(run: object) -> bool:
    """Whether `torch.compile` made this model."""
    return isinstance(run, nn.Module) and hasattr(run, "_orig_mod")


@dataclass
class _Call:
    """One call of a module in the eager run."""

    module: nn.Module
    name: str
    number: int
    args: tuple
    kwargs: dict[str, Any]

    @property
    def words(self) -> str:
        """The module in an error."""
        return repr(self.name) if self.name else "the model"


@dataclass(frozen=True)
class _Measured:
    eager: float  # error against fp64, relative; so are the next
    compiled: float
    dtype: torch.dtype

    @property
    def predicted(self) -> float:
        """What the error of the eager one and the rounding of the result explain."""
        return _TIMES_THE_EAGER_ERROR * self.eager + 2 * rounding.unit_roundoff(self.dtype)

    @property
    def parts(self) -> bool:
        """Whether the compiled one is off by more; NaN is."""
        return not self.compiled <= self.predicted


def compare_modules(
    run_a: Callable[..., Any], run_b: Callable[..., Any], inputs: tuple, kwargs: dict[str, Any]
) -> RunComparison:
    """Compare a model with what `torch.compile` made of it, and its modules only if they part.

    Both are called where autocast is as it is now. Raises `NumericsError` if it is not the same
    model, or a compiled module cannot be run.
    """
    eager, compiled = (run_b, run_a) if is_compiled(run_a) else (run_a, run_b)
    original = getattr(compiled, "_orig_mod", None)
    if not isinstance(original, nn.Module) or not isinstance(eager, nn.Module):
        raise NumericsError("a compiled model is compared with the model itself: give both so")
    if [n for n, _ in eager.named_modules()] != [n for n, _ in original.named_modules()]:
        raise NumericsError("the compiled model and the other have other modules")
    calls = _calls(eager, inputs, kwargs)
    whole = _Call(eager, "", 1, inputs, kwargs)
    growth: list[Growth] = []
    found = _search(whole, calls, compiled, original, growth)
    swapped = eager is run_b
    return RunComparison(
        first=found and _difference(*found, swapped),
        matched=len(growth),
        only_a=0,
        only_b=0,
        format_a="compiled" if swapped else "eager",
        format_b="eager" if swapped else "compiled",
        unit="modules",
        growth=tuple(growth),
    )


def _search(
    call: _Call, calls: list[_Call], compiled: Any, original: nn.Module, growth: list[Growth]
) -> tuple[_Call, _Measured] | None:
    """The innermost and earliest module that parts from its eager self when compiled alone."""
    ours = original.get_submodule(call.name)
    own = compiled if not call.name else type(compiled)(ours, compiled.dynamo_ctx)
    measured = _measure(call, own)
    if measured is None:
        return None
    kind = type(call.module).__name__
    growth.append(Growth(call.name, kind, measured.eager, measured.compiled, math.nan))
    if not measured.parts:
        return None
    inside = [inner for inner in calls if inner is not call and _is_child(call, inner)]
    for inner in inside:
        found = _search(inner, calls, compiled, original, growth)
        if found:
            return found
    return call, measured


def _is_child(call: _Call, inner: _Call) -> bool:
    """Whether the inner one is a module right inside of the other, called for the first time."""
    return inner.number == 1 and bool(inner.name) and inner.name.rpartition(".")[0] == call.name


def _calls(model: nn.Module, inputs: tuple, kwargs: dict[str, Any]) -> list[_Call]:
    """The calls of all modules in an eager run, with copies of what they are given."""
    found: list[_Call] = []
    counts: Counter[str] = Counter()
    handles = []

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        counts[name] += 1
        copied = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        found.append(_Call(module, name, counts[name], *copied))

    for name, module in model.named_modules():
        hook = functools.partial(note, name)
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad(), _restored(model):
            model(*inputs, **kwargs)
    except Exception as error:  # whatever the user's code raises
        raise NumericsError(f"the eager run raises {with_type(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _measure(call: _Call, compiled: Any) -> _Measured | None:
    """Errors of the module and of its compiled self against fp64, on the same inputs.

    Of several results the one that is off most; None of none.
    """
    given = tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
    log = record_run("A", lambda: call.module(*given[0], **given[1]))
    given = tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
    try:
        with torch.no_grad(), torch.random.fork_rng(), _restored(call.module), _restored(compiled):
            torch.manual_seed(0)
            results = tensors_in(compiled(*given[0], **given[1]))
    except Exception as error:  # the compiler's own too
        raise NumericsError(f"{call.words}, compiled, raises {with_type(error)}") from error
    results = [tensor for tensor in results if tensor.is_floating_point()]
    if len(results) != len(log.results):
        raise NumericsError(f"{call.words}, compiled, returns other tensors than without")
    worst = [
        _Measured(_error(eager, exact), _error(result, exact), result.dtype)
        for (eager, exact), result in zip(log.results, results, strict=True)
    ]
    return max(worst, key=lambda one: one.compiled / one.predicted, default=None)


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square, relative to that of the exact result."""
    left, right = rounding.unmasked(result.to(exact.device), exact)
    return rounding.rms(left - right) / (rounding.rms(right) or 1.0)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Give buffers their values back, such as running statistics."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _difference(call: _Call, measured: _Measured, swapped: bool) -> Difference:
    return Difference(
        kind="module",
        module=call.name,
        module_type=type(call.module).__name__,
        call=call.number,
        op=None,
        op_a="compiled" if swapped else "eager",
        op_b="eager" if swapped else "compiled",
        dtype_a=measured.dtype,
        dtype_b=measured.dtype,
        size=measured.compiled,
        predicted=measured.predicted,
        reason=(
            f"Compiled by itself, on the inputs that it gets in the eager run, it is off by "
            f"{measured.compiled:.2g} from fp64, and eager by {measured.eager:.2g}. Inside a "
            "compiled module there are no ops to compare."
        ),
    )

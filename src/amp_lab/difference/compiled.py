"""Eager against compiled, at the boundaries of modules: a compiled model has no ops to see."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from amp_lab.core.errors import NumericsError, with_type
from amp_lab.difference import rounding
from amp_lab.difference.result import Difference, Growth, RunComparison
from amp_lab.difference.run_log import RunLog, record_run
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
    if is_compiled(run_a):
        return _compare(run_b, run_a, ("compiled", "eager"), (inputs, kwargs))
    return _compare(run_a, run_b, ("eager", "compiled"), (inputs, kwargs))


def _compare(eager: Any, compiled: Any, names: tuple[str, str], inputs: Any) -> RunComparison:
    """The same; `names` says which of the two is A, and which B."""
    modules = _modules_of_both(eager, compiled)
    growth = []
    first = None
    suspect = ""  # the module to look into
    sound = set()  # the modules inside which there is nothing to find
    for name, module_inputs in _first_calls(modules, inputs).items():
        if not _is_inside(name, suspect) or any(_is_inside(name, other) for other in sound):
            continue
        kind = type(modules[name]).__name__
        found = _measure(name, modules[name], compiled, module_inputs)
        growth.append(Growth(name, kind, found.eager, found.compiled, math.nan))
        if found.compiled <= found.predicted:
            sound.add(name)
            continue
        suspect = name
        first = _difference(name, kind, found, names)
    model = growth[0]  # it is called first
    ends = {"eager": model.a, "compiled": model.b}
    name_a, name_b = names
    return RunComparison(
        first=first,
        matched=len(growth),
        only_a=0,
        only_b=0,
        format_a=name_a,
        format_b=name_b,
        unit="modules",
        growth=tuple(growth),
        end_a=ends[name_a],
        end_b=ends[name_b],
        remarks=(_NO_GRADIENTS,),
    )


def _modules_of_both(eager: Any, compiled: Any) -> dict[str, nn.Module]:
    """The modules of the eager model, by name, which have to be those of the compiled one."""
    modules = {}
    if isinstance(eager, nn.Module):
        modules = dict(eager.named_modules())
    if modules.keys() != dict(compiled._orig_mod.named_modules()).keys():
        raise NumericsError("a compiled model is compared with the model itself: the other run is "
                            "none, or has other modules")  # fmt: skip
    return modules


def _is_inside(name: str, outer: str) -> bool:
    return not outer or f"{name}.".startswith(f"{outer}.")


def _first_calls(modules: dict[str, nn.Module], inputs: Any) -> dict[str, Any]:
    """What each module is given in its first call in an eager run, by name, in order."""
    names = {module: name for name, module in modules.items()}
    found = {}

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        found.setdefault(names[module], _clone_tensors((args, kwargs)))

    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        _record_eager(modules[""], inputs)
    return found


def _clone_tensors(inputs: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, inputs)


def _record_eager(module: nn.Module, inputs: Any) -> RunLog:
    args, kwargs = inputs
    return record_run("A", functools.partial(module, *args, **kwargs))


def _measure(name: str, module: nn.Module, compiled: Any, inputs: Any) -> _Measured:
    """Errors of a module and of its compiled self; of several results, of the one off most."""
    log = _record_eager(module, _clone_tensors(inputs))  # it may write into them
    subject = f"{name!r}, compiled," if name else "the model, compiled,"
    if name:
        original = compiled._orig_mod.get_submodule(name)
        compiled = type(compiled)(original, compiled.dynamo_ctx)
    try:
        results = _run_compiled(compiled, inputs)
    except Exception as error:  # the compiler's own too
        raise NumericsError(f"{subject} raises {with_type(error)}") from error
    if len(results) != len(log.results):
        raise NumericsError(f"{subject} returns other tensors than without")
    measured = []
    for (eager, exact), result in zip(log.results, results, strict=True):
        measured.append(_measure_errors(eager, result, exact))
    without_results = _Measured(0.0, 0.0, 1.0, torch.float32)
    return max(measured, key=lambda one: one.compiled / one.predicted, default=without_results)


def _run_compiled(compiled: Any, inputs: Any) -> list[Tensor]:
    """The floating-point results of a compiled module, whose buffers keep their values."""
    args, kwargs = inputs
    buffers = [(buffer, buffer.clone()) for buffer in compiled.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            results = tensors_in(compiled(*args, **kwargs))
    finally:
        for buffer, value in buffers:  # such as running statistics
            buffer.copy_(value)
    return [tensor for tensor in results if tensor.is_floating_point()]


def _measure_errors(eager: Tensor, compiled: Tensor, exact: Tensor) -> _Measured:
    """The errors of one result."""
    eager_error = rounding.relative_error(eager, exact)
    compiled_error = rounding.relative_error(compiled, exact)
    rounding_error = 2 * rounding.unit_roundoff(compiled.dtype)
    predicted = _TIMES_THE_EAGER_ERROR * eager_error + rounding_error
    return _Measured(eager_error, compiled_error, predicted, compiled.dtype)


def _difference(name: str, kind: str, found: _Measured, names: tuple[str, str]) -> Difference:
    reason = (
        "Compiled by itself, on the inputs that it gets in the eager run, it is off by "
        f"{found.compiled:.2g} from fp64, and eager by {found.eager:.2g}. Inside a compiled module "
        "there are no ops to compare."
    )
    name_a, name_b = names
    return Difference(
        kind="module",
        module=name,
        module_type=kind,
        call=1,
        op=None,
        op_a=name_a,
        op_b=name_b,
        dtype_a=found.dtype,
        dtype_b=found.dtype,
        size=found.compiled,
        predicted=found.predicted,
        reason=reason,
    )

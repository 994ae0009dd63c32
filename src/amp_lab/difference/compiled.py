"""Compare a model with its compiled version, module by module, since compiled ops are hidden."""

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_lab.core.errors import NumericsError, with_type
from amp_lab.core.tensors import tensors_in
from amp_lab.difference import rounding
from amp_lab.difference.result import Difference, Growth, RunComparison
from amp_lab.difference.run_log import record_run
from amp_lab.model_call import ModelCall

# A compiled module fuses and reorders ops, so it rounds at other places than the eager one. Its
# error may be larger than the eager error, but only by this factor.
_TIMES_THE_EAGER_ERROR = 8.0

_NO_GRADIENTS = (
    "Gradients were not compared, because only the forward pass ran. torch.compile makes a "
    "separate graph for the backward pass."
)


class _ModuleErrors(NamedTuple):
    """Errors of one result of a module, relative to the result in fp64."""

    eager: float  # when the module runs eager
    compiled: float  # when it is compiled by itself
    predicted: float  # the largest error of the compiled module that rounding explains
    dtype: torch.dtype


def is_compiled(run: object) -> bool:
    """Whether the run is a model that `torch.compile` returned."""
    return isinstance(run, nn.Module) and hasattr(run, "_orig_mod")


def compare_modules(run_a: Any, run_b: Any, inputs: tuple, kwargs: dict[str, Any]) -> RunComparison:
    """Compare a model with its compiled version; one of the two runs is compiled.

    Only if they diverge, the modules are compiled one by one. The finding is the earliest of the
    innermost modules that diverge when compiled by themselves. Raises `NumericsError` if the two
    are not the same model, or if a compiled module raises.
    """
    if is_compiled(run_a):
        return _compare(ModelCall(run_b, inputs, kwargs), run_a, ("compiled", "eager"))
    return _compare(ModelCall(run_a, inputs, kwargs), run_b, ("eager", "compiled"))


def _compare(eager: ModelCall, compiled: Any, names: tuple[str, str]) -> RunComparison:
    """Compare the model of a call with a compiled one on the same inputs.

    `names` are the words for run A and run B: "eager" and "compiled", or the reverse.
    """
    name_a, name_b = names
    modules = _matching_modules(eager.model, compiled)
    growth = []
    first = None
    # The modules come in the order in which they are called: outer modules before inner ones. So
    # the search goes into the first module that diverges, then into the first of those inside it.
    diverging = ""  # the innermost module so far that diverges; at first the model
    agreeing: list[str] = []  # modules that do not diverge, nor will those inside them
    for name, call in _first_calls(modules, eager).items():
        if not _is_inside(name, diverging):
            continue
        if any(_is_inside(name, outer) for outer in agreeing):
            continue
        module_type = type(call.model).__name__
        errors = _measure(name, call, compiled)
        error_of = {"eager": errors.eager, "compiled": errors.compiled}
        growth.append(
            Growth(
                module=name,
                op=module_type,  # the class of the module stands in place of an op
                a=error_of[name_a],
                b=error_of[name_b],
                apart=math.nan,
            )
        )
        if errors.compiled <= errors.predicted:
            agreeing.append(name)
            continue
        diverging = name
        first = _difference(name, module_type, errors, names)
    model = growth[0]  # the whole model is called before its modules
    return RunComparison(
        first=first,
        matched=len(growth),
        only_a=0,
        only_b=0,
        format_a=name_a,
        format_b=name_b,
        unit="modules",
        growth=tuple(growth),
        end_a=model.a,
        end_b=model.b,
        remarks=(_NO_GRADIENTS,),
    )


def _matching_modules(eager: Any, compiled: Any) -> dict[str, nn.Module]:
    """The modules of the eager model by name.

    Raises `NumericsError` if it is no model, or if the compiled model has other modules.
    """
    modules = {}  # of a run that is no model; they never equal those of the compiled model
    if isinstance(eager, nn.Module):
        modules = dict(eager.named_modules())
    compiled_modules = dict(compiled._orig_mod.named_modules())
    if modules.keys() != compiled_modules.keys():
        raise NumericsError("a compiled model can only be compared with the same model, not "
                            "compiled; the other run is no model or has other modules")  # fmt: skip
    return modules


def _is_inside(name: str, outer: str) -> bool:
    """Whether a module is inside another or is the same; "" is the model, with all modules."""
    return not outer or f"{name}.".startswith(f"{outer}.")


def _first_calls(modules: dict[str, nn.Module], eager: ModelCall) -> dict[str, ModelCall]:
    """The first call of each module that the eager model calls, by name, in the order of the calls.

    The inputs are copies.
    """
    names = {module: name for name, module in modules.items()}
    calls: dict[str, ModelCall] = {}

    def note_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if names[module] not in calls:
            calls[names[module]] = ModelCall(module, args, kwargs).map_inputs(torch.clone)

    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(note_call, with_kwargs=True))
        record_run("A", eager.output)
    return calls


def _measure(name: str, call: ModelCall, compiled_model: Any) -> _ModuleErrors:
    """Run a module eager and compiled, and return the errors of one of its results.

    It is the result whose compiled error is the largest relative to the prediction. Raises
    `NumericsError` if the compiled module raises or returns other tensors than the eager one.
    """
    copies = call.map_inputs(torch.clone)  # the module may write into its inputs
    eager_log = record_run("A", copies.output)
    subject = f"{name!r}, compiled," if name else "the model, compiled,"
    compiled_module = compiled_model
    if name:
        # Compile this module by itself, with the options of the whole model.
        original = compiled_model._orig_mod.get_submodule(name)
        compiled_module = type(compiled_model)(original, compiled_model.dynamo_ctx)
    try:
        compiled_results = _run_compiled(dataclasses.replace(call, model=compiled_module))
    except Exception as error:  # of the model or of the compiler
        raise NumericsError(f"{subject} raises {with_type(error)}") from error
    if len(compiled_results) != len(eager_log.results):
        raise NumericsError(f"{subject} returns other tensors than the eager module")
    errors = []
    for (eager_result, exact), result in zip(eager_log.results, compiled_results, strict=True):
        errors.append(_errors_of_result(exact, eager_result, result))
    # For a module without floating-point results: it counts as one that does not diverge.
    no_errors = _ModuleErrors(eager=0.0, compiled=0.0, predicted=1.0, dtype=torch.float32)
    return max(errors, key=lambda error: error.compiled / error.predicted, default=no_errors)


def _errors_of_result(exact: Tensor, eager: Tensor, compiled: Tensor) -> _ModuleErrors:
    """The errors of one result of a module; `exact` is the result in fp64."""
    eager_error = rounding.relative_error(eager, exact)
    # Two roundings more, since the eager result may be exact.
    two_roundings = 2 * rounding.unit_roundoff(compiled.dtype)
    return _ModuleErrors(
        eager=eager_error,
        compiled=rounding.relative_error(compiled, exact),
        predicted=_TIMES_THE_EAGER_ERROR * eager_error + two_roundings,
        dtype=compiled.dtype,
    )


def _run_compiled(call: ModelCall) -> list[Tensor]:
    """Run a compiled module; return its floating-point results.

    Its buffers are restored afterwards.
    """
    buffers = [(buffer, buffer.clone()) for buffer in call.model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)  # as `record_run` does for the eager module
            results = tensors_in(call.output())
    finally:
        for buffer, value in buffers:  # such as running statistics
            buffer.copy_(value)
    return [tensor for tensor in results if tensor.is_floating_point()]


def _difference(
    name: str, module_type: str, errors: _ModuleErrors, names: tuple[str, str]
) -> Difference:
    """The finding for a module that diverges when compiled by itself."""
    reason = (
        "We ran this module alone, on its inputs from the eager run. Its error from fp64 is "
        f"{errors.compiled:.2g} when compiled and {errors.eager:.2g} when eager. The ops inside a "
        "compiled module cannot be compared."
    )
    name_a, name_b = names
    return Difference(
        kind="module",
        module=name,
        module_type=module_type,
        call=1,  # `_first_calls` keeps the first call alone
        op=None,
        op_a=name_a,
        op_b=name_b,
        dtype_a=errors.dtype,
        dtype_b=errors.dtype,
        size=errors.compiled,
        predicted=errors.predicted,
        reason=reason,
    )

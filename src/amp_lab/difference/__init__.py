"""Where do two runs of a model part? The first op whose difference rounding does not explain."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.core.errors import NumericsError
from amp_lab.core.remedies import remedy
from amp_lab.core.report import dtype_name, short_name
from amp_lab.difference.alignment import Pair, align
from amp_lab.difference.compiled import compare_modules, is_compiled
from amp_lab.difference.findings import first_finding, steepest
from amp_lab.difference.raised import RunRaised
from amp_lab.difference.result import Difference, Growth, RunComparison
from amp_lab.difference.run_log import RunLog, record_run
from amp_lab.tracing.ops_seen import tensors_in

__all__ = ["Difference", "RunComparison", "compare_runs", "first_difference"]

_OWN_INPUTS = remedy(
    "diff.own_inputs",
    "two models whose weights differ in dtype are given the same inputs",
    "the weights of {run} are {weights}, and its inputs {inputs}: give each run inputs of its own, "
    "as first_difference(lambda: a(x), lambda: b(x.to(torch.{weights})))",
)


def first_difference(
    run_a: Callable[..., Any], run_b: Callable[..., Any], *inputs: Any, **kwargs: Any
) -> Difference | None:
    """The first op where two runs part by more than rounding explains; None if they do not.

        first_difference(model, changed_model, x)
        first_difference(model, torch.compile(model), x)

        def in_bf16(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)
        first_difference(model, in_bf16, x)

    A run is a model or any function that calls one or several; both are called with the inputs that
    are given here, or, as `lambda: model(x)`, with their own. Forward passes are compared, without
    gradients: fp32 against bf16, two versions of a model, two batch sizes (the rows that both
    have), two devices, a compiled model (whose modules are compared, since it has no ops to see).
    Each run draws the same random numbers, and buffers are given their values back.

    Every op is done once more in fp64 alongside, on fp64 inputs, and once on the inputs that it
    really got. The first tells whether the two runs compute the same, whatever their formats round;
    the second, how much this op alone rounds (`amp_lab.difference.rounding` has the model). Logs of
    unequal length are aligned by module and op; other ops to the same result are no difference.
    Errors that grow through many ops are none either: `compare_runs` shows how large they become.
    Positions and counts that 16 bits make equal are one, though rounding explains each of them.

    It takes the time of about ten runs, and memory for all results of all ops, twice, in fp64.
    Raises `NumericsError` if a run raises, or if the two have nothing in common.
    """
    return compare_runs(run_a, run_b, *inputs, **kwargs).first


def compare_runs(
    run_a: Callable[..., Any], run_b: Callable[..., Any], *inputs: Any, **kwargs: Any
) -> RunComparison:
    """The same with all that was measured: how errors grow, and which ops only one run has.

    Rounding may explain each op and the results be far apart, where errors grow on the way: `end_a`
    and `end_b` are how far each run's results are off, and `jump` is where that came about.
    """
    if is_compiled(run_a) or is_compiled(run_b):
        return compare_modules(run_a, run_b, inputs, kwargs)
    a = _record("A", run_a, inputs, kwargs)
    b = _record("B", run_b, inputs, kwargs, a)
    alignment = align(a, b)
    growth = []
    unmatched = Counter[str]()  # ops that one run alone has, by the name of the run
    for pair in alignment.pairs:
        record = pair.last
        if record.is_neutral:
            continue
        if pair.is_matched:
            growth.append(_growth(pair))
        else:
            unmatched[record.log.name] += 1
    if not growth:
        raise NumericsError("the two runs have nothing in common: no op of the one runs in a "
                            "module of the same name in the other")  # fmt: skip
    end_a = a.end
    end_b = b.end
    return RunComparison(
        first=first_finding(alignment),
        matched=len(growth),
        only_a=unmatched["A"],
        only_b=unmatched["B"],
        format_a=f"{short_name(a.format)} on {a.device_type}",
        format_b=f"{short_name(b.format)} on {b.device_type}",
        unit="ops",
        growth=tuple(growth),
        end_a=end_a,
        end_b=end_b,
        jump=steepest(a if end_a > end_b else b),
    )


def _growth(pair: Pair) -> Growth:
    one, other = pair.records
    return Growth(other.place.module, other.op, one.error, other.error, pair.apart)


def _record(
    name: str, run: Any, inputs: tuple, kwargs: dict[str, Any], other: RunLog | None = None
) -> RunLog:
    if not callable(run):
        raise NumericsError(f"a run is a model or a function, not a {type(run).__name__}")
    try:
        log = record_run(name, functools.partial(run, *inputs, **kwargs), other)
    except RunRaised as error:
        if not error.may_be_of_inputs:
            raise
        advice = _advice_on_inputs(name, run, (inputs, kwargs))
        if not advice:
            raise
        raise NumericsError(f"{error.description}; {advice}") from error
    if not log.records:
        raise NumericsError(f"run {name} calls no op of torch on floating-point values")
    return log


def _advice_on_inputs(name: str, run: Any, inputs: Any) -> str:
    """What to do about a model that is given inputs of another dtype than its weights have."""
    if not isinstance(run, nn.Module):
        return ""
    weight_dtypes = _floating_dtypes(run.parameters())
    input_dtypes = _floating_dtypes(tensors_in(inputs))
    if len(weight_dtypes) != 1 or len(input_dtypes) != 1 or input_dtypes == weight_dtypes:
        return ""
    weights = dtype_name(weight_dtypes.pop())
    given = dtype_name(input_dtypes.pop())
    return _OWN_INPUTS.said(run=name, weights=weights, inputs=given)


def _floating_dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}

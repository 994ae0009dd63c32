"""`first_difference`: two runs are recorded, aligned and judged."""

import functools
from collections.abc import Callable
from typing import Any

from amp_lab.difference.alignment import align
from amp_lab.difference.compiled import compare_modules, is_compiled
from amp_lab.difference.findings import first_finding
from amp_lab.difference.result import Difference, Growth, RunComparison
from amp_lab.difference.run_log import record_run
from amp_lab.errors import NumericsError
from amp_lab.report import short_name


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
    have), two devices, a compiled model. Each run draws the same random numbers, and buffers are
    given their values back.

    Every op is done once more in fp64 alongside, on fp64 inputs, and once on the inputs that it
    really got. The first tells whether the two runs compute the same, whatever their formats round;
    the second, how much this op alone rounds (`amp_lab.difference.rounding` has the model and its
    sources). Neither depends on an error that was made earlier. Logs of unequal length are aligned
    by module and op; what is computed by other ops to the same result is no difference. Inside a
    compiled model there are no ops to see, so its modules are compared, each compiled by itself.

    It takes the time of about ten runs, and memory for all results of all ops, twice, in fp64.
    Raises `NumericsError` if a run raises, or if the two have nothing in common.
    """
    return compare_runs(run_a, run_b, *inputs, **kwargs).first


def compare_runs(
    run_a: Callable[..., Any], run_b: Callable[..., Any], *inputs: Any, **kwargs: Any
) -> RunComparison:
    """The same with all that was measured: how errors grow, and which ops only one run has."""
    for run in (run_a, run_b):
        if not callable(run):
            raise NumericsError(f"a run is a model or a function, not a {type(run).__name__}")
    if is_compiled(run_a) or is_compiled(run_b):
        return compare_modules(run_a, run_b, inputs, kwargs)
    a = record_run("A", functools.partial(run_a, *inputs, **kwargs))
    b = record_run("B", functools.partial(run_b, *inputs, **kwargs), a)
    for name, log in (("A", a), ("B", b)):
        if not log.records:
            raise NumericsError(f"run {name} calls no op of torch on floating-point values")
    both = align(a, b)
    pairs = [pair for pair in both.pairs if not pair.last.is_neutral]
    matched = [pair for pair in pairs if pair.is_matched]
    if not matched:
        raise NumericsError("the two runs have nothing in common: no op of the one runs in a "
                            "module of the same name in the other")  # fmt: skip
    growth = []
    for pair in matched:
        one, other = pair.records
        growth.append(Growth(one.place.module, one.op, one.error, other.error, pair.apart))
    return RunComparison(
        first=first_finding(both),
        matched=len(matched),
        only_a=sum(pair.last.log is a for pair in pairs),
        only_b=sum(pair.records[0].log is b for pair in pairs),
        format_a=f"{short_name(a.format)} on {a.device_type}",
        format_b=f"{short_name(b.format)} on {b.device_type}",
        unit="ops",
        growth=tuple(growth),
    )

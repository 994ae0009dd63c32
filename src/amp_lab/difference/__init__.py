"""Find the first op at which two runs of a model differ by more than rounding explains."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_lab.core.errors import NumericsError
from amp_lab.core.remedies import remedy
from amp_lab.core.report import dtype_name, short_name
from amp_lab.core.tensors import tensors_in
from amp_lab.difference.alignment import align
from amp_lab.difference.compiled import compare_modules, is_compiled
from amp_lab.difference.findings import first_finding, largest_jump
from amp_lab.difference.raised import RunRaised
from amp_lab.difference.records import RunLog
from amp_lab.difference.result import Difference, Growth, RunComparison
from amp_lab.difference.run_log import record_run

__all__ = ["Difference", "RunComparison", "compare_runs", "first_difference"]

_OWN_INPUTS = remedy(
    "diff.own_inputs",
    "two models whose weights differ in dtype are given the same inputs",
    "the weights of {run} are {weights}, but its inputs are {inputs}. Give each run inputs in the "
    "dtype of its weights: first_difference(lambda: a(x), lambda: b(x.to(torch.{weights})))",
)


def first_difference(
    run_a: Callable[..., Any], run_b: Callable[..., Any], *inputs: Any, **kwargs: Any
) -> Difference | None:
    """Find the first op at which two runs differ by more than rounding explains.

    You can compare:

    - fp32 with bf16;
    - two versions of a model;
    - two batch sizes (only rows that both batches have are compared);
    - two devices;
    - a model and its compiled version (module by module, because the ops of a compiled model are
      not visible).

    Only the forward passes are compared. Both runs draw the same random numbers. Afterwards the
    buffers have their old values again.

    Errors that grow over many ops do not count as a difference. `compare_runs` shows how large
    these errors become. The comparison takes much longer than a run. It also needs memory for
    two fp64 copies of the results of all ops.

    Args:
        run_a: A model, or a function that calls models.
        run_b: The run to compare with `run_a`. To give each run different inputs, pass functions
            such as `lambda: model(x)`.
        *inputs: The positional arguments of both runs.
        **kwargs: The keyword arguments of both runs.

    Returns:
        A `Difference` with module, op, dtypes, size and reason; None if rounding explains every op.

    Raises:
        NumericsError: If a run cannot be called or raises, or if the runs have no op in common.

    Source:
        Each op is also computed in fp64, twice: first with fp64 inputs, to check that both runs
        compute the same function; then with the actual inputs, to measure how much the op rounds.
        `amp_lab.difference.rounding` has the error model.

    Example:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        changed = nn.Sequential(model[0], nn.GELU(), model[2])
        print(first_difference(model, changed, torch.randn(2, 8)))
    """
    return compare_runs(run_a, run_b, *inputs, **kwargs).first


def compare_runs(
    run_a: Callable[..., Any], run_b: Callable[..., Any], *inputs: Any, **kwargs: Any
) -> RunComparison:
    """Compare two runs as `first_difference` does, and return all measurements.

    The measurements show how errors grow, and which ops only one run has. Even if rounding explains
    the error of each op, the final results may differ a lot, because errors grow from op to op.
    `end_a` and `end_b` are the errors of the final results. `jump` is the op at which the larger of
    these errors grew most.

    The arguments and the errors are those of `first_difference`.
    """
    # The compiler fuses ops, so a compiled model can only be compared by module.
    if is_compiled(run_a) or is_compiled(run_b):
        return compare_modules(run_a, run_b, inputs, kwargs)
    log_a = _log_run("A", run_a, inputs, kwargs)
    # A weight or input of B that differs from that of A only in its dtype gets A's values in fp64,
    # so that the cast of a model alone is no difference.
    log_b = _log_run("B", run_b, inputs, kwargs, other=log_a)
    alignment = align(log_a, log_b)
    growth = []
    unmatched = Counter[str]()  # how many ops only run "A" has, and only run "B"
    for pair in alignment.pairs:
        op = pair.b_or_a
        if op.is_cast_or_copy:
            continue
        if not pair.is_matched:
            unmatched[op.log.name] += 1
            continue
        op_a, op_b = pair.records
        growth.append(
            Growth(
                module=op.caller.module,
                op=op.op,
                a=op_a.error,
                b=op_b.error,
                apart=pair.exact_difference,
            )
        )
    if not growth:
        raise NumericsError("there is nothing to compare: no op of run A has the same name, and "
                            "runs in a module of the same name, in run B")  # fmt: skip
    end_a = log_a.error_at_end
    end_b = log_b.error_at_end
    return RunComparison(
        first=first_finding(alignment),
        matched=len(growth),
        only_a=unmatched["A"],
        only_b=unmatched["B"],
        format_a=f"{short_name(log_a.format)} on {log_a.device_type}",
        format_b=f"{short_name(log_b.format)} on {log_b.device_type}",
        unit="ops",
        growth=tuple(growth),
        end_a=end_a,
        end_b=end_b,
        jump=largest_jump(log_a if end_a > end_b else log_b),
    )


def _log_run(
    name: str, run: Any, inputs: tuple, kwargs: dict[str, Any], other: RunLog | None = None
) -> RunLog:
    """Call `run` and return the log of its ops.

    `name` is "A" or "B"; for B, `other` is the log of A.

    Raises `NumericsError` if `run` cannot be called, raises, or calls no floating-point op.
    """
    if not callable(run):
        raise NumericsError(f"a run must be a model or a function, not a {type(run).__name__}")
    try:
        log = record_run(name, functools.partial(run, *inputs, **kwargs), other)
    except RunRaised as error:
        if not error.may_come_from_inputs:
            raise
        # Often the caller passed fp32 inputs to a model in bf16, to compare it with one in fp32.
        advice = _advise_own_inputs(name, run, (inputs, kwargs))
        if not advice:
            raise
        raise NumericsError(f"{error.description}; {advice}") from error
    if not log.records:
        raise NumericsError(f"run {name} calls no torch op that computes floating-point values")
    return log


def _advise_own_inputs(name: str, run: Any, inputs: Any) -> str:
    """Advise to give each run inputs in the dtype of its weights, if these inputs have another.

    `inputs` are the (args, kwargs) of the run. Returns "" if the dtypes agree, or for a run that is
    not a module.
    """
    if not isinstance(run, nn.Module):
        return ""
    weight_dtypes = _floating_dtypes(run.parameters())
    input_dtypes = _floating_dtypes(tensors_in(inputs))
    # With several dtypes on a side, the advice could not name the one to cast to.
    if len(weight_dtypes) != 1 or len(input_dtypes) != 1 or input_dtypes == weight_dtypes:
        return ""
    return _OWN_INPUTS.sentence(
        run=name,
        weights=dtype_name(weight_dtypes.pop()),
        inputs=dtype_name(input_dtypes.pop()),
    )


def _floating_dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    """The dtypes of the floating-point ones among these tensors."""
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}

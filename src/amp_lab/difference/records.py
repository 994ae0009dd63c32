"""The log of a run: one record for each call of an op."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from amp_lab.difference import rounding
from amp_lab.difference.merged_values import MergedValues


@dataclass(frozen=True)
class Caller:
    """The module whose code runs an op, and which call of it in this run, from 1."""

    module: str = ""
    module_type: str = ""
    call: int = 0


@dataclass(eq=False)  # compared and hashed by identity, as members of sets
class CheckedOp:
    """One call of an op that computes floating-point values; views are not recorded."""

    log: "RunLog" = field(repr=False)
    caller: Caller
    op: str  # without namespace and overload: ``addmm``
    is_cast_or_copy: bool
    dtype: torch.dtype  # of its output
    exact: Tensor  # its output in fp64, computed in fp64 from the beginning of the run
    noise: float  # the relative error that `exact` itself may have
    total: float  # the sum of `exact`
    rms: float  # the root mean square of `exact`
    error: float  # of the output, compared with `exact`, relative, root mean square
    nonfinite: str  # text on an inf or NaN in the output where `exact` is finite, or ""
    roundoff: float  # of this op alone, see `rounding.effective_roundoff`
    allowed: float  # the roundoff that fp32 arithmetic may add, see `rounding.allowance`
    producers: tuple["CheckedOp", ...] = field(repr=False)  # the ops that computed its inputs
    leaves: tuple[str, ...]  # names of parameters and buffers among its inputs
    settings: tuple  # its arguments that are numbers, names or dtypes: an eps, a dimension
    merged: MergedValues | None = None  # in one of its inputs


@dataclass
class RunLog:
    """All ops of a run, and the formats (dtypes) in which the run computes."""

    name: str  # "A" or "B"
    records: list[CheckedOp] = field(default_factory=list)
    result_ops: set[CheckedOp] = field(default_factory=set)
    """The ops that computed the run's results."""
    leaves: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers, by name
    unnamed: list[Tensor] = field(default_factory=list)  # inputs, and constants in the code
    format: torch.dtype = torch.float32  # the dtype of autocast, or else of most weights
    device_type: str = "cpu"
    precision_settings: tuple = ()
    """If equal for two runs, each op is expected to compute in the same format in both."""
    batch: int | None = None  # first size of the first input of the model
    results: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (result, result in fp64)

    @property
    def error_at_end(self) -> float:
        """The largest relative error of the run's results, or else the error of the last op."""
        if not self.results:
            return self.records[-1].error
        return max(rounding.relative_error(result, exact) for result, exact in self.results)

"""The results of `first_difference` and `compare_runs`, and how they are printed."""

import math
import textwrap
from dataclasses import dataclass

import torch

from amp_lab.core.report import Printed, Table, plural, short_name

LARGE = 0.1
"""The relative error of a result from which on even the first digit may be wrong."""


def location_text(op: str | None, module: str, module_type: str) -> str:
    """Name an op and its module: ``addmm in 'head' (Linear)``; only the module if `op` is empty.

    An empty `module_type` means that the op runs outside of all modules.
    """
    if not module_type:
        where = "outside of all modules"
        return f"{op} {where}" if op else where
    name = repr(module) if module else "the model itself"
    where = f"{name} ({module_type})"
    return f"{op} in {where}" if op else where


@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """The first op at which two runs differ by more than rounding explains."""

    kind: str  # such as "function", see `findings`; "module" for a compiled model
    module: str  # qualified name of the module that ran the op; "": the model itself
    module_type: str
    call: int  # number of the module's call, from 1
    op: str | None  # such as "addmm"; the op of run B if both runs have one, None if it is unknown
    op_a: str | None  # the op of run A; None if A has no op there
    op_b: str | None
    dtype_a: torch.dtype | None
    dtype_b: torch.dtype | None
    size: float  # size of the difference, relative to the size of the result
    predicted: float  # the largest difference that rounding explains, in the same unit
    reason: str  # a sentence

    def _table(self) -> Table:
        """The printed table: the size of the difference, and the op and dtype of each run."""
        where = location_text(self.op, self.module, self.module_type)
        if self.call > 1:
            where += f", call {self.call}"
        size = f"{self.size:.3g} of the result"
        if self.kind == "nonfinite":
            size = "not finite"
        elif math.isnan(self.size):
            size = "not measured"  # only one run has the op
        op_a = self.op_a or "no such op"
        op_b = self.op_b or "no such op"
        rows = [
            ["difference", size],
            ["predicted", f"at most {self.predicted:.3g}"],
            ["in A", f"{op_a}, {short_name(self.dtype_a)}"],
            ["in B", f"{op_b}, {short_name(self.dtype_b)}"],
        ]
        return Table(
            ["kind", self.kind],
            rows,
            caption=f"A and B diverge at {where}",
            facts=[_wrap(self.reason)],
        )


@dataclass(frozen=True)
class Growth:
    """Errors of one op in both runs, compared with fp64, relative to the result."""

    module: str
    op: str
    a: float  # error in run A
    b: float
    apart: float  # difference between the two runs in exact arithmetic


@dataclass(frozen=True)
class Jump:
    """The op at which the error of a run grows most."""

    run: str  # "A" or "B"
    module: str
    module_type: str
    op: str
    before: float  # largest error among the op's inputs, compared with fp64
    after: float  # error of the op's result


@dataclass(frozen=True, repr=False)
class RunComparison(Printed):
    """The comparison of two runs, op by op; module by module if one run is compiled."""

    first: Difference | None  # the first divergence
    matched: int  # number of ops or modules that were compared
    only_a: int  # number of ops or modules that only run A has
    only_b: int
    format_a: str  # such as "bf16 on cpu"; "eager" or "compiled" if one run is compiled
    format_b: str
    unit: str  # "ops" or "modules"
    growth: tuple[Growth, ...]
    end_a: float  # largest relative error of the output of run A, compared with fp64
    end_b: float
    jump: Jump | None = None
    """The op at which the error of the less accurate run grew most; None for modules."""
    remarks: tuple[str, ...] = ()  # further sentences

    def _table(self) -> Table:
        """The printed text: how many ops were compared, and the finding or how errors grow."""
        matched = plural(self.matched, self.unit.removesuffix("s"))
        caption = (
            f"A ({self.format_a}) and B ({self.format_b}): {matched} in both, "
            f"{self.only_a} only in A, {self.only_b} only in B"
        )
        finding = str(self.first)
        if self.first is None:
            finding = self._error_growth()
        return Table(["", ""], [], caption, facts=[finding, *self.remarks])

    def _error_growth(self) -> str:
        """Describe how far errors have grown, if rounding explains each op by itself."""
        errors = f"{self.end_a:.2g} in A and {self.end_b:.2g} in B"
        ends = f"the relative error of the output, compared with fp64, is {errors}."
        if max(self.end_a, self.end_b) <= LARGE:
            return (
                f"The runs do not diverge: rounding explains every difference. At the end, {ends}"
            )
        unit = self.unit.removesuffix("s")
        text = (
            f"No single {unit} has an error larger than rounding explains, but the errors grow "
            f"from one {unit} to the next. At the end, {ends}"
        )
        jump = self.jump
        if jump is not None:
            where = location_text(jump.op, jump.module, jump.module_type)
            growth = f"from {jump.before:.2g} to {jump.after:.2g}"
            text += f" In {jump.run}, the error grows most at {where}, {growth}."
        return _wrap(text)


def _wrap(text: str) -> str:
    """Break a text into lines of at most 98 characters."""
    return "\n".join(textwrap.wrap(text, width=98))

"""What `first_difference` and `compare_runs` have found, and how it is printed."""

import textwrap
from dataclasses import dataclass

import torch

from amp_lab.core.report import Printed, Table, short_name

LARGE = 0.1
"""The error of a run's result, relative to the result, from which its first digit is in doubt."""


def located(op: str | None, module: str, module_type: str) -> str:
    """An op and where it runs, in a sentence; the module alone if no op is known."""
    if not module_type:
        where = "outside of all modules"
        return f"{op} {where}" if op else where
    name = repr(module) if module else "the model itself"
    where = f"{name} ({module_type})"
    return f"{op} in {where}" if op else where


@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """The first op where two runs part by more than rounding explains."""

    kind: str  # one of `findings`'s; of a compiled model ``module``
    module: str  # qualified name of the one whose code ran; "": the model itself
    module_type: str
    call: int  # which call of that module, from 1
    op: str | None  # ``addmm``, of B where both have one; None: only the module is known
    op_a: str | None  # the ops of the two; None where that run has none there
    op_b: str | None
    dtype_a: torch.dtype | None
    dtype_b: torch.dtype | None
    size: float  # of the difference, relative to the size of the result
    predicted: float  # what the formats explain, in the same unit
    reason: str  # a sentence

    def _table(self) -> Table:
        where = located(self.op, self.module, self.module_type)
        if self.call > 1:
            where += f", call {self.call}"
        size = f"{self.size:.3g} of the result"
        if self.kind == "nonfinite":
            size = "not finite"
        op_a = self.op_a or "no such op"
        op_b = self.op_b or "no such op"
        rows = [
            ["difference", size],
            ["predicted", f"at most {self.predicted:.3g}"],
            ["in A", f"{op_a}, {short_name(self.dtype_a)}"],
            ["in B", f"{op_b}, {short_name(self.dtype_b)}"],
        ]
        return Table(["kind", self.kind], rows, f"A and B part at {where}", [_wrap(self.reason)])


@dataclass(frozen=True)
class Growth:
    """Errors after one op that both runs have, against the run in fp64, relative to the result."""

    module: str
    op: str
    a: float
    b: float
    apart: float  # in exact arithmetic


@dataclass(frozen=True)
class Jump:
    """The op at which the error of a run grows most, on the way to what the run returns."""

    run: str  # "A" or "B"
    module: str
    module_type: str
    op: str
    before: float  # error of the input that is off most, against the run in fp64
    after: float  # of the op's result


@dataclass(frozen=True, repr=False)
class RunComparison(Printed):
    """Two runs, op by op."""

    first: Difference | None
    matched: int  # ops, or modules, that were compared
    only_a: int
    only_b: int
    format_a: str
    format_b: str
    unit: str  # "ops", or "modules" of a compiled model
    growth: tuple[Growth, ...]
    end_a: float  # error of what the run returns, against the run in fp64, of the result off most
    end_b: float
    jump: Jump | None = None  # of the run whose `end` is the larger; None of modules
    remarks: tuple[str, ...] = ()  # what else to say of the two runs, in sentences

    def _table(self) -> Table:
        caption = (
            f"A ({self.format_a}) and B ({self.format_b}): {self.matched} {self.unit} in both, "
            f"{self.only_a} in A alone, {self.only_b} in B alone"
        )
        finding = str(self.first)
        if self.first is None:
            finding = self._error_growth()
        return Table(["", ""], [], caption, [finding, *self.remarks])

    def _error_growth(self) -> str:
        """What to say where rounding explains each op: of the end, and of how it came about."""
        ends = f"A is {self.end_a:.2g} from the run in fp64, and B {self.end_b:.2g}."
        if max(self.end_a, self.end_b) <= LARGE:
            return f"They part nowhere by more than rounding explains. At the end {ends}"
        unit = self.unit.removesuffix("s")
        text = (
            f"No {unit} by itself is off by more than rounding explains, but rounding errors "
            f"grow on the way: at the end {ends}"
        )
        jump = self.jump
        if jump is not None:
            where = located(jump.op, jump.module, jump.module_type)
            growth = f"from {jump.before:.2g} to {jump.after:.2g}"
            text += f" The error of {jump.run} grows most at {where}, {growth}."
        return _wrap(text)


def _wrap(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 98))

"""What `first_difference` and `compare_runs` have found, and how it is printed."""

import textwrap
from dataclasses import dataclass

import torch

from amp_lab.report import Printed, Table, short_name


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
        name = repr(self.module) if self.module else "the model itself"
        where = f"{name} ({self.module_type})" if self.module_type else "outside of all modules"
        where += f", call {self.call}" if self.call > 1 else ""
        what = f"{self.op} in {where}" if self.op else where
        size = f"{self.size:.3g} of the result"
        rows = [
            ["difference", "not finite" if self.kind == "nonfinite" else size],
            ["predicted", f"at most {self.predicted:.3g}"],
            ["in A", f"{self.op_a or 'no such op'}, {short_name(self.dtype_a)}"],
            ["in B", f"{self.op_b or 'no such op'}, {short_name(self.dtype_b)}"],
        ]
        facts = ["\n".join(textwrap.wrap(self.reason, 98))]
        return Table(["kind", self.kind], rows, f"A and B part at {what}", facts)


@dataclass(frozen=True)
class Growth:
    """Errors after one op that both runs have, against the run in fp64, relative to the result."""

    module: str
    op: str
    a: float
    b: float
    apart: float  # in exact arithmetic


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
    remarks: tuple[str, ...] = ()  # what else to say of the two runs, in sentences

    def _table(self) -> Table:
        caption = (
            f"A ({self.format_a}) and B ({self.format_b}): {self.matched} {self.unit} in both, "
            f"{self.only_a} in A alone, {self.only_b} in B alone"
        )
        fact = "They part nowhere by more than rounding explains."
        if self.first is not None:
            fact = str(self.first)
        elif self.growth:
            end = self.growth[-1]
            fact += f" At the end A is {end.a:.2g} from the run in fp64, and B {end.b:.2g}."
        return Table(["", ""], [], caption, [fact, *self.remarks])

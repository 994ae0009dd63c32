"""What `first_difference` has found, and what is said of it."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from amp_lab.difference.alignment import Alignment
from amp_lab.difference.findings import Finding, first_finding
from amp_lab.difference.run_log import OpRecord, RunLog
from amp_lab.report import Printed, Table, short_name


@dataclass(frozen=True)
class Difference(Printed):
    """The first op where two runs part by more than rounding explains."""

    kind: str  # ``function``, ``precision``, ``order`` or ``stability``; compiled: ``module``
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

    @property
    def where(self) -> str:
        """The module in words."""
        name = repr(self.module) if self.module else "the model itself"
        text = f"{name} ({self.module_type})" if self.module_type else "outside of all modules"
        return f"{text}, call {self.call}" if self.call > 1 else text

    def _table(self) -> Table:
        what = f"{self.op} in {self.where}" if self.op else self.where
        rows = [
            ["difference", f"{self.size:.3g} of the result"],
            ["predicted", f"at most {self.predicted:.3g}"],
            ["in A", f"{self.op_a or 'no such op'}, {short_name(self.dtype_a)}"],
            ["in B", f"{self.op_b or 'no such op'}, {short_name(self.dtype_b)}"],
        ]
        facts = textwrap.wrap(self.reason, 98)
        return Table([self.kind, ""], rows, f"A and B part at {what}", ["\n".join(facts)])


@dataclass(frozen=True)
class Growth:
    """Errors after one op that both runs have, against the run in fp64, relative to the result."""

    module: str
    op: str
    a: float
    b: float
    apart: float  # in exact arithmetic


@dataclass(frozen=True)
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

    def _table(self) -> Table:
        caption = (
            f"A ({self.format_a}) and B ({self.format_b}): {self.matched} {self.unit} in both, "
            f"{self.only_a} in A alone, {self.only_b} in B alone"
        )
        if self.first is not None:
            return Table(["", ""], [], caption, [str(self.first)])
        fact = "They part nowhere by more than rounding explains."
        last = [step for step in self.growth if step.a == step.a and step.b == step.b]
        if last:
            fact += (
                f" At the end A is {last[-1].a:.2g} from the run in fp64, and B {last[-1].b:.2g}."
            )
        return Table(["", ""], [], caption, [fact])


def compared(both: Alignment) -> RunComparison:
    """What two aligned runs amount to."""
    found = first_finding(both)
    pairs = [pair for pair in both.pairs if not both.record(pair).is_neutral]
    return RunComparison(
        first=_difference(both, found) if found else None,
        matched=len(both.matched),
        only_a=sum(pair.b is None for pair in pairs),
        only_b=sum(pair.a is None for pair in pairs),
        format_a=_format(both.a),
        format_b=_format(both.b),
        unit="ops",
        growth=tuple(_growth(both)),
    )


def _format(log: RunLog) -> str:
    return f"{short_name(log.format)} on {log.device_type}"


def _growth(both: Alignment) -> Iterator[Growth]:
    for pair, one, other in both.matched:
        if one.size:
            errors = one.error / one.size, other.error / (other.size or one.size)
            yield Growth(one.place.module, one.op, *errors, pair.apart)


def _difference(both: Alignment, found: Finding) -> Difference:
    pair = both.pairs[found.number]
    one = None if pair.a is None else both.a.records[pair.a]
    other = None if pair.b is None else both.b.records[pair.b]
    if one is None or other is None:
        one, other = _beside(both, found.number, one, other)
    record = both.record(pair)
    return Difference(
        kind=found.kind,
        module=record.place.module,
        module_type=record.place.module_type,
        call=record.place.call,
        op=other.op if other else record.op,
        op_a=one.op if one else None,
        op_b=other.op if other else None,
        dtype_a=one.dtype if one else None,
        dtype_b=other.dtype if other else None,
        size=found.size,
        predicted=found.predicted,
        reason=_reason(both, found, one, other),
    )


def _beside(
    both: Alignment, number: int, one: OpRecord | None, other: OpRecord | None
) -> tuple[OpRecord | None, OpRecord | None]:
    """With an op that only one run has, the one that the other run has in its place."""
    next_number = number + 1
    if next_number < len(both.pairs):
        beside = both.pairs[next_number]
        if one is None and other is not None and beside.b is None and beside.a is not None:
            return both.a.records[beside.a], other
        if other is None and one is not None and beside.a is None and beside.b is not None:
            return one, both.b.records[beside.b]
    return one, other


def _reason(both: Alignment, found: Finding, one: OpRecord | None, other: OpRecord | None) -> str:
    if found.kind == "precision":
        in_run = f"{found.in_run} alone" if one and other else found.in_run
        return (
            f"On the inputs that it got there, the op's result in {in_run} is off by "
            f"{found.size:.2g}, where its formats explain {found.predicted:.2g}: it computes in a "
            "narrower format than the runs are in, or a cast to a wider one is missing."
        )
    if found.kind == "order":
        return (
            "In exact arithmetic the result is the same; the sum is taken in another order, and "
            "rounds otherwise."
        )
    if found.kind == "stability":
        return (
            f"In exact arithmetic the two are the same, but {found.in_run} has lost far more "
            "digits on the way here, to a cancellation or a format before it."
        )
    return _function_reason(both, one, other)


def _function_reason(both: Alignment, one: OpRecord | None, other: OpRecord | None) -> str:
    if one is None or other is None:
        run, record = ("A", one) if one else ("B", other)
        assert record is not None
        return f"Only {run} has this op, and its result in fp64 is none of the other's."
    said = "In fp64, without rounding, the two ops differ"
    changed = [name for name in {*one.leaves, *other.leaves} if _is_another(both, name)]
    if changed:
        return f"{said}: {sorted(changed)[0]!r} has other values in B."
    if one.op != other.op:
        return f"{said}: A calls {one.op} where B calls {other.op}."
    if one.settings != other.settings:
        return f"{said}: A calls it with {_listed(one)}, B with {_listed(other)}."
    return f"{said}: they are given different inputs."


def _is_another(both: Alignment, name: str) -> bool:
    ours, theirs = both.a.leaves.get(name), both.b.leaves.get(name)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return (ours is None) != (theirs is None)
    theirs = theirs.to(ours.device)
    wide, narrow = sorted((ours, theirs), key=lambda t: -t.dtype.itemsize)
    return not torch.equal(wide.to(narrow.dtype), narrow)


def _listed(record: OpRecord) -> str:
    return "(" + ", ".join(map(str, record.settings)) + ")"

"""Which differences of two aligned runs rounding does not explain; the first is the finding.

Six kinds, each found without regard to what came before, so that an accumulated error neither
hides one nor makes one:

- ``function``: the two ops return different results in exact arithmetic, and so do the runs.
- ``nonfinite``: one run has an inf or a NaN where fp64 has numbers, as when fp16 overflows.
- ``precision``: one op rounds more than its formats predict, on the inputs that it really got.
- ``order``: the same result in exact arithmetic, from sums that are taken in another order.
- ``stability``: the same too, but one run has lost far more digits on the way there.
- ``merged``: 16 bits make positions or counts equal that differ in the other run. Rounding explains
  that, so it is looked for where there is nothing of the other kinds.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from amp_lab.difference.alignment import Alignment
from amp_lab.difference.result import Difference, Jump
from amp_lab.difference.rounding import unit_roundoff
from amp_lab.difference.run_log import OpRecord, Place, RunLog, same_values
from amp_lab.remedies import remedy

# What a sum is taken apart into, and what only changes the order of its terms.
_SUMS = frozenset(("sum", "add", "add_", "sub", "sub_", "mean", "cumsum", "rsub", "div"))
_SUMS_AND_ORDERS = _SUMS | {
    "flip", "roll", "cat", "stack", "index", "index_select", "gather", "sort", "zeros",
    "zeros_like", "new_zeros", "select", "fill_", "zero_",
}  # fmt: skip
_MORE_THAN_THE_OTHER = 4.0  # an op of the two rounds: both may be an unstable kernel
_DIGITS_LOST = 64.0

_MERGED = remedy(
    "diff.merged",
    "16 bits make whole numbers or evenly spaced values, such as positions, equal in one run",
    "In {run}, an input of this op has lost values: {op.merged}. If they are positions or counts, "
    "compute with them in fp32: do not cast them, and put the ops that use them in "
    "with torch.autocast({op.log.device_type!r}, enabled=False).",
)
_REASONS = {
    "nonfinite": "The op's result in {run} has {op.nonfinite}.",
    "precision": "On the inputs that it got there, the op's result in {run} is off by {size:.2g}, "
    "where its formats explain {predicted:.2g}: it computes in a narrower format than the runs are "
    "in, or a cast to a wider one is missing.",
    "order": "In exact arithmetic the result is the same; the sum is taken in another order, and "
    "rounds otherwise.",
    "stability": "In exact arithmetic the two are the same, but {run} has lost far more digits on "
    "the way here, to a cancellation or a format before it.",
    "merged": _MERGED.text,
}


class _Finding(NamedTuple):
    op: OpRecord
    kind: str
    size: float
    predicted: float


def first_finding(both: Alignment) -> Difference | None:
    """The earliest of all kinds; at the same op, in the order of the kinds above."""
    kinds = [_functions(both), _precisions(both), _orders(both), _stabilities(both)]
    found = [finding for finding in (next(kind, None) for kind in kinds) if finding]
    numbers = {record: i for i, pair in enumerate(both.pairs) for record in pair.records}
    first = min(found, key=lambda finding: numbers[finding.op], default=None)
    first = first or next(_merges(both), None)
    return _difference(both, first, numbers[first.op]) if first else None


def _functions(both: Alignment) -> Iterator[_Finding]:
    """Ops whose exact results differ, on a way to a result of the run that differs as well."""
    reach = _reaching(both, {record for pair in both.pairs if pair.same for record in pair.records})
    for pair in both.pairs:
        if pair.last in reach and not pair.last.is_neutral:
            noise = max(record.noise for record in pair.records)
            yield _Finding(pair.last, "function", pair.apart, noise)


def _reaching(both: Alignment, stops: Iterable[OpRecord] = ()) -> set[OpRecord]:
    """The records from which a way leads to a run's results that passes none of the `stops`."""
    found: set[OpRecord] = set()
    waiting = [*both.a.sinks, *both.b.sinks]
    while waiting:
        record = waiting.pop()
        if record not in found and record not in stops:
            found.add(record)
            waiting += record.producers
    return found


def _precisions(both: Alignment) -> Iterator[_Finding]:
    """Ops that round more than the format they are expected in, and more than their partner."""
    reach = _reaching(both)
    for pair in both.pairs:
        for record in pair.records:
            if record not in reach:
                continue
            roundoff, least = unit_roundoff(record.log.format), 0.0
            if pair.is_matched:
                least = min(one.roundoff for one in pair.records)
                if both.same_kind:
                    # What one run computes in fp32, the other is expected to as well.
                    roundoff = min(unit_roundoff(one.dtype) for one in pair.records)
            allowed = roundoff + record.allowed
            if record.roundoff > max(allowed, _MORE_THAN_THE_OTHER * least):
                op = _blamed(record)
                kind = "nonfinite" if op.nonfinite else "precision"
                yield _Finding(op, kind, max(record.roundoff, op.roundoff), allowed)


def _blamed(record: OpRecord) -> OpRecord:
    """Of a cast that is finite, the op that then computes in the narrower format, if one does."""
    for user in record.log.records if record.is_neutral and not record.nonfinite else ():
        if record in user.producers and user.dtype == record.dtype and not user.is_neutral:
            return user
    return record


def _orders(both: Alignment) -> Iterator[_Finding]:
    """Sums that are taken in another order, of which nothing is left but the rounding."""
    for numbers in _parted_by_place(both).values():
        ops = [both.pairs[number].last for number in numbers]
        # The next that is the same again: did the rounding change?
        after = next(filter(lambda pair: pair.agrees, both.pairs[numbers[-1] :]), None)
        if after is None or not _SUMS_AND_ORDERS.issuperset(op.op for op in ops):
            continue
        one, other = after.records
        if one.error != other.error:
            first = next((op for op in ops if op.op in _SUMS), other)
            yield _Finding(first, "order", max(one.error, other.error), one.allowed)


def _parted_by_place(both: Alignment) -> dict[Place, list[int]]:
    """The numbers of pairs that do not agree, where the runs are otherwise expected to."""
    found: dict[Place, list[int]] = defaultdict(list)
    for number, pair in enumerate(both.pairs if both.same_batch and both.same_kind else ()):
        if not pair.agrees and not pair.last.is_neutral:
            found[pair.last.place].append(number)
    return found


def _stabilities(both: Alignment) -> Iterator[_Finding]:
    """Results that are the same in exact arithmetic, one of which has few right digits or none."""
    u = unit_roundoff(both.a.format)
    for pair in both.pairs:
        if not pair.agrees or pair.last.is_neutral:
            continue
        one, other = pair.records
        floor = u + one.allowed
        small, large = sorted((one.error, other.error))
        worse = one if one.error > other.error else other
        if worse.nonfinite and small < large:
            yield _Finding(worse, "nonfinite", large, floor)
        elif both.same_kind and large > _DIGITS_LOST * (small + floor):
            lost = _where_lost(worse, _DIGITS_LOST * floor)
            if lost.roundoff <= u + lost.allowed:  # else that is a matter of precision
                yield _Finding(lost, "stability", lost.error, floor)


def _merges(both: Alignment) -> Iterator[_Finding]:
    """Ops of which one run alone has inputs that differ in fp64 and are equal there."""
    reach = _reaching(both)
    for pair in both.pairs:
        merging = [record for record in pair.records if record.merged]
        if pair.is_matched and len(merging) == 2:
            continue
        for record in merging:
            if record in reach and not record.is_neutral:
                predicted = unit_roundoff(record.log.format) + record.allowed
                yield _Finding(record, "merged", record.error, predicted)


def _where_lost(record: OpRecord, limit: float) -> OpRecord:
    """The first op on the way to this one whose result is off by more than the limit, in all."""
    while worse := [one for one in record.producers if one.error > limit]:
        record = worse[0]
    return record


def steepest(log: RunLog) -> Jump | None:
    """The op at which the error of a run grows most; None if it grows nowhere.

    Only what is left of an error at the end counts: an op that is far off, and whose result is
    added to a much larger one, does no harm.
    """
    floor = unit_roundoff(log.format) or unit_roundoff(torch.float32)
    left = dict.fromkeys(log.records, 0.0)
    found, most = None, 1.0
    for record in reversed(log.records):  # those that use a result come before it
        if record in log.sinks:
            left[record] = record.error
        for producer in record.producers:
            passed_on = min(left[record], producer.error)
            left[producer] = max(left[producer], passed_on)
        before = max((producer.error for producer in record.producers), default=0.0)
        factor = left[record] / max(before, floor)
        if factor > most:
            found, most = (record, before), factor
    if found is None:
        return None
    record, before = found
    place = record.place
    return Jump(log.name, place.module, place.module_type, record.op, before, record.error)


def _difference(both: Alignment, found: _Finding, number: int) -> Difference:
    pair, *more = both.pairs[number : number + 2]
    beside = more[0].records if more and not (pair.is_matched or more[0].is_matched) else ()
    # With an op that only one run has, the one that the other run has in its place.
    by_run = {record.log.name: record for record in (*beside, *pair.records)}
    one, other = by_run.get("A"), by_run.get("B")
    reason = _REASONS.get(found.kind, "").format(run=found.op.log.name, **found._asdict())
    return Difference(
        kind=found.kind,
        **vars(pair.last.place),
        op=(other or pair.last).op,
        op_a=getattr(one, "op", None),
        op_b=getattr(other, "op", None),
        dtype_a=getattr(one, "dtype", None),
        dtype_b=getattr(other, "dtype", None),
        size=found.size,
        predicted=found.predicted,
        reason=reason or _function_reason(both, one, other),
    )


def _function_reason(both: Alignment, one: OpRecord | None, other: OpRecord | None) -> str:
    if one is None or other is None:
        run = "A" if one else "B"
        return f"Only {run} has this op, and its result in fp64 is none of the other's."
    said = "In fp64, without rounding, the two ops differ"
    for name in sorted({*one.leaves, *other.leaves}):
        if not same_values(both.a.leaves.get(name), both.b.leaves.get(name)):
            return f"{said}: {name!r} has other values in B."
    if one.op != other.op:
        return f"{said}: A calls {one.op} where B calls {other.op}."
    if one.settings != other.settings:
        a, b = (", ".join(map(str, record.settings)) for record in (one, other))
        return f"{said}: A calls it with ({a}), B with ({b})."
    return f"{said}: they are given different inputs."

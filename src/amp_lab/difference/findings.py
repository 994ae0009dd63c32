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
from collections.abc import Iterator, Set
from typing import NamedTuple

import torch

from amp_lab.core.remedies import remedy
from amp_lab.difference.alignment import Alignment, Pair
from amp_lab.difference.result import Difference, Jump
from amp_lab.difference.rounding import unit_roundoff
from amp_lab.difference.run_log import OpRecord, Place, RunLog, same_values

# What a sum is taken apart into, and what only changes the order of its terms.
_SUMS = frozenset(("sum", "add", "add_", "sub", "sub_", "mean", "cumsum", "rsub", "div"))
_SUMS_AND_ORDERS = _SUMS | {
    "flip", "roll", "cat", "stack", "index", "index_select", "gather", "sort", "zeros",
    "zeros_like", "new_zeros", "select", "fill_", "zero_",
}  # fmt: skip
# An op is at fault if it rounds so many times more than its partner; where both round alike, the
# kernel may be unstable in both runs.
_TIMES_THE_PARTNER = 4.0
_TIMES_THE_BETTER = 64.0  # the error of a result that has lost digits

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


def first_finding(alignment: Alignment) -> Difference | None:
    """The earliest of all kinds; at the same op, in the order of the kinds above."""
    found = []
    for search in (_find_function, _find_precision, _find_order, _find_stability):
        finding = next(search(alignment), None)
        if finding is not None:
            found.append(finding)
    numbers = _pair_numbers(alignment)
    if found:
        first = min(found, key=lambda finding: numbers[finding.op])
    else:
        first = next(_find_merged(alignment), None)
    if first is None:
        return None
    return _difference(alignment, first, numbers[first.op])


def _pair_numbers(alignment: Alignment) -> dict[OpRecord, int]:
    numbers = {}
    for number, pair in enumerate(alignment.pairs):
        numbers.update(dict.fromkeys(pair.records, number))
    return numbers


def _find_function(alignment: Alignment) -> Iterator[_Finding]:
    """Ops whose exact results differ, on a way to a result of the run that differs as well."""
    agreeing = set()
    for pair in alignment.pairs:
        if pair.same:
            agreeing.update(pair.records)
    relevant = _used_by_results(alignment, stops=agreeing)
    for pair in alignment.pairs:
        op = pair.last
        if op in relevant and not op.is_neutral:
            noise = max(record.noise for record in pair.records)
            yield _Finding(op, "function", pair.apart, noise)


def _used_by_results(alignment: Alignment, stops: Set[OpRecord] = frozenset()) -> set[OpRecord]:
    """The records that a run's results depend on by a path that has none of the `stops`."""
    found = set()
    waiting = [*alignment.a.sinks, *alignment.b.sinks]
    while waiting:
        record = waiting.pop()
        if record not in found and record not in stops:
            found.add(record)
            waiting += record.producers
    return found


def _find_precision(alignment: Alignment) -> Iterator[_Finding]:
    """Ops that round more than the format they are expected in, and more than their partner."""
    relevant = _used_by_results(alignment)
    for pair in alignment.pairs:
        for record in pair.records:
            if record not in relevant:
                continue
            predicted = _expected_roundoff(alignment, pair, record) + record.allowed
            limit = max(predicted, _TIMES_THE_PARTNER * _smaller_roundoff(pair))
            if record.roundoff > limit:
                yield _precision_finding(record, predicted)


def _precision_finding(record: OpRecord, predicted: float) -> _Finding:
    """The finding for a record that rounds too much, at the op that is to blame for it."""
    op = _op_to_blame(record)
    size = max(record.roundoff, op.roundoff)
    if op.nonfinite:
        return _Finding(op, "nonfinite", size, predicted)
    return _Finding(op, "precision", size, predicted)


def _expected_roundoff(alignment: Alignment, pair: Pair, record: OpRecord) -> float:
    """The unit roundoff of the format that an op is expected to compute in."""
    if pair.is_matched and alignment.same_kind:
        # What one run computes in fp32, the other is expected to as well.
        return min(unit_roundoff(one.dtype) for one in pair.records)
    return unit_roundoff(record.log.format)


def _smaller_roundoff(pair: Pair) -> float:
    """What the op that rounds less is off by; 0 of an op that one run alone has."""
    if not pair.is_matched:
        return 0.0
    return min(record.roundoff for record in pair.records)


def _op_to_blame(record: OpRecord) -> OpRecord:
    """The op itself; or, for a cast with a finite result, the op that computes in its format."""
    is_finite_cast = record.is_neutral and not record.nonfinite
    if not is_finite_cast:
        return record
    for consumer in record.log.records:
        is_consumer = record in consumer.producers and not consumer.is_neutral
        if is_consumer and consumer.dtype == record.dtype:
            return consumer
    return record


def _find_order(alignment: Alignment) -> Iterator[_Finding]:
    """Sums that are taken in another order, of which nothing is left but the rounding."""
    for numbers in _disagreeing_by_place(alignment).values():
        ops = [alignment.pairs[number].last for number in numbers]
        after = _next_agreeing(alignment, numbers[-1])
        if after is None or not _SUMS_AND_ORDERS.issuperset(op.op for op in ops):
            continue
        one, other = after.records
        if one.error != other.error:  # the rounding changed
            op = next((op for op in ops if op.op in _SUMS), other)
            yield _Finding(op, "order", max(one.error, other.error), one.allowed)


def _disagreeing_by_place(alignment: Alignment) -> dict[Place, list[int]]:
    """The numbers of pairs that do not agree, where the runs are otherwise expected to."""
    found = defaultdict(list)
    if not alignment.same_batch or not alignment.same_kind:
        return found
    for number, pair in enumerate(alignment.pairs):
        if not pair.agrees and not pair.last.is_neutral:
            found[pair.last.place].append(number)
    return found


def _next_agreeing(alignment: Alignment, start: int) -> Pair | None:
    for pair in alignment.pairs[start:]:
        if pair.agrees:
            return pair
    return None


def _find_stability(alignment: Alignment) -> Iterator[_Finding]:
    """Results that are the same in exact arithmetic, one of which has few right digits or none."""
    u = unit_roundoff(alignment.a.format)
    for pair in alignment.pairs:
        if not pair.agrees or pair.last.is_neutral:
            continue
        floor = u + pair.records[0].allowed
        better, worse = _by_error(pair)
        if worse.nonfinite and better.error < worse.error:
            yield _Finding(worse, "nonfinite", worse.error, floor)
            continue
        limit = _TIMES_THE_BETTER * (better.error + floor)
        if alignment.same_kind and worse.error > limit:
            lost = _where_lost(worse, _TIMES_THE_BETTER * floor)
            if lost.roundoff <= u + lost.allowed:  # a larger one is a finding of `_find_precision`
                yield _Finding(lost, "stability", lost.error, floor)


def _by_error(pair: Pair) -> tuple[OpRecord, OpRecord]:
    """The two ops of a pair, the one with the larger error last."""
    one, other = pair.records
    if one.error > other.error:
        return other, one
    return one, other


def _find_merged(alignment: Alignment) -> Iterator[_Finding]:
    """Ops of which one run alone has inputs that differ in fp64 and are equal there."""
    relevant = _used_by_results(alignment)
    for pair in alignment.pairs:
        merging = [record for record in pair.records if record.merged]
        if len(merging) == 2:  # both runs have them
            continue
        for record in merging:
            if record in relevant and not record.is_neutral:
                predicted = unit_roundoff(record.log.format) + record.allowed
                yield _Finding(record, "merged", record.error, predicted)


def _where_lost(record: OpRecord, limit: float) -> OpRecord:
    """The first op on the way to this one whose result is off by more than the limit, in all."""
    while True:
        sources = [producer for producer in record.producers if producer.error > limit]
        if not sources:
            return record
        record = sources[0]


def steepest(log: RunLog) -> Jump | None:
    """The op at which the error of a run grows most; None if it grows nowhere.

    Only what is left of an error at the end counts: an op that is far off, and whose result is
    added to a much larger one, does no harm.
    """
    floor = unit_roundoff(log.format) or unit_roundoff(torch.float32)
    left = dict.fromkeys(log.records, 0.0)
    found = None
    largest_factor = 1.0
    for record in reversed(log.records):  # those that use a result come before it
        if record in log.sinks:
            left[record] = record.error
        for producer in record.producers:
            passed_on = min(left[record], producer.error)
            left[producer] = max(left[producer], passed_on)
        factor = left[record] / max(_input_error(record), floor)
        if factor > largest_factor:
            largest_factor = factor
            found = record
    if found is None:
        return None
    place = found.place
    before = _input_error(found)
    return Jump(log.name, place.module, place.module_type, found.op, before, found.error)


def _input_error(record: OpRecord) -> float:
    """The error of the input that is off most."""
    return max((producer.error for producer in record.producers), default=0.0)


def _difference(alignment: Alignment, found: _Finding, number: int) -> Difference:
    last = alignment.pairs[number].last
    by_run = _records_by_run(alignment, number)
    one = by_run.get("A")
    other = by_run.get("B")
    return Difference(
        kind=found.kind,
        module=last.place.module,
        module_type=last.place.module_type,
        call=last.place.call,
        op=(other or last).op,
        op_a=getattr(one, "op", None),
        op_b=getattr(other, "op", None),
        dtype_a=getattr(one, "dtype", None),
        dtype_b=getattr(other, "dtype", None),
        size=found.size,
        predicted=found.predicted,
        reason=_reason(alignment, found, one, other),
    )


def _records_by_run(alignment: Alignment, number: int) -> dict[str, OpRecord]:
    """The ops of a pair by run; where one run alone has it, with what the other has instead."""
    pair, *following = alignment.pairs[number : number + 2]
    records = pair.records
    if following and not pair.is_matched and not following[0].is_matched:
        records = (*following[0].records, *records)
    return {record.log.name: record for record in records}


def _reason(
    alignment: Alignment, found: _Finding, one: OpRecord | None, other: OpRecord | None
) -> str:
    if found.kind == "function":
        return _function_reason(alignment, one, other)
    return _REASONS[found.kind].format(run=found.op.log.name, **found._asdict())


def _function_reason(alignment: Alignment, one: OpRecord | None, other: OpRecord | None) -> str:
    if one is None or other is None:
        run = "B" if one is None else "A"
        return f"Only {run} has this op, and its result in fp64 is none of the other's."
    start = "In fp64, without rounding, the two ops differ"
    leaves_a = alignment.a.leaves
    leaves_b = alignment.b.leaves
    for name in sorted({*one.leaves, *other.leaves}):
        if not same_values(leaves_a.get(name), leaves_b.get(name)):
            return f"{start}: {name!r} has other values in B."
    if one.op != other.op:
        return f"{start}: A calls {one.op} where B calls {other.op}."
    if one.settings != other.settings:
        settings_a = ", ".join(map(str, one.settings))
        settings_b = ", ".join(map(str, other.settings))
        return f"{start}: A calls it with ({settings_a}), B with ({settings_b})."
    return f"{start}: they are given different inputs."

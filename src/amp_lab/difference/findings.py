"""Find the first difference of two aligned runs that rounding does not explain.

There are six kinds of findings. Each op is judged separately, so errors from earlier ops neither
hide a finding nor cause one:

- ``function``: the two ops return different results in exact arithmetic, and so do the runs.
- ``nonfinite``: one run has an inf or a NaN where fp64 has numbers, as when fp16 overflows.
- ``precision``: one op rounds more than its formats predict, on the inputs that it really got.
- ``order``: the same result in exact arithmetic, from sums that are taken in another order.
- ``stability``: the same result in exact arithmetic, but one run has lost far more digits.
- ``merged``: positions or counts that differ in one run are equal in the other, in 16 bits.
  Rounding explains that, so it is reported only if there is no finding of another kind.
"""

from collections import defaultdict
from collections.abc import Iterator, Set
from typing import NamedTuple

from amp_lab.core.remedies import remedy
from amp_lab.difference.alignment import Alignment, Pair
from amp_lab.difference.records import CheckedOp, RunLog
from amp_lab.difference.result import Difference, Jump
from amp_lab.difference.rounding import unit_roundoff
from amp_lab.difference.run_log import have_same_values

# Ops that add up terms, and ops that only split terms or change their order.
_SUMS = frozenset(("sum", "add", "add_", "sub", "sub_", "mean", "cumsum", "rsub", "div"))
_SUMS_AND_ORDERS = _SUMS | {
    "flip", "roll", "cat", "stack", "index", "index_select", "gather", "sort", "zeros",
    "zeros_like", "new_zeros", "select", "fill_", "zero_",
}  # fmt: skip
# An op is at fault only if it rounds this many times more than the same op of the other run. If
# both round alike, the kernel may be unstable in both runs.
_TIMES_THE_SMALLER_ROUNDOFF = 4.0
# A run has lost digits if its error is this many times that of the other run: 64 is 6 bits.
_TIMES_THE_SMALLER_ERROR = 64.0

_MERGED = remedy(
    "diff.merged",
    "whole numbers or evenly spaced values, such as positions, become equal in one run in 16 bits",
    "In {run}, an input of this op has lost values: {op.merged}. If these are positions or "
    "counts, keep them in fp32: do not cast them, and run the ops that use them under "
    "torch.autocast({op.log.device_type!r}, enabled=False).",
    failure="AMP0030",
)
_REASONS = {
    "nonfinite": "In {run}, the result of this op has {op.nonfinite}.",
    "precision": (
        "In {run}, the result of this op has an error of {size:.2g}, but the precision of the "
        "runs explains only {predicted:.2g}. The op computes in a narrower format than the rest "
        "of the run, or a cast to a wider format is missing, or its kernel is inaccurate."
    ),
    "order": (
        "In exact arithmetic, both results are the same. The runs add the terms in another "
        "order, so the sums round differently."
    ),
    "stability": (
        "In exact arithmetic, both results are the same, but {run} has lost far more digits. "
        "A cancellation or a low-precision format before this op can cause this."
    ),
    "merged": _MERGED.text,
}


class _Finding(NamedTuple):
    """An op that rounding does not explain. The templates in `_REASONS` use these names."""

    op: CheckedOp
    kind: str  # one of the six kinds in the docstring of this module
    size: float  # of the difference or error, relative to the result
    predicted: float  # the largest size that rounding explains


def first_finding(alignment: Alignment) -> Difference | None:
    """The earliest finding of all kinds; of two at the same op, the one whose search runs first.

    A finding of kind `merged` is returned only if there is no other. None if there is none at all.
    """
    findings = []
    for search in (_find_function, _find_precision, _find_order, _find_stability):
        first_of_kind = next(search(alignment), None)
        if first_of_kind is not None:
            findings.append(first_of_kind)
    positions: dict[CheckedOp, int] = {}  # for each op, the index of its pair
    for position, pair in enumerate(alignment.pairs):
        for record in pair.records:
            positions[record] = position
    if findings:
        first = min(findings, key=lambda finding: positions[finding.op])
    else:
        first = next(_find_merged(alignment), None)
    if first is None:
        return None
    return _difference(alignment, first, positions[first.op])


def _find_function(alignment: Alignment) -> Iterator[_Finding]:
    """Find ops whose exact results differ, if the difference reaches a result of the run."""
    agreeing = set()
    for pair in alignment.pairs:
        if pair.has_same_result:
            agreeing.update(pair.records)
    # Where an op has the same result in both runs, the differences before it have vanished.
    relevant = _used_by_results(alignment, stops=agreeing)
    for pair in alignment.pairs:
        op = pair.b_or_a
        if op in relevant and not op.is_cast_or_copy:
            noise = max(record.noise for record in pair.records)
            yield _Finding(op, "function", size=pair.exact_difference, predicted=noise)


def _used_by_results(alignment: Alignment, stops: Set[CheckedOp] = frozenset()) -> set[CheckedOp]:
    """The ops that the results of a run depend on, by at least one path without the ops in `stops`.

    The ops in `stops` are left out too. Follows the producers of each op from the last ops back.
    """
    used = set()
    to_visit = [*alignment.a.result_ops, *alignment.b.result_ops]
    while to_visit:
        record = to_visit.pop()
        if record not in used and record not in stops:
            used.add(record)
            to_visit += record.producers
    return used


def _find_precision(alignment: Alignment) -> Iterator[_Finding]:
    """Find ops that round more than their format explains, and more than in the other run."""
    # An inaccurate op whose result is not used does no harm.
    relevant = _used_by_results(alignment)
    for pair in alignment.pairs:
        for record in pair.records:
            if record not in relevant:
                continue
            predicted = _expected_roundoff(alignment, pair, record) + record.allowed
            limit = predicted
            if pair.is_matched:
                smaller_roundoff = min(paired.roundoff for paired in pair.records)
                limit = max(predicted, _TIMES_THE_SMALLER_ROUNDOFF * smaller_roundoff)
            if record.roundoff > limit:
                op = _op_to_blame(record)
                kind = "nonfinite" if op.nonfinite else "precision"
                yield _Finding(op, kind, max(record.roundoff, op.roundoff), predicted)


def _expected_roundoff(alignment: Alignment, pair: Pair, record: CheckedOp) -> float:
    """The unit roundoff of the format in which `record`, an op of the pair, should compute."""
    if pair.is_matched and alignment.same_precision:
        # If one run computes this op in fp32, the other is expected to do so, too.
        return min(unit_roundoff(paired.dtype) for paired in pair.records)
    return unit_roundoff(record.log.format)


def _op_to_blame(record: CheckedOp) -> CheckedOp:
    """The op itself; for a cast with a finite result, the op that computes in the cast's format.

    Such a cast is only a consequence: the op that gets its result was set to compute in the
    narrower format.
    """
    is_finite_cast = record.is_cast_or_copy and not record.nonfinite
    if not is_finite_cast:
        return record
    for consumer in record.log.records:
        is_consumer = record in consumer.producers and not consumer.is_cast_or_copy
        if is_consumer and consumer.dtype == record.dtype:
            return consumer
    return record


def _find_order(alignment: Alignment) -> Iterator[_Finding]:
    """Find sums whose terms are added in another order: equal in exact arithmetic, not rounded.

    The signs of this, in one call of a module: all ops that differ between the runs are sums or
    reorder terms. At the next op that both runs have, the exact results agree, and the rounding
    errors do not. For example, A computes (x + y) + z and B computes x + (y + z): the inner sums
    differ, and the outer ones agree in exact arithmetic.
    """
    # With another batch size or precision, rounding errors differ anyway.
    if not alignment.same_batch or not alignment.same_precision:
        return
    disagreeing = defaultdict(list)  # positions of pairs, by call of a module
    for position, pair in enumerate(alignment.pairs):
        if not pair.agrees and not pair.b_or_a.is_cast_or_copy:
            disagreeing[pair.b_or_a.caller].append(position)
    for positions in disagreeing.values():
        differing_ops = [alignment.pairs[position].b_or_a for position in positions]
        if any(record.op not in _SUMS_AND_ORDERS for record in differing_ops):
            continue
        later_pairs = alignment.pairs[positions[-1] + 1 :]
        agreeing = [pair for pair in later_pairs if pair.agrees]
        if not agreeing:
            continue
        record_a, record_b = agreeing[0].records
        if record_a.error == record_b.error:  # the order has not changed the rounding
            continue
        sums = [record for record in differing_ops if record.op in _SUMS]
        op = sums[0] if sums else record_b
        size = max(record_a.error, record_b.error)
        yield _Finding(op, "order", size, predicted=record_a.allowed)


def _find_stability(alignment: Alignment) -> Iterator[_Finding]:
    """Find ops that agree in exact arithmetic, but one run has lost far more digits by then."""
    # Of A's format. If B has another, it only counts in the `predicted` of `nonfinite`.
    format_roundoff = unit_roundoff(alignment.a.format)
    for pair in alignment.pairs:
        if not pair.agrees or pair.b_or_a.is_cast_or_copy:
            continue
        error_of_one_op = format_roundoff + pair.records[0].allowed
        better, worse = sorted(pair.records, key=lambda record: record.error)
        # If both are inf or NaN, both errors are inf, and the runs do not differ here.
        if worse.nonfinite and better.error < worse.error:
            yield _Finding(worse, "nonfinite", worse.error, predicted=error_of_one_op)
            continue
        limit = _TIMES_THE_SMALLER_ERROR * (better.error + error_of_one_op)
        if alignment.same_precision and worse.error > limit:
            origin = _origin_of_error(worse, limit=_TIMES_THE_SMALLER_ERROR * error_of_one_op)
            # An op that by itself rounds more than its format explains belongs to
            # `_find_precision`.
            if origin.roundoff <= format_roundoff + origin.allowed:
                yield _Finding(origin, "stability", origin.error, predicted=error_of_one_op)


def _find_merged(alignment: Alignment) -> Iterator[_Finding]:
    """Find ops that in only one run get an input with merged values.

    These are values that differ in fp64 and are equal in 16 bits: see `merged_values`.
    """
    relevant = _used_by_results(alignment)
    for pair in alignment.pairs:
        with_merged_input = [record for record in pair.records if record.merged]
        if len(with_merged_input) == 2:  # no difference between the runs
            continue
        for record in with_merged_input:
            if record in relevant and not record.is_cast_or_copy:
                predicted = unit_roundoff(record.log.format) + record.allowed
                yield _Finding(record, "merged", record.error, predicted)


def _origin_of_error(record: CheckedOp, limit: float) -> CheckedOp:
    """Go back from an op to its producers, as long as their error exceeds the limit.

    Returns the op at which this ends: its error exceeds the limit, and those of its inputs do not.
    """
    while True:
        inaccurate = [producer for producer in record.producers if producer.error > limit]
        if not inaccurate:
            return record
        record = inaccurate[0]


def largest_jump(log: RunLog) -> Jump | None:
    """The op at which the error of a run grows by the largest factor; None if it never grows.

    Only the part of an error that reaches the end counts: an inaccurate result that is added to a
    much larger one does no harm.
    """
    # Inputs may be exact. To divide by their error, it counts as one rounding at least.
    one_rounding = unit_roundoff(log.format)
    errors_at_end = _errors_at_end(log)
    jump_op = None
    largest_factor = 1.0
    for record in reversed(log.records):  # of ops with the same factor, the last one counts
        factor = errors_at_end[record] / max(_input_error(record), one_rounding)
        if factor > largest_factor:
            largest_factor = factor
            jump_op = record
    if jump_op is None:
        return None
    return Jump(
        run=log.name,
        module=jump_op.caller.module,
        module_type=jump_op.caller.module_type,
        op=jump_op.op,
        before=_input_error(jump_op),
        after=jump_op.error,
    )


def _errors_at_end(log: RunLog) -> dict[CheckedOp, float]:
    """For each op of a run, the part of its error that reaches the results of the run."""
    errors_at_end = dict.fromkeys(log.records, 0.0)
    for record in reversed(log.records):  # so that an op comes after all ops that use its result
        if record in log.result_ops:
            errors_at_end[record] = record.error
        for producer in record.producers:
            passed_on = min(errors_at_end[record], producer.error)
            errors_at_end[producer] = max(errors_at_end[producer], passed_on)
    return errors_at_end


def _input_error(record: CheckedOp) -> float:
    """The largest error among the inputs of an op; 0 if no op produced them."""
    return max((producer.error for producer in record.producers), default=0.0)


def _difference(alignment: Alignment, finding: _Finding, position: int) -> Difference:
    """The `Difference` for a finding; `position` is the index of its pair in `alignment.pairs`."""
    op = alignment.pairs[position].b_or_a
    records = _records_by_run(alignment, position)
    record_a = records.get("A")
    record_b = records.get("B")
    if finding.kind == "function":
        reason = _function_reason(alignment, record_a, record_b)
    else:
        reason = _REASONS[finding.kind].format(run=finding.op.log.name, **finding._asdict())
    # If a run has no such op, its record is None, and getattr then gives None for op and dtype.
    return Difference(
        kind=finding.kind,
        module=op.caller.module,
        module_type=op.caller.module_type,
        call=op.caller.call,
        op=(record_b or op).op,
        op_a=getattr(record_a, "op", None),
        op_b=getattr(record_b, "op", None),
        dtype_a=getattr(record_a, "dtype", None),
        dtype_b=getattr(record_b, "dtype", None),
        size=finding.size,
        predicted=finding.predicted,
        reason=reason,
    )


def _records_by_run(alignment: Alignment, position: int) -> dict[str, CheckedOp]:
    """The ops of a pair by the name of their run, "A" or "B".

    If only one run has the op, the next unmatched op counts as its replacement in the other run.
    """
    pair = alignment.pairs[position]
    records = {}
    is_last = position + 1 == len(alignment.pairs)
    if not pair.is_matched and not is_last:
        next_pair = alignment.pairs[position + 1]
        if not next_pair.is_matched:
            records = {record.log.name: record for record in next_pair.records}
    for record in pair.records:  # after the replacement, which may be an op of the same run
        records[record.log.name] = record
    return records


def _function_reason(
    alignment: Alignment, record_a: CheckedOp | None, record_b: CheckedOp | None
) -> str:
    """Say why two ops return other results in fp64: weights, ops, settings or, if none, inputs.

    A record is None if its run has no such op; the sentence then says only this.
    """
    if record_a is None or record_b is None:
        run = "B" if record_a is None else "A"
        other = "A" if run == "B" else "B"
        return f"Only {run} has this op, and no op of {other} gives the same result in fp64."
    start = "The results of the two ops do not match in fp64"
    leaves_a = alignment.a.leaves
    leaves_b = alignment.b.leaves
    # Other weights are the most likely cause, then another op, then other arguments.
    for name in sorted({*record_a.leaves, *record_b.leaves}):
        if name not in leaves_a or name not in leaves_b:
            run = "A" if name in leaves_a else "B"
            return f"{start}, because only {run} has {name!r}."
        if not have_same_values(leaves_a[name], leaves_b[name]):
            return f"{start}, because the values of {name!r} differ between A and B."
    if record_a.op != record_b.op:
        return f"{start}, because A calls {record_a.op} and B calls {record_b.op}."
    if record_a.settings != record_b.settings:
        settings_a = ", ".join(map(str, record_a.settings))
        settings_b = ", ".join(map(str, record_b.settings))
        return (
            f"{start}, because A passes the arguments ({settings_a}) and B passes ({settings_b})."
        )
    return f"{start}, because the two ops get different inputs."

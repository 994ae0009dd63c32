"""Which differences of two aligned runs rounding does not explain; the first is the finding.

Four kinds, each found without regard to what came before, so that an accumulated error neither
hides one nor makes one:

- ``function``: the two ops return different results in exact arithmetic, and so do the runs.
- ``precision``: one op rounds more than its formats predict, on the inputs that it really got.
- ``order``: the same result in exact arithmetic, from sums that are taken in another order.
- ``stability``: the same too, but one run has lost far more digits on the way there.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from amp_lab.difference.alignment import Alignment, Pair, consumers, own_ops, reaching
from amp_lab.difference.rounding import unit_roundoff
from amp_lab.difference.run_log import NEUTRAL, OpRecord, RunLog

# What a sum is taken apart into, and what only changes the order of its terms.
_SUMS = frozenset(("sum", "add", "add_", "sub", "sub_", "mean", "cumsum", "rsub", "div"))
_ORDERS = frozenset(("flip", "roll", "cat", "stack", "index", "index_select", "gather", "sort",
                     "zeros", "zeros_like", "new_zeros", "select", "fill_", "zero_"))  # fmt: skip
_MORE_THAN_THE_OTHER = 4.0  # an op of the two rounds: both may be an unstable kernel
_DIGITS_LOST = 64.0


@dataclass(frozen=True)
class Finding:
    """The number of a pair, and what is the matter there."""

    number: int
    kind: str
    size: float
    predicted: float
    in_run: str = ""  # the run that rounds more


def first_finding(both: Alignment) -> Finding | None:
    """The earliest of all kinds; at the same op, in the order of the kinds above."""
    kinds = [_functions(both), _precisions(both), _orders(both), _stabilities(both)]
    found = [finding for finding in (next(kind, None) for kind in kinds) if finding]
    return min(found, key=lambda finding: finding.number, default=None)


def _functions(both: Alignment) -> Iterator[Finding]:
    """Ops whose exact results differ, on a way to a result of the run that differs as well."""
    reach_a, reach_b = _unequal_ways(both)
    same_code = _same_code(both)
    for number, pair in enumerate(both.pairs):
        if pair.same or both.record(pair).is_neutral:
            continue
        counts = pair.b in reach_b if pair.b is not None else pair.a in reach_a
        # Of the same ops in the same order each has its partner for certain.
        paired = pair.a is not None and pair.b is not None
        if counts or (paired and both.record(pair).place in same_code):
            yield Finding(number, "function", pair.apart, _noise(both, pair))


def _unequal_ways(both: Alignment) -> tuple[set[int], set[int]]:
    same_a = {pair.a for pair in both.pairs if pair.same and pair.a is not None}
    same_b = {pair.b for pair in both.pairs if pair.same and pair.b is not None}
    return reaching(both.a, same_a), reaching(both.b, same_b)


def _same_code(both: Alignment) -> set:
    """Calls of modules that run the same ops of their own in both runs."""
    if both.sizes_differ or both.a.kind != both.b.kind:
        return set()
    ours, theirs = own_ops(both.a), own_ops(both.b)
    return {place for place, names in ours.items() if theirs.get(place) == names}


def _noise(both: Alignment, pair: Pair) -> float:
    return max(record.noise for record in _records(both, pair))


def _records(both: Alignment, pair: Pair) -> list[OpRecord]:
    found = [] if pair.a is None else [both.a.records[pair.a]]
    return found if pair.b is None else [*found, both.b.records[pair.b]]


def _precisions(both: Alignment) -> Iterator[Finding]:
    """Ops that round more than the format they are expected in, and more than their partner."""
    reach = {"A": reaching(both.a, set()), "B": reaching(both.b, set())}
    for number, pair in enumerate(both.pairs):
        records = _records(both, pair)
        for log, at in ((both.a, pair.a), (both.b, pair.b)):
            if at is None or at not in reach[log.name]:
                continue
            record = log.records[at]
            roundoff = unit_roundoff(log.format)
            if both.a.kind == both.b.kind and len(records) == 2:
                # Runs of one kind: what one computes in fp32, the other is expected to as well.
                roundoff = min(unit_roundoff(one.dtype) for one in records)
            allowed = roundoff + record.allowed
            least = min(one.roundoff for one in records) if len(records) == 2 else 0.0
            if record.roundoff > max(allowed, _MORE_THAN_THE_OTHER * least):
                finding = Finding(number, "precision", record.roundoff, allowed, log.name)
                yield _blamed(both, finding, log, at)


def _blamed(both: Alignment, finding: Finding, log: RunLog, at: int) -> Finding:
    """Of a cast, the op that then computes in the narrower format, if one does."""
    record = log.records[at]
    if not record.is_neutral:
        return finding
    index = _numbers(both, log)
    for number in consumers(log).get(at, ()):
        user = log.records[number]
        if user.op not in NEUTRAL and user.dtype == record.dtype and number in index:
            return Finding(
                index[number], "precision", max(user.roundoff, record.roundoff),
                finding.predicted, log.name,
            )  # fmt: skip
    return finding


def _orders(both: Alignment) -> Iterator[Finding]:
    """Sums that are taken in another order, of which nothing is left but the rounding."""
    if both.sizes_differ or both.a.kind != both.b.kind:
        return
    by_place: dict = {}
    for number, pair in enumerate(both.pairs):
        record = both.record(pair)
        alone = pair.a is None or pair.b is None
        if (alone or not pair.same) and not record.is_neutral:
            by_place.setdefault(record.place, []).append((number, record))
    for found in by_place.values():
        names = {record.op for _, record in found}
        if not names <= _SUMS | _ORDERS:
            continue
        for number in range(found[-1][0] + 1, len(both.pairs)):
            # The next that is the same again: did the rounding change?
            pair = both.pairs[number]
            if pair.same and pair.a is not None and pair.b is not None:
                one, other = both.a.records[pair.a], both.b.records[pair.b]
                sums = [n for n, record in found if record.op in _SUMS]
                if one.error != other.error:
                    size = max(one.error, other.error) / max(one.size, 1e-300)
                    yield Finding((sums or [number])[0], "order", size, one.allowed)
                break


def _stabilities(both: Alignment) -> Iterator[Finding]:
    """Results that are the same in exact arithmetic, one of which has far fewer right digits."""
    if both.a.kind != both.b.kind:
        return
    for number, pair in enumerate(both.pairs):
        if not pair.same or pair.a is None or pair.b is None:
            continue
        one, other = both.a.records[pair.a], both.b.records[pair.b]
        if not one.size or one.is_neutral:
            continue
        floor = (unit_roundoff(both.a.format) + one.allowed) * one.size
        small, large = sorted((one.error, other.error))
        if large > _DIGITS_LOST * (small + floor) or math.isnan(large):
            log, at = (both.a, pair.a) if one.error > other.error else (both.b, pair.b)
            at = _where_lost(log, at, _DIGITS_LOST * floor / one.size)
            number = min(number, _numbers(both, log).get(at, number))
            record = log.records[at]
            if record.roundoff > unit_roundoff(log.format) + record.allowed:
                continue  # that is a matter of precision, not of what is lost on the way
            size = record.error / (record.size or 1.0)
            yield Finding(number, "stability", size, floor / one.size, log.name)


def _where_lost(log: RunLog, at: int, limit: float) -> int:
    """The first op on the way to this one whose result is off by more than the limit, in all."""
    while True:
        records = [(number, log.records[number]) for number in log.records[at].producers]
        worse = [n for n, record in records if record.size and record.error > limit * record.size]
        if not worse:
            return at
        at = worse[0]


def _numbers(both: Alignment, log: RunLog) -> dict[int | None, int]:
    """The number of each record's pair."""
    return {(pair.a if log.name == "A" else pair.b): n for n, pair in enumerate(both.pairs)}

"""Align the logs of two runs: find for each op of one run the same op of the other."""

import difflib
import itertools
import math
from dataclasses import dataclass, field

from torch import Tensor

from amp_lab.difference.records import CheckedOp, RunLog
from amp_lab.difference.rounding import relative_error


@dataclass(frozen=True)
class Pair:
    """The same op in both runs, or an op that only one run has."""

    records: tuple[CheckedOp, ...]  # (op of A, op of B), or the only one
    exact_difference: float = math.nan  # relative, of the two results in fp64; NaN for one op
    has_same_result: bool = False
    """Of a matched pair: whether the two results are equal in fp64. Of a single op: whether any op
    of the other run has its result in fp64."""

    @property
    def b_or_a(self) -> CheckedOp:
        """The op in run B; the op in run A if B does not have the op."""
        return self.records[-1]

    @property
    def is_matched(self) -> bool:
        """Whether both runs have this op."""
        return len(self.records) == 2

    @property
    def agrees(self) -> bool:
        """Whether both runs have this op, with the same result in fp64."""
        return self.is_matched and self.has_same_result


@dataclass
class Alignment:
    """All ops of two runs as pairs, in the order in which they ran."""

    a: RunLog
    b: RunLog
    same_precision: bool  # the runs are expected to compute each op in the same format
    same_batch: bool  # the batch sizes are equal
    pairs: list[Pair] = field(default_factory=list)


def align(a: RunLog, b: RunLog) -> Alignment:
    """Align two logs, which may differ in length, with `difflib.SequenceMatcher`.

    Two ops match if they have the same name and ran in the same call of the same module. If the
    runs compute in different formats, casts and copies are left out, since only one run has them.
    """
    alignment = Alignment(
        a,
        b,
        same_precision=a.precision_settings == b.precision_settings,
        same_batch=a.batch == b.batch,
    )
    records_a = a.records
    records_b = b.records
    if not alignment.same_precision:
        records_a = _without_casts(a)
        records_b = _without_casts(b)
    keys_a = list(map(_alignment_key, records_a))
    keys_b = list(map(_alignment_key, records_b))
    # By default difflib ignores elements that are frequent in a long list, which ops often are.
    matcher = difflib.SequenceMatcher(None, keys_a, keys_b, autojunk=False)
    for tag, start_a, end_a, start_b, end_b in matcher.get_opcodes():
        stretch_a = records_a[start_a:end_a]
        stretch_b = records_b[start_b:end_b]
        if tag == "equal":
            alignment.pairs += map(_matched_pair, stretch_a, stretch_b)
            continue
        # Unmatched ops of A and B alternate, so that an op stands next to the one that replaces it.
        for record_a, record_b in itertools.zip_longest(stretch_a, stretch_b):
            if record_a is not None:
                alignment.pairs.append(Pair((record_a,), has_same_result=_has_result(b, record_a)))
            if record_b is not None:
                alignment.pairs.append(Pair((record_b,), has_same_result=_has_result(a, record_b)))
    return alignment


def _without_casts(log: RunLog) -> list[CheckedOp]:
    """The ops of a run without its casts and copies."""
    return [record for record in log.records if not record.is_cast_or_copy]


def _alignment_key(record: CheckedOp) -> tuple[str, int, str]:
    """The module, which call of it, and the op's name: equal for ops that match."""
    return record.caller.module, record.caller.call, record.op


def _matched_pair(record_a: CheckedOp, record_b: CheckedOp) -> Pair:
    """The pair of two matching ops, with the difference of their exact results."""
    records = (record_a, record_b)
    common_rows = _common_rows(record_a, record_b)
    if common_rows is None:
        # If the runs have the same batch size, other shapes mean another result. If not, a reshape
        # may have mixed the rows: such results cannot be compared, and count as equal.
        has_other_batch = record_a.log.batch != record_b.log.batch
        return Pair(records, math.inf, has_same_result=has_other_batch)
    difference = relative_error(*common_rows)
    noise = max(record_a.noise, record_b.noise)
    return Pair(records, difference, has_same_result=difference <= noise)


def _common_rows(record_a: CheckedOp, record_b: CheckedOp) -> tuple[Tensor, Tensor] | None:
    """The exact results of two ops, cut to the rows that both have; None if shapes disagree.

    Results that differ in the number of dimensions, but not of values, are returned flattened.
    """
    exact_a = record_a.exact
    exact_b = record_b.exact
    if exact_a.shape == exact_b.shape:
        return exact_a, exact_b
    if exact_a.dim() != exact_b.dim():
        if exact_a.numel() != exact_b.numel():
            return None
        return exact_a.flatten(), exact_b.flatten()
    batch_a = record_a.log.batch
    batch_b = record_b.log.batch
    if batch_a is None or batch_b is None:
        return None
    for dim in range(exact_a.dim()):
        size_a = exact_a.size(dim)
        size_b = exact_b.size(dim)
        if size_a == size_b:
            continue
        # A dimension that includes the batch, such as batch x tokens, is proportional to it.
        is_of_batch = size_a * batch_b == size_b * batch_a
        if not is_of_batch:
            return None
        rows = min(size_a, size_b)
        exact_a = exact_a.narrow(dim, 0, rows)
        exact_b = exact_b.narrow(dim, 0, rows)
    return exact_a, exact_b


def _has_result(log: RunLog, record: CheckedOp) -> bool:
    """Whether an op of the run returned the same numbers as `record`, perhaps in another order.

    Compares their count, their sum and their root mean square.
    """
    count = record.exact.numel()
    # Adding the same values in another order changes the root mean square by less than this; the
    # 1e-300 is for values that are all 0. The sum of `count` values of random sign is about
    # sqrt(count) times as large as one of them, so its tolerance is, too.
    tolerance = 1e-9 * max(record.rms, 1e-300)
    for candidate in log.records:
        if candidate.exact.numel() != count:
            continue
        has_same_rms = abs(candidate.rms - record.rms) <= tolerance
        if has_same_rms and abs(candidate.total - record.total) <= tolerance * math.sqrt(count):
            return True
    return False

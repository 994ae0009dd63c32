"""Two logs side by side: which op of one run is which of the other, by module and op."""

import difflib
import itertools
import math
from dataclasses import dataclass, field

from torch import Tensor

from amp_lab.difference.rounding import relative_error
from amp_lab.difference.run_log import OpRecord, RunLog


@dataclass(frozen=True)
class Pair:
    """An op of each run, that of A first; or one, where the other run has no such op."""

    records: tuple[OpRecord, ...]
    apart: float = math.nan  # the relative difference of the two results in fp64
    same: bool = False  # in fp64; of one, whether the other run has such a result somewhere

    @property
    def last(self) -> OpRecord:
        """The op of B, or that of A where B has none."""
        return self.records[-1]

    @property
    def is_matched(self) -> bool:
        """Whether both runs have it."""
        return len(self.records) == 2

    @property
    def agrees(self) -> bool:
        """Whether both have it, with the same result."""
        return self.is_matched and self.same


@dataclass
class Alignment:
    """All ops of both runs in the order of the pairs; those of one run alone stand between."""

    a: RunLog
    b: RunLog
    same_kind: bool  # the runs are expected to compute each op in the same format
    same_batch: bool
    pairs: list[Pair] = field(default_factory=list)


def align(a: RunLog, b: RunLog) -> Alignment:
    """Align two logs, of equal length or not.

    Ops are the same if they ran in the same call of the same module under the same name; of several
    such, the longest matching stretches decide. Casts and copies are left out where the runs
    compute in two formats, since only one of them has those.
    """
    alignment = Alignment(a, b, same_kind=a.kind == b.kind, same_batch=a.batch == b.batch)
    records_a = a.records
    records_b = b.records
    if not alignment.same_kind:
        records_a = _without_casts(a)
        records_b = _without_casts(b)
    keys_a = list(map(_key, records_a))
    keys_b = list(map(_key, records_b))
    matcher = difflib.SequenceMatcher(None, keys_a, keys_b, autojunk=False)
    for tag, start_a, end_a, start_b, end_b in matcher.get_opcodes():
        stretch_a = records_a[start_a:end_a]
        stretch_b = records_b[start_b:end_b]
        # Side by side, so that an op that replaces another is found beside it.
        for one, other in itertools.zip_longest(stretch_a, stretch_b):
            if tag == "equal":
                alignment.pairs.append(_matched_pair(one, other))
                continue
            if one is not None:
                alignment.pairs.append(_unmatched_pair(one, b))
            if other is not None:
                alignment.pairs.append(_unmatched_pair(other, a))
    return alignment


def _without_casts(log: RunLog) -> list[OpRecord]:
    return [record for record in log.records if not record.is_neutral]


def _key(record: OpRecord) -> tuple[str, int, str]:
    """What two ops have in common if they are the same."""
    return record.place.module, record.place.call, record.op


def _matched_pair(one: OpRecord, other: OpRecord) -> Pair:
    """Two ops that are the same, with how far apart their results are."""
    tensors = _common_rows(one, other)
    if tensors is None:
        # Rows of another batch that lie folded into some other size cannot be told apart.
        return Pair((one, other), math.inf, same=one.log.batch != other.log.batch)
    apart = relative_error(*tensors)
    noise = max(one.noise, other.noise)
    return Pair((one, other), apart, same=apart <= noise)


def _common_rows(one: OpRecord, other: OpRecord) -> tuple[Tensor, Tensor] | None:
    """The two results, of different batches the rows that both have; None if the shapes disagree.

    They agree too where as many values lie in another number of dimensions: these come flattened.
    """
    left = one.exact
    right = other.exact
    if left.shape == right.shape:
        return left, right
    if left.dim() != right.dim():
        if left.numel() != right.numel():
            return None
        return left.flatten(), right.flatten()
    batch = one.log.batch
    other_batch = other.log.batch
    if batch is None or other_batch is None:
        return None
    for dim in range(left.dim()):
        size = left.size(dim)
        other_size = right.size(dim)
        if size == other_size:
            continue
        # A dimension with the batch in it, perhaps folded with others, grows as the batch does.
        is_of_batch = size * other_batch == other_size * batch
        if not is_of_batch:
            return None
        rows = min(size, other_size)
        left = left.narrow(dim, 0, rows)
        right = right.narrow(dim, 0, rows)
    return left, right


def _unmatched_pair(record: OpRecord, other_log: RunLog) -> Pair:
    """An op that the other run does not have in its place."""
    return Pair((record,), same=_returns_the_same(other_log, record))


def _returns_the_same(log: RunLog, record: OpRecord) -> bool:
    """Whether some op of the run has returned the same numbers, perhaps in another order."""
    count = record.exact.numel()
    tolerance = 1e-9 * max(record.size, 1e-300)  # sums of the same values in another order
    for candidate in log.records:
        if candidate.exact.numel() != count:
            continue
        is_near = abs(candidate.size - record.size) <= tolerance
        if is_near and abs(candidate.total - record.total) <= tolerance * math.sqrt(count):
            return True
    return False

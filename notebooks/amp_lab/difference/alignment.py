"""Two logs side by side: which op of one run is which of the other, by module and op."""

import difflib
import itertools
import math
from dataclasses import dataclass, field

import torch

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
    both = Alignment(a, b, a.kind == b.kind, a.batch == b.batch)
    ours, theirs = a.records, b.records
    if not both.same_kind:
        ours, theirs = _without_casts(a), _without_casts(b)
    tokens = list(map(_token, ours)), list(map(_token, theirs))
    matcher = difflib.SequenceMatcher(None, *tokens, autojunk=False)
    for tag, from_a, to_a, from_b, to_b in matcher.get_opcodes():
        # Side by side, so that an op that replaces another is found beside it.
        for one, other in itertools.zip_longest(ours[from_a:to_a], theirs[from_b:to_b]):
            if tag == "equal":
                both.pairs.append(_compared(one, other))
                continue
            for record, log in ((one, b), (other, a)):
                if record is not None:
                    both.pairs.append(Pair((record,), same=_returns_the_same(log, record)))
    return both


def _without_casts(log: RunLog) -> list[OpRecord]:
    return [record for record in log.records if not record.is_neutral]


def _token(record: OpRecord) -> tuple:
    return record.place.module, record.place.call, record.op


def _compared(one: OpRecord, other: OpRecord) -> Pair:
    batches = one.log.batch, other.log.batch
    tensors = _common(one.exact, other.exact, *batches)
    if tensors is None:
        # Rows of another batch that lie folded into some other size cannot be told apart.
        return Pair((one, other), math.inf, same=batches[0] != batches[1])
    apart = relative_error(*tensors)
    return Pair((one, other), apart, same=apart <= max(one.noise, other.noise))


def _common(
    one: torch.Tensor, other: torch.Tensor, rows: int | None, other_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows that both have; None if the shapes differ in more than the batch."""
    if one.shape == other.shape:
        return one, other
    if one.dim() != other.dim():
        return (one.flatten(), other.flatten()) if one.numel() == other.numel() else None
    for dim, (n, m) in enumerate(zip(one.shape, other.shape, strict=True)):
        if n == m:
            continue
        if rows is None or other_rows is None or n * other_rows != m * rows:
            return None
        one, other = one.narrow(dim, 0, min(n, m)), other.narrow(dim, 0, min(n, m))
    return one, other


def _returns_the_same(log: RunLog, record: OpRecord) -> bool:
    """Whether some op of the run has returned the same numbers, perhaps in another order."""
    count = record.exact.numel()
    near = 1e-9 * max(record.size, 1e-300)  # sums of the same values in another order
    return any(
        one.exact.numel() == count
        and abs(one.size - record.size) <= near
        and abs(one.total - record.total) <= near * math.sqrt(count)
        for one in log.records
    )

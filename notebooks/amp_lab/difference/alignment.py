"""Two logs side by side: which op of one run is which of the other, by module and op."""

import difflib
import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from amp_lab.difference.rounding import rms, unmasked
from amp_lab.difference.run_log import OpRecord, Place, RunLog

_SAME_SUMS = 1e-9


@dataclass(frozen=True)
class Pair:
    """An op of each run, as numbers of their records; None where one run has no such op."""

    a: int | None
    b: int | None
    apart: float = math.nan  # of the two results in fp64: largest difference over largest value
    same: bool = False  # whether that is no more than fp64 leaves


@dataclass
class Alignment:
    """All ops of both runs in the order of the pairs; those of one run alone stand between."""

    a: RunLog
    b: RunLog
    pairs: list[Pair] = field(default_factory=list)

    @property
    def matched(self) -> list[tuple[Pair, OpRecord, OpRecord]]:
        """The pairs with an op of each run, but for casts and copies."""
        return [
            (pair, self.a.records[pair.a], self.b.records[pair.b])
            for pair in self.pairs
            if pair.a is not None and pair.b is not None and not self.record(pair).is_neutral
        ]

    @property
    def sizes_differ(self) -> bool:
        """Whether the runs are on batches of two sizes."""
        return self.a.batch != self.b.batch

    def record(self, pair: Pair) -> OpRecord:
        """The op of B in a pair, or that of A where B has none."""
        if pair.b is not None:
            return self.b.records[pair.b]
        assert pair.a is not None
        return self.a.records[pair.a]


def align(a: RunLog, b: RunLog) -> Alignment:
    """Align two logs, of equal length or not.

    Ops are the same if they ran in the same call of the same module under the same name; of several
    such, the longest matching stretches decide. Casts and copies are left out where the runs
    compute in two formats, since only one of them has those.
    """
    both = Alignment(a, b)
    keep = a.kind == b.kind
    ours = [i for i, record in enumerate(a.records) if keep or not record.is_neutral]
    theirs = [i for i, record in enumerate(b.records) if keep or not record.is_neutral]
    matcher = difflib.SequenceMatcher(
        None, [_token(a, i) for i in ours], [_token(b, i) for i in theirs], autojunk=False
    )
    known_a, known_b = _Sums(a), _Sums(b)
    for tag, from_a, to_a, from_b, to_b in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(ours[from_a:to_a], theirs[from_b:to_b], strict=True):
                both.pairs.append(_compared(a, b, i, j))
            continue
        # Side by side, so that an op that replaces another is found beside it.
        width = max(to_a - from_a, to_b - from_b)
        for step in range(width):
            if from_a + step < to_a:
                i = ours[from_a + step]
                both.pairs.append(Pair(i, None, same=known_b.has(a.records[i])))
            if from_b + step < to_b:
                j = theirs[from_b + step]
                both.pairs.append(Pair(None, j, same=known_a.has(b.records[j])))
    return both


def own_ops(log: RunLog) -> dict[Place, list[str]]:
    """The names of the ops that each call of each module ran by itself, in order."""
    found = defaultdict(list)
    for record in log.records:
        if not record.is_neutral:
            found[record.place].append(record.op)
    return found


def _token(log: RunLog, number: int) -> tuple:
    record = log.records[number]
    return record.place.module, record.place.call, record.op


def _compared(a: RunLog, b: RunLog, i: int, j: int) -> Pair:
    one, other = a.records[i], b.records[j]
    tensors = _common(one.exact, other.exact, (a.batch, b.batch))
    if tensors is None:
        # Rows of another batch that lie folded into some other size cannot be told apart.
        return Pair(i, j, math.inf, same=a.batch != b.batch)
    apart = distance(*tensors)
    return Pair(i, j, apart, same=apart <= max(one.noise, other.noise))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference over the largest value of the first."""
    one, other = unmasked(one, other)
    if not one.numel():
        return 0.0
    apart, size = float((one - other).abs().max()), float(one.abs().max())
    if math.isnan(apart):
        return math.inf
    return apart / size if size else (math.inf if apart else 0.0)


def _common(
    one: torch.Tensor, other: torch.Tensor, batches: tuple[int | None, int | None]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows that both have; None if the shapes differ in more than the batch."""
    if one.shape == other.shape:
        return one, other
    if one.dim() != other.dim():
        return (one.flatten(), other.flatten()) if one.numel() == other.numel() else None
    rows, other_rows = batches
    for dim, (n, m) in enumerate(zip(one.shape, other.shape, strict=True)):
        if n == m:
            continue
        if rows is None or other_rows is None or n * other_rows != m * rows:
            return None
        one, other = one.narrow(dim, 0, min(n, m)), other.narrow(dim, 0, min(n, m))
    return one, other


class _Sums:
    """Results of a run that are known again in another order and shape: by size, sum and norm."""

    def __init__(self, log: RunLog):
        self._log = log
        self._by_size: dict[int, list[tuple[float, float]]] | None = None

    def has(self, record: OpRecord) -> bool:
        """Whether some op of the run has returned the same numbers."""
        if self._by_size is None:  # only where an op has no partner
            self._by_size = defaultdict(list)
            for one in self._log.records:
                self._by_size[one.exact.numel()].append(_sums(one.exact))
        total, norm = _sums(record.exact)
        near = _SAME_SUMS * max(norm, 1e-300)
        return any(
            abs(other[0] - total) <= near * math.sqrt(record.exact.numel())
            and abs(other[1] - norm) <= near
            for other in self._by_size.get(record.exact.numel(), ())
        )


def _sums(exact: torch.Tensor) -> tuple[float, float]:
    values, _ = unmasked(exact, exact)
    return float(values.sum()), rms(values)


def reaching(log: RunLog, stops: set[int]) -> set[int]:
    """The records from which a way leads to the run's results that passes none of the `stops`."""
    found: set[int] = set()
    waiting = [number for number in log.sinks if number not in stops]
    while waiting:
        number = waiting.pop()
        if number in found:
            continue
        found.add(number)
        waiting += [n for n in log.records[number].producers if n not in stops]
    return found


def consumers(log: RunLog) -> dict[int, list[int]]:
    """The records that take what each record made."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, record in enumerate(log.records):
        for producer in record.producers:
            found[producer].append(number)
    return found

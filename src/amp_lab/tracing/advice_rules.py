"""Shared by the rules of X-ray's advice: the list of rules, and the grouping of ops."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from amp_lab.core.tensors import LOWER_DTYPES
from amp_lab.tracing.records import Cast, OpRecord, places_of
from amp_lab.tracing.tracer import Tracer

SMALL_SHARE = 0.01  # of all work: ops with a smaller share are not reported

Rule = Callable[[Tracer], Iterator[str]]
"""A function that yields its remarks on a trace: sentences, or none if it does not apply."""


class Rules:
    """The rules of one file, in the order of their remarks."""

    def __init__(self) -> None:
        self.all: list[Rule] = []
        self.without_autocast: list[Rule] = []
        """Those that apply to a trace without autocast too."""

    def under_autocast(self, rule: Rule) -> Rule:
        """Add a rule that applies only under autocast."""
        self.all.append(rule)
        return rule

    def always(self, rule: Rule) -> Rule:
        """Add a rule that applies to every trace."""
        self.without_autocast.append(rule)
        return self.under_autocast(rule)


def is_low(row: OpRecord) -> bool:
    """Whether an op ran in fp16 or bf16."""
    return row.dtype in LOWER_DTYPES


def weight_casts(trace: Tracer) -> list[Cast]:
    """The casts of parameters that autocast inserted, in the order of a trace."""
    return [cast for cast in trace.casts if cast.is_of_parameter]


def group_by_fact(
    pairs: Iterable[tuple[OpRecord, Any]],
) -> Iterator[tuple[str, list[OpRecord], Any]]:
    """Group ops, so that one sentence can report all ops to which the same applies.

    `pairs` are ops, each with a fact: what a rule has to say about the op, such as its dtype, as a
    value that can be hashed. A group has the ops of the same function with the same fact. Groups
    are in the order of their first ops.

    Yields for each group the subject of a sentence, such as ``linear in 'a', 'b'``, its ops, and
    its fact.
    """
    groups: dict[tuple[str, Any], list[OpRecord]] = defaultdict(list)
    for row, fact in pairs:
        groups[row.called, fact].append(row)
    for (called, fact), rows in groups.items():
        yield f"{called} in {places_of(rows)}", rows, fact

"""Events: the calls of a file that work on a scaler, an optimizer or gradients, and their places.

`code_reader` finds them. A rule compares their order and places: does one event surely run before
another?
"""

import dataclasses
import functools
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import libcst as cst

from amp_lab.migrate.tree.scopes import Scope

Loops = tuple[cst.CSTNode, ...]
"""The loops around a statement, the outermost first."""
Arm = tuple[cst.CSTNode, int]
"""A branch: its `if`, `try` or `match`, and its number. 0 is the body of an `if`, 1 its else."""
_ORDER = attrgetter("order")
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a statement: the branches that lead to it, and the loops and autocast around."""

    arms: tuple[Arm, ...] = ()
    loops: Loops = ()
    autocast: cst.Call | None = None
    """The call that opens the innermost autocast; None without autocast, or if it is turned off."""
    autocast_loops: int = 0
    """The number of loops outside of the autocast block."""

    def excludes(self, other: "Place") -> bool:
        """Whether two places are in different branches of one statement, so only one place runs."""
        for node, number in self.arms:
            for other_node, other_number in other.arms:
                if node is other_node and number != other_number:
                    return True
        return False

    def shares_loops(self, other: "Place") -> bool:
        """Whether one of the two places is inside of all loops that are around the other place.

        Otherwise the two places are in separate loops.
        """
        pairs = zip(self.loops, other.loops, strict=False)
        return all(own_loop is other_loop for own_loop, other_loop in pairs)

    def in_arm(self, node: cst.CSTNode, number: int) -> "Place":
        """A copy of this place that is also in branch `number` of the statement `node`."""
        arm = (node, number)
        return dataclasses.replace(self, arms=(*self.arms, arm))


@dataclasses.dataclass(eq=False)
class Event:
    """A call, and its meaning for mixed precision."""

    kind: str
    """One of:

    - ``scaled``: ``scaler.scale(loss).backward()``
    - ``backward``: ``loss.backward()``
    - ``unscale``: ``scaler.unscale_(optimizer)``
    - ``clip``: ``clip_grad_norm_`` and the like
    - ``scaler step``: ``scaler.step(optimizer)``
    - ``step``: ``optimizer.step()``
    - ``update``: ``scaler.update()``
    - ``call``: any other call
    - empty: a call of a ``backward`` whose object is no loss
    """
    node: cst.Call
    place: Place
    unit: "CodeUnit"
    order: int
    """Its number among the events of its unit, from 0."""
    owner: str
    """The scaler, such as ``self.scaler``; the optimizer of a plain ``step``."""
    optimizer: str
    """The argument of a scaler's ``step`` or ``unscale_``; empty for other kinds."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """A ``continue`` or ``return``."""

    node: cst.CSTNode
    place: Place
    order: int
    """The number of events of the unit before the exit."""


@dataclasses.dataclass(eq=False)
class CodeUnit:
    """The module, or one function, with its events and exits in their order.

    Its tables, such as `by_kind`, are computed once: read them only when all events are there.
    """

    scope: Scope
    events: list[Event] = dataclasses.field(default_factory=list)
    exits: list[Exit] = dataclasses.field(default_factory=list)
    scaled_names: dict[str, str] = dataclasses.field(default_factory=dict)
    """For ``scaled = scaler.scale(loss)``: ``scaler``, by the name ``scaled``."""

    @functools.cached_property
    def by_kind(self) -> defaultdict[str, list[Event]]:
        """The events of each kind, in their order."""
        return grouped(self.events, attrgetter("kind"))

    @functools.cached_property
    def steps_by_optimizer(self) -> defaultdict[str, list[Event]]:
        """The events ``scaler step`` of each optimizer, in their order."""
        return grouped(self.by_kind["scaler step"], attrgetter("optimizer"))

    @functools.cached_property
    def by_loop(self) -> defaultdict[tuple[str, str, Loops], list[Event]]:
        """The events of each (kind, owner, loops): all that run inside of these loops.

        With no loops, ``()``, all events of the unit.
        """
        events: defaultdict[tuple[str, str, Loops], list[Event]] = defaultdict(list)
        for event in self.events:
            loops = event.place.loops
            for depth in range(len(loops) + 1):
                outer_loops = loops[:depth]
                events[event.kind, event.owner, outer_loops].append(event)
        return events

    @functools.cached_property
    def exits_by_loop(self) -> defaultdict[Loops, list[Exit]]:
        """The exits, by the loops around them, in their order."""
        return grouped(self.exits, attrgetter("place.loops"))

    def scales_in_loop_of(self, event: Event) -> bool:
        """Whether the scaler of an event also scales a loss directly in the same loop."""
        loops = event.place.loops
        return any(each.place.loops == loops for each in self.by_loop["scaled", event.owner, loops])

    def after(self, kind: str, event: Event) -> Iterator[Event]:
        """Yield the events of a kind that `event` can lead to."""
        events = self.by_kind[kind]
        start = bisect_left(events, event.order, key=_ORDER)
        # by number: a slice would copy the rest of a long file for each event
        for number in range(start, len(events)):
            if not events[number].place.excludes(event.place):
                yield events[number]

    def between(self, kind: str, first: int, end: int) -> Iterator[Event]:
        """Yield the events of a kind with `first` <= order < `end`, from the last to the first."""
        events = self.by_kind[kind]
        start = bisect_left(events, first, key=_ORDER)
        stop = bisect_left(events, end, key=_ORDER)
        numbers = range(start, stop)
        return (events[number] for number in reversed(numbers))

    def before(self, kind: str, event: Event, first: int = 0) -> Iterator[Event]:
        """Yield the events `between` `first` and `event` that can lead to `event`."""
        for earlier in self.between(kind, first, event.order):
            if not earlier.place.excludes(event.place):
                yield earlier


def grouped(items: Iterable[_Item], key: Callable[[_Item], Any]) -> defaultdict[Any, list[_Item]]:
    """The items by their key, those with the same one in their order."""
    groups: defaultdict[Any, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def last_part(key: str) -> str:
    """``scaler`` of ``self.scaler``."""
    return key.rpartition(".")[2]


def first_part(key: str) -> str:
    """The variable of a key: ``self`` of ``self.optimizer``, ``optimizers`` of ``optimizers[0]``.

    Empty if the key does not begin with a name.
    """
    match = re.match(r"\w*", key)
    assert match is not None  # it may be empty
    return match[0]


def place_of_part(part: cst.CSTNode, node: cst.CSTNode, place: Place) -> Place:
    """The place of `part`, a child of `node`, if `node` is at `place`."""
    arms = _arms(node)
    if part in arms:
        return place.in_arm(node, arms.index(part))
    if isinstance(node, cst.For | cst.While) and part is node.body:
        return dataclasses.replace(place, loops=(*place.loops, node))
    return place


def _arms(node: cst.CSTNode) -> list[cst.CSTNode | None]:
    """The branches of a statement, of which one runs: for a `try`, its body and each handler.

    None stands for the missing else of an `if`. Other nodes have no branches.
    """
    if isinstance(node, cst.If):
        return [node.body, node.orelse]
    if isinstance(node, cst.Try | cst.TryStar):
        return [node.body, *node.handlers]
    if isinstance(node, cst.Match):
        return [*node.cases]
    return []

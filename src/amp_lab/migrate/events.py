"""Events: what a file does with a scaler, an optimizer or a gradient, and where it does it.

`code_reader` finds them; a rule asks which of them surely runs before which.
"""

import dataclasses
import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import attrgetter

import libcst as cst

from amp_lab.migrate.scopes import Scope

Loops = tuple[cst.CSTNode, ...]
"""The loops around something, the outermost first."""
_ORDER = attrgetter("order")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a statement stands: the branches taken to it, the loops and the autocast around it."""

    arms: tuple[tuple[cst.CSTNode, int], ...] = ()
    loops: Loops = ()
    autocast: cst.Call | None = None  # what opens the innermost one that is on
    autocast_loops: int = 0  # how many of the loops are around its block

    def excludes(self, other: "Place") -> bool:
        """Whether no path runs through both."""
        for node, number in self.arms:
            for other_node, other_number in other.arms:
                if node is other_node and number != other_number:
                    return True
        return False

    def shares_loops(self, other: "Place") -> bool:
        """Whether one is in all loops of the other, and not in a loop beside one of them."""
        pairs = zip(self.loops, other.loops, strict=False)
        return all(own_loop is other_loop for own_loop, other_loop in pairs)

    @property
    def repeats_in_autocast(self) -> bool:
        """Whether autocast is on around a loop that this is in."""
        if self.autocast is None:
            return False
        return len(self.loops) > self.autocast_loops

    def in_arm(self, node: cst.CSTNode, number: int) -> "Place":
        """This place, in one of the branches of a statement."""
        arm = (node, number)
        return dataclasses.replace(self, arms=(*self.arms, arm))


@dataclasses.dataclass(eq=False)
class Event:
    """Something done with a scaler, an optimizer or a gradient, or any other call."""

    kind: str
    """``scaled``, ``backward``, ``unscale``, ``clip``, ``scaler step``, ``step``,
    ``update`` or ``call``; empty for what is none of them.
    """
    node: cst.Call
    place: Place
    unit: "Unit"
    order: int  # its number among the events of its unit
    of: str  # the scaler, or the optimizer of a plain step
    optimizer: str


@dataclasses.dataclass(frozen=True)
class Exit:
    """A ``continue`` or ``return``."""

    node: cst.CSTNode
    place: Place
    order: int  # the number of events of its unit before it


@dataclasses.dataclass(eq=False)
class Unit:
    """The module, or a function, and what happens in it."""

    scope: Scope
    events: list[Event] = dataclasses.field(default_factory=list)
    exits: list[Exit] = dataclasses.field(default_factory=list)
    scaled_names: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def by_kind(self) -> defaultdict[str, list[Event]]:
        """The events of each kind, in their order; to be asked for when all of them are there."""
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.kind].append(event)
        return found

    @functools.cached_property
    def steps_of(self) -> defaultdict[str, list[Event]]:
        """The steps by a scaler, by their optimizer."""
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.by_kind["scaler step"]:
            found[event.optimizer].append(event)
        return found

    @functools.cached_property
    def by_scaler(self) -> defaultdict[tuple[str, str], list[Event]]:
        """The events of each kind and scaler, in their order."""
        found: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.kind, event.of].append(event)
        return found

    @functools.cached_property
    def by_loop(self) -> defaultdict[tuple[str, str, Loops], list[Event]]:
        """The events of each kind and scaler in a loop and those inside it, by all its loops."""
        found: defaultdict[tuple[str, str, Loops], list[Event]] = defaultdict(list)
        for event in self.events:
            loops = event.place.loops
            for depth in range(len(loops) + 1):
                outer_loops = loops[:depth]
                found[event.kind, event.of, outer_loops].append(event)
        return found

    @functools.cached_property
    def exits_of(self) -> defaultdict[Loops, list[Exit]]:
        """The exits by the loops around them, in their order."""
        found: defaultdict[Loops, list[Exit]] = defaultdict(list)
        for leaving in self.exits:
            found[leaving.place.loops].append(leaving)
        return found

    def after(self, kind: str, first: int) -> Iterator[Event]:
        """The events of a kind with an order from `first` on."""
        events = self.by_kind[kind]
        start = bisect_left(events, first, key=_ORDER)
        return (events[number] for number in range(start, len(events)))

    def between(self, kind: str, first: int, end: int) -> Iterator[Event]:
        """The events of a kind with an order from `first` to before `end`, the last first."""
        events = self.by_kind[kind]
        start = bisect_left(events, first, key=_ORDER)
        stop = bisect_left(events, end, key=_ORDER)
        numbers = range(start, stop)
        return (events[number] for number in reversed(numbers))

    def last_scaled_before(self, event: Event) -> Event | None:
        """The last scaled backward before an event that is on a way to it."""
        for scaled in self.between("scaled", 0, event.order):
            if not scaled.place.excludes(event.place):
                return scaled
        return None


def of_kind(kind: str, events: Iterable[Event]) -> list[Event]:
    """The events of a kind, in their order."""
    return [event for event in events if event.kind == kind]


def last_part(key: str) -> str:
    """``scaler`` of ``self.scaler``."""
    return key.rpartition(".")[2]


def place_of_part(part: cst.CSTNode, node: cst.CSTNode, place: Place) -> Place:
    """The place of a part of a node that has a place itself."""
    arms = _arms(node)
    if part in arms:
        return place.in_arm(node, arms.index(part))
    if isinstance(node, cst.For | cst.While) and part is node.body:
        return dataclasses.replace(place, loops=(*place.loops, node))
    return place


def _arms(node: cst.CSTNode) -> list[cst.CSTNode | None]:
    """The parts of a statement that exclude each other; a handler runs in place of the rest."""
    if isinstance(node, cst.If):
        return [node.body, node.orelse]
    if isinstance(node, cst.Try | cst.TryStar):
        return [node.body, *node.handlers]
    if isinstance(node, cst.Match):
        return [*node.cases]
    return []

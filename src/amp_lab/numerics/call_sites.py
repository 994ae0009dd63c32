"""Find the call of a module to which an op belongs, in the forward and in the backward pass."""

import threading
from collections import Counter
from typing import Any

import torch
from torch import nn

from amp_lab.numerics.watched_ops import Site

_OUTSIDE = Site()  # where an op runs that runs outside of all modules
_MOST_NODES = 2**18  # those of thousands of steps


class CallSites:
    """Follows the calls of modules, by `enter` and `leave`, and finds the site of an op.

    The ops of the thread that makes the object are found, from then on.
    """

    def __init__(self):
        self._calls: Counter[nn.Module] = Counter()  # in this forward pass
        # The calls that are running, the innermost last.
        self._running: list[tuple[nn.Module, Site]] = []
        self._site_by_node: dict[int, Site] = {}  # by the sequence number of autograd's node
        self._first_number = torch._C._autograd._get_sequence_nr()  # of the nodes made from now on
        self._thread = threading.get_ident()

    @property
    def in_module(self) -> bool:
        """Whether a call of a module is running."""
        return bool(self._running)

    @property
    def current(self) -> Site:
        """The site of the code that is running now."""
        if not self._running:
            return _OUTSIDE
        _, site = self._running[-1]
        return site

    def last_call(self, module: nn.Module, name: str) -> Site:
        """The site of a module's last call in this forward pass; `name` is its qualified name."""
        return Site(name, type(module).__name__, self._calls[module])

    def enter(self, module: nn.Module, name: str, *, is_recomputed: bool) -> Site:
        """Begin a call of a module, and return its site.

        A recomputed call, by activation checkpointing, has the number of the last call.
        """
        if not is_recomputed:
            if not self._running:  # a new forward pass
                self._calls.clear()
            self._calls[module] += 1
        site = self.last_call(module, name)
        self._running.append((module, site))
        return site

    def leave(self, module: nn.Module) -> None:
        """End the call of a module, and of those inside it.

        A module inside may still count as running: if it raised, its hook has not called `leave`.
        """
        while self._running:
            ended_module, _ = self._running.pop()
            if ended_module is module:
                return

    def site_of_op(self, node: Any) -> Site:
        """The site of the op that runs now, inside the torch dispatch of this op.

        Args:
            node: In a backward pass, the autograd node for which the op runs; else None.

        Returns:
            The call of a module that is running; in a backward pass, the one that made `node`.
        """
        site = self.current
        if not self._running and node is not None:
            site = self._site_by_node.get(node._sequence_nr(), _OUTSIDE)
        # Autograd makes an op's node, with the next number, just before it runs the op. An op
        # without a node of its own would overwrite the last number, hence `setdefault`.
        number = torch._C._autograd._get_sequence_nr() - 1
        if number >= self._first_number and threading.get_ident() == self._thread:
            self._site_by_node.setdefault(number, site)
            if len(self._site_by_node) > _MOST_NODES:
                oldest = next(iter(self._site_by_node))
                del self._site_by_node[oldest]
        return site

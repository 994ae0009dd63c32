"""A backward pass without torch's engine, which would ask an absent device for its streams.

Nodes run latest first, each as soon as all its gradients are there, and what it kept is freed after
it. The nodes themselves are torch's. Source: `evaluate_function` in torch/csrc/autograd/engine.cpp.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from amp_lab.core.errors import TraceError
from amp_lab.core.torch_versions import function_nodes_need_their_parents, one_backward_pass
from amp_lab.tracing.ops_seen import tensors_in

# Asked here, since inside of a trace it would be noted as part of it.
_NEED_THEIR_PARENTS = function_nodes_need_their_parents()

_NO_FORMULA = "no autograd formula was registered"  # of an op of torch.library

Seeds = list[tuple[GradientEdge, torch.Tensor]]  # where a walk begins, each with its gradient
Gradients = tuple[torch.Tensor | None, ...]
Children = tuple[tuple[Node | None, int], ...]  # and which of their inputs


def seeds_of(output: object) -> Seeds:
    """The tensors of an output that lead to gradients, each with a gradient of ones."""
    leaves = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    return [(get_gradient_edge(leaf), torch.ones_like(leaf)) for leaf in leaves]


def run_backward(seeds: Seeds) -> dict[int, torch.Tensor]:
    """The gradients of the leaves, by the id of the leaf, from a walk over the graph.

    `seeds` is emptied, so that no node outlives its turn. With torch 2.11, what the node of an
    `autograd.Function` kept may be freed later than by the engine. Raises `TraceError` for
    checkpointing with ``use_reentrant=True``.
    """
    walk = _Walk(seeds)
    with torch.no_grad(), one_backward_pass():
        while walk.ready:
            walk.pass_on(*walk.run_next())  # no name here may keep what the engine would free
    return walk.leaves


def functions_of_the_model(seeds: Seeds) -> list[str]:
    """The names of the `autograd.Function` subclasses in the graph below some seeds."""
    nodes: Iterator[Node] = nodes_below(edge.node for edge, _ in seeds)
    names = set()
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names.add(node.name().removesuffix("Backward"))
    return sorted(names)


def lacks_formula(error: RuntimeError) -> bool:
    """Whether a backward pass failed at an op that has none."""
    return _NO_FORMULA in str(error)


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """Some nodes and all that they lead to, the nearest first."""
    queue = list(dict.fromkeys(roots))
    seen = set(queue)
    for node in queue:  # the loop adds to the queue
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)


class _Walk:
    """Which nodes are still to run, and the gradients that wait for them."""

    def __init__(self, seeds: Seeds):
        self._pending: dict[Node, dict[int, torch.Tensor]] = {}
        self._owners: dict[Node, Any] = {}  # what must outlive a node
        self._tie = itertools.count()  # nodes cannot be compared
        self.ready: list[tuple[int, int, Node]] = []  # a heap
        self.leaves: dict[int, torch.Tensor] = {}
        for edge, gradient in seeds:
            self._pending.setdefault(edge.node, {})[edge.output_nr] = gradient
            self._owners[edge.node] = edge.ownership_token
        seeds.clear()
        # How many gradients each node waits for: none if it is a root that no other leads to.
        self._waits: Counter[Any] = Counter()
        for node in nodes_below(self._pending):
            self._waits.update(child for child, _ in node.next_functions if child is not None)
        for node in self._pending:
            if not self._waits[node]:
                self._push(node)

    def _push(self, node: Node) -> None:
        # The engine's own order: what ran last in the forward pass comes first.
        heapq.heappush(self.ready, (-node._sequence_nr(), next(self._tie), node))

    def run_next(self) -> tuple[Children, Gradients]:
        """Run the next node, which ends then with what it kept: where its results go, and they."""
        node = heapq.heappop(self.ready)[2]
        self._waits.pop(node, None)
        arrived = self._pending.pop(node, {})
        owner = self._owners.pop(node, None)
        if hasattr(node, "variable"):
            self._accumulate(node.variable, arrived.get(0))
            return (), ()
        results = [*_call(node, arrived)]
        # Here, and not where they arrive: the engine does it before it frees what the node got.
        for i, (child, index) in enumerate(node.next_functions[: len(results)]):
            gradient = results[i]
            if child is not None and gradient is not None:
                results[i] = _as_expected(gradient, child._input_metadata[index])
        if _NEED_THEIR_PARENTS:
            for child, _ in node.next_functions:
                if isinstance(child, torch._C._FunctionBase):
                    self._owners[child] = node, owner
        return node.next_functions, tuple(results)

    def pass_on(self, children: Children, results: Gradients) -> None:
        """Hand each child its gradient; it is ready when that was the last it waited for."""
        for i, (child, index) in enumerate(children):
            if child is None:  # an input that needs no gradient
                continue
            gradient = results[i] if i < len(results) else None
            if gradient is not None:
                self._arrive(child, index, gradient)
            self._waits[child] -= 1
            if not self._waits[child]:
                self._push(child)

    def _arrive(self, child: Node, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to those that wait for a node."""
        waiting = self._pending.setdefault(child, {})
        if index in waiting:
            gradient = waiting[index] + gradient
        waiting[index] = gradient

    def _accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """What the engine does at a leaf, once in a walk: take the gradient over, or a copy."""
        if gradient is None:
            return
        # A gradient that is part of a larger storage would keep all of it.
        owns_storage = gradient.is_sparse or gradient.untyped_storage().nbytes() == gradient.nbytes
        if not owns_storage:
            gradient = gradient.clone()
        self.leaves[id(leaf)] = gradient


def _as_expected(gradient: torch.Tensor, expected: Any) -> torch.Tensor:
    """A gradient in the dtype and shape of what it is the gradient of."""
    if gradient.shape != expected.shape:  # the forward op broadcast its input
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    return gradient


def _call(node: Node, arrived: dict[int, torch.Tensor]) -> Gradients:
    """What the node makes of its gradients; nothing, if it has none."""
    if not arrived:
        return ()
    metadata = node._input_metadata
    gradients = [arrived.get(i) for i in range(len(metadata))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # an autograd.Function
        if node.name() == "CheckpointFunctionBackward":
            raise TraceError(
                "activation checkpointing with use_reentrant=True starts an engine of its own, "
                "which needs the device; use use_reentrant=False"
            )
        if getattr(node, "materialize_grads", True):  # the class takes zeros in place of None
            for i, gradient in enumerate(gradients):
                if gradient is None:
                    like = metadata[i]
                    gradients[i] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        results = node.apply(*gradients)
    else:
        results = node(*gradients)  # pyrefly: ignore[not-callable]: torch's stub lacks __call__
    if isinstance(results, tuple):
        return results
    return (results,)

"""Run a backward pass without torch's engine, which would request streams of an absent device.

The nodes of the graph are torch's; only their order is computed here. As in the engine, a node is
ready when all its gradients have arrived, the latest ready node runs first, and its saved tensors
are freed afterwards. Source: `evaluate_function` in torch/csrc/autograd/engine.cpp.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from amp_lab.core.errors import TraceError
from amp_lab.core.tensors import tensors_in
from amp_lab.core.torch_versions import function_nodes_need_their_parents, one_backward_pass

# Computed at import, since a trace would record the ops of this test.
_NEED_THEIR_PARENTS = function_nodes_need_their_parents()

_NO_FORMULA = "no autograd formula was registered"  # torch's error for an op of torch.library

# Where a backward pass starts, each with the gradient that it starts with.
Seeds = list[tuple[GradientEdge, torch.Tensor]]
Gradients = tuple[torch.Tensor | None, ...]  # one for each child; None: it gets none from here
Children = tuple[tuple[Node | None, int], ...]  # `next_functions`: a node, and which of its inputs


def seeds_of(output: object) -> Seeds:
    """The tensors of an output that have a `grad_fn`, each with a gradient of ones."""
    roots = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    return [(get_gradient_edge(root), torch.ones_like(root)) for root in roots]


def run_backward(seeds: Seeds) -> dict[int, torch.Tensor]:
    """Run a backward pass; return the gradients of the leaves by the leaf's `id`.

    The function empties `seeds`, so no node lives longer than in torch's engine. With torch 2.11,
    tensors that an `autograd.Function` saved may still be freed later than in the engine. Raises
    `TraceError` for checkpointing with ``use_reentrant=True``.
    """
    walk = _Walk(seeds)
    with torch.no_grad(), one_backward_pass():
        while walk.ready:
            # In one expression: a local variable would keep tensors alive that the engine frees.
            walk.pass_on(*walk.run_next())
    return walk.leaves


def functions_of_the_model(seeds: Seeds) -> list[str]:
    """The names of the `autograd.Function` subclasses in the graph of these outputs, sorted."""
    nodes: Iterator[Node] = nodes_below(edge.node for edge, _ in seeds)
    names = set()
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names.add(node.name().removesuffix("Backward"))
    return sorted(names)


def lacks_formula(error: RuntimeError) -> bool:
    """Whether a backward pass failed because a custom op has no autograd formula."""
    return _NO_FORMULA in str(error)


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the roots and all nodes that they lead to, in breadth-first order."""
    queue = list(dict.fromkeys(roots))
    seen = set(queue)
    for node in queue:  # the loop adds to the queue
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)


class _Walk:
    """The state of a backward pass: which nodes are to run, and the gradients that have arrived."""

    def __init__(self, seeds: Seeds):
        # The gradients that have arrived at a node so far, summed: by the index of its input.
        self._arrived: dict[Node, dict[int, torch.Tensor]] = {}
        self._owners: dict[Node, Any] = {}  # objects that must live as long as a node
        self._tie_breaker = itertools.count()  # for the heap, since nodes cannot be compared
        self.ready: list[tuple[int, int, Node]] = []  # heap of (priority, tie breaker, node)
        self.leaves: dict[int, torch.Tensor] = {}  # gradients, by the `id` of the leaf
        for edge, gradient in seeds:
            self._arrived.setdefault(edge.node, {})[edge.output_nr] = gradient
            self._owners[edge.node] = edge.ownership_token
        seeds.clear()
        # How many gradients each node still waits for. A root that no other root leads to waits for
        # none, and can run first.
        self._missing: Counter[Any] = Counter()
        for node in nodes_below(self._arrived):
            self._missing.update(child for child, _ in node.next_functions if child is not None)
        for node in self._arrived:
            if not self._missing[node]:
                self._push(node)

    def _push(self, node: Node) -> None:
        """Mark a node as ready to run."""
        # As in the engine, the node whose op ran last in the forward pass has the highest priority:
        # the heap gives the smallest number first.
        heapq.heappush(self.ready, (-node._sequence_nr(), next(self._tie_breaker), node))

    def run_next(self) -> tuple[Children, Gradients]:
        """Run the next node; return its children and the gradients for them.

        For the node of a leaf both are empty, and its gradient is in `leaves`. The walk holds no
        reference to the node afterwards, so it is freed with its saved tensors.
        """
        _, _, node = heapq.heappop(self.ready)
        self._missing.pop(node, None)
        arrived = self._arrived.pop(node, {})
        owner = self._owners.pop(node, None)
        if hasattr(node, "variable"):  # AccumulateGrad, the node of a leaf
            self._store_gradient(node.variable, arrived.get(0))
            return (), ()
        results = [*_call(node, arrived)]  # may be fewer than the node has children
        # The engine, too, converts gradients here and not where they arrive: before it frees the
        # node's own gradients.
        for i, (child, index) in enumerate(node.next_functions[: len(results)]):
            gradient = results[i]
            if child is not None and gradient is not None:
                results[i] = _as_expected(gradient, child._input_metadata[index])
        if _NEED_THEIR_PARENTS:  # else the node of an `autograd.Function` would be freed too early
            for child, _ in node.next_functions:
                if isinstance(child, torch._C._FunctionBase):
                    self._owners[child] = node, owner
        return node.next_functions, tuple(results)

    def pass_on(self, children: Children, results: Gradients) -> None:
        """Give each child its gradient; a child that misses no other gradient becomes ready.

        A gradient that is None, or left out at the end of `results`, counts as arrived too.
        """
        for i, (child, index) in enumerate(children):
            if child is None:  # an input that needs no gradient
                continue
            gradient = results[i] if i < len(results) else None
            if gradient is not None:
                self._arrive(child, index, gradient)
            self._missing[child] -= 1
            if not self._missing[child]:
                self._push(child)

    def _arrive(self, child: Node, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to those that have arrived at input `index` of a node."""
        arrived = self._arrived.setdefault(child, {})
        if index in arrived:
            gradient = arrived[index] + gradient
        arrived[index] = gradient

    def _store_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Store the gradient of a leaf, as the engine does: the tensor itself or a copy of it.

        None, if no gradient has arrived, is not stored.
        """
        if gradient is None:
            return
        # A gradient that is a view of a larger storage would keep all of that storage alive.
        owns_storage = gradient.is_sparse or gradient.untyped_storage().nbytes() == gradient.nbytes
        if not owns_storage:
            gradient = gradient.clone()
        self.leaves[id(leaf)] = gradient


def _as_expected(gradient: torch.Tensor, expected: Any) -> torch.Tensor:
    """Convert a gradient to the shape and dtype of the tensor whose gradient it is.

    `expected` is torch's record of that tensor, an element of a node's `_input_metadata`.
    """
    if gradient.shape != expected.shape:  # the forward op broadcast its input
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    return gradient


def _call(node: Node, arrived: dict[int, torch.Tensor]) -> Gradients:
    """Run a node on the gradients that have arrived, by index of its input.

    Returns the gradients for its children, or () if no gradient has arrived for the node itself.
    Raises `TraceError` for reentrant checkpointing.
    """
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
        # torch gives an autograd.Function zeros in place of None, unless it asks for None.
        if getattr(node, "materialize_grads", True):
            for i, gradient in enumerate(gradients):
                if gradient is None:
                    output = metadata[i]  # shape, dtype and device of the forward's output
                    gradients[i] = torch.zeros(
                        output.shape, dtype=output.dtype, device=output.device
                    )
        results = node.apply(*gradients)
    else:
        results = node(*gradients)  # pyrefly: ignore[not-callable]: torch's stub lacks __call__
    if isinstance(results, tuple):
        return results
    return (results,)

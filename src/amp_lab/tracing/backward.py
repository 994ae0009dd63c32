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

# Where a backward pass starts: outputs of the forward pass, each with the gradient that it gets.
Seeds = list[tuple[GradientEdge, torch.Tensor]]
# `next_functions` of a node: the nodes that get its gradients, and at which of their inputs. None
# stands for a tensor that needs no gradient.
Children = tuple[tuple[Node | None, int], ...]
Gradients = list[torch.Tensor | None]  # one for each child; None: it gets none from this node


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
    backward_pass = _BackwardPass(seeds)
    with torch.no_grad(), one_backward_pass():
        while backward_pass.ready:
            # In one expression: a local variable would keep tensors alive that the engine frees.
            backward_pass.send_to_children(*backward_pass.run_next_node())
    return backward_pass.leaf_gradients


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
    """Yield the roots, and all nodes to which `next_functions` lead from them, breadth first."""
    queue = list(dict.fromkeys(roots))
    nodes_in_queue = set(queue)  # also those that have left it: no node comes twice
    for node in queue:  # the loop adds to the queue
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in nodes_in_queue:
                nodes_in_queue.add(child)
                queue.append(child)


class _BackwardPass:
    """A backward pass on its way: the nodes that can run, and the gradients computed so far.

    Call `run_next_node` and `send_to_children` in turn while there are `ready` nodes. Then the
    gradients of the leaves are in `leaf_gradients`.
    """

    def __init__(self, seeds: Seeds):
        """Begin at the nodes of `seeds`, and empty `seeds`."""
        # The gradients that wait at a node, by the index of the node's input. If several gradients
        # arrive at one input, their sum waits.
        self._waiting: dict[Node, dict[int, torch.Tensor]] = {}
        # For a node: Python objects that keep torch from freeing the node before it has run.
        self._owners: dict[Node, Any] = {}
        for edge, gradient in seeds:
            # An output of the forward op is an input of its node.
            self._add_gradient(edge.node, edge.output_nr, gradient)
            self._owners[edge.node] = edge.ownership_token
        seeds.clear()  # the caller's list would keep all nodes alive until the end
        # How many gradients have yet to arrive at each node.
        self._missing_counts: Counter[Any] = Counter()
        for node in nodes_below(self._waiting):
            for child, _ in node.next_functions:
                if child is not None:
                    self._missing_counts[child] += 1
        # A heap of (priority, tie breaker, node). Nodes cannot be compared, so numbers break ties.
        self.ready: list[tuple[int, int, Node]] = []
        self._tie_breaker = itertools.count()
        for node in self._waiting:
            # A root waits for more if another root leads to it.
            if not self._missing_counts[node]:
                self._push(node)
        self.leaf_gradients: dict[int, torch.Tensor] = {}  # by the `id` of the leaf

    def _push(self, node: Node) -> None:
        """Mark a node as ready to run."""
        # As in the engine, the node whose op ran last in the forward pass has the highest priority:
        # the heap gives the smallest number first.
        heapq.heappush(self.ready, (-node._sequence_nr(), next(self._tie_breaker), node))

    def run_next_node(self) -> tuple[Children, Gradients]:
        """Run the ready node of the highest priority; return its children and their gradients.

        For the node of a leaf both are empty, and its gradient is in `leaf_gradients`. Afterwards,
        this object holds no reference to the node, so torch frees it with its saved tensors.
        """
        _, _, node = heapq.heappop(self.ready)
        self._missing_counts.pop(node, None)
        gradients_by_input = self._waiting.pop(node, {})
        owner = self._owners.pop(node, None)  # keeps the node alive until this method returns
        if hasattr(node, "variable"):  # AccumulateGrad, the node of a leaf, has a single input
            self._store_gradient(node.variable, gradients_by_input.get(0))
            return (), []
        children = node.next_functions
        gradients = _call(node, gradients_by_input)
        # As in the engine, the gradients are converted before those of the node itself are freed,
        # which `gradients_by_input` keeps alive.
        _convert_for_children(gradients, children)
        if _NEED_THEIR_PARENTS:  # else the node of an `autograd.Function` would be freed too early
            for child, _ in children:
                if isinstance(child, torch._C._FunctionBase):
                    self._owners[child] = (node, owner)
        return children, gradients

    def send_to_children(self, children: Children, gradients: Gradients) -> None:
        """Give each child its gradient; a child that misses no other gradient becomes ready.

        A gradient that is None counts as arrived too.
        """
        for (child, index), gradient in zip(children, gradients, strict=True):
            if child is None:  # an input that needs no gradient
                continue
            if gradient is not None:
                self._add_gradient(child, index, gradient)
            self._missing_counts[child] -= 1
            if not self._missing_counts[child]:
                self._push(child)

    def _add_gradient(self, node: Node, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to those that wait at input `index` of a node."""
        waiting = self._waiting.setdefault(node, {})
        if index in waiting:
            gradient = waiting[index] + gradient
        waiting[index] = gradient

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
        self.leaf_gradients[id(leaf)] = gradient


def _convert_for_children(gradients: Gradients, children: Children) -> None:
    """Convert each gradient in the list to the shape and dtype that its child expects."""
    for i, (child, input_index) in enumerate(children):
        gradient = gradients[i]
        if child is not None and gradient is not None:
            gradients[i] = _as_expected(gradient, child._input_metadata[input_index])


def _as_expected(gradient: torch.Tensor, expected: Any) -> torch.Tensor:
    """Convert a gradient to the shape and dtype of the tensor whose gradient it is.

    `expected` is torch's record of that tensor, an element of a node's `_input_metadata`.
    """
    if gradient.shape != expected.shape:  # the forward op broadcast its input
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    return gradient


def _call(node: Node, gradients_by_input: dict[int, torch.Tensor]) -> Gradients:
    """Run a node on the gradients that have arrived, by the index of the node's input.

    Returns a gradient, or None, for each child; only None if no gradient has arrived for the node
    itself. Raises `TraceError` for reentrant checkpointing.
    """
    if not gradients_by_input:
        return [None] * len(node.next_functions)
    gradients = [gradients_by_input.get(i) for i in range(len(node._input_metadata))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return _call_custom_function(node, gradients)
    return _as_list(node(*gradients))  # pyrefly: ignore[not-callable]: torch's stub lacks __call__


def _call_custom_function(node: Any, gradients: Gradients) -> Gradients:
    """Run the backward method of an `autograd.Function`; return a gradient for each child.

    `gradients` has one for each output of its forward method. Raises `TraceError` for reentrant
    checkpointing.
    """
    if node.name() == "CheckpointFunctionBackward":
        raise TraceError(
            "activation checkpointing with use_reentrant=True starts an engine of its own, "
            "which needs the device; use use_reentrant=False"
        )
    # torch gives an autograd.Function zeros in place of None, unless it asks for None.
    if getattr(node, "materialize_grads", True):
        for i, gradient in enumerate(gradients):
            if gradient is None:
                output = node._input_metadata[i]  # shape, dtype and device of the forward's output
                gradients[i] = torch.zeros(output.shape, dtype=output.dtype, device=output.device)
    return _for_children(node, _as_list(node.apply(*gradients)))


def _for_children(node: Any, results: list) -> Gradients:
    """Choose the gradients for the children among the results of an `autograd.Function`.

    `results` has one for each argument of the forward method, or fewer, but there is a child only
    for each tensor among the arguments. Those that need a gradient are in the same order in both.
    """
    is_needed = node.needs_input_grad  # a bool for each argument
    needed = [result for result, needs in zip(results, is_needed, strict=False) if needs]
    children = node.next_functions
    positions = [i for i, (child, _) in enumerate(children) if child is not None]
    gradients: Gradients = [None] * len(children)
    for position, gradient in zip(positions, needed, strict=False):
        gradients[position] = gradient
    return gradients


def _as_list(results: Any) -> list:
    """What a node returned, as a list: nodes with one child may return a bare gradient."""
    if isinstance(results, tuple):
        return list(results)
    return [results]

"""Everything that is here for an older torch only, each with the version that ends it.

amp_lab runs on torch 2.11 and later. When a later one is required, what it ends goes from here, and
the callers take what the docstring says in its place.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


@functools.cache
def function_nodes_need_their_parents() -> bool:
    """Whether the node of an `autograd.Function` ends with the nodes that lead to it.

    Delete when torch >= 2.15 is required, where such a node keeps itself alive: always False.
    """
    node = _Identity.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:
        return True


def one_backward_pass() -> AbstractContextManager:
    """The block that activation checkpointing takes for one backward pass of torch's engine.

    Delete when torch >= 2.15 is required, which has `torch.utils.checkpoint.GraphExecGroup`.
    """
    import torch.utils.checkpoint  # which torch itself loads only when it is used

    return getattr(torch.utils.checkpoint, "GraphExecGroup", nullcontext)()


def step_counters_on_host() -> AbstractContextManager:
    """The block in which an optimizer makes its counters of steps on the CPU.

    Delete when torch >= 2.15 is required: 2.11 makes them on the default device.
    """
    return torch.device("cpu")


def no_buffer_broadcast() -> dict[str, bool]:
    """The option of `DistributedDataParallel` that leaves each process its own buffers.

    Delete when torch >= 2.15 is required: ``forward_sync_buffers=False``.
    """
    from torch.nn.parallel import DistributedDataParallel

    accepted = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"
    return {name: False}


def dimension_by_name(kind: str) -> str | list[str]:
    """An argument of type ``str`` or ``List[str]`` that is a dimension by its name.

    Delete when torch >= 2.15 is required, which has no such overloads. The dispatcher wants the
    prefix.
    """
    return "dimname::x" if kind == "str" else ["dimname::x"]


@contextmanager
def fused_gru_on_fakes() -> Iterator[None]:
    """The block in which a GPU's fused GRU cell has the shapes of what it returns.

    Delete when torch >= 2.15 is required, which knows them.
    """
    cell = "_thnn_fused_gru_cell"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{cell}", "Meta"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(cell, _gru_cell, "Meta")
        library.impl(f"{cell}_backward", _gru_cell_backward, "Meta")
        yield
    finally:
        library._destroy()


def _gru_cell(input_gates, hidden_gates, state, input_bias=None, hidden_bias=None):
    """The next state (N, H), and the (N, 5H) that the backward pass reads."""
    rows, width = state.shape
    return state.new_empty(rows, width), state.new_empty(rows, 5 * width)


def _gru_cell_backward(gradient, workspace, has_bias):
    """The gradients of both kinds of gates (N, 3H), of the state (N, H), and of two biases (3H)."""
    rows, width = gradient.shape
    gates = [workspace.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [workspace.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return *gates, gradient.new_empty(rows, width), *biases

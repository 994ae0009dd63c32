"""Everything that is here for an older torch only: amp_lab runs on torch 2.11 and later."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint

from amp_lab.core.requirements import require_torch

require_torch()  # before anything here meets an older one


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


@functools.cache
def function_nodes_need_their_parents() -> bool:
    """Whether the node of an `autograd.Function` ends with the nodes that lead to it.

    Delete when torch >= 2.15 is required, where such a node keeps itself alive: always False.
    """
    with torch.enable_grad():  # the caller may have switched it off
        node = _Identity.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:  # it says that it has ended
        return True


def one_backward_pass() -> AbstractContextManager:
    """The block that activation checkpointing takes for one backward pass of torch's engine.

    Delete when torch >= 2.15 is required: it is `torch.utils.checkpoint.GraphExecGroup`.
    """
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
    accepted = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    if "forward_sync_buffers" in accepted:
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that a unit of FSDP2 gathers, each at once.

    Delete when torch >= 2.15 is required: it is `_fsdp_param_groups`.
    """
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]


def fsdp_reduced_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which FSDP2 sums the gradient of one of a group's parameters.

    Delete when torch >= 2.15 is required: without a `reduce_dtype`, older ones sum it as computed.
    """
    computed = parameter.param_dtype or parameter.orig_dtype
    if hasattr(type(parameter), "unsharded_grad_dtype"):
        return parameter.unsharded_grad_dtype or computed
    return parameter.reduce_dtype or computed


def dimension_by_name(kind: str) -> str | list[str]:
    """An argument of type ``str`` or ``List[str]`` that is a dimension by its name.

    Delete when torch >= 2.15 is required, which has no such overloads.
    """
    name = "dimname::x"  # the dispatcher takes a plain string for the name of something else
    if kind == "str":
        return name
    return [name]


@contextmanager
def fused_gru_on_fakes() -> Iterator[None]:
    """The block in which a GPU's fused GRU cell has the shapes of what it returns.

    Delete when torch >= 2.15 is required, which knows them.
    """
    cell = "_thnn_fused_gru_cell"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{cell}", "Meta"):
        yield
        return

    def forward(input_gates, hidden_gates, state, input_bias=None, hidden_bias=None):
        rows, width = state.shape
        return state.new_empty(rows, width), state.new_empty(rows, 5 * width)  # for the backward

    def backward(gradient, workspace, has_bias):
        rows, width = gradient.shape
        gates = [workspace.new_empty(rows, 3 * width) for _ in range(2)]
        biases = [None, None]
        if has_bias:
            biases = [workspace.new_empty(3 * width) for _ in range(2)]
        return *gates, gradient.new_empty(rows, width), *biases

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(cell, forward, "Meta")
        library.impl(f"{cell}_backward", backward, "Meta")
        yield

"""Code that only older versions of torch need: amp_lab runs on torch 2.11 and later."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses import fake_tensor

from amp_lab.core.requirements import require_torch

require_torch()  # an older one would fail below without saying why


class _Identity(torch.autograd.Function):
    """A custom function that returns a view of its input, to try out its backward node."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


@functools.cache
def function_nodes_need_their_parents() -> bool:
    """Whether a backward node of an `autograd.Function` is freed while Python still refers to it.

    This happens when the tensor of the node, and the nodes that lead to it, are freed. The node
    then has no `next_functions`.

    Delete when torch >= 2.15 is required: there, such a node is not freed, so this returns False.
    """
    with torch.enable_grad():  # the caller may have switched it off
        node = _Identity.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:  # the node has been freed
        return True


def one_backward_pass() -> AbstractContextManager:
    """The block in which activation checkpointing recomputes each region at most once.

    This holds even if `backward` is called several times in the block. Older versions of torch
    cannot do so, and the block changes nothing there.

    Delete when torch >= 2.15 is required: it is `torch.utils.checkpoint.GraphExecGroup`.
    """
    return getattr(torch.utils.checkpoint, "GraphExecGroup", nullcontext)()


def step_counters_on_host() -> AbstractContextManager:
    """The block in which an optimizer makes its step counters on the CPU.

    Delete when torch >= 2.15 is required: torch 2.11 makes them on the default device.
    """
    return torch.device("cpu")


def no_buffer_broadcast() -> dict[str, bool]:
    """The option of `DistributedDataParallel` that switches off the broadcast of buffers.

    Delete when torch >= 2.15 is required: ``forward_sync_buffers=False``.
    """
    accepted = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    if "forward_sync_buffers" in accepted:
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


def fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups (`FSDPParamGroup`) of an FSDP2 unit; each is gathered as a whole.

    `state` is the unit's `FSDPState`. Delete when torch >= 2.15 is required: it is
    `_fsdp_param_groups`.
    """
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]


def fsdp_reduced_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which FSDP2 sums the gradient of a parameter, an `FSDPParam` of a group.

    Delete when torch >= 2.15 is required: older versions, without a `reduce_dtype`, sum it in the
    dtype of the computation.
    """
    compute_dtype = parameter.param_dtype or parameter.orig_dtype
    if hasattr(type(parameter), "unsharded_grad_dtype"):
        return parameter.unsharded_grad_dtype or compute_dtype
    return parameter.reduce_dtype or compute_dtype


def dimension_by_name(kind: str) -> str | list[str]:
    """An argument for an overload that takes the name of a dimension, of the type `kind`.

    The argument is a text for ``str``, and a list with that text for ``List[str]``.

    Delete when torch >= 2.15 is required, which has no such overloads.
    """
    name = "dimname::x"  # the dispatcher takes a string without this prefix for something else
    if kind == "str":
        return name
    return [name]


@contextmanager
def other_gpus_left_alone() -> Iterator[None]:
    """The block in which a fake tensor of a GPU of another kind does not look for that GPU.

    In torch 2.11, on a machine with CUDA, a fake tensor of ``xpu`` raises "Torch not compiled with
    XPU enabled", and the other way round.

    Delete when torch >= 2.12 is required.
    """
    initialize = fake_tensor.init_gpu_context

    def initialize_own_gpu(device: torch.device) -> None:
        if torch.get_device_module(device).is_available():
            initialize(device)

    fake_tensor.init_gpu_context = initialize_own_gpu  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        fake_tensor.init_gpu_context = initialize


@contextmanager
def fused_gru_on_fakes() -> Iterator[None]:
    """The block in which the fused GRU cell of a GPU can run on fake tensors.

    Delete when torch >= 2.15 is required: this version knows the shapes of the outputs.
    """
    cell = "_thnn_fused_gru_cell"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{cell}", "Meta"):
        yield
        return

    def forward(input_gates, hidden_gates, state, input_bias=None, hidden_bias=None):
        rows, width = state.shape  # (N, H); the gates are (N, 3 H)
        # The new state, and the workspace that the backward pass gets.
        return state.new_empty(rows, width), state.new_empty(rows, 5 * width)

    def backward(gradient, workspace, has_bias):
        rows, width = gradient.shape
        gate_grads = [workspace.new_empty(rows, 3 * width) for _ in range(2)]
        bias_grads = [None, None]
        if has_bias:
            bias_grads = [workspace.new_empty(3 * width) for _ in range(2)]
        # Of the gates of input and hidden state (N, 3 H), the state (N, H), and both biases (3 H).
        return *gate_grads, gradient.new_empty(rows, width), *bias_grads

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(cell, forward, "Meta")
        library.impl(f"{cell}_backward", backward, "Meta")
        yield

"""Find the caller of an op in the call stack: a line of the user's code, or a `GradScaler`."""

import contextlib
import itertools
import linecache
import os
import sys
import traceback

import torch

import amp_lab

# Beginnings of the files whose lines are not the user's.
_LIBRARIES = (
    *(os.path.dirname(module.__file__) + os.sep for module in (torch, amp_lab)),
    contextlib.__file__,
    "<frozen",
)


def user_line() -> str | None:
    """The innermost line of the call stack outside of torch and this package.

    An example is ``model.py:12, forward: x = x.log()``. None if there is no such line.
    """
    for frame, number in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
            return f"{os.path.basename(code.co_filename)}:{number}, {code.co_name}: {text}"
    return None


def applied_loss_scale(args: tuple) -> float | None:
    """The loss scale, if the product `args[0] * args[1]` is computed in `GradScaler.scale`.

    None for any other product.
    """
    scale = args[1]  # the scaler multiplies the loss by it
    if not isinstance(scale, torch.Tensor) or scale.dim():
        return None
    if not is_in_scaler("scale", "apply_scale"):
        return None
    return scale.item()


def is_in_scaler(*methods: str) -> bool:
    """Whether one of these methods of a `GradScaler` is among the last ten callers."""
    # Not more: this runs for many ops, and the scaler calls torch through few functions.
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe()), 10):
        is_method = frame.f_code.co_name in methods
        if is_method and isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
    return False


def in_backward() -> bool:
    """Whether a backward pass runs now in this thread."""
    return torch._C._current_graph_task_id() != -1

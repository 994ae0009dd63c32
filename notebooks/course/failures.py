"""Helpers of notebooks 08a to 08h: messages as text, and the rules of CUDA without a GPU."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def message_of(call: Callable[[], Any]) -> str:
    """The message of the error that `call()` must raise."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("this was expected to fail")


def warnings_of(call: Callable[[], Any]) -> str:
    """The messages of all warnings that `call()` gives, one on each line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(warning.message) for warning in caught)


@contextmanager
def cuda_rules(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """Inside: fake tensors only, and the policy of CUDA's autocast. It needs no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def make(*layers: nn.Module, lr: float = 0.1) -> tuple[nn.Sequential, torch.optim.SGD]:
    """A model of `layers` (by default one linear layer), freshly initialised, and its SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or [nn.Linear(2, 2)]))
    for layer in model:
        reset = getattr(layer, "reset_parameters", None)
        if reset is not None:
            reset()
    return model, torch.optim.SGD(model.parameters(), lr=lr)

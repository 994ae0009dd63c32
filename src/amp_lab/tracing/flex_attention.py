"""Run `flex_attention` in a trace: on fake tensors, and with gradients on a CPU.

torch runs it through a compiler and a kernel of the device. Here, fake tensors run one attention op
that saves the same tensors for the backward pass. Real tensors run torch's plain ops.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import math_attention
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as flex_module
from torch.overrides import handle_torch_function, has_torch_function

from amp_lab.tracing.attention import running_flex_attention
from amp_lab.tracing.attributes import attribute_set

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # output, log-sum-exp, largest scores


@contextmanager
def flex_attention_traced(*, any_device: bool = False) -> Iterator[None]:
    """The block in which `flex_attention` runs in Python, so that a trace can follow it.

    On fake tensors, the gradient of a tensor that `score_mod` captures is missing.

    Args:
        any_device: Whether a device on which torch refuses its backward pass, such as a CPU, runs
            one in plain ops. It is for runs that take the place of another device's.
    """
    values: dict[str, object] = {
        "flex_attention_hop": flex_attention,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    if any_device:
        values["_validate_device"] = lambda query, key, value: None
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(attribute_set(flex_module, name, value))
        yield


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable,
    block_mask: tuple,
    scale: float,
    kernel_options: dict,
) -> Outputs:
    """Takes the place of torch's op `flex_attention_hop`, with the name that an X-ray shows.

    Shapes are those of `Attention`: the output is (B, H, T, V), the other results are (B, H, T).
    The arguments are those of torch's op; `score_mod` and `block_mask` have no effect on fake
    tensors.
    """
    tensors = (query, key, value)
    options = (score_mod, block_mask, scale, kernel_options)
    if has_torch_function(tensors):  # a function mode, as an X-ray has one, gets the call first
        return handle_torch_function(flex_attention, tensors, *tensors, *options)
    if isinstance(query, FakeTensor):
        with running_flex_attention():
            output = F.scaled_dot_product_attention(*tensors, scale=scale, enable_gqa=True)
        # The log-sum-exp and the largest scores have no values here, so one tensor does for both.
        scores_summary = query.new_empty(query.shape[:-1], dtype=torch.float32)
        return output, scores_summary, scores_summary
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # TransformGetItemToIndex lets score_mod index tensors under vmap.
    with torch.autocast(device_type, enabled=False), TransformGetItemToIndex():
        return math_attention(query, key, value, *options)

"""Checks for notebook 17, Train and fine-tune a language model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course.exercises import call, exercise, need


@exercise
def check_logits(gibibytes: float) -> str:
    """Logits in bf16 and fp32 of 4 x 4096 tokens over 151,936 words."""
    values = 4 * 4096 * 151_936
    right = values * 6 / 2**30
    need(
        abs(gibibytes - values * 6 / 1e9) > 0.05,
        f"{gibibytes:.4g} is right in GB, of 10^9 bytes: a GiB has 2^30.",
    )
    need(abs(gibibytes - values * 2 / 2**30) > 0.05, "That is bf16 alone: the copy comes on top.")
    need(abs(gibibytes - values * 4 / 2**30) > 0.05, "That is the fp32 copy alone.")
    need(abs(gibibytes - right) < 0.05, f"It is not {gibibytes:.4g} GiB: six bytes a value.")
    return "And the backward pass makes gradients of the same size."


@exercise
def check_agreement(attend: Callable[[Tensor, Tensor, Tensor], Any]) -> str:
    """Attention with q and k in fp32 and v in 16 bits."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    for dtype in (torch.bfloat16, torch.float16):
        found = call(attend, q, k, v.to(dtype))
        name = str(dtype).removeprefix("torch.")
        need(
            found.dtype == dtype,
            f"For v in {name} it returns {str(found.dtype).removeprefix('torch.')}.",
        )
        right = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype))
        need(
            torch.equal(found, right),
            f"It was not computed in {name}: cast q and k down, rather than v up.",
        )
    return "In 16 bits the flash kernels of GPUs can take it."


@exercise
def check_chunked(mean_of_chunks: Callable[[Tensor, Tensor], Any]) -> str:
    """The mean over targets that are no padding, from two chunks."""
    torch.manual_seed(0)
    logits, targets = torch.randn(8, 5), torch.tensor([1, 2, 3, 4, 0, -100, -100, -100])
    found, right = call(mean_of_chunks, logits, targets), F.cross_entropy(logits, targets)
    halves = zip(logits.chunk(2), targets.chunk(2), strict=True)
    means = torch.stack([F.cross_entropy(*half) for half in halves]).mean()
    need(
        not torch.allclose(found, means),
        "That is the mean of two means, and the second chunk has a single target.",
    )
    need(
        not torch.allclose(found, right * 5 / 8),
        "Padding is counted: divide by the number of targets that are not -100.",
    )
    need(bool(torch.allclose(found, right)), f"It is {found:.4f}, and not the mean.")
    return "The same holds for accumulation over batches with padding."


@exercise
def check_merge(merge: Callable[[Tensor, Tensor, Tensor, float], Any]) -> str:
    """A weight in bf16 with an adapter merged into it."""
    torch.manual_seed(0)
    weight = torch.randn(32, 32).bfloat16()
    up, down, scaling = torch.randn(32, 4) * 0.01, torch.randn(4, 32) * 0.1, 2.0
    found = call(merge, weight, up, down, scaling)
    need(found.dtype is torch.bfloat16, "The merged weight has to be bf16, like the base.")
    right = (weight.float() + scaling * (up @ down)).bfloat16()
    need(
        not torch.equal(found, (weight.float() + up @ down).bfloat16()),
        "The scaling is missing.",
    )
    twice = weight + (scaling * (up @ down)).bfloat16()
    need(not torch.equal(found, twice), "The update was rounded before it was added.")
    need(torch.equal(found, right), "It is not the sum in fp32, rounded once.")
    return "Once is as good as bf16 can be. The adapter alone loses nothing."

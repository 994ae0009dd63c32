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
        f"{gibibytes:.4g} would be right in GB, which is 10^9 bytes. A GiB has 2^30 bytes.",
    )
    need(abs(gibibytes - values * 2 / 2**30) > 0.05, "This is bf16 alone. Add the fp32 copy.")
    need(abs(gibibytes - values * 4 / 2**30) > 0.05, "This is the fp32 copy alone.")
    need(
        abs(gibibytes - right) < 0.05,
        f"{gibibytes:.4g} GiB is wrong. Count six bytes for each value.",
    )
    return "In addition, the backward pass computes gradients of the same size."


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
            f"For v in {name}, your function returns {str(found.dtype).removeprefix('torch.')}.",
        )
        right = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype))
        need(
            torch.equal(found, right),
            f"The attention did not run in {name}. Cast q and k to the dtype of v, instead of "
            "v to fp32.",
        )
    return "In 16 bits, a GPU can use its flash attention kernels."


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
        "This is the mean of two means, but the second chunk has only one target.",
    )
    need(
        not torch.allclose(found, right * 5 / 8),
        "You counted the padding too. Divide by the number of targets that are not -100.",
    )
    need(bool(torch.allclose(found, right)), f"{found:.4f} is not the mean.")
    return "The same is true if you accumulate gradients over batches with padding."


@exercise
def check_merge(merge: Callable[[Tensor, Tensor, Tensor, float], Any]) -> str:
    """A weight in bf16 with an adapter merged into it."""
    torch.manual_seed(0)
    weight = torch.randn(32, 32).bfloat16()
    up, down, scaling = torch.randn(32, 4) * 0.01, torch.randn(4, 32) * 0.1, 2.0
    found = call(merge, weight, up, down, scaling)
    need(found.dtype is torch.bfloat16, "The merged weight must be bf16, like the base weight.")
    right = (weight.float() + scaling * (up @ down)).bfloat16()
    need(
        not torch.equal(found, (weight.float() + up @ down).bfloat16()),
        "Multiply the update by `scaling`.",
    )
    twice = weight + (scaling * (up @ down)).bfloat16()
    need(not torch.equal(found, twice), "You rounded the update before you added it.")
    need(torch.equal(found, right), "The result is not the fp32 sum, rounded once.")
    return (
        "One rounding is the best result in bf16. An adapter that you do not merge has no "
        "such error."
    )

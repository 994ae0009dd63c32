"""Checks for notebook 17, Train and fine-tune a language model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course.exercises import call, exercise, need

from amp_lab.core.report import dtype_name

_GIB = 2**30


@exercise
def check_logits(gibibytes: float) -> str:
    """Logits in bf16 and fp32 of 4 x 4096 tokens over 151,936 words."""
    values = 4 * 4096 * 151_936
    total_bytes = values * 6
    right = total_bytes / _GIB
    gigabytes = total_bytes / 1e9
    gb_difference = abs(gibibytes - gigabytes)
    need(
        gb_difference > 0.05,
        f"{gibibytes:.4g} would be right in GB, which is 10^9 bytes. A GiB has 2^30 bytes.",
    )
    bf16_size = values * 2 / _GIB
    bf16_difference = abs(gibibytes - bf16_size)
    need(bf16_difference > 0.05, "This is bf16 alone. Add the fp32 copy.")
    fp32_size = values * 4 / _GIB
    fp32_difference = abs(gibibytes - fp32_size)
    need(fp32_difference > 0.05, "This is the fp32 copy alone.")
    error = abs(gibibytes - right)
    need(
        error < 0.05,
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
        name = dtype_name(dtype)
        found_name = dtype_name(found.dtype)
        need(found.dtype == dtype, f"For v in {name}, your function returns {found_name}.")
        low_q = q.to(dtype)
        low_k = k.to(dtype)
        low_v = v.to(dtype)
        right = F.scaled_dot_product_attention(low_q, low_k, low_v)
        is_equal = torch.equal(found, right)
        need(
            is_equal,
            f"The attention did not run in {name}. Cast q and k to the dtype of v, instead of "
            "v to fp32.",
        )
    return "In 16 bits, a GPU can use its flash attention kernels."


@exercise
def check_chunked(mean_of_chunks: Callable[[Tensor, Tensor], Any]) -> str:
    """The mean over targets that are no padding, from two chunks."""
    torch.manual_seed(0)
    logits = torch.randn(8, 5)
    targets = torch.tensor([1, 2, 3, 4, 0, -100, -100, -100])
    found = call(mean_of_chunks, logits, targets)
    right = F.cross_entropy(logits, targets)
    first_mean = F.cross_entropy(logits[:4], targets[:4])
    second_mean = F.cross_entropy(logits[4:], targets[4:])
    mean_of_means = (first_mean + second_mean) / 2
    is_mean_of_means = torch.allclose(found, mean_of_means)
    need(
        not is_mean_of_means,
        "This is the mean of two means, but the second chunk has only one target.",
    )
    mean_with_padding = right * 5 / 8
    is_mean_with_padding = torch.allclose(found, mean_with_padding)
    need(
        not is_mean_with_padding,
        "You counted the padding too. Divide by the number of targets that are not -100.",
    )
    is_mean = torch.allclose(found, right)
    need(is_mean, f"{found:.4f} is not the mean.")
    return "The same is true if you accumulate gradients over batches with padding."


@exercise
def check_merge(merge: Callable[[Tensor, Tensor, Tensor, float], Any]) -> str:
    """A weight in bf16 with an adapter merged into it."""
    torch.manual_seed(0)
    weight = torch.randn(32, 32).bfloat16()
    up = torch.randn(32, 4) * 0.01
    down = torch.randn(4, 32) * 0.1
    scaling = 2.0
    found = call(merge, weight, up, down, scaling)
    need(found.dtype is torch.bfloat16, "The merged weight must be bf16, like the base weight.")
    unscaled_update = up @ down
    update = scaling * unscaled_update
    right = (weight.float() + update).bfloat16()
    without_scaling = (weight.float() + unscaled_update).bfloat16()
    is_unscaled = torch.equal(found, without_scaling)
    need(not is_unscaled, "Multiply the update by `scaling`.")
    rounded_twice = weight + update.bfloat16()
    is_rounded_twice = torch.equal(found, rounded_twice)
    need(not is_rounded_twice, "You rounded the update before you added it.")
    is_right = torch.equal(found, right)
    need(is_right, "The result is not the fp32 sum, rounded once.")
    return (
        "One rounding is the best result in bf16. An adapter that you do not merge has no "
        "such error."
    )

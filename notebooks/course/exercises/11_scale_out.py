"""Checks for notebook 11, Train with AMP on several devices."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need

_PARAMETERS = 100e6
_RANKS = 8


@exercise
def check_megabytes(megabytes: float) -> str:
    """What a rank sends in a step of DDP under bf16 autocast: an all_reduce of fp32 gradients."""
    payload = _PARAMETERS * torch.float32.itemsize / 1e6
    right = 2 * (_RANKS - 1) / _RANKS * payload
    is_half = math.isclose(megabytes, right / 2)
    need(
        not is_half,
        f"{megabytes:g} MB would be right for gradients in bf16, or for only one half of an "
        "all_reduce. Autocast casts the inputs of ops, but the weights and gradients are "
        "fp32.",
    )
    is_payload = math.isclose(megabytes, payload)
    need(
        not is_payload,
        f"{megabytes:g} MB is the size of the gradients. An all_reduce is a reduce_scatter "
        "followed by an all_gather. In each of them, a rank sends (n-1)/n of this size.",
    )
    is_twice_the_payload = math.isclose(megabytes, 2 * payload)
    need(
        not is_twice_the_payload,
        f"{megabytes:g} MB is twice the size of the gradients. But a rank does not send its "
        "own part.",
    )
    is_right = math.isclose(megabytes, right)
    need(
        is_right,
        f"{megabytes} MB is wrong. Count 4 bytes for each gradient, and multiply by the factor"
        " for an all_reduce on 8 ranks.",
    )
    return f"The gradients take {payload:g} MB, and each rank sends 2(n-1)/n of this size."


def _bytes_per_parameter() -> int:
    """The bytes of an fp32 weight, its gradient and AdamW's two averages, measured on a layer."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    loss = layer(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()
    weight = layer.weight
    state = optimizer.state[weight].values()
    averages = [t for t in state if t.dim() > 0]  # not the counter of steps
    tensors = [weight, weight.grad, *averages]
    total = sum(t.nbytes for t in tensors if t is not None)
    return total // weight.numel()


@exercise
def check_per_rank(gigabytes: float) -> str:
    """What FSDP2 holds on each of eight ranks for 7 billion parameters with AdamW."""
    bytes_each = _bytes_per_parameter()
    unsharded = 7 * bytes_each
    right = unsharded / _RANKS
    is_unsharded = math.isclose(gigabytes, unsharded)
    need(
        not is_unsharded,
        f"{gigabytes:g} GB is the memory on each rank with DDP. FSDP2 divides it by the number"
        " of ranks.",
    )
    for bytes_with_bf16 in (8, 12, 14):
        has_bf16 = math.isclose(gigabytes, 7 * bytes_with_bf16 / _RANKS)
        need(
            not has_bf16,
            f"{gigabytes:g} GB counts weights, gradients or state in bf16. The shards stay fp32. "
            "FSDP2 uses bf16 only to send and to compute.",
        )
    is_right = math.isclose(gigabytes, right)
    need(
        is_right,
        f"{gigabytes} GB is wrong. Add the bytes of weight, gradient and AdamW's two averages "
        "for one parameter. Multiply the sum by 7 billion, and divide it by the number of "
        "ranks.",
    )
    return f"{bytes_each} bytes for each of 7 billion parameters, divided by {_RANKS} ranks."


def _run_step(
    step: Callable[..., Any], overflows_elsewhere: bool
) -> tuple[list[torch.Tensor], float]:
    """The weights after such a step, and the scale."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def average(model: nn.Module) -> None:  # another rank has the same gradient, or an overflow
        for p in model.parameters():
            if overflows_elsewhere and p.grad is not None:
                p.grad += torch.inf

    outputs = model(torch.randn(8, 4))
    loss = 10 * outputs.square().mean()
    call(step, loss, model, optimizer, scaler, average)
    weights = [p.detach() for p in model.parameters()]
    return weights, scaler.get_scale()


@exercise
def check_one_step(step: Callable[..., Any]) -> str:
    """A step that skips if another rank overflowed, and clips to a norm of 1 if none did."""

    def plain(loss: torch.Tensor, model: nn.Module, optimizer: Any, *_: Any) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    weights, scale = _run_step(step, overflows_elsewhere=True)
    start, _ = _run_step(lambda *_: None, overflows_elsewhere=False)
    for weight in weights:
        is_finite = bool(weight.isfinite().all())
        need(
            is_finite,
            "Another rank had an overflow, and averaging gave this rank infinite gradients. The "
            "optimizer took the step, so the weights are not finite. Average the gradients before"
            " the scaler checks them.",
        )
    is_skipped = scale == 512 and all(map(torch.equal, weights, start))
    need(
        is_skipped,
        "After an overflow on another rank, this rank should skip the step, and its scale "
        f"should fall to 512. The scale is {scale:g}. Do you average the gradients, and do you"
        " call `update`?",
    )
    found, _ = _run_step(step, overflows_elsewhere=False)
    right, _ = _run_step(plain, overflows_elsewhere=False)
    for a, b in zip(found, right, strict=True):
        is_same = torch.allclose(a, b, atol=1e-6)
        need(
            is_same,
            "Without an overflow, the weights differ from those after an fp32 step clipped to a "
            "norm of 1. Unscale the gradients, clip them, and then call `step`.",
        )
    return (
        "An overflow on any rank skips the step. Otherwise, the step is the same as a "
        "clipped step in fp32."
    )


@exercise
def check_loss_of_all(mean: Callable[..., Any]) -> str:
    """The mean over all samples, from means of unequal parts."""
    generator = torch.Generator().manual_seed(0)
    samples = [5, 3, 1]
    parts = [torch.rand(n, generator=generator, dtype=torch.float64) for n in samples]
    means = [p.mean().item() for p in parts]
    mean_of_means = sum(means) / 3
    wanted = torch.cat(parts).mean().item()
    result = call(mean, means, samples)
    found = float(result)
    is_mean_of_means = math.isclose(found, mean_of_means)
    need(
        not is_mean_of_means,
        f"For parts of 5, 3 and 1 samples, your function returns {found:.4f}. This is the mean"
        " of the means: it gives the one sample of the last rank as much weight as the five "
        "samples of the first.",
    )
    is_right = math.isclose(found, wanted)
    need(
        is_right,
        f"For parts of 5, 3 and 1 samples, your function returns {found:.4f}, but the mean of "
        f"all nine losses is {wanted:.4f}.",
    )
    return "The mean of each rank is weighted by its number of samples."

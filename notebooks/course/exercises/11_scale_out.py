"""Checks for notebook 11, Train with AMP on several devices."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need

_PARAMETERS, _RANKS = 100e6, 8


@exercise
def check_megabytes(megabytes: float) -> str:
    """What a rank sends in a step of DDP under bf16 autocast: an all_reduce of fp32 gradients."""
    payload = _PARAMETERS * torch.float32.itemsize / 1e6
    right = 2 * (_RANKS - 1) / _RANKS * payload
    need(
        not math.isclose(megabytes, right / 2),
        f"{megabytes:g} MB would be right for gradients in bf16, or for only one half of an "
        "all_reduce. Autocast casts the inputs of ops, but the weights and gradients are "
        "fp32.",
    )
    need(
        not math.isclose(megabytes, payload),
        f"{megabytes:g} MB is the size of the gradients. An all_reduce is a reduce_scatter "
        "followed by an all_gather. In each of them, a rank sends (n-1)/n of this size.",
    )
    need(
        not math.isclose(megabytes, 2 * payload),
        f"{megabytes:g} MB is twice the size of the gradients. But a rank does not send its "
        "own part.",
    )
    need(
        math.isclose(megabytes, right),
        f"{megabytes} MB is wrong. Count 4 bytes for each gradient, and multiply by the factor"
        " for an all_reduce on 8 ranks.",
    )
    return f"The gradients take {payload:g} MB, and each rank sends 2(n-1)/n of this size."


@exercise
def check_per_rank(gigabytes: float) -> str:
    """What FSDP2 holds on each of eight ranks for 7 billion parameters with AdamW."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = [t for found in optimizer.state.values() for t in found.values() if t.dim() > 0]
    held = [*layer.parameters(), *(p.grad for p in layer.parameters()), *state]
    numbers = sum(p.numel() for p in layer.parameters())
    each = sum(t.nbytes for t in held if t is not None) // numbers
    whole = 7 * each
    need(
        not math.isclose(gigabytes, whole),
        f"{gigabytes:g} GB is the memory on each rank with DDP. FSDP2 divides it by the number"
        " of ranks.",
    )
    need(
        not any(math.isclose(gigabytes, 7 * b / _RANKS) for b in (8, 12, 14)),
        f"{gigabytes:g} GB counts weights, gradients or state in bf16. The shards stay fp32. "
        "FSDP2 uses bf16 only to send and to compute.",
    )
    need(
        math.isclose(gigabytes, whole / _RANKS),
        f"{gigabytes} GB is wrong. Add the bytes of weight, gradient and AdamW's two averages "
        "for one parameter. Multiply the sum by 7 billion, and divide it by the number of "
        "ranks.",
    )
    return f"{each} bytes for each of 7 billion parameters, divided by {_RANKS} ranks."


def _stepped(step: Callable[..., Any], overflows_elsewhere: bool) -> tuple[bool, list, float]:
    """Whether weights are finite after such a step, the weights, and the scale."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def average(model: nn.Module) -> None:  # another rank has the same gradient, or an overflow
        for p in model.parameters():
            if overflows_elsewhere and p.grad is not None:
                p.grad += torch.inf

    loss = 10 * model(torch.randn(8, 4)).square().mean()
    call(step, loss, model, optimizer, scaler, average)
    weights = [p.detach() for p in model.parameters()]
    return all(bool(w.isfinite().all()) for w in weights), weights, scaler.get_scale()


@exercise
def check_one_step(step: Callable[..., Any]) -> str:
    """A step that skips if another rank overflowed, and clips to a norm of 1 if none did."""

    def plain(loss: torch.Tensor, model: nn.Module, optimizer: Any, *_: Any) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    finite, weights, scale = _stepped(step, overflows_elsewhere=True)
    _, start, _ = _stepped(lambda *_: None, overflows_elsewhere=False)
    need(
        finite,
        "Another rank had an overflow, and averaging gave this rank infinite gradients. The "
        "optimizer took the step, so the weights are not finite. Average the gradients before"
        " the scaler checks them.",
    )
    need(
        scale == 512 and all(map(torch.equal, weights, start)),
        "After an overflow on another rank, this rank should skip the step, and its scale "
        f"should fall to 512. The scale is {scale:g}. Do you average the gradients, and do you"
        " call `update`?",
    )
    _, found, _ = _stepped(step, overflows_elsewhere=False)
    _, right, _ = _stepped(plain, overflows_elsewhere=False)
    need(
        all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, right, strict=True)),
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
    parts = [torch.rand(n, generator=generator, dtype=torch.float64) for n in (5, 3, 1)]
    found = float(call(mean, [p.mean().item() for p in parts], [len(p) for p in parts]))
    wanted, of_means = torch.cat(parts).mean().item(), sum(p.mean().item() for p in parts) / 3
    need(
        not math.isclose(found, of_means),
        f"For parts of 5, 3 and 1 samples, your function returns {found:.4f}. This is the mean"
        " of the means: it gives the one sample of the last rank as much weight as the five "
        "samples of the first.",
    )
    need(
        math.isclose(found, wanted),
        f"For parts of 5, 3 and 1 samples, your function returns {found:.4f}, but the mean of "
        f"all nine losses is {wanted:.4f}.",
    )
    return "The mean of each rank is weighted by its number of samples."

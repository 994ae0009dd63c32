"""Checks for notebook 06, Train a ResNet-50 on twice the batch in the same memory."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need

_MIB = 2**20


@exercise
def check_map_size(mib: float) -> str:
    """The size of the maps (256, 128, 56, 56) in bf16."""
    maps = torch.empty(256, 128, 56, 56, dtype=torch.bfloat16, device="meta")
    right = maps.nbytes / _MIB
    numbers = maps.numel() / _MIB
    in_fp32 = maps.float().nbytes / _MIB
    error = abs(mib / right - 1)
    need(mib != numbers, "You counted the values. Each of them has two bytes.")
    need(mib != in_fp32, "This is the size in fp32, with four bytes for each value.")
    need(
        error < 0.01,
        f"{mib:g} is wrong. Multiply images, channels, height, width and bytes, and divide by "
        "2^20.",
    )
    return f"{maps.numel():,} values of two bytes take {right:.0f} MiB."


@exercise
def check_largest_batch(images: int) -> str:
    """The largest multiple of 32 for which 96 MiB and 5.55 MiB an image fit into 7 GiB."""
    whole = 8 * 1024
    free = 7 * 1024
    always = 96
    each = 5.55
    is_multiple = images > 0 and images % 32 == 0
    need(is_multiple, f"{images:g} is not a positive multiple of 32.")
    used = always + images * each
    with_32_more = used + 32 * each
    need(
        used <= whole,
        f"A step with {images} images takes {used:,.0f} MiB. This is more than the memory of "
        "the GPU.",
    )
    need(
        used <= free,
        f"A step with {images} images takes {used:,.0f} MiB. This fits into the GPU, but "
        "leaves less than 1 GiB free.",
    )
    need(
        with_32_more > free,
        f"{images} images take {used:,.0f} MiB of {free}, so 32 more images also fit.",
    )
    return f"{images} images take {used:,.0f} MiB of {free}, and 32 more images do not fit."


@exercise
def check_head_mode(head_mode: Callable[..., Any]) -> str:
    """The modes of a small network with a batch normalisation and the head `fc`."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    head = nn.Sequential(nn.Dropout(), nn.Linear(4, 2))
    model = nn.Sequential()
    model.add_module("norm", norm)
    model.add_module("fc", head)
    model.train()
    returned = call(head_mode, model)
    need(
        returned is model,
        "Return the model that you were given. You returned an object of type "
        f"{type(returned).__name__}.",
    )
    before = norm.state_dict()["running_mean"].clone()
    model(torch.randn(8, 4))
    after = norm.state_dict()["running_mean"]
    need(
        torch.equal(after, before),
        "A running average of the backbone changed: its batch normalization is still in "
        "training mode. `requires_grad` does not prevent this.",
    )
    need(
        all(module.training for module in head.modules()),
        "The backbone is right, but the head is not in training mode, so its dropout does nothing.",
    )
    return "The running averages of the backbone do not change, and the head is in training mode."


def _bytes_of(autocast: bool) -> dict[str, int]:
    """The bytes of what a training step of a small network holds, by kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    images = torch.randn(4, 8)
    outputs: list[torch.Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda m, x, y: outputs.append(y))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(images).float().square().mean()
    loss.backward()
    optimizer.step()
    weights = list(model.parameters())
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return {
        "images": images.nbytes,
        "activations": _nbytes(outputs),
        "weights": _nbytes(weights),
        "gradients": _nbytes(gradients),
        "optimizer state": _nbytes(moments),
    }


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@exercise
def check_halved(names: Iterable[str]) -> str:
    """What takes half the bytes under autocast, by a step that is counted in both ways."""
    fp32 = _bytes_of(autocast=False)
    amp = _bytes_of(autocast=True)
    smaller = {kind for kind in fp32 if amp[kind] < fp32[kind]}
    chosen = {names} if isinstance(names, str) else set(names)
    unknown = chosen - fp32.keys()
    listed = ", ".join(map(str, unknown))
    need(not unknown, f"{listed}: use the names from the exercise.")
    for kind in fp32:
        if kind in chosen:
            need(
                kind in smaller,
                f"In a small step, the {kind} took {fp32[kind]} bytes in FP32 and {amp[kind]} "
                "bytes under autocast: no op under autocast returned them.",
            )
    need(smaller <= chosen, "You left out something that an op under autocast returns.")
    before, after = fp32["activations"], amp["activations"]
    return f"In a small step, only the activations became smaller, from {before} to {after} bytes."

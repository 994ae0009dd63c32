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
    need(mib != maps.numel() / _MIB, "You have counted numbers; each of them has two bytes.")
    need(mib != maps.float().nbytes / _MIB, "That is the size in fp32, with four bytes a number.")
    need(
        abs(mib / right - 1) < 0.01,
        f"{mib:g} is not it: multiply images, maps, height, width and bytes, and divide by 2^20.",
    )
    return f"{maps.numel():,} numbers of two bytes are {right:.0f} MiB."


@exercise
def check_largest_batch(images: int) -> str:
    """The largest multiple of 32 for which 96 MiB and 5.55 MiB an image fit into 7 GiB."""
    free, always, each = 7 * 1024, 96, 5.55
    need(
        images > 0 and images % 32 == 0,
        f"{images:g} is no positive multiple of 32.",
    )
    used = always + images * each
    need(
        used <= 8 * 1024,
        f"A step with {images} images takes {used:,.0f} MiB, more than the whole GPU has.",
    )
    need(
        used <= free,
        f"A step with {images} images takes {used:,.0f} MiB: that fits into the GPU, but leaves "
        "less than the GiB that was to stay free.",
    )
    need(
        used + 32 * each > free,
        f"{images} images take {used:,.0f} MiB of {free}, so 32 more fit as well.",
    )
    return f"{images} images take {used:,.0f} MiB of {free}, and 32 more would not fit."


@exercise
def check_head_mode(head_mode: Callable[..., Any]) -> str:
    """The modes of a small network with a batch normalisation and the head `fc`."""
    torch.manual_seed(0)
    norm, head = nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.Linear(4, 2))
    model = nn.Sequential()
    model.add_module("norm", norm)
    model.add_module("fc", head)
    model.train()
    returned = call(head_mode, model)
    need(
        returned is model,
        f"Return the model that was given; this is {type(returned).__name__}.",
    )
    before = norm.state_dict()["running_mean"].clone()
    model(torch.randn(8, 4))
    need(
        torch.equal(norm.state_dict()["running_mean"], before),
        "A running average of the backbone has moved: its batch normalisation is still in training "
        "mode, whatever `requires_grad` says.",
    )
    need(
        all(module.training for module in head.modules()),
        "The backbone is quiet, but the head is not in training mode, so that its dropout does "
        "nothing.",
    )
    return "The backbone's averages stay as they are, and the head is in training mode."


def _bytes_of(autocast: bool) -> dict[str, int]:
    """The bytes of what a training step of a small network holds, by kind."""
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
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
    kinds = {"images": [images], "activations": outputs, "weights": weights}
    kinds |= {"gradients": gradients, "optimizer state": moments}
    return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kinds.items()}


@exercise
def check_halved(names: Iterable[str]) -> str:
    """What takes half the bytes under autocast, by a step that is counted in both ways."""
    fp32, amp = _bytes_of(autocast=False), _bytes_of(autocast=True)
    chosen = {names} if isinstance(names, str) else set(names)
    need(
        chosen <= fp32.keys(),
        f"{', '.join(map(str, chosen - fp32.keys()))}: the names are those of the task.",
    )
    for kind in fp32:
        if kind in chosen:
            need(
                amp[kind] < fp32[kind],
                f"In a small step the {kind} took {fp32[kind]} bytes in FP32 and {amp[kind]} under "
                "autocast: no op under autocast has made them.",
            )
    need(
        all(kind in chosen for kind in fp32 if amp[kind] < fp32[kind]),
        "Something is missing that an op under autocast returns.",
    )
    before, after = fp32["activations"], amp["activations"]
    return f"In a small step the activations fell from {before} to {after} bytes, and nothing else."

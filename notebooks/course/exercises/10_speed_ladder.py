"""Checks for notebook 10, Climb from FP32 towards the limit of your hardware."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course.exercises import call, exercise, need


@exercise
def check_layer_flops(flops: float) -> str:
    """The FLOPs of forward and backward of a 1x1 convolution inside of a network."""
    layer = nn.Conv2d(64, 128, 1)
    images = torch.ones(1, 64, 32, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = layer(images)
        forward = counter.get_total_flops()
        output.sum().backward()
    right = counter.get_total_flops()
    need(
        flops != forward,
        f"{flops:,} is the number for the forward pass. What does the backward pass add?",
    )
    need(
        flops != right / 2,
        f"{flops:,} counts one operation for each weight and pixel. A multiplication and an "
        "addition are two operations.",
    )
    need(
        flops != 2 * forward,
        f"{flops:,} counts only one matmul in the backward pass. It computes the gradient of "
        "the weights and the gradient of the input.",
    )
    need(
        flops == right,
        f"{flops:,} is wrong. Multiply pixels, weights, 2, and the number of matmuls in a step.",
    )
    return "torch counts the same: one matmul in the forward pass, and two in the backward pass."


@exercise
def check_least_ms(least_ms: Callable[..., Any]) -> str:
    """The least time of a step that computes and moves data at the same time, in ms."""
    for flops, nbytes, compute, move in ((4e9, 3e8, 40.0, 10.0), (1e9, 3e9, 10.0, 100.0)):
        found = float(call(least_ms, flops, nbytes, 1e11, 3e10))
        given = (
            f"With {flops:.0e} FLOPs at 1e11 per second, and {nbytes:.0e} bytes at 3e10 per second,"
        )
        right = max(compute, move)
        need(
            not math.isclose(found, right / 1e3),
            f"{given} you returned {found:g}. This is in seconds, but the question asks for "
            "milliseconds.",
        )
        need(
            not math.isclose(found, compute + move),
            f"{given} you returned {found:g}, the sum of both times. The device can compute "
            "and move data at the same time, so a step can take less than the sum.",
        )
        need(
            not math.isclose(found, min(compute, move)),
            f"{given} you returned {found:g}, but the other of the two takes longer.",
        )
        need(
            math.isclose(found, right),
            f"{given} computing takes {compute:g} ms, and moving data takes {move:g} ms, but "
            f"you returned {found:g}.",
        )
    return "A step takes at least as long as the slower of the two. The roofline shows this limit."


@exercise
def check_to_channels_last(convert: Callable[..., Any]) -> str:
    """A model and its images with the channels of a pixel side by side in memory."""
    torch.manual_seed(0)
    model, images = nn.Conv2d(3, 5, 3), torch.randn(2, 3, 8, 6)
    output = model(images).detach()
    new_model, new_images = call(convert, model, images)
    need(
        new_images.shape == images.shape,
        f"The shape of the images is now {tuple(new_images.shape)} instead of "
        f"{tuple(images.shape)}. Only the order in memory should change.",
    )
    need(
        new_images.is_contiguous(memory_format=torch.channels_last),
        f"The strides of the images are {new_images.stride()}, but the stride between channels"
        " should be 1. `to` returns a new tensor and does not change the old one.",
    )
    need(
        new_model.weight.is_contiguous(memory_format=torch.channels_last),
        "The images are right, but the strides of the model's weight are still "
        f"{new_model.weight.stride()}.",
    )
    need(torch.allclose(new_model(new_images), output, atol=1e-5), "The output has changed.")
    return (
        "The shape and the output have not changed, and the channels of a pixel are next "
        "to each other in memory."
    )


@exercise
def check_pays_from(size: int) -> str:
    """The size from which on AMP pays for certain, from the intervals of four speed-ups."""
    intervals = {16: (1.02, 1.10), 32: (0.96, 1.08), 64: (1.05, 1.20), 128: (1.30, 1.50)}
    need(size in intervals, f"The answer is one of the sizes {', '.join(map(str, intervals))}.")
    unsure = [n for n, (low, _) in intervals.items() if n >= size and low <= 1]
    need(
        not unsure,
        f"The sizes from {size} on include {unsure[-1] if unsure else ''}. Its interval "
        "reaches below 1, so AMP may not be faster there.",
    )
    before = [n for n in intervals if n < size][-1]
    need(
        intervals[before][0] <= 1,
        f"AMP is faster from {size} on, but the interval of a smaller size also lies above 1.",
    )
    return (
        "From this size on, every interval lies above 1. The interval of size 32 reaches below 1."
    )

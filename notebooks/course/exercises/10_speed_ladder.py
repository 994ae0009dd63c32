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
    without_additions = right / 2
    with_one_backward_matmul = 2 * forward
    need(
        flops != forward,
        f"{flops:,} is the number for the forward pass. What does the backward pass add?",
    )
    need(
        flops != without_additions,
        f"{flops:,} counts one operation for each weight and pixel. A multiplication and an "
        "addition are two operations.",
    )
    need(
        flops != with_one_backward_matmul,
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
    flops_per_s = 1e11
    bytes_per_s = 3e10
    for flops, nbytes in ((4e9, 3e8), (1e9, 3e9)):
        result = call(least_ms, flops, nbytes, flops_per_s, bytes_per_s)
        found = float(result)
        given = (
            f"With {flops:.0e} FLOPs at 1e11 per second, and {nbytes:.0e} bytes at 3e10 per second,"
        )
        compute = 1e3 * flops / flops_per_s
        move = 1e3 * nbytes / bytes_per_s
        right = max(compute, move)
        is_in_seconds = math.isclose(found, right / 1e3)
        need(
            not is_in_seconds,
            f"{given} you returned {found:g}. This is in seconds, but the question asks for "
            "milliseconds.",
        )
        is_sum = math.isclose(found, compute + move)
        need(
            not is_sum,
            f"{given} you returned {found:g}, the sum of both times. The device can compute "
            "and move data at the same time, so a step can take less than the sum.",
        )
        shorter_time = min(compute, move)
        is_shorter_time = math.isclose(found, shorter_time)
        need(
            not is_shorter_time,
            f"{given} you returned {found:g}, but the other of the two takes longer.",
        )
        is_right = math.isclose(found, right)
        need(
            is_right,
            f"{given} computing takes {compute:g} ms, and moving data takes {move:g} ms, but "
            f"you returned {found:g}.",
        )
    return "A step takes at least as long as the slower of the two. The roofline shows this limit."


@exercise
def check_to_channels_last(convert: Callable[..., Any]) -> str:
    """A model and its images with the channels of a pixel side by side in memory."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 5, 3)
    images = torch.randn(2, 3, 8, 6)
    output = model(images).detach()
    new_model, new_images = call(convert, model, images)
    shape = images.shape
    new_shape = new_images.shape
    need(
        new_shape == shape,
        f"The shape of the images is now {tuple(new_shape)} instead of "
        f"{tuple(shape)}. Only the order in memory should change.",
    )
    is_channels_last = new_images.is_contiguous(memory_format=torch.channels_last)
    need(
        is_channels_last,
        f"The strides of the images are {new_images.stride()}, but the stride between channels"
        " should be 1. `to` returns a new tensor and does not change the old one.",
    )
    weight = new_model.weight
    is_weight_channels_last = weight.is_contiguous(memory_format=torch.channels_last)
    need(
        is_weight_channels_last,
        f"The images are right, but the strides of the model's weight are still {weight.stride()}.",
    )
    new_output = new_model(new_images)
    is_same = torch.allclose(new_output, output, atol=1e-5)
    need(is_same, "The output has changed.")
    return (
        "The shape and the output have not changed, and the channels of a pixel are next "
        "to each other in memory."
    )


@exercise
def check_pays_from(size: int) -> str:
    """The size from which on AMP pays for certain, from the intervals of four speed-ups."""
    lower_ends = {16: 1.02, 32: 0.96, 64: 1.05, 128: 1.30}
    sizes = ", ".join(map(str, lower_ends))
    is_size = size in lower_ends
    need(is_size, f"The answer is one of the sizes {sizes}.")
    unsure = [n for n, low in lower_ends.items() if n >= size and low <= 1]
    largest_unsure = max(unsure, default=None)
    need(
        largest_unsure is None,
        f"The sizes from {size} on include {largest_unsure}. Its interval reaches below 1, so AMP "
        "may not be faster there.",
    )
    smaller = [n for n in lower_ends if n < size]
    previous = smaller[-1]
    need(
        lower_ends[previous] <= 1,
        f"AMP is faster from {size} on, but the interval of a smaller size also lies above 1.",
    )
    return (
        "From this size on, every interval lies above 1. The interval of size 32 reaches below 1."
    )

"""Checks for notebook 18, Serve and export a model in reduced precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need

from amp_lab.core.report import dtype_name

_GIB = 2**30


@exercise
def check_gibibytes(gibibytes: float) -> str:
    """Weights of 8 billion parameters in INT8, with a scale for each row."""
    weights = 8e9
    scale_bytes = 4 / 4096
    total_bytes = weights * (1 + scale_bytes)
    right = total_bytes / _GIB
    gigabytes = total_bytes / 1e9
    gb_difference = abs(gibibytes - gigabytes)
    need(
        gb_difference > 0.02,
        f"{gibibytes:.3g} would be right in GB, which is 10^9 bytes. A GiB has 2^30 bytes.",
    )
    bf16_size = 2 * weights / _GIB
    bf16_difference = abs(gibibytes - bf16_size)
    need(bf16_difference > 0.05, "This is bf16, with two bytes for each weight.")
    with_own_scales = 5 * weights / _GIB
    own_scales_difference = abs(gibibytes - with_own_scales)
    need(
        own_scales_difference > 0.05,
        "The weights of a row share one scale, so it adds 4 / 4096 bytes for each weight, not 4.",
    )
    error = abs(gibibytes - right)
    need(
        error < 0.02,
        f"{gibibytes:.3g} GiB is wrong. Count one byte for each weight.",
    )
    return "The scales are a thousandth of this size. The KV cache needs additional memory."


@exercise
def check_changed(changed_share: Callable[[torch.Tensor, torch.Tensor], Any]) -> str:
    """The share of rows whose largest value stands elsewhere."""
    reference = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 0.6], [9.0, 8.0]])
    other = torch.tensor([[1.1, 1.9], [3.0, 1.1], [0.6, 0.5], [8.0, 7.0]]).bfloat16()
    found = float(call(changed_share, reference, other))
    need(found != 1, "This is the number of changed rows. Return their share.")
    need(found != 0.75, "This is the share of rows that did not change.")
    need(
        found == 0.25,
        f"One of four decisions changed, but your function returns {found:g}. Compare the "
        "positions of the largest values, not the values.",
    )
    unchanged_share = float(call(changed_share, reference, reference))
    need(unchanged_share == 0, "If nothing changed, return 0.")
    return "Report this share for your model, together with the number of inputs."


def _logits(images: torch.Tensor) -> torch.Tensor:
    """Ten logits for each image, in its dtype."""
    pixels = images.flatten(1)
    return pixels[:, :10] * 20


class _Half(nn.Module):
    """A model that takes images in bf16 only, and returns logits in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        name = dtype_name(x.dtype)
        need(
            x.dtype is torch.bfloat16,
            f"You passed {name} images to the bf16 model, so PyTorch would raise an error. Cast"
            " the images first.",
        )
        return _logits(x)


@exercise
def check_predict(predict: Callable[[nn.Module, torch.Tensor], Any]) -> str:
    """Probabilities in fp32 of a model in bf16."""
    torch.manual_seed(0)
    images = torch.rand(64, 1, 4, 4)
    found = call(predict, _Half(), images)
    name = dtype_name(found.dtype)
    need(
        found.dtype is torch.float32,
        f"Your function returns {name}, but it should return fp32 probabilities.",
    )
    sums = found.sum(1)
    sum_errors = (sums - 1).abs()
    worst = float(sum_errors.max())
    need(
        worst < 1e-5,
        f"The sum of the probabilities of an image differs from 1 by up to {worst:.2g}. Cast the"
        " logits to fp32, and then call softmax over the classes.",
    )
    logits = _logits(images.bfloat16())
    right = logits.float().softmax(1)
    is_softmax = torch.allclose(found, right)
    need(is_softmax, "These are not the softmax of the logits.")
    return "In bf16, the sum of the probabilities of an image would not even be 1."


@torch.no_grad()
def _random_norm() -> nn.BatchNorm2d:
    """A batch norm in eval mode with random statistics and parameters."""
    norm = nn.BatchNorm2d(4).eval()
    for values in (norm.running_mean, norm.weight, norm.bias):
        assert values is not None
        values.normal_()
    assert norm.running_var is not None
    norm.running_var.uniform_(0.5, 2)
    norm.eps = 0.1  # large, so that it cannot be left out
    return norm


def _without_mean(outputs: torch.Tensor) -> torch.Tensor:
    """The outputs minus the mean of their channel, so that a bias does not change them."""
    return outputs - outputs.mean((0, 2, 3), keepdim=True)


@exercise
def check_fold(fold: Callable[[nn.Conv2d, nn.BatchNorm2d], Any]) -> str:
    """One convolution that computes the same as a convolution and a batch norm."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3, bias=False)
    norm = _random_norm()
    with torch.no_grad():
        weight, bias = call(fold, convolution, norm)
        shape = tuple(weight.shape)
        need(
            shape == (4, 3, 3, 3),
            f"The weight has the shape {shape} instead of (4, 3, 3, 3). Multiply it by one "
            "factor for each output channel.",
        )
        x = torch.randn(2, 3, 8, 8)
        exact = norm(convolution(x))
        without_bias = nn.functional.conv2d(x, weight)
        folded = without_bias + bias[:, None, None]
        differences = (folded - exact).abs()
        weight_differences = (_without_mean(without_bias) - _without_mean(exact)).abs()
    weight_error = float(weight_differences.max())
    need(weight_error < 1e-4, "The weight is wrong. Check the factor of each output channel.")
    error = float(differences.max())
    need(
        error < 1e-4,
        f"The weight is right, but the outputs still differ by up to {error:.2g}. Check the "
        "bias: you have to subtract the mean times the factor.",
    )
    return "Compute this in fp32, and then cast the result."

"""Checks for notebook 18, Serve and export a model in reduced precision."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need


@exercise
def check_gibibytes(gibibytes: float) -> str:
    """Weights of 8 billion parameters in INT8, with a scale for each row."""
    right = 8e9 * (1 + 4 / 4096) / 2**30
    need(
        abs(gibibytes - right * 2**30 / 1e9) > 0.02,
        f"{gibibytes:.3g} would be right in GB, which is 10^9 bytes. A GiB has 2^30 bytes.",
    )
    need(
        abs(gibibytes - 2 * 8e9 / 2**30) > 0.05,
        "This is bf16, with two bytes for each weight.",
    )
    need(
        abs(gibibytes - 5 * 8e9 / 2**30) > 0.05,
        "The weights of a row share one scale, so it adds 4 / 4096 bytes for each weight, not 4.",
    )
    need(
        abs(gibibytes - right) < 0.02,
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
    need(float(call(changed_share, reference, reference)) == 0, "If nothing changed, return 0.")
    return "Report this share for your model, together with the number of inputs."


class _Half(nn.Module):
    """Logits in bf16; it remembers the dtype of what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x.dtype
        need(
            x.dtype is torch.bfloat16,
            f"You passed {str(x.dtype).removeprefix('torch.')} images to the bf16 model, so "
            "PyTorch would raise an error. Cast the images first.",
        )
        return x.flatten(1)[:, :10] * 20


@exercise
def check_predict(predict: Callable[[nn.Module, torch.Tensor], Any]) -> str:
    """Probabilities in fp32 of a model in bf16."""
    torch.manual_seed(0)
    images = torch.rand(64, 1, 4, 4)
    found = call(predict, _Half(), images)
    need(
        found.dtype is torch.float32,
        f"Your function returns {str(found.dtype).removeprefix('torch.')}, but it should "
        "return fp32 probabilities.",
    )
    off = float((found.sum(1) - 1).abs().max())
    need(
        off < 1e-5,
        f"The sum of the probabilities of an image differs from 1 by up to {off:.2g}. Cast the"
        " logits to fp32, and then call softmax over the classes.",
    )
    right = (images.bfloat16().flatten(1)[:, :10] * 20).float().softmax(1)
    need(bool(torch.allclose(found, right)), "These are not the softmax of the logits.")
    return "In bf16, the sum of the probabilities of an image would not even be 1."


@exercise
def check_fold(fold: Callable[[nn.Conv2d, nn.BatchNorm2d], Any]) -> str:
    """One convolution that computes the same as a convolution and a batch norm."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4).eval()
    with torch.no_grad():
        for values in (norm.running_mean, norm.weight, norm.bias):
            assert values is not None
            values.normal_()
        assert norm.running_var is not None
        norm.running_var.uniform_(0.5, 2)
        norm.eps = 0.1  # large, so that it cannot be left out
        weight, bias = call(fold, convolution, norm)
        need(
            tuple(weight.shape) == (4, 3, 3, 3),
            f"The weight has the shape {tuple(weight.shape)} instead of (4, 3, 3, 3). Multiply"
            " it by one factor for each output channel.",
        )
        x = torch.randn(2, 3, 8, 8)
        exact = norm(convolution(x))
        plain = nn.functional.conv2d(x, weight)
        off = (plain + (bias[:, None, None]) - exact).abs().amax((0, 2, 3))
        slope = (plain - plain.mean((0, 2, 3), keepdim=True)) - (
            exact - exact.mean((0, 2, 3), keepdim=True)
        )
    need(
        float(slope.abs().max()) < 1e-4,
        "The weight is wrong. Check the factor of each output channel.",
    )
    need(
        float(off.max()) < 1e-4,
        f"The weight is right, but the outputs still differ by up to {float(off.max()):.2g}. "
        "Check the bias: you have to subtract the mean times the factor.",
    )
    return "Compute this in fp32, and then cast the result."

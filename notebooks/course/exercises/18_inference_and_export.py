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
        f"{gibibytes:.3g} is right in GB, of 10^9 bytes: a GiB has 2^30.",
    )
    need(
        abs(gibibytes - 2 * 8e9 / 2**30) > 0.05,
        "That is bf16, with two bytes for each weight.",
    )
    need(
        abs(gibibytes - 5 * 8e9 / 2**30) > 0.05,
        "A row shares its scale: it costs a weight 4 / 4096 bytes, and not 4.",
    )
    need(abs(gibibytes - right) < 0.02, f"It is not {gibibytes:.3g} GiB: count a byte a weight.")
    return "The scales are a thousandth of it. The cache of keys and values comes on top."


@exercise
def check_changed(changed_share: Callable[[torch.Tensor, torch.Tensor], Any]) -> str:
    """The share of rows whose largest value stands elsewhere."""
    reference = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 0.6], [9.0, 8.0]])
    other = torch.tensor([[1.1, 1.9], [3.0, 1.1], [0.6, 0.5], [8.0, 7.0]]).bfloat16()
    found = float(call(changed_share, reference, other))
    need(found != 1, "That is the count: give the share of the rows.")
    need(found != 0.75, "That is the share that stayed the same.")
    need(
        found == 0.25,
        f"One of four decisions changed, and it returns {found:g}: compare where the largest value "
        "stands, and not the values.",
    )
    need(float(call(changed_share, reference, reference)) == 0, "Without a change it has to be 0.")
    return "This is the number to report for your model, with the number of inputs."


class _Half(nn.Module):
    """Logits in bf16; it remembers the dtype of what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x.dtype
        need(
            x.dtype is torch.bfloat16,
            f"The model with bf16 weights was given images in {str(x.dtype).removeprefix('torch.')}"
            ", which PyTorch refuses: cast them first.",
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
        f"It returns {str(found.dtype).removeprefix('torch.')}: users of probabilities want fp32.",
    )
    off = float((found.sum(1) - 1).abs().max())
    need(
        off < 1e-5,
        f"The probabilities of an image add up to something {off:.2g} away from 1: take the "
        "softmax, over the classes, of logits that are fp32 already.",
    )
    right = (images.bfloat16().flatten(1)[:, :10] * 20).float().softmax(1)
    need(bool(torch.allclose(found, right)), "They are no softmax of the logits.")
    return "In bf16 the probabilities of an image would not even add up to 1."


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
            f"The weight has the shape {tuple(weight.shape)}: it stays (4, 3, 3, 3), with a factor "
            "for each output channel.",
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
        "The weight differs from that of convolution and norm together: look at the factor.",
    )
    need(
        float(off.max()) < 1e-4,
        f"The weight is right, and the outputs are still up to {float(off.max()):.2g} off: look at "
        "the bias, from which the mean, times the factor, is taken.",
    )
    return "Do this in fp32, and cast the result."

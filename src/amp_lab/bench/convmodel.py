"""The quantized-sine problem: a network learns a picture from the coordinates of its pixels.

Problem and network are from AMD's ROCm blog, "Automatic mixed precision in PyTorch using AMD
GPUs" (March 2024). The work of four 1x1 convolutions over a large image is nearly all matmul, which
reduced precision speeds up most.
"""

import math

import torch
from torch import nn

LEVELS = 4


def quantized_sine(
    size: int = 512, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(inputs, target)`` in float32. This pair is the only training example.

    The inputs (1, 2, size, size) are the x and y coordinate of each pixel, in [0, 1]. The target
    (1, 1, size, size) is cos(4·2πx) + cos(2·2πy), scaled to [0, 1] and rounded to `LEVELS` levels.

    Raises `ValueError` if `size` is less than 2.
    """
    if size < 2:
        raise ValueError(f"quantized_sine: size={size} must be at least 2")
    line = torch.linspace(0, 1, size, device=device)
    y, x = torch.meshgrid(line, line, indexing="ij")  # each (size, size)
    along_x = torch.cos(4 * 2 * math.pi * x)
    along_y = torch.cos(2 * 2 * math.pi * y)
    wave = along_x + along_y  # in [-2, 2]
    scaled = (wave + 2) / 4  # in [0, 1]
    steps = LEVELS - 1  # between the levels
    target = torch.round(scaled * steps) / steps
    inputs = torch.stack([x, y])
    return inputs[None], target[None, None]


class ConvModel(nn.Sequential):
    """Three blocks of 1x1 convolution, batch normalisation and ReLU, then a 1x1 convolution.

    Maps (B, 2, H, W) to (B, 1, H, W); the first three convolutions have `hidden` output channels.
    """

    def __init__(self, hidden: int = 256):
        layers: list[nn.Module] = []
        for in_channels in (2, hidden, hidden):
            layers.append(nn.Conv2d(in_channels, hidden, kernel_size=1))
            layers.append(nn.BatchNorm2d(hidden))
            layers.append(nn.ReLU())
        layers.append(nn.Conv2d(hidden, 1, kernel_size=1))
        super().__init__(*layers)

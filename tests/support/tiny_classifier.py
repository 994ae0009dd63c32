"""A classifier with all that a run must save, which torchvision knows once this is loaded.

Real ones have hundreds of parameters. FSDP2 and its checkpoints handle each by itself, which takes
seconds in each process, and finds nothing more.
"""

import torchvision
from torch import Tensor, nn
from torchvision.models._api import BUILTIN_MODELS

from amp_lab.models.build import model_names

NAME = "tiny_classifier"


class _Block(nn.Module):
    """What FSDP2 gathers at a time."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W)
        return x + self.norm(self.conv(x)).relu()


class _Tiny(nn.Module):
    """A convolution, two blocks with batch norm, and a head behind dropout."""

    def __init__(self, num_classes: int = 1000, channels: int = 8):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, stride=2)
        self.blocks = nn.ModuleList(_Block(channels) for _ in range(2))
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:  # (N, 3, H, W)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((2, 3))))


def tiny_classifier(*, weights: None = None, num_classes: int = 1000) -> nn.Module:
    return _Tiny(num_classes)


tiny_classifier.__module__ = f"{torchvision.models.__name__}.{NAME}"
BUILTIN_MODELS[NAME] = tiny_classifier
model_names.cache_clear()

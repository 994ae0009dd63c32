"""Models small enough for hundreds of tests: a CNN, a transformer, two RNNs, and data for each."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2, padding=1)
        )
        self.head = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x):  # (B, 3, 6, 6) to (B, 3)
        return self.head(self.features(x).flatten(1))


class PooledCnn(nn.Module):
    """A CNN for images of any size."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):  # (B, 3, H, W) to (B, 4)
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Remembers(nn.Linear):
    """Keeps what it computed last, in a list too."""

    def forward(self, x):
        self.last = super().forward(x)
        self.history = [self.last]
        return self.last


class Transformer(nn.Module):
    """Two blocks with a causal mask of -inf, added to scores that are computed by hand."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7)

    def forward(self, tokens):  # (B, T) to (B, T, 7)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.sharpness = 1.0

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * self.sharpness / math.sqrt(q.shape[-1])
        x = x + self.out((scores + self.mask).softmax(-1) @ v)
        return x + self.mlp(x)


class Head(nn.Module):
    """Two linear layers, a norm and a softmax: one op of each of CUDA's policies."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):  # (B, 8) to (B, 8)
        return self.b(self.norm(self.a(x))).softmax(-1)


class Rnn(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):  # (B, T, 3) to (B, 2)
        return self.head(self.rnn(x)[0][:, -1])


class CellRnn(nn.Module):
    """One GRU cell, called for each step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def images(n=2):
    return torch.randn(n, 3, 6, 6)


def tokens(n=2):
    return torch.randint(7, (n, 4))


def series(n=2):
    return torch.randn(n, 5, 3)


def loss_of(model, x):
    y = model(x)
    return F.cross_entropy(y.flatten(0, -2).float(), torch.arange(y[..., 0].numel()) % y.shape[-1])


def hooks_of(model: nn.Module) -> int:
    """How many hooks hang on the model, its parameters included."""
    count = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )
    return count + sum(len(p._backward_hooks or ()) for p in model.parameters())

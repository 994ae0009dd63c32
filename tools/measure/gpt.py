"""A GPT that ties weights or checkpoints its blocks: to measure its memory, and to test with."""

import torch
import torch.utils.checkpoint
from torch import nn

from amp_lab.bench import Block


class Gpt(nn.Module):
    """Token numbers (B, T) to logits (B, T, V), without the embedding of places.

    With `tied`, input and output embedding are one parameter; with `checkpoint`, the backward pass
    computes each block again.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        depth: int,
        *,
        tied: bool = True,
        checkpoint: bool = False,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpoint = checkpoint

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)

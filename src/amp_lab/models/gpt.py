"""A language model: RMSNorm, rotary embeddings, fused attention, one embedding for both ends.

Notebook 17 takes such a model apart.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Size(NamedTuple):
    """What tells one of them from another."""

    width: int
    heads: int
    depth: int


SIZES = {
    "gpt-nano": Size(192, 6, 5),  # 2.2 million parameters, without the embedding
    "gpt-micro": Size(256, 8, 6),  # 4.7 million
    "gpt-mini": Size(384, 6, 8),  # 14 million
    "gpt-small": Size(768, 12, 12),  # 85 million, as GPT-2's smallest
}


_COLD = 1e-20  # a temperature by which logits in fp32 cannot be divided, and all goes to one token


class Rotation(nn.Module):
    """Rotary embeddings of (B, heads, T, size), in fp32; Su et al., arXiv 2104.09864."""

    def __init__(self, size: int):
        super().__init__()
        exponents = -torch.arange(0, size, 2) / size
        rates = 10_000.0**exponents
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Pairs turned by angles that grow with the position, in the dtype of `x`."""
        length = x.shape[-2]
        positions = torch.arange(length, device=x.device)
        angles = positions[:, None] * self.rates.float()  # (T, size / 2)
        cos = angles.cos()
        sin = angles.sin()
        left, right = x.float().chunk(2, dim=-1)
        rotated = torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
        return rotated.to(x.dtype)


class Block(nn.Module):
    """Causal attention, then a network of two layers, each behind a norm: (B, T, width) to same."""

    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1 = nn.RMSNorm(width)
        self.norm2 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.rotate = Rotation(width // size.heads)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=0.02)
        residual_std = 0.02 / (2 * size.depth) ** 0.5
        for layer in (self.out, self.down):  # what is added to the stream; GPT-2's way
            nn.init.normal_(layer.weight, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the block."""
        # One name for what follows another, so that each is freed where no gradient needs it.
        hidden = self.norm1(x)
        hidden = self.qkv(hidden)
        q, k, v = hidden.chunk(3, dim=-1)  # each (B, T, width)
        q = self._split_heads(q)
        k = self._split_heads(k)
        v = self._split_heads(v)
        q = self.rotate(q)
        k = self.rotate(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        hidden = self.norm2(x)
        hidden = self.up(hidden)  # (B, T, 4 width)
        hidden = functional.gelu(hidden)
        hidden = self.down(hidden)
        return x + hidden

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, heads, T, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Gpt(nn.Module):
    """Tokens int64 (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, size: Size, vocabulary: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, size.width)
        blocks = [Block(size) for _ in range(size.depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.RMSNorm(size.width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of what follows each token."""
        stream = self.blocks(self.token(tokens))
        return functional.linear(self.norm(stream), self.token.weight)


@torch.no_grad()
def write(
    model: nn.Module, tokens: Tensor, count: int, context: int, temperature: float, seed: int
) -> Tensor | None:
    """`tokens` (T,), and `count` more that the model draws, each after the last `context`.

    At temperature 0, or close to it, it takes the likeliest. None if a logit is not finite.
    """
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        recent = tokens[None, -context:]
        logits = model(recent)  # (1, T, vocabulary)
        logits = logits[0, -1].float().cpu()
        if not logits.isfinite().all():
            return None
        if temperature < _COLD:
            following = logits.argmax(keepdim=True)
        else:
            probabilities = (logits / temperature).softmax(0)
            following = torch.multinomial(probabilities, 1, generator=draws)
        tokens = torch.cat([tokens, following.to(tokens.device)])
    return tokens

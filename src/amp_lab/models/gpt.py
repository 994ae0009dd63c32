"""A GPT: RMSNorm, rotary embeddings, fused attention, and one matrix for embedding and logits.

Notebook 17 explains such a model.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Size(NamedTuple):
    """The size of a GPT."""

    width: int  # of the embeddings and of the residual stream
    heads: int
    depth: int  # number of blocks


SIZES = {
    "gpt-nano": Size(192, heads=6, depth=5),  # 2.2 million parameters, without the embedding
    "gpt-micro": Size(256, heads=8, depth=6),  # 4.7 million
    "gpt-mini": Size(384, heads=6, depth=8),  # 14 million
    "gpt-small": Size(768, heads=12, depth=12),  # 85 million, as GPT-2's smallest
}


# Below this temperature, dividing logits by it may overflow in fp32; sampling would anyway always
# give the likeliest token.
_MIN_TEMPERATURE = 1e-20


class Rotation(nn.Module):
    """Rotary position embeddings of (B, heads, T, size), in fp32; Su et al., arXiv 2104.09864.

    `size` is the width of a head, which must be even.
    """

    def __init__(self, size: int):
        super().__init__()
        exponents = -torch.arange(0, size, 2) / size
        rates = 10_000.0**exponents  # angle per position of each pair, from 1 down to about 1e-4
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate pairs of values by angles that grow with the position; shape and dtype of `x`."""
        length = x.shape[-2]
        positions = torch.arange(length, device=x.device)
        angles = positions[:, None] * self.rates.float()  # (T, size / 2)
        cos = angles.cos()
        sin = angles.sin()
        left, right = x.float().chunk(2, dim=-1)  # a pair is a value of each half
        rotated = torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
        return rotated.to(x.dtype)


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward network, each after RMSNorm.

    It maps (B, T, width) to (B, T, width).
    """

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
        # As in GPT-2: each block adds to the residual stream twice, so smaller with more blocks.
        residual_std = 0.02 / (2 * size.depth) ** 0.5
        for layer in (self.out, self.down):
            nn.init.normal_(layer.weight, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream (B, T, width) after the block, from the residual stream before it."""
        # `hidden` is reused, so that a tensor that no gradient needs is freed at once.
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
        """Reshape (B, T, width) to (B, heads, T, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Gpt(nn.Module):
    """A GPT: maps tokens int64 (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, size: Size, vocabulary: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, size.width)
        blocks = [Block(size) for _ in range(size.depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.RMSNorm(size.width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits (B, T, vocabulary) of the token that follows each token."""
        stream = self.blocks(self.token(tokens))
        return functional.linear(self.norm(stream), self.token.weight)  # tied to the embedding


@torch.no_grad()
def generate(
    model: nn.Module, tokens: Tensor, count: int, context: int, temperature: float, seed: int
) -> Tensor | None:
    """Generate text: `tokens` int64 (T,), then `count` tokens that are sampled from the model.

    Returns both together, int64 (T + count,), or None if a logit is inf or NaN. The model sees the
    last `context` tokens; `seed` is the seed of the sampling. At temperature 0, or very close to 0,
    each new token is the most probable token.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        recent = tokens[None, -context:]
        logits = model(recent)  # (1, T, vocabulary)
        logits = logits[0, -1].float().cpu()
        if not logits.isfinite().all():
            return None
        if temperature < _MIN_TEMPERATURE:
            next_token = logits.argmax(keepdim=True)
        else:
            probabilities = (logits / temperature).softmax(0)
            next_token = torch.multinomial(probabilities, num_samples=1, generator=generator)
        tokens = torch.cat([tokens, next_token.to(tokens.device)])
    return tokens

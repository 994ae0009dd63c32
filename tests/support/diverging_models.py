"""Four small models written out by hand, and faults that are planted into copies of them.

Each fault replaces the forward function of one module; what it is named for is the module, and the
ops of which any may be blamed.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Transposed(nn.Module):
    """A linear layer on a transposed input: it calls `clone` for a batch of 4, not for one of 1."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(x.relu().transpose(0, 1))


class ConvBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(ConvBlock(8), ConvBlock(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):  # (B, 3, 8, 8) to (B, 5)
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = 1e-5

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Rope(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.base = width, 10_000.0

    def forward(self, x):  # (B, H, T, D)
        with torch.autocast("cpu", enabled=False):
            powers = torch.arange(0, self.width, 2, device=x.device) / self.width
            angles = torch.outer(torch.arange(x.shape[-2], device=x.device), self.base**-powers)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rope = Rope(width // heads)

    def forward(self, x):  # (B, T, C)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for y in self.qkv(x).chunk(3, -1))  # fmt: skip
        scores = self.rope(q) @ self.rope(k).mT / math.sqrt(q.shape[-1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        y = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        return self.out(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attention = RmsNorm(width), Attention(width)
        self.norm2, self.mlp = RmsNorm(width), Mlp(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, 11, bias=False)

    def forward(self, tokens):  # (B, T) to (B, T, 11)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class AsCompiled(nn.Module):
    """What `torch.compile` returns, as far as a comparison asks, without a compiler."""

    def __init__(self, model, dynamo_ctx=None):
        super().__init__()
        self._orig_mod, self.dynamo_ctx = model, dynamo_ctx

    def forward(self, *args):
        return self._orig_mod(*args)


class LstmCell(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.input, self.state = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x, h, c):
        i, f, g, o = (self.input(x) + self.state(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = LstmCell(3, 8), nn.Linear(8, 2)

    def forward(self, x):  # (B, T, 3) to (B, 2)
        h = c = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h, c = self.cell(step, h, c)
        return self.head(h)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        )  # fmt: skip

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ResidualMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.layers = nn.Sequential(*(Layer(12) for _ in range(3)))
        self.head = nn.Linear(12, 3)

    def forward(self, x):  # (B, 6) to (B, 3)
        return self.head(self.layers(self.stem(x)).softmax(-1))


INPUTS: dict[type, Callable[[int], torch.Tensor]] = {
    ConvNet: lambda n: torch.randn(n, 3, 8, 8),
    Transformer: lambda n: torch.randint(11, (n, 7)),
    Lstm: lambda n: torch.randn(n, 4, 3),
    ResidualMlp: lambda n: torch.randn(n, 6),
}


def make(kind: type) -> nn.Module:
    """A model with running statistics that are not those of a new one, in eval mode."""
    torch.manual_seed(1)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2)
    return model.eval()


# What a forward function is replaced by: each takes the module and returns the new function.


def linear_in(dtype):
    def plant(m):
        def forward(x):
            bias = None if m.bias is None else m.bias.to(dtype)
            return F.linear(x.to(dtype), m.weight.to(dtype), bias).to(x.dtype)

        return forward

    return plant


def whole_in(dtype):
    """The module's own code, with its inputs and weights rounded first."""

    def plant(m):
        low = copy.deepcopy(m).to(dtype)
        return lambda x: low.forward(x.to(dtype)).to(x.dtype)

    return plant


def conv_in(dtype):
    return lambda m: lambda x: F.conv2d(x.to(dtype), m.weight.to(dtype), padding=1).to(x.dtype)


def rounded(dtype):
    """The result rounded on its way, and back."""
    return lambda m: (lambda old: lambda *x: old(*x).to(dtype).float())(m.forward)


def scaled(factor):
    return lambda m: (lambda old: lambda *x: old(*x) * factor)(m.forward)


def wrong_eps(eps):
    def plant(m):
        m.eps = eps
        return m.forward

    return plant


def other_weights(m):
    m.weight.data[0, 0] += 1e-3
    return m.forward


def no_bias(m):
    return lambda x: F.linear(x, m.weight)


def norm_without_cast(m):
    return lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.eps) * m.weight


def norm_around_the_root(m):
    """The eps is outside of the root."""

    def forward(x):
        wide = x.float()
        scale = 1 / (wide.pow(2).mean(-1, keepdim=True).sqrt() + m.eps)
        return (wide * scale).to(x.dtype) * m.weight

    return forward


def rope_with(angle_dtype=torch.float32, sign=1):
    """Angles of another dtype, or a rotation to the other side."""

    def plant(m):
        def forward(x):
            powers = torch.arange(0, m.width, 2) / m.width
            angles = torch.outer(torch.arange(x.shape[-2]), m.base**-powers).to(angle_dtype)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            left, right = x.chunk(2, -1)
            turned = torch.sub(left * cos, right * sin, alpha=sign)
            return torch.cat((turned, torch.add(left * sin, right * cos, alpha=sign)), -1)

        return forward

    return plant


def rope_with_base(base):
    def plant(m):
        m.base = base
        return m.forward

    return plant


def block_in_another_order(m):
    """The residual is added to what it came from, not to what came of it."""

    def forward(x):
        y = m.attention(m.norm1(x))
        return x + (y + m.mlp(m.norm2(x + y)))

    return forward


def mlp_with(activation):
    return lambda m: lambda x: m.down(activation(m.gate(x)) * m.up(x))


def mlp_with_swapped_parts(m):
    return lambda x: m.down(m.gate(x) * F.silu(m.up(x)))


def layer_with(activation):
    return lambda m: lambda x: x + m.down(activation(m.up(m.norm(x))))


def layer_without_residual(m):
    return lambda x: m.down(F.gelu(m.up(m.norm(x)))) + m.norm(x)


def layer_variance_by_squares(m):
    """E[x^2] - E[x]^2 of values whose mean is far larger than their deviation."""

    def forward(x):
        far = x + 300
        mean = far.mean(-1, keepdim=True)
        var = far.pow(2).mean(-1, keepdim=True) - mean * mean
        y = (far - mean) * torch.rsqrt(var + m.norm.eps) * m.norm.weight + m.norm.bias
        return x + m.down(F.gelu(m.up(y)))

    return forward


def attention_with(scale=1.0, dtype=torch.float32, hide=None):
    def plant(m):
        def forward(x):
            q, k, v = (y.unflatten(-1, (m.heads, -1)).mT.mT.transpose(1, 2)
                       for y in m.qkv(x).chunk(3, -1))  # fmt: skip
            scores = m.rope(q) @ m.rope(k).mT / (math.sqrt(q.shape[-1]) * scale)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(hide or 0)
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            y = scores.softmax(-1, dtype=dtype).to(v.dtype) @ v
            return m.out(y.transpose(1, 2).flatten(-2))

        return forward

    return plant


def conv_block(activation=F.relu, residual=1.0):
    return lambda m: lambda x: activation(m.norm(m.conv(x)) + residual * x)


def cell_with(first=torch.sigmoid, order=(0, 1, 2, 3), dtype=None, shift=0.0):
    def plant(m):
        def forward(x, h, c):
            gates = (m.input(x) + m.state(h)).chunk(4, -1)
            i, f, g, o = (gates[n] for n in order)
            if dtype is not None:
                c = c.to(dtype).to(c.dtype)
            c = first(f + shift if shift else f) * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c

        return forward

    return plant


def pool_in_two_steps(m):
    return lambda x: x.sum(3).sum(2)[..., None, None] / x[0, 0].numel()


def pool_backwards(m):
    return lambda x: x.flip(-1).mean((2, 3), keepdim=True)


@dataclass(frozen=True)
class Fault:
    """A fault in one module of a model, and how the two runs compute."""

    model: type
    module: str
    plant: Callable
    ops: tuple[str, ...]  # any of these is right; empty: only the module counts
    runs: str = "fp32"  # both; or "bf16" autocast, "weights" in bf16, or "fp32 bf16"

    @property
    def name(self) -> str:
        """For the test's id."""
        return f"{self.model.__name__}-{self.module}"

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The sound one and the other."""
        sound = make(self.model)
        faulty = copy.deepcopy(sound)
        target = faulty.get_submodule(self.module)
        if self.runs == "weights":
            sound, faulty = sound.bfloat16(), faulty.bfloat16()
        object.__setattr__(target, "forward", self.plant(target))
        return sound, faulty


def runner(model: nn.Module, how: str) -> Callable:
    """A run of the model in one of those ways."""

    def run(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16"):
            return model(x.bfloat16() if how == "weights" and x.is_floating_point() else x)

    return run


LOW = (torch.bfloat16, torch.float16)
_CAST = ("_to_copy",)


def _linears():
    for model, modules in (
        (ConvNet, ["head"]),
        (Transformer, ["blocks.0.attention.qkv", "blocks.1.mlp.down", "head"]),
        (Lstm, ["cell.input", "head"]),
        (ResidualMlp, ["stem", "layers.1.up", "head"]),
    ):
        for module in modules:
            product = ("addmm", "mm")
            for dtype in LOW:
                yield Fault(model, module, linear_in(dtype), product)
            yield Fault(model, module, other_weights, product)
            yield Fault(model, module, other_weights, product, "fp32 bf16")


FAULTS: tuple[Fault, ...] = (
    *_linears(),
    *(Fault(ConvNet, "blocks.1.conv", conv_in(dtype), ("convolution",)) for dtype in LOW),
    *(Fault(ConvNet, "blocks.0.norm", wrong_eps(eps), ("native_batch_norm",))
      for eps in (1e-3, 1e-4, 1e-8)),
    Fault(ConvNet, "blocks.0.norm", wrong_eps(1e-3), ("native_batch_norm",), "fp32 bf16"),
    Fault(ConvNet, "blocks.1.norm", rounded(torch.bfloat16), _CAST),
    Fault(ConvNet, "blocks.1", conv_block(F.leaky_relu), ("leaky_relu",)),
    Fault(ConvNet, "blocks.1", conv_block(residual=1.001), ("mul",)),
    Fault(ConvNet, "pool", pool_in_two_steps, ("mean", "sum")),
    Fault(ConvNet, "pool", pool_backwards, ("mean",)),
    Fault(ConvNet, "pool", scaled(1.0001), ("mul",)),
    *(Fault(Transformer, module, wrong_eps(eps), ("add",), runs)
      for module in ("blocks.0.norm1", "norm") for eps in (1e-6, 1e-3)
      for runs in ("fp32", "fp32 bf16")),
    Fault(Transformer, "blocks.1.norm2", wrong_eps(1e-6), ("add",), "bf16"),
    Fault(Transformer, "blocks.1.norm2", norm_without_cast, ("pow", "mean", "mul"), "weights"),
    Fault(Transformer, "norm", norm_without_cast, ("pow", "mean", "mul"), "weights"),
    Fault(Transformer, "blocks.0.norm1", wrong_eps(1e-3), ("add",), "weights"),
    Fault(Transformer, "blocks.0.attention", attention_with(dtype=torch.bfloat16),
          ("_softmax", *_CAST), "weights"),
    Fault(Transformer, "norm", whole_in(torch.bfloat16), ("pow", *_CAST, "mul")),
    Fault(Transformer, "norm", norm_around_the_root, ("sqrt", "rsqrt", "add")),
    Fault(Transformer, "blocks.0.attention.rope", rope_with(torch.bfloat16), ("cos", *_CAST)),
    Fault(Transformer, "blocks.0.attention.rope", rope_with_base(5e5), ("pow",)),
    Fault(Transformer, "blocks.0.attention.rope", rope_with_base(5e5), ("pow",), "fp32 bf16"),
    Fault(Transformer, "blocks.0.attention.rope", rope_with(sign=-1), ("add", "sub")),
    Fault(Transformer, "blocks.1.attention", attention_with(scale=1.01), ("div",)),
    Fault(Transformer, "blocks.1.attention", attention_with(scale=1.01), ("div",), "bf16"),
    Fault(Transformer, "blocks.1.attention", attention_with(dtype=torch.bfloat16),
          ("_softmax", *_CAST)),
    Fault(Transformer, "blocks.1.attention", attention_with(dtype=torch.bfloat16),
          ("_softmax", *_CAST), "bf16"),
    Fault(Transformer, "blocks.1.attention", attention_with(hide=1), ("masked_fill",)),
    Fault(Transformer, "blocks.0", block_in_another_order, ("add",)),
    Fault(Transformer, "blocks.0.mlp", mlp_with(F.gelu), ("gelu", "silu")),
    Fault(Transformer, "blocks.0.mlp", mlp_with_swapped_parts, ("silu",), "bf16"),
    Fault(Lstm, "cell", cell_with(torch.nn.functional.hardsigmoid), ("hardsigmoid", "sigmoid")),
    Fault(Lstm, "cell", cell_with(order=(1, 0, 2, 3)), ("sigmoid",)),
    Fault(Lstm, "cell", cell_with(order=(1, 0, 2, 3)), ("sigmoid",), "fp32 bf16"),
    Fault(Lstm, "cell", cell_with(shift=1.0), ("add",)),
    Fault(Lstm, "cell", cell_with(dtype=torch.bfloat16), _CAST),
    Fault(Lstm, "cell", cell_with(dtype=torch.float16), _CAST),
    Fault(Lstm, "head", no_bias, ("mm", "addmm", "t")),
    *(Fault(ResidualMlp, f"layers.{n}.norm", wrong_eps(eps), ("native_layer_norm",), runs)
      for n in (0, 2) for eps in (1e-6, 1e-3) for runs in ("fp32", "bf16")),
    Fault(ResidualMlp, "layers.1", layer_with(lambda x: F.gelu(x, approximate="tanh")), ("gelu",)),
    Fault(ResidualMlp, "layers.1", layer_with(F.silu), ("gelu", "silu"), "fp32 bf16"),
    Fault(ResidualMlp, "layers.1", layer_with(lambda x: F.gelu(x.bfloat16()).float()),
          ("gelu", *_CAST)),
    Fault(ResidualMlp, "layers.2", layer_without_residual, ()),
    Fault(ResidualMlp, "layers.2", layer_variance_by_squares, ()),
    Fault(ResidualMlp, "layers.2.norm", whole_in(torch.float16), ("native_layer_norm", *_CAST)),
)  # fmt: skip

"""What `amp-lab bench` runs: models with their data, and matrix products."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.training.models import build_model


@dataclass
class Problem:
    """A model on a device with one batch; made anew for each configuration, from one seed."""

    model: nn.Module
    inputs: Tensor
    loss_fn: Callable[[Tensor], Tensor]
    """Scalar loss of the model's output."""
    lr: float
    """Learning rate of Adam."""
    target: Tensor | None = None


@dataclass(frozen=True)
class Workload:
    """Something to be timed, in one size."""

    name: str
    """Name on the command line."""
    size: str
    """What else tells its results from others."""
    kind: str
    """``training``, ``inference`` or ``product``."""
    unit: str
    """What is counted for each second: ``images``, ``tokens``, ``products``."""
    items: int
    """How many of them a step has."""
    build: Callable[[torch.device], Problem] = field(repr=False)
    takes: frozenset[str] = frozenset()
    """Rungs that only some workloads can take."""
    many_layers: bool = False
    """Whether torch.compile takes minutes for it on a CPU."""

    @property
    def title(self) -> str:
        """Name and size."""
        return f"{self.name} {self.size}"


class _Product(nn.Module):
    """A matrix product."""

    def __init__(self, m: int, k: int, n: int):
        super().__init__()
        self.right = nn.Parameter(torch.randn(k, n) / k**0.5)

    def forward(self, left: Tensor) -> Tensor:  # (M, K)
        return left @ self.right


class Block(nn.Module):
    """A pre-norm transformer block with causal attention, (B, T, width) to the same shape."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, width / heads)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Embedding, transformer blocks, norm and head."""

    def __init__(self, vocabulary: int, width: int, heads: int, blocks: int, tokens: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to logits (B, T, vocabulary)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def convmodel_workload(size: int, *, hidden: int = 256, kind: str = "training") -> Workload:
    """The ConvModel on its picture of so many pixels along each edge."""

    def build(device: torch.device) -> Problem:
        inputs, target = quantized_sine(size, device)
        model = ConvModel(hidden).to(device)
        return Problem(model, inputs, lambda out: F.mse_loss(out, target), 1e-3, target)

    takes = {"channels-last", "by-hand"} if kind == "training" else {"channels-last", "fold-norm"}
    name = "convmodel" if kind == "training" else "convmodel-inference"
    return Workload(name, f"1x2x{size}x{size}", kind, "images", 1, build, frozenset(takes))


def classifier_workload(model_name: str, batch: int, size: int, *, classes: int = 10) -> Workload:
    """Training one of torchvision's classifiers on random images."""

    def build(device: torch.device) -> Problem:
        model = build_model(model_name, classes).to(device)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = (
                    0.0  # compiled code would drop others, and the loss could not be compared
                )
        images = torch.randn(batch, 3, size, size).to(device)
        labels = (torch.arange(batch) % classes).to(device)
        return Problem(model, images, lambda out: F.cross_entropy(out.float(), labels), 1e-4)

    shape = f"{batch}x3x{size}x{size}"
    takes = frozenset({"channels-last"})
    name = model_name.replace("_", "-")
    return Workload(name, shape, "training", "images", batch, build, takes, many_layers=True)


def gpt_workload(batch: int, tokens: int, *, width: int, blocks: int, vocabulary: int) -> Workload:
    """Training a language model on random text."""

    def build(device: torch.device) -> Problem:
        model = Gpt(vocabulary, width, max(1, width // 64), blocks, tokens).to(device)
        text = torch.randint(vocabulary, (batch, tokens + 1)).to(device)

        def loss_fn(logits: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())

        return Problem(model, text[:, :-1].contiguous(), loss_fn, 1e-4)

    size = f"{batch}x{tokens}, width {width}, {blocks} blocks"
    return Workload(
        "gpt", size, "training", "tokens", batch * tokens, build, takes=frozenset({"fp8"})
    )


def product_workload(m: int, k: int, n: int) -> Workload:
    """A matrix product (M, K) @ (K, N)."""

    def build(device: torch.device) -> Problem:
        model = _Product(m, k, n).to(device)
        left = torch.randn(m, k).to(device)
        return Problem(model, left, lambda out: out.float().square().mean(), 1e-3)

    return Workload("product", f"{m}x{k}x{n}", "product", "products", 1, build)


NAMES = ("convmodel", "convmodel-inference", "mobilenet-v2", "resnet50", "gpt", "product")
"""The workloads, by what the command line calls them."""


def workloads(device: torch.device | str, *, quick: bool) -> list[Workload]:
    """All workloads in sizes that suit a device; `quick` takes small ones and leaves out ResNet-50.

    On an accelerator the ConvModel has the size of the article that it comes from.
    """
    cpu = torch.device(device).type == "cpu"
    picture = (128 if quick else 256) if cpu else (256 if quick else 512)
    n = (512 if quick else 2048) if cpu else (2048 if quick else 8192)
    found = [
        convmodel_workload(picture),
        convmodel_workload(picture, kind="inference"),
    ]
    if quick:
        found += [classifier_workload("mobilenet_v2", 16 if cpu else 64, 96)]
    else:
        found += [classifier_workload("mobilenet_v2", 16 if cpu else 128, 224)]
        found += [classifier_workload("resnet50", 8 if cpu else 64, 224, classes=1000)]
    batch, tokens, width, blocks, vocabulary = {
        (True, True): (4, 128, 128, 2, 1024),
        (True, False): (8, 256, 256, 4, 4096),
        (False, True): (4, 512, 512, 4, 8192),
        (False, False): (8, 1024, 768, 12, 32768),
    }[cpu, quick]
    found += [gpt_workload(batch, tokens, width=width, blocks=blocks, vocabulary=vocabulary)]
    # Aligned, each size in turn one less than a multiple of 8, and a product of few rows.
    shapes = [(n, n, n), (n - 1, n, n), (n, n - 1, n), (n, n, n - 1), (8, n, n)]
    shapes = shapes[::2] if quick else shapes
    return found + [product_workload(*shape) for shape in shapes]

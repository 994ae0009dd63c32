"""What `amp-lab bench` runs: models with their data, and matrix products.

To add a workload, write the function that makes it, and give it a row in `WORKLOADS`.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_lab.backends import backend
from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.bench.tiled_convmodel import TiledStep
from amp_lab.training.models import build_model


@dataclass
class Problem:
    """A model on a device with one batch; made anew for each configuration, from one seed."""

    model: nn.Module
    inputs: Tensor
    loss_fn: Callable[[Tensor], Tensor]  # scalar loss of the model's output
    lr: float  # learning rate of Adam
    target: Tensor | None = None


@dataclass(frozen=True)
class Workload:
    """Something to be timed, in one size."""

    name: str  # name on the command line
    size: str  # what else tells its results from others
    kind: str  # ``training``, ``inference`` or ``product``
    unit: str  # what is counted for each second: ``images``, ``tokens``, ``products``
    items: int  # how many of them a step has
    build: Callable[[torch.device], Problem] = field(repr=False)
    layers: Set[str] = frozenset()  # ``convolution``, ``norm``, ``large linear``: for rungs
    many_layers: bool = False  # whether torch.compile takes minutes for it on a CPU
    # From model and dtype, what returns the loss of inputs and target, and sets all gradients.
    by_hand: Callable[..., Callable] | None = field(default=None, repr=False)
    # The same in few kernels of its own.
    in_tiles: Callable[..., Callable] | None = field(default=None, repr=False)

    @property
    def title(self) -> str:
        """Name and size."""
        return f"{self.name} {self.size}"

    @property
    def trains(self) -> bool:
        """Whether a step updates the weights, and returns a loss."""
        return self.kind == "training"


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
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        hidden = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = (self._by_head(part) for part in qkv.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, heads, T, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


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
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(positions)
        x = self.blocks(x)
        return self.head(self.norm(x))


def convmodel_workload(size: int, *, hidden: int = 256, kind: str = "training") -> Workload:
    """The ConvModel on its picture of so many pixels along each edge."""

    def build(device: torch.device) -> Problem:
        inputs, target = quantized_sine(size, device)
        model = ConvModel(hidden).to(device)
        return Problem(model, inputs, lambda out: F.mse_loss(out, target), 1e-3, target)

    shape = f"1x2x{size}x{size}"
    layers = {"convolution", "norm"}
    if kind != "training":
        return Workload("convmodel-inference", shape, kind, "images", 1, build, layers)
    steps = {"by_hand": FusedStep, "in_tiles": TiledStep}
    return Workload("convmodel", shape, kind, "images", 1, build, layers, **steps)


def classifier_workload(model_name: str, batch: int, size: int, *, classes: int = 10) -> Workload:
    """Training one of torchvision's classifiers on random images."""

    def build(device: torch.device) -> Problem:
        model = build_model(model_name, classes).to(device)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # compiled code would drop other values, and give another loss
        images = torch.randn(batch, 3, size, size).to(device)
        labels = (torch.arange(batch) % classes).to(device)
        return Problem(model, images, lambda out: F.cross_entropy(out.float(), labels), 1e-4)

    shape = f"{batch}x3x{size}x{size}"
    name = model_name.replace("_", "-")
    layers = {"convolution", "norm"}
    return Workload(name, shape, "training", "images", batch, build, layers, many_layers=True)


def gpt_workload(batch: int, tokens: int, width: int, blocks: int, vocabulary: int) -> Workload:
    """Training a language model on random text."""

    def build(device: torch.device) -> Problem:
        heads = max(1, width // 64)
        model = Gpt(vocabulary, width, heads, blocks, tokens).to(device)
        text = torch.randint(vocabulary, (batch, tokens + 1)).to(device)

        def loss_fn(logits: Tensor) -> Tensor:
            next_tokens = text[:, 1:].flatten()
            return F.cross_entropy(logits.flatten(0, 1).float(), next_tokens)

        inputs = text[:, :-1].contiguous()
        return Problem(model, inputs, loss_fn, 1e-4)

    size = f"{batch}x{tokens}, width {width}, {blocks} blocks"
    layers = {"large linear"} if width > 1024 else set()  # see rungs.gains_from_fp8
    return Workload("gpt", size, "training", "tokens", batch * tokens, build, layers)


def product_workload(m: int, k: int, n: int) -> Workload:
    """A matrix product (M, K) @ (K, N)."""

    def build(device: torch.device) -> Problem:
        model = _Product(m, k, n).to(device)
        left = torch.randn(m, k).to(device)
        return Problem(model, left, lambda out: out.float().square().mean(), 1e-3)

    return Workload("product", f"{m}x{k}x{n}", "product", "products", 1, build)


def _products(n: int, *, quick: bool = False) -> list[Workload]:
    # Aligned, each size in turn one less than a multiple of 8, and a product of few rows.
    shapes = [(n, n, n), (n - 1, n, n), (n, n - 1, n), (n, n, n - 1), (8, n, n)]
    if quick:
        shapes = shapes[::2]
    return [product_workload(*shape) for shape in shapes]


_PICTURES = (128, 256, 256, 512)  # the last is the size of the article that the ConvModel is from
_IMAGES = ((16, 96), (16, 224), (64, 96), (128, 224))
_TEXTS = (  # batch, tokens, width, blocks, vocabulary
    (4, 128, 128, 2, 1024), (8, 256, 256, 4, 4096),
    (4, 512, 512, 4, 8192), (4, 1024, 2048, 4, 32768),
)  # fmt: skip
_COLUMNS = ((True, True), (True, False), (False, True), (False, False))  # on a CPU, quick

WORKLOADS = {
    "convmodel": [[convmodel_workload(n)] for n in _PICTURES],
    "convmodel-inference": [[convmodel_workload(n, kind="inference")] for n in _PICTURES],
    "mobilenet-v2": [[classifier_workload("mobilenet_v2", *shape)] for shape in _IMAGES],
    "resnet50": [  # too slow for a quick run
        [], [classifier_workload("resnet50", 8, 224, classes=1000)],
        [], [classifier_workload("resnet50", 64, 224, classes=1000)],
    ],
    "gpt": [[gpt_workload(*size)] for size in _TEXTS],
    "product": [
        _products(512, quick=True), _products(2048), _products(2048, quick=True), _products(8192)
    ],
}  # fmt: skip
"""The sizes of each workload by its name: quick on a CPU, on a CPU, quick on a GPU, on a GPU."""


def workloads(device: torch.device | str, *, quick: bool) -> list[Workload]:
    """All workloads in the sizes that suit a device; `quick` takes small ones."""
    column = _COLUMNS.index((backend(device).is_host, quick))
    return [workload for sizes in WORKLOADS.values() for workload in sizes[column]]

"""What `amp-lab bench` runs: models with their data, and matrix products.

To add a workload, write the function that makes it, and give it a row in `WORKLOADS`.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_lab.bench.convmodel import ConvModel, quantized_sine
from amp_lab.bench.fused_convmodel import FusedStep
from amp_lab.bench.tiled_convmodel import TiledStep
from amp_lab.core.backends import backend
from amp_lab.models.build import build_model


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
        right = torch.randn(k, n)
        self.right = nn.Parameter(right / k**0.5)

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
        widen = nn.Linear(width, hidden)
        narrow = nn.Linear(hidden, width)
        self.mlp = nn.Sequential(widen, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = map(self._by_head, qkv.chunk(3, -1))
        by_head = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = by_head.transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        return x + self.mlp(self.norm2(x))

    def _by_head(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, heads, T, width / heads)."""
        split = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)


class Gpt(nn.Module):
    """Embedding, transformer blocks, norm and head."""

    def __init__(self, vocabulary: int, width: int, heads: int, blocks: int, tokens: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        layers = [Block(width, heads) for _ in range(blocks)]
        self.blocks = nn.Sequential(*layers)
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

        def loss_fn(out: Tensor) -> Tensor:
            return F.mse_loss(out, target)

        return Problem(model, inputs, loss_fn, lr=1e-3, target=target)

    workload = Workload(
        name="convmodel",
        size=f"1x2x{size}x{size}",
        kind=kind,
        unit="images",
        items=1,
        build=build,
        layers={"convolution", "norm"},
        by_hand=FusedStep,
        in_tiles=TiledStep,
    )
    if kind == "training":
        return workload
    return replace(workload, name="convmodel-inference", by_hand=None, in_tiles=None)


def classifier_workload(model_name: str, batch: int, size: int, *, classes: int = 10) -> Workload:
    """Training one of torchvision's classifiers on random images."""

    def build(device: torch.device) -> Problem:
        model = build_model(model_name, classes).to(device)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # compiled code would drop other values, and give another loss
        images = torch.randn(batch, 3, size, size)
        labels = torch.arange(batch) % classes
        labels = labels.to(device)

        def loss_fn(out: Tensor) -> Tensor:
            return F.cross_entropy(out.float(), labels)

        return Problem(model, images.to(device), loss_fn, lr=1e-4)

    return Workload(
        name=model_name.replace("_", "-"),
        size=f"{batch}x3x{size}x{size}",
        kind="training",
        unit="images",
        items=batch,
        build=build,
        layers={"convolution", "norm"},
        many_layers=True,
    )


def gpt_workload(batch: int, tokens: int, width: int, blocks: int, vocabulary: int) -> Workload:
    """Training a language model on random text."""

    def build(device: torch.device) -> Problem:
        heads = max(1, width // 64)
        model = Gpt(vocabulary, width, heads, blocks, tokens).to(device)
        shape = (batch, tokens + 1)
        text = torch.randint(vocabulary, shape).to(device)

        def loss_fn(logits: Tensor) -> Tensor:
            by_position = logits.flatten(0, 1)
            next_tokens = text[:, 1:].flatten()
            return F.cross_entropy(by_position.float(), next_tokens)

        inputs = text[:, :-1].contiguous()
        return Problem(model, inputs, loss_fn, lr=1e-4)

    layers: Set[str] = frozenset()
    if width > 1024:  # see rungs.gains_from_fp8
        layers = {"large linear"}
    return Workload(
        name="gpt",
        size=f"{batch}x{tokens}, width {width}, {blocks} blocks",
        kind="training",
        unit="tokens",
        items=batch * tokens,
        build=build,
        layers=layers,
    )


def product_workload(m: int, k: int, n: int) -> Workload:
    """A matrix product (M, K) @ (K, N)."""

    def build(device: torch.device) -> Problem:
        model = _Product(m, k, n).to(device)
        left = torch.randn(m, k).to(device)

        def loss_fn(out: Tensor) -> Tensor:
            squares = out.float().square()
            return squares.mean()

        return Problem(model, left, loss_fn, lr=1e-3)

    return Workload(
        name="product",
        size=f"{m}x{k}x{n}",
        kind="product",
        unit="products",
        items=1,
        build=build,
    )


def _products(n: int, *, quick: bool = False) -> list[Workload]:
    odd = n - 1
    shapes = [
        (n, n, n),  # aligned
        (odd, n, n),  # then each size in turn is no multiple of 8
        (n, odd, n),
        (n, n, odd),
        (8, n, n),  # few rows
    ]
    if quick:
        shapes = shapes[::2]
    return [product_workload(*shape) for shape in shapes]


_PICTURES = (128, 256, 256, 512)  # the last is the size of the article that the ConvModel is from
_IMAGES = (  # batch, and pixels along each edge
    (16, 96),
    (16, 224),
    (64, 96),
    (128, 224),
)
_TEXTS = (  # batch, tokens, width, blocks, vocabulary
    (4, 128, 128, 2, 1024), (8, 256, 256, 4, 4096),
    (4, 512, 512, 4, 8192), (4, 1024, 2048, 4, 32768),
)  # fmt: skip
_COLUMNS = (  # on a CPU, quick
    (True, True),
    (True, False),
    (False, True),
    (False, False),
)

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
    is_host = backend(device).is_host
    column = _COLUMNS.index((is_host, quick))
    found: list[Workload] = []
    for sizes in WORKLOADS.values():
        found += sizes[column]
    return found

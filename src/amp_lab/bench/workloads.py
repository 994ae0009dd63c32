"""The workloads of `amp-lab bench`: models with their data, and matmuls.

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
from amp_lab.model_call import ModelCall
from amp_lab.models.build import build_model
from amp_lab.models.gpt import Gpt, Size

StepByHand = Callable[..., Callable]
"""Makes a step of a model and a dtype. Called with inputs and target, the step returns the loss and
sets all gradients."""


@dataclass
class Problem:
    """A call of a model on a device; `make_step` makes a new problem for each step."""

    call: ModelCall
    lr: float  # learning rate of Adam
    target: Tensor | None = None  # for a step by hand, which computes the loss itself


@dataclass(frozen=True)
class Workload:
    """A model or a matmul to be timed, in one size."""

    name: str  # name on the command line
    size: str  # shapes, such as ``16x3x224x224``: only results of one size are compared
    kind: str  # ``training``, ``inference`` or ``matmul``
    unit: str  # of the rate in the table: ``images``, ``tokens`` or ``matmuls`` per second
    items: int  # how many of `unit` a step has
    build: Callable[[torch.device], Problem] = field(repr=False)
    # Kinds of layers that some rungs need: ``convolution``, ``norm``, ``large linear``.
    layers: Set[str] = frozenset()
    many_layers: bool = False  # whether torch.compile takes minutes for it on a CPU
    fused_step: StepByHand | None = field(default=None, repr=False)
    tiled_step: StepByHand | None = field(default=None, repr=False)  # with kernels written for it

    @property
    def title(self) -> str:
        """Name and size."""
        return f"{self.name} {self.size}"

    @property
    def trains(self) -> bool:
        """Whether a step updates the weights, and returns a loss."""
        return self.kind == "training"


class _Matmul(nn.Module):
    """The matmul (M, K) @ (K, N), whose right operand is a parameter."""

    def __init__(self, m: int, k: int, n: int):
        super().__init__()
        right = torch.randn(k, n)
        self.right = nn.Parameter(right / k**0.5)  # so that the output's variance is 1

    def forward(self, left: Tensor) -> Tensor:  # (M, K)
        return left @ self.right


def convmodel_workload(size: int, *, hidden: int = 256, kind: str = "training") -> Workload:
    """Training of the ConvModel, or inference, on its picture of `size` x `size` pixels."""

    def build(device: torch.device) -> Problem:
        inputs, target = quantized_sine(size, device)
        model = ConvModel(hidden).to(device)

        def loss_fn(out: Tensor) -> Tensor:
            return F.mse_loss(out, target)

        call = ModelCall(model, (inputs,), loss_fn=loss_fn)
        return Problem(call, lr=1e-3, target=target)

    workload = Workload(
        name="convmodel",
        size=f"1x2x{size}x{size}",
        kind=kind,
        unit="images",
        items=1,
        build=build,
        layers={"convolution", "norm"},
        fused_step=FusedStep,
        tiled_step=TiledStep,
    )
    if kind == "training":
        return workload
    return replace(workload, name="convmodel-inference", fused_step=None, tiled_step=None)


def classifier_workload(model_name: str, batch: int, size: int, *, classes: int = 10) -> Workload:
    """Training of one of torchvision's classifiers on random images of `size` x `size` pixels."""

    def build(device: torch.device) -> Problem:
        model = build_model(model_name, classes).to(device)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                # Compiled code would drop other values, so its loss could not be compared.
                module.p = 0.0
        images = torch.randn(batch, 3, size, size)
        labels = torch.arange(batch) % classes
        labels = labels.to(device)

        def loss_fn(out: Tensor) -> Tensor:
            return F.cross_entropy(out.float(), labels)

        return Problem(ModelCall(model, (images.to(device),), loss_fn=loss_fn), lr=1e-4)

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
    """Training of a language model on random tokens, `batch` texts of `tokens` tokens each."""

    def build(device: torch.device) -> Problem:
        heads = max(1, width // 64)  # 64 channels each, as in GPT-2
        model = Gpt(Size(width, heads, blocks), vocabulary).to(device)
        shape = (batch, tokens + 1)  # one more, since the target is the next token
        text = torch.randint(vocabulary, shape).to(device)

        def loss_fn(logits: Tensor) -> Tensor:
            flat_logits = logits.flatten(0, 1)  # (B * T, vocabulary)
            next_tokens = text[:, 1:].flatten()
            return F.cross_entropy(flat_logits.float(), next_tokens)

        inputs = text[:, :-1].contiguous()
        return Problem(ModelCall(model, (inputs,), loss_fn=loss_fn), lr=1e-4)

    layers: Set[str] = frozenset()
    if width > 1024:  # wide enough for `rungs.gains_from_fp8`
        layers = {"large linear"}
    return Workload(
        name="gpt",
        # Results of earlier versions, of a GPT with learned positions, have no "rotary".
        size=f"{batch}x{tokens}, width {width}, {blocks} rotary blocks",
        kind="training",
        unit="tokens",
        items=batch * tokens,
        build=build,
        layers=layers,
    )


def matmul_workload(m: int, k: int, n: int) -> Workload:
    """The matmul (M, K) @ (K, N)."""

    def build(device: torch.device) -> Problem:
        model = _Matmul(m, k, n).to(device)
        left = torch.randn(m, k).to(device)

        return Problem(ModelCall(model, (left,)), lr=1e-3)

    return Workload(
        name="matmul",
        size=f"{m}x{k}x{n}",
        kind="matmul",
        unit="matmuls",
        items=1,
        build=build,
    )


def _matmuls(n: int, *, quick: bool = False) -> list[Workload]:
    """Matmuls of size n with and without aligned sizes; a quick run has three of the five."""
    odd = n - 1  # not aligned: fast kernels need multiples of 8
    shapes = [
        (n, n, n),
        (odd, n, n),
        (n, odd, n),
        (n, n, odd),
        (8, n, n),  # few rows
    ]
    if quick:
        shapes = [shapes[0], shapes[2], shapes[4]]
    return [matmul_workload(*shape) for shape in shapes]


# The four sizes of each workload, in the order of `_COLUMNS`.
_PICTURES = (128, 256, 256, 512)  # the last is the size in AMD's blog, see convmodel.py
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
_COLUMNS = (  # (whether the device is a CPU, whether the run is quick)
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
    "matmul": [
        _matmuls(512, quick=True), _matmuls(2048), _matmuls(2048, quick=True), _matmuls(8192)
    ],
}  # fmt: skip
"""By name, lists of workloads in four columns: quick on a CPU, CPU, quick on a GPU, GPU."""


def workloads(device: torch.device | str, *, quick: bool) -> list[Workload]:
    """All workloads in sizes for the device, which are small for a CPU and smaller if `quick`."""
    is_host = backend(device).is_host
    column = _COLUMNS.index((is_host, quick))
    chosen: list[Workload] = []
    for columns in WORKLOADS.values():
        chosen += columns[column]
    return chosen

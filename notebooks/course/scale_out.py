"""What notebook 11 trains on several processes, and what it counts there."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from amp_lab import load_dataset
from amp_lab.train.distributed import count_communication


def digits_by_row() -> TensorDataset:
    """768 handwritten digits of eight rows with eight pixels, (8, 8), and their classes."""
    digits = load_dataset("digits", image_size=8, augment=False)
    images, targets = digits.train.batch(range(768))
    images = images[:, 0].contiguous()  # the three channels are the same
    return TensorDataset(images, targets)


def new_model(config: dict) -> nn.Sequential:
    """Digits (B, 8, 8) to logits (B, 16): a transformer over the rows, the same every time.

    Its shapes are multiples of eight, so that two and four processes divide them evenly. That is
    why there are 16 logits for ten digits.
    """
    torch.manual_seed(0)
    width, heads = config["width"], config["heads"]
    layers = [
        nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(config["layers"])
    ]
    ends = nn.LayerNorm(width), nn.Flatten(), nn.Linear(8 * width, 16)
    return nn.Sequential(nn.Linear(8, width), *layers, *ends)


def local_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state in this process."""
    weights = list(model.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    averages = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    parts = {"weights": weights, "gradients": gradients, "AdamW": averages}
    return {name: sum(map(_local_size, tensors)) for name, tensors in parts.items()}


def _local_size(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes


def skips_after_overflow(
    engine: str, place: str, config: dict, x: torch.Tensor, y: torch.Tensor
) -> tuple[bool, list[tuple[str, int]]]:
    """Let the last rank overflow, and say whether this rank skips its step.

    `place` is where the overflow is: in the "batch", or in a "gradient" after all communication.
    Returns also what `unscale_` sends: (collective, number of values) of each call.
    """
    model = new_model(config).to(x.device)
    if engine == "DDP":
        model = DistributedDataParallel(model)
    else:
        # By default the mesh is of the accelerator, where ranks may be on the CPU beside one.
        fully_shard(model, mesh=init_device_mesh(x.device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=1024.0)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last and place == "batch":
        x = torch.full_like(x, torch.inf)
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if is_last and place == "gradient":
        gradient = next(model.parameters()).grad
        assert gradient is not None  # `backward` has run
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.fill_(torch.inf)
    with count_communication() as sent:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale() < 1024
    return skipped, [(call.kind, call.elements) for call in sent.calls]

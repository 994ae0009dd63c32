"""Hold the memory forecast against real training steps, and write the figures as JSON.

    python tools/measure/memory.py --out data/results/memory-DEVICE.json

On a GPU: the forecast peak against `torch.cuda.max_memory_allocated` of a real training step, for
four models, three batches and three precisions, and the largest batch against a search with real
steps under a memory cap. What cuBLAS keeps for itself is measured first and told apart: "workspace"
is in the real peak and in no forecast; "ratio" leaves it out. Without a GPU: the activations that
the forecast expects against the bytes that autograd keeps on this CPU.
"""

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
import torchvision
from torch import nn

from amp_lab.core.device import pick_device
from amp_lab.core.optimizers import OPTIMIZERS
from amp_lab.core.precision import Precision
from amp_lab.models.gpt import SIZES, Block
from amp_lab.tracing.memory import forecast_memory, largest_batch
from amp_lab.tracing.memory_arguments import parse_bytes
from recording import parser, record

PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16)


def gpt_blocks():
    """The blocks of the GPT that is as large as GPT-2's smallest."""
    size = SIZES["gpt-small"]
    return nn.Sequential(*[Block(size) for _ in range(size.depth)])


class Lstm(nn.Module):
    """Two layers of an LSTM, and the outputs alone."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(512, 512, num_layers=2, batch_first=True)

    def forward(self, x):  # (B, T, 512) to (B, T, 512)
        """The outputs of the last layer."""
        return self.lstm(x)[0]


class Workload(NamedTuple):
    """A model, and the batches with which it is measured."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one item of a batch
    gpu_batches: tuple[int, ...]
    cpu_batches: tuple[int, ...]


WORKLOADS = {
    "resnet50": Workload(torchvision.models.resnet50, (3, 224, 224), (16, 64, 256), (2,)),
    "mobilenet_v2": Workload(torchvision.models.mobilenet_v2, (3, 224, 224), (16, 64, 256), (2,)),
    "vit_b_16": Workload(torchvision.models.vit_b_16, (3, 224, 224), (16, 64, 256), (2,)),
    "gpt-small": Workload(gpt_blocks, (1024, 768), (2, 8, 32), (1,)),
    "lstm": Workload(Lstm, (128, 512), (16, 64, 256), (2,)),
}


def loss_of(output):
    """A loss that keeps one fp32 copy of the output."""
    return output.float().square().mean()


def real_step(model, optimizer, scaler, inputs, precision):
    """One training step, as the forecast takes it to be."""
    with precision.autocast(inputs.device.type):
        loss = loss_of(model(inputs))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def real_peak(workload, batch, precision, device, optimizer_name):
    """Measure a training step: return (peak, workspace) in bytes.

    The peak is that of the third step. The workspace is what cuBLAS keeps for itself: it is still
    allocated when all tensors are gone.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model = workload.build().to(device)
    optimizer = OPTIMIZERS[optimizer_name].make(model.parameters())
    scaler = precision.grad_scaler(device.type)
    inputs = torch.rand(batch, *workload.shape, device=device)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        real_step(model, optimizer, scaler, inputs, precision)
    peak = torch.cuda.max_memory_allocated() - before
    del model, optimizer, scaler, inputs
    gc.collect()
    workspace = torch.cuda.memory_allocated() - before
    return peak, workspace


def measure_peaks(device, optimizer_name, workloads):
    """Forecast and real peak for every model, precision and batch."""
    for name, workload in workloads.items():
        with torch.device("meta"):
            model = workload.build()
        for precision in PRECISIONS:
            for batch in workload.gpu_batches:
                forecast = forecast_memory(
                    model,
                    torch.empty(batch, *workload.shape, device="meta"),
                    device_type=device.type,
                    precision=precision,
                    optimizer=optimizer_name,
                    loss_fn=loss_of,
                )
                peak, workspace = real_peak(workload, batch, precision, device, optimizer_name)
                yield {
                    "model": name,
                    "precision": precision,
                    "batch": batch,
                    "forecast": forecast.peak,
                    "phase": forecast.peak_phase,
                    "real": peak,
                    "workspace": workspace,
                    "ratio": forecast.peak / (peak - workspace),
                    "ratio with workspace": forecast.peak / peak,
                }


def measure_largest(device, optimizer_name, cap, workloads):
    """The largest batch that fits into `cap` bytes: as `largest_batch` forecasts it, and really."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device.index)
    for name, workload in workloads.items():
        with torch.device("meta"):
            model = workload.build()
        for precision in PRECISIONS:
            forecast = largest_batch(
                model,
                (1, *workload.shape),
                memory_bytes=cap,
                precision=precision,
                device_type=device.type,
                optimizer=optimizer_name,
                loss_fn=loss_of,
            )
            real = real_largest(workload, precision, device, optimizer_name, forecast)
            yield {
                "model": name,
                "precision": precision,
                "cap": cap,
                "solved": forecast,
                "real": real,
                "ratio": forecast / real,
            }
    torch.cuda.set_per_process_memory_fraction(1.0, device.index)


def real_largest(workload, precision, device, optimizer_name, forecast):
    """The largest batch whose training step does not run out of memory, by bisection.

    It is found to 1 % of `forecast`, the batch that was forecast, and searched up to twice as far.
    """
    fitting = 1
    too_large = max(2, 2 * forecast)
    while too_large - fitting > max(1, forecast // 100):
        middle = (fitting + too_large) // 2
        try:
            real_peak(workload, middle, precision, device, optimizer_name)
            fitting = middle
        except torch.cuda.OutOfMemoryError:
            too_large = middle
    return fitting


def real_activations(model, inputs, precision):
    """Bytes that autograd saves in a forward pass on the CPU, without the model's own storages."""
    saved = []

    def keep(tensor):
        detached = tensor.detach()  # else a node that saves its own output would never be freed
        saved.append(detached)
        return detached

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with precision.autocast("cpu"), hooks:
        loss_of(model(inputs))
    sizes = {}  # by the address of a storage, which several tensors may share
    for tensor in saved:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    for tensor in [*model.parameters(), *model.buffers()]:
        sizes.pop(tensor.untyped_storage()._cdata, None)
    return sum(sizes.values())


def measure_activations(workloads):
    """Bytes of activations on the CPU: as forecast, and as autograd saves them."""
    for name, workload in workloads.items():
        model = workload.build()
        for precision in (Precision.FP32, Precision.BF16):
            for batch in workload.cpu_batches:
                inputs = torch.rand(batch, *workload.shape)
                real = real_activations(model, inputs, precision)
                forecast = forecast_memory(
                    model, inputs, device_type="cpu", precision=precision, loss_fn=loss_of
                )
                expected = forecast.activations + forecast.cast_kept
                yield {
                    "model": name,
                    "precision": precision,
                    "batch": batch,
                    "forecast": expected,
                    "real": real,
                    "ratio": expected / real,
                }


def main():
    """Measure what this machine can show, print each figure, and write them all as JSON."""
    device = pick_device()
    parts = ("peaks", "largest") if device.type == "cuda" else ("activations",)
    options_parser = parser(__doc__, parts)
    in_torch = [row.name for row in OPTIMIZERS.values() if row.in_torch]
    options_parser.add_argument("--optimizer", choices=in_torch, default="adam")
    options_parser.add_argument("--cap", default="16GiB", help="memory for the largest batch")
    options_parser.add_argument("--model", choices=WORKLOADS, action="append", help="default: all")
    options = options_parser.parse_args()
    cap = parse_bytes(options.cap)
    workloads = {name: WORKLOADS[name] for name in options.model or WORKLOADS}
    measures = {
        "peaks": lambda: measure_peaks(device, options.optimizer, workloads),
        "largest": lambda: measure_largest(device, options.optimizer, cap, workloads),
        "activations": lambda: measure_activations(workloads),
    }
    chosen = {part: measures[part] for part in parts}
    record(chosen, options, device, optimizer=options.optimizer)


if __name__ == "__main__":
    main()

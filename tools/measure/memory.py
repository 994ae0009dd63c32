"""Hold the memory forecast against real training steps, and write the figures as JSON.

    python tools/measure/memory.py --out data/results/memory-DEVICE.json

On a GPU: the forecast peak against `torch.cuda.max_memory_allocated` of a real training step, for
four models, three batches and three precisions, and the largest batch against a search with real
steps under a memory cap. What cuBLAS keeps for itself is measured first and told apart: "workspace"
is in the real peak and in no forecast; "ratio" leaves it out. Without a GPU: the activations that
the forecast expects against the bytes that autograd keeps on this CPU.
"""

import gc

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


WORKLOADS = {  # name: model, shape of one item, batches on a GPU, batches on a CPU
    "resnet50": (torchvision.models.resnet50, (3, 224, 224), (16, 64, 256), (2,)),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, (3, 224, 224), (16, 64, 256), (2,)),
    "vit_b_16": (torchvision.models.vit_b_16, (3, 224, 224), (16, 64, 256), (2,)),
    "gpt-small": (gpt_blocks, (1024, 768), (2, 8, 32), (1,)),
    "lstm": (Lstm, (128, 512), (16, 64, 256), (2,)),
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


def real_peak(build, shape, batch, precision, device, optimizer_name):
    """Bytes at the peak of the third step, and those of libraries that stay when all else ends."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model = build().to(device)
    optimizer = OPTIMIZERS[optimizer_name].make(model.parameters())
    scaler = precision.grad_scaler(device.type)
    inputs = torch.rand(batch, *shape, device=device)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        real_step(model, optimizer, scaler, inputs, precision)
    peak = torch.cuda.max_memory_allocated() - before
    del model, optimizer, scaler, inputs
    gc.collect()
    return peak, torch.cuda.memory_allocated() - before


def measure_peaks(device, optimizer_name, workloads):
    """Forecast and real peak for every model, precision and batch."""
    for name, (build, shape, batches, _) in workloads.items():
        with torch.device("meta"):
            model = build()
        for precision in PRECISIONS:
            for batch in batches:
                forecast = forecast_memory(
                    model,
                    torch.empty(batch, *shape, device="meta"),
                    device_type=device.type,
                    precision=precision,
                    optimizer=optimizer_name,
                    loss_fn=loss_of,
                )
                peak, workspace = real_peak(build, shape, batch, precision, device, optimizer_name)
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
    """The solved batch, and the largest whose real step stays within the cap (a bisection)."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    for name, (build, shape, _, _) in workloads.items():
        with torch.device("meta"):
            model = build()
        for precision in PRECISIONS:
            solved = largest_batch(
                model,
                (1, *shape),
                memory_bytes=cap,
                precision=precision,
                device_type=device.type,
                optimizer=optimizer_name,
                loss_fn=loss_of,
            )

            def fits(batch, build=build, shape=shape, precision=precision):
                try:
                    real_peak(build, shape, batch, precision, device, optimizer_name)
                except torch.cuda.OutOfMemoryError:
                    return False
                return True

            low, high = 1, max(2, 2 * solved)
            while high - low > max(1, solved // 100):
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            yield {
                "model": name,
                "precision": precision,
                "cap": cap,
                "solved": solved,
                "real": low,
                "ratio": solved / low,
            }
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def measure_activations(workloads):
    """What autograd keeps on the CPU, beyond the model's own storages, against the forecast."""
    for name, (build, shape, _, batches) in workloads.items():
        model = build()
        own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
        for precision in (Precision.FP32, Precision.BF16):
            for batch in batches:
                inputs, saved = torch.rand(batch, *shape), []

                def keep(tensor, saved=saved):
                    saved.append(tensor.detach())
                    return saved[-1]

                hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
                with precision.autocast("cpu"), hooks:
                    loss = loss_of(model(inputs))
                kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
                real = sum(size for address, size in kept.items() if address not in own)
                del loss, saved, hooks, keep
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
    options_of = parser(__doc__, parts)
    in_torch = [row.name for row in OPTIMIZERS.values() if row.quantized is None]
    options_of.add_argument("--optimizer", choices=in_torch, default="adam")
    options_of.add_argument("--cap", default="16GiB", help="memory for the largest batch")
    options_of.add_argument("--model", choices=WORKLOADS, action="append", help="default: all")
    options = options_of.parse_args()
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

"""Hold the memory forecast against real training steps, and write the figures as JSON.

    python tools/measure_memory.py --out data/results/memory-DEVICE.json

On a GPU: the forecast peak against `torch.cuda.max_memory_allocated` of a real training step, for
four models, three batches and three precisions, and the largest batch against a search with real
steps under a memory cap. What cuBLAS keeps for itself is measured first and told apart: "workspace"
is in the real peak and in no forecast; "ratio" leaves it out. Without a GPU: the activations that
the forecast expects against the bytes that autograd keeps on this CPU.
"""

import argparse
import datetime
import gc
import json
import platform
from pathlib import Path

import torch
import torchvision
from torch import nn

from amp_lab.device import pick_device
from amp_lab.memory import OPTIMIZERS, forecast_memory, largest_batch, parse_bytes
from amp_lab.precision import Precision

PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16)


class Block(nn.Module):
    """A block of GPT-2, (B, T, C) to (B, T, C)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """The block's output, of the shape of its input."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def gpt():
    """The blocks of GPT-2's smallest model."""
    return nn.Sequential(*[Block(768, 12) for _ in range(12)])


WORKLOADS = {  # name: model, shape of one item, batches on a GPU, batches on a CPU
    "resnet50": (torchvision.models.resnet50, (3, 224, 224), (16, 64, 256), (2,)),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, (3, 224, 224), (16, 64, 256), (2,)),
    "vit_b_16": (torchvision.models.vit_b_16, (3, 224, 224), (16, 64, 256), (2,)),
    "gpt": (gpt, (1024, 768), (2, 8, 32), (1,)),
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
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = precision.grad_scaler(device.type)
    inputs = torch.rand(batch, *shape, device=device)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        real_step(model, optimizer, scaler, inputs, precision)
    peak = torch.cuda.max_memory_allocated() - before
    del model, optimizer, scaler, inputs
    gc.collect()
    return peak, torch.cuda.memory_allocated() - before


def measure_peaks(device, optimizer_name):
    """Forecast and real peak for every model, precision and batch."""
    rows = []
    for name, (build, shape, batches, _) in WORKLOADS.items():
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
                rows.append(
                    {
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
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_largest(device, optimizer_name, cap):
    """The solved batch, and the largest whose real step stays within the cap (a bisection)."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    rows = []
    for name, (build, shape, _, _) in WORKLOADS.items():
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
            rows.append(
                {
                    "model": name,
                    "precision": precision,
                    "cap": cap,
                    "solved": solved,
                    "real": low,
                    "ratio": solved / low,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    return rows


def measure_activations():
    """What autograd keeps on the CPU, beyond the model's own storages, against the forecast."""
    rows = []
    for name, (build, shape, _, batches) in WORKLOADS.items():
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
                rows.append(
                    {
                        "model": name,
                        "precision": precision,
                        "batch": batch,
                        "forecast": expected,
                        "real": real,
                        "ratio": expected / real,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main():
    """Measure what this machine can show, print each figure, and write them all as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--cap", default="16GiB", help="memory for the largest batch")
    options = parser.parse_args()
    device, cap = pick_device(), parse_bytes(options.cap)
    torch.manual_seed(0)
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "optimizer": options.optimizer,
    }
    if device.type == "cuda":
        result["peaks"] = measure_peaks(device, options.optimizer)
        result["largest"] = measure_largest(device, options.optimizer, cap)
    else:
        result["activations"] = measure_activations()
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

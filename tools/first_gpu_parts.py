"""The parts of `first_gpu`, in the order of their worth; run with a name, one of its measures."""

import argparse
import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from device_run import MARK, ROOT, Part, Settings

sys.path.append(str(ROOT / "tools" / "measure"))  # which are scripts too, and import one another

# The parts. A notebook runs as a plain script, as a reader without Jupyter would run it.


def _notebook(number: str) -> Part:
    def commands(settings: Settings) -> list[list[str]]:
        (source,) = (ROOT / "notebooks").glob(f"{number}_*.py")
        return [[str(source)]]

    return Part(f"notebook-{number}", 240, commands)


def _measure(name: str, limit_s: float) -> Part:
    def commands(settings: Settings) -> list[list[str]]:
        tiny = ["--tiny"] if settings.tiny else []
        out = ["--device", settings.device, "--out", str(settings.out)]
        return [[str(Path(__file__).resolve()), name, *tiny, *out]]

    return Part(name, limit_s, commands)


def _train(settings: Settings) -> list[list[str]]:
    run = str(settings.out / "run")
    size = ["--model", "resnet18"]
    if settings.tiny:
        size = ["--model", "shufflenet_v2_x0_5", "--limit", "256"]
    how = ["--dataset", "digits", "--precision", "fp16", "--epochs", "2"]
    return [["-m", "amp_lab", "train", *how, *size, "--out", run]]


def _memory(settings: Settings) -> list[list[str]]:
    recorded = str(settings.out / "memory.json")
    size = ["--model", "mobilenet_v2"] if settings.tiny else []
    check = [str(Path(__file__).resolve()), "memory", "--out", str(settings.out)]
    return [[str(ROOT / "tools" / "measure" / "memory.py"), "--out", recorded, *size], check]


def _bench(settings: Settings) -> list[list[str]]:
    size = ["--quick"]
    if settings.tiny:
        size = ["--quick", "--rounds", "1", "--workload", "product", "--precision", "fp32"]
    return [["-m", "amp_lab", "bench", *size, "--out", str(settings.out / "bench.json")]]


_FAILURES = ("08", *(f"08{letter}" for letter in "abcdefgh"))

PARTS = (
    Part("doctor", 60, lambda settings: [["-m", "amp_lab", "doctor", "--device", settings.device]]),
    *map(_notebook, ("01", "02", "03", "04", "10")),
    *map(_notebook, ("05", "06", "07", *_FAILURES, "09", "11", "13", "14", "15", "16", "17", "18")),
    _notebook("19"),
    Part("train", 120, _train),
    _measure("kill", 180),
    Part("memory", 300, _memory),
    _measure("xray", 120),
    Part("bench", 300, _bench),
    _measure("tiles", 120),
    _measure("article", 180),
    _measure("resnet50", 180),
    _measure("latency", 300),
)


# What the measured parts do, in their own process. Each yields a name, a value, and whether the
# value is within its limit (None where there is no limit).

Figures = Iterator[tuple[str, object, bool | None]]


def _measured(name: str, settings: Settings) -> int:
    """Run one measure, and hand over each figure as soon as it is there."""
    limits: dict[str, bool] = {}
    for figure, value, met in MEASURES[name](settings):
        if met is not None:
            limits[f"{figure}: {value}"] = met
        print(MARK + json.dumps({figure: value, "limits": limits}), flush=True)
    return 0


def _kill(settings: Settings) -> Figures:
    """A run that is killed once it has saved, and goes on to its end."""
    run = settings.out / "killed"
    size = ["--model", "resnet18", "--epochs", "6"]
    if settings.tiny:
        size = ["--model", "shufflenet_v2_x0_5", "--limit", "256", "--epochs", "2"]
    how = ["--dataset", "digits", "--precision", "fp16", "--out", str(run)]
    command = [sys.executable, "-m", "amp_lab", "train"]
    with subprocess.Popen([*command, *how, *size, "--checkpoint-every", "2"]) as process:
        while not (run / "checkpoint.pt").exists() and process.poll() is None:
            time.sleep(0.05)
        process.kill()
    yield "was killed", process.returncode == -signal.SIGKILL, process.returncode < 0
    done = subprocess.run([*command, "--out", str(run), "--resume"])
    yield "exit code of the resumed run", done.returncode, done.returncode == 0
    epochs = len((run / "metrics.csv").read_text().splitlines()) - 1
    yield "epochs", epochs, epochs == int(size[-1])


def _check_memory(settings: Settings) -> Figures:
    """The figures of measure/memory.py: forecasts within 10 %, largest batches within 5 %."""
    recorded = json.loads((settings.out / "memory.json").read_text())
    for part, most in (("peaks", 0.10), ("largest", 0.05), ("activations", 0.10)):
        for row in recorded.get(part, []):
            name = " ".join(str(row[key]) for key in ("model", "precision", "batch") if key in row)
            met = abs(row["ratio"] - 1) <= most
            yield f"{part} of {name}, forecast over real", round(row["ratio"], 3), met


def _models(settings: Settings) -> Iterator[tuple[str, Any, Any]]:
    """A convolutional network, a recurrent one and a transformer, each with its input."""
    import torch
    import torchvision

    from amp_lab.models.gpt import SIZES, Gpt, Size

    device = settings.device
    if settings.tiny:
        yield "resnet18", torchvision.models.resnet18(), torch.rand(2, 3, 64, 64, device=device)
        size, vocabulary = Size(32, heads=2, depth=2), 97
        tokens, series = (2, 16), (2, 8, 16)
    else:
        yield "resnet50", torchvision.models.resnet50(), torch.rand(32, 3, 224, 224, device=device)
        size, vocabulary = SIZES["gpt-small"], 50257
        tokens, series = (4, 1024), (64, 256, 512)
    yield (
        "lstm",
        torch.nn.LSTM(series[-1], series[-1], batch_first=True),
        torch.rand(series, device=device),
    )
    yield "gpt", Gpt(size, vocabulary), torch.randint(vocabulary, tokens, device=device)


def _xray(settings: Settings) -> Figures:
    """X-ray's dtypes on the device that is not there against those of a real run on this one."""
    import torch

    from amp_lab import xray
    from amp_lab.tracing import compare_xrays

    kind = torch.device(settings.device).type
    for name, model, inputs in _models(settings):
        model = model.to(settings.device)
        # Not fp16 on a CPU, whose kernels for it differ from one CPU to the next.
        for dtype in (torch.bfloat16,) if kind == "cpu" else (torch.float16, torch.bfloat16):
            forecast = xray(model, inputs, device_type=kind, dtype=dtype)
            real = xray(model, inputs, device_type=kind, dtype=dtype, real=True)
            differences = len(compare_xrays(forecast, real).different)
            yield f"{name} in {dtype}, ops that differ", differences, differences == 0


def _tiles(settings: Settings) -> Figures:
    """The ConvModel's step in tiles: gradients as near to FP32's as by hand, and its time."""
    import torch
    import torch.nn.functional as F

    from amp_lab import Precision, compare
    from amp_lab.bench import (
        ConvModel,
        FusedStep,
        TiledStep,
        quantized_sine,
        tiled_unsupported_reason,
    )
    from recording import times_as_fast

    reason = tiled_unsupported_reason(settings.device)
    if reason:
        yield "not here", reason, None if settings.device == "cpu" else False
        return
    inputs, target = quantized_sine(32 if settings.tiny else 512, torch.device(settings.device))
    torch.manual_seed(0)
    model = ConvModel(32 if settings.tiny else 256).to(inputs.device)
    rounding = ("0.bias", "3.bias", "6.bias")  # before a normalisation: no gradient but errors
    kept: list[Any] = [p for name, p in model.named_parameters() if name not in rounding]
    with Precision.FP32.float32_mode(inputs.device.type):
        exact = torch.autograd.grad(F.mse_loss(model(inputs), target), kept)
    steps = {
        "by hand": FusedStep(model, torch.bfloat16, compiled=not settings.tiny),
        "in tiles": TiledStep(model),
    }
    off = {}
    for name, step in steps.items():
        step(inputs, target)
        pairs = zip(kept, exact, strict=True)
        off[name] = max(float((mine.grad - its).norm() / its.norm()) for mine, its in pairs)
    yield "by hand, furthest from FP32", off["by hand"], None
    yield "in tiles, furthest from FP32", off["in tiles"], off["in tiles"] < 1.5 * off["by hand"]
    calls = {name: functools.partial(step, inputs, target) for name, step in steps.items()}
    compared = compare(calls, device=inputs.device, budget_s=5 if settings.tiny else 20)
    yield "steps", times_as_fast(compared), None


def _article(settings: Settings) -> Figures:
    """The training step of AMD's article in its exact size, against IEEE FP32 and the default."""
    import torch

    from amp_lab import Precision, compare, measure
    from amp_lab.bench import ConvModel, quantized_sine
    from recording import times_as_fast

    size = 32 if settings.tiny else 512
    inputs, targets = (tensor.to(settings.device) for tensor in quantized_sine(size))
    kind = inputs.device.type

    def step(precision: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        model = ConvModel(16 if settings.tiny else 256).to(settings.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = (precision or Precision.FP32).grad_scaler(kind)

        def train() -> None:
            with contextlib.ExitStack() as modes:
                # Around the backward pass too: without it, convolutions there would run in TF32.
                if precision is not None:
                    modes.enter_context(precision.float32_mode(kind))
                with precision.autocast(kind) if precision else contextlib.nullcontext():
                    loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)

        return train

    steps = {"fp32": step(Precision.FP32), "default": step(None), "bf16": step(Precision.BF16)}
    if kind != "cpu":  # where fp16 can be hundreds of times slower
        steps["fp16"] = step(Precision.FP16)
    compared = compare(steps, device=settings.device, budget_s=5 if settings.tiny else 30)
    yield "steps", times_as_fast(compared), None
    yield from _shares_of_the_limit(compared, steps["fp32"])
    for name, run in steps.items():
        peak = measure(run, device=settings.device, warmup=1, repeats=1).peak_bytes
        yield f"{name}, peak in MiB", None if peak is None else peak / 2**20, None


def _shares_of_the_limit(compared: Any, step: Callable[[], None]) -> Figures:
    """How much of the highest measured rate of products each step reaches: no step exceeds it."""
    from torch.utils.flop_counter import FlopCounterMode

    from amp_lab import pick_device
    from amp_lab.bench import measure_ceilings

    with FlopCounterMode(display=False) as counter:
        step()
    limits = measure_ceilings(pick_device()).flops_per_s
    for name in compared.samples_s:
        # By default convolutions may run in TF32, and where there is none, TF32 is fp32.
        names = ("fp32", "tf32") if name in ("default", "tf32") else (name,)
        possible = [rate for one in names if (rate := limits[one]) is not None]
        if not possible:
            yield f"{name}, share of the limit", "not known", None
            continue
        rate = counter.get_total_flops() / compared.median_s(name)
        share = rate / max(possible)
        yield f"{name}, share of the limit", round(share, 3), share < 1.1 or not compared.trusted


def _resnet50(settings: Settings) -> Figures:
    """Images per second of a training step, in each precision, with channels-last."""
    import torch
    import torchvision

    from amp_lab import Precision, compare
    from recording import plain, times_as_fast

    batch, size = (2, 64) if settings.tiny else (256, 224)
    kind = torch.device(settings.device).type
    images = torch.rand(batch, 3, size, size, device=settings.device)
    images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(1000, (batch,), device=settings.device)

    def step(precision: Any) -> Callable[[], None]:
        model = torchvision.models.resnet50().to(settings.device)
        model.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        scaler = precision.grad_scaler(kind)

        def train() -> None:
            with precision.float32_mode(kind):
                with precision.autocast(kind):
                    outputs = model(images)
                loss = torch.nn.functional.cross_entropy(outputs.float(), targets)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)

        return train

    chosen = (Precision.FP32, Precision.BF16) if kind == "cpu" else tuple(Precision)
    steps = {str(precision): step(precision) for precision in chosen}
    compared = compare(steps, device=settings.device, budget_s=10 if settings.tiny else 60)
    yield "steps", times_as_fast(compared), None
    yield from _shares_of_the_limit(compared, steps["fp32"])
    for name in steps:
        rate = compared.time_s(name).rate(batch)
        yield f"{name}, images/s", plain(rate), None


def _latency(settings: Settings) -> Figures:
    """One image in each way, and what `advise` recommends against the fastest of the others."""
    import torch

    import latency

    models: dict[str, Callable[[], torch.nn.Module]] = dict(latency.MODELS)
    size, minutes, budget_s = 224, 0.5, 5.0
    if settings.tiny:
        models = latency.tiny_models()
        size, minutes, budget_s = 8, 0.05, 1.0
    device = torch.device(settings.device)
    for row in latency.latency(models, device, size, minutes=minutes, budget_s=budget_s):
        yield f"{row['model']}, one image", row, None


MEASURES: dict[str, Callable[[Settings], Figures]] = {
    "kill": _kill,
    "memory": _check_memory,
    "xray": _xray,
    "tiles": _tiles,
    "article": _article,
    "resnet50": _resnet50,
    "latency": _latency,
}


def main() -> int:
    """Run one measure in this process."""
    parser = argparse.ArgumentParser(prog="first_gpu_parts", description=__doc__)
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("--device", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return _measured(options.name, Settings(options.device, options.tiny, options.out))


if __name__ == "__main__":
    sys.exit(main())

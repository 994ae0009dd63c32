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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from device_run import MARK, ROOT, Part, Settings

sys.path.append(str(ROOT / "tools" / "measure"))  # which are scripts too, and import one another

THIS_FILE = str(Path(__file__).resolve())

# The parts. Each has a function that returns its commands: lists of arguments of Python.


def _notebook(number: str) -> Part:
    """The part that runs a notebook as a plain script, as a reader without Jupyter would."""

    def commands(settings: Settings) -> list[list[str]]:
        (source,) = (ROOT / "notebooks").glob(f"{number}_*.py")
        return [[str(source)]]

    is_timed = number in ("04", "10")  # their assertions are about times
    return Part(f"notebook-{number}", 480, commands, is_timed)


def _measure(name: str, limit_s: float, *, is_timed: bool = True) -> Part:
    """The part that runs this file with a name in `MEASURES`."""

    def commands(settings: Settings) -> list[list[str]]:
        command = [THIS_FILE, name]
        if settings.tiny:
            command.append("--tiny")
        command += ["--device", settings.device, "--out", str(settings.out)]
        return [command]

    return Part(name, limit_s, commands, is_timed)


def _doctor(settings: Settings) -> list[list[str]]:
    """The command that says what this machine is."""
    return [["-m", "amp_lab", "doctor", "--device", settings.device]]


def _train(settings: Settings) -> list[list[str]]:
    """The command that trains for two epochs."""
    command = ["-m", "amp_lab", "train", "--dataset", "digits", "--precision", "fp16"]
    command += ["--epochs", "2", "--out", str(settings.out / "run")]
    if settings.tiny:
        command += ["--model", "shufflenet_v2_x0_5", "--limit", "256"]
    else:
        command += ["--model", "resnet18"]
    return [command]


def _memory(settings: Settings) -> list[list[str]]:
    """The commands that run measure/memory.py, and compare its figures with their limits."""
    script = ROOT / "tools" / "measure" / "memory.py"
    measure = [str(script), "--out", str(settings.out / "memory.json")]
    if settings.tiny:
        measure += ["--model", "mobilenet_v2"]
    check = [THIS_FILE, "memory", "--out", str(settings.out)]
    return [measure, check]


def _bench(settings: Settings) -> list[list[str]]:
    """The command that runs the quick benchmark."""
    command = ["-m", "amp_lab", "bench", "--quick", "--out", str(settings.out / "bench.json")]
    if settings.tiny:
        command += ["--rounds", "1", "--workload", "matmul", "--precision", "fp32"]
    return [command]


_FAILURES = ("08", *(f"08{letter}" for letter in "abcdefgh"))

PARTS = (
    Part("doctor", 60, _doctor, is_timed=False),
    *map(_notebook, ("01", "02", "03", "04", "10")),
    *map(_notebook, ("05", "06", "07", *_FAILURES, "09", "11", "13", "14", "15", "16", "17", "18")),
    _notebook("19"),
    Part("train", 120, _train, is_timed=False),
    _measure("kill", 180, is_timed=False),
    Part("memory", 300, _memory, is_timed=False),
    _measure("xray", 120, is_timed=False),
    Part("bench", 300, _bench),
    _measure("tiles", 120),
    _measure("article", 180),
    _measure("resnet50", 180),
    _measure("latency", 300),
)


# What the measured parts do, in their own process.


class Figure(NamedTuple):
    """A result of a measure."""

    name: str
    value: object  # for JSON
    is_met: bool | None = None  # whether the value is within its limit; None: it has no limit


def _print_figures(name: str, settings: Settings) -> None:
    """Run one measure, and print each figure as soon as it is there, for `device_run` to read."""
    limits: dict[str, bool] = {}  # those of all figures so far
    for figure in MEASURES[name](settings):
        if figure.is_met is not None:
            limits[f"{figure.name}: {figure.value}"] = figure.is_met
        result = {figure.name: figure.value, "limits": limits}
        print(MARK + json.dumps(result), flush=True)


def _kill(settings: Settings) -> Iterator[Figure]:
    """A run that is killed once it has saved, and goes on to its end."""
    run = settings.out / "killed"
    epochs = 2 if settings.tiny else 6
    train = [sys.executable, "-m", "amp_lab", "train", "--out", str(run)]
    settings_of_run = ["--dataset", "digits", "--precision", "fp16", "--epochs", str(epochs)]
    settings_of_run += ["--checkpoint-every", "2"]
    if settings.tiny:
        settings_of_run += ["--model", "shufflenet_v2_x0_5", "--limit", "256"]
    else:
        settings_of_run += ["--model", "resnet18"]
    with subprocess.Popen([*train, *settings_of_run]) as process:
        while not (run / "checkpoint.pt").exists() and process.poll() is None:
            time.sleep(0.05)
        process.kill()
    was_killed = process.returncode == -signal.SIGKILL
    yield Figure("was killed", was_killed, is_met=process.returncode < 0)  # ended by a signal
    resumed = subprocess.run([*train, "--resume"])
    yield Figure("exit code of the resumed run", resumed.returncode, resumed.returncode == 0)
    rows = len((run / "metrics.csv").read_text().splitlines()) - 1  # without the header
    yield Figure("epochs", rows, rows == epochs)


def _check_memory(settings: Settings) -> Iterator[Figure]:
    """The figures of measure/memory.py: forecasts within 10 %, largest batches within 5 %."""
    recorded = json.loads((settings.out / "memory.json").read_text())
    largest_errors = {"peaks": 0.10, "largest": 0.05, "activations": 0.10}
    for part, largest_error in largest_errors.items():
        for row in recorded.get(part, []):
            keys = [key for key in ("model", "precision", "batch") if key in row]
            name = " ".join(str(row[key]) for key in keys)  # such as ``resnet50 bf16 32``
            ratio = row["ratio"]
            is_met = abs(ratio - 1) <= largest_error
            yield Figure(f"{part} of {name}, forecast over real", round(ratio, 3), is_met)


def _models(settings: Settings) -> Iterator[tuple[str, Any, Any]]:
    """A convolutional network, a recurrent one and a transformer: (name, model, input) of each."""
    import torch
    import torchvision

    from amp_lab.models.gpt import SIZES, Gpt, Size

    device = settings.device
    if settings.tiny:
        images = torch.rand(2, 3, 64, 64, device=device)
        yield "resnet18", torchvision.models.resnet18(), images
        series = torch.rand(2, 8, 16, device=device)
        gpt = Gpt(Size(32, heads=2, depth=2), vocabulary=97)
        tokens = torch.randint(97, (2, 16), device=device)
    else:
        images = torch.rand(32, 3, 224, 224, device=device)
        yield "resnet50", torchvision.models.resnet50(), images
        series = torch.rand(64, 256, 512, device=device)
        gpt = Gpt(SIZES["gpt-small"], vocabulary=50257)
        tokens = torch.randint(50257, (4, 1024), device=device)
    features = series.size(-1)
    yield "lstm", torch.nn.LSTM(features, features, batch_first=True), series
    yield "gpt", gpt, tokens


def _xray(settings: Settings) -> Iterator[Figure]:
    """Compare the dtypes that X-ray forecasts with those of a real run on this device."""
    import torch

    from amp_lab import xray
    from amp_lab.tracing import compare_xrays

    kind = torch.device(settings.device).type
    for name, model, inputs in _models(settings):
        model = model.to(settings.device)
        dtypes = [torch.bfloat16]
        if kind != "cpu":  # whose fp16 kernels differ from one CPU to the next
            dtypes.append(torch.float16)
        for dtype in dtypes:
            forecast = xray(model, inputs, device_type=kind, dtype=dtype)
            real = xray(model, inputs, device_type=kind, dtype=dtype, real=True)
            different = compare_xrays(forecast, real).different
            yield Figure(f"{name} in {dtype}, ops that differ", len(different), not different)
            for forecast_row, real_row in different[:4]:
                print(f"{name}, forecast: {forecast_row}\n{name}, real:     {real_row}")


def _tiles(settings: Settings) -> Iterator[Figure]:
    """The errors and the times of two steps of the ConvModel: in tiles, and written by hand."""
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
        is_met = None if settings.device == "cpu" else False  # a GPU should support it
        yield Figure("not here", reason, is_met)
        return
    pixels, channels, budget_s = 512, 256, 20  # the image has pixels x pixels
    if settings.tiny:
        pixels, channels, budget_s = 32, 32, 5
    inputs, target = quantized_sine(pixels, torch.device(settings.device))
    torch.manual_seed(0)
    model = ConvModel(channels).to(inputs.device)
    # The gradient of a bias before a normalisation is zero, apart from rounding errors.
    without_gradient = ("0.bias", "3.bias", "6.bias")
    parameters: list[Any] = []
    for name, parameter in model.named_parameters():
        if name not in without_gradient:
            parameters.append(parameter)
    with Precision.FP32.float32_mode(inputs.device.type):
        fp32_gradients = torch.autograd.grad(F.mse_loss(model(inputs), target), parameters)
    steps = {
        "by hand": FusedStep(model, torch.bfloat16, compiled=not settings.tiny),
        "in tiles": TiledStep(model),
    }
    largest_errors = {}  # relative, of all gradients of a step
    for name, step in steps.items():
        step(inputs, target)
        errors = []
        for parameter, fp32_gradient in zip(parameters, fp32_gradients, strict=True):
            error = (parameter.grad - fp32_gradient).norm() / fp32_gradient.norm()
            errors.append(float(error))
        largest_errors[name] = max(errors)
    by_hand = largest_errors["by hand"]
    in_tiles = largest_errors["in tiles"]
    yield Figure("by hand, furthest from FP32", by_hand)
    # Both round to bf16, but in other places, so their errors are alike and not equal.
    yield Figure("in tiles, furthest from FP32", in_tiles, is_met=in_tiles < 1.5 * by_hand)
    calls = {name: functools.partial(step, inputs, target) for name, step in steps.items()}
    compared = compare(calls, device=inputs.device, budget_s=budget_s)
    yield Figure("steps", times_as_fast(compared))


def _article(settings: Settings) -> Iterator[Figure]:
    """Times and memory of the training step of AMD's article, in each precision.

    "fp32" is IEEE FP32, and "default" what torch does without any setting.
    """
    import torch

    from amp_lab import Precision, compare, measure
    from amp_lab.bench import ConvModel, quantized_sine
    from recording import times_as_fast

    pixels, channels, budget_s = 512, 256, 30  # the exact sizes of the article
    if settings.tiny:
        pixels, channels, budget_s = 32, 16, 5
    inputs, targets = quantized_sine(pixels, torch.device(settings.device))
    kind = inputs.device.type

    def make_step(precision: Precision | None) -> Callable[[], None]:
        """A training step of a new model; with None it has no setting of precision."""
        torch.manual_seed(0)
        model = ConvModel(channels).to(settings.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scaler = (precision or Precision.FP32).grad_scaler(kind)  # does nothing except in fp16

        def train(autocast: AbstractContextManager) -> None:
            with autocast:
                loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        if precision is None:
            return lambda: train(contextlib.nullcontext())

        def train_in_precision() -> None:
            # Around the backward pass too: without it, convolutions there would run in TF32.
            with precision.float32_mode(kind):
                train(precision.autocast(kind))

        return train_in_precision

    steps = {
        "fp32": make_step(Precision.FP32),
        "default": make_step(None),
        "bf16": make_step(Precision.BF16),
    }
    if kind != "cpu":  # where fp16 can be hundreds of times slower
        steps["fp16"] = make_step(Precision.FP16)
    compared = compare(steps, device=settings.device, budget_s=budget_s)
    yield Figure("steps", times_as_fast(compared))
    yield from _shares_of_the_limit(compared, steps["fp32"])
    for name, step in steps.items():
        peak = measure(step, device=settings.device, warmup=1, repeats=1).peak_bytes
        yield Figure(f"{name}, peak in MiB", None if peak is None else peak / 2**20)


def _shares_of_the_limit(compared: Any, step: Callable[[], None]) -> Iterator[Figure]:
    """The rate of each step as a share of the fastest matmuls here: no step should exceed 1.

    `step` is one of the steps that were compared. All have as many FLOPs.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from amp_lab import pick_device
    from amp_lab.bench import measure_ceilings

    with FlopCounterMode(display=False) as counter:
        step()
    matmul_rates = measure_ceilings(pick_device()).flops_per_s  # None without the precision
    for name in compared.samples_s:
        precisions = [name]
        if name in ("default", "tf32"):
            # By default convolutions may run in TF32, and where there is none, TF32 is fp32.
            precisions = ["fp32", "tf32"]
        rates = [matmul_rates[precision] for precision in precisions]
        known_rates = [rate for rate in rates if rate is not None]
        if not known_rates:
            yield Figure(f"{name}, share of the limit", "not known")
            continue
        rate = counter.get_total_flops() / compared.median_s(name)
        share = rate / max(known_rates)
        # More than the limit, beyond the noise of both, would mean that something is miscounted.
        is_met = share < 1.1 or not compared.trusted
        yield Figure(f"{name}, share of the limit", round(share, 3), is_met)


def _resnet50(settings: Settings) -> Iterator[Figure]:
    """Images per second of a training step, in each precision, with channels-last."""
    import torch
    import torchvision

    from amp_lab import Precision, compare
    from recording import plain, times_as_fast

    batch, size, budget_s = 256, 224, 60
    if settings.tiny:
        batch, size, budget_s = 2, 64, 10
    kind = torch.device(settings.device).type
    images = torch.rand(batch, 3, size, size, device=settings.device)
    images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(1000, (batch,), device=settings.device)

    def make_step(precision: Precision) -> Callable[[], None]:
        """A training step of a new model."""
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

    precisions = [Precision.FP32, Precision.BF16] if kind == "cpu" else list(Precision)
    steps = {str(precision): make_step(precision) for precision in precisions}
    compared = compare(steps, device=settings.device, budget_s=budget_s)
    yield Figure("steps", times_as_fast(compared))
    yield from _shares_of_the_limit(compared, steps["fp32"])
    for name in steps:
        images_per_s = compared.time_s(name).rate(batch)
        yield Figure(f"{name}, images/s", plain(images_per_s))


def _latency(settings: Settings) -> Iterator[Figure]:
    """Times of one image in each way, and of what `advise` recommends: see measure/latency.py."""
    import torch

    import latency

    models: dict[str, Callable[[], torch.nn.Module]] = dict(latency.MODELS)
    size, minutes, budget_s = 224, 0.5, 5.0
    if settings.tiny:
        models = latency.tiny_models()
        size, minutes, budget_s = 8, 0.05, 1.0
    device = torch.device(settings.device)
    for row in latency.latency(models, device, size, minutes=minutes, budget_s=budget_s):
        yield Figure(f"{row['model']}, one image", row)


MEASURES: dict[str, Callable[[Settings], Iterator[Figure]]] = {
    "kill": _kill,
    "memory": _check_memory,
    "xray": _xray,
    "tiles": _tiles,
    "article": _article,
    "resnet50": _resnet50,
    "latency": _latency,
}


def main() -> None:
    """Run one measure in this process."""
    parser = argparse.ArgumentParser(prog="first_gpu_parts", description=__doc__)
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("--device", default="")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    _print_figures(options.name, Settings(options.device, options.tiny, options.out))


if __name__ == "__main__":
    main()

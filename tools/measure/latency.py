"""Time one image at a time in each way of running a model, and write the figures as JSON.

    python tools/measure/latency.py --out data/results/latency-DEVICE.json

The ways are those of notebook 18: fp32, autocast, and weights cast once, eager and compiled, and
ONNX Runtime in fp32 where it is installed. All take turns in one run. So does "recommended", which
is what `amp_lab.advise` recommends for inference with the same input. Its time is also compared
with that of the fastest way of torch.
"""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from amp_lab import Precision, advise, compare, recommend_precision
from amp_lab.core.device import pick_device
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, Step
from recording import parser, plain, record, times_as_fast

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "mobilenet_v2": torchvision.models.mobilenet_v2,
    "vit_b_16": torchvision.models.vit_b_16,
}


def tiny_models() -> dict[str, Callable[[], nn.Module]]:
    """A small network for images of 8 by 8 pixels, in place of `MODELS` in a rehearsal."""

    def small() -> nn.Module:
        # The convolution has 8 channels of 6 x 6 pixels.
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))

    return {"small": small}


def ways(model: nn.Module, image: Tensor, low: Precision) -> dict[str, Callable[[], Any]]:
    """Functions that run a model in evaluation mode on one image (1, 3, S, S), by name.

    `low` is the 16-bit precision, ``fp16`` or ``bf16``.
    """
    device = image.device.type
    dtype = low.dtype
    cast_model = copy.deepcopy(model).to(dtype)
    compiled = torch.compile(copy.deepcopy(model))
    compiled_cast_model = torch.compile(cast_model)

    def autocast() -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return model(image)

    functions: dict[str, Callable[[], Any]] = {
        "fp32": lambda: model(image),
        "fp32 compiled": lambda: compiled(image),
        f"{low} autocast": autocast,
        f"{low} cast once": lambda: cast_model(image.to(dtype)),
        f"{low} cast once, compiled": lambda: compiled_cast_model(image.to(dtype)),
    }
    if device == "cpu" and importlib.util.find_spec("onnxruntime"):
        functions["ONNX Runtime, fp32"] = onnx(model, image)
    return functions


def onnx(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    """A function that runs the model in ONNX Runtime, with as many threads as torch has."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin while they wait would slow down torch's threads.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    program = torch.onnx.export(model, (image,), input_names=["image"], verbose=False)
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
    inputs = {"image": image.numpy()}
    return lambda: session.run(None, inputs)


def latency(
    models: dict[str, Callable[[], nn.Module]],
    device: torch.device,
    size: int,
    *,
    minutes: float,
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each model: the time of each way, and that of what `advise` recommends.

    `models` has functions that build a model, by name. Images have `size` x `size` pixels. For each
    model, `advise` gets `minutes`, and the comparison `budget_s` seconds.
    """
    low = Precision.BF16
    if recommend_precision(device) is Precision.FP16:
        low = Precision.FP16
    for name, build in models.items():
        torch.manual_seed(0)
        model = build().to(device).eval().requires_grad_(False)
        image = torch.rand(1, 3, size, size, device=device)
        best = advise(model, image, device=device, minutes=minutes).chosen[INFERENCE]
        torch.compiler.reset()
        functions = ways(model, image, low)
        torch_ways = [way for way in functions if "ONNX" not in way]
        functions["recommended"] = Step(ModelCall(model, (image,)), best.recipe)
        with torch.inference_mode():
            for function in functions.values():
                function()  # compiles
            compared = compare(functions, device=device, budget_s=budget_s)
        fastest = min(torch_ways, key=compared.median_s)
        row = {
            "model": name,
            "image": list(image.shape),
            "recommended": best.name,
            "fastest of the others of torch": fastest,
            "recommended takes times as long": plain(compared.ratio("recommended", fastest)),
        }
        yield row | times_as_fast(compared)


def main() -> None:
    """Measure on the default device."""
    options_parser = parser(__doc__ or "", ["latency"], budget_s=20)
    options_parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    options_parser.add_argument("--minutes", type=float, default=2.0, help="for advise, a model")
    options_parser.add_argument("--tiny", action="store_true", help="a small network: a rehearsal")
    options = options_parser.parse_args()
    device = pick_device()

    def measure_latency() -> Iterator[dict[str, Any]]:
        if options.tiny:
            return latency(tiny_models(), device, size=8, minutes=0.05, budget_s=1.0)
        models = {name: MODELS[name] for name in options.model or MODELS}
        return latency(models, device, size=224, minutes=options.minutes, budget_s=options.budget)

    record({"latency": measure_latency}, options, device)


if __name__ == "__main__":
    main()

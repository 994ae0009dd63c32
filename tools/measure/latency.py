"""Time one image at a time in each way of running a model, and write the figures as JSON.

    python tools/measure/latency.py --out data/results/latency-DEVICE.json

The ways are those of notebook 18: fp32, autocast, and weights cast once, eager and compiled, and
ONNX Runtime in fp32 where it is installed, all in turns in one run. "recommended" is what
`amp_lab.advise` recommends for inference with the same input, timed anew beside the others, and
how many times as long it takes as the fastest way of torch.
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
    """A small network for images of 8 by 8 pixels: a rehearsal."""
    parts = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
    return {"small": lambda: nn.Sequential(*parts, nn.Linear(8 * 36, 4))}


def ways(model: nn.Module, image: Tensor, low: Precision) -> dict[str, Callable[[], Any]]:
    """Functions that run a model in evaluation mode on one image (1, 3, S, S), by name.

    `low` is the 16-bit precision, ``fp16`` or ``bf16``.
    """
    device = image.device.type
    dtype = low.dtype
    half = copy.deepcopy(model).to(dtype)
    compiled, compiled_half = torch.compile(copy.deepcopy(model)), torch.compile(half)

    def autocast() -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return model(image)

    found: dict[str, Callable[[], Any]] = {
        "fp32": lambda: model(image),
        "fp32 compiled": lambda: compiled(image),
        f"{low} autocast": autocast,
        f"{low} cast once": lambda: half(image.to(dtype)),
        f"{low} cast once, compiled": lambda: compiled_half(image.to(dtype)),
    }
    if device == "cpu" and importlib.util.find_spec("onnxruntime"):
        found["ONNX Runtime, fp32"] = onnx(model, image)
    return found


def onnx(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    """The model in ONNX Runtime, with as many threads as torch has."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # beside torch's own
    program = torch.onnx.export(model, (image,), input_names=["image"], verbose=False)
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
    given = {"image": image.numpy()}
    return lambda: session.run(None, given)


def latency(
    models: dict[str, Callable[[], nn.Module]],
    device: torch.device,
    size: int,
    *,
    minutes: float,
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """A row for each model: times, and what is recommended against the fastest."""
    recommended = recommend_precision(device)
    low = Precision.FP16 if recommended is Precision.FP16 else Precision.BF16
    for name, build in models.items():
        torch.manual_seed(0)
        model = build().to(device).eval().requires_grad_(False)
        image = torch.rand(1, 3, size, size, device=device)
        chosen = advise(model, image, device=device, minutes=minutes).chosen[INFERENCE]
        torch.compiler.reset()
        found = ways(model, image, low)
        found["recommended"] = Step(ModelCall(model, (image,)), chosen.recipe)
        with torch.inference_mode():
            for way in found.values():
                way()  # compiles
            compared = compare(found, device=device, budget_s=budget_s)
        others = [way for way in found if "ONNX" not in way and way != "recommended"]
        fastest = min(others, key=compared.median_s)
        yield {
            "model": name,
            "image": list(image.shape),
            "recommended": chosen.name,
            "fastest of the others of torch": fastest,
            "recommended takes times as long": plain(compared.ratio("recommended", fastest)),
        } | times_as_fast(compared)


def main() -> None:
    """Measure on the default device."""
    options_of = parser(__doc__ or "", ["latency"], budget_s=20)
    options_of.add_argument("--model", choices=MODELS, action="append", help="default: all")
    options_of.add_argument("--minutes", type=float, default=2.0, help="for advise, a model")
    options_of.add_argument("--tiny", action="store_true", help="a small network: a rehearsal")
    options = options_of.parse_args()
    device = pick_device()
    models = {name: MODELS[name] for name in options.model or MODELS}
    size, how = 224, {"minutes": options.minutes, "budget_s": options.budget}
    if options.tiny:
        models, size, how = tiny_models(), 8, {"minutes": 0.05, "budget_s": 1.0}
    record({"latency": lambda: latency(models, device, size, **how)}, options, device)


if __name__ == "__main__":
    main()

"""Checks for notebook 19, Choose your precision."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course.exercises import call, exercise, need

from amp_lab.core.gpus import GPUS

_CHOICES = (
    "fp32",
    "fp16 with a scaler",
    "fp16",
    "bf16 under autocast",
    "bf16",
    "fp32 with TF32 off",
)
_FORMATS = {key: gpu.architecture.matmuls for key, gpu in GPUS.items()}
_FORMATS |= {"amx": ("bf16",), "avx2": ()}


class _Case(NamedTuple):
    hardware: str  # the row of `_FORMATS`
    task: str  # train, infer or exact
    why: str


_CASES = {
    "train a ResNet on a T4": _Case(
        "t4",
        "train",
        "a T4 multiplies fp16 alone fast, and small gradients can vanish without a scaler",
    ),
    "train a GPT on an A100": _Case("a100", "train", "an A100 has bf16, and training needs range"),
    "serve a BERT, trained in fp32, on a V100": _Case(
        "v100", "infer", "a V100 has no bf16, only emulates it"
    ),
    "serve a language model on an RTX 4090": _Case(
        "rtx-4090", "infer", "it has bf16, and serving casts once"
    ),
    "train a U-Net on a GTX 1660": _Case(
        "gtx-1660", "train", "it has no tensor cores, and fp16 can give NaN there"
    ),
    "solve an ill-conditioned system on an H100": _Case(
        "h100", "exact", "every digit counts, and TF32 keeps 11 bits"
    ),
    "fine-tune on an Arc A770": _Case("arc-a770", "train", "it lacks the float64 of a scaler"),
    "train on an MI250X": _Case("mi250x", "train", "it makes fp16's subnormals 0"),
    "serve on a CPU with AMX": _Case("amx", "infer", "AMX multiplies bf16"),
    "train on a laptop's CPU with AVX2 alone": _Case(
        "avx2", "train", "nothing else is faster there"
    ),
}
_IN_TRAINING = {"bf16": "bf16 under autocast", "fp16": "fp16 with a scaler", "fp32": "fp32"}


def _right(case: _Case) -> str:
    if case.task == "exact":
        return "fp32 with TF32 off"
    fast = _fast_format(case.hardware)
    if case.task == "infer":
        return fast
    return _IN_TRAINING[fast]


def _fast_format(hardware: str) -> str:
    """The format to begin with on a device: bf16 where its matmuls are fast."""
    for name in ("bf16", "fp16"):
        if name in _FORMATS[hardware]:
            return name
    return "fp32"


def _need_all(answers: Mapping[str, str], wanted: Mapping[str, Any]) -> None:
    need(set(answers) == set(wanted), "Keep the lines as they are, and fill in each.")
    for answer in answers.values():
        call(lambda given=answer: given)  # the dots of the stub are no answer


@exercise
def check_cases(answers: dict[str, str]) -> str:
    """What to begin with, in ten cases."""
    _need_all(answers, _CASES)
    strange = [answer for answer in answers.values() if answer not in _CHOICES]
    need(not strange, f"{strange[:1]} is none of {', '.join(_CHOICES)}.")
    wrong = [name for name, case in _CASES.items() if answers[name] != _right(case)]
    if wrong:
        name = wrong[0]
        need(False, f"Look again at “{name}” ({len(wrong)} of 10): {_CASES[name].why}.")
    return "All ten. Now measure: it is where to begin, and not where to end."


def _rounded(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    def cut(values: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(values)
        rounded = (mantissa * 2**bits).round() / 2**bits
        return torch.ldexp(rounded, exponent)

    return lambda left, right: cut(left) @ cut(right)


@exercise
def check_bits(bits_left: Callable[[Any], Any]) -> str:
    """The bits of significand that an input of a product keeps."""
    for bits, name in ((11, "TF32"), (8, "bf16"), (24, "fp32")):
        found = int(call(bits_left, _rounded(bits)))
        need(
            found != bits - 1,
            f"For {name} it returns {found}: the leading 1 is a bit of the significand too.",
        )
        need(found == bits, f"A product in {name} keeps {bits} bits, and it returns {found}.")
    return "This is how `amp-lab doctor` tells TF32 from fp32 on a GPU."


@exercise
def check_outputs(outputs: dict[str, str]) -> str:
    """The dtypes of outputs of four settings."""
    right = {
        'accelerate, mixed_precision="bf16"': "fp32",
        'Lightning\'s Trainer, precision="bf16-mixed", in training_step': "bf16",
        'Fabric, precision="bf16-true"': "fp32",
        "torch.autocast, after a last linear layer": "bf16",
    }
    _need_all(outputs, right)
    wrong = [setting for setting in right if outputs[setting] != right[setting]]
    if wrong:
        need(False, f"Not so: {wrong[0]}. Does it wrap the model, and cast what that returns?")
    return "So a loss that you compute from them is in fp32 with some, and not with others."


@exercise
def check_scale_down(scale_down: Callable[[nn.Module, Tensor], Any]) -> str:
    """What the first layer returns within 1024, and the same outputs."""
    torch.manual_seed(0)
    first = nn.Linear(8, 16)
    with torch.no_grad():
        first.weight.mul_(1e5)
        first.bias.mul_(1e5)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 4))
    x = torch.rand(32, 8)
    before = copy.deepcopy(model)
    call(scale_down, model, x)
    with torch.no_grad():
        largest = float(model[0](x).abs().max())
        wanted = before(x)
        found = model(x)
    need(
        largest <= 1024, f"The first layer still returns ±{largest:.4g}: it has to be 1024 or less."
    )
    need(
        largest > 256,
        f"The first layer returns ±{largest:.4g} at most: you took more than was asked.",
    )
    need(
        torch.allclose(found, wanted, rtol=1e-4),
        "The outputs changed: what the first layer's weight and bias lose, the last layer's weight "
        "has to gain, and its bias stays.",
    )
    need(
        torch.equal(found, wanted),
        "The outputs are nearly the same. With a power of two they are the same to the bit.",
    )
    return "Nothing was rounded on the way, for a power of two changes exponents alone."

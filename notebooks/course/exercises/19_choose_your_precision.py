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
        "of fp16 and bf16, a T4 multiplies only fp16 fast, and small gradients can vanish "
        "without a scaler",
    ),
    "train a GPT on an A100": _Case(
        "a100", "train", "an A100 multiplies bf16 fast, and training needs the range"
    ),
    "serve a BERT, trained in fp32, on a V100": _Case(
        "v100", "infer", "a V100 multiplies fp16 fast, but not bf16"
    ),
    "serve a language model on an RTX 4090": _Case(
        "rtx-4090", "infer", "it multiplies bf16 fast, and you cast the weights once"
    ),
    "train a U-Net on a GTX 1660": _Case(
        "gtx-1660", "train", "it has no tensor cores, and fp16 can give NaN on it"
    ),
    "solve an ill-conditioned system on an H100": _Case(
        "h100", "exact", "you need every digit, and TF32 has only 11 bits"
    ),
    "fine-tune on an Arc A770": _Case(
        "arc-a770", "train", "a scaler needs float64, which this GPU does not have"
    ),
    "train on an MI250X": _Case("mi250x", "train", "it rounds the subnormal numbers of fp16 to 0"),
    "serve on a CPU with AMX": _Case("amx", "infer", "AMX multiplies bf16 fast"),
    "train on a laptop's CPU with AVX2 alone": _Case(
        "avx2", "train", "no other format is faster there"
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
    need(
        set(answers) == set(wanted),
        "Keep the lines of the exercise, and write an answer into each.",
    )
    for answer in answers.values():
        call(lambda given=answer: given)  # the dots of the stub are no answer


@exercise
def check_cases(answers: dict[str, str]) -> str:
    """What to begin with, in ten cases."""
    _need_all(answers, _CASES)
    strange = [answer for answer in answers.values() if answer not in _CHOICES]
    need(not strange, f"{strange[:1]} is not one of {', '.join(_CHOICES)}.")
    wrong = [name for name, case in _CASES.items() if answers[name] != _right(case)]
    if wrong:
        name = wrong[0]
        need(False, f"{len(wrong)} of 10 are wrong. Look again at “{name}”: {_CASES[name].why}.")
    return "All ten are right. Start with these precisions, and then measure."


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
            f"For {name}, your function returns {found}. The leading 1 is also a bit of the "
            "significand.",
        )
        need(
            found == bits,
            f"A matmul in {name} keeps {bits} bits of its inputs, but your "
            f"function returns {found}.",
        )
    return "`amp-lab doctor` uses this test to tell TF32 from fp32 on a GPU."


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
        need(
            False,
            f"This one is wrong: {wrong[0]}. Does this setting wrap the model and cast"
            " its outputs?",
        )
    return (
        "So a loss that you compute from these outputs is in fp32 only with some of these settings."
    )


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
        largest <= 1024,
        f"The first layer still returns up to ±{largest:.4g}. It must return at most 1024.",
    )
    need(
        largest > 256,
        f"The first layer returns at most ±{largest:.4g}. You divided by more than necessary.",
    )
    need(
        torch.allclose(found, wanted, rtol=1e-4),
        "The outputs changed. Divide the weight and bias of the first layer by a number, "
        "multiply the weight of the last layer by it, and leave the bias of the last layer as"
        " it is.",
    )
    need(
        torch.equal(found, wanted),
        "The outputs are nearly the same. With a power of two, they are exactly the same.",
    )
    return "A power of two changes only the exponents, so no value was rounded."

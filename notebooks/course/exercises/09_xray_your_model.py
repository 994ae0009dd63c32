"""Checks for notebook 09, X-ray your model before you rent the GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course.exercises import call, exercise, need

from amp_lab import forecast_memory, xray


@exercise
def check_number_of_casts(number: int) -> str:
    """The casts of a small network under CUDA's autocast, which an X-ray counts."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    casts = xray(net, torch.empty(2, 8), device_type="cuda").casts
    parameters = 2 * 2  # weight and bias of the linear layers
    need(
        number != parameters,
        f"{parameters} are the weights and biases of the linear layers. The values that travel "
        "through the network are cast as well.",
    )
    need(
        isinstance(number, int) and number >= len(casts),
        f"{number} are too few. Count weights, biases and the values that travel through the "
        "network, and remember that the norm runs in fp32 on CUDA.",
    )
    need(
        number <= len(casts),
        f"{number} are too many. A value that has the right dtype already is not cast, and the "
        "norm's own weight and bias are fp32, which it computes in.",
    )
    return "The X-ray counts three for the first layer, two for the second and one for the norm."


_ROWS = [
    ("_to_copy", ("fp32",), ("fp16",)),
    ("addmm", ("fp16", "fp16", "fp16"), ("fp16",)),
    ("_to_copy", ("fp16",), ("fp32",)),
    ("sum", ("fp16",), ("fp32",)),  # sums in fp32 without a cast
    ("_to_copy", ("bf16",), ("fp32",)),
    ("_to_copy", ("fp16",), ("fp16",)),
    ("native_layer_norm", ("fp32", "fp32", "fp32"), ("fp32",)),
    ("_to_copy", ("fp32",), ("fp32",)),
]


def _goes_up(row: tuple[str, tuple[str, ...], tuple[str, ...]]) -> bool:
    """Whether the row is a cast to fp32 from another dtype."""
    name, dtypes_before, dtypes_after = row
    is_copy_to_fp32 = name == "_to_copy" and dtypes_after == ("fp32",)
    return is_copy_to_fp32 and dtypes_before != dtypes_after


@exercise
def check_casts_up(count: Callable[..., Any]) -> str:
    """A count of casts to fp32, checked with rows that have two of them."""
    found = call(count, list(_ROWS))
    right = sum(map(_goes_up, _ROWS))
    names = [row[0] for row in _ROWS]
    every = names.count("_to_copy")
    need(
        found != every,
        f"Of {len(_ROWS)} rows yours counts {found}, which are all casts: those that go down, and "
        "copies that change no dtype, are among them.",
    )
    need(
        found != right + 1,
        f"Of {len(_ROWS)} rows yours counts {found}, one too many: either an op that is no cast, "
        "such as a sum of fp16 numbers that returns fp32, or a copy from fp32 to fp32.",
    )
    need(
        found == right,
        f"Of {len(_ROWS)} rows yours counts {found!r}. Count casts from bf16 to fp32, too. Each "
        "dtype is in a tuple.",
    )
    need(count([]) == 0, "For no rows at all it should return 0.")
    return f"{found} of these {len(_ROWS)} rows are casts that go up."


def _log_softmax_dtypes(loss: Callable[..., Any], backend: str) -> set[torch.dtype | None]:
    """The dtypes that `_log_softmax` computes in, within this loss of a layer's output."""
    target = torch.zeros(4, dtype=torch.long)

    def of_logits(logits: torch.Tensor) -> torch.Tensor:
        return call(loss, logits, target.to(logits.device))

    layer, inputs = nn.Linear(16, 10), torch.empty(4, 16)
    report = xray(layer, inputs, device_type=backend, loss_fn=of_logits)
    return {row.dtype for row in report.rows if "log_softmax" in row.op}


@exercise
def check_precise_loss(loss: Callable[..., Any]) -> str:
    """A cross-entropy whose `log_softmax` is fp32 on CUDA, and which is the cross-entropy."""
    logits = torch.linspace(-2, 2, 12).view(3, 4)
    target = torch.tensor([0, 1, 3])
    wanted = nn.functional.cross_entropy(logits, target)
    value = call(loss, logits, target)
    is_scalar = torch.is_tensor(value) and value.shape == ()
    need(
        is_scalar and bool(torch.isclose(value, wanted)),
        "For fp32 logits it should return their cross-entropy, and it returns something else.",
    )
    dtypes = _log_softmax_dtypes(loss, "cuda")
    need(
        dtypes == {torch.float32},
        "On CUDA its log_softmax still runs in fp16. A cast of the result comes too late, because "
        "the numbers were rounded before it.",
    )
    return "On CUDA its log_softmax runs in fp32, and the value is the cross-entropy."


@exercise
def check_gigabytes(gigabytes: float) -> str:
    """What 3 billion parameters take with SGD and momentum, as the forecast has it for fewer."""
    model = nn.Linear(64, 64)
    forecast = forecast_memory(
        model, torch.empty(1, 64), precision="bf16", optimizer="sgd-momentum"
    )
    total = forecast.weights + forecast.gradients + forecast.optimizer
    parameter_count = sum(p.numel() for p in model.parameters())
    each = total / parameter_count
    right = 3 * each
    with_one_part_in_16_bits, with_two_parts_in_16_bits = 3 * (2 + 4 + 4), 3 * (2 + 2 + 4)
    all_in_16_bits = 3 * (2 + 2 + 2)
    need(
        gigabytes != right * 4 / 3,
        f"{gigabytes:g} GB would be right for AdamW, which keeps two averages. Momentum is one.",
    )
    need(
        gigabytes not in (with_one_part_in_16_bits, with_two_parts_in_16_bits, all_in_16_bits),
        f"{gigabytes:g} GB counts two bytes for weights or gradients. Autocast makes casts of the "
        "weights for the ops; weights, gradients and state themselves stay fp32.",
    )
    need(
        gigabytes != right * 2 / 3,
        f"{gigabytes:g} GB leave out one of the three parts: weights, gradients, momentum.",
    )
    need(
        gigabytes == right,
        f"{gigabytes} GB is not it. Write down the bytes of weight, gradient and momentum for one "
        "parameter, and multiply their sum by 3 billion.",
    )
    return f"{each:g} bytes for each of 3 billion parameters; the forecast has the same {each:g}."

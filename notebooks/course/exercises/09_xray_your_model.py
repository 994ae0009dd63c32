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
    first_layer = nn.Linear(8, 16)
    second_layer = nn.Linear(16, 4)
    norm = nn.LayerNorm(4)
    net = nn.Sequential(first_layer, nn.ReLU(), second_layer, norm)
    inputs = torch.empty(2, 8)
    report = xray(net, inputs, device_type="cuda")
    right = len(report.casts)
    parameter_count = 2 * 2  # weight and bias of the linear layers
    need(
        number != parameter_count,
        f"{parameter_count} is the number of weights and biases in the linear layers. Autocast also"
        " casts activations.",
    )
    is_large_enough = isinstance(number, int) and number >= right
    need(
        is_large_enough,
        f"{number} is too small. Count weights, biases and activations. On CUDA, the norm runs"
        " in fp32.",
    )
    need(
        number <= right,
        f"{number} is too large. Autocast does not cast a tensor that already has the right "
        "dtype. The norm runs in fp32, and its weight and bias are fp32.",
    )
    return "There are three casts for the first layer, two for the second, and one for the norm."


_Row = tuple[str, tuple[str, ...], tuple[str, ...]]

_ROWS: list[_Row] = [
    ("_to_copy", ("fp32",), ("fp16",)),
    ("addmm", ("fp16", "fp16", "fp16"), ("fp16",)),
    ("_to_copy", ("fp16",), ("fp32",)),
    ("sum", ("fp16",), ("fp32",)),  # sums in fp32 without a cast
    ("_to_copy", ("bf16",), ("fp32",)),
    ("_to_copy", ("fp16",), ("fp16",)),
    ("native_layer_norm", ("fp32", "fp32", "fp32"), ("fp32",)),
    ("_to_copy", ("fp32",), ("fp32",)),
]


def _goes_up(row: _Row) -> bool:
    """Whether the row is a cast to fp32 from another dtype."""
    name, dtypes_before, dtypes_after = row
    is_copy = name == "_to_copy"
    is_to_fp32 = dtypes_after == ("fp32",)
    has_new_dtype = dtypes_before != dtypes_after
    return is_copy and is_to_fp32 and has_new_dtype


@exercise
def check_casts_up(count: Callable[..., Any]) -> str:
    """A count of casts to fp32, checked with rows that have two of them."""
    found = call(count, list(_ROWS))
    right = sum(map(_goes_up, _ROWS))
    row_count = len(_ROWS)
    names = [row[0] for row in _ROWS]
    copies = names.count("_to_copy")
    need(
        found != copies,
        f"Your function returns {found} for {row_count} rows. This counts all copies, also "
        "casts from fp32 and copies to the same dtype.",
    )
    one_too_many = right + 1
    need(
        found != one_too_many,
        f"Your function returns {found} for {row_count} rows, which is one too many. You may "
        "have counted a sum of fp16 numbers that returns fp32, or a copy from fp32 to fp32.",
    )
    need(
        found == right,
        f"Your function returns {found!r} for {row_count} rows. Count casts from bf16 to fp32"
        " too. Each dtype is in a tuple.",
    )
    found_in_empty = count([])
    need(found_in_empty == 0, "For an empty list, return 0.")
    return f"{found} of these {row_count} rows are casts to fp32."


def _log_softmax_dtypes(loss: Callable[..., Any], backend: str) -> set[torch.dtype | None]:
    """The dtypes that `_log_softmax` computes in, within this loss of a layer's output."""
    target = torch.zeros(4, dtype=torch.long)

    def of_logits(logits: torch.Tensor) -> torch.Tensor:
        moved_target = target.to(logits.device)
        return call(loss, logits, moved_target)

    layer = nn.Linear(16, 10)
    inputs = torch.empty(4, 16)
    report = xray(layer, inputs, device_type=backend, loss_fn=of_logits)
    dtypes = set()
    for row in report.rows:
        if "log_softmax" in row.op:
            dtypes.add(row.dtype)
    return dtypes


def _is_close_scalar(value: Any, expected: torch.Tensor) -> bool:
    """Whether a value is a tensor without dimensions that is close to `expected`."""
    if not torch.is_tensor(value):
        return False
    is_scalar = value.shape == ()
    return is_scalar and bool(torch.isclose(value, expected))


@exercise
def check_precise_loss(loss: Callable[..., Any]) -> str:
    """A cross-entropy whose `log_softmax` is fp32 on CUDA, and which is the cross-entropy."""
    logits = torch.linspace(-2, 2, 12).view(3, 4)
    target = torch.tensor([0, 1, 3])
    wanted = nn.functional.cross_entropy(logits, target)
    value = call(loss, logits, target)
    is_cross_entropy = _is_close_scalar(value, wanted)
    need(
        is_cross_entropy,
        "For fp32 logits, your function does not return their cross-entropy.",
    )
    dtypes = _log_softmax_dtypes(loss, "cuda")
    is_fp32 = dtypes == {torch.float32}
    need(
        is_fp32,
        "On CUDA, `log_softmax` still runs in fp16. Cast the logits, not the result: the "
        "numbers were rounded before the result.",
    )
    return "On CUDA, `log_softmax` runs in fp32, and the result is the cross-entropy."


@exercise
def check_gigabytes(gigabytes: float) -> str:
    """What 3 billion parameters take with SGD and momentum, as the forecast has it for fewer."""
    model = nn.Linear(64, 64)
    inputs = torch.empty(1, 64)
    forecast = forecast_memory(model, inputs, precision="bf16", optimizer="sgd-momentum")
    total = forecast.weights + forecast.gradients + forecast.optimizer
    parameter_count = sum(p.numel() for p in model.parameters())
    each = total / parameter_count
    right = 3 * each
    with_one_part_in_16_bits = 3 * (2 + 4 + 4)
    with_two_parts_in_16_bits = 3 * (2 + 2 + 4)
    all_in_16_bits = 3 * (2 + 2 + 2)
    with_adamw = right * 4 / 3
    need(
        gigabytes != with_adamw,
        f"{gigabytes:g} GB would be right for AdamW, which stores two averages for each "
        "parameter. SGD with momentum stores one.",
    )
    totals_with_16_bits = (with_one_part_in_16_bits, with_two_parts_in_16_bits, all_in_16_bits)
    need(
        gigabytes not in totals_with_16_bits,
        f"{gigabytes:g} GB counts two bytes for weights or gradients. Autocast casts copies of"
        " the weights, but the weights, the gradients and the momentum stay fp32.",
    )
    without_a_part = right * 2 / 3
    need(
        gigabytes != without_a_part,
        f"{gigabytes:g} GB is the size of only two of the three parts: weights, gradients, "
        "momentum.",
    )
    need(
        gigabytes == right,
        f"{gigabytes} GB is wrong. Add the bytes of weight, gradient and momentum for one "
        "parameter, and multiply the sum by 3 billion.",
    )
    return f"Each of 3 billion parameters takes {each:g} bytes. The forecast agrees."

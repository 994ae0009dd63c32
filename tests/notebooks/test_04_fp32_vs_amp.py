"""Notebooks 04 and 05: what no device can do is noticed, and a busy machine claims nothing."""

from types import SimpleNamespace

import pytest
import torch
from definitions import definitions
from torch import nn

import build_pairs
from amp_lab import Comparison, Precision

FP32, BF16 = Precision.FP32, Precision.BF16
FLOPS = 10**9
# A device that does 100 GFLOP/s in fp32 and 400 in bf16: a step of 1 GFLOP takes 10 and 2.5 ms.
REPORT = SimpleNamespace(rates={FP32: 1e11, BF16: 4e11}, trusted=True, speedup=lambda _: 4.0)
LATER = ("05_cifar10_mobilenet",)  # which looks at the gain alone


def compared(fp32_ms: float, bf16_ms: float, reason: str = "") -> Comparison:
    """Twelve rounds that all took the same time."""
    return Comparison({FP32: (fp32_ms / 1e3,) * 12, BF16: (bf16_ms / 1e3,) * 12}, 0, reason)


def function_of(name: str):
    """The notebook's `is_possible`, for both precisions at once."""
    given = {"device": torch.device("cpu"), "amp": BF16, "both": (FP32, BF16)}
    notebook = definitions(build_pairs.FOLDER / f"{name}.py", **given)
    more = () if name in LATER else (FLOPS,)

    def call(times: Comparison, report: SimpleNamespace = REPORT) -> bool:
        notebook["report"] = report
        return all(notebook["is_possible"](times, p, *more) for p in (FP32, BF16))

    return call


@pytest.fixture(scope="module")
def is_possible():
    return function_of("04_fp32_vs_amp")


@pytest.mark.parametrize("name", LATER)
def test_a_gain_that_no_device_has_is_noticed(name):
    is_possible = function_of(name)
    assert is_possible(compared(20, 6))
    assert is_possible(compared(20, 40))  # slower is always possible
    assert not is_possible(compared(100, 10))  # 10x as fast, and arithmetic gains 4x
    assert is_possible(compared(100, 10, reason="the machine was busy"))  # nothing is claimed


@pytest.mark.parametrize(
    ("fp32_ms", "bf16_ms", "expected"),
    [
        (20, 6, True),
        (8, 3, True),  # a little better than the product of which the rates are
        (20, 40, True),  # slower is always possible
        (6, 3, False),  # 167 GFLOP/s in fp32
        (8, 1.5, False),  # 667 GFLOP/s in bf16
        (100, 10, False),  # 10x as fast, and arithmetic gains 4x
    ],
)
def test_what_no_device_can_do_is_noticed(is_possible, fp32_ms, bf16_ms, expected):
    assert is_possible(compared(fp32_ms, bf16_ms)) is expected


def test_an_emulated_precision_may_still_gain_what_its_bytes_do(is_possible):
    emulated = SimpleNamespace(rates={FP32: 1e11, BF16: 1e9}, trusted=True, speedup=lambda _: 0.01)
    assert is_possible(compared(30, 11), emulated)
    assert not is_possible(compared(40, 11), emulated)


def test_nothing_is_claimed_of_a_busy_machine(is_possible):
    busy = SimpleNamespace(**(vars(REPORT) | {"trusted": False}))
    assert is_possible(compared(1, 1, reason="the machine was busy"))
    assert is_possible(compared(1, 1), busy)


def test_eval_and_inference_mode_are_two_switches():
    norm, shifted = nn.BatchNorm1d(1), torch.tensor([[4.0], [6.0]])
    with torch.inference_mode():
        assert norm.eval()(shifted).mean() > 4.9  # by its running mean, 0: hardly changed
        assert norm.train()(shifted).mean().abs() < 1e-5  # by the batch's mean, 5
        assert norm.running_mean != 0  # and inference_mode did not keep it from being updated

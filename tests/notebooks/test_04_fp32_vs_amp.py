"""Notebooks 04 and 05: what no device can do is noticed, and what memory holds is counted."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from definitions import definitions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course import measuring

import build_pairs
from amp_lab import Comparison, Precision, forecast_memory
from amp_lab.bench import ConvModel

CPU = torch.device("cpu")
FP32, BF16 = Precision.FP32, Precision.BF16
FLOPS = 10**9
# A device that does 100 GFLOP/s in fp32 and 400 in bf16: a step of 1 GFLOP takes 10 and 2.5 ms.
REPORT = SimpleNamespace(rates={FP32: 1e11, BF16: 4e11}, trusted=True, speedup=lambda _: 4.0)


def compared(fp32_ms: float, bf16_ms: float, reason: str = "") -> Comparison:
    """Twelve rounds that all took the same time."""
    return Comparison({FP32: (fp32_ms / 1e3,) * 12, BF16: (bf16_ms / 1e3,) * 12}, 0, reason)


def is_possible(times: Comparison, report: SimpleNamespace = REPORT) -> bool:
    """The check of notebook 04, for both precisions at once."""
    return all(measuring.is_possible(times, p, FLOPS, report) for p in (FP32, BF16))


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
def test_what_no_device_can_do_is_noticed(fp32_ms, bf16_ms, expected):
    assert is_possible(compared(fp32_ms, bf16_ms)) is expected


def test_an_emulated_precision_may_still_gain_what_its_bytes_do():
    emulated = SimpleNamespace(rates={FP32: 1e11, BF16: 1e9}, trusted=True, speedup=lambda _: 0.01)
    assert is_possible(compared(30, 11), emulated)
    assert not is_possible(compared(40, 11), emulated)


def test_nothing_is_claimed_of_a_busy_machine():
    busy = SimpleNamespace(**(vars(REPORT) | {"trusted": False}))
    assert is_possible(compared(1, 1, reason="the machine was busy"))
    assert is_possible(compared(1, 1), busy)


class Squares(nn.Module):
    """Multiplies by a weight and squares twice: autograd saves the input and two results."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return (x * self.weight).square().square()


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    model, x = Squares(), torch.ones(10)
    assert measuring.saved_bytes(model, lambda m: m(x).sum()) == 3 * 40  # and not the weight
    assert measuring.saved_bytes(model, lambda m: (m(x) * m.weight).sum()) == 4 * 40


# What the article reports, in MB: its training, and its inference without `no_grad`.
TRAINING_MB, INFERENCE_MB = 2061, 3338


def mib_at_the_peak(task: str, passes: int = 2, graph: bool = True) -> float:
    """The peak of training steps or of inference in fp32, at the size of the article."""
    source = build_pairs.FOLDER / "06_caltech256_resnet50.py"
    watch = definitions(source, device=CPU)["LiveTensors"]
    with FakeTensorMode(), watch() as live, torch.set_grad_enabled(graph):
        model, picture = ConvModel(256), torch.empty(1, 2, 512, 512)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(passes):
            outputs = model(picture)  # the graph of the last `outputs` is still alive here
            if task == "training":
                optimizer.zero_grad()
                F.mse_loss(outputs, torch.empty(1, 1, 512, 512)).backward()
                optimizer.step()
    return live.peak_bytes / 2**20


def test_the_article_kept_two_graphs_alive_in_inference():
    training, two_graphs = mib_at_the_peak("training"), mib_at_the_peak("inference")
    assert abs(training - TRAINING_MB) < 20
    assert abs(two_graphs - INFERENCE_MB) < 20
    one_graph = mib_at_the_peak("inference", passes=1)
    without = mib_at_the_peak("inference", graph=False)
    assert without < 0.3 * training < one_graph < training < two_graphs


def test_on_mps_autograd_stores_more_with_bf16_than_with_fp32():
    def saved(device_type: str, precision: Precision) -> int:
        x = torch.empty(1, 2, 64, 64, device="meta")
        model = ConvModel(256)
        return forecast_memory(model, x, precision=precision, device_type=device_type).activations

    assert saved("cuda", BF16) < 0.6 * saved("cuda", FP32)
    assert saved("mps", BF16) > 1.1 * saved("mps", FP32)


def test_eval_and_inference_mode_are_two_switches():
    norm, shifted = nn.BatchNorm1d(1), torch.tensor([[4.0], [6.0]])
    with torch.inference_mode():
        assert norm.eval()(shifted).mean() > 4.9  # by its running mean, 0: hardly changed
        assert norm.train()(shifted).mean().abs() < 1e-5  # by the batch's mean, 5
        assert norm.running_mean != 0  # and inference_mode did not keep it from being updated

"""The rungs: which a workload has where, and that each computes what fp32 eager does."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_workloads import CLASSIFIER, GPT, INFERENCE, MATMUL, TRAINING
from torch import nn

from amp_lab.bench import rungs, runner
from amp_lab.bench.result_row import Row
from amp_lab.bench.rungs import RUNGS, Ladder, make_step, rungs_of, use_fp8
from amp_lab.bench.workloads import gpt_workload
from amp_lab.core.errors import OptionError
from amp_lab.core.precision import Precision

SLOW = ("compile", "max-autotune", "by-hand", "tiles")  # to compile; the last have their own tests
QUICK = (TRAINING, INFERENCE, GPT, MATMUL, pytest.param(CLASSIFIER, marks=pytest.mark.weekly))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def names_of(workload, precision, device) -> list[str]:
    return [rung.name for rung in rungs_of(Ladder(workload, precision, device))]


def test_rungs_are_those_of_device_and_workload():
    assert names_of(TRAINING, Precision.BF16, CPU) == [
        "eager", "channels-last", "fused-adam", "compile", "max-autotune", "by-hand", "tiles"
    ]  # fmt: skip
    assert names_of(GPT, Precision.FP16, CUDA) == [
        "eager", "fused-adam", "no-sync", "compile", "cuda-graphs", "max-autotune"
    ]  # fmt: skip
    assert names_of(INFERENCE, Precision.BF16, CPU) == [
        "eager", "channels-last", "fold-norm", "cast-once", "compile", "max-autotune"
    ]  # fmt: skip
    assert "cast-once" not in names_of(INFERENCE, Precision.FP32, CPU)
    assert "by-hand" not in names_of(TRAINING, Precision.FP16, CUDA)  # its gradients vanish
    assert names_of(MATMUL, Precision.FP16, CUDA) == ["eager"]


@pytest.mark.parametrize("workload", QUICK, ids=lambda w: w.name)
def test_every_rung_computes_what_fp32_eager_does(workload):
    baseline = None
    for precision in (Precision.FP32, Precision.BF16):
        ladder = Ladder(workload, precision, CPU)
        for rung in rungs_of(ladder):
            if rung.name in SLOW:
                continue
            step = make_step(ladder, rung)
            calls = runner.CHECKED_STEPS if workload.trains else 1
            check = torch.stack([step.call().double() for _ in range(calls)])
            row = Row("w", "s", str(precision), rung.name, "ok")
            made = runner._Configuration(row, ladder, step, check)
            baseline = baseline or made
            runner._judge(made, baseline)
            assert row.status == "ok", row.reason
            if workload.trains:
                assert check[-1] < check[0]


def test_a_quick_run_leaves_out_what_takes_long_to_compile():
    long = [
        (ladder.workload.name, str(ladder.precision), rung.name)
        for ladder in (
            Ladder(TRAINING, Precision.FP32, CPU),
            Ladder(TRAINING, Precision.BF16, CPU),
            Ladder(CLASSIFIER, Precision.BF16, CPU),
        )
        for rung in rungs_of(ladder)
        if rung.takes_long(ladder)
    ]
    assert long == [
        ("convmodel", "fp32", "compile"), ("convmodel", "fp32", "max-autotune"),
        ("convmodel", "fp32", "by-hand"), ("convmodel", "bf16", "max-autotune"),
        ("squeezenet1-1", "bf16", "compile"), ("squeezenet1-1", "bf16", "max-autotune"),
    ]  # fmt: skip


def test_fp8_is_a_rung_where_the_hardware_has_it(monkeypatch):
    large = gpt_workload(1, 16, width=2048, blocks=1, vocabulary=4096)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, there in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert ("fp8" in names_of(large, Precision.BF16, CUDA)) is there
    assert "fp8" not in names_of(large, Precision.FP16, CUDA)
    assert "fp8" not in names_of(GPT, Precision.BF16, CUDA)  # whose layers are small
    assert "fp8" not in names_of(large, Precision.BF16, CPU)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for arch, there in (("gfx90a", False), ("gfx942:sramecc+", True), ("gfx950", True)):
        found = SimpleNamespace(gcnArchName=arch)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, f=found: f)
        assert ("fp8" in names_of(large, Precision.BF16, CUDA)) is there
    for there in (True, False):
        monkeypatch.setattr(torch.xpu, "is_available", lambda t=there: t)
        assert ("fp8" in names_of(large, Precision.BF16, torch.device("xpu"))) is there


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of torchao's own source
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_linear_layers_in_fp8_learn_the_same(monkeypatch):
    pytest.importorskip("torchao.float8")
    monkeypatch.setattr(
        rungs, "gains_from_fp8", lambda outer, inner: inner % 16 == 0
    )  # at any size
    losses = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        call = gpt_workload(2, 16, width=32, blocks=1, vocabulary=64).build(CPU).call
        call.model.extra = nn.Linear(15, 16)
        if fp8:
            use_fp8(call.model, emulate=True)
            assert type(call.model.blocks[0].up) is not nn.Linear
            assert type(call.model.extra) is nn.Linear  # 15 is no multiple of 16
        optimizer = torch.optim.Adam(call.model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(runner.CHECKED_STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call.result()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    bf16, fp8 = map(torch.tensor, losses)
    assert 0 < (fp8 - bf16).norm() / bf16.norm() < runner.TOLERANCES[Precision.BF16][0]


def test_fp8_is_for_the_layers_that_torchao_converts():
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    converts = utils._auto_filter_for_recipe("rowwise", [])
    for outer, inner in itertools.product((16, 1024, 1032, 2048, 2064, 8192), repeat=2):
        with torch.device("meta"):
            layer = nn.Linear(inner, outer)
        assert rungs.gains_from_fp8(outer, inner) == converts(layer, "layer")


def test_without_torchao_fp8_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(OptionError, match="float8 needs torchao"):
        use_fp8(nn.Linear(16, 16))


def test_rungs_are_described():
    assert all(rung.description for rung in RUNGS)

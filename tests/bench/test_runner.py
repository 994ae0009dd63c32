"""A run at toy size: what is timed, what is refused, and how what goes wrong is reported."""

import copy
import re

import pytest
import torch
from cases import some_of
from tiny_workloads import MATMUL, TRAINING
from torch import nn

from amp_lab.bench import runner
from amp_lab.bench.limits import Ceilings
from amp_lab.bench.result_row import Row
from amp_lab.bench.results import Results
from amp_lab.bench.results_file import load_results
from amp_lab.bench.rungs import Ladder
from amp_lab.bench.workloads import Problem, Workload, convmodel_workload
from amp_lab.core import timing
from amp_lab.core.errors import OptionError
from amp_lab.core.precision import Precision
from amp_lab.model_call import ModelCall

CPU = torch.device("cpu")
CHEAP = ["channels-last", "fused-adam"]  # rungs that compile nothing


@pytest.fixture
def toy(monkeypatch):
    """`run_bench` on tiny workloads, without what compiles, and with limits that are not timed."""

    class Report:
        name, backend, trusted = "a toy", "CPU", True
        rates = dict.fromkeys(Precision, 100.0) | {Precision.TF32: None}
        accelerated = (Precision.BF16,)

    chosen = [TRAINING, MATMUL]
    flops_per_s = {"fp32": 1e15, "tf32": None, "fp16": 1e15, "bf16": 4e15}
    high = Ceilings(flops_per_s, {64: 1e18}, trusted=True)  # nothing here is as fast
    monkeypatch.setattr(runner, "workloads", lambda device, quick: chosen)
    monkeypatch.setattr(runner, "describe_device", lambda device: Report)
    monkeypatch.setattr(runner, "measure_ceilings", lambda device: high)
    monkeypatch.setattr(runner.gc, "collect", int)  # a second for each, with nothing to collect
    monkeypatch.setattr(runner, "_TURN_S", 0.0)
    monkeypatch.setattr(runner, "_QUICK_TURN_S", 0.0)

    def run(**settings):
        return runner.run_bench(CPU, **{"rounds": 2, "rungs": CHEAP} | settings)

    run.workloads = chosen
    return run


def test_run_times_each_configuration_against_fp32_eager(toy, undisturbed):
    results = toy()
    assert results.complete
    assert [row.key[2:] for row in results.rows] == [
        ("fp32", "eager"), ("fp32", "channels-last"), ("fp32", "fused-adam"),
        ("bf16", "eager"), ("bf16", "channels-last"), ("bf16", "fused-adam"),
        ("fp32", "eager"), ("bf16", "eager"),
    ]  # fmt: skip
    for row in results.rows:
        assert row.status == "ok"
        assert len(row.samples_s) == 2
        base = next(r for r in results.rows if r.key == (*row.key[:2], "fp32", "eager"))
        ratios = [a / b for a, b in zip(base.samples_s, row.samples_s, strict=True)]
        assert row.speedup == pytest.approx(sum(ratios) / 2)  # their median: of two, the mean
        low, high = row.speedup_interval
        assert low <= min(ratios) <= max(ratios) <= high
        assert (row.rounds, row.trusted) == (2, False)
        assert "12 are needed" in row.reason
        assert row.flops == base.flops
        assert row.share_of_limit == row.floor_s / row.median_s
        assert row.items_per_s == 1 / row.median_s
    training, matmul = results.rows[0], results.rows[-2]
    assert training.floor_s == training.flops / 1e15  # the work takes longer than the bytes
    assert results.rows[3].floor_s == training.flops / 4e15
    assert matmul.flops == 2 * 16**3
    assert "1.00x" in str(results)


def test_a_run_keeps_freed_memory(toy, undisturbed, monkeypatch):
    calls = []
    monkeypatch.setattr(runner, "keep_memory", lambda: calls.append("kept") or True)
    toy()
    assert calls == ["kept"]


def test_settings_choose(toy):
    rows = toy(names=["matmul"], precisions=["fp16"], rungs=["eager"]).rows
    assert [(row.workload, row.precision) for row in rows] == [
        ("matmul", "fp32"), ("matmul", "fp16")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"names": ["resnet"]}, r"workload 'resnet' is unknown; .*convmodel, "),
        ({"precisions": ["fp8"]}, r"precision 'fp8' is unknown; .*fp32, "),
        ({"precisions": ["tf32"]}, r"precision 'tf32': a toy does not support"),
        ({"rounds": 0}, r"rounds=0: must be at least 1"),
        ({"names": ["gpt"]}, "'gpt' is not available on"),
        ({"names": ["gpt"], "quick": True}, "'gpt' .*quick run"),
        ({"rungs": ["cuda-graphs"]}, "rung 'cuda-graphs' exists for none"),
    ],
)
def test_wrong_settings_are_refused(toy, settings, message):
    with pytest.raises(OptionError, match=message):
        toy(**settings)


def test_wrong_rung_is_refused():
    with pytest.raises(OptionError, match=r"rung 'fast' is unknown; .*eager, "):
        runner.run_bench(CPU, rungs=["fast"])


def spoil(monkeypatch, change):
    """Change the step of the rung ``fused-adam`` in bf16."""
    make = runner.make_step

    def spoiled(ladder, rung):
        step = make(ladder, rung)
        if (ladder.precision, rung.name) == (Precision.BF16, "fused-adam"):
            change(step)
        return step

    monkeypatch.setattr(runner, "make_step", spoiled)


def no_training(step):
    call, start = step.call, copy.deepcopy(step.model.state_dict())

    def stands_still():
        step.model.load_state_dict(start)
        return call()

    step.call = stands_still


def other_mode(step):
    step.model.eval()


def not_a_number(step):
    with torch.no_grad():
        next(step.model.parameters()).fill_(torch.nan)


@pytest.mark.parametrize("change", some_of(no_training, other_mode, not_a_number))
def test_a_rung_that_computes_something_else_has_failed(toy, monkeypatch, change):
    toy.workloads[0] = convmodel_workload(32, hidden=64)  # enough that five steps learn something
    spoil(monkeypatch, change)
    rows = toy(names=["convmodel"]).rows
    assert [row.status for row in rows] == ["ok"] * 5 + ["failed"]
    assert "the check allows" in rows[-1].reason
    assert rows[-1].samples_s == []
    about = {"device": "d", "torch": "t", "threads": 1, "date": "x"}
    assert "the check allows" in str(Results({}, {64: 1.0}, True, about, rows))


def test_a_rung_that_raises_has_failed_and_the_run_goes_on(toy, monkeypatch):
    def raises(step):
        def call():
            raise RuntimeError("no kernel for that\nand a long story")

        step.call = call

    spoil(monkeypatch, raises)
    rows = toy().rows
    assert (rows[5].status, rows[5].reason) == ("failed", "no kernel for that")
    assert rows[-1].status == "ok"


def test_a_precision_that_the_hardware_lacks_is_told_and_left_alone(toy, monkeypatch):
    def refuse(seconds, baseline_s):  # bf16 eager is the first that has one to be held against
        if baseline_s is not None:
            raise OptionError("a step takes 7 s, 70 times as long as in fp32")

    monkeypatch.setattr(runner, "_refuse_hopeless", refuse)
    rows = toy(names=["convmodel"]).rows
    assert [(row.precision, row.status) for row in rows] == [("fp32", "ok")] * 3 + [
        ("bf16", "not run")
    ]
    assert "7 s, 70 times" in rows[-1].reason


@pytest.mark.parametrize(
    ("check", "precision", "reason"),
    [
        ([4.0, 3.0], "bf16", ""),
        ([4.2, 3.2], "bf16", ""),
        ([4.0, 3.3], "bf16", ""),
        ([4.0, 3.4], "bf16", "fall of its loss is 60%"),
        ([4.0, 2.6], "bf16", "fall of its loss is 140%"),
        ([4.3, 3.3], "bf16", "error from fp32 is 7.5e-02, where the check allows 6e-02"),
        ([4.0, 3.1], "fp32", "fall of its loss is 90%"),
        ([4.01, 3.01], "fp32", "error from fp32 is 2.5e-03"),
        ([4.0, 4.0], "fp16", "fall of its loss is 0%"),
        ([4.0, float("inf")], "fp16", "fall of its loss is not a number"),
        ([float("nan"), 3.0], "bf16", "error from fp32 is not a number, where"),
    ],
)
def test_judgement(check, precision, reason):
    row, ladder = Row("w", "s", precision, "r", "ok"), Ladder(TRAINING, Precision(precision), CPU)
    baseline = runner._Configuration(None, None, None, torch.tensor([4.0, 3.0]))
    runner._judge(runner._Configuration(row, ladder, None, torch.tensor(check)), baseline)
    assert row.status == ("failed" if reason else "ok")
    assert reason in row.reason


def test_a_matmul_raises_the_limit_and_what_is_much_faster_is_not_trusted(
    toy, monkeypatch, undisturbed
):
    """By a tenth at most, and other workloads raise nothing: a wrong count stays in sight."""
    monkeypatch.setattr(runner, "_time", lambda configuration, turn_s: 1e-3)
    flops = 2 * 16**3 / 1e-3  # of the matmul
    flops_per_s = {"fp32": 0.95 * flops, "tf32": None, "fp16": 1.0, "bf16": 0.5 * flops}
    low = Ceilings(flops_per_s, {64: 1e9}, trusted=True)
    monkeypatch.setattr(runner, "measure_ceilings", lambda device: low)
    results = toy(precisions=["bf16"], rounds=None)
    fp32, bf16 = results.rows[-2:]
    assert (fp32.trusted, bf16.trusted) == (True, False)
    assert "GFLOP/s" in bf16.reason or "MFLOP/s" in bf16.reason
    assert results.flops_per_s["fp32"] == pytest.approx(flops)
    assert results.flops_per_s["bf16"] == 0.5 * flops
    assert fp32.share_of_limit == pytest.approx(1)
    assert bf16.share_of_limit == pytest.approx(2)
    training = results.rows[0]
    assert training.flops > 1.1 * 2 * 16**3
    assert training.share_of_limit > 1.1
    assert not any(row.trusted for row in results.rows if row.workload == "convmodel")


@pytest.fixture
def undisturbed(monkeypatch):
    """No round is disturbed, whatever else this machine does."""
    monkeypatch.setattr(timing._Watch, "was_disturbed", lambda self: False)


@pytest.mark.parametrize(("quick", "most"), [(False, 24), (True, 18)])
def test_rounds_end_when_enough_were_undisturbed(toy, monkeypatch, undisturbed, quick, most):
    one = {"names": ["matmul"], "rungs": ["eager"], "rounds": None, "quick": quick}
    rows = toy(**one).rows
    assert {(row.rounds, row.disturbed, row.trusted) for row in rows} == {(12, 0, True)}
    assert "in 0 of 12 rounds" in str(toy(**one))
    monkeypatch.setattr(timing._Watch, "was_disturbed", lambda self: True)
    rows = toy(**one).rows
    assert {(row.rounds, row.disturbed, row.trusted) for row in rows} == {(most, most, False)}
    assert {row.reason for row in rows} == {f"the machine was busy in {most} of {most} rounds"}


def test_a_quick_run_ends_in_time_and_says_what_that_costs(toy, monkeypatch, undisturbed):
    monkeypatch.setattr(runner, "_QUICK_S", 0.0)
    rows = toy(quick=True, rounds=None).rows
    assert {(row.rounds, row.trusted) for row in rows} == {(1, False)}
    assert all(re.match("undisturbed rounds: 1 of 1, and 12 ", row.reason) for row in rows)
    assert {row.rounds for row in toy(rounds=None).rows} == {12}


def test_hopeless_is_twenty_times_as_long():
    for seconds in (0.5, 1.9):
        runner._refuse_hopeless(seconds, 0.1)
    with pytest.raises(OptionError, match=r"2\.1 s, 21 times"):
        runner._refuse_hopeless(2.1, 0.1)
    runner._refuse_hopeless(0.5, 0.01)  # a second is not long


@pytest.mark.parametrize("by", ["allocator", "accelerator"])
def test_out_of_memory_is_reported_and_the_run_goes_on(toy, by):
    def build(device):
        if by == "accelerator":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return Problem(ModelCall(nn.Linear(1, 1), (torch.empty(2**60),), loss_fn=torch.sum), 1e-3)

    layers = {"convolution"}
    toy.workloads[0] = Workload("convmodel", "huge", "training", "images", 1, build, layers)
    rows = toy().rows
    assert {row.status for row in rows if row.size == "huge"} == {"out of memory"}
    assert all(row.status == "ok" for row in rows if row.workload == "matmul")


def test_without_fp32_eager_nothing_is_judged(toy, monkeypatch):
    make = runner.make_step

    def no_room(ladder, rung):
        if (ladder.precision, rung.name) == (Precision.FP32, "eager"):
            raise torch.OutOfMemoryError("out of memory")
        return make(ladder, rung)

    monkeypatch.setattr(runner, "make_step", no_room)
    rows = toy(names=["convmodel"]).rows
    assert rows[0].status == "out of memory"
    assert {row.status for row in rows[1:]} == {"failed"}
    assert all("no fp32 eager" in row.reason for row in rows[1:])


def test_out_of_memory_while_timing_is_reported_too(toy, monkeypatch):
    time = runner._time

    def full(configuration, turn_s):
        if configuration.row.rung == "channels-last":
            raise torch.OutOfMemoryError("out of memory")
        return time(configuration, turn_s)

    monkeypatch.setattr(runner, "_time", full)
    rows = toy().rows
    assert {row.status for row in rows if row.rung == "channels-last"} == {"out of memory"}
    assert all(len(row.samples_s) == 2 for row in rows if row.rung != "channels-last")


def test_an_interrupted_run_keeps_its_rows(toy, tmp_path):
    saved = []

    def after_round(results):
        results.save(tmp_path / "r.json")
        saved.append(len(results.rows))
        if len(saved) == 3:  # in the second workload
            raise KeyboardInterrupt

    results = toy(after_round=after_round)
    assert not results.complete
    assert [row.workload for row in results.rows] == ["convmodel"] * 6 + ["matmul"] * 2
    assert all(row.samples_s for row in results.rows)
    assert len(load_results(tmp_path / "r.json").rows) == 8
    assert "stopped before its end" in str(results)

"""The measuring tools: what they share, and one task of the X-ray's."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_lab.core.environment import environment_of
from amp_lab.core.timing_result import Comparison
from measure import numerics, recording, scale, training, xray


@pytest.fixture
def out(tmp_path, monkeypatch):
    report = SimpleNamespace(name="a CPU", backend="CPU, AVX2, 1 threads")
    monkeypatch.setattr(recording, "describe_device", lambda device: report)
    return tmp_path / "result.json"


def options(out, *arguments):
    return recording.parser("what it does", ("one", "two")).parse_args(
        ["--out", str(out), *arguments]
    )


def test_parts_are_printed_and_written_with_where_and_when(out, capsys):
    measures = {"one": lambda: {"ms": torch.rand(1).item()}, "two": lambda: iter([{"a": 1}, 2])}
    recording.record(measures, options(out), torch.device("cpu"), clock="a clock")
    result = json.loads(out.read_text())
    where = list(environment_of(recording.describe_device(torch.device("cpu"))))
    assert list(result) == [*where, "memory kept", "clock", "one", "two"]
    assert (result["device"], result["torch"]) == ("a CPU", torch.__version__)
    assert result["two"] == [{"a": 1}, 2]
    assert str(result["one"]["ms"]) in capsys.readouterr().out
    alone = out.with_name("alone.json")
    recording.record(measures, options(alone, "--part", "one"), torch.device("cpu"))
    again = json.loads(alone.read_text())
    assert "two" not in again
    assert again["one"] == result["one"]  # random numbers begin anew


def test_a_run_that_is_cut_short_leaves_the_rows_that_it_had(out):
    def rows():
        yield {"batch": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recording.record({"one": rows}, options(out), torch.device("cpu"))
    assert json.loads(out.read_text())["one"] == [{"batch": 1}]


def test_a_comparison_is_recorded_with_its_samples_ratios_and_trust():
    compared = Comparison({"fp32": (4.0, 2.0, 4.0), "bf16": (1.0, 1.0, 2.0)}, 9, "it was busy")
    faster, longer = recording.times_as_fast(compared), recording.times_as_long(compared, "fp32")
    expected = {"median": 2.0, "interval": pytest.approx([1.96, 4.0])}
    assert faster["times as fast as fp32"] == {"bf16": expected}
    assert longer["times as long as fp32"]["bf16"]["median"] == 0.5
    assert faster["samples_s"]["bf16"] == [1.0, 1.0, 2.0]
    assert (faster["trusted"], faster["reason"], faster["disturbed"]) == (False, "it was busy", 9)
    json.dumps([faster, longer])


def test_scale_is_measured_in_watched_rounds(monkeypatch):
    monkeypatch.setattr(scale, "WAYS", {"two": (100.0, []), "1 process": (50.0, [])})
    monkeypatch.setattr(scale, "images_per_s", lambda rate, *others: rate)
    two, one = list(scale.measure_speed(torch.device("cpu"), 2, ["fp32"]))[:2]
    assert two["images_per_s"]["median"] == pytest.approx(100)
    assert two["times_1_process"]["median"] == pytest.approx(2)
    assert (one["times_1_process"]["median"], one["trusted"]) == (1.0, False)


CPU, BUDGET_S = torch.device("cpu"), 0.1


def tiny_model(*arguments) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


def test_what_counting_costs_is_told_of_a_step_round_by_round():
    samples_s = {"backward": (1.0,), "gradient_underflow": (1.2,), "step": (2.0,)}
    rounds = {name: 3 * one + tuple(2 * x for x in one) for name, one in samples_s.items()}
    found = numerics.of_backward_and_of_step(Comparison(rounds, 0, ""))
    assert found["times as long as backward"]["gradient_underflow"]["median"] == pytest.approx(1.2)
    counted = found["times as long as step"]["step with counting"]
    assert counted["median"] == pytest.approx(1.1)
    assert counted["interval"] == pytest.approx([1.1 * 0.98, 1.1 * 1.02])


@pytest.mark.slow
@pytest.mark.weekly
def test_the_numerics_tool_measures_its_parts(monkeypatch):
    model, images = tiny_model(), torch.rand(4, 3, 8, 8)
    tiny = [("tiny", model, lambda one: one(images).square().mean())]
    monkeypatch.setattr(numerics, "problems", lambda device: tiny)
    found = numerics.measure_underflow(CPU, BUDGET_S)["tiny"]
    assert found["values"] == (30 + 10) + 4 * 10  # of the parameters, and of the output
    assert list(found["times as long as backward"]) == ["gradient_underflow", "step"]
    assert list(found["times as long as step"]) == ["step with counting"]
    watched = numerics.measure_nonfinite(CPU, BUDGET_S)["tiny"]
    kinds = ["find_nonfinite", "off again", "empty mode", "looks alone"]
    assert list(watched["times as long as plain"]) == kinds
    # At least its parameters and their gradients, the outputs and theirs.
    assert watched["values"] > 2 * 40 + 2 * 40
    scale = numerics.measure_scale(CPU, BUDGET_S)
    low, high = scale["added µs per step"]["interval"]
    assert low <= scale["added µs per step"]["median"] <= high


@pytest.mark.slow
@pytest.mark.weekly
def test_the_training_tool_measures_its_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "build_model", tiny_model)
    monkeypatch.chdir(tmp_path)  # it saves on the disk of the working folder
    loop = training.measure_loop(CPU, BUDGET_S)
    assert list(loop["times as long as bare loop"]) == ["data", "fit", "fit and data"]
    low, high = loop["share of loading"]["interval"]
    assert 0 < low <= high
    trained = {"tiny": (10, lambda: torch.rand(4, 3, 8, 8))}
    monkeypatch.setattr(training, "TRAINED", trained)
    added = training.measure_added(CPU, BUDGET_S, steps=2)["tiny fp32"]
    assert list(added["median_s"]) == ["bare loop", "fit", "step of the model"]
    found = training.measure_checkpoint(CPU, BUDGET_S)
    assert found["bytes"] > 4 * 40
    assert found["median_s"]["save"] > 0


def test_what_a_loop_adds_is_told_of_a_step_and_of_its_share():
    samples_s = {"bare loop": (1.0,) * 12, "fit": (1.5,) * 12, "step of the model": (2.0,) * 12}
    found = training.added_to(Comparison(samples_s, 0, ""), steps=50)
    assert found["added µs per step"]["median"] == pytest.approx(1e4)
    assert found["share of a step"]["median"] == pytest.approx(0.005)
    assert found["share of a step"]["interval"] == pytest.approx([0.005 * 0.98, 0.005 * 1.02])


@pytest.mark.weekly
def test_the_xray_tool_measures_a_task_in_time_and_memory(capsys):
    xray.run_alone("xray", "mps")
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["built", "first", "again", "peak"]
    assert all(value > 0 for value in figures.values())
    assert 10**7 < figures["peak"] < 10**12
    assert set(xray.TASKS) == set(xray.LIMITS) == set(xray.PARTS)


def test_the_transformer_has_the_parameters_that_the_tool_promises():
    count = sum(p.numel() for p in xray.transformer().parameters())
    assert round(count / 1e9, 1) == 6.6

"""The measuring tools: what they share, and one task of the X-ray's."""

import json
from types import SimpleNamespace

import pytest
import torch

import measure_xray
import recording


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "describe_device", lambda device: SimpleNamespace(name="a CPU"))
    return tmp_path / "result.json"


def options(out, *arguments):
    return recording.parser("what it does", ("one", "two")).parse_args(
        ["--out", str(out), *arguments]
    )


def test_parts_are_printed_and_written_with_where_and_when(out, capsys):
    measures = {"one": lambda: {"ms": torch.rand(1).item()}, "two": lambda: iter([{"a": 1}, 2])}
    recording.record(measures, options(out), torch.device("cpu"), clock="a clock")
    result = json.loads(out.read_text())
    assert list(result) == ["device", "torch", "python", "threads", "date", "clock", "one", "two"]
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


def test_the_xray_tool_measures_a_task_in_time_and_memory(capsys):
    measure_xray.run_alone("xray", "mps")
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["built", "first", "again", "peak"]
    assert all(value > 0 for value in figures.values())
    assert 10**7 < figures["peak"] < 10**12
    assert set(measure_xray.TASKS) == set(measure_xray.LIMITS) == set(measure_xray.PARTS)


def test_the_transformer_has_the_parameters_that_the_tool_promises():
    count = sum(p.numel() for p in measure_xray.transformer().parameters())
    assert round(count / 1e9, 1) == 6.7

"""The gallery of devices, and the command that adds one."""

import json

import pytest

import record


def test_the_readmes_table_is_that_of_the_files():
    readme = (record.RESULTS / "README.md").read_text()
    assert record.written(readme) == readme, "run: pdm run record --write"
    assert readme.count(record.BEGIN) == readme.count(record.END) == 1


def bench_row(**changed):
    usual = {"status": "ok", "workload": "convmodel", "trusted": True, "speedup": 2.0}
    return usual | {"precision": "bf16", "rung": "compiled"} | changed


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    about = {"device": "A card", "backend": "CUDA 13", "threads": 8, "torch": "2.15", "date": "d"}
    bench = {
        "environment": about,
        "flops_per_s": {"fp32": 2e12, "tf32": 1e13, "fp16": 3e13, "bf16": None},
        "rows": [
            bench_row(),
            bench_row(speedup=9.0, trusted=False),
            bench_row(speedup=7.0, status="failed"),
            bench_row(speedup=8.0, workload="product"),
        ],
    }
    (tmp_path / "bench-quick-card.json").write_text(json.dumps(bench))
    return tmp_path


def test_a_row_has_what_can_be_trusted(results):
    row = record.row(results / "bench-quick-card.json")
    assert row == ["A card", "2.15", "d", "5x", "15x", "–", "2x (bf16, compiled)", "–"]
    latency = {
        "model": "resnet18",
        "trusted": True,
        "fastest of the others of torch": "bf16 cast once",
        "times as fast as fp32": {"bf16 cast once": {"median": 1.5}},
    }
    (results / "latency-card.json").write_text(json.dumps({"latency": [latency]}))
    assert record.row(results / "bench-quick-card.json")[-1] == "1.5x (bf16 cast once)"
    latency["trusted"] = False
    (results / "latency-card.json").write_text(json.dumps({"latency": [latency]}))
    assert record.row(results / "bench-quick-card.json")[-1] == "–"


def test_a_part_that_fails_is_said_and_the_others_run(results, monkeypatch, capsys):
    monkeypatch.setattr(record, "ROOT", results)
    works = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{}')"
    parts = {"broken": ["-c", "raise SystemExit(3)"], "xray": ["-c", works]}
    monkeypatch.setattr(record, "PARTS", parts)
    assert record.main(["--name", "card"]) == 1
    said = capsys.readouterr().out
    assert "broken: failed with 3" in said
    assert "xray: wrote xray-card.json" in said
    assert (results / "xray-card.json").exists()
    assert "| A card | 2.15 |" in said
    assert record.main(["--name", "card", "--part", "xray"]) == 0

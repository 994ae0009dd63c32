"""The gallery of devices, and the command that adds one."""

import json

import pytest

import record


def test_the_readmes_table_is_that_of_the_files():
    readme = (record.RESULTS / "README.md").read_text()
    assert record.with_tables(readme) == readme, "run: pdm run record --write"
    for name in ("gallery", "costs"):
        assert readme.count(record.BEGIN.format(name)) == readme.count(record.END.format(name)) == 1


def bench_row(**changed):
    usual = {"status": "ok", "workload": "convmodel", "trusted": True, "speedup": 2.0}
    return usual | {"precision": "bf16", "rung": "compiled"} | changed


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    about = {"device": "A GPU", "backend": "CUDA 13", "threads": 8, "torch": "2.15", "date": "d"}
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
    (tmp_path / "bench-quick-gpu.json").write_text(json.dumps(bench))
    return tmp_path


def test_a_row_has_what_can_be_trusted(results):
    row = record.row(results / "bench-quick-gpu.json")
    assert row == ["A GPU", "2.15", "d", "5x", "15x", "–", "2x (bf16, compiled)", "–"]
    latency = {
        "model": "resnet18",
        "trusted": True,
        "fastest of the others of torch": "bf16 cast once",
        "times as fast as fp32": {"bf16 cast once": {"median": 1.5}},
    }
    (results / "latency-gpu.json").write_text(json.dumps({"latency": [latency]}))
    assert record.row(results / "bench-quick-gpu.json")[-1] == "1.5x (bf16 cast once)"
    latency["trusted"] = False
    (results / "latency-gpu.json").write_text(json.dumps({"latency": [latency]}))
    assert record.row(results / "bench-quick-gpu.json")[-1] == "–"


def test_a_figure_is_found_in_its_file_with_its_interval_and_trust(results):
    share = {"median": 0.0123, "interval": [0.012, 0.013]}
    estimate = {"median": 1.2345, "interval": [1.2, 1.3]}
    steps = {"trusted": False, "times": {"with": estimate}, "looks alone": share}
    rows = [{"way": "one", "ratio": 1.0, "interval": [1.0, 1.0], "trusted": True}]
    rows += [{"way": "failed", "ratio": None, "interval": None, "trusted": False}]
    rows += [{"way": "two", "ratio": 0.5, "interval": [0.49, 0.51], "trusted": True}]
    (results / "peers-gpu.json").write_text(json.dumps({"rows": rows, "step": steps}))
    assert record.figure("gpu", "peers/rows/way=two") == "0.50 (0.49 to 0.51)"
    assert record.figure("gpu", "peers/step/times/with") == "1.23 (1.20 to 1.30), not trusted"
    assert record.figure("gpu", "peers/step/looks alone") == "1.2 % (1.2 to 1.3), not trusted"
    for missing in ("rows/way=three", "rows/way=failed", "step/times/without"):
        assert record.figure("gpu", f"peers/{missing}") == "–"
    assert record.figure("gpu", "scale/rows") == "–"


def test_every_figure_of_what_our_code_costs_is_recorded_somewhere():
    devices = [path.stem.partition("-")[2] for path in record.RESULTS.glob("numerics-*.json")]
    for place in [place for places in record.COSTS.values() for place in places.values()]:
        assert {record.figure(device, place) for device in devices} - {"–"}, place


def test_a_part_that_fails_is_said_and_the_others_run(results, monkeypatch, capsys):
    monkeypatch.setattr(record, "ROOT", results)
    works = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{}')"
    parts = {"broken": ["-c", "raise SystemExit(3)"], "xray": ["-c", works]}
    monkeypatch.setattr(record, "PARTS", parts)
    assert record.main(["--name", "gpu"]) == 1
    said = capsys.readouterr().out
    assert "broken: failed with 3" in said
    assert "xray: wrote xray-gpu.json" in said
    assert (results / "xray-gpu.json").exists()
    assert "| A GPU | 2.15 |" in said
    assert record.main(["--name", "gpu", "--part", "xray"]) == 0

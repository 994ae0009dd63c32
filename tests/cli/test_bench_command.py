"""`amp-lab bench` as a user types it, at toy size."""

import json
import re
import sys
from pathlib import Path

import pytest

from amp_lab import bench, plots
from amp_lab.bench import limits, load_results, runner
from amp_lab.bench.results import Results
from amp_lab.bench.workloads import convmodel_workload, matmul_workload
from amp_lab.cli import main

ROOT = Path(__file__).parents[2]
draw = plots.save


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    """Tiny workloads, and pictures only where a test asks for them: each takes seconds."""
    tiny = [convmodel_workload(8, hidden=8), matmul_workload(16, 16, 16)]
    monkeypatch.setattr(runner, "workloads", lambda device, quick: tiny)
    monkeypatch.setattr(plots, "save", lambda path, *drawing: path.touch())
    monkeypatch.setattr(runner.gc, "collect", int)
    monkeypatch.setattr(runner, "_TURN_S", 0.0)
    monkeypatch.setattr(runner, "_QUICK_TURN_S", 0.0)
    monkeypatch.setattr(limits, "_LARGEST_ON_CPU", limits._Sizes(64, 2**18))
    high = limits.Ceilings(
        {"fp32": 1e15, "tf32": None, "fp16": 1e15, "bf16": 1e15}, {64: 1e18}, True
    )
    monkeypatch.setattr(runner, "measure_ceilings", lambda device: high)
    monkeypatch.chdir(tmp_path)


ARGUMENTS = ["bench", "--quick", "--rounds", "1", "--device", "cpu"]
ARGUMENTS += ["--rung", "eager", "--rung", "fused-adam"]


def refused(capsys, *arguments):
    """The one line on stderr of a command that is refused."""
    assert main([*ARGUMENTS, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *progress, line = err.splitlines()
    assert len(progress) <= 1  # that the limits are being measured
    assert line.startswith("amp-lab bench: ")
    return line


def test_it_prints_a_table_and_writes_json_and_a_picture(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "save", draw)
    monkeypatch.setattr(runner, "measure_ceilings", limits.measure_ceilings)  # as a user's run does
    # By name: without one, only precisions that this CPU accelerates are measured.
    assert main([*ARGUMENTS, "--precision", "bf16", "--out", "mine.json"]) == 0
    out, err = capsys.readouterr()
    assert "convmodel 1x2x8x8" in out
    assert "bf16 fused-adam" in out
    assert "Measured limits of the device: fp32 " in out
    assert "Written: mine.json, mine.png, mine-roofline.png" in err
    results = load_results("mine.json")
    assert results.complete
    assert results.environment["quick"] is True
    assert results.flops_per_s["bf16"] > 0
    assert list(results.stream_bytes_per_s) == [2**16, 2**17, 2**18]
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "mine-roofline.png",
        "mine.json",
        "mine.png",
    ]


@pytest.mark.parametrize(("form", "start"), [("markdown", "**"), ("json", "{")])
def test_other_formats(capsys, form, start):
    matmul = ["bench", "--device", "cpu", "--rounds", "1", "--workload", "matmul"]
    assert main([*matmul, "--format", form]) == 0
    out = capsys.readouterr().out
    assert out.startswith(start)
    if form == "json":
        assert json.loads(out)["rows"][0]["workload"] == "matmul"


def test_lists_what_there_is(capsys):
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert "mobilenet-v2" in out
    assert "by-hand" in out


def test_unknown_names_are_refused(capsys):
    assert "workload 'x' is unknown" in refused(capsys, "--workload", "x")
    assert "precision 'fp12' is unknown" in refused(capsys, "--precision", "fp12")
    assert "rung 'y' is unknown" in refused(capsys, "--rung", "y")
    assert "rounds=0" in refused(capsys, "--rounds", "0")


def test_a_file_of_something_else_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "mine.json").write_text('{"notes": 1}')
    assert "mine.json: the file has no results" in refused(capsys, "--out", "mine.json")
    assert (tmp_path / "mine.json").read_text() == '{"notes": 1}'


@pytest.mark.parametrize("name", ["mine.png", "mine-roofline.png", "mine-compared.png"])
def test_a_picture_of_something_else_is_not_overwritten(capsys, tmp_path, name):
    assert main([*ARGUMENTS, "--out", "old.json"]) == 0
    capsys.readouterr()
    (tmp_path / name).write_bytes(b"a photograph of amp-lab")
    said = refused(capsys, "--out", "mine.json", "--compare", "old.json")
    assert re.search(f"{name}: .*did not write", said)
    assert (tmp_path / name).read_bytes() == b"a photograph of amp-lab"


def test_a_place_that_is_not_there_is_told_before_anything_is_timed(capsys):
    line = refused(capsys, "--out", "none/mine.json")
    assert "none/mine.json: cannot" in line
    assert re.search(r"'mine\.png': .* \.json", refused(capsys, "--out", "mine.png"))


def test_comparison_is_checked_first(capsys, tmp_path):
    (tmp_path / "old.json").write_text("{")
    assert "old.json: damaged" in refused(capsys, "--compare", "old.json")
    assert "none.json: cannot be read" in refused(capsys, "--compare", "none.json")
    assert main(["bench", "--results", "none.json"]) == 2
    assert "none.json: cannot be read" in capsys.readouterr().err


def test_the_page_shows_rows_of_a_recorded_run(capsys):
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    recorded = ROOT / "data" / "results" / "bench-quick-epyc-2-cores.json"
    assert main(["bench", "--results", str(recorded)]) == 0
    printed = capsys.readouterr().out.splitlines()
    (block,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    shown = block.splitlines()
    assert len(shown) == 7
    for line in shown:
        assert any(row.startswith(line) for row in printed), line


def test_results_beside_recorded_ones(capsys, monkeypatch, tmp_path):
    assert main([*ARGUMENTS, "--out", "old.json"]) == 0
    monkeypatch.setattr(plots, "save", draw)
    assert main([*ARGUMENTS, "--out", "new.json", "--compare", "old.json"]) == 0
    out, err = capsys.readouterr()
    assert "new" in out
    assert "old: " in out
    assert (tmp_path / "new-compared.png").read_bytes().startswith(b"\x89PNG")
    assert "Written: new-compared.png" in err


def test_recorded_results_without_measuring(capsys, monkeypatch, tmp_path):
    assert main([*ARGUMENTS, "--out", "old.json"]) == 0
    monkeypatch.setattr(bench, "run_bench", None)
    capsys.readouterr()
    assert main(["bench", "--results", "old.json", "--quick"]) == 2
    assert re.search("--quick .*--results", capsys.readouterr().err)
    assert main(["bench", "--results", "old.json"]) == 0
    assert "convmodel 1x2x8x8" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old-roofline.png", "old.json", "old.png"]


def test_files_of_one_name_are_told_apart(capsys, tmp_path):
    (tmp_path / "other").mkdir()
    for folder in (".", "other"):
        assert main([*ARGUMENTS, "--out", f"{folder}/bench.json"]) == 0
    capsys.readouterr()
    assert main(["bench", "--results", "bench.json", "--compare", "other/bench.json"]) == 0
    out = capsys.readouterr().out
    assert "\nbench.json: " in out
    assert "\nother/bench.json: " in out


def test_ctrl_c_before_anything_is_timed_leaves_the_file(capsys, monkeypatch):
    assert main([*ARGUMENTS, "--out", "mine.json"]) == 0
    before = load_results("mine.json")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make_step", interrupted)
    assert main([*ARGUMENTS, "--out", "mine.json"]) == 130
    assert load_results("mine.json") == before


def test_nothing_in_common_is_told(capsys, monkeypatch):
    assert main([*ARGUMENTS, "--out", "old.json"]) == 0
    other = [convmodel_workload(9, hidden=8)]
    monkeypatch.setattr(runner, "workloads", lambda device, quick: other)
    assert main([*ARGUMENTS, "--out", "new.json", "--compare", "old.json"]) == 2
    assert re.search("new, old cannot be compared", capsys.readouterr().err)
    assert load_results("new.json").complete  # what was measured is kept


def test_ctrl_c_keeps_what_was_measured(capsys, monkeypatch):
    save, turns = Results.save, []

    def interrupted(self, path):
        save(self, path)
        turns.append(1)
        if len(turns) == 1:  # after the first workload
            raise KeyboardInterrupt

    monkeypatch.setattr(Results, "save", interrupted)
    assert main([*ARGUMENTS, "--out", "mine.json"]) == 130
    assert "stopped before" in capsys.readouterr().out
    results = load_results("mine.json")
    assert not results.complete
    assert {row.workload for row in results.rows} == {"convmodel"}


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that takes no files, even of root")
@pytest.mark.parametrize("out", ["/proc/mine.json", "/proc/self/mine.json"])
def test_a_folder_that_takes_no_files_is_told_before_anything_is_measured(capsys, monkeypatch, out):
    monkeypatch.setattr(bench, "run_bench", lambda *given, **options: pytest.fail("measured"))
    assert main(["bench", "--out", out]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{out}: cannot be written" in line

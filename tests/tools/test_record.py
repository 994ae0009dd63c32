"""The gallery of devices, and the command that adds one."""

import copy
import json
import shutil

import pytest

import device_run
import gallery
import record
from amp_lab.core.errors import OptionError
from device_run import Part
from result_checks import check_result


def test_the_readmes_table_is_that_of_the_files():
    readme = (gallery.RESULTS / "README.md").read_text()
    assert gallery.with_tables(readme) == readme, "run: pdm run record --write"
    for name in ("gallery", "costs"):
        assert (
            readme.count(gallery.BEGIN.format(name)) == readme.count(gallery.END.format(name)) == 1
        )


def bench_row(**changed):
    usual = {"status": "ok", "workload": "convmodel", "trusted": True, "speedup": 2.0}
    return usual | {"precision": "bf16", "rung": "compiled"} | changed


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "RESULTS", tmp_path)
    about = {"device": "A GPU", "backend": "CUDA 13", "threads": 8, "torch": "2.15", "date": "d"}
    bench = {
        "environment": about,
        "flops_per_s": {"fp32": 2e12, "tf32": 1e13, "fp16": 3e13, "bf16": None},
        "rows": [
            bench_row(),
            bench_row(speedup=9.0, trusted=False),
            bench_row(speedup=7.0, status="failed"),
            bench_row(speedup=8.0, workload="matmul"),
        ],
    }
    (tmp_path / "bench-quick-gpu.json").write_text(json.dumps(bench))
    return tmp_path


def test_a_row_has_what_can_be_trusted(results):
    row = gallery.row(results / "bench-quick-gpu.json")
    assert row == ["A GPU", "2.15", "d", "5x", "15x", "–", "2x (bf16, compiled)", "–"]
    latency = {
        "model": "resnet18",
        "trusted": True,
        "fastest of the others of torch": "bf16 cast once",
        "times as fast as fp32": {"bf16 cast once": {"median": 1.5}},
    }
    (results / "latency-gpu.json").write_text(json.dumps({"latency": [latency]}))
    assert gallery.row(results / "bench-quick-gpu.json")[-1] == "1.5x (bf16 cast once)"
    latency["trusted"] = False
    (results / "latency-gpu.json").write_text(json.dumps({"latency": [latency]}))
    assert gallery.row(results / "bench-quick-gpu.json")[-1] == "–"


def test_a_figure_is_found_in_its_file_with_its_interval_and_trust(results):
    share = {"median": 0.0123, "interval": [0.012, 0.013]}
    estimate = {"median": 1.2345, "interval": [1.2, 1.3]}
    steps = {"trusted": False, "times": {"with": estimate}, "looks alone": share}
    rows = [{"way": "one", "ratio": 1.0, "interval": [1.0, 1.0], "trusted": True}]
    rows += [{"way": "failed", "ratio": None, "interval": None, "trusted": False}]
    rows += [{"way": "two", "ratio": 0.5, "interval": [0.49, 0.51], "trusted": True}]
    (results / "peers-gpu.json").write_text(json.dumps({"rows": rows, "step": steps}))
    assert gallery.figure("gpu", "peers/rows/way=two") == "0.50 (0.49 to 0.51)"
    assert gallery.figure("gpu", "peers/step/times/with") == "1.23 (1.20 to 1.30), not trusted"
    assert gallery.figure("gpu", "peers/step/looks alone") == "1.2 % (1.2 to 1.3), not trusted"
    for missing in ("rows/way=three", "rows/way=failed", "step/times/without"):
        assert gallery.figure("gpu", f"peers/{missing}") == "–"
    assert gallery.figure("gpu", "scale/rows") == "–"


def test_every_figure_of_what_our_code_costs_is_recorded_somewhere():
    devices = [path.stem.partition("-")[2] for path in gallery.RESULTS.glob("numerics-*.json")]
    for place in [place for places in gallery.COSTS.values() for place in places.values()]:
        assert {gallery.figure(device, place) for device in devices} - {"–"}, place


def part(name: str, code: str) -> Part:
    """A part that runs code, in which `out` is the file to write."""

    def commands(settings):
        return [["-c", f"out = {str(settings.out / f'{name}.json')!r}; {code}"]]

    return Part(name, 60, commands)


BENCH = gallery.RESULTS / "bench-quick-epyc-2-cores.json"
LATENCY = gallery.RESULTS / "latency-xeon-2-cores.json"
BROKEN = part("latency", "raise SystemExit(3)")
COPIED = part("bench-quick", f"import shutil; shutil.copy({str(BENCH)!r}, out)")


def test_a_device_is_recorded_shown_and_added(results, tmp_path, monkeypatch, capsys):
    """One part fails, and the other's result goes all the way into the README."""
    monkeypatch.setattr(record, "QUICK", (BROKEN, COPIED))
    (results / "README.md").write_text("\n".join(_markers()))
    out = tmp_path / "elsewhere" / "mine.json"
    out.parent.mkdir()
    assert record.main(["--device", "cpu", "--name", "my-cpu", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "failed exit code 3" in printed
    recorded, _, mine = printed.partition("| AMD EPYC, 2 threads |")
    assert "| A GPU | 2.15 |" in recorded
    assert mine.partition("\n")[2].lstrip().startswith("The last row is this device.")
    (results / "bench-quick-gpu.json").unlink()  # a short one, made for the gallery alone
    # The lines that were printed to be typed.
    assert "\npdm run record --write mine.json\n" in printed
    assert record.main(["--write", str(out)]) == 0
    assert json.loads((results / "bench-quick-my-cpu.json").read_text()) == bench()
    assert "| AMD EPYC, 2 threads |" in (results / "README.md").read_text()


def _markers():
    for name in ("gallery", "costs"):
        yield gallery.BEGIN.format(name)
        yield gallery.END.format(name)


def bench() -> dict:
    return json.loads(BENCH.read_text())


def latency() -> dict:
    return json.loads(LATENCY.read_text())


def on_gpu(name: str, **rates: float | None) -> dict:
    """A result as from a GPU, with these rates in TFLOP/s."""
    result = bench()
    result["environment"] |= {"device": name, "backend": "CUDA 13.0, compute capability 7.5"}
    scaled = {"fp32": 4.0, "tf32": None, "fp16": 25.0, "bf16": 2.0} | rates
    result["flops_per_s"] = {p: rate and rate * 1e12 for p, rate in scaled.items()}
    result["stream_bytes_per_s"] = {"65536": 1e12, "536870912": 2.5e11}  # small ones: in a cache
    return result


def with_row(**changed) -> dict:
    result = bench()
    result["rows"][0] |= changed
    return result


def without(result: dict, *names: str) -> dict:
    return {key: value for key, value in result.items() if key not in names}


def with_latency(**changed) -> dict:
    result = latency()
    result["latency"][0] |= changed
    return result


SPEEDUPS = "times as fast as fp32"
RUN_OFF = {"bf16 autocast": {"median": 1e3, "interval": [9e2, 2e3]}}
BACKWARDS = {"bf16 autocast": {"median": 1.5, "interval": [2.0, 1.0]}}
OUTSIDE = {"bf16 autocast": {"median": 1.5, "interval": [1.6, 1.7]}}


@pytest.mark.parametrize("path", sorted(gallery.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_recorded_passes_the_checks(path):
    check_result(path)


@pytest.mark.parametrize("device", ["Tesla T4", "NVIDIA A10"])  # the second without a peak rate
def test_a_result_of_a_gpu_in_the_table_is_accepted(tmp_path, device):
    path = tmp_path / "bench-quick-gpu.json"
    path.write_text(json.dumps(on_gpu(device)))
    check_result(path)


@pytest.mark.parametrize(
    ("name", "result", "said"),
    [
        ("first-gpu", {}, "parts: is missing, or empty"),
        ("first-gpu", {"parts": [{"status": "fine"}]}, "parts[0].status: 'fine' is none of"),
        ("bench", {}, "no results of amp-lab bench"),
        ("bench", bench() | {"schema": "amp-lab bench 1"}, "this amp_lab reads"),
        ("bench", without(bench(), "trusted"), "trusted"),
        ("bench", bench() | {"trusted": "yes"}, "'trusted' is 'yes', but must be of type bool"),
        ("bench", with_row(median_s=-1.0), "'median_s' is -1"),
        ("bench", with_row(speedup=float("nan")), "NaN is no number"),
        ("bench", with_row(speedup=float("inf")), "Infinity is no number"),
        ("bench", with_row(speedup=5.0), "speedup: 5 lies outside of its interval, 0.98 to 1.02"),
        (
            "bench",
            with_row(speedup=500.0, speedup_interval=[499.0, 501.0]),
            "speedup: 500x is more than any device gains",
        ),
        ("bench", with_row(median_s=9.0), "median_s: 9 lies outside of its samples"),
        ("bench", bench() | {"complete": False}, "complete: the run was interrupted"),
        ("bench", bench() | {"trusted": False}, "trusted: the machine was busy"),
        ("bench", bench() | {"rows": []}, "rows: the ConvModel was not timed"),
        (
            "bench",
            bench() | {"environment": bench()["environment"] | {"rounds": 1}},
            "environment.rounds: 1 is a rehearsal",
        ),
        ("bench", on_gpu("NVIDIA RTX 4070"), "environment.device: 'NVIDIA RTX 4070' is not in"),
        ("bench", on_gpu("Tesla T4", fp32=None), "flops_per_s.fp32: is missing"),
        ("bench", on_gpu("Tesla T4", fp32=0.5), "flops_per_s.fp16: 50x fp32"),
        ("bench", on_gpu("Tesla T4", tf32=8.0), "flops_per_s.tf32: T4 has no TF32"),
        (
            "bench",
            on_gpu("Tesla T4", fp16=90.0),
            "flops_per_s.fp16: 90 TFLOP/s, and the peak of T4 is 65 TFLOP/s",
        ),
        (
            "bench",
            on_gpu("Tesla T4", fp32=0.04, fp16=0.25, bf16=0.02),
            "flops_per_s.fp16: 0.25 TFLOP/s is less than 1 % of T4's 65 TFLOP/s",
        ),
        (
            "bench",
            on_gpu("Tesla T4") | {"stream_bytes_per_s": {"536870912": 9e11}},
            "stream_bytes_per_s.536870912: 900 GB/s, and T4 has 300 GB/s",
        ),
        ("latency", [], "damaged, it is no result"),
        ("latency", without(latency(), "device"), "device: is missing"),
        ("latency", latency() | {"threads": 0}, "threads: 0 is no number of threads"),
        ("latency", without(latency(), "latency"), "latency: has no rows"),
        ("latency", latency() | {"latency": [{"model": "x"}]}, "latency, x: 'samples_s' is"),
        ("latency", with_latency(samples_s={"fp32": [0.1, 0.0]}), "a time that is not above 0 s"),
        ("latency", with_latency(samples_s={}), "latency[0].samples_s: has no times"),
        (
            "latency",
            with_latency(**{"fastest of the others of torch": "fp8"}),
            "fastest of the others of torch: was not timed",
        ),
        ("latency", with_latency(**{SPEEDUPS: RUN_OFF}), "bf16 autocast: 1e+03x is more than"),
        ("latency", with_latency(**{SPEEDUPS: BACKWARDS}), "interval: 2 to 1 runs backwards"),
        ("latency", with_latency(**{SPEEDUPS: OUTSIDE}), "interval: 1.6 to 1.7 does not contain"),
    ],
)
def test_a_result_that_cannot_be_right_is_refused_in_one_line(
    results, tmp_path, capsys, name, result, said
):
    """The line names the file, the field and the reason, and nothing is written."""
    recorded = {"schema": record.SCHEMA, "results": {f"{name}-mine.json": result}}
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(recorded))
    before = set(results.iterdir())
    assert record.main(["--write", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert set(results.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "damaged, it is no JSON"),
        ("[]", "damaged, it is no result"),
        ('{"schema": "amp-lab recording 1"}', "results: there are none"),
        (
            '{"schema": "amp-lab recording 1", "results": {"../../setup.json": {}}}',
            "'../../setup.json' is no name of a result",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_refused_in_one_line(tmp_path, capsys, text, said):
    path = tmp_path / "recorded.json"
    if text is not None:
        path.write_text(text)
    assert record.main(["--write", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_no_result_is_added_if_one_of_them_is_refused(results, tmp_path):
    wrong = copy.deepcopy(latency()) | {"threads": 0}
    found = {"bench-quick-mine.json": bench(), "latency-mine.json": wrong}
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps({"schema": record.SCHEMA, "results": found}))
    with pytest.raises(OptionError, match=r"latency-mine\.json: threads"):
        record.add_recording(path)
    assert not (results / "bench-quick-mine.json").exists()


def test_a_gpu_that_is_not_in_the_table_is_said_at_once(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "device_name", lambda device: "NVIDIA GeForce RTX 4070")
    monkeypatch.setattr(record, "backend_name", lambda device: "CUDA 13.0")
    out = tmp_path / "mine.json"
    record.record_device(device="cpu", out=out, parts=(COPIED,))
    first = capsys.readouterr().out.splitlines()[0]
    assert "'NVIDIA GeForce RTX 4070' is not in the table of GPUs" in first
    assert "add a row to src/amp_lab/core/gpus.py" in first
    assert [*json.loads(out.read_text())["results"]] == [
        "bench-quick-nvidia-geforce-rtx-4070-2-cores.json".replace("2", str(record.os.cpu_count()))
    ]


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, capsys):
    """/proc is read-only for root too."""
    for out in ("/proc/recorded.json", tmp_path / "none" / "recorded.json"):
        assert record.main(["--device", "cpu", "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert f"{out}: cannot be written (" in printed.err
        assert len(printed.err.splitlines()) == 1
        assert not printed.out


def test_a_disk_that_is_full_at_the_end_keeps_the_results(results, tmp_path, monkeypatch, capsys):
    def full(path, parts):
        raise OptionError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(record, "save", full)
    monkeypatch.setattr(record, "QUICK", (COPIED,))
    assert record.main(["--device", "cpu", "--name", "x", "--out", str(tmp_path / "x.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line
    folder = line.rpartition("the results are kept in ")[2]
    assert [path.name for path in record.Path(folder).glob("*.json")] == ["bench-quick-x.json"]
    shutil.rmtree(folder)


def test_a_disk_that_is_full_from_the_start_is_said_in_one_line(monkeypatch, tmp_path, capsys):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "/tmp/x.log")

    monkeypatch.setattr(device_run, "_run", full)
    assert record.main(["--device", "cpu", "--out", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == "record: /tmp/x.log: No space left on device\n"


def test_nothing_measured_is_said_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "QUICK", (BROKEN,))
    assert record.main(["--device", "cpu", "--out", str(tmp_path / "x.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing was measured" in line
    assert not (tmp_path / "x.json").exists()
    shutil.rmtree(line.rpartition(" ")[2])


def test_missing_time_and_packages_are_said_in_one_line(monkeypatch, capsys):
    assert record.main(["--minutes", "-1"]) == 2
    assert capsys.readouterr().err == "record: --minutes -1 leaves no time\n"
    monkeypatch.setattr(device_run, "NEEDED", ("torch", "no_such_package"))
    assert record.main([]) == 2
    assert capsys.readouterr().err == "record: not installed here: no_such_package\n"


def test_every_part_is_a_command_of_this_checkout(tmp_path):
    for one in (*record.QUICK, *record.FULL):
        ((command, *_),) = one.commands(device_run.Settings("cpu", False, tmp_path))
        assert command == "-m" or (device_run.ROOT / command).exists()


@pytest.mark.slow
def test_a_whole_recording_in_small_on_the_cpu(tmp_path, capsys):
    """It runs both tools; as a rehearsal it cannot go into the gallery."""
    out = tmp_path / "recorded.json"
    assert record.main(["--tiny", "--device", "cpu", "--name", "tiny", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "The last row is this device." in printed
    assert "environment.rounds: 1 is a rehearsal" in printed
    results = json.loads(out.read_text())["results"]
    assert [*results] == ["bench-quick-tiny.json", "latency-tiny.json"]
    (tmp_path / "latency-tiny.json").write_text(json.dumps(results["latency-tiny.json"]))
    check_result(tmp_path / "latency-tiny.json")
    assert record.main(["--write", str(out)]) == 2

"""Training runs in a folder: what they leave there, how they stop, and that nothing is lost."""

import contextlib
import csv
import dataclasses
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest
import torch

from amp_lab import Precision, describe_device, load_checkpoint, make_stand_in, save_checkpoint
from amp_lab.cli import main
from amp_lab.training.run import RunConfig, train

# From Python 3.12 on, a fork of a process with threads, as torch always has, is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

# A run of 12 steps with all that must come back: shuffling, augmentation, dropout, a schedule.
RUN = {
    "--model": "squeezenet1_1",
    "--limit": 32,
    "--image-size": 24,
    "--batch-size": 8,
    "--epochs": 3,
    "--checkpoint-every": 1,
}
STEPS = 12
# How often the tests kill each run; `AMP_LAB_KILLS=30 pytest tests/test_runs.py -k kill` is the
# long version.
KILLS = int(os.environ.get("AMP_LAB_KILLS", "1"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the processes that the tests start, some of them at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read_rows(out: Path) -> list[dict]:
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def arguments(out: Path, run: dict = RUN, **changed) -> list[str]:
    """The command line of a run into `out`; an option set to None is left out, True is a flag."""
    options = run | {"--" + name.replace("_", "-"): value for name, value in changed.items()}
    line = ["train", "--out", str(out)]
    for name, value in options.items():
        if value is not None:
            line += [name] if value is True else [name, str(value)]
    return line


def refused(capsys, line: list[str]) -> str:
    """The one line on stderr with which `amp-lab` refuses, with exit code 2."""
    capsys.readouterr()
    try:
        code = main(line)
    except SystemExit as error:  # from the parser
        code = error.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert re.match("amp-lab( train)?: ", said)
    assert len(said.splitlines()) == 1, said
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(arguments(out)) == 0
    return out


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


# What a run leaves behind


def test_the_folder_holds_all_that_is_promised(finished):
    assert {path.name for path in finished.iterdir()} == {
        ".lock", "config.json", "metrics.csv", "checkpoint.pt", "loss.png", "accuracy.png",
    }  # fmt: skip
    rows = read_rows(finished)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert all(0 <= float(row["test_accuracy"]) <= 1 for row in rows)
    config = json.loads((finished / "config.json").read_text())["config"]
    assert (config["model"], config["limit"]) == ("squeezenet1_1", 32)
    for name in ("loss.png", "accuracy.png"):
        assert matplotlib.image.imread(finished / name).std() > 0.05  # not an empty picture


def test_it_says_what_it_does(tmp_path, capsys):
    assert main(arguments(tmp_path / "x", epochs=1, precision="bf16")) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert "digits: 32 training and 8 test images of 24x24, 10 classes" in printed
    assert "squeezenet1_1: 727,626 parameters, 727,626 trained; bf16 on cpu" in printed
    assert "epoch   1  loss " in printed
    assert "Trained 1 epochs in " in printed
    assert " images/s, peak memory " in printed


def test_frozen_only_the_head_is_trained(tmp_path, capsys):
    assert main(arguments(tmp_path / "x", epochs=1, freeze=True)) == 0
    assert "727,626 parameters, 5,130 trained" in capsys.readouterr().out


def test_every_option_of_the_loop_runs(tmp_path, capsys):
    line = arguments(
        tmp_path / "x", epochs=1, accumulate=3, clip_norm=0.5, channels_last=True, seed=5, lr=1e-3
    )
    assert main(line) == 0
    config = json.loads((tmp_path / "x" / "config.json").read_text())["config"]
    assert (config["accumulate"], config["clip_norm"], config["channels_last"]) == (3, 0.5, True)


def test_from_python_it_takes_the_enum_and_tells_what_stopped_it(tmp_path):
    said = []
    config = RunConfig(
        model="squeezenet1_1", limit=8, batch_size=8, image_size=24, epochs=1,
        precision=Precision.BF16,
    )  # fmt: skip
    assert train(config, tmp_path / "x", say=said.append) is None
    assert any("bf16 on cpu" in line for line in said)
    assert load_checkpoint(tmp_path / "x" / "checkpoint.pt")["config"]["precision"] == "bf16"


@pytest.mark.parametrize(("speedup", "warned"), [(1 / 200, True), (0.8, False)])
def test_fp16_works_on_a_cpu_and_is_warned_of_once_where_slow(
    tmp_path, capsys, monkeypatch, speedup, warned
):
    measured = describe_device("cpu")
    rates = {**measured.rates, Precision.FP16: speedup * measured.rates[Precision.FP32]}
    report = dataclasses.replace(measured, rates=rates)
    monkeypatch.setattr("amp_lab.training.run.describe_device", lambda device: report)
    line = arguments(tmp_path / "x", epochs=1, limit=8, precision="fp16")
    assert main(line) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == warned
    assert all("takes 200 times as long as in fp32 on this CPU" in line for line in said)


def test_a_finished_run_has_nothing_to_resume(finished, capsys):
    before = (finished / "checkpoint.pt").read_bytes()
    assert main(["train", "--out", str(finished), "--resume"]) == 0
    assert "Trained 3 epochs" in capsys.readouterr().out
    assert (finished / "checkpoint.pt").read_bytes() == before


# The other data sets, in their real layout


@pytest.fixture
def small_caltech(tmp_path) -> Path:
    make_stand_in("caltech256", tmp_path, classes=3, images_per_class=8)
    return tmp_path


SMALL = {"model": "squeezenet1_1", "image_size": 32, "batch_size": 4, "epochs": 1, "limit": None}


def test_caltech256_trains_from_its_folder_with_workers(small_caltech, tmp_path, capsys):
    line = arguments(
        tmp_path / "x", dataset="caltech256", data=small_caltech, workers=2, **SMALL, freeze=True
    )
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "caltech256 (generated stand-in): 22 training and 2 test images of 32x32" in printed
    assert "epoch   1  loss " in printed


def test_cifar10_trains_from_its_folder(tmp_path, capsys):
    make_stand_in("cifar10", tmp_path, images_per_class=6)
    line = arguments(tmp_path / "x", dataset="cifar10", data=tmp_path, precision="bf16", **SMALL)
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "cifar10 (generated stand-in): 50 training and 10 test images of 32x32" in printed


def test_a_damaged_image_is_refused_or_left_out_as_asked(small_caltech, tmp_path, capsys):
    damaged = sorted((small_caltech / "256_ObjectCategories").glob("002*/*.jpg"))[3]
    damaged.write_bytes(damaged.read_bytes()[:500])
    options = SMALL | {"dataset": "caltech256", "data": small_caltech}
    said = refused(capsys, arguments(tmp_path / "x", **options))
    assert f"1 of 24 images cannot be read, 256_ObjectCategories/{damaged.parent.name}" in said
    assert damaged.name in said
    assert "--skip-damaged" in said
    assert main(arguments(tmp_path / "x", skip_damaged=True, **options)) == 0
    printed = capsys.readouterr().out
    assert f"left out as damaged: 1 (256_ObjectCategories/{damaged.parent.name}" in printed


def test_an_image_damaged_after_the_start_ends_the_run_in_a_line(small_caltech, tmp_path, capsys):
    options = SMALL | {"dataset": "caltech256", "data": small_caltech, "workers": 2}
    assert main(arguments(tmp_path / "x", **options)) == 0
    damaged = next((small_caltech / "256_ObjectCategories").glob("002*/*.jpg"))
    damaged.write_text("no picture")
    assert damaged.name in refused(capsys, arguments(tmp_path / "y", **options))


# Bad input: one line, exit 2, and nothing is changed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset": "mnist"}, "no data set 'mnist'; there are digits, cifar10, caltech256"),
        ({"dataset": ""}, "no data set ''"),
        ({"model": "resnet51"}, "'resnet51'; near: resnet50"),
        ({"model": "fasterrcnn_resnet50_fpn"}, "no classifier of torchvision"),
        ({"precision": "fp8"}, "no precision 'fp8'; there are fp32, tf32, fp16, bf16"),
        ({"batch_size": 0}, "batch size must be at least 1, not 0"),
        ({"batch_size": -4}, "batch size must be at least 1, not -4"),
        ({"batch_size": 33}, "batch size 33 is larger than the 32 images"),
        ({"batch_size": "many"}, "argument --batch-size: invalid int value: 'many'"),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"lr": "nan"}, "lr must be a positive number, not nan"),
        ({"lr": "inf"}, "lr must be a positive number, not inf"),
        ({"lr": 0}, "lr must be a positive number, not 0.0"),
        ({"lr": -1}, "lr must be a positive number, not -1.0"),
        ({"clip_norm": 0}, "clip norm must be a positive number"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**63}, "seed must be from 0"),
        ({"image_size": 0}, "image size must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"workers": -1}, "workers must be at least 0, not -1"),
        ({"checkpoint_every": 0}, "checkpoint every 0 steps: must be at least 1"),
        ({"device": "tpu9"}, "'tpu9' is not a device"),
        ({"colour": "red"}, "unrecognized arguments: --colour red"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path, capsys, changed, said):
    assert said in refused(capsys, arguments(tmp_path / "x", **changed))
    assert not (tmp_path / "x" / "config.json").exists()


def test_without_a_folder_it_is_refused(capsys):
    assert "the following arguments are required: --out" in refused(capsys, ["train"])


@pytest.mark.parametrize("dataset", ["cifar10", "caltech256"])
def test_a_data_folder_that_is_a_file_is_refused(tmp_path, capsys, dataset):
    (tmp_path / "data").write_text("")
    line = arguments(tmp_path / "x", dataset=dataset, data=tmp_path / "data")
    assert str(tmp_path / "data") in refused(capsys, line)


def test_a_folder_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "x").write_text("")
    assert "x: nothing can be written there" in refused(capsys, arguments(tmp_path / "x"))
    assert "nothing can be written" in refused(capsys, arguments(tmp_path / "x" / "y"))


def test_a_folder_that_cannot_be_made_is_refused(capsys):
    said = refused(capsys, arguments(Path("/proc/self/amp-lab")))
    assert "/proc/self/amp-lab: nothing can be written there" in said


def test_a_folder_with_a_run_in_it_is_refused_without_resume(finished, capsys):
    before = {path: path.read_bytes() for path in finished.iterdir()}
    assert "holds a run already; --resume goes on with it" in refused(capsys, arguments(finished))
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_a_checkpoint_without_a_run_is_not_overwritten(tmp_path, capsys):
    save_checkpoint(tmp_path / "checkpoint.pt", step=1)
    assert "has a checkpoint but no config.json" in refused(capsys, arguments(tmp_path))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "alexnet"}, "started with model squeezenet1_1, and cannot go on with alexnet"),
        ({"precision": "bf16"}, "started with precision fp32, and cannot go on with bf16"),
        ({"dataset": "cifar10"}, "started with dataset digits, and cannot go on with cifar10"),
        ({"epochs": 4}, "started with epochs 3, and cannot go on with 4"),
        ({"seed": 1}, "started with seed 0, and cannot go on with 1"),
        ({"channels_last": True}, "started with channels last False"),
    ],
)
def test_a_run_cannot_go_on_as_another(copy, capsys, changed, said):
    assert said in refused(capsys, arguments(copy, resume=True, **changed))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"config": {"wings": 2}}', '{"config": {"epochs": 0}}']
)
def test_damaged_settings_are_named(copy, capsys, text):
    (copy / "config.json").write_text(text)
    said = refused(capsys, ["train", "--out", str(copy), "--resume"])
    assert "config.json: not the settings of a run" in said


def damage_by(action):
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(action(content))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_by(lambda c: c[: len(c) // 2]), "truncated: its end is missing"),
        (damage_by(lambda c: c[:999] + b"XYZ" + c[1002:]), "altered since it was saved"),
        (damage_by(lambda c: b""), "empty"),
        (damage_by(lambda c: b"hello"), "not a checkpoint"),
        (damage_by(lambda c: c.replace(b"checkpoint 1", b"checkpoint 0")), "an older amp_lab"),
        (lambda path: torch.save({"model": {}}, path), "not a checkpoint of amp_lab"),
        (lambda path: save_checkpoint(path, model={}), "of another run than"),
    ],
    ids=["truncated", "altered", "empty", "text", "older", "foreign", "another"],
)
def test_a_damaged_checkpoint_is_named(copy, capsys, damage, said):
    damage(copy / "checkpoint.pt")
    refusal = refused(capsys, ["train", "--out", str(copy), "--resume"])
    assert f"{copy / 'checkpoint.pt'}: " in refusal
    assert said in refusal


def test_a_checkpoint_of_another_model_is_named(copy, capsys):
    state = load_checkpoint(copy / "checkpoint.pt")
    state["model"].popitem()
    save_checkpoint(copy / "checkpoint.pt", **state)
    said = refused(capsys, ["train", "--out", str(copy), "--resume"])
    assert "checkpoint.pt: does not fit this run" in said


def test_other_images_are_noticed(copy, capsys):
    config = json.loads((copy / "config.json").read_text())
    config["images"] = "0" * 16
    (copy / "config.json").write_text(json.dumps(config))
    said = refused(capsys, ["train", "--out", str(copy), "--resume"])
    assert "not the images that the run in" in said


def test_another_torch_or_number_of_threads_is_told(copy, capsys):
    config = json.loads((copy / "config.json").read_text())
    config["environment"] = "torch 1.0 and 99 threads"
    (copy / "config.json").write_text(json.dumps(config))
    assert main(["train", "--out", str(copy), "--resume"]) == 0
    assert "Started with torch 1.0 and 99 threads; goes on with" in capsys.readouterr().out


@pytest.fixture
def disk_of_16_mb(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no small disk can be mounted without the right to")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_loses_nothing(disk_of_16_mb, capsys):
    """The first checkpoint, of 9 MB, fits; the second does not fit beside it."""
    said = refused(capsys, arguments(disk_of_16_mb / "x"))
    assert "checkpoint.pt: could not be saved (No space left on device)" in said
    state = load_checkpoint(disk_of_16_mb / "x" / "checkpoint.pt")
    assert state["ranks"][0]["progress"]["batch"] == 1


# Stopped, killed and resumed


def outcome(out: Path, checkpoint: str = "checkpoint.pt") -> dict:
    """All that must be equal in two runs, bit for bit: the last state, and the figures before."""
    state = load_checkpoint(out / checkpoint)
    timed = {"seconds", "images_per_s"}
    for own in state["ranks"]:
        for epoch in own["progress"]["epochs"]:
            for name in timed:
                del epoch[name]
    rows = [
        {name: value for name, value in row.items() if name not in timed} for row in read_rows(out)
    ]
    return state | {"rows": rows}


def assert_equal(first: object, second: object, where: str = "") -> None:
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert list(first) == list(second), where
        for key in first:
            assert_equal(first[key], second[key], f"{where}/{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            assert_equal(a, b, f"{where}/{i}")
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    else:
        assert first == second, where


def run_command(line: list[str], log: str) -> None:
    """`amp-lab` in a process and process group of its own."""
    os.setpgid(0, 0)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.exit(main(line))


@pytest.fixture(scope="module")
def launch():
    """Start `amp-lab` in a fork of a process that has loaded all modules, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["amp_lab.training.run", "amp_lab.plots", "sklearn.datasets"])
    started = []

    def start(out: Path, **changed) -> multiprocessing.Process:
        log = out.with_suffix(".log")
        process = context.Process(target=run_command, args=(arguments(out, **changed), str(log)))
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.fixture(scope="module")
def undisturbed(launch, tmp_path_factory):
    """The outcome of a run that nothing happens to, and its seconds, for a precision."""
    outcomes = {}

    def run(precision: str) -> tuple[dict, float]:
        if precision not in outcomes:
            out = tmp_path_factory.mktemp("undisturbed") / precision
            started = time.monotonic()
            process = launch(out, precision=precision, workers=2)
            process.join()
            assert process.exitcode == 0, out.with_suffix(".log").read_text()
            outcomes[precision] = outcome(out), time.monotonic() - started
        return outcomes[precision]

    return run


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("moment", ["any", "save"])
def test_kill_9_and_resume_ends_bitwise_equal(launch, undisturbed, tmp_path, precision, moment):
    """`KILLS` runs, each killed once, at a random moment or while it saves, and then resumed."""
    expected, seconds = undisturbed(precision)
    chance = random.Random(f"{precision} {moment}")
    for number in range(KILLS):
        out = tmp_path / f"{number}"
        process = launch(out, precision=precision, workers=2)
        if moment == "any":
            process.join(chance.uniform(0.1, seconds))
        else:
            for _ in range(chance.randrange(STEPS)):  # let some saves pass
                wait_for(out / "checkpoint.pt.partial", process)
                wait_until_gone(out / "checkpoint.pt.partial", process)
            wait_for(out / "checkpoint.pt.partial", process)
        with contextlib.suppress(ProcessLookupError):  # it may have finished just now
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if (out / "checkpoint.pt").exists():
            load_checkpoint(out / "checkpoint.pt")
        process = launch(out, precision=precision, workers=2, resume=True)
        process.join()
        assert process.exitcode == 0, out.with_suffix(".log").read_text()
        assert_equal(outcome(out), expected)


def wait_for(path: Path, process: multiprocessing.Process) -> None:
    while process.is_alive() and not path.exists():
        time.sleep(0.0005)


def wait_until_gone(path: Path, process: multiprocessing.Process) -> None:
    while process.is_alive() and path.exists():
        time.sleep(0.0005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_and_the_run_can_go_on(launch, undisturbed, tmp_path, number):
    """Sent to the whole group, as a terminal's Ctrl-C and a batch system do."""
    expected, _ = undisturbed("fp32")
    out = tmp_path / "x"
    process = launch(out, workers=2, checkpoint_every=None)
    while "Trained" not in (log := read(out.with_suffix(".log"))) and "epoch   1" not in log:
        assert process.is_alive(), log
        time.sleep(0.01)
    os.killpg(process.pid, number)
    process.join()
    log = read(out.with_suffix(".log"))
    assert process.exitcode == 128 + number, log
    assert "saved: --resume goes on from there." in log
    assert "Traceback" not in log
    process = launch(out, workers=0, checkpoint_every=None, resume=True)
    process.join()
    assert process.exitcode == 0
    assert_equal(outcome(out), expected)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_two_runs_cannot_share_a_folder(launch, tmp_path, capsys):
    out = tmp_path / "x"
    process = launch(out, epochs=1000)
    while not (out / "checkpoint.pt").exists():
        assert process.is_alive()
        time.sleep(0.01)
    said = refused(capsys, arguments(out, resume=True, epochs=None))
    assert f"{out}: another run is at work in this folder" in said
    process.kill()
    process.join()


def test_resume_with_nothing_there_starts_from_the_beginning(tmp_path, finished, capsys):
    out = tmp_path / "x"
    assert main(arguments(out, resume=True)) == 0
    assert f"Nothing was saved in {out} yet" in capsys.readouterr().out
    assert_equal(outcome(out), outcome(finished))

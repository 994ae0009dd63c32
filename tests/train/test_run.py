"""Training runs in a folder: what they leave there, how they stop, and that nothing is lost."""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import pytest
import torch
from rank_processes import CONTEXT, LOADED
from run_folders import STEPS, arguments, assert_equal, outcome, read_rows, refused
from tiny_classifier import NAME

from amp_lab import Precision, describe_device, load_checkpoint, make_stand_in, save_checkpoint
from amp_lab.cli import main
from amp_lab.cli import train as train_command
from amp_lab.train import run, run_folder, run_state
from amp_lab.train.checkpoint import is_checkpoint
from amp_lab.train.train_options import RunConfig, RunOptions, setting

SQUEEZENET = "squeezenet1_1"  # whose numbers of parameters are known

# From Python 3.12 on, a fork of a process with threads, as torch always has, is warned of.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

# How often the tests kill each run: 0, each moment once; AMP_LAB_KILLS=30, in every precision.
KILLS = int(os.environ.get("AMP_LAB_KILLS", "0"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the processes that the tests start, some of them at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    assert (config["model"], config["limit"]) == ("tiny_classifier", 32)
    for name in ("loss.png", "accuracy.png"):
        assert matplotlib.image.imread(finished / name).std() > 0.05  # not an empty picture


def test_it_says_what_it_does(tmp_path, capsys):
    assert main(arguments(tmp_path / "x", model=SQUEEZENET, epochs=1, precision="bf16")) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert re.search("digits: 32 training .* 8 test .*24x24, 10 classes", printed)
    assert re.search("squeezenet1_1: 727,626 .* 727,626 trained; bf16 on cpu", printed)
    assert "epoch   1  loss " in printed
    assert "Trained 1 epoch in " in printed
    assert " images/s, peak memory " in printed


def test_frozen_only_the_head_is_trained(tmp_path, capsys):
    assert main(arguments(tmp_path / "x", model=SQUEEZENET, epochs=1, freeze=True)) == 0
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
        model=NAME, limit=8, batch_size=8, image_size=24, epochs=1, precision=Precision.BF16
    )  # fmt: skip
    assert run.train(config, RunOptions(tmp_path / "x"), say=said.append) is None
    assert any("bf16 on cpu" in line for line in said)
    assert load_checkpoint(tmp_path / "x" / "checkpoint.pt")["config"]["precision"] == "bf16"


SLOW = "200 times as long"


@pytest.mark.parametrize(
    ("speedup", "trusted", "has_fp16", "warning"),
    [
        (1 / 200, True, True, SLOW),
        (0.8, True, False, ""),
        (5.0, False, False, "no fp16 instructions"),
        (1 / 200, False, True, ""),
    ],
)
def test_fp16_works_on_a_cpu_and_is_warned_of_once_where_slow(
    tmp_path, capsys, monkeypatch, speedup, trusted, has_fp16, warning
):
    measured = describe_device("cpu")
    rates = {**measured.rates, Precision.FP16: speedup * measured.rates[Precision.FP32]}
    report = dataclasses.replace(measured, rates=rates, trusted=trusted)
    monkeypatch.setattr("amp_lab.train.run.describe_device", lambda device: report)
    monkeypatch.setattr("amp_lab.train.run.onednn_has_fp16", lambda: has_fp16)
    line = arguments(tmp_path / "x", epochs=1, limit=8, precision="fp16")
    assert main(line) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == bool(warning)
    assert all(warning in line for line in said)


def test_a_finished_run_has_nothing_to_resume(finished, capsys):
    before = (finished / "checkpoint.pt").read_bytes()
    assert main(["train", "--out", str(finished), "--resume"]) == 0
    assert "Trained 3 epochs" in capsys.readouterr().out
    assert (finished / "checkpoint.pt").read_bytes() == before


def test_a_finished_run_goes_on_with_more_epochs(copy, capsys):
    assert main(["train", "--out", str(copy), "--resume", "--epochs", "5"]) == 0
    assert "follows a schedule of 5" in capsys.readouterr().out
    rows = read_rows(copy)
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5"]
    # The third was the last of three, with the lowest rate, as now the fifth has; not the fourth.
    assert float(rows[2]["lr"]) == float(rows[4]["lr"]) < 0.1 * float(rows[3]["lr"])
    assert main(["train", "--out", str(copy), "--resume"]) == 0
    assert "Trained 5 epochs" in capsys.readouterr().out


# The other data sets, in their real layout


@pytest.fixture
def small_caltech(tmp_path) -> Path:
    make_stand_in("caltech256", tmp_path, classes=3, images_per_class=8)
    return tmp_path


SMALL = {"image_size": 32, "batch_size": 4, "epochs": 1, "limit": None}


def test_caltech256_trains_from_its_folder_with_workers(small_caltech, tmp_path, capsys):
    line = arguments(
        tmp_path / "x", dataset="caltech256", data=small_caltech, workers=2, **SMALL, freeze=True
    )
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert re.search(r"caltech256 \(generated stand-in\): 22 .* 2 test .*32x32", printed)
    assert "epoch   1  loss " in printed


def test_cifar10_trains_from_its_folder(tmp_path, capsys):
    make_stand_in("cifar10", tmp_path, images_per_class=6)
    line = arguments(tmp_path / "x", dataset="cifar10", data=tmp_path, precision="bf16", **SMALL)
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert re.search(r"cifar10 \(generated stand-in\): 50 .* 10 test .*32x32", printed)


def test_a_damaged_image_is_refused_or_left_out_as_asked(small_caltech, tmp_path, capsys):
    damaged = sorted((small_caltech / "256_ObjectCategories").glob("002*/*.jpg"))[3]
    damaged.write_bytes(damaged.read_bytes()[:500])
    options = SMALL | {"dataset": "caltech256", "data": small_caltech}
    said = refused(capsys, arguments(tmp_path / "x", **options))
    assert re.search(f"1 of 24 .*256_ObjectCategories/{damaged.parent.name}", said)
    assert damaged.name in said
    assert "--skip-damaged" in said
    assert main(arguments(tmp_path / "x", skip_damaged=True, **options)) == 0
    printed = capsys.readouterr().out
    assert f"damaged images left out: 1 (256_ObjectCategories/{damaged.parent.name}" in printed


def test_nothing_can_be_damaged_where_images_are_no_files(tmp_path, capsys):
    assert ", not for digits" in refused(capsys, arguments(tmp_path / "x", skip_damaged=True))


def test_an_image_damaged_after_the_start_ends_the_run_in_a_line(small_caltech, tmp_path, capsys):
    options = SMALL | {"dataset": "caltech256", "data": small_caltech, "workers": 2}
    assert main(arguments(tmp_path / "x", **options)) == 0
    damaged = next((small_caltech / "256_ObjectCategories").glob("002*/*.jpg"))
    damaged.write_text("no picture")
    assert damaged.name in refused(capsys, arguments(tmp_path / "y", **options))


# Bad input: one line, exit 2, and nothing is changed


@pytest.mark.parametrize("dataset", ["cifar10", "caltech256"])
def test_a_data_folder_that_is_a_file_is_refused(tmp_path, capsys, dataset):
    (tmp_path / "data").write_text("")
    line = arguments(tmp_path / "x", dataset=dataset, data=tmp_path / "data")
    assert str(tmp_path / "data") in refused(capsys, line)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "alexnet"}, "with model tiny_classifier, .*alexnet"),
        ({"precision": "bf16"}, "with precision fp32, .*bf16"),
        ({"dataset": "cifar10"}, "with dataset digits, .*cifar10"),
        ({"epochs": 2}, "with epochs 3, .* 2$"),
        ({"seed": 1}, "with seed 0, .* 1$"),
        ({"batch_size": 4}, "with batch size [0-9]+, .* 4$"),
        ({"channels_last": True}, "started with channels last False"),
    ],
)
def test_a_run_cannot_go_on_as_another(copy, capsys, changed, said):
    assert re.search(said, refused(capsys, arguments(copy, resume=True, **changed)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.update(config=[1]), "not from a run"),
        (lambda state: state.pop("ranks"), "'ranks' must be of type list"),
        (lambda state: state.update(scheduler=3), "does not fit this run"),
        (lambda state: state["ranks"][0]["progress"].update(batch="3"), "'batch' is '3'"),
        (lambda state: state["ranks"][0]["progress"].update(epochs=[{"epoch": 1}]), "missing"),
    ],
)  # fmt: skip
def test_a_whole_checkpoint_of_other_values_is_told_in_a_line(copy, capsys, change, said):
    path = copy / "checkpoint.pt"
    state = load_checkpoint(path)
    change(state)
    save_checkpoint(path, **state)
    assert said in refused(capsys, ["train", "--out", str(copy), "--resume"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"epochs": "3"}, "'epochs' is '3', but must be of type int"),
        ({"epochs": True}, "'epochs' is True"),
        ({"lr": None}, "'lr' is None"),
        ({"limit": []}, "'limit' is []"),
        ({"batch_size": 10**30}, "'batch_size' is 1e+30"),
        ({"lr": float("nan")}, "NaN is no number"),
    ],
)  # fmt: skip
def test_settings_of_other_kinds_are_told_in_a_line(copy, capsys, changed, said):
    path = copy / "config.json"
    content = json.loads(path.read_text())
    content["config"] |= changed
    path.write_text(json.dumps(content))
    assert said in refused(capsys, ["train", "--out", str(copy), "--resume"])


def test_images_that_the_model_does_not_take_are_told_before_the_first_step(tmp_path, capsys):
    line = arguments(tmp_path / "x", model="vit_b_32", image_size=32)
    assert "cannot take images of 32x32" in refused(capsys, line)


@pytest.mark.skipif(sys.platform == "win32", reason="which has no such limit")
def test_more_workers_than_files_can_be_opened_are_refused(tmp_path, capsys):
    said = refused(capsys, arguments(tmp_path / "x", workers=10**6))
    assert "1,000,000 workers need more open files" in said


def test_a_worker_that_is_killed_ends_the_run_in_a_line(
    small_caltech, tmp_path, capsys, monkeypatch
):
    def killed(batches, keys):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(sys.modules["amp_lab.train.data.batches"].Batches, "_read", killed)
    options = SMALL | {"dataset": "caltech256", "data": small_caltech, "workers": 2}
    said = refused(capsys, arguments(tmp_path / "x", **options))
    assert "loads images was killed" in said


def test_a_folder_with_a_run_in_it_is_refused_without_resume(finished, capsys):
    before = {path: path.read_bytes() for path in finished.iterdir()}
    assert "already contains a run; resume it with --resume" in refused(capsys, arguments(finished))
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_other_images_are_noticed(copy, capsys):
    config = json.loads((copy / "config.json").read_text())
    config["images"] = "0" * 16
    (copy / "config.json").write_text(json.dumps(config))
    said = refused(capsys, ["train", "--out", str(copy), "--resume"])
    assert "the images differ from" in said


def test_another_torch_or_number_of_threads_is_told(copy, capsys):
    config = json.loads((copy / "config.json").read_text())
    config["environment"] = "torch 1.0 and 99 threads"
    (copy / "config.json").write_text(json.dumps(config))
    assert main(["train", "--out", str(copy), "--resume"]) == 0
    assert "was started with torch 1.0 and 99 threads" in capsys.readouterr().out


# Stopped, killed and resumed


def run_command(line: list[str], log: str, dies_at: tuple[int, bool] | None) -> None:
    """`amp-lab` in a process and process group of its own.

    `dies_at` is a number of a save, and whether it then has replaced the checkpoint before it.
    """
    os.setpgid(0, 0)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    run._warn_of_slow_fp16 = lambda device: None  # measures for seconds
    if dies_at is not None:
        die_in_a_save(*dies_at)
    sys.exit(main(line))


def die_in_a_save(number: int, has_replaced: bool) -> None:
    replace, left = os.replace, [number]

    def replace_or_die(source: Path, target: Path) -> None:
        left[0] -= Path(target).name == "checkpoint.pt"
        if left[0] == 0 and not has_replaced:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_or_die


@pytest.fixture(scope="module")
def launch():
    """Start `amp-lab` in a fork of a process that has loaded all modules, and nothing else."""
    CONTEXT.set_forkserver_preload(LOADED)
    started = []

    def start(out: Path, dies_at: tuple | None = None, **changed) -> multiprocessing.Process:
        line, log = arguments(out, **changed), str(out.with_suffix(".log"))
        process = CONTEXT.Process(target=run_command, args=(line, log, dies_at))
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
            process = launch(out, precision=precision)
            process.join()
            assert process.exitcode == 0, out.with_suffix(".log").read_text()
            outcomes[precision] = outcome(out), time.monotonic() - started
        return outcomes[precision]

    return run


MOMENTS = [("any", "fp16"), ("save", "fp32")]
if KILLS:
    MOMENTS = [*itertools.product(("any", "save"), ("fp32", "fp16", "bf16"))]


@pytest.mark.parametrize(("moment", "precision"), MOMENTS)
def test_kill_9_and_resume_ends_bitwise_equal(launch, undisturbed, tmp_path, precision, moment):
    """Runs killed once, at a random moment or in the middle of a save, and then resumed."""
    expected, seconds = undisturbed(precision)
    chance = random.Random(f"{precision} {moment}")
    for number in range(max(KILLS, 1)):
        out = tmp_path / f"{number}"
        dies_at = None
        if moment == "save":
            dies_at = chance.randint(2, STEPS), chance.random() < 0.3
        process = launch(out, dies_at, precision=precision, workers=1)
        process.join(None if dies_at else chance.uniform(0.1, seconds))
        with contextlib.suppress(ProcessLookupError):  # it may have finished just now
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if (out / "checkpoint.pt").exists():
            load_checkpoint(out / "checkpoint.pt")
        process = launch(out, precision=precision, resume=True)
        process.join()
        assert process.exitcode == 0, out.with_suffix(".log").read_text()
        assert "Resuming" in read(out.with_suffix(".log")) or not dies_at
        assert_equal(outcome(out), expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_and_the_run_can_go_on(launch, undisturbed, tmp_path, number):
    """Sent to the whole group, as a terminal's Ctrl-C and a batch system do."""
    expected, _ = undisturbed("fp32")
    out = tmp_path / "x"
    process = launch(out, workers=1, checkpoint_every=None)
    while "Trained" not in (log := read(out.with_suffix(".log"))) and "epoch   1" not in log:
        assert process.is_alive(), log
        time.sleep(0.01)
    os.killpg(process.pid, number)
    process.join()
    log = read(out.with_suffix(".log"))
    assert process.exitcode == 128 + number, log
    assert "and saved. Continue with --resume" in log
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
    assert f"{out}: another run" in said
    process.kill()
    process.join()


def test_resume_with_nothing_there_starts_from_the_beginning(tmp_path, finished, capsys):
    out = tmp_path / "x"
    assert main(arguments(out, resume=True)) == 0
    assert f"{out} has no checkpoint yet" in capsys.readouterr().out
    assert_equal(outcome(out), outcome(finished))


def test_resume_of_a_folder_that_is_not_there_starts_no_other_run(tmp_path, capsys):
    """A name with a typing error would train the default for hours, in a new folder."""
    said = refused(capsys, ["train", "--out", str(tmp_path / "typo"), "--resume"])
    assert "typo: there is no run to resume" in said
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "config.json"])
def test_export_replaces_no_file_that_is_not_a_checkpoint(copy, capsys, name):
    (copy / "thesis.tex").write_text("mine")
    before = (copy / name).read_bytes()
    said = refused(capsys, ["export", str(copy), str(copy / name)])
    assert re.search(f"{copy / name} already .*not a checkpoint; --force", said)
    assert (copy / name).read_bytes() == before
    for _ in range(2):  # what it has written itself it replaces
        assert main(["export", str(copy), str(copy / "new.pt")]) == 0
    assert main(["export", str(copy), str(copy / name), "--force"]) == 0
    assert is_checkpoint(copy / name)


# Runs of other versions of the package


OLD_RUN = Path(__file__).parent / "old_run"  # by 3f79575, interrupted in the middle of epoch 2 of 3


def test_a_run_that_an_older_version_began_is_finished(tmp_path, capsys):
    out = Path(shutil.copytree(OLD_RUN, tmp_path / "x"))
    before = json.loads((out / "config.json").read_text())["config"]
    assert main(["train", "--out", str(out), "--resume"]) == 0
    printed = capsys.readouterr().out
    assert re.search("tiny_classifier: 1,498 .* 90 .*bf16 on cpu", printed)
    assert "Resuming in epoch 2 after 2 batches." in printed
    assert "Trained 3 epochs in " in printed
    first, *others = read_rows(out)
    assert first == read_rows(OLD_RUN)[0]
    assert [row["epoch"] for row in others] == ["2", "3"]
    state = load_checkpoint(out / "checkpoint.pt")
    assert {name: state["config"][name] for name in before} == before
    assert (before["lr"], before["seed"], before["clip_norm"]) == (0.004, 3, 1.0)
    assert state["scheduler"]["last_epoch"] == 24  # 8 steps an epoch, 10 of them before


def test_an_older_run_is_no_other_run_when_a_setting_is_added(tmp_path, capsys, monkeypatch):
    @dataclass(frozen=True)
    class Extended(RunConfig):
        weight_decay: float = setting(0.0, "pull towards zero (default: {})", "X")

    for module in (train_command, run, run_folder, run_state):
        monkeypatch.setattr(module, "RunConfig", Extended)
    out = Path(shutil.copytree(OLD_RUN, tmp_path / "x"))
    other = ["train", "--out", str(out), "--resume", "--weight-decay", "0.1"]
    said = refused(capsys, other)
    assert re.search("weight decay 0.0, .* 0.1$", said)
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert load_checkpoint(out / "checkpoint.pt")["config"]["weight_decay"] == 0.0
    assert main(["train", "--out", str(out), "--resume"]) == 0  # compared by both kinds of files

"""`amp-lab train` in several processes: what it leaves, resumes, survives and refuses."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from rank_processes import (
    command,
    command_by_rank,
    lose_a_worker,
    run_ranks,
    start_ranks,
    values_of,
)
from run_folders import arguments, assert_equal, read_rows
from run_folders import outcome as outcome_of
from tiny_classifier import NAME
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from amp_lab import load_checkpoint
from amp_lab.cli import main
from amp_lab.core.errors import DataError
from amp_lab.train import run as runs
from amp_lab.train.data import batches
from amp_lab.train.distributed.process_group import join
from amp_lab.train.export import export_checkpoint
from amp_lab.train.loop import evaluate
from amp_lab.train.train_options import RunConfig, RunOptions

pytestmark = pytest.mark.slow

KINDS = ["ddp", "fsdp"]
REAL = "mnasnet0_5"
# Batch norm, dropout, augmentation, a schedule; 4 steps an epoch.
RUN = {
    "--model": NAME,
    "--limit": 32,
    "--image-size": 16,
    "--batch-size": 8,
    "--epochs": 2,
    "--timeout": 60,
}
# How many runs of each kind lose a worker.
KILLS = int(os.environ.get("AMP_LAB_KILLS", "1"))


def line(out: Path, kind: str | None = "ddp", **changed) -> list[str]:
    return arguments(out, RUN | {"--parallel": kind}, **changed)


def train_on(size: int, out: Path, kind: str = "ddp", **changed):
    ended = run_ranks(command, size, *line(out, kind, **changed))
    assert [one.code for one in ended] == [0] * size, ended
    return ended


def outcome(out: Path) -> dict:
    """All that must be equal in two runs, bit for bit, whether they wrote shards or not."""
    whole = out / "whole.pt"
    export_checkpoint(out, whole)
    found = outcome_of(out, whole.name)
    whole.unlink()
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder and the processes of a finished run on 2 ranks, by kind."""
    runs = {}

    def run(kind: str):
        if kind not in runs:
            out = tmp_path_factory.mktemp("parallel") / kind
            runs[kind] = out, train_on(2, out, kind)
        return runs[kind]

    return run


# What a run leaves


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_alone_prints_and_writes(finished, kind):
    out, (first, second) = finished(kind)
    assert f"on cpu, 2 {kind} processes, gradients summed in fp32" in first.out
    assert re.findall("epoch +([0-9])  loss", first.out) == ["1", "2"]
    assert (second.out, second.err) == ("", "")
    assert [row["epoch"] for row in read_rows(out)] == ["1", "2"]
    names = {path.name for path in out.iterdir()}
    files = {".lock", "config.json", "metrics.csv", "checkpoint.pt", "loss.png", "accuracy.png"}
    assert names == files | ({"shards-2-0"} if kind == "fsdp" else set())


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.weekly)])
def test_every_option_of_the_loop_runs(tmp_path, kind):
    options = {"precision": "bf16", "reduce_dtype": "bf16", "accumulate": 2, "clip_norm": 1}
    flags = {"freeze": True, "channels_last": True, "workers": 1, "epochs": 1}
    flags["model"] = REAL
    first, _ = train_on(2, tmp_path / "x", kind, **options, **flags)
    assert "12,810 trained; bf16 on cpu" in first.out
    assert "gradients summed in bf16" in first.out
    assert first.err == ""


def test_a_ddp_checkpoint_is_that_of_one_process(finished, tmp_path):
    out, _ = finished("ddp")
    assert main(line(tmp_path / "alone", None)) == 0
    ours, alone = (load_checkpoint(o / "checkpoint.pt") for o in (out, tmp_path / "alone"))
    assert ours.keys() == alone.keys()
    assert ours["model"].keys() == alone["model"].keys()
    assert len(ours["ranks"]) == 2


# Going on in another way


def restored(kind: str | None, out: Path) -> dict:
    """What a run is once it is restored: its evaluation, its whole weights and optimizer state."""
    with join(kind, torch.device("cpu"), timeout_s=60) as ranks, contextlib.ExitStack() as stack:
        options = RunOptions(out, resume=True, workers=0)
        run = runs.Run(RunConfig(), (), options, ranks, stack)
        loss, accuracy = evaluate(
            run.wrapped_model,
            batches(run.data.test, 8, share=(ranks.rank, ranks.size)),
            precision="fp32",
            device="cpu",
            ranks=ranks,
        )
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(run.model, run.parts.optimizer, options=whole)
        return {"loss": loss, "accuracy": accuracy, "model": model, "optimizer": optimizer}


@pytest.fixture(scope="module")
def by_four(tmp_path_factory):
    """The folder of a run of 4 sharded ranks, and what it is when they restore it."""
    out = tmp_path_factory.mktemp("parallel") / "four"
    train_on(4, out, "fsdp", epochs=1)
    return out, values_of(restored, 4, "fsdp", out)[0]  # rank 0 alone has whole tensors


def assert_same(after: dict, before: dict) -> None:
    assert_equal(after["model"], before["model"])
    assert_equal(after["optimizer"]["state"], before["optimizer"]["state"])
    assert after["accuracy"] == before["accuracy"]
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-5)  # the order of a sum


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("fsdp", 2),
        pytest.param("fsdp", 1, marks=pytest.mark.weekly),
        pytest.param("ddp", 2, marks=pytest.mark.weekly),
    ],
)
def test_what_4_ranks_wrote_is_the_same_on_another_number(by_four, kind, size):
    out, before = by_four
    assert_same(values_of(restored, size, kind, out)[0], before)


def test_what_4_ranks_wrote_is_the_same_alone_and_as_one_file(by_four, tmp_path):
    out, before = by_four
    assert_same(restored(None, out), before)
    assert main(["export", str(out), str(tmp_path / "plain.pt")]) == 0
    assert_equal(dict(load_checkpoint(tmp_path / "plain.pt")["model"]), before["model"])
    # The file is a checkpoint: a run that was sharded goes on from it in one process.
    copy = Path(shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns("shards*")))
    (tmp_path / "plain.pt").replace(copy / "checkpoint.pt")
    assert_same(restored(None, copy), before)


def test_what_ddp_wrote_is_the_same_in_shards(finished):
    out, _ = finished("ddp")
    assert_same(values_of(restored, 2, "fsdp", out)[0], restored(None, out))


def test_it_trains_on_in_another_number_of_processes(finished, tmp_path):
    out, _ = finished("fsdp")
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    ended = train_on(1, copy, "fsdp", resume=True)
    assert "resumes with" in ended[0].out
    assert "the result may differ." in ended[0].out


# Stopped, killed, and gone on with


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_bitwise_equal(finished, tmp_path, kind):
    expected = outcome(finished(kind)[0])
    out, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    processes = start_ranks(command, 2, logs, *line(out, kind))
    try:
        while not (out / "checkpoint.pt").exists():
            assert all(process.is_alive() for process in processes)
            time.sleep(0.001)
        os.kill(processes[1].pid, signal.SIGTERM)
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [128 + signal.SIGTERM] * 2
    finally:
        for process in processes:
            process.kill()
    assert "and saved. Continue with --resume" in (logs / "0.out").read_text()
    train_on(2, out, kind, resume=True)
    assert_equal(outcome(out), expected)


def die_before_the_epoch_is_written(*line: str) -> int:
    def write_or_die(out: Path, epochs: list) -> None:
        if epochs:
            os.kill(os.getpid(), signal.SIGKILL)

    runs.run_folder.write_metrics = write_or_die
    return command(*line)


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.weekly)])
def test_killed_after_the_last_step_of_an_epoch_it_ends_bitwise_equal(finished, tmp_path, kind):
    """What is resumed then begins with the evaluation."""
    out = tmp_path / "run"
    ended = run_ranks(
        die_before_the_epoch_is_written, 2, *line(out, kind, checkpoint_every=4, timeout=10)
    )
    assert ended[0].code == -signal.SIGKILL
    assert load_checkpoint(out / "checkpoint.pt")["ranks"][1]["progress"]["batch"] == 4
    train_on(2, out, kind, resume=True, checkpoint_every=4)
    assert_equal(outcome(out), outcome(finished(kind)[0]))


@pytest.mark.weekly
def test_the_same_torchrun_goes_on_without_being_told(finished, tmp_path):
    """Another node may have lost a process, of which this one's count of restarts knows nothing."""
    out = tmp_path / "run"
    same = {"TORCHELASTIC_RUN_ID": "a"}
    for expected in ("epoch   2", "Resuming in epoch 3 after 0 batches"):
        ended = run_ranks(command, 2, *line(out, "ddp"), **same)
        assert [one.code for one in ended] == [0, 0], ended
        assert expected in ended[0].out
    same["TORCHELASTIC_RUN_ID"] = "b"
    said = refused(line(out, "ddp"), **same)
    assert f"{out} already contains a run; resume it with --resume" in said


def fail_in_the_middle(*line: str) -> int:
    def broken(*arguments, share, **options):
        if share[0] == 1:
            raise DataError("1.jpg: cannot be decoded")
        return batches(*arguments, share=share, **options)

    runs.batches = broken
    return command(*line)


def test_an_error_of_one_rank_in_the_middle_is_told_by_it_at_once(tmp_path):
    ended = run_ranks(fail_in_the_middle, 2, *line(tmp_path / "x", timeout=10))
    assert [one.code for one in ended] == [2, 2]
    assert ended[1].err == "amp-lab train: 1.jpg: cannot be decoded\n"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.weekly)])
def test_kill_9_of_a_worker_and_torchrun_ends_the_run_as_if_nothing_had_been(
    finished, tmp_path, kind
):
    """`KILLS` runs of two workers, of which one is killed at a random moment."""
    expected = outcome(finished(kind)[0])
    chance = random.Random(kind)
    for number in range(KILLS):
        out = tmp_path / f"{number}"
        lose_a_worker(out, line(out, kind, checkpoint_every=1), chance)
        assert_equal(outcome(out), expected)


# What it refuses


def refused(arguments: list[str], size: int = 2, **environment) -> str:
    """The one line that all processes together print before all exit with 2."""
    return one_line(run_ranks(command, size, *arguments, **environment))


def one_line(ended: list) -> str:
    assert [one.code for one in ended] == [2] * len(ended), ended
    # torchrun ends the others before they repeat what the first has said.
    said = [line for one in ended for line in one.err.splitlines()]
    assert len(set(said)) == 1, said
    assert said[0].startswith("amp-lab train: ")
    return said[0]


@pytest.mark.parametrize(
    ("size", "changed", "said"),
    [
        (2, {"batch_size": 7}, "batch size 7 .*divided by 2 processes"),
        (4, {"batch_size": 2}, "give a multiple of 4"),
        (2, {"limit": 4}, "batch size 8 .*larger .* 4 images"),
        (2, {"precision": "fp8"}, "unknown precision 'fp8'"),
        (2, {"parallel": None}, "torchrun .*2 .*: .*--parallel"),
        (2, {"parallel": "dp"}, "'dp' .*ddp, fsdp"),
        (2, {"reduce_dtype": "int8"}, "use one of fp32, fp16, bf16"),
        (2, {"timeout": -1}, "timeout .* 1,000,000 seconds, not -1"),
        (2, {"batch_size": 2, "model": REAL}, "batch norm needs more than 1 image "),
        (2, {"data": "pyproject.toml", "dataset": "cifar10"}, "pyproject.toml"),
    ],
)
def test_a_wrong_value_is_refused_in_a_line(tmp_path, size, changed, said):
    assert re.search(said, refused(line(tmp_path / "x", **changed), size))


def test_a_folder_that_cannot_be_made_is_refused_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file' / 'x'} " in refused(line(tmp_path / "file" / "x"))


def test_ranks_with_different_arguments_are_told(tmp_path):
    each = [line(tmp_path / "x"), line(tmp_path / "x", lr=0.1)]
    said = one_line(run_ranks(command_by_rank, 2, each=each))
    assert re.search("rank 1 .*lr 0.1, but rank 0 .*None", said)


def test_ranks_in_different_ways_are_told(tmp_path):
    each = [line(tmp_path / "x", "ddp"), line(tmp_path / "x", "fsdp")]
    said = one_line(run_ranks(command_by_rank, 2, each=each))
    assert re.search("rank 1 .*parallel fsdp, but rank 0 .*ddp", said)


def test_without_torchrun_it_is_refused(tmp_path, capsys):
    assert main(line(tmp_path / "x", "fsdp")) == 2
    said = capsys.readouterr().err
    assert "torchrun --nproc-per-node N -m amp_lab train" in said
    assert len(said.splitlines()) == 1


def test_a_rendezvous_with_nobody_there_ends_after_the_timeout(tmp_path):
    said = refused(line(tmp_path / "x", timeout=2), 1, WORLD_SIZE=2)
    assert re.search(r"no connection .*127\.0\.0\.1:\d", said)


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = refused(line(tmp_path / "x"), 1, MASTER_PORT=server.getsockname()[1])
    assert re.search(r"no connection .*127\.0\.0\.1:\d", said)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "missing"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), "missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), ".metadata: changed"),
    ],
    ids=["folder", "file", "metadata"],
)
def test_damaged_shards_are_named(finished, tmp_path, damage, said):
    out = Path(shutil.copytree(finished("fsdp")[0], tmp_path / "copy"))
    damage(out / "shards-2-0")
    told = refused(line(out, "fsdp", resume=True))
    assert str(out / "shards-2-0") in told
    assert said in told

"""The checkpoint of a run: damage is named, and what was added since is no other run."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_folders import arguments, refused

from amp_lab import load_checkpoint, save_checkpoint
from amp_lab.cli import main
from amp_lab.core.errors import CheckpointError
from amp_lab.train.run_state import load_run
from amp_lab.train.train_options import RunConfig


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(arguments(out, epochs=1)) == 0
    return out


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def damage_by(action):
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(action(content))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_by(lambda c: c[: len(c) // 2]), "truncated: the end of the file is missing"),
        (damage_by(lambda c: c[:999] + b"XYZ" + c[1002:]), "changed after it was saved"),
        (damage_by(lambda c: b""), "empty"),
        (damage_by(lambda c: b"hello"), "not a checkpoint"),
        (damage_by(lambda c: c.replace(b"checkpoint 1", b"checkpoint 0")), "an older amp_lab"),
        (lambda path: torch.save({"model": {}}, path), "not a checkpoint of amp_lab"),
        (lambda path: save_checkpoint(path, model={}), "not from a run"),
    ],
    ids=["truncated", "altered", "empty", "text", "older", "foreign", "no run"],
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
    assert "checkpoint.pt: does not fit" in said


def test_a_setting_that_was_added_since_has_its_default(copy):
    state = load_checkpoint(copy / "checkpoint.pt")
    config = RunConfig(**state["config"])
    del state["config"]["seed"]
    save_checkpoint(copy / "checkpoint.pt", **state)
    assert load_run(copy, replace(config, epochs=9))["config"] == state["config"]
    with pytest.raises(CheckpointError, match="are from different runs"):
        load_run(copy, replace(config, seed=1))


def test_settings_that_no_run_has_are_named(copy):
    state = load_checkpoint(copy / "checkpoint.pt")
    config = RunConfig(**state["config"])
    for wrong in ({"wings": 2}, {"epochs": 0}):
        save_checkpoint(copy / "checkpoint.pt", **state | {"config": state["config"] | wrong})
        with pytest.raises(CheckpointError, match="not from a run"):
            load_run(copy, config)


def test_a_folder_without_one_has_no_state(tmp_path):
    assert load_run(tmp_path, RunConfig()) is None


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
    said = refused(capsys, arguments(disk_of_16_mb / "x", model="squeezenet1_1"))
    assert "checkpoint.pt: cannot be written (" in said
    state = load_checkpoint(disk_of_16_mb / "x" / "checkpoint.pt")
    assert state["ranks"][0]["progress"]["batch"] == 1

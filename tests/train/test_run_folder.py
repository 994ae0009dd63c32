"""The folder of a run: whose it is, and what is in it."""

import re

import pytest
from run_folders import arguments, refused

from amp_lab import save_checkpoint
from amp_lab.core.errors import RunError
from amp_lab.train import run_folder


def test_a_folder_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "x").write_text("")
    assert "x cannot be written to" in refused(capsys, arguments(tmp_path / "x"))
    assert "cannot be written to" in refused(capsys, arguments(tmp_path / "x" / "y"))


def test_a_checkpoint_without_a_run_is_not_overwritten(tmp_path, capsys):
    save_checkpoint(tmp_path / "checkpoint.pt", step=1)
    assert re.search(r"checkpoint\.pt .*no config\.json", refused(capsys, arguments(tmp_path)))


@pytest.mark.parametrize("name", ["metrics.csv", "loss.png", "accuracy.png"])
def test_files_of_others_are_not_overwritten(tmp_path, capsys, name):
    (tmp_path / name).write_text("years of work")
    assert f"contains {name} but no config.json" in refused(capsys, arguments(tmp_path))
    assert (tmp_path / name).read_text() == "years of work"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"config": {"wings": 2}}', '{"config": {"epochs": 0}}']
)
def test_damaged_settings_are_named(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    said = refused(capsys, ["train", "--out", str(tmp_path), "--resume"])
    assert "config.json: does not contain the settings" in said


def test_a_folder_is_locked_for_the_block(tmp_path):
    out = tmp_path / "x"
    with (
        run_folder.lock(out),
        pytest.raises(RunError, match="another run"),
        run_folder.lock(out),
    ):
        pass
    with run_folder.lock(out):
        pass

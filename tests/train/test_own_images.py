"""Runs on a folder of one's own images, and `--data` where it is not used."""

import re
import shutil

import pytest
from run_folders import arguments, outcome, refused

from amp_lab import make_stand_in
from amp_lab.cli import main

SMALL = {"dataset": "folder", "image_size": 24, "batch_size": 4, "epochs": 1, "limit": None}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Class folders of 8 pictures each, in a folder whose name has a space."""
    made = make_stand_in("caltech256", tmp_path_factory.mktemp("x"), classes=3, images_per_class=8)
    shutil.rmtree(made / "257.clutter")
    return made.rename(made.with_name("my images"))


def test_a_model_is_trained_on_a_folder_of_images(images, tmp_path, capsys):
    out = tmp_path / "x"
    assert main(arguments(out, data=images, **SMALL)) == 0
    printed = capsys.readouterr().out
    assert re.search("folder: 21 training .* 3 test .*24x24, 3 classes", printed)
    assert "epoch   1  loss " in printed
    assert outcome(out)["classes"] == 3


def test_its_model_is_exported(images, tmp_path, capsys):
    assert main(arguments(tmp_path / "x", data=images, **SMALL)) == 0
    assert (
        main(["export", str(tmp_path / "x"), str(tmp_path / "m.pt2"), "--data", str(images)]) == 0
    )
    assert "3 of 3 decisions agree with fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset": "digits"}, "digits is part of a"),
        ({"dataset": "stdlib", "model": "gpt-nano", "image_size": None}, "stdlib is part of a"),
        ({"data": None}, "--dataset folder needs --data"),
        ({"data": "nowhere"}, "nowhere: no such folder"),
        ({"dataset": "text", "model": "gpt-nano", "data": None, "image_size": None},
         "--dataset text needs --data"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_data_that_are_not_used_or_missing_are_told_in_a_line(
    images, tmp_path, capsys, changed, said
):
    line = arguments(tmp_path / "x", **SMALL | {"data": images} | changed)
    assert re.search(said, refused(capsys, line))
    assert not (tmp_path / "x" / "config.json").exists()


def test_a_folder_that_is_no_data_set_is_refused_in_a_line(images, tmp_path, capsys):
    one_class = images / "001.generated-001"
    said = refused(capsys, arguments(tmp_path / "x", data=one_class, **SMALL))
    assert f"{one_class} contains no folders" in said

"""A run knows where its data are: it goes on from any folder, and says so if they have moved."""

import json
import shutil

import pytest
from run_folders import arguments, read_rows, refused
from tiny_gpt import NAME

from amp_lab.cli import main
from amp_lab.train.data.tokens import BytePairs

TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(400))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working folder with a text in it; its run is in runs/x."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def start(**changed):
    usual = {"model": NAME, "dataset": "text", "data": "squares.txt", "image_size": None}
    line = arguments("runs/x", **usual | {"context": 16, "epochs": 1} | changed)
    assert main(line) == 0


def resume(out, *options):
    return ["train", "--out", out, "--resume", "--epochs", "2", *options]


@pytest.mark.parametrize("place", [".", "elsewhere"])
def test_a_text_run_goes_on_without_being_told_where_its_text_is(project, monkeypatch, place):
    start()
    monkeypatch.chdir(place)
    out = "runs/x" if place == "." else "../runs/x"
    assert main(resume(out)) == 0
    assert len(read_rows(project / "runs/x")) == 2


def test_a_text_that_has_moved_is_told_and_found_where_the_user_says(project, capsys):
    start()
    (project / "squares.txt").rename("elsewhere/squares.txt")
    said = refused(capsys, resume("runs/x"))
    assert f"runs/x: the data of this run are no longer at {project / 'squares.txt'}; " in said
    assert "with --data" in said
    assert main(resume("runs/x", "--data", "elsewhere/squares.txt")) == 0
    assert main([*resume("runs/x")[:-1], "3"]) == 0  # which knows the new place
    assert len(read_rows(project / "runs/x")) == 3


def test_another_text_is_refused_and_its_place_not_kept(project, capsys):
    start()
    before = (project / "runs/x/config.json").read_text()
    (project / "other.txt").write_text(TEXT[::-1])
    said = refused(capsys, resume("runs/x", "--data", "other.txt"))
    assert "other.txt: the text or the tokens differ" in said
    assert (project / "runs/x/config.json").read_text() == before


def test_a_tokenizer_is_found_from_another_folder_too(project, monkeypatch, capsys):
    (content,) = BytePairs.of([TEXT], 300).saved.values()
    (project / "tokenizer.json").write_text(content)
    start(tokenizer="tokenizer.json")
    monkeypatch.chdir("elsewhere")
    assert main(resume("../runs/x")) == 0
    monkeypatch.chdir(project)
    assert main([*resume("runs/x")[:-1], "3", "--tokenizer", "tokenizer.json"]) == 0
    (project / "second.json").write_text(content)
    said = refused(capsys, resume("runs/x", "--tokenizer", "second.json"))
    assert "cannot be resumed with" in said


def test_a_run_of_an_older_version_takes_the_folder_that_was_the_default(project, capsys):
    (project / "data").mkdir()
    shutil.copy("squares.txt", "data/squares.txt")
    start(data="data")
    config = project / "runs/x/config.json"
    content = json.loads(config.read_text())
    del content["data"]
    config.write_text(json.dumps(content))
    assert main(resume("runs/x")) == 0
    assert json.loads(config.read_text())["data"] == str(project / "data")


def test_a_place_that_is_no_text_is_refused(project, capsys):
    start()
    config = project / "runs/x/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"data": [1]}))
    assert "config.json: does not contain the settings" in refused(capsys, resume("runs/x"))


def test_data_that_come_with_a_library_have_no_place(tmp_path):
    assert main(arguments(tmp_path / "x", epochs=1)) == 0
    assert json.loads((tmp_path / "x" / "config.json").read_text())["data"] is None


def test_export_checks_with_the_data_of_the_run(project, monkeypatch, capsys):
    start()
    monkeypatch.chdir("elsewhere")
    capsys.readouterr()
    assert main(["export", "../runs/x", "m.safetensors"]) == 0
    assert "random" not in capsys.readouterr().out
    (project / "squares.txt").unlink()
    assert main(["export", "../runs/x", "n.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"Checking with random tokens, because {project / 'squares.txt'}: no such file" in printed
    )

"""The settings of a run: what is refused, and that the command line has an option for each."""

import dataclasses
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from run_folders import arguments, refused

from amp_lab import Precision
from amp_lab.cli import main, train
from amp_lab.core.errors import RunError
from amp_lab.train.registry import DATASETS
from amp_lab.train.train_options import RunConfig, RunOptions, setting


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset": "mnist"}, "'mnist': .*digits, cifar10, caltech256"),
        ({"dataset": ""}, "value of dataset is empty"),
        ({"model": "resnet51"}, "'resnet51'; similar names: resnet50"),
        ({"model": "fasterrcnn_resnet50_fpn"}, "has no classifier 'fasterrcnn"),
        ({"precision": "fp8"}, "'fp8': .*fp32, tf32, fp16, bf16"),
        ({"batch_size": 0}, "batch size .*at least 1, not 0"),
        ({"batch_size": -4}, "batch size .*at least 1, not -4"),
        ({"batch_size": 33}, "batch size 33 .*larger .* 32 images"),
        ({"batch_size": "many"}, "--batch-size: .*'many'"),
        ({"epochs": 0}, "epochs .*at least 1, not 0"),
        ({"lr": "nan"}, "lr .*positive number, not nan"),
        ({"lr": "inf"}, "lr .*positive number, not inf"),
        ({"lr": 0}, "lr .*positive number, not 0.0"),
        ({"lr": -1}, "lr .*positive number, not -1.0"),
        ({"clip_norm": 0}, "clip norm .*positive number, not 0.0"),
        ({"accumulate": 0}, "accumulate .*at least 1, not 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**63}, "seed must be from 0"),
        ({"image_size": 0}, "image size .*at least 1, not 0"),
        ({"limit": 0}, "limit .*at least 1, not 0"),
        ({"workers": -1}, "workers .*at least 0, not -1"),
        ({"checkpoint_every": 0}, "checkpoint every 0 .*at least 1"),
        ({"device": "tpu9"}, "'tpu9' is not a device"),
        ({"colour": "red"}, "unrecognized arguments: --colour red"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path, capsys, changed, said):
    assert re.search(said, refused(capsys, arguments(tmp_path / "x", **changed)))
    assert not (tmp_path / "x" / "config.json").exists()


def test_without_a_folder_it_is_refused(capsys):
    assert "required: --out" in refused(capsys, ["train"])


def test_a_precision_is_kept_as_text():
    assert type(RunConfig(precision=Precision.BF16).precision) is str


def test_options_are_checked_too(tmp_path):
    with pytest.raises(RunError, match="checkpoint every 0 steps"):
        RunOptions(tmp_path, checkpoint_every=0)


def help_of_train(capsys) -> str:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    return capsys.readouterr().out


def test_the_help_names_every_setting_and_choice(capsys):
    text = help_of_train(capsys)
    for field in dataclasses.fields(RunConfig) + dataclasses.fields(RunOptions):
        assert f"  --{field.name.replace('_', '-')} " in text
        assert field.metadata["help"] != ""
    for choice in [*DATASETS, *Precision]:
        assert choice in text


def test_a_setting_takes_one_field(capsys, monkeypatch):
    @dataclass(frozen=True)
    class Extended(RunConfig):
        weight_decay: float = setting(0.5, "pull towards zero (default: {})", "X")
        nesterov: bool = setting(False, "look ahead")

    monkeypatch.setattr(train, "RunConfig", Extended)
    text = help_of_train(capsys)
    assert "--weight-decay X      pull towards zero (default: 0.5)" in text
    assert "--nesterov            look ahead" in text
    calls = []

    def train_nothing(config, options, *, given: tuple[str, ...], say):
        calls.append((config, given))

    monkeypatch.setattr("amp_lab.train.run.train", train_nothing)
    assert main(["train", "--out", "x", "--weight-decay", "0.25", "--nesterov"]) == 0
    names = ("weight_decay", "nesterov")
    assert calls == [(Extended(weight_decay=0.25, nesterov=True), names)]


def test_the_settings_load_no_torch():
    code = "import sys, amp_lab.train.train_options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""`amp-lab rehearse`: what it prints and draws, and what it refuses in one line."""

import json
import re

import pytest
import torch
from torch import nn

from amp_lab import forecast_inference
from amp_lab.cli import main

MODELS = """
from torch import nn
def net(): return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
def odd(): return nn.Linear(10, 10)
def norm(): return nn.LayerNorm(32)
def frozen(): return net().requires_grad_(False)
def loss(output): return output.square().mean()
"""
INPUT = ("--input", "32,32")


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "my_net.py").write_text(MODELS)
    (tmp_path / "photo.png").write_bytes(b"a photograph")
    monkeypatch.chdir(tmp_path)


def printed(capsys, *arguments: str) -> str:
    assert main(["rehearse", *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_it_prints_a_table_and_the_lines_and_draws_a_picture(capsys, tmp_path):
    out = printed(capsys, "my_net.py:net", *INPUT, "--steps", "3", "--figure", "errors.png")
    assert "Sequential, rehearsed on cpu" in out
    assert "loss in step 3" in out
    assert "convert_to_float8_training" in out
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_formats_and_a_gpu_can_be_named(capsys):
    more = ("--formats", "fp8-rowwise,mxfp4", "--for", "b200", "--format", "json")
    found = json.loads(printed(capsys, "my_net.py:net", *INPUT, *more))
    assert [report["name"] for report in found["formats"]] == ["bf16", "fp8-rowwise", "mxfp4"]
    assert found["gpu"] == "B200"


def test_a_layer_of_no_multiple_stays_in_16_bits(capsys):
    out = printed(capsys, "my_net.py:odd", "--input", "4,10", "--formats", "mxfp8")
    assert re.search(r"Linear: its input size 10 .*multiple of 32 \(mxfp8\)", out)
    assert "mxfp8: no layer can be converted." in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--formats", "fp9"), "format: 'fp9' .*bf16"),
        (("--formats", "fp8,"), "format: '' is unknown; give one of bf16"),
        (("--for", "h2000"), "'h2000' is not in the table of GPUs; the closest are .*h200"),
        (("--for", "cuda"), "'cuda' is not in the table of GPUs"),
        (("--steps", "-1"), "--steps -1: give a number from 0"),
        (("--seeds", "0"), "--seeds 0: give a number from 1"),
        (("--eval", "--steps", "5"), "--steps .*training, .*--eval"),
        (("--figure", "a.txt"), r"--figure 'a.txt': .*\.png .*\.svg"),
        (("--figure", "photo.png"), "photo.png: .*did not write"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, said, capsys):
    assert main(["rehearse", "my_net.py:net", *INPUT, *arguments]) == 2
    assert re.match(f"amp-lab rehearse: {said}", capsys.readouterr().err)


def test_a_model_without_products_is_told(capsys):
    assert main(["rehearse", "my_net.py:norm", *INPUT]) == 2
    assert "LayerNorm has no matmul" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["my_net.py:net", "my_net.py:frozen"])
def test_for_inference_nothing_is_said_of_training(target, capsys):
    out = printed(capsys, target, "--input", "18,32", "--eval")
    assert re.search("Sequential, .*inference on cpu", out)
    assert "error of the output" in out
    for word in ("gradient", "learn", "loss", "pad ", "convert_to_float8_training", "steps"):
        assert word not in out.lower()


def test_steps_are_taken_without_eval_and_none_with_it(capsys):
    """What the refusal advises."""
    assert "loss in step 2" in printed(capsys, "my_net.py:net", *INPUT, "--steps", "2")
    assert "error of the output" in printed(capsys, "my_net.py:net", *INPUT, "--eval")


def test_a_loss_is_not_used_for_inference_and_the_report_says_so(capsys):
    out = printed(capsys, "my_net.py:net", *INPUT, "--eval", "--loss", "my_net.py:loss")
    assert "loss is not used" in out


def test_inference_needs_the_memory_of_a_forward_pass(capsys, monkeypatch):
    layers = (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, values = nn.Sequential(*layers), torch.randn(32, 32)
    needed = forecast_inference(model, values, device_type="cpu", precision="fp32").peak
    monkeypatch.setattr("amp_lab.core.device_facts.memory_bytes", lambda device: needed)
    assert "error of the output" in printed(capsys, "my_net.py:net", *INPUT, "--eval")
    assert main(["rehearse", "my_net.py:net", *INPUT]) == 2
    assert "a step needs" in capsys.readouterr().err
    monkeypatch.setattr("amp_lab.core.device_facts.memory_bytes", lambda device: needed - 1)
    assert main(["rehearse", "my_net.py:net", *INPUT, "--eval"]) == 2
    assert "a forward pass needs" in capsys.readouterr().err

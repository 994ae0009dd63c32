"""`amp-lab advise`: what it prints, that its program runs, and what it refuses in one line."""

import json

import pytest
from cases import some_of

from amp_lab.advisor import session
from amp_lab.cli import main
from amp_lab.core.timing_result import Comparison

pytestmark = pytest.mark.slow

MODELS = """
import torch
from torch import nn
def mlp(width=32): return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
class Language(nn.Sequential):
    def __init__(self): super().__init__(nn.Embedding(50, 16), nn.Linear(16, 50))
    def forward(self, ids, labels):
        print("noise")
        logits = super().forward(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}
def batch(): return {"ids": torch.arange(10).view(2, 5), "labels": torch.arange(10).view(2, 5)}
class Masked(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(16, 4))
    def forward(self, parts):
        assert parts["mask"].unique().tolist() == [0, 1], "no mask"
        return super().forward(parts["x"]) * parts["mask"]
def masked(): return ({"x": torch.randn(8, 16), "mask": torch.arange(8.0)[:, None] % 2},)
def whole(): return mlp(), (torch.randn(8, 16),), {}, lambda output: output.float().abs().mean()
def loss(output): return output.float().square().mean()
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(MODELS)
    (tmp_path / "thesis.tex").write_text("years of work")
    monkeypatch.chdir(tmp_path)

    def timing(functions, **settings):  # no test depends on how fast this machine is
        return Comparison(dict.fromkeys(functions, (1.0, 1.01) * 6), 0, "")

    monkeypatch.setattr(session, "compare", timing)
    monkeypatch.setattr(session, "_SHARE_TO_COMPILE", {"training": 1.0, "inference": 1.0})
    return tmp_path


INPUT = ("--input", "8,16")
WAYS = {
    "a batch that cannot be drawn": ("my_nets:Masked", "--batch", "my_nets:masked"),
    "inputs": ("my_nets:mlp", *INPUT, "--with", "width=16", "--loss", "my_nets:loss"),
    "a file": ("my_nets.py:mlp", *INPUT, "--eval"),
    "a batch": ("my_nets:Language", "--batch", "my_nets:batch", "--loss", ".loss"),
    "ids": ("my_nets:Language", "--input", "int64:2,5<50", "--input", "labels=int64:2,5<50"),
    "all in one": ("my_nets:whole",),
}


@pytest.mark.parametrize("way", some_of(*WAYS))
def test_the_program_that_it_prints_is_whole(models, capsys, way):
    fast = ("--device", "cpu", "--minutes", "0.2", "--format", "json")
    assert main(["advise", *WAYS[way], *fast]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    assert found["programs"].keys() == {"training", "inference"}, found["watch"]
    assert "for i in range(3)" in found["programs"]["training"]  # it ran, or would not be here


def test_for_a_device_that_is_not_here_it_forecasts(models, capsys):
    assert main(["advise", "my_nets:mlp", *INPUT, "--for", "cuda", "--memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "only a run on cuda" in out
    assert "bf16 autocast" in out
    assert "recommended" not in out


def test_for_a_gpu_its_memory_is_the_budget(models, capsys):
    assert main(["advise", "my_nets:mlp", *INPUT, "--for", "rtx-4090"]) == 0
    out = capsys.readouterr().out
    assert "on RTX 4090: a forecast, without a run on this GPU" in out
    assert (
        "On RTX 4090, matmuls in these formats are faster than in fp32: tf32, bf16, fp16, fp8."
        in out
    )
    assert main(["advise", "my_nets:mlp", *INPUT, "--for", "rtx-4090", "--memory", "24GiB"]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("my_nets:mpl", *INPUT), "did you mean"),
        (("my_nets:mlp",), "add an --input"),
        (("my_nets:mlp", "--input", "8,15"), "fails on input"),
        (("my_nets:mlp", *INPUT, "--memory", "24G"), "give bytes"),
        (("my_nets:mlp", *INPUT, "--memory", "9" * 20 + "GiB"), "give 1 byte to 2^62 bytes"),
        (("my_nets:mlp", *INPUT, "--html", "thesis.tex"), "amp-lab did not write it"),
        (("my_nets:mlp", "--input", "9999999999,16", "--device", "cpu"), "a step needs about"),
        (("my_nets:mlp", *INPUT, "--device", "cpu", "--for", "cuda"), "give only one"),
        (("my_nets:mlp", *INPUT, "--for", "banana"), "the table of GPUs: use one of gtx-1080-ti"),
        (("my_nets:mlp", *INPUT, "--for", "h2000"), "the closest are"),
        (("my_nets:mlp", *INPUT, "--device", "xpu"), "is not available"),
        (("my_nets:Language", "--input", "int64:2,5<99", "--input", "labels=int64:2,5"), "rows"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(models, capsys, arguments, said):
    assert main(["advise", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert said in printed.err


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_minutes_are_a_number_above_0(capsys, minutes):
    assert main(["advise", "a:b", "--minutes", minutes]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

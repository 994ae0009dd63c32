"""`amp-lab diff`: what it prints and draws, and what it refuses in one line."""

import json
import re

import pytest
import torch
from diverging_models import AsCompiled, Transposed

from amp_lab.cli import main

MODELS = """
import torch
from torch import nn
def net(): return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
def changed():
    model = net()
    model[1].eps = 1e-3
    return model
def drawn_anew():
    torch.rand(1)
    return net()
def strange(): return nn.Sequential(nn.Flatten(), nn.ReLU())
def raises(): raise ValueError("no")
def no_module(): return 3
def in_bf16(): return net().to(torch.bfloat16)
def in_fp16(): return net().half()
def changed_in_fp16(): return changed().half()
class Determinant(nn.Linear):
    def forward(self, x):
        return torch.linalg.det(super().forward(x))
def determinant(): return nn.Sequential(nn.Tanh(), Determinant(6, 4))
class Cancels(nn.Linear):
    def forward(self, x):
        y = super().forward(x) + 500
        return y - y.mean(-1, keepdim=True)
def cancels(): return Cancels(6, 8)
def cancels_in_fp16(): return cancels().half()
def ctc_loss(y):
    scores = y.log_softmax(-1)[:, None].expand(-1, 2, -1)
    lengths = torch.tensor([4, 4]), torch.tensor([2, 2])
    return nn.functional.ctc_loss(scores, torch.tensor([[1, 2], [2, 1]]), *lengths)
"""
INPUT = ("--input", "4,6")


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "my_pair.py").write_text(MODELS)
    (tmp_path / "photo.png").write_bytes(b"a photograph")
    monkeypatch.chdir(tmp_path)


def printed(capsys, *arguments: str) -> str:
    assert main(["diff", *arguments, *INPUT]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_two_versions_of_a_model(capsys, tmp_path):
    out = printed(capsys, "my_pair.py:net", "my_pair.py:changed")
    assert re.search(r"diverge .*native_layer_norm in '1' \(LayerNorm\)", out)
    assert "B passes (8, 0.001)" in " ".join(out.split())
    assert "do not diverge" in printed(capsys, "my_pair.py:net", "my_pair.py:net")


def test_weights_are_those_of_a_if_asked(capsys):
    out = printed(capsys, "my_pair.py:net", "my_pair.py:drawn_anew")
    assert "differ between A and B" in " ".join(out.split())
    pair = ("my_pair.py:net", "my_pair.py:drawn_anew", "--same-weights")
    assert "do not diverge" in printed(capsys, *pair)


@pytest.mark.parametrize(
    "options",
    [("--precision", "bf16"), ("--batch-sizes", "2,8"), ("--device", "cpu")],
)
def test_one_model_in_two_ways(capsys, options):
    assert "The runs do not diverge" in printed(capsys, "my_pair.py:net", *options)


def test_two_batch_sizes_are_compared_in_one_precision(capsys):
    options = ("--batch-sizes", "2,8", "--precision", "bf16", "--input", "4,6", "--format", "json")
    assert main(["diff", "my_pair.py:net", *options]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["format_a"], read["format_b"]) == ("bf16 on cpu", "bf16 on cpu")


def test_another_op_can_be_named_although_the_outputs_are_the_same(capsys):
    model, x = Transposed(), torch.randn(4, 3, 16)
    torch.testing.assert_close(model(x)[:, :1], model(x[:1]))
    options = ("--input", "4,3,16", "--batch-sizes", "1,4")
    assert main(["diff", "diverging_models:Transposed", *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "difference not measured" in text
    assert "do not match in fp64, because A calls addmm and B calls clone." in text


def test_the_loss_runs_under_autocast_as_in_an_xray(capsys):
    """Autocast runs some losses in fp32 that have no kernel in bf16, as ctc_loss on a CPU."""
    options = ("--precision", "bf16", "--loss", "my_pair.py:ctc_loss")
    assert "The runs do not diverge" in printed(capsys, "my_pair.py:net", *options)


def test_a_model_with_bf16_weights_is_compared_with_itself_in_fp32(capsys):
    options = ("--format", "json", "--input", "bfloat16:4,6")
    for precision, formats in (("fp32", ("bf16", "fp32")), ("bf16", ("fp32", "bf16"))):
        assert main(["diff", "my_pair.py:in_bf16", "--precision", precision, *options]) == 0
        read = json.loads(capsys.readouterr().out)
        assert (read["format_a"], read["format_b"]) == tuple(f"{f} on cpu" for f in formats)
        last = read["growth"][-1]
        errors = {formats[0]: last["a"], formats[1]: last["b"]}
        assert errors["bf16"] > 100 * errors["fp32"]


@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["fp32 first", "fp32 last"])
def test_a_model_is_compared_with_its_copy_in_16_bits_whatever_the_inputs_are_in(
    capsys, low, given, order
):
    models, formats = ["my_pair.py:net", f"my_pair.py:in_{low}"], ["fp32", low]
    if order == "fp32 last":
        models.reverse()
        formats.reverse()
    options = ("--input", f"{given}:4,6", "--format", "json")
    assert main(["diff", *models, *options]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["format_a"], read["format_b"]) == tuple(f"{f} on cpu" for f in formats)
    assert read["first"] is None
    assert read["matched"] == 4
    last = read["growth"][-1]
    errors = dict(zip(formats, (last["a"], last["b"]), strict=True))
    if order == "fp32 first":  # else fp32 is compared with weights that are rounded
        assert errors[low] > 100 * errors["fp32"]
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    assert read["remarks"] == [
        f"The floating-point inputs of {run} were cast to {form}, the dtype of its weights."
        for run, form in zip("AB", formats, strict=True)
        if form != names[given]
    ]


def test_a_change_is_found_between_models_of_other_dtypes(capsys):
    out = printed(capsys, "my_pair.py:net", "my_pair.py:changed_in_fp16")
    assert re.search(r"diverge .*native_layer_norm in '1' \(LayerNorm\)", out)


@pytest.mark.parametrize("options", [("my_pair.py:cancels_in_fp16",), ("--precision", "bf16")])
def test_a_large_error_is_not_said_to_be_explained(capsys, options):
    out = printed(capsys, "my_pair.py:cancels", *options)
    assert "do not diverge" not in out
    assert re.search(r"grows most at sub .*\(Cancels\)", " ".join(out.split()))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_model_in_16_bits_takes_inputs_in_fp32_too(capsys, precision):
    out = printed(capsys, "my_pair.py:in_fp16", "--precision", precision)
    assert "The runs do not diverge" in out
    assert bool(re.search("inputs of A .*cast to fp16", out)) == (precision == "fp32")


@pytest.mark.parametrize("model", ["net", "in_bf16"])
def test_a_compiled_run_says_that_gradients_are_not_compared(capsys, monkeypatch, model):
    monkeypatch.setattr(torch, "compile", AsCompiled)
    out = printed(capsys, f"my_pair.py:{model}", "--compile")
    assert re.search(r"A \(eager\) .*B \(compiled\).* 1 module in both", out)
    assert "Gradients were not compared" in out
    assert bool(re.search("of both .*cast to bf16", out)) == (model == "in_bf16")


def test_as_json_and_drawn(capsys, tmp_path):
    files = ("--format", "json", "--figure", str(tmp_path / "growth.png"))
    read = json.loads(printed(capsys, "my_pair.py:net", "my_pair.py:changed", *files))
    assert read["first"]["module"] == "1"
    assert read["matched"] == len(read["growth"]) == 4
    for name in ("growth.png", "growth.svg", "growth.png", "growth.svg"):  # an own one is replaced
        printed(capsys, "my_pair.py:net", "my_pair.py:changed", "--figure", name)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "growth.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("net",), "no second run"),
        (("net", "strange"), "nothing to compare"),
        (("net", "raises"), "ValueError: no"),
        (("net", "no_module"), "return an nn.Module"),
        (("determinant", "--precision", "fp16"), "at _linalg_det in '1' (Determinant)"),
        (("determinant", "--precision", "bf16"), "run B raises NotImplementedError: "),
        (("net", "--batch-sizes", "4"), "give two different sizes"),
        (("net", "--batch-sizes", "4,4"), "give two different sizes"),
        (("net", "--batch-sizes", "a"), "give two different sizes"),
        (("net", "--batch-sizes", "4,8", "--compile"), "not both"),
        (("net", "changed", "--compile"), "leave out B"),
        (("net", "--precision", "bf16", "--same-weights"), "to a second model"),
        (("net", "--device", "banana"), "is not a device"),
        (("net", "changed", "--figure", "growth.txt"), "ending with .png or .svg"),
        (("net", "changed", "--figure", "nowhere/growth.png"), "cannot be written"),
        (("net", "changed", "--figure", "photo.png"), "amp-lab did not write it"),
        (("net", "--batch-sizes", "4,99999999999"), "a step needs about"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, arguments, said):
    named = [f"my_pair.py:{a}" if a.isidentifier() and a[0] != "-" and a not in
             ("fp16", "bf16", "banana") else a for a in arguments]  # fmt: skip
    assert main(["diff", *named, *INPUT]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error

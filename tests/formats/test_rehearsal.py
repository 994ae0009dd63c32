"""Models that are taken through formats below 16 bits."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys

import pytest
import torch
from cases import some_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from amp_lab import rehearse
from amp_lab.core.errors import NumericsError, OptionError, TraceError
from amp_lab.formats import (
    ELEMENTS,
    Format,
    quantized_linear,
    scaling,
    torchao_code,
    torchao_inference,
)
from amp_lab.formats.interception import intercepted
from amp_lab.formats.rehearsal_result import TrainingReport
from amp_lab.model_call import ModelCall
from amp_lab.recipes import TRAINING, Recipe, Step
from amp_lab.tracing.fake_device import errors_not_logged

FORMAT_NAMES = ("fp8", "fp8-rowwise", "mxfp8", "mxfp4", "nvfp4")


def mean_square(output):
    return output.square().mean()


def chain(*sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())][:-1])


class Attention(nn.Module):
    """A transformer's block on tokens, with a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = self.head(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Residual(nn.Module):
    """Layers without a bias, around which the input goes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(4)])

    def forward(self, x):
        for part in self.parts:
            x = x + torch.tanh(part(x))
        return x


MODELS = {
    "perceptron": (lambda: chain(64, 96, 96, 32), lambda: (torch.randn(64, 64),)),
    "attention": (Attention, lambda: (torch.randint(0, 64, (4, 32)),)),
    "residual": (Residual, lambda: (torch.randn(32, 64),)),
}


@pytest.mark.filterwarnings("ignore")  # of torchao's own
@pytest.mark.parametrize("form", ["fp8", "fp8-rowwise", "mxfp8"])
@pytest.mark.parametrize("name", some_of(*MODELS))
def test_a_model_learns_as_under_torchaos_own_emulation(name, form):
    pytest.importorskip("torchao")
    make, inputs = MODELS[name]
    torch.manual_seed(1)
    loss_fn = None if name == "attention" else mean_square
    model = make()
    for module in model.modules():
        if form == "mxfp8" and isinstance(module, nn.Linear):
            module.bias = None  # torchao 0.18 drops it (pytorch/ao 4846)
    call = ModelCall(model, inputs(), {}, loss_fn or (lambda loss: loss))
    ours, theirs = (Step(call, Recipe(TRAINING), lr=1e-3) for _ in range(2))
    exec(torchao_code.lines(form, []), {"model": theirs.model})
    theirs.names["optimizer"] = torch.optim.AdamW(theirs.model.parameters(), lr=1e-3)

    def matmul(values, weight):
        return quantized_linear(values, weight, form)

    losses = []
    for _ in range(10):
        with intercepted(ours.model, lambda layer: matmul):
            losses.append((float(ours()), float(theirs())))
    assert losses[-1][0] < losses[0][0]
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-3)


def verdicts(found):
    return {report.name: report.verdict for report in found.formats}


class Scaled(nn.Module):
    """A layer whose inputs and outputs have sizes of their own, and count as much as each other."""

    def __init__(self, of_input, of_output, weight=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64, bias=False)
        self.of_input, self.of_output = of_input, of_output
        with torch.no_grad():
            self.layer.weight.mul_(weight)

    def forward(self, values):
        return (self.layer(values * self.of_input) * self.of_output).sin().sum()


def test_outlier_channels_break_a_scale_that_they_share_and_no_block():
    channels = torch.where(torch.arange(64) < 32, 1e6, 1.0)  # a block of them
    model = Scaled(channels, 1.0, weight=1 / channels)
    found = rehearse(model, torch.randn(256, 64), formats=FORMAT_NAMES)
    for form in ("fp8", "fp8-rowwise"):
        assert found.of("layer", form).left_out.endswith("become 0")
    assert found.of("layer", "fp8").decibels["forward"] < 10
    for form in ("mxfp8", "mxfp4"):
        assert not found.of("layer", form).left_out
    assert found.recommended == "mxfp8"


def test_tiny_gradients_are_named():
    outputs = torch.where(torch.arange(64) < 32, 1.0, 1e-11)
    found = rehearse(Scaled(1.0, outputs), torch.randn(256, 64), formats=FORMAT_NAMES)
    for form in ("fp8", "nvfp4"):
        report = found.of("layer", form)
        assert (
            report.left_out
            == f"{report.shares['gradient']['flushed']:.0%} of its gradient become 0"
        )
        assert report.shares["gradient"]["flushed"] >= 0.5
    for form in ("fp8-rowwise", "mxfp8", "mxfp4"):
        assert not found.of("layer", form).left_out


class Routed(nn.Module):
    """A language model's block with experts, and with names as in real models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(64, 64)
        self.q_proj, self.k_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.time_embedding = nn.Sequential(nn.Linear(64, 64), nn.SiLU())
        self.gate, self.gate_proj = nn.Linear(64, 16), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 64)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        x = self.q_proj(x) + self.k_proj(x)
        x = x + self.time_embedding(x)
        x = self.gate_proj(x) * self.gate(x).softmax(-1).sum(-1, keepdim=True)
        return self.lm_head(x)


def test_embeddings_routers_and_the_head_stay_in_bf16_and_the_first_projection_does_not():
    tokens = torch.randint(0, 64, (4, 32))
    found = rehearse(Routed(), tokens, formats=("fp8",), loss_fn=mean_square)
    left = {r.layer.name: r.left_out for r in found.layers if r.format == "fp8" and r.left_out}
    assert left == {
        "time_embedding.0": "an embedding usually stays in bf16",
        "gate": "a router usually stays in bf16",
        "lm_head": "the head usually stays in bf16",
    }


def test_blocks_of_many_sizes_break_nvfp4_where_mx_holds():
    sizes = torch.logspace(-4, 4, 8).repeat_interleave(32)[:, None]  # of blocks of samples
    found = rehearse(Scaled(sizes, 1 / sizes), torch.randn(256, 64), formats=FORMAT_NAMES[2:])
    assert found.of("layer", "nvfp4").left_out.endswith("become 0")
    for form in ("mxfp8", "mxfp4"):
        assert not found.of("layer", form).left_out


def test_layers_are_left_out_by_shape_place_and_size_and_the_others_are_converted():
    model = chain(64, 128, 128, 128, 80)
    found = rehearse(model, torch.randn(32, 64), formats=("fp8", "mxfp8"), loss_fn=mean_square)
    assert "reads the inputs" in found.of("0", "fp8").left_out
    assert found.of("6", "mxfp8").left_out == "its output size 80 is not a multiple of 32"
    assert [r.layers for r in found.formats] == [4, 2, 2]
    on_gpu = rehearse(model, torch.randn(32, 64), formats=("fp8", "mxfp8"), gpu="h100")
    assert on_gpu.of("2", "fp8").left_out.startswith("too small")
    assert verdicts(on_gpu) == {
        "bf16": "accurate enough in one step",
        "fp8": "no layer can be converted",
        "mxfp8": "H100 has no matmuls in this format",
    }
    assert on_gpu.recommended is None


@pytest.mark.parametrize("training", [True, False])
def test_a_format_without_a_library_is_rehearsed_and_the_report_says_what_is_missing(training):
    model = chain(64, 64, 64, 64, 64).train(training)
    found = rehearse(model, torch.randn(32, 64), formats=("mxfp6-e2m3",), gpu="b200")
    assert (found.recommended, found.program) == ("mxfp6-e2m3", "")
    assert "torchao 0.18 has no conversion to mxfp6-e2m3, so there is no code below." in found.watch
    assert (
        "mxfp6-e2m3: no forecast, because this report has no formula for this format."
        in found.watch
    )
    assert found.formats[1].gain is None


def test_a_format_is_one_row(monkeypatch):
    """What CONTRIBUTING says of adding one: here FP8 in blocks of 64."""
    form = Format("mxfp8-64", ELEMENTS["e4m3"], (1, 64), "e8m0")
    monkeypatch.setitem(scaling.FORMATS, form.name, form)
    for model in (chain(64, 64, 64, 64, 64), chain(64, 64, 64, 64, 64).eval()):
        found = rehearse(model, torch.randn(64, 64), formats=("mxfp8-64", "fp8"), gpu="h100")
        assert verdicts(found)["mxfp8-64"].startswith(("accurate enough", "passes"))
        assert "mxfp8-64" in str(found)


def test_training_beside_bf16_and_all_that_is_printed():
    torch.manual_seed(1)
    values = torch.randn(64, 64)
    found = rehearse(chain(64, 64, 64, 64, 64), values, loss_fn=mean_square, steps=5, seeds=2)
    assert found.recommended == "fp8-rowwise"
    assert all(len(report.losses) == 2 for report in found.formats)
    assert len({tuple(report.losses) for report in found.formats}) == 6  # no two are the same
    text = str(found)
    for words in (
        "loss in step 5",
        "fp8-rowwise: accurate enough.",
        'LEFT_OUT = {"0", "6"}',
        "SQNR",
    ):
        assert words in text
    plain = json.loads(found.to_json())
    assert plain["layers"][1]["layer"]["name"] == "0"
    assert plain["layers"][1]["decibels"]["forward"] > 25
    assert "```python" in found.to_markdown()
    assert "<pre>" in found._repr_html_()


def test_a_format_that_does_not_learn_as_bf16_does_is_told():
    model = chain(64, 64, 64, 64, 64)
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(40)  # rounding is chaos behind four of these
    forms = ("mxfp8", "mxfp4")
    found = rehearse(model, torch.randn(64, 64), loss_fn=mean_square, formats=forms, steps=20)
    assert verdicts(found)["mxfp8"] == "accurate enough"
    assert "last loss differs from that of bf16" in verdicts(found)["mxfp4"]


@pytest.mark.parametrize(
    ("off", "of_bf16", "verdict"),
    [
        (0.09, 0.0, "accurate enough in one step"),
        (0.24, 0.0, "its loss is off by +24%"),
        (-0.24, 0.0, "its loss is off by -24%"),
        (-0.24, 0.2, "accurate enough in one step"),
    ],
)
def test_without_steps_no_learning_is_promised_and_the_loss_counts(off, of_bf16, verdict):
    report = TrainingReport("nvfp4", 4, 2, loss_off=off, gradients_off=0.16)
    report.judge(TrainingReport("bf16", 6, 0, loss_off=of_bf16))
    assert report.verdict == verdict


def test_without_steps_gradients_may_be_half_off():
    for off, holds in ((0.49, True), (0.51, False)):
        report = TrainingReport("nvfp4", 4, 2, loss_off=0.0, gradients_off=off)
        report.judge(TrainingReport("bf16", 6, 0, loss_off=0.0))
        assert (report.verdict == "accurate enough in one step") is holds


def test_what_was_looked_at_without_steps_is_printed():
    text = str(rehearse(chain(64, 64), torch.randn(64, 64), loss_fn=mean_square, formats=("fp8",)))
    assert "fp8: accurate enough in one step." in text
    assert "the gradients differ from fp32 by at most 50% and the loss by at most 10%." in text
    assert "Learning was not tested" in text


def test_the_printed_limits_are_1_5_times_the_errors_of_bf16_if_these_are_large():
    found = rehearse(chain(64, 64), torch.randn(64, 64), loss_fn=mean_square, formats=("fp8",))
    bf16 = TrainingReport("bf16", 6, 0, loss_off=-0.2, gradients_off=0.4)
    text = str(dataclasses.replace(found, formats=[bf16, *found.formats[1:]]))
    assert "the gradients differ from fp32 by at most 60% and the loss by at most 30%." in text


def test_the_model_is_untouched_and_two_rehearsals_are_the_same():
    model, values = chain(32, 32, 32), torch.randn(32, 32)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    first = rehearse(model, values, loss_fn=mean_square, formats=("mxfp4",), steps=3)
    state = torch.random.get_rng_state()
    again = rehearse(model, values, loss_fn=mean_square, formats=("mxfp4",), steps=3)
    assert str(first) == str(again)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_convolutions_and_what_torchao_does_not_convert():
    torch.manual_seed(0)
    parts = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(32 * 64, 16))
    found = rehearse(model, torch.randn(16, 16, 8, 8), formats=("fp8",), loss_fn=mean_square)
    assert found.of("2", "fp8").layer.kind == "convolution"
    what = "torchao's code converts only nn.Linear, so 2 of 3 layers stay as they are."
    assert what in found.watch


class Tagger(nn.Module):
    """What is rehearsed between recurrent layers, which are not, and attention without weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(32, 32), nn.LSTM(32, 32)
        self.experts, self.head = nn.Parameter(torch.randn(2, 64, 32)), nn.Linear(64, 64)

    def forward(self, values):
        values = self.second(self.first(values)[0])[0]
        values = values + (values @ values.mT).softmax(-1) @ values
        ends = torch.tensor([0, 32], dtype=torch.int32)  # the first expert is given nothing
        return self.head(F.grouped_mm(values, self.experts.transpose(-2, -1), offs=ends))


def test_transposed_experts_are_rehearsed_and_what_is_not_is_told():
    found = rehearse(Tagger(), torch.randn(32, 32), formats=("mxfp8",), loss_fn=mean_square)
    layers = [report.layer for report in found.layers if report.format == "mxfp8"]
    assert [(one.name, one.inner, one.outer) for one in layers] == [
        ("experts", 32, 64),
        ("head", 64, 64),
    ]
    what = "lstm with first.weight_ih_l0, second.weight_ih_l0"
    assert [line for line in found.watch if "Not rehearsed" in line] == [
        f"Not rehearsed: {what}. torch computes this op in fp32."
    ]
    with pytest.raises(NumericsError, match="lstm with weight_ih_l0"):
        rehearse(nn.LSTM(32, 32), torch.randn(4, 32), loss_fn=lambda output: output[0].sum())


def test_values_that_are_not_finite_are_kept_and_counted():
    values = torch.randn(32, 64)
    values[0, 0] = float("nan")
    found = rehearse(chain(64, 64), values, loss_fn=mean_square, formats=("mxfp8",))
    report = found.of("0", "mxfp8")
    assert report.shares["input"]["nonfinite"] == pytest.approx(1 / (32 * 64))
    assert re.match(r"a share of 0\.00049 of its input is not finite", report.left_out)


def test_what_cannot_be_rehearsed_is_told_in_a_line():
    values = torch.randn(4, 64)
    with pytest.raises(NumericsError, match="'fp9' is unknown; give one of"):
        rehearse(chain(64, 64), values, formats=("fp9",))
    with pytest.raises(OptionError, match=r"'a1000' is not in the table .* a100"):
        rehearse(chain(64, 64), values, gpu="a1000")
    with pytest.raises(NumericsError, match="LayerNorm has no matmul"):
        rehearse(nn.LayerNorm(64), values)
    with pytest.raises(NumericsError, match="ReLU has no trainable weight"):
        rehearse(nn.ReLU(), values)
    with pytest.raises(TraceError, match=r"fp32 step: .*shapes"):
        rehearse(chain(32, 64), values)
    with pytest.raises(OptionError, match="steps=-1"):
        rehearse(chain(64, 64), values, steps=-1)


def torch_takes(rows: int) -> bool:
    """Whether the matmul in FP8 of a GPU sums over so many rows, by torch's own check."""
    with FakeTensorMode(), errors_not_logged():
        left, right = (
            torch.empty(64, rows, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2)
        )
        scale = torch.ones((), device="cuda")
        try:
            torch._scaled_mm(left, right.T, scale, scale, out_dtype=torch.bfloat16)
        except RuntimeError as error:
            return "divisible by 16" not in str(error)
    return True


@pytest.mark.parametrize(("batch", "tokens"), [(2, 25), (2, 24), (16, 25), (4, 4)])
def test_a_gradient_that_sums_over_rows_of_no_multiple_is_left_out_with_the_remedy(batch, tokens):
    """torchao's forward runs for them, and its backward raises."""
    found = rehearse(chain(64, 96, 64), torch.randn(batch, tokens, 64), formats=("bf16", "fp8"))
    reasons = {r.layer.name: r.left_out for r in found.layers if r.format == "fp8"}
    takes = torch_takes(batch * tokens)
    assert all(("pad them to a multiple" in reason) == (not takes) for reason in reasons.values())
    if not takes:
        assert f"sums over {batch * tokens} rows (batch x tokens): pad them" in next(
            iter(reasons.values())
        )


def test_a_recipe_whose_lines_fail_is_not_recommended(monkeypatch):
    """The next one is, and where none runs no lines are printed."""

    def failure(call, code, fails):
        return "AssertionError: of torchao" if any(name in code for name in fails) else ""

    model, values = chain(64, 64, 64, 64, 64), torch.randn(64, 64)
    expected = {(): "fp8-rowwise", ("rowwise",): "fp8", ("rowwise", "tensorwise"): None}
    for fails, best in expected.items():
        monkeypatch.setattr(
            torchao_code, "failure", lambda call, code, fails=fails: failure(call, code, fails)
        )
        found = rehearse(model, values, formats=("fp8", "fp8-rowwise"), loss_fn=mean_square)
        assert found.recommended == best
        assert bool(found.program) == (best is not None)
        for name in ("fp8-rowwise", "fp8")[: len(fails)]:
            assert any(
                line.startswith(f"{name} is not recommended, because ") for line in found.watch
            )


NAMES = [f"encoder.layers.{i}.attention.out_proj" for i in range(9)]


@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize("names", [[], ["head"], NAMES[:2], NAMES], ids=len)
def test_the_printed_lines_are_as_ruff_formats_them(form, names):
    check_format(torchao_code.lines(form, names))
    check_format(torchao_inference.lines(form, names))


@pytest.mark.parametrize("length", [88, 89])
def test_a_set_of_names_is_one_line_up_to_88_characters(length):
    before = 'LEFT_OUT = {"'
    code = torchao_code.lines("fp8", ["x" * (length - len(before + '"}'))])
    assert ('LEFT_OUT = {"' in code) == (length == 88)
    check_format(code)


def check_format(code: str) -> None:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "88", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=True)
    assert done.stdout == code


@pytest.mark.parametrize("name", ['a"b', "a\\b", "größe"])
def test_any_name_of_a_module_can_be_left_out(name):
    code = f"LEFT_OUT = {torchao_code.set_of([name, 'head'])}"
    names: dict = {}
    exec(code, names)
    assert names["LEFT_OUT"] == {name, "head"}

"""Models that are taken through formats below 16 bits for inference."""

import copy
import itertools
import json
import re
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from amp_lab import rehearse
from amp_lab.core.errors import NumericsError, OptionError, TraceError
from amp_lab.core.gpus import gpu_of
from amp_lab.formats import format_of, quantize, torchao_inference
from amp_lab.formats.rehearsal_result import InferenceReport
from amp_lab.formats.roofline import forward_s
from amp_lab.model_call import ModelCall
from amp_lab.tracing.fake_device import errors_not_logged

FORMAT_NAMES = ("fp8", "fp8-rowwise", "mxfp8", "mxfp4", "nvfp4")
of_torchao = pytest.mark.filterwarnings("ignore")  # of its own


def chain(*sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    parts = [part for layer in layers for part in (layer, nn.GELU())]
    return nn.Sequential(*parts[:-1]).eval()


def verdicts(found):
    return {report.name: report.verdict for report in found.formats}


def test_only_the_forward_matmul_and_the_output_count():
    """18 rows are no multiple of 16: only a gradient of the weight would sum over them."""
    found = rehearse(chain(64, 96, 64), torch.randn(18, 64))
    assert all(set(report.decibels) == {"forward"} for report in found.layers)
    assert not any(report.left_out for report in found.layers)
    assert all(set(report.shares) == {"input", "weight"} for report in found.layers)
    for text in (str(found), found.to_markdown(), found._repr_html_()):
        for word in ("gradient", "learn", "loss", "pad ", "step", "convert_to_float8_training"):
            assert word not in text.lower(), word
        assert "error of the output" in text
        assert "rehearsed for inference on cpu" in text
    written = json.loads(found.to_json())
    assert set(written["formats"][0]) == {
        "name",
        "layers",
        "left_out",
        "gain",
        "verdict",
        "output_off",
    }


def test_the_mode_of_the_model_decides_unless_the_use_is_named():
    model, values = chain(64, 64), torch.randn(16, 64)
    assert hasattr(rehearse(model, values, formats=()).formats[0], "output_off")
    assert hasattr(rehearse(model.train(), values, formats=()).formats[0], "loss_off")
    named = rehearse(model, values, formats=(), use="inference")
    assert hasattr(named.formats[0], "output_off")
    assert model.training
    named = rehearse(model.eval(), values, formats=(), use="training")
    assert hasattr(named.formats[0], "loss_off")
    with pytest.raises(OptionError, match=r"use='serving' is unknown; .*training, inference"):
        rehearse(model, values, use="serving")


def test_steps_of_inference_are_refused_and_what_the_refusal_advises_works():
    model, values = chain(64, 64), torch.randn(16, 64)
    with pytest.raises(OptionError, match=r'use="training", .*steps'):
        rehearse(model, values, formats=(), steps=2)
    assert rehearse(model, values, formats=(), steps=2, use="training").formats[0].losses
    rehearse(model, values, formats=())


@pytest.mark.parametrize(
    ("off", "of_bf16", "verdict"),
    [
        (0.29, 0.0, "passes the check"),
        (0.31, 0.0, "its output is off by 31%"),
        (0.31, 0.25, "passes the check"),
        (float("nan"), 0.0, "its output is not finite"),
        (None, 0.0, "different shapes"),
        (0.29, None, "passes the check"),
    ],
)
def test_the_verdict_goes_by_the_error_of_the_output(off, of_bf16, verdict):
    report = InferenceReport("nvfp4", 4, 2, output_off=off)
    report.judge(InferenceReport("bf16", 6, 0, output_off=of_bf16))
    assert verdict in report.verdict
    assert report.passes == verdict.startswith("passes")


def test_the_error_is_that_of_the_whole_output():
    """Against the same model with each layer's matmul rounded by hand."""
    model, values = chain(64, 64, 64), torch.randn(32, 64)
    found = rehearse(model, values, formats=("mxfp4",))
    with torch.no_grad():
        exact, x = model(values), values
        for layer in model:
            if isinstance(layer, nn.Linear):
                x = quantize(x, "mxfp4") @ quantize(layer.weight, "mxfp4").T + layer.bias
            else:
                x = layer(x)
    expected = float((x - exact).norm() / exact.norm())
    assert found.formats[1].output_off == pytest.approx(expected, rel=1e-4)
    assert f"{100 * expected:.2g} %" in str(found)
    assert "from fp32 by at most 30% on these inputs" in str(found)


class Two(nn.Module):
    """Two layers that read the same input."""

    def __init__(self, inner, *outer):
        super().__init__()
        self.a, self.b = (nn.Linear(inner, size) for size in outer)

    def forward(self, values):
        return self.a(values), {"b": self.b(values)}


def test_the_outer_size_is_a_multiple_of_16_in_every_format():
    found = rehearse(Two(64, 48, 40).eval(), torch.randn(5, 64))
    for form in FORMAT_NAMES:
        assert found.of("a", form).left_out == ""
        assert found.of("b", form).left_out == "its output size 40 is not a multiple of 16"
    trained = rehearse(Two(64, 48, 40), torch.randn(32, 64), loss_fn=lambda out: out[0].sum())
    assert trained.of("a", "mxfp8").left_out == "its output size 48 is not a multiple of 32"
    found = rehearse(Two(48, 64, 64).eval(), torch.randn(5, 48))
    assert found.of("a", "mxfp8").left_out == "its input size 48 is not a multiple of 32"
    assert found.of("a", "nvfp4").left_out == ""


@of_torchao
@pytest.mark.parametrize("inner", [8, 16, 24, 32])
@pytest.mark.parametrize("outer", [8, 16, 24, 32])
def test_fp8_fits_the_weights_that_torchao_converts(inner, outer):
    utils = pytest.importorskip("torchao.quantization.utils")
    found = rehearse(nn.Linear(inner, outer).eval(), torch.randn(3, inner), formats=("fp8",))
    fits = not found.of("Linear", "fp8").left_out
    assert fits == utils._fp8_mm_compat(torch.empty(outer, inner))


@pytest.mark.parametrize(("rows", "inner", "outer"), [(5, 64, 48), (5, 64, 40), (16, 40, 64)])
def test_the_layers_that_fit_are_those_that_torchs_kernel_takes(rows, inner, outer):
    """By torch's own check of the matmul in FP8 of a GPU."""
    model = chain(inner, outer)
    fits = not rehearse(model, torch.randn(rows, inner)).of("0", "fp8").left_out
    with FakeTensorMode(), errors_not_logged():
        left = torch.empty(rows, inner, device="cuda", dtype=torch.float8_e4m3fn)
        right = torch.empty(outer, inner, device="cuda", dtype=torch.float8_e4m3fn)
        scale = torch.ones((), device="cuda")
        try:
            torch._scaled_mm(left, right.T, scale, scale, out_dtype=torch.bfloat16)
            takes = True
        except RuntimeError as error:
            takes = "divisible by 16" not in str(error)
    assert fits == takes


def test_the_usual_noise_is_that_of_the_forward_matmul():
    """For training, E5M2 gradients make it 25 dB in FP8: this layer would be within 6 dB of it."""
    model = chain(64, 64)
    channels = torch.where(torch.arange(64) < 1, 2.5e4, 1.0)
    with torch.no_grad():
        model[0].weight.div_(channels)
    found = rehearse(model, torch.randn(64, 64) * channels, formats=("fp8",))
    report = found.of("0", "fp8")
    assert 19 < report.decibels["forward"] < 22
    assert re.match(r"forward: \d+ dB instead of the usual 2[89] dB", report.left_out)


def gain_of(form: str, *size: int) -> float:
    """The forecast for an H100."""
    bf16_s, form_s = (forward_s(gpu_of("h100"), format_of(name), *size) for name in ("bf16", form))
    return bf16_s / form_s


def test_a_forecast_is_that_of_inference():
    model, rows = chain(64, 64), 8
    found = rehearse(model, torch.randn(rows, 64), formats=("fp8",), gpu="h100")
    gain = gain_of("fp8", rows, 64, 64)
    assert re.match(f"too small: .* {gain:.2f}x$", found.of("0", "fp8").left_out)
    (row,) = (line for line in str(found).splitlines() if line.startswith("error of the output"))
    assert row.split()[-1] == "-"  # no layer is left that could have an error
    values = torch.randn(16, 2048)
    on_gpu = rehearse(chain(2048, 4096), values, formats=("fp8-rowwise",), gpu="h100")
    expected = gain_of("fp8-rowwise", 16, 2048, 4096)
    assert on_gpu.formats[1].gain == pytest.approx(expected)
    assert f"{expected:.2f}x" in str(on_gpu)


def test_a_frozen_model_is_rehearsed_and_nothing_of_it_changes():
    model, values = chain(32, 32, 32).requires_grad_(False), torch.randn(8, 32)
    before = copy.deepcopy(model.state_dict())
    first = rehearse(model, values)
    state = torch.random.get_rng_state()
    assert str(rehearse(model, values)) == str(first)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    with pytest.raises(NumericsError, match="no trainable weight"):
        rehearse(model, values, use="training")


class Returning(nn.Module):
    """A layer, and what a function makes of its output."""

    def __init__(self, made):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.made = nn.Linear(64, 64), made

    def forward(self, values):
        return self.made(self.layer(values))


def test_outputs_that_cannot_be_compared():
    values = torch.randn(16, 64)
    with pytest.raises(NumericsError, match="Returning returns no finite"):
        rehearse(Returning(lambda x: x.argmax(-1)).eval(), values)
    model = Returning(lambda x: x[x > 0]).eval()
    bits = rehearse(model, values, formats=("mxfp4",))
    assert "different shapes" in verdicts(bits)["mxfp4"]
    assert bits.recommended is None
    with pytest.raises(TraceError, match=r"Sequential .*fp32 forward pass: .*shapes"):
        rehearse(chain(32, 64), values)


def test_what_is_not_finite_in_fp32_is_not_compared():
    """Logits of words that must not come are masked with -inf."""
    masked = torch.arange(64) < 16
    model = Returning(lambda x: x.masked_fill(masked, float("-inf"))).eval()
    found = rehearse(model, torch.randn(16, 64), formats=("fp8-rowwise",))
    assert verdicts(found)["fp8-rowwise"] == "passes the check"
    assert 0 < found.formats[1].output_off < 0.1
    assert any(re.match(r"0\.25 of the output .*not finite", line) for line in found.watch)


def test_an_output_that_bf16_spoils_is_told():
    model = Returning(lambda x: (1e3 * x).sin()).eval()
    found = rehearse(model, torch.randn(16, 64), formats=("fp8",))
    (said,) = (line for line in found.watch if "so a passed check says little" in line)
    assert said.startswith(
        f"In bf16, the output is already off by {found.formats[0].output_off:.0%} "
    )
    limit = 1.5 * found.formats[0].output_off
    assert f"the output differs from fp32 by at most {limit:.0%} on these inputs" in str(found)


class Experts(nn.Module):
    """Views of a parameter, which no gradient goes through, and a layer that has its own kernel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.Parameter(torch.randn(2, 64, 64))
        self.block = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)

    def forward(self, values):
        return self.block(values @ self.weights[0] + F.linear(values, self.weights[1]))


def test_the_layers_are_those_that_training_has():
    """Without gradients torch would compute the block at once."""
    values = torch.randn(2, 16, 64)
    found = [rehearse(Experts(), values, formats=("fp8",), use=use) for use in USES]
    names = [{report.layer.name for report in one.layers} for one in found]
    assert names[0] == names[1] == {"weights", "block.linear1", "block.linear2"}
    assert [line for line in found[0].watch if "Not rehearsed" in line] == [
        line for line in found[1].watch if "Not rehearsed" in line
    ]


USES = ("training", "inference")


class Captioned(nn.Module):
    """A model with ids, a structure and a flag among its inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.image = nn.Embedding(32, 64), nn.Linear(64, 64)
        self.up, self.down, self.head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 32)

    def forward(self, ids, *, images, scale=None):
        x = self.words(ids) + self.image(images["pixels"][0])
        x = x + self.down(F.gelu(self.up(x)))
        return {"logits": self.head(x)}


def captioned():
    torch.manual_seed(1)
    ids, pixels = torch.randint(0, 32, (3, 5)), torch.randn(3, 5, 64)
    return Captioned().eval(), (ids,), {"images": {"pixels": [pixels]}, "scale": None}


def encoder():
    torch.manual_seed(1)
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(block, 2).eval(), (torch.randn(2, 5, 64),), {}


CONVERTED = {
    captioned: {"up", "down"},  # the others read the inputs, and are the head
    encoder: {"layers.0.linear2", "layers.1.linear1"},
}


def scaled_matmul(left, right, scale_a, scale_b, bias=None, out_dtype=None, **options):
    out = (left.float() * scale_a) @ (right.float() * scale_b)
    return (out if bias is None else out + bias).to(out_dtype)


@pytest.fixture
def hardware(monkeypatch):
    """torchao without its checks of the GPU, and with emulated kernels where the CPU has none."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    mx = pytest.importorskip("torchao.prototype.mx_formats.inference_workflow")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    monkeypatch.setattr(mx, "is_sm_at_least_100", lambda: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_matmul)

    def matmul(a, b, op, bias=None):
        out = a.dequantize(torch.float32) @ b.dequantize(torch.float32)
        return (out if bias is None else out + bias).to(a.orig_dtype)

    monkeypatch.setattr(nvfp4, "_addmm_nvfp4_dispatch", matmul)
    enabled = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@of_torchao
@pytest.mark.parametrize("form", FORMAT_NAMES)
@pytest.mark.parametrize("made", CONVERTED)
def test_the_printed_lines_convert_the_model_and_run_it(made, form, hardware):
    """As printed: without the checks that need a GPU. Their error is the one that was rehearsed."""
    model, args, kwargs = made()
    found = rehearse(model, *args, formats=(form,), **kwargs)
    assert found.recommended == form
    program = str(found).partition(f"The torchao code for {form}:")[2]
    (exact,) = tree_leaves(model(*args, **kwargs))
    names = {"model": copy.deepcopy(model), "args": args, "kwargs": kwargs}
    exec(program, names)
    kinds = {
        name: type(m.weight.data) for name, m in names["model"].named_modules() if is_linear(m)
    }
    converted = {name for name, kind in kinds.items() if kind is not torch.Tensor}
    assert converted == CONVERTED[made]
    (output,) = tree_leaves(names["output"])
    assert output.dtype is torch.bfloat16
    off = float((output.float() - exact).norm() / exact.norm())
    bf16 = 2.0**-8 * 4  # the layers that are left, and what is added between them
    assert found.formats[1].output_off / 1.5 < off < 1.5 * found.formats[1].output_off + bf16


def is_linear(module):
    return isinstance(module, nn.Linear)


def test_lines_that_need_a_gpu_are_printed_with_the_reason_why_they_were_not_run(monkeypatch):
    pytest.importorskip("torchao")
    ran = []
    monkeypatch.setattr(torchao_inference, "failure", lambda call, code: ran.append(code) or "")
    model, args, kwargs = captioned()
    reasons = {
        "fp8": "only on an NVIDIA GPU of compute capability 8.9 or later, an AMD MI300 or MI350, "
        "or an XPU, and this model is on cpu",
        "nvfp4": "kernels for NVFP4 inference run only on Blackwell, where this report does "
        "not try them",
    }
    for form, reason in reasons.items():
        found = rehearse(model, *args, formats=(form,), **kwargs)
        (said,) = (line for line in found.watch if "was not run here" in line)
        assert said.endswith(f"{reason}.")
        assert found.program
    assert not ran
    for form in ("mxfp8", "mxfp4"):
        found = rehearse(model, *args, formats=(form,), **kwargs)
        assert not any("was not run here" in line for line in found.watch)
        assert ran.pop() == found.program


GPUS = {
    "8.9": (types.SimpleNamespace(major=8, minor=9), None),
    "10.0": (types.SimpleNamespace(major=10, minor=0), None),
    "8.0": (types.SimpleNamespace(major=8, minor=0), None),
    "gfx942": (types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"), "7.0"),
    "gfx950": (types.SimpleNamespace(gcnArchName="gfx950"), "7.0"),
    "gfx90a": (types.SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-"), "7.0"),
}


@pytest.mark.parametrize("name", GPUS)
def test_lines_for_fp8_are_tried_on_the_gpus_that_torchao_takes(name, monkeypatch):
    pytest.importorskip("torchao")
    gpu, hip = GPUS[name]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    reason = torchao_inference.untried_reason("fp8-rowwise", torch.device("cuda"))
    assert (reason == "") == (name not in ("8.0", "gfx90a"))
    assert torchao_inference.untried_reason("fp8", torch.device("xpu")) == ""
    assert torchao_inference.untried_reason("fp8", torch.device("mps"))


def test_lines_that_fail_are_not_recommended(monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(torchao_inference, "failure", lambda call, code: "AssertionError: of it")
    found = rehearse(chain(64, 64, 64), torch.randn(8, 64), formats=("mxfp8", "nvfp4"))
    assert found.recommended == "nvfp4"
    assert any(line.startswith("mxfp8 is not recommended, because ") for line in found.watch)


@of_torchao
def test_an_error_of_the_lines_is_told():
    pytest.importorskip("torchao")
    call = ModelCall(chain(64, 64, 64), (torch.randn(8, 64),))
    assert torchao_inference.failure(call, torchao_inference.lines("mxfp8", [])) == ""
    failing = torchao_inference.lines("mxfp8", []).replace("model(*cast", "model(1, *cast")
    assert torchao_inference.failure(call, failing).startswith("TypeError: ")


@of_torchao
def test_trying_the_lines_leaves_torchs_settings_as_they_are():
    pytest.importorskip("torchao")
    model, args, kwargs = encoder()
    before = torch.backends.mha.get_fastpath_enabled(), torch.get_float32_matmul_precision()
    found = rehearse(model, *args, formats=("mxfp8",), **kwargs)
    assert found.recommended == "mxfp8"
    assert "set_fastpath_enabled(False)" in found.program
    after = torch.backends.mha.get_fastpath_enabled(), torch.get_float32_matmul_precision()
    assert after == before

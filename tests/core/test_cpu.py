"""What torch cannot run on a CPU in low precision is known, and the remedy helps."""

import datetime
import importlib
import re

import pytest
import torch
from torch import nn

from course.start import emulates_bf16, start

from amp_lab import find_nonfinite
from amp_lab.cli import main
from amp_lab.core import cpu
from amp_lab.tracing.xray import xray

LOW = [torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


class Reader(nn.Module):
    """An LSTM over a sequence (T, B, 8), in an fp32 region if asked to."""

    def __init__(self, in_fp32=False, **options):
        super().__init__()
        self.layer, self.in_fp32 = nn.LSTM(8, 16, **options), in_fp32

    def forward(self, x):
        if not self.in_fp32:
            return self.layer(x)[0]
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())[0]


def step(model, dtype, with_gradients):
    with torch.set_grad_enabled(with_gradients), torch.autocast("cpu", dtype):
        output = model(torch.randn(3, 2, 8))
    if with_gradients:
        output.float().sum().backward()
    return output


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_lstm_error_is_what_torch_raises_for_a_layer(dtype, with_gradients):
    expected = cpu.lstm_error(dtype, with_gradients=with_gradients)
    if expected is None:
        assert step(Reader(), dtype, with_gradients).dtype is dtype
    else:
        with pytest.raises(RuntimeError, match=cpu.NO_PRIMITIVE) as raised:
            step(Reader(), dtype, with_gradients)
        assert expected in str(raised.value)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("weights", ["fp32", "16-bit"])
def test_an_input_in_16_bits_is_asked_about_by_itself(dtype, with_gradients, weights):
    """torch chooses a kernel by the input, before autocast casts it."""
    expected = cpu.lstm_error(dtype, with_gradients=with_gradients, input_dtype=dtype)
    model, x = nn.LSTM(8, 16), torch.randn(3, 2, 8, dtype=dtype)
    if weights == "16-bit":
        model.to(dtype)
    with torch.set_grad_enabled(with_gradients), torch.autocast("cpu", dtype):
        if expected is None:
            assert model(x)[0].dtype is dtype
            return
        with pytest.raises(RuntimeError, match=cpu.NO_PRIMITIVE) as raised:
            model(x)
    assert expected in str(raised.value)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_the_remedy_runs_on_every_cpu(dtype, with_gradients):
    assert step(Reader(in_fp32=True), dtype, with_gradients).dtype is torch.float32


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", LOW)
def test_other_recurrent_layers_run_on_every_cpu(kind, dtype):
    with torch.autocast("cpu", dtype):
        output, _ = kind(8, 16)(torch.randn(3, 2, 8))
    output.float().sum().backward()


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("remedy", ["fp32", "without oneDNN"])
@pytest.mark.parametrize(
    ("kernel", "height", "stride"),
    [(3, 1, 2), (3, 4, 2), (5, 2, 2), (7, 4, 2), (3, 4, 3), (7, 4, 4)],
)
def test_taps_that_see_only_padding_get_no_gradient(kernel, height, stride, remedy):
    """AMP0089 and docs/hardware.md: oneDNN leaves these unwritten in bf16 on AVX-512."""
    dtype = torch.float32 if remedy == "fp32" else torch.bfloat16
    layer = nn.Conv2d(32, 32, kernel, stride, padding=kernel // 2, dtype=dtype)
    images = torch.randn(2, 32, height, 1, dtype=dtype)
    # What the allocator gives out next is not zero.
    unwritten = [torch.full_like(layer.weight, torch.inf) for _ in range(8)]
    del unwritten
    with torch.backends.mkldnn.flags(enabled=remedy == "fp32"):
        layer(images).sum().backward()
    columns = layer.weight.grad.abs().sum((0, 1, 2))
    assert columns.nonzero().flatten().tolist() == [kernel // 2]


def test_to_ask_changes_no_random_numbers():
    cpu._lstm_error.cache_clear()
    state = torch.get_rng_state()
    cpu.lstm_remarks()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture(params=["no CPU has it", "a CPU has it"])
def kernels(request, monkeypatch):
    """As if the CPU had no kernel for an LSTM in low precision, or had all of them."""
    error = None
    if request.param == "no CPU has it":
        error = f"{cpu.NO_PRIMITIVE} for the LSTM forward propagation primitive"
    monkeypatch.setattr(cpu, "_lstm_error", lambda *asked: error)
    return error


def test_xray_says_before_the_error_what_to_do(kernels):
    def said(model, device_type):
        advice = xray(model, torch.randn(3, 2, 8), device_type=device_type, dtype=LOW[0]).advice
        return [line for line in advice if "fails in bf16 on this CPU" in line]

    assert bool(said(Reader(), "cpu")) == bool(kernels)
    assert all(cpu.NO_PRIMITIVE_REMEDY in line for line in said(Reader(), "cpu"))
    assert not said(Reader(), "cuda")  # that CPU is not asked
    assert not said(Reader(in_fp32=True), "cpu")
    assert not said(Reader(proj_size=4), "cpu")


class Behind(nn.Module):
    """An LSTM that gets what a layer gives, in 16 bits under autocast, or the same in fp32."""

    def __init__(self, widens=False):
        super().__init__()
        self.layer, self.lstm, self.widens = nn.Linear(8, 8), nn.LSTM(8, 16), widens

    def forward(self, x):
        x = self.layer(x)
        return self.lstm(x.float() if self.widens else x)[0]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("widens", [False, True])
def test_xray_says_that_an_lstm_fails_exactly_where_it_does(dtype, widens):
    model, x = Behind(widens), torch.randn(3, 2, 8)
    found = xray(model, x, device_type="cpu", dtype=dtype)
    (row,) = [row for row in found.rows if row.op == "lstm"]
    assert row.given_dtype is (torch.float32 if widens else dtype)
    warned = any(cpu.NO_PRIMITIVE_REMEDY in line for line in found.advice)
    error = ""
    try:
        step(model, dtype, with_gradients=True)
    except RuntimeError as raised:
        error = str(raised)
    assert warned == bool(error)
    assert cpu.NO_PRIMITIVE in error or not error


@pytest.mark.parametrize("widens", [False, True])
def test_xray_asks_about_the_dtype_that_the_layer_is_given(widens, monkeypatch):
    """As if no CPU had a kernel that autocast casts to, and torch its own for 16 bits."""

    def error(dtype, with_gradients, input_dtype):
        return cpu.NO_PRIMITIVE if input_dtype is torch.float32 else None

    monkeypatch.setattr(cpu, "_lstm_error", error)
    found = xray(Behind(widens), torch.randn(3, 2, 8), device_type="cpu", dtype=LOW[0])
    assert any("fails in bf16" in line for line in found.advice) == widens


def test_doctor_and_ops_know_the_cpu_at_hand(kernels, capsys):
    for command in (["doctor", "--device", "cpu"], ["ops", "--device", "cpu"]):
        assert main(command) == 0
        printed = capsys.readouterr().out
        assert cpu.matrix_instructions() in printed
        raises = re.search(r"nn\.LSTM .*fails .*bf16 .*fp16", printed)
        assert bool(raises) == bool(kernels)


def test_find_nonfinite_adds_the_remedy_to_the_error():
    model = Reader()
    with pytest.raises(RuntimeError) as raised, find_nonfinite(model):
        raise RuntimeError(f"{cpu.NO_PRIMITIVE} for the LSTM forward propagation primitive")
    assert any(cpu.NO_PRIMITIVE_REMEDY in note for note in raised.value.__notes__)
    with pytest.raises(RuntimeError) as raised, find_nonfinite(model):
        raise RuntimeError("another error")
    assert not hasattr(raised.value, "__notes__")


def test_matrix_instructions_name_the_limits_that_are_set(monkeypatch):
    for name in cpu.LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert "limited by" not in cpu.matrix_instructions()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "limited by ONEDNN_MAX_CPU_ISA=AVX2" in cpu.matrix_instructions()


def test_a_torch_without_onednn_has_no_low_precision_there(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu.onednn_has_bf16()
    assert not cpu.onednn_has_fp16()


def test_a_notebook_says_where_bf16_is_slow(monkeypatch, capsys):
    setup = importlib.import_module("course.start")  # `course` has the function of that name
    for has_bf16 in (True, False):
        monkeypatch.setattr(setup, "onednn_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert emulates_bf16(torch.device("cpu")) == (not has_bf16)
        assert not emulates_bf16(torch.device("cuda"))
        start()
        first, *more = capsys.readouterr().out.splitlines()
        assert cpu.matrix_instructions() in first
        assert datetime.date.today().isoformat() in first
        assert bool(more) == (not has_bf16)


@pytest.mark.parametrize("name", cpu.LIMITS)
def test_a_limit_that_would_be_ignored_is_refused_in_a_line(name, monkeypatch, capsys):
    monkeypatch.setenv(name, "BANANA")
    assert main(["doctor", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"{name}='BANANA' .*default", line)
    for value in cpu.LIMITS[name]:
        monkeypatch.setenv(name, value)
        cpu.check_limits()

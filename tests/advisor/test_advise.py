"""`advise` on planted models: toys, whose times are what the test says."""

import copy
import dataclasses
import itertools
import json
import re
import time

import pytest
import torch
from cases import some_of
from small_models import PooledCnn
from torch import nn

from amp_lab import Precision, advise, gradient_underflow
from amp_lab.advisor import session
from amp_lab.advisor.candidates import Candidate
from amp_lab.advisor.learning import Learning, choose_loss_scale
from amp_lab.advisor.outlook import Outlook, forecast, trace_and_forecast
from amp_lab.core.device import DeviceReport
from amp_lab.core.errors import DeviceError, OptionError, TraceError
from amp_lab.core.gpus import GPUS, unknown_gpu
from amp_lab.core.timing_result import Comparison
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, TRAINING, Recipe

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

CPU = torch.device("cpu")
RATES = {Precision.FP32: 1.0, Precision.TF32: None, Precision.FP16: 2.0, Precision.BF16: 2.0}
REPORT = DeviceReport(CPU, "a machine", "CPU", 2**34, RATES, {}, (24, 24), True, Precision.BF16, "")
FAST = {"bf16": 0.5, "fp16": 0.6}  # seconds of a step by what a name begins with; others: 1


class Large(nn.Module):
    """Its activations are beyond fp16's range, and not bf16's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.second(self.first(x) * 1e6) * 1e-6


class Clash(nn.Module):
    """Writes what autocast computed into a tensor in fp32, which torch refuses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        found = torch.zeros(len(x), 4)
        found[torch.arange(len(x))] = self.linear(x)
        return found


class Chaotic(nn.Module):
    """Almost all of its gradients lie in a part that any noise turns, and that changes little."""

    def __init__(self):
        super().__init__()
        self.learned, self.turned = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return self.learned(x) + 1e-3 * torch.sin(1e5 * self.turned(x).float())


class Slow(nn.Module):
    """Takes a quarter of a second to train in half precision, in one of its passes."""

    calls = 0

    def __init__(self, in_backward: bool):
        super().__init__()
        self.linear, self._in_backward = nn.Linear(16, 16), in_backward

    def forward(self, x):
        y = self.linear(x)
        if type(y) is torch.Tensor and y.requires_grad and torch.is_autocast_enabled("cpu"):
            y.register_hook(self._wait) if self._in_backward else self._wait()
        return y

    def _wait(self, *_):
        time.sleep(0.25)
        Slow.calls += 1


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.fixture
def planted(monkeypatch):
    """Advice with planted times: twelve rounds, alike but for 1 %. It is too short to compile."""

    def advice(model, *inputs, seconds=FAST, reason="", memory=None, report=REPORT, drift=1.0):
        calls = itertools.count()

        def timing(functions, **settings):
            assert settings["budget_s"] > 0
            plain = drift ** next(calls)  # fp32 is faster from comparison to comparison
            rounds = [1 + 0.01 * (i % 2) for i in range(12)]
            took = {
                n: next((s for p, s in seconds.items() if n.startswith(p)), plain)
                for n in functions
            }
            return Comparison({n: tuple(s * r for r in rounds) for n, s in took.items()}, 0, reason)

        monkeypatch.setattr(session, "compare", timing)
        monkeypatch.setattr(session, "describe_device", lambda device: report)
        monkeypatch.setattr(session, "_SHARE_TO_COMPILE", {"training": 1.0, "inference": 1.0})
        return advise(model, *inputs, device="cpu", memory=memory, minutes=1)

    return advice


def of(advice, name: str, use: str = TRAINING):
    return next(c for c in advice.candidates if (c.recipe.use, c.name) == (use, name))


def test_the_fastest_that_learns_is_recommended_with_lines_that_ran(planted):
    advice = planted(mlp(), torch.randn(8, 16))
    best = advice.recommended
    assert best.name == "bf16 autocast"
    assert best.speedup.interval[0] > 1.9
    assert best.largest_batch > 0
    assert of(advice, "fp16 autocast").verdict == "slower"
    assert advice.chosen[INFERENCE].recipe.precision is Precision.BF16
    assert "torch.autocast(device.type, dtype=torch.bfloat16)" in advice.programs[TRAINING]
    assert advice.programs[TRAINING] in str(advice)
    assert any(line.startswith("First loss scale for fp16") for line in advice.watch)
    assert of(advice, "fp32, torch.compile".replace("fp32", best.name)).verdict == "not tried"


def test_a_model_that_breaks_in_fp16_is_not_recommended_in_it_however_fast(planted):
    advice = planted(Large(), torch.randn(8, 16), seconds={"fp16": 0.1, "bf16": 0.9})
    assert of(advice, "fp16 autocast").verdict == "unlike fp32"
    assert of(advice, "fp16 autocast", INFERENCE).verdict == "unlike fp32"
    assert all(c.recipe.precision is not Precision.FP16 for c in advice.chosen.values())
    assert any(
        re.search("fp16 ends at 65504, but values in .*second", line) for line in advice.watch
    )


def test_bf16_weights_whose_updates_rounding_swallows_are_not_recommended(planted):
    advice = planted(mlp(), torch.randn(8, 16), seconds={"bf16 weights": 0.1})
    found = of(advice, "bf16 weights")
    assert found.verdict == "unlike fp32"
    assert "of the weights unchanged" in found.reason
    assert advice.chosen[INFERENCE].name == "bf16 weights"


def test_gradients_that_noise_turns_are_held_against_the_size_of_fp32s(planted):
    torch.manual_seed(0)
    model, batch = Chaotic(), (torch.randn(8, 16),)
    advice = planted(model, *batch)
    best = advice.recommended
    assert best.name == "bf16 autocast"
    off = float(re.match(r"gradients ([\d.]+)% off", best.against_fp32)[1])
    assert off > 90
    assert "noise alone" in best.against_fp32
    assert any("only their size is compared" in line for line in advice.watch)
    learning = Learning(ModelCall(model, batch, loss_fn=lambda y: y.square().mean()), CPU, 4.0, 1.0)
    for size, passes in [(0.0, False), (0.4, False), (0.6, True), (1.8, True), (3.0, False)]:
        run = dataclasses.replace(learning._fp32, reason="")
        learning._judge(run, [size * gradient for gradient in learning._gradients])
        assert (run.reason == "") == passes, (size, run.reason)


@pytest.mark.weekly
@pytest.mark.parametrize("in_backward", some_of(True, False))
def test_a_step_that_takes_for_ever_is_left(planted, monkeypatch, in_backward):
    monkeypatch.setattr(Slow, "calls", 0)
    advice = planted(nn.Sequential(*[Slow(in_backward) for _ in range(40)]), torch.randn(8, 16))
    found = of(advice, "bf16 autocast")
    assert found.verdict == "left out early"
    assert 0 < Slow.calls < 40, "the rest of the step was waited for"


def test_a_step_that_does_not_change_the_weights_is_not_recommended(planted, monkeypatch):
    real = Learning._run

    def stuck(self, candidate, **settings):
        with monkeypatch.context() as patch:
            if candidate.recipe.precision is Precision.BF16:
                patch.setattr("amp_lab.advisor.learning._RATE", 0.0)
            return real(self, candidate, **settings)

    monkeypatch.setattr(Learning, "_run", stuck)
    advice = planted(mlp(), torch.randn(8, 16))
    assert of(advice, "bf16 autocast").verdict == "unlike fp32"
    assert advice.recommended.name == "fp16 autocast"


def test_where_amp_loses_fp32_is_recommended(planted):
    advice = planted(mlp(), torch.randn(8, 16), seconds={"bf16": 1.5, "fp16": 2.0})
    assert advice.recommended.name == "fp32"
    assert "autocast" not in advice.programs[TRAINING]


def test_what_raises_for_a_clash_of_dtypes_is_pruned_with_its_message(planted):
    advice = planted(Clash(), torch.randn(8, 16))
    for name in ("bf16 autocast", "fp16 autocast"):
        assert of(advice, name).verdict == "raises"
        assert "dtype" in of(advice, name).reason
    assert advice.recommended.name == "fp32"


def test_what_does_not_fit_is_not_tried(planted):
    advice = planted(mlp(), torch.randn(8, 16), memory=1000)
    assert advice.recommended is None
    assert {c.verdict for c in advice.candidates} == {"does not fit"}
    assert any(re.match("advise cannot recommend .*for training", line) for line in advice.watch)


def test_a_loss_of_0_is_not_far_from_itself(planted):
    model = mlp()
    nn.init.zeros_(model[-1].weight)  # as the heads of vision transformers begin
    nn.init.zeros_(model[-1].bias)
    advice = planted(model, torch.randn(8, 16))
    assert of(advice, "fp32").verdict == "slower"
    assert advice.recommended.name == "bf16 autocast"


def test_what_the_machine_cannot_hold_is_not_begun(planted):
    small = dataclasses.replace(REPORT, memory_bytes=1000)
    with pytest.raises(TraceError, match=r"needs 15\.1 KiB, .*cpu .* 1\.0 KiB"):
        planted(mlp(), torch.randn(8, 16), report=small)


def test_a_precision_that_is_emulated_is_not_run(planted):
    report = dataclasses.replace(REPORT, rates=RATES | {Precision.FP16: 0.01})
    advice = planted(mlp(), torch.randn(8, 16), report=report)
    assert of(advice, "fp16 autocast").verdict == "emulated"
    unsure = dataclasses.replace(REPORT, rates=RATES | {Precision.BF16: 0.2}, trusted=False)
    advice = planted(mlp(), torch.randn(8, 16), report=unsure)
    assert of(advice, "bf16 autocast").speedup is not None


def test_of_slow_steps_the_fastest_are_compared_as_there_is_time():
    call = ModelCall(mlp(), (torch.randn(8, 16),))
    end = time.perf_counter() + 14 * 10 / 0.8  # ten seconds a round, if it takes fourteen
    contest = session._Ranking(TRAINING, call, Outlook(CPU), None, end, 120.0)
    names = {"fp32": 5.5, "tf32": 4.5, "fp16": 3.5, "bf16": 3.0}
    new = [Candidate(Recipe(TRAINING, Precision(p)), seconds=s) for p, s in names.items()]
    contest.candidates, contest._baseline = [*new], new[0]
    contest._steps = dict.fromkeys(new)
    assert contest._drop_slow(new) == [new[0], new[3]]
    assert [*contest._steps] == [new[0], new[3]]
    assert new[1].verdict == new[2].verdict == "left out early"
    assert new[1].reason == new[2].reason == "give more minutes"


def test_a_busy_machine_keeps_the_simplest(planted):
    advice = planted(PooledCnn(), torch.randn(2, 3, 12, 12), reason="the machine was busy")
    assert advice.recommended.name == "fp32"
    assert "the machine was busy" in advice.recommended.reason
    assert "not reliable" in str(advice)


@pytest.mark.parametrize(("taken", "told"), [(2**40, True), (0, False)])
def test_memory_that_is_taken_anew_in_each_step_is_told(planted, monkeypatch, taken, told):
    def of_a_step(step):
        step()
        return taken

    monkeypatch.setattr(session, "memory_taken", of_a_step)
    watch = planted(mlp(), torch.randn(8, 16)).watch
    lines = [line for line in watch if "keep_memory" in line]
    assert [line.partition(" allocates 1048576.0 MiB from")[0] for line in lines] == (
        ["inference: fp32", "training: fp32"] if told else []
    )


def test_what_lost_stays_behind_what_beat_it_when_the_machine_changes(planted):
    advice = planted(PooledCnn(), torch.randn(2, 3, 8, 8), drift=0.9)
    for use, best in advice.chosen.items():
        timed = [c for c in advice.candidates if c.recipe.use == use and c.speedup]
        assert len(timed) > 4
        assert all(c.speedup.median <= 1.06 * best.speedup.median for c in timed)
        assert all(c.time_s.median >= 0.94 * best.time_s.median for c in timed)


def test_layouts_and_fused_kernels_are_tried_where_there_are_convolutions(planted):
    seconds = {"bf16 autocast, channels-last, fused": 0.3, "bf16 autocast, channels-last": 0.5}
    advice = planted(PooledCnn(), torch.randn(2, 3, 12, 12), seconds=seconds)
    assert advice.recommended.name == "bf16 autocast, channels-last, fused AdamW"
    text = advice.programs[TRAINING]
    assert "memory_format=torch.channels_last" in text
    assert "fused=True" in text


def test_what_lost_may_win_compiled(planted):
    seconds = {"bf16 autocast, channels-last": 0.6, "bf16 autocast": 0.4}
    advice = planted(PooledCnn(), torch.randn(2, 3, 12, 12), seconds=seconds)
    assert advice.recommended.name == "bf16 autocast"
    compiled = {c.name for c in advice.candidates if c.recipe.compiled and c.recipe.use == TRAINING}
    eager = ("bf16 autocast", "bf16 autocast, channels-last", "fp32, channels-last")
    assert compiled == {f"{name}, torch.compile" for name in eager}


def test_the_model_and_the_random_numbers_stay_as_they_are(planted):
    model = PooledCnn().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    planted(model, torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_gradients_is_advised_for_inference_alone(planted):
    advice = planted(mlp().requires_grad_(False), torch.randn(8, 16))
    assert list(advice.chosen) == [INFERENCE]


def test_a_device_that_is_not_here_gets_dtypes_and_memory_and_no_times():
    for kind in ("cuda", "xpu", "mps"):
        if torch.get_device_module(kind).is_available():
            continue
        advice = advise(mlp(), torch.randn(8, 16), device=kind, memory="1GiB")
        assert advice.recommended is None
        assert any("can show which recipe is the fastest" in line for line in advice.watch)
        assert all(c.time_s is None and c.peak_bytes for c in advice.candidates)
        assert {c.verdict for c in advice.candidates} == {"not timed"}


def test_as_json_and_as_one_page(planted, tmp_path):
    advice = planted(PooledCnn(), torch.randn(2, 3, 12, 12))
    contents = json.loads(advice.to_json())
    assert contents["recommended"] == advice.recommended.name
    assert {c["name"] for c in contents["candidates"]} == {c.name for c in advice.candidates}
    advice.to_html(tmp_path / "advice.html")
    page = (tmp_path / "advice.html").read_text()
    assert "http" not in page
    assert "torch.optim.AdamW" in page
    assert "torch.optim.AdamW" in advice._repr_html_()
    assert "```python" in advice.to_markdown()
    with pytest.raises(OptionError, match="cannot be written"):
        advice.to_html(tmp_path / "missing" / "advice.html")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: advise(mlp(), torch.randn(8, 15), device="cpu"), TraceError, "fails on input"),
        (lambda: advise(mlp, torch.randn(8, 16), device="cpu"), TraceError, "is not a model"),
        (lambda: advise(mlp(), torch.randn(8, 16), device="gpu"), DeviceError, "torch calls"),
        (
            lambda: advise(mlp(), torch.randn(8, 16), device="cpu", loss_fn=lambda out: out),
            TraceError,
            "number",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(call, error, said):
    with pytest.raises(error, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)


class Inverse(torch.autograd.Function):
    """Its backward pass multiplies two dtypes under autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return Inverse.apply(x, self.weight)


def test_inference_is_not_ruled_out_by_the_backward_pass():
    call = ModelCall(Custom(), (torch.randn(4, 8),), loss_fn=lambda out: out.float().mean())
    outlook = trace_and_forecast(call, CPU)
    for precision in (Precision.BF16, Precision.FP16):
        assert outlook.rejection(Recipe(TRAINING, precision))[0] == "raises"
        assert outlook.rejection(Recipe(INFERENCE, precision)) == ("", "")


@pytest.mark.parametrize(
    ("gpu", "training"),
    [
        ("t4", ["fp32", "fp16", "bf16", "bf16"]),
        ("h100", ["fp32", "tf32", "bf16", "bf16", "fp16"]),
        ("mi250x", ["fp32", "bf16", "bf16", "fp16"]),
        ("gtx-1660", ["fp32", "bf16", "bf16", "fp16"]),
    ],
)
def test_for_a_gpu_that_is_not_here_its_own_formats_come_first(gpu, training):
    advice = advise(nn.Linear(8, 8), torch.randn(4, 8), gpu=gpu)
    recipes = [c.recipe for c in advice.candidates if c.recipe.use == TRAINING]
    assert [recipe.precision for recipe in recipes] == training
    row = GPUS[gpu]
    for candidate in advice.candidates:
        precision = candidate.recipe.precision
        is_fast = precision in ("fp32", *row.architecture.matmuls)
        assert candidate.verdict == ("not timed" if is_fast else "not faster")
    assert advice.title.startswith(f"Linear on {row.name}: a forecast")
    assert advice.recommended is None


def test_the_memory_of_an_absent_gpu_is_the_budget():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    in_row = advise(model, x, gpu="rtx-4090")
    given = advise(model, x, gpu="h100", memory="24GiB")
    for one, other in zip(in_row.candidates, given.candidates, strict=True):
        assert one.largest_batch == other.largest_batch
    large = nn.Linear(2**17, 2**17, device="meta")
    verdicts = {c.verdict for c in advise(large, torch.empty(1, 2**17), gpu="t4").candidates}
    assert verdicts == {"does not fit"}
    with pytest.raises(OptionError, match="not both"):
        advise(model, x, device="cpu", gpu="t4")
    with pytest.raises(OptionError, match="rtx-4090"):
        advise(model, x, gpu="rtx-4080")


def test_an_error_stands_below_the_table_and_once():
    call = ModelCall(Custom(), (torch.randn(4, 8),), loss_fn=lambda out: out.float().mean())
    gpu = unknown_gpu("cpu")
    said = str(forecast(call, trace_and_forecast(call, CPU, gpu=gpu), gpu))
    assert max(map(len, said.partition("Look at:")[0].splitlines())) < 120
    assert said.count("backward pass of Inverse") == 2  # in X-ray's words, in each precision


class Attention(nn.Module):
    """One head, whose loss does not depend on the bias of the keys."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_gradient_that_is_rounding_errors_alone_drives_no_advice():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 8, 16)
    rows = gradient_underflow(model, model(x).square().mean()).rows
    (keys,) = (row for row in rows if (row.layer, row.what) == ("key", "bias"))
    assert keys.lost(1.0) > 0.5
    call = ModelCall(model, (x,), loss_fn=lambda output: output.square().mean())
    scale, said = choose_loss_scale(call, CPU)
    assert not any("key (bias)" in line or "of key" in line for line in said)
    assert scale == 2.0**16


class WithoutGradient(nn.Module):
    """A model whose output no gradient leads to, as that of an index."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).argmax(-1)


def test_a_model_without_a_differentiable_output_is_advised_for_inference(planted):
    advice = planted(WithoutGradient(), torch.randn(2, 4))
    assert advice.chosen.keys() == {"inference"}
    assert "skips training" in str(advice)
    assert "None is used" not in str(advice)

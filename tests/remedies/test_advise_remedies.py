"""Each remedy of advise and of rehearse, done as it says."""

import copy
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import time

import pytest
import torch
from remedy_tests import does, says
from torch import nn

from amp_lab import advise, rehearse, xray
from amp_lab.advisor import session
from amp_lab.advisor.candidates import Candidate, mixes_dtypes
from amp_lab.advisor.learning import choose_loss_scale
from amp_lab.advisor.outlook import Outlook
from amp_lab.core.device import describe_device
from amp_lab.core.errors import NumericsError, TraceError
from amp_lab.core.precision import Precision
from amp_lab.core.remedies import REMEDIES
from amp_lab.model_call import ModelCall
from amp_lab.recipes import INFERENCE, TRAINING, Recipe, Step

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

CPU = torch.device("cpu")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@does("advise.own_loss")
def test_a_loss_of_ones_own():
    x = torch.randn(16, 16)
    for tool in (lambda **loss: advise(mlp(), x, device="cpu", minutes=0.02, **loss), rehearsed):
        for loss in ({}, {"loss_fn": mean_square}):
            assert says("advise.own_loss", "\n".join(tool(**loss).watch)) == (not loss)


def rehearsed(rows: int = 16, **options):
    return rehearse(mlp(), torch.randn(rows, 16), formats=("fp8",), **options)


@does("rehearse.in_16_bits")
def test_what_no_format_below_16_bits_takes_runs_in_16_bits():
    model, volume = nn.Conv3d(1, 4, 3), torch.randn(1, 1, 4, 4, 4)
    with pytest.raises(NumericsError) as refused:
        rehearse(model, volume)
    assert says("rehearse.in_16_bits", str(refused.value))
    for device_type in ("cpu", "cuda"):
        assert xray(model, volume, device_type=device_type, dtype=torch.bfloat16).low_share == 1


def test_a_model_without_any_matmul_is_not_sent_to_16_bits():
    with pytest.raises(NumericsError) as refused:
        rehearse(nn.LayerNorm(16), torch.randn(4, 16))
    assert not says("rehearse.in_16_bits", str(refused.value))


@does("rehearse.quantised")
@pytest.mark.slow  # torchao takes seconds to load
@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_a_model_is_rehearsed_before_it_is_quantised():
    quantization = pytest.importorskip("torchao.quantization")
    model, x = mlp().eval(), torch.randn(16, 16)
    assert rehearse(model, x).layers
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(
        NumericsError, match=r"0\.weight is already quantised .*Int8Tensor"
    ) as refused:
        rehearse(model, x)
    assert says("rehearse.quantised", str(refused.value))
    model.append(nn.Linear(16, 32))  # such as an adapter
    found = rehearse(model, x)
    assert {layer.layer.name for layer in found.layers} == {"3"}
    assert any("Not rehearsed: linear with 0.weight" in remark for remark in found.watch)


class LongSums(nn.Module):
    """Four layers. The second adds thousands of products of one sign."""

    def __init__(self):
        super().__init__()
        self.first, self.long = nn.Linear(16, 2048), nn.Linear(2048, 32)
        self.inner, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        with torch.no_grad():
            self.long.weight.abs_()

    def forward(self, x):
        return self.last(self.inner(self.long(self.first(x).relu())))


@does("rehearse.fast_sums")
@pytest.mark.slow  # torchao takes seconds to load
@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_sums_that_a_hopper_gpu_computes_inaccurately_are_added_in_fp32():
    float8 = pytest.importorskip("torchao.float8")
    assert not says("rehearse.fast_sums", "\n".join(rehearsed().watch))
    model = LongSums()
    found = rehearse(model, torch.randn(32, 16), formats=("fp8", "fp8-rowwise", "mxfp8"))
    (remark,) = (remark for remark in found.watch if says("rehearse.fast_sums", remark))
    assert re.search(r"less accurate: long \(\d+ dB\)\. ", remark)
    assert found.of("long", "mxfp8").hopper_sums is None  # a Hopper GPU does not multiply it
    for recipe in ("tensorwise", "rowwise"):
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        exact = eval(
            re.search(r"pass (Float8GemmConfig\(.*\)) as gemm_config_output", remark)[1],
            {"Float8GemmConfig": float8.config.Float8GemmConfig},
        )
        config = dataclasses.replace(config, emulate=True, gemm_config_output=exact)
        converted = float8.convert_to_float8_training(copy.deepcopy(model), config=config)
        assert not converted.long.linear_mm_config.output.use_fast_accum
        converted(torch.randn(32, 16)).sum().backward()


class Weights(nn.Module):
    """Weights whose gradients are these numbers."""

    def __init__(self, *gradients: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(gradients)))
        self.register_buffer("gradients", torch.tensor(gradients))

    def forward(self, x):
        return (self.weight * self.gradients).sum() + 0 * x.sum()


def remarks_of(*gradients: float) -> tuple[float, str]:
    call = ModelCall(Weights(*gradients), (torch.ones(1),), loss_fn=torch.sum)
    scale, said = choose_loss_scale(call, CPU)
    return scale, "\n".join(said)


@does("advise.first_loss_scale")
def test_the_first_loss_scale_keeps_the_gradients():
    gradients = [1e-9] * 500 + [1e-3] * 500
    scale, said = remarks_of(*gradients)
    assert says("advise.first_loss_scale", said)
    assert float(re.search(r"First loss scale for fp16: ([\d.e+]+)\.$", said)[1]) == scale
    kept = (torch.tensor(gradients) * scale).half()
    assert kept.all()
    assert kept.isfinite().all()
    assert not torch.tensor(gradients).half().all()


@does("advise.no_loss_scale")
def test_where_no_loss_scale_keeps_them_bf16_does():
    gradients = [1e-12] * 500 + [1e3] * 500
    scale, said = remarks_of(*gradients)
    assert scale == 2.0**16  # GradScaler's own
    assert says("advise.no_loss_scale", said)
    assert torch.tensor(gradients).bfloat16().all()
    assert torch.tensor(gradients).bfloat16().isfinite().all()


def test_gradients_beyond_fp16_get_a_scale_below_1_and_zeros_no_remark():
    scale, said = remarks_of(1e6, 2e6)
    assert scale < 1
    assert says("advise.first_loss_scale", said)
    assert not says("advise.no_loss_scale", said)
    assert (torch.tensor([1e6, 2e6]) * scale).half().isfinite().all()
    assert remarks_of(0.0, 0.0) == (2.0**16, "")


def test_of_a_model_that_is_fp16_by_itself_no_share_and_no_range_is_told():
    class Halved(Weights):
        def forward(self, x):
            return super().forward(x).half().float()

    call = ModelCall(Halved(*[1e-9] * 500, *[1.0] * 500), (torch.ones(1),), loss_fn=torch.sum)
    scale, said = choose_loss_scale(call, CPU)
    assert scale == 2.0**16  # GradScaler's own
    (remark,) = said
    assert "computes in fp16 even without autocast" in remark


@does("advise.smaller_batch")
def test_a_smaller_batch_fits(monkeypatch):
    small = dataclasses.replace(describe_device(torch.device("cpu")), memory_bytes=2**15)
    monkeypatch.setattr(session, "describe_device", lambda device: small)

    def advised(batch: int):
        return advise(mlp(), torch.randn(batch, 16), device="cpu", minutes=0.02)

    with pytest.raises(TraceError) as refused:
        advised(1024)
    assert says("advise.smaller_batch", str(refused.value))
    assert advised(8).recommended is not None


@does("advise.more_minutes")
def test_with_more_minutes_more_is_tried(monkeypatch):
    recipe = Recipe(TRAINING, compiled=True)

    def contest(seconds: float) -> session._Ranking:
        call, end = ModelCall(mlp(), (torch.randn(8, 16),)), time.perf_counter() + seconds
        made = session._Ranking(TRAINING, call, Outlook(CPU), None, end, 120.0)
        monkeypatch.setattr(made, "_check_recipes", lambda recipes: tried.extend(recipes))
        return made

    tried: list[Recipe] = []
    short = contest(1.0)
    short._try_if_time_is_left(recipe, 0.3)
    assert tried == []
    assert says("advise.more_minutes", short.candidates[0].reason)
    contest(100.0)._try_if_time_is_left(recipe, 0.3)
    assert tried == [recipe]

    precisions = {Precision.FP32: 5.5, Precision.BF16: 3.0, Precision.FP16: 3.5}
    for seconds, waits in ((100.0, True), (1000.0, False)):
        new = [Candidate(Recipe(TRAINING, p), seconds=s) for p, s in precisions.items()]
        found = contest(seconds)
        found.candidates, found._baseline = [*new], new[0]
        found._steps = dict.fromkeys(new)
        found._drop_slow(new)
        said = "\n".join(candidate.reason for candidate in new)
        assert says("advise.more_minutes", said) == waits


class Sampler(nn.Module):
    """Two steps of a sampler, which keeps its latents in fp32 between them."""

    def __init__(self, layer: nn.Module, code: str = "x"):
        super().__init__()
        self.layer, self.code = layer, code

    def forward(self, x):
        for _ in range(2):
            given = eval(self.code, {"x": x, "torch": torch})
            x = x.float() + self.layer(given).float()
        return x


@does("advise.made_inside")
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.LayerNorm(4)])
def test_what_a_cast_model_makes_inside_is_cast(layer, precision):
    recipe = Recipe(INFERENCE, precision, cast=True)

    def checked(model: nn.Module) -> Candidate:
        call, end = ModelCall(model, (torch.randn(2, 4, 4),)), time.perf_counter() + 100

        def run(candidate: Candidate) -> None:
            Step(call, candidate.recipe, CPU)()

        ranking = session._Ranking(INFERENCE, call, Outlook(CPU), run, end, 120.0)
        return ranking._check_recipe(recipe)

    candidate = checked(Sampler(layer))
    assert candidate.verdict == "raises"
    assert says("advise.made_inside", candidate.reason)
    (code,) = re.findall(r"x\.to\(torch\.\w+\)", candidate.reason)
    assert checked(Sampler(layer, code)).verdict == ""


def test_a_dtype_without_a_kernel_is_no_mix_of_dtypes():
    assert mixes_dtypes(RuntimeError("expected scalar type Float but found BFloat16"))
    assert not mixes_dtypes(NotImplementedError("Unsupported dtype BFloat16"))


STEP = """
import json
from amp_lab.core.allocator import keep_memory, memory_taken
import torch
from torch import nn

model, x = nn.Sequential(nn.ReLU(), nn.ReLU()), torch.zeros(65536, 256)

def step():
    with torch.inference_mode():
        model(x)

if {keep}:
    assert keep_memory()
for _ in range(10):
    step()
print(json.dumps(min(memory_taken(step) for _ in range(3))))
"""


@does("advise.keep_memory")
@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="takes glibc")
def test_memory_that_is_kept_is_not_taken_anew():
    text = REMEDIES["advise.keep_memory"].text
    assert "Set {settings} (or call amp_lab.core.allocator.keep_memory)" in text

    def taken(keep: bool = False, **settings: str) -> int:
        command = [sys.executable, "-c", STEP.format(keep=keep)]
        run = subprocess.run(command, env=os.environ | settings, capture_output=True, check=True)
        return json.loads(run.stdout)

    settings = dict(pair.split("=") for pair in session.ENVIRONMENT.split())
    page = os.sysconf("SC_PAGE_SIZE")
    before = taken()
    assert before > 15 * page
    assert taken(keep=True) < before / 2
    assert taken(**settings) < before / 2


@does("rehearse.pad_rows")
@pytest.mark.parametrize("rows", [18, 50])
def test_rows_that_are_padded(rows):
    def reasons(found) -> str:
        return "\n".join(layer.left_out for layer in found.layers if layer.format == "fp8")

    assert says("rehearse.pad_rows", reasons(rehearsed(rows, loss_fn=mean_square)))
    padded = -(-rows // 16) * 16
    assert reasons(rehearsed(padded, loss_fn=mean_square)).strip() == ""


class Chaotic(nn.Module):
    """Its gradients are turned by the rounding errors of bf16."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.second((self.first(x) * 1e3).sin())


@does("rehearse.train")
def test_training_says_what_gradients_cannot():
    x = torch.randn(32, 16)

    def found(steps: int):
        return rehearse(Chaotic(), x, formats=("fp8",), loss_fn=mean_square, steps=steps)

    assert says("rehearse.train", "\n".join(found(0).watch))
    assert "steps=20 (--steps 20)" in REMEDIES["rehearse.train"].text
    trained = found(2)  # of 20, to be brief
    assert all(report.losses for report in trained.formats)
    assert not any(report.losses for report in found(0).formats)

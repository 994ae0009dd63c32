"""A model whose course depends on values is traced with the decisions of a run on the CPU."""

import copy
import random
import re
import sys
import types

import numpy as np
import pytest
import torch
import torchvision
from memory_models import loss_of, real_peaks
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_lab import forecast_inference, forecast_memory, largest_batch, xray
from amp_lab.cli import main
from amp_lab.core.backends import BACKENDS
from amp_lab.core.errors import TraceError
from amp_lab.model_call import ModelCall
from amp_lab.tracing import real_run
from amp_lab.tracing.memory import compare_memory, memory_table
from amp_lab.tracing.real_run import decisions_of

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


class Router(nn.Module):
    """A mixture of experts, two for each token."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            share = weights[rows, places, None]
            out = out.index_add(0, rows, (expert(x[rows]) * share).to(out.dtype))
        return out


class Detector(nn.Module):
    """Keeps the boxes with a high score."""

    def __init__(self):
        super().__init__()
        self.boxes, self.scores = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x):
        boxes, keep = self.boxes(x), self.scores(x).squeeze(-1) > 0
        return boxes[keep]


class Conformer(nn.Module):
    """Cuts a padded batch to its longest item, and counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.seen = []

    def forward(self, x, lengths):
        self.seen.append(lengths.tolist())
        x = self.layer(x[:, : lengths.max().item()])
        return self.norm(nn.functional.dropout(x, 0.5, self.training).transpose(1, 2))


def masked_loss(output):
    mask = output.detach() > 0
    return output[mask].mean() if mask.any() else output.sum()


MODELS = {
    "router": (Router, lambda: (torch.randn(6, 8),), None),
    "detector": (Detector, lambda: (torch.randn(9, 8),), None),
    "loss": (lambda: nn.Linear(8, 8), lambda: (torch.randn(6, 8),), masked_loss),
    "conformer": (Conformer, lambda: (torch.randn(2, 7, 8), torch.tensor([3, 5])), None),
}


@pytest.fixture(params=MODELS)
def made(request):
    build, inputs, loss_fn = MODELS[request.param]
    return build(), inputs(), loss_fn


def test_the_trace_is_that_of_a_real_run(made):
    model, inputs, loss_fn = made
    for dtype in (torch.float32, torch.bfloat16):
        how = {"device_type": "cpu", "dtype": dtype, "loss_fn": loss_fn}
        fake, real = (xray(model, *inputs, **how, real=real) for real in (False, True))
        if dtype is torch.float32:
            assert fake.rows == real.rows
        assert fake.outputs.keys() == real.outputs.keys()
        assert re.search(r"taken from .*CPU in fp32", str(fake))
        assert not real.decisions


def test_it_is_answered_on_every_device_and_in_a_forecast(made):
    model, inputs, loss_fn = made
    for device_type in ("cuda", "mps", "cpu"):
        assert xray(model, *inputs, device_type=device_type, loss_fn=loss_fn).decisions
    found = forecast_memory(model, *inputs, precision="fp16", loss_fn=loss_fn)
    assert "Other inputs may lead to other decisions" in str(found)
    table = memory_table(ModelCall(model, inputs, loss_fn=loss_fn), memory_bytes="1GiB")
    assert len(table.forecasts) == 3
    assert "depends on values" in table.no_largest["fp32"]


def test_the_model_and_all_generators_are_as_they_were():
    model, inputs, _ = MODELS["conformer"]
    model, inputs = model(), inputs()
    state, given = copy.deepcopy(model.state_dict()), copy.deepcopy(inputs)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    python_state = random.getstate()
    decisions_of(ModelCall(model, inputs))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, inputs, given))
    assert model.seen == []
    assert model.training
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state
    assert random.getstate() == python_state
    assert all(p.grad is None for p in model.parameters())


def test_an_embedding_that_renorms_itself_keeps_its_weights():
    model = nn.Embedding(4, 8, max_norm=0.1)
    before = model.weight.detach().clone()
    decisions_of(ModelCall(model, (torch.tensor([1, 2]),)))
    assert torch.equal(model.weight, before)


def test_weights_in_16_bits_decide_as_in_fp32():
    found = decisions_of(ModelCall(Detector().bfloat16(), (torch.randn(9, 8).bfloat16(),)))
    (decision,) = found.sequence
    assert decision.result.dtype is torch.float32
    assert decision.module == ""


class ByDevice(nn.Module):
    """Asks for other values on a CPU."""

    def __init__(self):
        super().__init__()
        self.part = Detector()

    def forward(self, x):
        if x.device.type == "cpu" and x.sum() > 1e9:
            return x
        return self.part(x)


def test_another_course_is_refused_with_the_module():
    model, x = ByDevice(), torch.randn(9, 8)
    with pytest.raises(TraceError, match=r"another branch .*index in 'part'") as told:
        xray(model, x)
    assert "\n" not in str(told.value)
    assert xray(model, x, device_type="cpu").decisions


def test_a_run_that_takes_too_much_is_stopped(monkeypatch):
    call = ModelCall(Detector(), (torch.randn(9, 8),))
    monkeypatch.setattr(real_run, "free_bytes", lambda: 1000)
    with pytest.raises(TraceError, match="50 % of the free memory"):
        decisions_of(call)
    monkeypatch.setattr(real_run, "free_bytes", lambda: None)
    assert decisions_of(call).sequence
    monkeypatch.setattr(real_run, "LIMIT_S", -1.0)
    with pytest.raises(TraceError, match="takes longer than"):
        decisions_of(call)


def test_memory_counts_as_long_as_it_lives(monkeypatch):
    class Passing(nn.Module):
        def forward(self, x):
            for _ in range(100):
                torch.ones(1000) + 1
            return x

    monkeypatch.setattr(real_run, "free_bytes", lambda: 40_000)  # the loop takes 800,000 in all
    decisions_of(ModelCall(Passing(), (torch.ones(1),)))


def test_a_run_that_fails_says_why():
    def loss(output):
        if output.sum() > 1e9:
            return output.sum()
        raise ValueError("no such target") if output.device.type == "cpu" else TypeError

    with pytest.raises(TraceError, match="fails: ValueError: no such target"):
        xray(nn.Linear(8, 8), torch.randn(2, 8), loss_fn=loss)


def test_shapes_have_no_values():
    for trace in (largest_batch, compare_memory):
        options = {"precision": "fp32"} if trace is largest_batch else {}
        with pytest.raises(TraceError, match=r"^Detector: .*values, which shapes do not have"):
            trace(Detector(), (1, 8), memory_bytes="1GiB", **options)


FILE = """
import torch
from torch import nn


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
        return x[x.sum(-1) > 0]
"""


@pytest.mark.parametrize("command", ["xray", "memory"])
def test_the_commands_build_the_model_with_values(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "choosing_by_value.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main([command, "choosing_by_value.py:Chooses", "--input", "6,8"]) == 0
    assert "1 decision (branches, sizes) that depend" in capsys.readouterr().out


class Speech(nn.Module):
    """A layer, and the CTC loss of its output: (N, T, 16) and targets (N, S) to one number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x, targets, target_lengths):
        log_probs = self.layer(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        return nn.functional.ctc_loss(log_probs, targets, lengths, target_lengths)


def speech(longest: int) -> tuple[torch.Tensor, ...]:
    targets = torch.randint(1, 10, (3, 8))
    return torch.randn(3, 40, 16), targets, torch.tensor([longest, 2, 1])


@pytest.mark.parametrize("device_type", BACKENDS)
def test_a_ctc_loss_is_traced_on_any_backend(device_type):
    found = xray(Speech(), *speech(8), device_type=device_type)
    (row,) = (row for row in found.rows if row.op == "_ctc_loss")
    assert row.dtype is torch.float32
    assert "1 decision" in found.decisions
    kept = [
        forecast_memory(
            Speech(), *speech(n), device_type=device_type, precision="fp32", loss_fn=torch.sum
        ).activations
        for n in (8, 3)
    ]
    assert kept[0] - kept[1] == 3 * 40 * 2 * (8 - 3) * 4  # log_alpha, (N, T, 2 S + 1) in fp32


torch.library.define("own_backward::halves", "(Tensor x) -> Tensor")
torch.library.impl("own_backward::halves", "cpu", lambda x: x / 2)


def function_with(backward):
    """An `autograd.Function` that doubles, and whose backward pass does this to a gradient."""

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, *ctx.saved_tensors)

    return Doubles


class WithOwnBackward(nn.Module):
    """A layer, a function of its own, and, if asked, rows that values decide."""

    def __init__(self, function, has_decision):
        super().__init__()
        self.layer, self.function, self.has_decision = nn.Linear(8, 8), function, has_decision

    def forward(self, x):
        y = self.function.apply(self.layer(x))
        return y[y.sum(-1) > -1e9] if self.has_decision else y


ASKS_BACKWARD = {
    "branch": lambda g, x: g if g.sum() > 0 else -g,
    "rows": lambda g, x: g.index_fill(0, (x[:, 0] > 0).nonzero()[:, 0], 0),
}
BACKWARD = {
    "memory": (lambda g, x: g * float(x.detach().cpu().numpy().max()), "reads the memory"),
    "op": (lambda g, x: torch.ops.own_backward.halves(g), "calls an op that torch cannot run"),
}


@pytest.mark.parametrize("name", ASKS_BACKWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_that_depends_on_values_takes_those_of_the_run(name, dtype):
    x = torch.randn(6, 8)
    found = xray(WithOwnBackward(function_with(ASKS_BACKWARD[name]), False), x, dtype=dtype)
    assert "1 decision" in found.decisions
    assert "only the forward pass" not in str(found)
    plain = xray(WithOwnBackward(function_with(lambda g, x: g), False), x, dtype=dtype)
    assert found.rows == plain.rows


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("has_decision", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_pass_that_fake_tensors_cannot_run_is_not_followed(name, has_decision, dtype):
    """The X-ray of the forward pass stands: no other course was taken there."""
    backward, why = BACKWARD[name]
    x = torch.randn(6, 8)
    model = WithOwnBackward(function_with(backward), has_decision)
    found = xray(model, x, dtype=dtype)
    assert not found.raised
    assert ("1 decision" in found.decisions) == has_decision
    said = f"The X-ray traced only the forward pass, because the backward pass of Doubles {why}"
    assert said in str(found)
    plain = xray(WithOwnBackward(function_with(lambda g, x: g), has_decision), x, dtype=dtype)
    assert found.rows == plain.rows
    assert "only the forward pass" not in str(plain)


def test_a_backward_pass_that_fails_before_values_decide_fails():
    def backward(gradient, x):
        gradient = gradient @ torch.ones(8, 8, dtype=torch.float64, device=x.device)
        return gradient if gradient.sum() > 0 else -gradient

    with pytest.raises(TraceError, match="backward pass of Doubles"):
        xray(WithOwnBackward(function_with(backward), False), torch.randn(6, 8))


def test_a_roi_align_written_in_python_is_traced_beside_nms():
    """As detectors outside of torchvision have it: its backward pass looks at the boxes."""

    class RoiMeans(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features, boxes):  # (1, C, H, W) and (N, 4) to (N, C)
            ctx.save_for_backward(boxes)
            ctx.shape = features.shape
            return features.mean((0, 2, 3)).expand(len(boxes), -1)

        @staticmethod
        def backward(ctx, gradient):
            (boxes,) = ctx.saved_tensors
            result = gradient.new_zeros(ctx.shape)
            for row, (left, top, right, bottom) in enumerate(boxes.long().tolist()):
                result[0, :, top:bottom, left:right] += gradient[row, :, None, None]
            return result, None

    class Detects(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, image, boxes, scores):
            kept = torchvision.ops.nms(boxes, scores, 0.5)
            return self.head(RoiMeans.apply(self.backbone(image), boxes[kept]))

    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [4, 4, 8, 8]])
    found = xray(Detects(), torch.randn(1, 3, 8, 8), boxes, torch.tensor([0.9, 0.8, 0.7]))
    assert "decisions" in found.decisions
    assert not found.raised
    assert "only the forward pass" not in str(found)


class Filled(nn.Module):
    """Writes a trained value where a mask is, as SpecAugment does: the gradient picks by it."""

    def __init__(self):
        super().__init__()
        self.layer, self.value = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x):  # (N, 64)
        out = self.layer(x)
        out[x[:, 0] > 0] = self.value.to(out.dtype)
        return out


class CheckpointedChoice(nn.Module):
    """Chooses once more in the backward pass, in which its forward pass is repeated."""

    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(64, 64), nn.Linear(64, 64)

    def _run(self, x):
        return self.part(x[x.detach().sum(-1) > 0]).relu()

    def forward(self, x):
        return checkpoint(self._run, self.first(x), use_reentrant=False)


class ZerosLeftOut(torch.autograd.Function):
    """The identity; its backward pass asks whether there is any gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone() if gradient.any() else None


class OwnFunction(nn.Linear):
    def forward(self, x):
        return ZerosLeftOut.apply(super().forward(x))


ASKING_BACKWARD = {
    "filled": Filled,
    "checkpointed": CheckpointedChoice,
    "own function": lambda: OwnFunction(64, 64),
}


@pytest.mark.parametrize("name", ASKING_BACKWARD)
def test_what_the_backward_pass_asks_is_answered(name):
    model, x = ASKING_BACKWARD[name](), torch.randn(96, 64)
    options = {"optimizer": "sgd", "loss_fn": loss_of}
    for device_type in ("cuda", "cpu"):
        for precision in ("fp16", "bf16"):
            asked = {"precision": precision, "device_type": device_type}
            assert "decision" in str(forecast_memory(model, x, **asked, **options))
    found = forecast_memory(model, x, precision="fp32", device_type="cpu", **options)
    forward, backward, gradients = real_peaks(model, "fp32", x)
    there = found.weights + x.nbytes
    assert found.gradients == gradients
    assert found.phases["forward"] == pytest.approx(there + forward, rel=0.05)
    assert found.phases["backward"] == pytest.approx(there + backward, rel=0.05)


@pytest.mark.parametrize("name", ASKING_BACKWARD)
def test_a_trace_without_a_backward_pass_takes_the_decisions_of_a_run_without_one(name):
    class Chosen(nn.Sequential):  # one that asks in its forward pass too
        def forward(self, x):
            return super().forward(x[x[:, 1] > 0])

    model, x = Chosen(ASKING_BACKWARD[name]()), torch.randn(96, 64)
    assert forecast_inference(model, x, precision="bf16").decisions
    with torch.no_grad():
        assert xray(model, x).decisions
        assert forecast_memory(model, x, precision="fp32")  # a training step all the same
    assert xray(model, x).raised is None


def test_an_xray_is_told_what_its_own_functions_ask():
    found = xray(OwnFunction(8, 8), torch.randn(4, 8))
    assert found.raised is None
    assert "1 decision" in found.decisions


def test_an_op_without_a_backward_pass_is_named_where_values_decide_too():
    @torch.library.custom_op("amp_lab_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    doubled.register_fake(torch.empty_like)

    class WithOp(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return doubled(x[x.detach().sum(-1) > 0])

    model, x = WithOp(8, 8), torch.randn(4, 8)
    found = xray(model, x)
    assert "1 decision" in found.decisions
    assert any("no autograd formula" in line for line in found.advice)
    with pytest.raises(TraceError, match="no autograd formula"):
        forecast_memory(model, x, precision="fp32")


@pytest.mark.parametrize("name", ["router", "conformer", "loss"])
def test_each_rank_of_fsdp_takes_the_decisions(name):
    build, inputs, loss_fn = MODELS[name]
    options = {"precision": "bf16", "loss_fn": loss_fn, "fsdp_ranks": 2}
    assert "decision" in str(forecast_memory(build(), *inputs(), **options))


def test_each_rank_of_fsdp_takes_the_decisions_of_the_backward_pass():
    options = {"precision": "bf16", "loss_fn": loss_of, "fsdp_ranks": 2}
    assert "decision" in str(forecast_memory(Filled(), torch.randn(6, 64), **options))


def test_masks_are_read_as_they_are_for_real(monkeypatch):
    """As transformers does, which asks no fake tensor whether it is a mask of ones."""
    utils = types.ModuleType("transformers.utils.import_utils")
    utils.is_fake_tensor = lambda x: isinstance(x, torch._subclasses.FakeTensor)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)

    class Masked(Detector):
        def forward(self, x, mask):
            x = super().forward(x)
            unread = utils.is_fake_tensor(mask)
            return x if not unread and mask.all() else x * mask[0]

    model, x = Masked(), torch.randn(9, 8)
    for first in (0.0, 1.0):
        mask = torch.tensor([[first, 1.0, 1.0, 1.0]])
        fake, real = (
            xray(model, x, mask, device_type="cpu", dtype=torch.float32, real=real)
            for real in (False, True)
        )
        assert fake.rows == real.rows
        assert any(row.op == "mul" for row in fake.rows) == (first == 0.0)


@pytest.mark.weekly
def test_wav2vec2_is_forecast_with_its_masks_and_its_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 32, "vocab_size": 12, "mask_time_length": 2},
        **{"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)},
        **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8},
        **{"num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.3},
    )
    model = transformers.Wav2Vec2ForCTC(config).train()
    attention_mask = torch.ones(2, 800, dtype=torch.int64)
    attention_mask[1, 500:] = 0
    labels = torch.randint(1, 12, (2, 6))
    for masks in ({}, {"attention_mask": attention_mask}):
        for precision in ("fp32", "fp16", "bf16"):
            found = forecast_memory(
                model,
                torch.randn(2, 800),
                precision=precision,
                loss_fn=lambda output: output.loss,
                labels=labels,
                **masks,
            )
            assert "decisions" in str(found)


class Spectrum(nn.Module):
    """An FFT of 100 values, which cuFFT refuses in 16 bits, and then NumPy's copy of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 100)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.layer(x)).abs()
        return torch.from_numpy(spectrum.detach().cpu().numpy()).to(x.device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_failure_before_what_reads_memory_is_told(dtype):
    found = xray(Spectrum(), torch.randn(4, 8), device_type="cuda", dtype=dtype)
    assert "_fft_r2c" in found.raised
    assert "powers of two" in found.raised or "Unsupported dtype" in found.raised
    assert re.search(r"op numpy .*memory of a tensor$", found.raised)
    assert [row.op for row in found.rows] == ["addmm"]
    with pytest.raises(TraceError, match=r"op numpy .*memory of a tensor"):
        xray(Spectrum(), torch.randn(4, 8), device_type="cuda", dtype=torch.float32)

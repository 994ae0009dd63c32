"""xray: fake traces against real ones, and against what autocast is known to do."""

import contextlib
import copy
import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import torchvision
from cpu_kernels import needs_lstm
from remedy_tests import says
from small_models import CellRnn, Cnn, Head, Rnn, Transformer, hooks_of, images, series, tokens
from torch import nn

from amp_lab.core.errors import AmpLabError, DeviceError, TraceError
from amp_lab.tracing.xray import xray

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
models = torchvision.models


def picture():
    return (torch.randn(2, 3, 32, 32),)


FAMILIES = {
    "convnext": (
        lambda: models.ConvNeXt([models.convnext.CNBlockConfig(8, 16, 2)], num_classes=4),
        picture,
    ),
    "mnasnet": (models.mnasnet0_5, picture),
    "mobilenet_v3": (models.mobilenet_v3_small, picture),
    "resnet": (models.resnet18, picture),
    "shufflenet": (models.shufflenet_v2_x0_5, picture),
    "squeezenet": (models.squeezenet1_1, picture),
    "swin": (lambda: models.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [7, 7]), picture),
    "vit": (lambda: models.VisionTransformer(32, 8, 2, 2, 16, 32), picture),
    "unet": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 3),
            nn.InstanceNorm1d(8),
            nn.GroupNorm(2, 8),
            nn.ConvTranspose1d(8, 4, 3),
            nn.Softmax(-1),
        ),
        lambda: (torch.randn(2, 3, 9),),
    ),
    "lstm": (Rnn, lambda: (series(),)),
    "gru": (lambda: Rnn(nn.GRU), lambda: (series(),)),
    "gru cell": (CellRnn, lambda: (series(),)),
    "gpt": (Transformer, lambda: (tokens(),)),
    "encoder-decoder": (
        lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        lambda: (torch.randn(2, 5, 16), torch.randn(2, 4, 16)),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, dropout=0.1),
        lambda: (torch.randn(3, 2, 8),) * 3,
    ),
    "bag": (lambda: nn.EmbeddingBag(5, 4), lambda: (torch.randint(5, (2, 3)),)),
}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fake_trace_agrees_row_for_row_with_a_real_run(family, dtype):
    if family == "lstm" and dtype is BF16:
        needs_lstm(BF16)
    build, inputs = FAMILIES[family]
    model, inputs = build(), inputs()
    real = xray(model, *inputs, device_type="cpu", dtype=dtype, real=True)
    fake = xray(model, *inputs, device_type="cpu", dtype=dtype)
    assert fake.rows == real.rows
    assert fake.casts == real.casts
    assert fake.outputs == real.outputs
    assert fake.advice == real.advice
    assert len(fake.rows) >= 2
    with torch.autocast("cpu", dtype=BF16, enabled=dtype is BF16):
        output = model(*inputs)
    leaves = torch.utils._pytree.tree_leaves(output)
    assert fake.output_dtypes == [t.dtype for t in leaves if isinstance(t, torch.Tensor)]
    assert bool(fake.casts) == (dtype is BF16 and family != "bag")


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
@pytest.mark.parametrize("family", ["lstm", "gru", "gru cell", "gpt", "attention", "vit"])
def test_models_run_on_devices_that_are_not_here(family, device):
    build, inputs = FAMILIES[family]
    found = xray(build(), *inputs(), device_type=device)
    assert found.dtype is FP16
    assert bool(found.casts)
    assert FP16 in {dtype for row in found.rows for dtype in row.out_dtypes}


def test_recurrent_layers_follow_the_rule_of_their_backend():
    found = {
        device: xray(nn.LSTM(8, 16), torch.randn(3, 2, 8), device_type=device, dtype=BF16)
        for device in ("cuda", "cpu", "mps")
    }
    outputs = {device: x.output_dtypes for device, x in found.items()}
    assert outputs == {"cuda": [FP16] * 3, "cpu": [BF16] * 3, "mps": [FP32] * 3}
    lstm = {device: x.rows[-1] for device, x in found.items()}
    assert {row.op for row in lstm.values()} == {"lstm"}
    assert {row.flops for row in lstm.values()} == {2 * 6 * (8 * 64 + 16 * 64)}
    assert [row.dtype for row in lstm.values()] == [FP16, BF16, FP32]
    assert any(re.search(r" 100\.0 % .*stays in fp32", line) for line in found["mps"].advice)
    assert not any(cast.cached for cast in found["cuda"].casts)


RECURRENT = {
    "lstm": (nn.LSTM, {}),
    "lstm, batch first": (nn.LSTM, {"batch_first": True}),
    "lstm, bidirectional": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "lstm, two layers": (nn.LSTM, {"num_layers": 2, "dropout": 0.5}),
    "lstm, projected": (nn.LSTM, {"proj_size": 4}),
    "gru": (nn.GRU, {}),
    "gru, batch first": (nn.GRU, {"batch_first": True}),
    "gru, bidirectional": (nn.GRU, {"bidirectional": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
    "rnn, bidirectional": (nn.RNN, {"bidirectional": True, "batch_first": True}),
}


@contextlib.contextmanager
def onednn_if(enabled):
    """What torch.backends.mkldnn.flags does, which warns where there is no Intel GPU."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN", "torch's own"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_on_the_cpu_says_what_its_products_compute_in(name, onednn):
    kind, options = RECURRENT[name]
    if onednn and kind is nn.LSTM and "proj_size" not in options:
        needs_lstm(BF16)
    model, inputs = kind(8, 16, **options), torch.randn(4, 3, 8)
    with onednn_if(onednn):
        real, fake = (xray(model, inputs, device_type="cpu", real=r) for r in (True, False))
        off = xray(model, inputs, device_type="cpu", dtype=FP32)
    assert fake.rows == real.rows
    assert fake.casts == real.casts
    for found in (fake, real):
        (row,) = (row for row in found.rows if row.flops)
        assert row.product_dtype is row.dtype is BF16
        assert row.in_dtypes[0] is BF16
        assert found.low_share == 1
        assert not any("stays in fp32" in line for line in found.advice)
        weights = {c.what for c in found.casts if c.what.startswith("parameter ")}
        assert weights == {f"parameter {name}" for name, _ in model.named_parameters()}
        assert "input 0" in {cast.what for cast in found.casts}
    assert [row.product_dtype for row in off.rows if row.flops] == [FP32]
    if kind is nn.GRU:  # its state stays wide, from outside it looks like fp32
        assert row.out_dtypes[0] is FP32


def test_a_cell_says_what_its_products_compute_in():
    found = xray(CellRnn(), series(), device_type="cpu")
    cells = [row for row in found.rows if row.op == "gru_cell"]
    assert len(cells) == 5
    assert {row.product_dtype for row in cells} == {BF16}
    assert {row.product_dtype for row in found.rows if row.op != "gru_cell"} == {None}


def test_a_long_recurrent_layer_is_as_whole_as_a_short_one():
    for options in ({"batch_first": True, "bidirectional": True}, {"num_layers": 2}):
        model, x = nn.GRU(8, 16, **options), torch.randn(40, 50, 8)
        real = xray(model, x, device_type="cpu", real=True)
        fake = xray(model, x, device_type="cpu")
        assert fake.rows == real.rows
        assert fake.outputs == real.outputs
        assert fake.casts == real.casts


class Attend(nn.Module):
    def forward(self, x):
        q, k, v = x.chunk(3, -1)
        mask = torch.zeros(4, 4, device=x.device)
        return F.scaled_dot_product_attention(attn_mask=mask, query=q, key=k, value=v)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "cpu"])
def test_attention_is_one_op_in_low_precision_with_a_cast_for_each_input(device):
    found = xray(Attend(), torch.randn(2, 3, 4, 24), device_type=device, dtype=BF16)
    (row,) = (row for row in found.rows if row.op == "scaled_dot_product_attention")
    assert row.in_dtypes[1:] == (BF16,) * 3
    assert row.out_dtypes == (BF16,)
    assert row.out_shapes == ((2, 3, 4, 8),)
    assert row.flops == 2 * (2 * 2 * 3 * 4 * 4 * 8)
    shapes = [cast.shape for cast in found.casts if cast.what == "input 0"]
    assert shapes == [(2, 3, 4, 8)] * 3


class MadeOnCpu(nn.Module):
    def forward(self, x):
        at = torch.arange(8.0)
        return x + (at * torch.ones(8, device="cpu")).to(x.device)


class MadeOnDefault(nn.Module):
    def forward(self, x):
        return x + torch.arange(8.0)


class Misplaced(nn.Module):
    def forward(self, x):
        return x + torch.ones(8, device="cpu")


def test_tensors_made_on_the_default_device_may_be_anywhere_but_others_may_not():
    for model in (MadeOnCpu(), MadeOnDefault()):
        assert xray(model, torch.randn(8, 8)).output_dtypes == [FP32]
    with pytest.raises(TraceError, match=r"devices,? cuda:0(,| and) cpu"):
        xray(Misplaced(), torch.randn(8, 8))


def rows_of(found):
    return [(row.module, row.called, row.in_dtypes[0], row.out_dtypes[0]) for row in found.rows]


def test_the_rows_of_cuda_follow_its_policy():
    found = xray(Head(), torch.randn(8, 8))
    assert rows_of(found) == [
        ("a", "linear", FP16, FP16),
        ("norm", "layer_norm", FP32, FP32),
        ("b", "linear", FP16, FP16),
        ("", "softmax", FP16, FP32),
    ]
    casts = [(c.module, c.from_dtype, c.to_dtype, c.what, c.cached) for c in found.casts]
    assert sorted(casts[:3], key=str) == sorted(
        [
            ("a", FP32, FP16, "input 0", False),
            ("a", FP32, FP16, "parameter a.weight", True),
            ("a", FP32, FP16, "parameter a.bias", True),
        ],
        key=str,
    )
    assert ("norm", FP16, FP32, "output of linear in 'a'", False) in casts
    assert ("b", FP32, FP16, "output of layer_norm in 'norm'", False) in casts
    assert found.output_dtypes == [FP32]
    assert found.low_share == 1.0
    assert found.rows[0].in_shapes == ((16,), (8, 8), (8, 16))
    assert found.rows[0].flops == 2 * 8 * 8 * 16


class Island(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            y = self.inside(x)
        with torch.autocast(x.device.type, dtype=BF16):
            z = self.outside(y)
        return z, y.half(), y.double()


@pytest.mark.parametrize("device", ["cuda", "mps", "cpu"])
def test_autocast_in_the_models_own_code_counts(device):
    found = xray(Island(), torch.randn(8, 8), device_type=device, dtype=FP16)
    linear = {row.module: row.out_dtypes[0] for row in found.rows if row.called == "linear"}
    assert linear == {"inside": FP32, "outside": BF16}
    assert found.output_dtypes == [BF16, FP16, torch.float64]
    assert {cast.module for cast in found.casts} == {"outside"}
    assert [row.op for row in found.rows if row.module == ""] == ["_to_copy", "_to_copy"]
    said = "\n".join(found.advice)
    assert re.search(r"linear in 'inside': .*does not change it, 50\.0 % ", said)
    assert "disabled there" in said


# Inputs and outputs


@dataclass
class Batch:
    x: torch.Tensor
    scale: float
    extra: dict


@dataclass(frozen=True)
class Result:
    y: torch.Tensor
    parts: tuple


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch, *, mask=None):
        y = self.layer(batch.x * batch.scale + batch.extra["bias"][0])
        return Result(y, (y if mask is None else y * mask, {"n": 3}))


def test_structures_come_in_and_go_out():
    batch = Batch(torch.randn(8, 8), 2.0, {"bias": [torch.randn(8)]})
    found = xray(Structured(), batch, mask=torch.ones(8, 8))
    assert found.outputs == {"y": (FP16, (8, 8)), "parts.0": (FP32, (8, 8))}
    assert batch.x.device.type == "cpu"


def test_a_mask_whose_kind_torch_reads_is_told_with_the_remedy():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    inputs = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    with pytest.raises(TraceError, match="in 'decoder' depends on values") as error:
        xray(model, *inputs, tgt_mask=mask.to("meta"))
    assert says("trace.causal_mask", str(error.value))
    assert xray(model, *inputs, tgt_mask=mask).decisions.startswith("1 decision ")
    options = {"tgt_mask": mask, "tgt_is_causal": True, "device_type": "cpu"}
    assert xray(model, *inputs, **options).rows == xray(model, *inputs, **options, real=True).rows


# Nothing changes


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = Cnn()
        self.seen = []
        self.last = None

    def forward(self, x):
        self.seen.append(x)
        self.last = torch.dropout(self.cnn(x), 0.5, True)
        if len(x) == 3:
            raise ValueError("three")
        return self.last.add_(1)


@pytest.mark.parametrize(
    ("device", "real"), [("cpu", True), ("cpu", False), ("cuda", False), ("mps", False)]
)
@pytest.mark.parametrize("count", [2, 3])
def test_the_model_and_torch_are_as_they_were(device, real, count):
    model, x = Stateful().train(), images(count)
    before, inputs = copy.deepcopy(model.state_dict()), x.clone()
    addresses = [t.data_ptr() for t in model.state_dict().values()]
    attributes = [dict(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    state = modes()
    with pytest.raises(TraceError, match="three") if count == 3 else contextlib.nullcontext():
        xray(model, x, device_type=device, real=real)
    assert modes() == state
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, inputs)
    assert hooks_of(model) == 0
    assert (model.seen, model.last) == ([], None)
    assert [t.data_ptr() for t in model.state_dict().values()] == addresses
    assert [dict(vars(module)) for module in model.modules()] == attributes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def modes():
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        torch.backends.cudnn.enabled,
        F.scaled_dot_product_attention,
        torch.cuda.is_bf16_supported,
        torch.cuda.amp.common.amp_definitely_not_available,
    )


def test_a_model_on_meta_needs_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**15, 2**17), nn.Linear(2**17, 2**15))
    found = xray(model, torch.empty(8, 2**15, device="meta"))
    assert found.output_dtypes == [FP16]
    assert model[0].weight.is_meta
    with pytest.raises(TraceError, match=r"'0\.weight' is on 'meta'"):
        xray(model, torch.empty(8, 2**15), device_type="cpu", real=True)
    with pytest.raises(TraceError, match="input 0 is on 'meta'"):
        xray(nn.Linear(2, 2), torch.empty(1, 2, device="meta"), device_type="cpu", real=True)


# What cannot be


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.choice = nn.Identity()

    def forward(self, x):
        x = self.layer(x)
        return x if x.sum() > 0 else -x


def test_a_course_that_depends_on_values_names_the_op():
    with pytest.raises(TraceError, match=r"_local_scalar_dense .*itself depends"):
        xray(Branches(), torch.empty(8, 8, device="meta"))
    assert xray(Branches(), torch.randn(8, 8), device_type="cpu", real=True).rows


def test_a_detection_model_is_followed_to_its_end():
    model = models.detection.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=2, min_size=64, max_size=64
    ).eval()
    images = [torch.rand(3, 64, 64)]
    how = {"device_type": "cpu", "dtype": torch.float32}
    found = xray(model, images, **how)
    assert found.rows == xray(model, images, **how, real=True).rows
    assert "Other inputs may lead to other decisions" in found.decisions
    assert xray(model.backbone, torch.rand(1, 3, 64, 64)).output_dtypes == [FP16] * 5


@pytest.mark.parametrize(
    ("model", "inputs", "options", "error", "said"),
    [
        (
            Cnn(),
            (torch.randn(2, 4, 6, 6),),
            {},
            TraceError,
            r"\(2, 4, 6, 6\) float32 in 'features.0'",
        ),
        (Cnn(), (), {}, TraceError, "input of no tensor.*TypeError"),
        (Cnn(), (images(), images()), {}, TraceError, r"\(2, 3, 6, 6\).*\(2, 3, 6, 6\).*TypeError"),
        (Cnn().half(), (images(),), {}, TraceError, "Give input 0 in float16"),
        (Cnn(), ("text",), {}, TraceError, "no tensor, only a str"),
        (Cnn(), ((2, 3, 6, 6),), {}, TraceError, r"torch.empty\(2, 3, 6, 6\)"),
        (Cnn(), (images().numpy(),), {}, TraceError, "is a ndarray, not a tensor"),
        (Cnn, (images(),), {}, TraceError, "Cnn is not a model"),
        (len, (images(),), {}, TraceError, "is not a model"),
        (Cnn(), (images(),), {"device_type": "tpu"}, DeviceError, "'tpu'"),
        (Cnn(), (images(),), {"device_type": "xpu", "real": True}, DeviceError, "xpu"),
        (Cnn(), (images(),), {"dtype": torch.float64}, DeviceError, "float64"),
        (
            nn.LSTM(8, 8),
            (nn.utils.rnn.pack_sequence([torch.ones(2, 8)]),),
            {},
            TraceError,
            "give a padded tensor",
        ),
        (nn.LazyLinear(3), (images(),), {}, TraceError, "no shape yet"),
        (nn.DataParallel(Cnn()), (images(),), {}, TraceError, "give its .module"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(model, inputs, options, error, said):
    with pytest.raises(error, match=said) as raised:
        xray(model, *inputs, **options)
    assert isinstance(raised.value, AmpLabError)
    assert len(str(raised.value).splitlines()) == 1


def test_a_model_that_fails_in_fp32_too_is_told_in_fp32():
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(TraceError, match=r"unsigned char.*float") as raised:
        xray(nn.Conv2d(3, 4, 3), pixels, dtype=BF16)
    assert "BFloat16" not in str(raised.value)


class Takes(nn.Linear):
    def forward(self, x, **given):
        return super().forward(x) + len(given)


@pytest.mark.parametrize(("name", "own"), [("device", "device_type="), ("precision", "dtype=")])
def test_an_argument_of_other_tools_is_no_input(name, own):
    with pytest.raises(
        TraceError, match=f"neither xray nor the model has an argument {name}=: give {own}"
    ):
        xray(Takes(4, 4), torch.empty(2, 4), **{name: "cpu"})
    assert xray(Takes(4, 4), torch.empty(2, 4), mask="any").rows


def test_complex_products_are_said_to_be_left_alone():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(33, 33, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) @ self.weight)

    said = "\n".join(xray(Spectral(), torch.randn(8, 64), dtype=BF16).advice)
    assert re.search(r"stays in fp32, because .*does not cast complex numbers", said)


class Sums(nn.Module):
    """Sums along dimensions, and an attention, which is one row as a whole."""

    def forward(self, x):
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x.cumsum(1).sum((0, -1), keepdim=True).mul(2.5)


def test_the_plain_arguments_of_an_op_are_recorded_and_are_not_in_the_json():
    found = xray(Sums(), torch.rand(2, 3, 4), dtype=torch.float16)
    arguments = {row.op: row.arguments for row in found.rows}
    fp32 = {"dtype": torch.float32}  # which autocast adds
    assert arguments == {
        "scaled_dot_product_attention": {"is_causal": True},
        "cumsum": {"dim": 1} | fp32,
        "sum": {"dim": (0, -1), "keepdim": True} | fp32,
        "mul": {"other": 2.5},
    }
    assert "arguments" not in found.to_json()

"""Each remedy of X-ray for a model that runs: losses, experts, frozen weights, ops of one's own."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
import torchvision
from remedy_tests import does, says
from torch import nn

from amp_lab import xray
from amp_lab.core.remedies import REMEDIES
from amp_lab.core.tensors import named_tensors
from amp_lab.tracing.records import LOSS, is_of_loss

pytestmark = pytest.mark.usefixtures("one_thread_and_seed")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def advice(found) -> str:
    return "\n".join(found.advice)


# Losses


class OwnLoss(nn.Module):
    """Computes its loss itself if it is given a target, as the models of libraries do."""

    def __init__(self, returns: str):
        super().__init__()
        self.layer, self.returns = nn.Linear(8, 5), returns

    def forward(self, x, target=None):
        logits = self.layer(x)
        loss = None if target is None else F.cross_entropy(logits, target)
        if target is None:
            return {"logits": logits} if "{" in self.returns else logits
        return eval(self.returns, {"loss": loss, "logits": logits})


RETURNS = ["{'loss': loss, 'logits': logits}", "(loss, logits)", "{'a': {'x_logits': logits}}"]


@does("xray.loss_in_the_model")
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_the_loss_of_a_library_computed_from_its_logits(returns, device):
    model, x, target = OwnLoss(returns), torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
    options = {"device_type": device, "dtype": FP16}
    said = advice(xray(model, x, target, **options))
    assert says("xray.loss_in_the_model", said)
    assert not says("xray.loss_in_low_precision", said)
    assert re.search(r" log_softmax .*fp16, .*fp32 loss", said)
    (place,) = re.findall(r"from its output '([\w.]+)'", said)
    assert place.endswith("logits") or place == "1"

    def outside(output: object) -> torch.Tensor:
        ((_, logits),) = [pair for pair in named_tensors(output) if pair[1].dim()]
        with torch.autocast(device, enabled=False):
            return F.cross_entropy(eval("logits.float()", {"logits": logits}), target)

    found = xray(model, x, loss_fn=outside, **options)
    assert {row.dtype for row in found.rows if is_of_loss(row)} == {FP32}
    assert "loss" not in advice(found)


def test_a_loss_of_a_library_on_a_cpu_has_nothing_to_be_mended():
    """AutocastCPU runs the whole cross_entropy in fp32."""
    model, target = OwnLoss(RETURNS[0]), torch.zeros(6, dtype=torch.long)
    for real in (False, True):
        found = xray(model, torch.randn(6, 8), target, device_type="cpu", real=real)
        of_loss = [row for row in found.rows if is_of_loss(row)]
        assert [row.op for row in of_loss] == ["_log_softmax", "nll_loss_forward"]
        assert {row.dtype for row in of_loss} == {FP32}
        assert "loss" not in advice(found)


def test_the_classifier_of_a_library_names_its_logits():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    given = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}
    labels = torch.zeros(2, dtype=torch.long)
    found = xray(model, **given, labels=labels, loss_fn=lambda output: output.loss)
    assert re.search(r"Loss: fp32, .* log_softmax .*fp16", str(found))
    assert " output 'logits', cast with .float()" in advice(found)

    def outside(output: object) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return F.cross_entropy(output.logits.float(), labels)

    found = xray(model, **given, loss_fn=outside)
    assert "Loss: fp32." in str(found)
    assert "log_softmax" not in advice(found)


@does("xray.loss_alone")
def test_a_model_that_returns_its_loss_alone_returns_logits_too():
    x, target = torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
    said = advice(xray(OwnLoss("loss"), x, target))
    assert says("xray.loss_alone", said)
    (cast,) = re.findall(r"output\.float\(\)", said)

    def outside(output: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return F.cross_entropy(eval(cast, {"output": output}), target)

    found = xray(OwnLoss("logits"), x, loss_fn=outside)
    assert {row.dtype for row in found.rows if row.module == LOSS} == {FP32}
    assert "loss" not in advice(found)


# Work that autocast leaves in fp32


class Experts(nn.Module):
    """A matrix for each group of rows, as mixtures of experts have it."""

    def __init__(self, left: str = "x", right: str = "weight"):
        super().__init__()
        self.router, self.weight = nn.Linear(16, 2), nn.Parameter(torch.randn(2, 16, 32))
        self.operands = left, right

    def forward(self, x):
        ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
        names = {"x": x, "weight": self.weight, "torch": torch}
        left, right = (eval(code, names) for code in self.operands)
        return F.grouped_mm(left, right, offs=ends) + self.router(x).sum()


@does("xray.no_rule")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_grouped_matmuls_that_autocast_does_not_know(device):
    x, options = torch.randn(16, 16), {"device_type": device, "dtype": BF16}
    found = xray(Experts(), x, **options)
    assert [row.dtype for row in found.rows if row.op == "_grouped_mm"] == [FP32]
    said = advice(found)
    assert says("xray.no_rule", said)
    (cast,), (whole,) = (re.findall(rf"{name}\.to\(torch\.\w+\)", said) for name in ("x", "model"))
    mended = xray(Experts(cast, cast.replace("x", "weight")), x, **options)
    names = {"torch": torch, "model": Experts(), "x": x}
    eval(whole, names)
    cast_whole = xray(names["model"], eval(cast, names), device_type=device)
    for found in (mended, cast_whole):
        assert {row.dtype for row in found.rows if row.flops} == {BF16}
        assert not says("xray.no_rule", advice(found))
    assert cast_whole.casts == []


@does("xray.rows_of_the_input")
@pytest.mark.parametrize("attention", [False, True])
def test_rows_that_are_no_multiple_of_eight_come_from_the_input(attention):
    class Scores(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y @ y.mT if attention else y

    said = advice(xray(Scores(16, 16), torch.randn(2, 49, 16)))
    assert re.search(r"linear .*itself: 98 rows", said)
    assert says("xray.rows_of_the_input", said)
    assert "multiples of 8" not in advice(xray(Scores(16, 16), torch.randn(2, 48, 16)))
    said = advice(xray(nn.Linear(16, 9), torch.randn(8, 16)))
    assert "9 output features" in said
    assert not says("xray.rows_of_the_input", said)


# Frozen weights


@does("xray.frozen")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_frozen_weights_are_cast_once(device):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    x, options = torch.randn(4, 8), {"device_type": device, "dtype": BF16}
    assert not says("xray.frozen", advice(xray(model, x, **options)))
    model[0].requires_grad_(False)
    assert not says("xray.frozen", advice(xray(model, x, **options)))
    found = xray(model.requires_grad_(False), x, **options)
    assert says("xray.frozen", advice(found))
    weights = [cast for cast in found.casts if cast.is_of_parameter]
    assert not any(cast.cached for cast in weights)
    assert f"{sum(cast.nbytes for cast in weights) / 2**10:.1f} KiB in this" in advice(found)
    (call,) = re.findall(r"model\.to\(torch\.\w+\)", advice(found))
    eval(call, {"model": model, "torch": torch})
    found = xray(model, x.to(BF16), device_type=device)
    assert found.casts == []
    assert {row.dtype for row in found.rows} == {BF16}
    assert not says("xray.frozen", advice(found))


def test_a_frozen_model_casts_its_weights_in_each_pass_of_a_block():
    """What the remedy says of autocast, seen by a real run: trained weights are cast once."""
    casts = {}
    for trained in (True, False):
        layer, made = nn.Linear(8, 8).requires_grad_(trained), []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if func is torch.ops.aten._to_copy.default and out.shape == (8, 8):
                    made.append(out)  # noqa: B023  # used in this turn alone
                return out

        x = torch.randn(4, 8)
        with torch.autocast("cpu", BF16), Watch():
            for _ in range(3):
                layer(x)
        casts[trained] = len(made)
    assert casts == {True: 1, False: 3}


# Ops of one's own


_numbers = itertools.count()


def new_op(has_gradient: bool = True):
    """An op as flash attention is: its kernel takes one dtype alone, and nobody casts for it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor):
        if not q.dtype == k.dtype == v.dtype:
            raise RuntimeError("attention takes one dtype")
        return F.scaled_dot_product_attention(q, k, v) * scale.to(q.dtype)

    schema = "(Tensor q, Tensor k, Tensor v, Tensor scale) -> Tensor"
    name = f"amp_lab_tests::attention_{next(_numbers)}"
    op = torch.library.custom_op(name, attend, mutates_args=(), schema=schema)
    op.register_fake(lambda q, k, v, scale: torch.empty_like(v))
    if has_gradient:
        op.register_autograd(lambda ctx, gradient: (gradient, gradient, gradient, None))
    return op


class Attends(nn.Module):
    """Rotates queries and keys in fp32, as rotary embeddings often do."""

    def __init__(self, op, casts: tuple[str, ...] = ("q", "k"), function=None):
        super().__init__()
        self.qkv, self.op, self.casts, self.function = nn.Linear(8, 24), op, casts, function

    def forward(self, x):
        q, k, v = self.qkv(x)[None, None].chunk(3, -1)
        names = {"q": q.float() * 0.5, "k": k.float() * 0.5, "torch": torch}
        q, k = (eval(code, names) for code in self.casts)
        scale = torch.ones((), device=x.device)
        return (self.function or self.op)(q, k, v, scale)


DEVICES = pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "cpu"])


@does("xray.mixed_op")
@DEVICES
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_an_op_that_autocast_does_not_know_gets_one_dtype(device, dtype):
    op, x = new_op(), torch.randn(4, 8)
    options = {"device_type": device, "dtype": dtype}
    low = "fp16" if dtype is FP16 else "bf16"
    said = advice(xray(Attends(op), x, **options))
    assert says("xray.mixed_op", said)
    assert f" gets q, k in fp32 and v in {low}." in said
    casts = tuple(re.findall(r"\b[qkv]\.to\(torch\.\w+\)", said))
    assert [code[0] for code in casts] == ["q", "k"]
    mended = xray(Attends(op, casts), x, **options)
    assert not says("xray.mixed_op", advice(mended))
    assert attention_dtypes(mended) == {dtype}

    (rule,) = re.findall(r"torch\.library\.register_autocast\(.*?, torch\.\w+\)", said)
    eval(rule, {"torch": torch})
    found = xray(Attends(op), x, **options)
    assert not says("xray.mixed_op", advice(found))
    assert attention_dtypes(found) == {dtype}


def attention_dtypes(found) -> set[torch.dtype]:
    """The dtypes that the op of one's own gets for queries, keys and values."""
    assert found.raised is None
    rows = [row for row in found.rows if row.op.startswith("attention_")]
    assert rows
    return {dtype for row in rows for dtype in row.in_dtypes[:3]}


@DEVICES
def test_a_function_that_calls_such_an_op_casts_for_it(device):
    op, x = new_op(), torch.randn(4, 8)
    options = {"device_type": device, "dtype": BF16}

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, scale):
            return op(q, k, v, scale)

        @staticmethod
        def backward(ctx, gradient):
            return gradient, gradient, gradient, None

    said = advice(xray(Attends(op, function=Plain.apply), x, **options))
    assert says("xray.mixed_op", said)
    forward, backward = (
        eval(code, {"torch": torch}) for code in re.findall(r"@(torch\.amp\.\w+\(.*?\))", said)
    )

    class Casting(torch.autograd.Function):
        pass

    Casting.forward = staticmethod(forward(Plain.forward))
    Casting.backward = staticmethod(backward(Plain.backward))
    found = xray(Attends(op, function=Casting.apply), x, **options)
    assert not says("xray.mixed_op", advice(found))
    assert attention_dtypes(found) == {BF16}


@DEVICES
def test_a_model_with_an_op_that_has_no_gradient_is_answered(device):
    op, x = new_op(has_gradient=False), torch.randn(4, 8)
    found = xray(Attends(op, ("q.to(torch.bfloat16)", "k.to(torch.bfloat16)")), x, dtype=BF16)
    assert found.raised is None
    assert "cannot be trained: Trying to backward" in advice(found)
    with torch.no_grad():
        assert "cannot be trained" not in advice(xray(Attends(op), x, device_type=device))


def test_such_an_op_raises_for_real_and_each_cure_helps():
    x = torch.randn(4, 8)

    def run(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return model(x)

    op = new_op()
    with pytest.raises(RuntimeError, match="takes one dtype"):
        run(Attends(op))
    found = xray(Attends(lambda *given: op(*given)), x, device_type="cpu", real=True)
    assert "takes one dtype" in found.raised
    assert says("xray.mixed_op", advice(found))
    assert run(Attends(op, ("q.to(torch.bfloat16)", "k.to(torch.bfloat16)"))).dtype is BF16
    torch.library.register_autocast(op._qualname, "cpu", BF16)
    assert run(Attends(op)).dtype is BF16


def test_ops_that_get_one_dtype_or_have_a_rule_or_run_without_autocast_are_not_remarked_on():
    op, x = new_op(), torch.randn(4, 8)
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0]])

    class Pools(nn.Conv2d):
        def forward(self, x):
            return torchvision.ops.roi_align(super().forward(x), [boxes.to(x.device)], 2)

    one_dtype = Attends(op, ("q.to(torch.bfloat16)", "k.to(torch.bfloat16)"))  # and a scale in fp32
    models = [(one_dtype, x, BF16), (Attends(op), x, FP32)]
    models.append((Pools(1, 1, 1), torch.randn(1, 1, 8, 8), BF16))
    for model, given, dtype in models:
        for device in ("cuda", "cpu"):
            found = xray(model, given, device_type=device, dtype=dtype)
            assert found.raised is None
            assert not says("xray.mixed_op", advice(found))
    assert REMEDIES["xray.mixed_op"]


# Weights in the other 16-bit format


@does("xray.other_half")
@pytest.mark.parametrize(("own", "low"), [(BF16, FP16), (FP16, BF16)])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_weights_in_one_half_under_autocast_to_the_other(device, own, low):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to(own)
    x = torch.randn(4, 8)
    said = advice(xray(model, x, device_type=device, dtype=low))
    assert says("xray.other_half", said)
    (given,) = re.findall(r"dtype=(torch\.\w+)", said)
    as_told = eval(given, {"torch": torch})
    assert not says("xray.other_half", advice(xray(model, x, device_type=device, dtype=as_told)))
    (call,) = re.findall(r"model\.float\(\)", said)
    eval(call, {"model": model})
    assert not says("xray.other_half", advice(xray(model, x, device_type=device, dtype=low)))


@pytest.mark.parametrize(
    ("own", "low", "value", "found"),
    [(BF16, FP16, 2.0**17, torch.inf), (BF16, FP16, 2.0**-30, 0.0), (FP16, BF16, 1 + 2.0**-9, 1.0)],
)
def test_what_a_weight_loses_in_the_other_half(own, low, value, found):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    layer.to(own)
    for dtype, expected in ((low, found), (own, value)):
        with torch.autocast("cpu", dtype):
            assert layer(torch.ones(1, 1)).item() == expected


# Positions


class Rotary(nn.Module):
    """The angles of rotary embeddings, from positions (T,); in an fp32 region if asked to."""

    def __init__(self, region=""):
        super().__init__()
        self.register_buffer("rates", 1e4 ** -torch.linspace(0, 1, 8))
        self.region = region

    def forward(self, positions):
        numbers = positions.float()[:, None]
        if not self.region:
            return numbers @ self.rates[None]
        with eval(self.region, {"torch": torch}):
            return numbers @ self.rates[None]


@does("xray.integers")
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_positions_beyond_what_16_bits_hold(dtype):
    positions = torch.arange(4096)
    said = advice(xray(Rotary(), positions, device_type="cpu", dtype=dtype))
    assert says("xray.integers", said)
    assert f"only up to {256 if dtype is BF16 else 2048:,}" in said
    (region,) = re.findall(r"torch\.autocast\(.*?enabled=False\)", said)
    as_told = Rotary(region)
    found = xray(as_told, positions, device_type="cpu", dtype=dtype)
    assert not says("xray.integers", advice(found))
    with torch.autocast("cpu", dtype):
        wrong, right = Rotary()(positions)[:, 0], as_told(positions)[:, 0]
    assert len(wrong.unique()) < len(positions)
    assert len(right.unique()) == len(positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_only_what_was_an_integer_may_be_a_position(dtype):
    class Scores(nn.Module):
        def forward(self, x):
            return x.float() @ x.float().mT

    found = xray(Scores(), torch.ones(3, 4, dtype=dtype), dtype=BF16)
    assert says("xray.integers", advice(found)) == (dtype is torch.int64)


@does("xray.unknown_work")
@DEVICES
def test_the_work_of_an_op_of_ones_own_with_a_formula(device):
    op = torch.library.custom_op(
        f"amp_lab_tests::product_for_{device}",
        lambda x, weight: x @ weight,
        mutates_args=(),
        schema="(Tensor x, Tensor weight) -> Tensor",
    )
    op.register_fake(lambda x, weight: x.new_empty(len(x), weight.shape[1]))

    class Multiplies(nn.Linear):
        def forward(self, x):
            return op(super().forward(x), self.weight)

    model, x = Multiplies(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        said = advice(xray(model, x, device_type=device))
        assert says("xray.unknown_work", said)
        (code,) = re.findall(r"torch\.utils\.flop_counter\.register_flop_formula\([\w.]+\)", said)
        register = eval(code, {"torch": torch})
        register(lambda x, weight, *_, out_shape=None: 2 * x[0] * x[1] * weight[1])
        found = xray(model, x, device_type=device)
    assert not says("xray.unknown_work", advice(found))
    assert sum(row.flops for row in found.rows) == 2 * (2 * 4 * 8 * 8)

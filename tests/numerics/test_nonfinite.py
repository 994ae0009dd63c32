"""find_nonfinite, held against faults planted in models, and against healthy ones."""

import contextlib
import functools
import math

import matplotlib as mpl
import pytest
import torch
import torch.nn.functional as F
from small_models import (
    CellRnn,
    Cnn,
    Rnn,
    Transformer,
    hooks_of,
    images,
    series,
    tokens,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_lab import find_nonfinite
from amp_lab.errors import NumericsError

mpl.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread_and_seed")


# Planted faults


class Module(nn.Module):
    """A linear layer, and `function` of its output and of the module."""

    def __init__(self, function, width=3):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.fault = Function(function)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.fault(self.first(x)))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Overflowing(torch.autograd.Function):
    """Fine forward; its gradient overflows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e30 * 1e30


class BadForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x - x) / (x - x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def run(model, x, loss_fn=lambda y: y.square().mean(), autocast=None, scaler=None):
    enabled = autocast is not None
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=enabled):
        loss = loss_fn(model(x))
    (loss if scaler is None else scaler.scale(loss)).backward()


def faulty(function, **options):
    """A fault in the module `fault` between two linear layers."""
    return lambda: (Module(function), torch.randn(2, 3), options)


def changed(model, data, change, **options):
    def make():
        net = model()
        with torch.no_grad():
            x = change(net, data())
        return net, x, options

    return make


def at(tensor, value, index=0):
    tensor.view(-1)[index] = value


def poison(name, value):
    def change(net, x):
        at(net.get_parameter(name) if name in dict(net.named_parameters()) else
           net.get_buffer(name), value)  # fmt: skip
        return x

    return change


def poison_data(value):
    def change(net, x):
        at(x, value)
        return x

    return change


def sharpen(net, x):
    """Attention scores beyond 65504, from queries and keys that fit."""
    net.blocks[1].qkv.weight.mul_(300)
    net.embed.weight.mul_(30)
    return x


def grow(name, factor):
    def change(net, x):
        net.get_parameter(name).mul_(factor)
        return x

    return change


def overflow_gates(net, x):
    """Step 1 makes the hidden state 1; in step 2 the reset gate, 0, multiplies an infinity."""
    for part in net.cell.parameters():
        part.zero_()
    reset, update, new = range(0, 4), range(4, 8), range(8, 12)
    net.cell.bias_ih[new] = 100
    net.cell.bias_ih[update] = -100
    net.cell.weight_hh[reset] = -3e38
    net.cell.weight_hh[new] = 3e38
    return x


def mask_all(net, x):
    net.blocks[0].mask.fill_(-math.inf)
    return x


def eval_poison(name, value):
    def change(net, x):
        net.eval()
        return poison(name, value)(net, x)

    return change


def zero_norm(x):
    x = x * 0
    return x / x.norm(dim=-1, keepdim=True)


def in_place(x):
    y = x.clone()
    y[0].sub_(y[0]).log_()
    return y


HALF = {"autocast": torch.float16}
BAD_TARGET = torch.tensor([[math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
FAULTS = {
    # name: (how to make it, phase, module, op, tensor)
    # What was there before
    "inf in a weight": (
        changed(Cnn, images, poison("features.0.weight", math.inf)),
        "before", "features.0", None, "parameter",
    ),
    "NaN in a bias": (
        changed(Transformer, tokens, poison("blocks.1.out.bias", math.nan)),
        "before", "blocks.1.out", None, "parameter",
    ),
    "inf in the weight of an RNN": (
        changed(Rnn, series, poison("rnn.weight_hh_l0", -math.inf)),
        "before", "rnn", None, "parameter",
    ),
    "inf in a running variance": (
        changed(Cnn, images, eval_poison("features.1.running_var", math.inf)),
        "before", "features.1", None, "buffer",
    ),
    "NaN in a running mean": (
        changed(Cnn, images, eval_poison("features.1.running_mean", math.nan)),
        "before", "features.1", None, "buffer",
    ),
    "NaN in a mask": (
        changed(Transformer, tokens, poison("blocks.0.mask", math.nan)),
        "before", "blocks.0", None, "buffer",
    ),
    "NaN in the images": (
        changed(Cnn, images, poison_data(math.nan)), "before", "", None, "input",
    ),
    "inf in a series": (
        changed(CellRnn, series, poison_data(math.inf)), "before", "", None, "input",
    ),
    "NaN in the target": (
        lambda: (Cnn(), images(), {"loss_fn": functools.partial(F.mse_loss, target=BAD_TARGET)}),
        "before", None, None, "constant",
    ),
    # Forward, in models
    "a cast to fp16 that overflows": (
        changed(Cnn, images, lambda net, x: x * 1e6, **HALF),
        "forward", "features.0", "_to_copy", "output",
    ),
    "a convolution that overflows fp16": (
        changed(Cnn, images, grow("features.0.weight", 6e4), **HALF),
        "forward", "features.0", "convolution", "output",
    ),
    "a linear layer that overflows fp16": (
        changed(Cnn, images, grow("head.weight", 3e5), **HALF),
        "forward", "head", "addmm", "output",
    ),
    "attention scores that overflow fp16": (
        changed(Transformer, tokens, sharpen, loss_fn=lambda y: y.float().mean(), **HALF),
        "forward", "blocks.1", "bmm", "output",
    ),
    "a gate of a GRU cell that overflows fp32": (
        changed(CellRnn, series, overflow_gates),
        "forward", "cell", "addmm", "output",
    ),
    "a row of attention that is masked everywhere": (
        changed(Transformer, tokens, mask_all), "forward", "blocks.0", "_softmax", "output",
    ),
    "log of zero": (faulty(lambda x: torch.log(x * 0)), "forward", "fault", "log", "output"),
    "log of a negative number": (
        faulty(lambda x: torch.log(-x.abs())), "forward", "fault", "log", "output",
    ),
    "log of a softmax that underflows": (
        faulty(lambda x: (x * 1e5).softmax(-1).log(), loss_fn=lambda y: -y.mean()),
        "forward", "fault", "log", "output",
    ),
    "division by a zero norm": (faulty(zero_norm), "forward", "fault", "div", "output"),
    "exp that overflows": (
        faulty(lambda x: (x.abs() * 1e4).exp()), "forward", "fault", "exp", "output",
    ),
    "root of a negative number": (
        faulty(lambda x: (-x.abs()).sqrt()), "forward", "fault", "sqrt", "output",
    ),
    "reciprocal of zero": (
        faulty(lambda x: (x * 0).reciprocal()), "forward", "fault", "reciprocal", "output",
    ),
    "a negative base with a fractional exponent": (
        faulty(lambda x: (-x.abs()) ** 0.5001), "forward", "fault", "pow", "output",
    ),
    "zero times inf": (
        faulty(lambda x: x * 0 * torch.tensor(3e38).mul(10)), "forward", "fault", "mul", "output",
    ),
    "inf minus inf": (
        faulty(lambda x: x.double().mul(1e308).mul(1e308).sub(1).float()),
        "forward", "fault", "mul", "output",
    ),
    "acos out of its domain": (
        faulty(lambda x: torch.acos(x.abs() + 1.5)), "forward", "fault", "acos", "output",
    ),
    "deviation of a single value": (
        faulty(lambda x: x / x[:, :1].std(-1, keepdim=True)), "forward", "fault", "std", "output",
    ),
    "the mean of no values": (
        faulty(lambda x: x + x[:0].mean()), "forward", "fault", "mean", "output",
    ),
    "a custom function": (faulty(BadForward.apply), "forward", "fault", "div", "output"),
    "an operation in place, on a view": (faulty(in_place), "forward", "fault", "log_", "output"),
    "a cast of a large constant mask": (
        faulty(lambda x: (x - 1e9).half().exp().float().log().exp().log()),
        "forward", "fault", "log", "output",
    ),
    # Forward, in the loss
    "all targets ignored": (
        lambda: (
            Cnn(), images(),
            {"loss_fn": lambda y: F.cross_entropy(y, torch.tensor([-100, -100]))},
        ),
        "forward", None, "nll_loss_forward", "output",
    ),
    "a loss that overflows fp16": (
        lambda: (Cnn(), images(), {"loss_fn": lambda y: (y * 1e3).half().square().sum()}),
        "forward", None, "pow", "output",
    ),
    "cross entropy by hand": (
        lambda: (Cnn(), images(), {"loss_fn": lambda y: -(y * 0)[:, 0].log().mean()}),
        "forward", None, "log", "output",
    ),
    # Backward
    "sqrt at zero": (
        faulty(lambda x: (x * 0).sqrt()), "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "a norm by hand at zero": (
        faulty(lambda x: (x * 0).square().sum(-1, keepdim=True).sqrt().expand(-1, 3)),
        "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "a power below one at zero": (
        faulty(lambda x: (x * 0) ** 0.5), "backward", "fault", "PowBackward0", "gradient",
    ),
    "where that discards a log of zero": (
        faulty(lambda x: torch.where(x > 99, (x * 0).log(), x)),
        "backward", "fault", "LogBackward0", "gradient",
    ),
    "acos at one": (
        faulty(lambda x: torch.acos((x * 0).cos())),
        "backward", "fault", "AcosBackward0", "gradient",
    ),
    "a custom backward": (
        faulty(Overflowing.apply), "backward", "fault", "OverflowingBackward", "gradient",
    ),
    "deviation of equal values": (
        faulty(lambda x: (x * 0).var(-1, keepdim=True).sqrt() * x),
        "backward", "fault", "SqrtBackward0", "gradient",
    ),
    "the distance of a point to itself": (
        faulty(lambda x: ((x - x).square().sum(-1) ** 0.5)[:, None] + x),
        "backward", "fault", "PowBackward0", "gradient",
    ),
    "a gradient that overflows fp32": (
        faulty(lambda x: x * 0 * 1e30 * 1e30), "backward", "fault", "MulBackward0", "gradient",
    ),
    "the loss scale overflows fp16": (
        lambda: (
            Cnn(), images(),
            {"loss_fn": lambda y: y.float().square().sum() * 1e3, **HALF,
             "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**30)},
        ),
        "backward", None, "ToCopyBackward0", "gradient",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:std")  # torch warns, and goes on
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    make, phase, module, op, tensor = FAULTS[name]
    model, x, options = make()
    with find_nonfinite(model) as finder:
        run(model, x, **options)
    report = finder.report
    assert report is not None
    found = (report.phase, report.module, report.op, report.tensor)
    assert found == (phase, module, op, tensor), report
    assert hooks_of(model) == 0
    assert len(str(report).splitlines()) < 24
    assert max(map(len, str(report).splitlines())) <= 100


# Nothing is wrong


class Attention(nn.Module):
    """torch's own attention with a mask of -inf, in one of the forms that it comes in."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):  # (B, T, 8)
        size = x.shape[1]
        bools = torch.ones(size, size).triu(1).bool()
        floats = torch.zeros(size, size).masked_fill(bools, -math.inf)
        if self.form == "scaled_dot_product_attention":
            return F.scaled_dot_product_attention(x, x, x, attn_mask=floats.to(x.dtype))
        if self.form == "is_causal":
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)
        if self.form == "masked_fill":
            return (x @ x.mT).masked_fill(bools, -math.inf).softmax(-1) @ x
        if self.form == "where":
            return torch.where(bools, -math.inf, x @ x.mT).softmax(-1) @ x
        if self.form == "log of the mask":
            return (x @ x.mT + (~bools).float().log()).softmax(-1) @ x
        if self.form == "a large negative number":
            scores = (x @ x.mT + torch.where(bools, torch.finfo(torch.float32).min, 0.0)).half()
            return scores.float().softmax(-1) @ x
        mask = bools if self.form == "bool" else floats
        return self.layer(x, x, x, attn_mask=mask, need_weights=self.form == "weights")[0]


def attention(form):
    return lambda: (Attention(form), torch.randn(2, 4, 8, requires_grad=True), {})


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return Function2(model, mask), torch.randn(2, 4, 8), {}


class Function2(nn.Module):
    """A module called with a second argument."""

    def __init__(self, module, argument):
        super().__init__()
        self.module, self.argument = module, argument

    def forward(self, x):
        return self.module(x, self.argument)


def ctc():
    def loss_fn(y):
        logs = F.log_softmax(y.transpose(0, 1), -1)  # (T, B, C)
        return F.ctc_loss(logs, torch.tensor([[1, 2], [3, 3]]), (4, 4), (2, 2))

    return Transformer(), tokens(), {"loss_fn": loss_fn}


def uninitialised(x):
    room = torch.empty(1000, *x.shape)
    room.view(torch.int32).fill_(-1)  # NaN, as memory may happen to hold
    room = torch.empty_like(x)
    room.copy_(x)
    return room


def written_over(x):
    room = torch.full_like(x, math.nan)
    for row, values in enumerate(x):
        room[row] = values
    return room


def logsumexp(x):
    masked = x.masked_fill(torch.eye(2, 3).bool(), -math.inf)
    return x - masked.logsumexp(-1, keepdim=True)


def masked_log_softmax(x):
    logs = x.masked_fill(torch.eye(2, 3).bool(), -math.inf).log_softmax(-1)
    return torch.where(logs > -math.inf, logs, 0.0)


def smallest(x):
    """The distance to the nearest other row, with +inf where a row would meet itself."""
    distances = torch.cdist(x, x) + torch.eye(2) * 1.0
    return x + distances.masked_fill(torch.eye(2).bool(), math.inf).min(-1, keepdim=True).values


def power(x):
    return (x * 0) ** (x * 0 + 2)  # torch computes 0 * log(0) in backward, and replaces it


HEALTHY = {
    "cnn": lambda: (Cnn(), images(), {}),
    "transformer": lambda: (Transformer(), tokens(), {}),
    "lstm": lambda: (Rnn(), series(), {}),
    "gru": lambda: (Rnn(nn.GRU), series(), {}),
    "plain rnn": lambda: (Rnn(nn.RNN), series(), {}),
    "cell": lambda: (CellRnn(), series(), {}),
    **{
        f"attention, {form}": attention(form)
        for form in (
            "bool", "float", "weights", "scaled_dot_product_attention", "is_causal", "masked_fill",
            "where", "log of the mask", "a large negative number",
        )
    },
    "torch's encoder": encoder,
    "ctc loss": ctc,
    "memory that is not written": faulty(uninitialised),
    "a NaN that is written over": faulty(written_over),
    "logsumexp": faulty(logsumexp),
    "log_softmax of masked logits": faulty(masked_log_softmax),
    "a smallest distance": faulty(smallest),
    "torch.norm at zero": faulty(lambda x: x + (x * 0).norm(dim=-1, keepdim=True)),
    "deviation of equal values": faulty(lambda x: x + (x * 0).std(-1, keepdim=True)),
    "atan2 at zero": faulty(lambda x: torch.atan2(x * 0, x * 0)),
    "zero to a power that is learned": faulty(power),
    "a logarithm that is not used": faulty(
        lambda x: torch.where(x > 99, x.detach().clamp_max(0).log(), x)
    ),
    "nan_to_num": faulty(lambda x: torch.nan_to_num(torch.full_like(x, math.nan)) + x),
    "sigmoid of inf": faulty(lambda x: torch.sigmoid(x.detach().sign() * math.inf) + x),
    "large sums": faulty(lambda x: (x.sign() * 0 + 3e38).clamp_max(1.0) * x),
    "float64": lambda: (Cnn().double(), images().double(), {}),
    "complex": faulty(lambda x: torch.fft.ifft(torch.fft.fft(x) * 2j).imag),
    "sparse": lambda: (nn.Embedding(7, 3, sparse=True), tokens(), {}),
    "NaN in data that are cleaned": lambda: (
        nn.Sequential(Function(torch.nan_to_num), nn.Linear(3, 1)),
        torch.tensor([[math.nan, 1.0, 2.0]]),
        {},
    ),
    "a mask that is an argument": lambda: (
        nn.Sequential(Function(lambda x: x.softmax(-1)), nn.Linear(3, 1)),
        torch.tensor([[-math.inf, 1.0, 2.0]]),
        {},
    ),
    "masked logits as the output": lambda: (
        nn.Sequential(nn.Linear(3, 3), Function(lambda x: x + torch.tensor([0, 0, -math.inf]))),
        torch.randn(2, 3),
        {"loss_fn": lambda y: F.cross_entropy(y, torch.tensor([0, 1]))},
    ),
    "a best loss so far": lambda: (
        Cnn(), images(), {"loss_fn": lambda y: torch.minimum(torch.tensor(math.inf), y.mean())},
    ),
}  # fmt: skip


RUNS = [
    (name, autocast)
    for name in HEALTHY
    for autocast in (None, torch.bfloat16, torch.float16)
    if (name, autocast) != ("lstm", torch.float16)  # which most CPUs have no kernel for
]


@pytest.mark.parametrize(("name", "autocast"), RUNS)
def test_nothing_is_reported_where_nothing_is_wrong(name, autocast):
    model, x, options = HEALTHY[name]()
    with find_nonfinite(model) as finder:
        run(model, x, autocast=autocast, **options)
        torch.optim.Adam(model.parameters(), foreach=True).step() if name == "cnn" else None
    assert finder.report is None, finder.report
    assert all(_dense(p.grad).isfinite().all() for p in model.parameters() if p.grad is not None)
    assert hooks_of(model) == 0


def _dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


# What it says, and what it leaves behind


def find(model, x, **options):
    with find_nonfinite(model) as finder:
        run(model, x, **options)
    return finder.report


def test_the_report_has_what_one_needs():
    def fault(x):
        return torch.log(x * torch.tensor([0.0, 1.0, -1.0])).nan_to_num(nan=0.0, neginf=-math.inf)

    model = Module(fault)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.copy_(torch.tensor([5.0, 2.0, 3.0]))
    report = find(model, torch.randn(2, 3))
    assert (report.phase, report.module, report.module_type) == ("forward", "fault", "Function")
    assert (report.call, report.op, report.kernel, report.tensor) == (1, "log", "log", "output")
    value = report.value
    assert (value.dtype, value.shape, value.values) == (torch.float32, (2, 3), 6)
    assert (value.nan, value.inf, value.neg_inf) == (2, 0, 2)
    assert value.share == pytest.approx(4 / 6)
    assert value.low == value.high == pytest.approx(math.log(2))
    (given,) = report.inputs
    assert (given.name, given.low, given.high, given.share) == ("self", -3.0, 2.0, 0.0)
    assert report.line.startswith("test_nonfinite.py:")
    assert "fault: return torch.log(x * torch.tensor" in report.line
    assert report.reached in ("the output of the model", "a single number outside the model")
    assert "clamp_min" in report.advice
    text = str(report)
    assert text.startswith("NaN and -inf made in forward by log: 'fault' (Function)")
    assert repr(report) == text
    for part in ("66.7 % non-finite (2 NaN, 2 -inf)", "from -3 to 2", report.line, report.advice):
        assert part in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attention scores that overflow fp16", "65504"),
        ("attention scores that overflow fp16", "scaled_dot_product_attention"),
        ("a row of attention that is masked everywhere", "masked everywhere"),
        ("division by a zero norm", "eps"),
        ("exp that overflows", "subtract the largest"),
        ("the mean of no values", "no values"),
        ("all targets ignored", "ignore_index"),
        ("inf in a weight", "last good checkpoint"),
        ("NaN in a running mean", "reset_running_stats"),
        ("NaN in the images", "Look at the data"),
        ("NaN in the target", "targets"),
        ("sqrt at zero", "sqrt(x + eps)"),
        ("where that discards a log of zero", "torch.where"),
        ("a cast to fp16 that overflows", "bf16"),
    ],
)
def test_the_advice_fits_the_fault(name, words):
    model, x, options = FAULTS[name][0]()
    report = find(model, x, **options)
    assert words in report.advice
    assert report.advice[0].isupper()


def test_a_mask_that_softmax_could_not_make_finite_is_named():
    model, x, options = FAULTS["a row of attention that is masked everywhere"][0]()
    assert find(model, x, **options).placed_by == "buffer 'blocks.0.mask'"


def test_of_a_shared_module_the_call_is_told():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Function(lambda x: (x - 1).log())
            self.b = self.a
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.b(self.a(x * self.weight))

    for x, call in ((torch.full((2,), 2.0), 2), (torch.zeros(2), 1)):
        report = find(Twice(), x)
        assert (report.module, report.op, report.call) == ("a", "log", call)
    model = CellRnn()
    model.cell = nn.RNNCell(3, 4, nonlinearity="relu")
    x = series()
    x[:, 3] = 3e38
    model.cell.weight_ih.data.fill_(100.0)
    report = find(model, x)
    assert (report.module, report.call) == ("cell", 4)
    assert "call 4" in str(report)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("fault", "phase", "op"),
    [
        (lambda x: (x * 0).log().exp().log(), "forward", "log"),
        (lambda x: (x * 0).sqrt(), "backward", "SqrtBackward0"),
        (lambda x: torch.where(x > 99, (x * 0).log(), x), "backward", "LogBackward0"),
        (lambda x: x, None, None),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activation_checkpointing_changes_nothing(reentrant, fault, phase, op, dtype):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Module(fault)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    report = find(Checkpointed(), torch.randn(2, 3, requires_grad=True), autocast=dtype)
    if phase is None:
        assert report is None
    else:
        assert (report.phase, report.module, report.op) == (phase, "inner.fault", op), report
        assert report.call == 1


def test_the_loss_scale_is_told_and_not_called_a_fault():
    model, x, options = FAULTS["the loss scale overflows fp16"][0]()
    report = find(model, x, **options)
    assert report.loss_scale == 2.0**30
    assert "GradScaler is there for" in report.advice
    assert "loss scale" in str(report)
    assert report.kernel == "_to_copy"
    plain = FAULTS["sqrt at zero"][0]()
    report = find(*plain[:2], **plain[2])
    assert report.loss_scale is None
    assert "GradScaler" not in str(report)


def test_a_step_with_scaler_and_optimizers_that_skips_is_found_once():
    model, x, options = FAULTS["the loss scale overflows fp16"][0]()
    scaler, optimizer = options["scaler"], torch.optim.SGD(model.parameters(), lr=0.1)
    with find_nonfinite(model) as finder:
        for _ in range(2):
            run(model, x, **options)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (finder.report.phase, finder.report.op) == ("backward", "ToCopyBackward0")
    assert finder.report.loss_scale == 2.0**30  # that of the first step


def test_raise_on_first_raises_in_forward_and_in_backward():
    for name in ("log of zero", "sqrt at zero", "inf in a weight", "all targets ignored"):
        model, x, options = FAULTS[name][0]()
        finder = find_nonfinite(model, raise_on_first=True)
        with pytest.raises(NumericsError, match="find_nonfinite:\n"), finder:
            run(model, x, **options)
        assert (finder.report.phase, finder.report.op) == FAULTS[name][1:4:2]
        assert hooks_of(model) == 0


def test_gradients_without_backward_are_watched_too():
    model, x, _ = FAULTS["sqrt at zero"][0]()
    with find_nonfinite(model) as finder:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert (finder.report.module, finder.report.op) == ("fault", "SqrtBackward0")
    assert finder.report.reached.startswith("the gradient of first.")
    x = torch.zeros(2, 3, requires_grad=True)
    model = Function(torch.sqrt)  # without parameters
    with find_nonfinite(model) as finder:
        model(x).sum().backward()
    assert finder.report.reached == "the gradient of argument 0"


def test_the_backward_of_a_backward_is_named_after_its_module():
    for function, module in ((lambda x: (x * 0).abs() ** 1.5, "fault"), (lambda x: x**3, None)):
        model, x = Module(function), torch.randn(2, 3, requires_grad=True)
        with find_nonfinite(model) as finder:
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            assert finder.report is None
            gradient.square().sum().backward()
        assert (finder.report and finder.report.module) == module


def test_a_lazy_module_is_watched_once_it_has_its_parameters():
    for factor in (1.0, 0.0):
        model = nn.Sequential(
            nn.LazyLinear(3), Function(lambda x, factor=factor: (x * factor).abs().sqrt())
        )
        report = find(model, torch.randn(2, 3))
        assert (report and report.op) == (None if factor else "SqrtBackward0")


def test_a_gradient_left_from_before_is_told_when_it_is_added_to():
    model, x = Cnn(), images()
    model.head.weight.grad = torch.full_like(model.head.weight, math.inf)
    report = find(model, x)
    assert (report.phase, report.tensor, report.name) == ("before", "gradient", "head.weight")
    assert "zero_grad" in report.advice
    with find_nonfinite(model) as finder:
        model.zero_grad()
        run(model, x)
    assert finder.report is None


def test_a_part_of_the_model_and_passes_without_gradients():
    model = Transformer()
    model.blocks[0].qkv.weight.data.fill_(math.nan)
    with find_nonfinite(model) as finder:
        model.blocks[0](torch.randn(2, 4, 8))
    assert finder.report.module == "blocks.0.qkv"
    for context in (torch.no_grad(), torch.inference_mode()):
        model = Module(lambda x: (x * 0).log().neg())
        with find_nonfinite(model) as finder, context:
            model(torch.randn(2, 3))
        assert (finder.report.module, finder.report.op) == ("fault", "log")


@pytest.mark.parametrize("data", [Cnn, Transformer, Rnn])
def test_results_are_the_same_to_the_last_bit(data):
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = data()
        x = {Cnn: images, Transformer: tokens, Rnn: series}[data]()
        with find_nonfinite(model) if watched else contextlib.nullcontext():
            run(model, x)
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_nothing_stays_behind_after_an_error():
    def broken(x):
        raise ZeroDivisionError

    model = Module(broken)
    finder = find_nonfinite(model)
    assert hooks_of(model) == 0  # nothing before it is entered
    with contextlib.suppress(ZeroDivisionError), finder:
        assert hooks_of(model) > 0
        model(torch.randn(2, 3))
    assert hooks_of(model) == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert finder.report is None
    model.fault.function = torch.log
    model(torch.randn(2, 3).requires_grad_()).sum().backward()  # NaN, and nobody looks
    assert finder.report is None


def test_an_error_that_the_model_catches_does_not_confuse_the_names():
    def broken(x):
        raise ZeroDivisionError

    class Catching(Module):
        def forward(self, x):
            with contextlib.suppress(ZeroDivisionError):
                self.fault(x)
            return self.last(self.first(x).mul(0).log())

    report = find(Catching(broken), torch.randn(2, 3))
    assert (report.module, report.op) == ("", "log")
    assert report.where == "the model itself (Catching)"


def test_it_can_be_used_again_and_then_starts_anew():
    model, x, options = FAULTS["log of zero"][0]()
    finder = find_nonfinite(model)
    with finder:
        run(model, x, **options)
    assert finder.report is not None
    model.fault.function = torch.tanh
    model.zero_grad()
    with finder:
        assert finder.report is None
        run(model, x, **options)
    assert finder.report is None


def test_wrong_use_is_refused():
    model = Cnn()
    with find_nonfinite(model) as finder:
        for other in (finder, find_nonfinite(model), find_nonfinite(Cnn())):
            with pytest.raises(NumericsError, match="cannot be nested"):
                other.__enter__()
        run(model, images())
    assert finder.report is None
    assert hooks_of(model) == 0
    with pytest.raises(NumericsError, match=r"must be an nn\.Module, not function"):
        find_nonfinite(lambda x: x)
    with pytest.raises(NumericsError, match="with statement"):
        find_nonfinite(model).__exit__(None, None, None)
